"""flashgen: a compiler from attention specs (``.attn``) to PyTorch operators.

    op = flashgen.load("specs/gemma2_local.attn")
    o = op(q, k, v)

``load`` and ``loads`` compile a spec and return its operator; ``build`` writes it as a Python package;
``check`` returns its diagnostics. A wrong spec raises ``SpecError``, whose text is what the command line would print.
"""

from typing import TYPE_CHECKING, Any

from flashgen.diagnostics import SpecError
from flashgen.op import operators
from flashgen.op.loading import load, loads, open_package
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


def _html_of_op(op: Any) -> str:
    from flashgen.picture.html import of_op

    return of_op(op)


def _html_of_plans(plans: Any) -> str:
    from flashgen.picture.html import of_plans

    return of_plans(plans)


operators.connect()
DRAWINGS.update({"op": _html_of_op, "plans": _html_of_plans})
