"""The ops that are registered with ``torch.library``, by name and identity."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flashgen.ir.fingerprint import DIGITS
from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.engine import Engine
from flashgen.op.mapping import Batch
from flashgen.op.signature import Signature

NAMESPACE = "flashgen"


@dataclass(frozen=True, eq=False)
class Registered:
    """A registered op: its two operators, and the engine of its plain calls.

    ``batch`` says where its tensors run along the batch. ``first`` is the op whose engine the operators run, where that
    is another one.
    """

    name: str
    signature: Signature
    engine: Engine
    forward: OpOverload[..., Any]
    backward: OpOverload[..., Any]
    batch: Batch
    first: Registered | None = None

    @property
    def derivatives(self) -> tuple[str, ...]:
        """What computes tangents, derivatives of gradients, and the samples of ``torch.vmap``, in words."""
        return (
            f"tangents: {self.engine.tangents}",
            f"derivatives of gradients and of tangents: {self.engine.tangent_gradients}",
            f"torch.vmap: {self.batch.describe()}",
        )

    def attend_below_autograd(self, tensors: Tensors, rest: Rest) -> Attended:
        """The forward operator without its autograd; arguments and results are those of ``Engine.attend``."""
        with torch._C._AutoDispatchBelowAutograd():
            found = self.forward(*tensors, *rest[0], rest[1])
        return found if self.signature.has_lse else (found, None, None)

    def backward_below_autograd(self, *args: Any) -> list[Tensor]:
        """The backward operator without its autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            found: list[Tensor] = self.backward(*args)
        return found


@functools.cache
def registry() -> dict[str, dict[str, Registered]]:
    """What is registered, by name and identity, as torch.library needs it: for the life of the process."""
    return {}


def first_of(name: str) -> Registered:
    """The op whose engine the operators of this name run."""
    return next(iter(registry()[name].values()))


def registered_names() -> tuple[str, ...]:
    """The names of the operators that are there, and of one that is about to be."""
    return tuple(registry())


_NAME = re.compile(rf"(?P<operator>(?P<spec>\w+)_[0-9a-f]{{{DIGITS}}})(_varlen|_decode|_f8)?(_backward)?")
_Base: Any = type(getattr(torch.ops, NAMESPACE))


class Namespace(_Base):  # type: ignore[misc]
    """PyTorch's namespace, which asks once more for a name that it does not know, as ``torch.export.load`` looks one up.

    C++ (an AOTInductor package) asks nobody: operators must be there before it loads.
    """

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
