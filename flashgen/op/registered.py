"""The ops that are registered with ``torch.library``, by name and identity, what they give for fake tensors, and
``torch.vmap`` of them and their derivatives: what is mapped becomes a part of the batch, else a loop.

Samples become entries of the batch where entries do not depend on one another. Each sample is computed by itself where
a spec reads the number of an entry, drops pairs by it, or where a tensor without a batch is mapped.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._ops import OpOverload
from torch.compiler import is_compiling

from flashgen.analysis.captured import batch_axes
from flashgen.ir.fingerprint import DIGITS
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.dense import DENSE
from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.conversion import check_device
from flashgen.op.engine import Engine
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import layout_like

# The axis of the batch; None: there is none.
Axes = Sequence[int | None]


@dataclass(frozen=True)
class Batch:
    """The batch axes of an op's tensors and results. ``inputs`` None: samples cannot share a batch."""

    inputs: tuple[int | None, ...] | None
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, spec: AttentionSpec, signature: Signature) -> Batch:
        """The batch of an op. Ragged batches and caches have none: their lengths say whose the rows are."""
        outputs = (0, 0, 0) if signature.has_lse else (0,)
        axes = batch_axes(spec) if signature.kind is DENSE else None
        if axes is None:
            return cls(None, outputs)
        others = signature.tensor_arguments - 3 - len(spec.tensors)
        return cls((0, 0, 0, *(axes[tensor.name] for tensor in spec.tensors), *(None,) * others), outputs)

    def describe(self) -> str:
        """What becomes of samples, in words."""
        if self.inputs is None:
            return "one sample after another, as results depend on the number of an entry (b) or of all (B)"
        return "samples become a part of the batch (B), but where they drop pairs or capture what has none"


def folded_inputs(batch: Batch, signature: Signature, tensors: Sequence[Any], rest: Rest) -> Axes | None:
    """The batch axes of a call's tensors; None where other entries in the batch would change its results."""
    offsets = rest[0]
    seed = tensors[signature.inputs] if signature.has_dropout else None
    return batch.inputs if seed is None and offsets[2] == 0 and offsets[6] is None else None


def mapped(
    call: Callable[..., Sequence[Tensor]],
    info: Any,
    dims: Sequence[int | None],
    values: Sequence[Any],
    axes: tuple[Axes, Axes] | None,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The results of ``call(*values)``, mapped in front, and that they are.

    ``axes`` are those of the values and of the results; None where samples cannot be a part of the batch.
    """
    count = info.batch_size
    # All that is mapped has a batch, and so have all results, which differ from sample to sample.
    if (
        axes is not None
        and count > 0
        and None not in axes[1]
        and all(axis is not None or dim is None for axis, dim in zip(axes[0], dims, strict=True))
    ):
        folded = [
            x if axis is None or x is None else _folded(x, dim, axis, count)
            for x, dim, axis in zip(values, dims, axes[0], strict=True)
        ]
        found = zip(call(*folded), axes[1], strict=True)
        results = tuple(_unfolded(x, axis or 0, count) for x, axis in found)
        return results, (0,) * len(results)
    if count == 0:  # one sample of zeros says what results are like; sums of nothing keep the graph
        one = call(*(x if dim is None else x.sum(dim, dtype=x.dtype) for x, dim in zip(values, dims, strict=True)))
        return tuple(x[None, ...][:0] for x in one), (0,) * len(one)
    each = [
        call(*(x if dim is None else x.select(dim, n) for x, dim in zip(values, dims, strict=True)))
        for n in range(count)
    ]
    stacked = tuple(torch.stack(one) for one in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)


def has_samples(values: Sequence[Any]) -> bool:
    """Whether some tensors are samples of PyTorch's first vmap, which ``is_grads_batched`` and ``vectorize`` use."""
    return any(map(_is_sample, values))


def _is_sample(x: object) -> bool:
    return isinstance(x, Tensor) and is_legacy_batchedtensor(x)


def by_samples(call: Callable[..., Sequence[Tensor]], values: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of ``call(*values)``, with samples of PyTorch's first vmap among the values, by ``torch.vmap``.

    Raises ``NotImplementedError`` for a first vmap within another: nothing says whose samples the tensors are.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level != 1:
        raise NotImplementedError(
            "is_grads_batched or vectorize=True within another such call: use torch.func.vmap, which takes any number"
        )
    dims = tuple(0 if _is_sample(x) else None for x in values)
    own = [x if dim is None else torch._remove_batch_dim(x, level, 1, 0) for x, dim in zip(values, dims, strict=True)]
    found = torch.vmap(lambda *each: tuple(call(*each)), dims)(*own)
    return tuple(torch._add_batch_dim(x, 0, level) for x in found)


def _folded(x: Tensor, dim: int | None, axis: int, count: int) -> Tensor:
    """Samples beside one another along the batch; a tensor that is not mapped is repeated."""
    if dim is None:
        return x.unsqueeze(axis).expand(*x.shape[:axis], count, *x.shape[axis:]).flatten(axis, axis + 1)
    return x.movedim(dim, axis).flatten(axis, axis + 1)


def _unfolded(x: Tensor, axis: int, count: int) -> Tensor:
    return x.view(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]).movedim(axis, 0)


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
