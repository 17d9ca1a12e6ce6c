"""``torch.vmap`` of an op and its derivatives: what is mapped becomes a part of the batch, else a loop.

In: a function of tensors, each with its axis along the batch, and the dimensions that are mapped. Out: its results,
mapped in front. Samples become entries of the batch where entries do not depend on one another. Each sample is computed
by itself where a spec reads the number of an entry, drops pairs by it, or where a tensor without a batch is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from flashgen.analysis.batch import batch_axes
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.dense import DENSE
from flashgen.op.call import Rest
from flashgen.op.signature import Signature

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
