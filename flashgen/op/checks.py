"""Checks of calls, by kind: the shapes of q, k, v and captured tensors, their types, and indices of captured tensors.

In: tensors and numbers of a call, by its kind. Out: its shard, the sizes that the spec reads, and values of fields that
follow. ``ValueError`` and ``TypeError`` name the argument, what was expected and what came. ``call.py`` reads
``CHECKS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.bounds import IndexProof, IndexStatus, prove_indices
from flashgen.analysis.index_checks import check_index
from flashgen.ir.expr import Expr, index, literal, size, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.ir.text import text
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op.conversion import Offsets, check_device
from flashgen.op.signature import ELEMENTS, F8, TORCH_DTYPES
from flashgen.reference.dense import constant_number
from flashgen.reference.shard import Shard

# A shard, and the sizes that a spec reads.
Sizes = tuple[Shard, dict[str, int]]


def check_shapes(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], offsets: Offsets
) -> Sizes:
    """The shard and the sizes of a dense call. Raises ``ValueError`` where shapes, devices or offsets do not fit."""
    for name, tensor, form in (("q", q, "[B, H, Nq, D]"), ("k", k, "[B, Hkv, Nk, D]"), ("v", v, "[B, Hkv, Nk, Dv]")):
        if tensor.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(tensor.shape)}; {form} is expected")
        check_device(f"'{name}'", tensor, q.device)
    batch, heads, q_len, qk = q.shape
    kv_heads, kv_len = k.shape[1:3]
    match("k", k, 0, batch, "the batch size of q")
    match("k", k, 3, qk, "the head dimension of q")
    match("v", v, 0, batch, "the batch size of q")
    match("v", v, 1, kv_heads, "the number of heads of k")
    match("v", v, 2, kv_len, "the length of k")
    _check_heads(heads, kv_heads)
    shard = Shard(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        q_start=offsets[0], kv_start=offsets[1], b_start=offsets[2], h_start=offsets[3],
        q_total=offsets[4], kv_total=offsets[5], b_total=offsets[6], h_total=offsets[7],
    )  # fmt: skip
    return _sized(spec, shard, q, v, tensors)


def check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ``ValueError`` where q, k and v of a ragged batch have no rows of heads."""
    if q.dim() == k.dim() == v.dim() == 3:
        return
    for name, x, form in (("q", q, "[Tq, H, D]"), ("k", k, "[Tk, Hkv, D]"), ("v", v, "[Tk, Hkv, Dv]")):
        if x.dim() != 3:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected, all sequences in a row")


def check_ragged(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], numbers: Sequence[Any]
) -> Sizes:
    """The shard and the sizes of a ragged batch; ``numbers`` end with its longest lengths and its sequences' count."""
    b_start, h_start, b_total, h_total, max_q, max_k, count = numbers
    for name, tensor in (("k", k), ("v", v)):
        check_device(f"'{name}'", tensor, q.device)
    match("k", k, 2, q.shape[2], "the head dimension of q")
    match("v", v, 1, k.shape[1], "the number of heads of k")
    match("v", v, 0, k.shape[0], "the rows of k")
    heads, kv_heads = q.shape[1], k.shape[1]
    _check_heads(heads, kv_heads)
    shard = Shard(
        batch=count, heads=heads, kv_heads=kv_heads, q_len=max_q, kv_len=max_k,
        b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
    )  # fmt: skip
    return _sized(spec, shard, q, v, tensors)


def check_cached(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], numbers: Sequence[Any]
) -> Sizes:
    """The shard and the sizes of sequences that fill a cache; the fifth of ``numbers`` is its room in rows."""
    b_start, h_start, b_total, h_total, capacity = numbers[:5]
    heads, kv_heads = q.shape[1], k.shape[1]
    _check_heads(heads, kv_heads, "the cache")
    shard = Shard(
        batch=q.shape[0], heads=heads, kv_heads=kv_heads, q_len=q.shape[2], kv_len=capacity,
        b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
        q_total=max(capacity, q.shape[2]), kv_total=max(capacity, q.shape[2]),
    )  # fmt: skip
    return _sized(spec, shard, q, v, tensors)


