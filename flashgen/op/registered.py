"""The ops that are registered with ``torch.library``, by name and identity, and what they give for fake tensors."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_compiling

from flashgen.ir.fingerprint import DIGITS
from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.conversion import check_device
from flashgen.op.engine import Engine
from flashgen.op.mapping import Batch
from flashgen.op.signature import Signature
from flashgen.op.values import layout_like

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
    """PyTorch's namespace, which asks once more for a name that it does not know: ``torch.export.load`` looks one up.

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


# Before 2.7 PyTorch does not tell an export from other compilations.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", is_compiling)


def fake_forward(
    signature: Signature, exported: Callable[[], None] | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Any:
    """o, or o, lse and its parts, without numbers; ``exported`` is called where a program is exported."""
    if exported is not None and _is_exporting():
        exported()
    kind = signature.kind
    if not q.dim() == k.dim() == v.dim() == kind.dims:
        raise ValueError(f"q, k and v have {kind.dims} dimensions")
    # One tensor on meta among real ones comes here, too.
    captured = [(f"tensor '{declared.name}'", x) for declared, x in zip(signature.tensors, others, strict=False)]
    for name, tensor in (("'k'", k), ("'v'", v), *captured):
        check_device(name, tensor, q.device)
    end = signature.tensor_arguments - 3
    scalars, own = others[len(signature.tensors) : end - len(kind.tensors)], others[end - len(kind.tensors) : end]
    numbers = [("a param, 'seed' or 'dropout_p'", x) for x in scalars]
    numbers += [(f"'{name}'", x) for name, x in zip(kind.tensors, own, strict=True)]
    for name, x in numbers:
        if x is not None and x.is_meta and not q.is_meta:
            raise ValueError(f"{name} is on meta, but 'q' is on {q.device}")
    o = q.new_empty_strided(*layout_like(q, (*q.shape[:-1], v.shape[-1])), dtype=signature.o or q.dtype)
    if not signature.has_lse:
        return o
    rows = kind.rows(q)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return o, lse, q.new_empty((*rows, 2), dtype=torch.float32)


def fake_backward(signature: Signature, *args: Any) -> list[Tensor]:
    """The gradients that are needed, without numbers."""
    start = 5 if signature.has_lse else 1
    inputs: Sequence[Any] = args[start : start + signature.inputs]
    rows, captured = inputs[:3], inputs[3:]
    found = [x.new_empty_strided(*layout_like(x, x.shape)) for x, need in zip(rows, args[-1], strict=False) if need]
    return found + [x.new_empty(x.shape) for x, need in zip(captured, args[-1][3:], strict=True) if need]
