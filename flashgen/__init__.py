"""flashgen: a compiler from attention specs (``.attn``) to PyTorch operators.

    op = flashgen.load("specs/gemma2_local.attn")
    o = op(q, k, v)

``load`` and ``loads`` compile a spec and return its operator; ``build`` writes it as a Python package;
``check`` returns its diagnostics. A wrong spec raises ``SpecError``, whose text is what the command line would print.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.diagnostics import SpecError
from flashgen.op.loading import connect, load, loads, open_package
from flashgen.plan.notebook import DRAWINGS
from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen.compiler.building import build_file as build
    from flashgen.compiler.pipeline import check_file as check

__all__ = ["SpecError", "__version__", "build", "check", "load", "loads", "open_package"]


def __getattr__(name: str) -> Any:
    """``build`` and ``check`` import every target; an op imports its own alone."""
    if name == "build":
        from flashgen.compiler.building import build_file

        return build_file
    if name == "check":
        from flashgen.compiler.pipeline import check_file

        return check_file
    raise AttributeError(f"module 'flashgen' has no attribute '{name}'")


def _html(of: str, thing: Any) -> Any:
    from flashgen.picture import html

    return getattr(html, of)(thing)


connect()
DRAWINGS.update({"op": partial(_html, "of_op"), "plans": partial(_html, "of_plans")})