def _sized(spec: AttentionSpec, shard: Shard, q: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Sizes:
    shard.check()
    if reads_key_heads(spec):
        shard.check_groups()
    sizes = shard.sizes(q.shape[-1], v.shape[-1])
    for declared, tensor in zip(spec.tensors, tensors, strict=True):
        check_captured(declared, tensor, sizes, q.device)
    return shard, sizes


def _check_heads(heads: int, kv_heads: int, whose: str = "k") -> None:
    if (kv_heads == 0 and heads > 0) or (kv_heads > 0 and heads % kv_heads):
        raise ValueError(f"q has {heads} heads and {whose} has {kv_heads}; H must be a multiple of Hkv")


@functools.lru_cache(maxsize=256)
def reads_key_heads(spec: AttentionSpec) -> bool:
    """Whether a spec reads hkv or Hkv anywhere."""
    read = [*spec.expressions, *(each for tensor in spec.tensors for each in tensor.shape)]
    read += [each.default for each in spec.params if each.default is not None]
    read += [] if spec.dropout is None else [spec.dropout]
    read += [] if spec.select is None else spec.select.indices
    return not {index("hkv"), size("Hkv")}.isdisjoint(walk(*read))


def match(name: str, tensor: Tensor, axis: int, wanted: int, what: str) -> None:
    """Raise ``ValueError`` where a dimension is not ``wanted``, which ``what`` explains."""
    if tensor.shape[axis] != wanted:
        raise ValueError(f"'{name}' has shape {list(tensor.shape)}; dimension {axis} must be {wanted}, {what}")


def check_captured_type(declared: CapturedTensor, tensor: Tensor) -> None:
    """Raise ``TypeError`` where a captured tensor has another type than is declared."""
    wanted = TORCH_DTYPES[declared.element]
    if tensor.dtype is not wanted:
        raise TypeError(f"tensor '{declared.name}' is {tensor.dtype}; the spec declares {declared.element} ({wanted})")


def check_captured(declared: CapturedTensor, tensor: Tensor, sizes: Mapping[str, int], device: torch.device) -> None:
    """Raise ``ValueError`` where a captured tensor has another shape than is declared, or lies elsewhere."""
    name = declared.name
    check_device(f"tensor '{name}'", tensor, device)
    values: dict[Expr, Expr] = {size(each): literal(value) for each, value in sizes.items()}
    wanted = [int(constant_number(substitute(each, values))) for each in declared.shape]
    if list(tensor.shape) != wanted:
        shape = ", ".join(text(each) for each in declared.shape)
        raise ValueError(f"tensor '{name}' has shape {list(tensor.shape)}; the spec declares [{shape}] = {wanted}")


# Types ----------------------------------------------------------------------------------------------------------------

Types = Sequence[torch.dtype]


def _of_8_bits(spec: AttentionSpec, dtypes: Types, *tensors: Tensor) -> Sequence[Tensor]:
    given = {name: x.dtype for name, x in zip("qkv", tensors, strict=True)}
    odd = next((name for name, dtype in given.items() if dtype is not F8), None)
    if odd is not None:
        narrow = next(name for name, dtype in given.items() if dtype is F8)
        raise TypeError(
            f"'{odd}' is {given[odd]}, but '{narrow}' is {F8}; q, k and v are of 8 bits all three, or none of them "
            "(op.decode takes k and v alone, as caches)"
        )
    _check_takes_f8(spec, dtypes, "q, k and v")
    return ()


def _over_cache(spec: AttentionSpec, dtypes: Types, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """A cache of 8 bits goes with q of any type of the op."""
    if k.dtype is not F8 and v.dtype is not F8:
        return q, k, v
    if k.dtype is not v.dtype:
        raise TypeError(f"'k_cache' is {k.dtype}, but 'v_cache' is {v.dtype}; both are of 8 bits, or neither")
    _check_takes_f8(spec, dtypes, "'k_cache' and 'v_cache'")
    return (q,)


def _check_takes_f8(spec: AttentionSpec, dtypes: Types, what: str) -> None:
    if not spec.takes_f8:
        known = ", ".join(map(str, dtypes))
        raise TypeError(f"{what} are {F8}; '{spec.name}' is built for {known}: name f8e4m3 in its dtype statement, too")


def _rows_of_all(shard: Shard, q: Tensor, k: Tensor, _numbers: Sequence[Any]) -> Mapping[str, float]:
    """Kernels of ragged batches get the rows of all sequences as the length."""
    return {"q_len": q.shape[0], "kv_len": k.shape[0], "q_most": shard.q_len, "kv_most": shard.kv_len}


def _sizes_of_cache(shard: Shard, _q: Tensor, k: Tensor, numbers: Sequence[Any]) -> Mapping[str, float]:
    columns, splits = numbers[5:]
    group_rows = shard.q_len * (shard.heads // max(shard.kv_heads, 1))
    known = {"cache_entries": k.shape[0], "cache_rows": k.shape[2], "table_columns": columns}
    return known | {"group_rows": group_rows, "key_element": ELEMENTS[k.dtype], "splits": splits}


@dataclass(frozen=True)
class Checks:
    """The checks of a kind of call, which ``CallChecker`` calls, and the values of fields that follow.

    ``shapes`` gives the shard and the sizes, by q, k, v, captured tensors and numbers. ``of_one_type`` gives the
    tensors among q, k and v that have to share one of the op's types, given as ``dtypes``; it checks the other tensors.
    ``fixed`` gives fields of ``struct Arguments`` that only this kind has, or that mean something else here.
    """

    shapes: Callable[[AttentionSpec, Tensor, Tensor, Tensor, Sequence[Tensor], Any], Sizes] = check_shapes
    of_one_type: Callable[[AttentionSpec, Types, Tensor, Tensor, Tensor], Sequence[Tensor]] = lambda *given: given[2:]
    fixed: Callable[[Shard, Tensor, Tensor, Sequence[Any]], Mapping[str, float]] = lambda *_given: {}
    keys_and_values: tuple[str, str] = ("k", "v")


# By the names of kinds. Kinds that are not here are checked as dense calls are.
CHECKS: Mapping[str, Checks] = {
    RAGGED.name: Checks(shapes=check_ragged, fixed=_rows_of_all),
    CACHED.name: Checks(check_cached, _over_cache, _sizes_of_cache, keys_and_values=("k_cache", "v_cache")),
    EIGHT_BITS.name: Checks(of_one_type=_of_8_bits),
}


_MOST_REMEMBERED = 512


class Indices:
    """The indices of a spec that are proved for the sizes of each call, and for the values of its params."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._proofs: dict[HeadDim, tuple[IndexProof, ...]] = {}
        self._asking: dict[HeadDim, bool] = {}
        self._checked: set[object] = set()

    def of(self, head_dim: HeadDim) -> tuple[IndexProof, ...]:
        """Their proofs."""
        if not self._spec.tensors:
            return ()
        if head_dim not in self._proofs:
            proofs = prove_indices(self._spec, head_dim)
            self._proofs[head_dim] = tuple(each for each in proofs if each.status is IndexStatus.CALL_TIME)
        return self._proofs[head_dim]

    def check(
        self, head_dim: HeadDim, sizes: Mapping[str, int], params: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Raise ``ValueError`` where an index leaves its tensor at these sizes, and these values of params.

        Nothing is said of one that depends on a param without a value here: kernels clamp it.
        """
        key = (head_dim, *sizes.values(), *params.items())
        if key in self._checked:
            return
        for proof in self.of(head_dim):
            refusal = check_index(proof, sizes, params)
            if refusal is not None:
                raise ValueError(f"'{self._spec.name}': {refusal}")
        if len(self._checked) >= _MOST_REMEMBERED:
            self._checked.clear()
        self._checked.add(key)

    def ask_params(self, head_dim: HeadDim) -> bool:
        """Whether there is an index that depends on a param."""
        if head_dim not in self._asking:
            self._asking[head_dim] = any(proof.params for proof in self.of(head_dim))
        return self._asking[head_dim]
