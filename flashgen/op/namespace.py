"""``torch.ops.flashgen``: finds the operators of exported programs when they are asked for, or says what to do.

In: a name that ``torch.export.load`` looks up. Out: its operator, made of what this machine remembers of it. C++ (an
AOTInductor package) asks nobody: operators must be there before it loads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from flashgen.ir.fingerprint import DIGITS
from flashgen.op.registered import NAMESPACE, registered_names

_NAME = re.compile(rf"(?P<operator>(?P<spec>\w+)_[0-9a-f]{{{DIGITS}}})(_varlen|_decode|_f8)?(_backward)?")
_Base: Any = type(getattr(torch.ops, NAMESPACE))


class Namespace(_Base):  # type: ignore[misc]
    """PyTorch's namespace, which asks once more for a name that it does not know."""

    __module__ = _Base.__module__  # names of operators begin with it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = _NAME.fullmatch(name)
            if found is None or found["operator"] in registered_names():
                raise
            if self._recall(found["operator"]):
                return super().__getattr__(name)
            reason = _what_to_do(found["operator"], found["spec"])
        # torch.export.load keeps what is raised here to itself, and says "check the warnings above".
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
        raise AttributeError(reason)


def connect(recall: Callable[[str], bool]) -> None:
    """Let ``recall`` make an operator that is not there; it says whether it could."""
    namespace: Any = getattr(torch.ops, NAMESPACE)
    namespace._recall = recall
    namespace.__class__ = Namespace


def _what_to_do(name: str, spec: str) -> str:
    others = [each for each in registered_names() if each.startswith(f"{spec}_") and _NAME.fullmatch(each)]
    there = f" ({', '.join(others)} is there: other lines, constants or another backend)" if others else ""
    return (
        f"torch.ops.{NAMESPACE}.{name} is the operator of an attention '{spec}' that was not made in this process"
        f"{there}. Before the program that calls it is loaded, import the package that `flashgen build` wrote for "
        f"'{spec}', or call flashgen.load(…) for its spec, with the constants and the backend that it was exported with"
    )
