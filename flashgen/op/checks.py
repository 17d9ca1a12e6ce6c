"""What is checked of the calls of each kind: one table, which ``call.py`` reads.

In: a kind. Out: its ``Checks``. Errors name the argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op.eight_bits import F8
from flashgen.op.shapes import Sizes, check_cached, check_ragged, check_shapes
from flashgen.op.signature import ELEMENTS
from flashgen.reference.shard import Shard

Types = Sequence[torch.dtype]


def _all(_spec: AttentionSpec, _dtypes: Types, *tensors: Tensor) -> Sequence[Tensor]:
    return tensors


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


def _nothing(_shard: Shard, _q: Tensor, _k: Tensor, _numbers: Sequence[Any]) -> Mapping[str, float]:
    return {}


def _rows_of_all(shard: Shard, q: Tensor, k: Tensor, _numbers: Sequence[Any]) -> Mapping[str, float]:
    """Kernels take the rows of all sequences for the length."""
    return {"q_len": q.shape[0], "kv_len": k.shape[0], "q_most": shard.q_len, "kv_most": shard.kv_len}


def _sizes_of_cache(shard: Shard, _q: Tensor, k: Tensor, numbers: Sequence[Any]) -> Mapping[str, float]:
    columns, splits = numbers[5:]
    group_rows = shard.q_len * (shard.heads // max(shard.kv_heads, 1))
    known = {"cache_entries": k.shape[0], "cache_rows": k.shape[2], "table_columns": columns}
    return known | {"group_rows": group_rows, "key_element": ELEMENTS[k.dtype], "splits": splits}


@dataclass(frozen=True)
class Checks:
    """What is checked of a kind of call, as ``CallChecker`` calls it, and the values of fields that follow.

    ``shapes`` gives the shard and the sizes, by q, k, v, captured tensors and numbers. ``of_one_type`` gives those of
    q, k and v that have to share one of the op's types, given as ``dtypes``; it checks the others. ``settled`` are
    values of ``struct Arguments`` that only these kernels have, or take otherwise.
    """

    shapes: Callable[[AttentionSpec, Tensor, Tensor, Tensor, Sequence[Tensor], Any], Sizes] = check_shapes
    of_one_type: Callable[[AttentionSpec, Types, Tensor, Tensor, Tensor], Sequence[Tensor]] = _all
    settled: Callable[[Shard, Tensor, Tensor, Sequence[Any]], Mapping[str, float]] = _nothing
    keys_and_values: tuple[str, str] = ("k", "v")


# By the names of kinds; others are checked as dense calls are.
CHECKS: Mapping[str, Checks] = {
    RAGGED.name: Checks(shapes=check_ragged, settled=_rows_of_all),
    CACHED.name: Checks(check_cached, _over_cache, _sizes_of_cache, keys_and_values=("k_cache", "v_cache")),
    EIGHT_BITS.name: Checks(of_one_type=_of_8_bits),
}
