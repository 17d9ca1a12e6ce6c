"""flashgen: a compiler from attention specs (``.attn``) to PyTorch operators.

    op = flashgen.load("specs/gemma2_local.attn")
    o = op(q, k, v)

``load`` and ``loads`` compile a spec and return its operator; ``build`` writes it as a Python package;
``check`` returns its diagnostics. A wrong spec raises ``SpecError``, whose text is what the command line would print.
"""

from flashgen import operators
from flashgen.building import build_file as build
from flashgen.diagnostics import SpecError
from flashgen.pipeline import check_file as check
from flashgen.pipeline import load, loads, open_package
from flashgen.version import __version__

operators.connect()

__all__ = ["SpecError", "__version__", "build", "check", "load", "loads", "open_package"]
