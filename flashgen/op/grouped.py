"""Dense calls whose queries have lists of keys of their own: heads that share a list are rows of a tile.

In: the arguments of an op's engine. Out: what it computes; None where its own kernels are to run. A tile of many
queries of one head reads nearly every key, for each query selects others. The heads of a group select the same. The
forward pass runs kernels for caches, which have them as the rows of a tile, one query a tile, and read what it selects
once for all of them, where no blocks of keys are gone through (``block_order.py``). The backward pass runs dense
kernels of a spec whose rows are the heads of a group, query by query (``analysis/grouped.py``), over copies of q, o and
d_o in that order.

    measured: see tools/benchmarks/README.md, "Caches and selected keys"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.grouped import by_groups
from flashgen.analysis.selection import has_list_for_each_query, lowered
from flashgen.hosts.kernel import KernelProvider, of_spec
from flashgen.hosts.schedule import MOST_ELEMENTS
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.kinds.parts import PARTS
from flashgen.op.call import Attended, Call, CallChecker, Rest, Rows, Tensors
from flashgen.op.engine import Engine
from flashgen.op.layouts import laid, layout_like
from flashgen.plan.by_blocks import KEPT

LEAST_GROUP = 8  # heads that share a list: a tile has 16 rows, and queries that are in one read each other's keys

_CHUNK = torch.complex128

MakesDense = Callable[[AttentionSpec, Mapping[str, KernelProvider | None]], Engine]


class GroupedCalls:
    """Those of one spec with a selection; ``engine`` is that of the lowered one, ``make`` makes one of another spec."""

    def __init__(self, spec: AttentionSpec, engine: Engine, make: MakesDense) -> None:
        assert spec.select is not None, "keys are selected"
        self._spec, self._engine, self._block, self._make = spec, engine, spec.select.block, make
        takes = has_list_for_each_query(engine.spec.tensors) and spec.dropout is None
        self._cached = Engine(lowered(spec), engine.kernels, kind=CACHED) if takes else None
        self._of_rows = functools.cache(self._make_of_rows)
        self._checker = CallChecker(spec, engine.kernels, is_reference=False)
        self._listed = 3 + [each.name for each in spec.tensors].index(spec.select.tensor)

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool) -> Attended:
        """``o``, ``lse`` and its parts of a call that goes this way; ``tensors`` are of the lowered spec."""
        assert self._cached is not None, "the call goes this way"
        q, k = tensors[0], tensors[1]
        given: Any = rest[0]
        whole: Any = (given[2], given[3], given[6], given[7], 1), rest[1]
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
        nothing = lengths[:0]
        places = (lengths, nothing, nothing, lengths[:, None][:, :0], *[q.new_empty((0, 0), dtype=torch.float32)] * 2)
        return self._cached.attend((*tensors, *places), whole, keeps_lse)

    def gradients(self, d_o: Tensor, rows: Rows, given: Tensors, rest: Rest, needs: Sequence[bool]) -> list[Any] | None:
        """The gradients that are needed, of the tensors that were ``given``: those of the spec."""
        call = self.taken(given, rest)
        if call is None or self._spec.layout is not None or call.shard.q_start != 0:
            return None
        group, shard = call.shard.group, call.shard
        engine = self._of_rows(group, given[0].element_size() == 2)
        if engine is None or shard.q_len * group * max(given[0].shape[-1], given[2].shape[-1]) > MOST_ELEMENTS:
            return None
        numbers_of_rows: Any = (0, 0, shard.b_start, shard.h_start // group, *_totals(rest[0], group))
        moved: Any = tuple(None if x is None else _by_rows(x, group) for x in rows)
        tensors = (_by_rows(given[0], group), *given[1:])
        found = engine.gradients(_by_rows(d_o, group), moved, tensors, (numbers_of_rows, rest[1]), needs)
        if needs[0]:
            found[0] = laid(_by_heads(found[0], group), layout_like(given[0], given[0].shape))
        return found

    def taken(self, tensors: Tensors, rest: Rest) -> Call | None:
        """The call, if it goes this way; ``tensors`` are of the spec."""
        if self._cached is None:
            return None
        call = self._checker.find(tensors, rest)
        kernel, shard = call.kernel, call.shard
        if kernel is None or not kernel.shares_lists or call.is_empty:
            return None
        if kernel.of(CACHED) is None or kernel.of(PARTS) is None:  # of a source that was edited there are no others
            return None
        _, _, q_total, kv_total = shard.totals()
        is_whole = shard.kv_start == 0 and shard.kv_len == kv_total == q_total == shard.q_start + shard.q_len
        queries, numbers = -(-16 // shard.group), tensors[self._listed].shape[-1]
        few = shard.group >= LEAST_GROUP and KEPT * queries * numbers * self._block <= shard.kv_len
        return call if is_whole and few else None

    def _make_of_rows(self, group: int, narrow: bool) -> Engine | None:
        """What runs rows of groups; None where no provider has another spec's kernels."""
        spec = by_groups(self._spec, group, narrow=narrow)
        found = {device: of_spec(each, spec) for device, each in self._engine.kernels.items()}
        known = {device: each for device, each in found.items() if each is not None}
        return self._make(spec, known) if known else None


def _totals(given: Any, group: int) -> tuple[int | None, ...]:
    """Nq, Nk, B and H of a call as its rows count them."""
    q_total, kv_total, b_total, h_total = given[4:8]
    return (
        None if q_total is None else q_total * group, kv_total, b_total, None if h_total is None else h_total // group,
    )  # fmt: skip


def _by_rows(x: Tensor, group: int) -> Tensor:
    """[B, Hkv, N · group, …] of [B, H, N, …]: the heads of a position one behind the other."""
    wide = _in_chunks(x)
    apart = wide.reshape(wide.shape[0], wide.shape[1] // group, group, *wide.shape[2:])
    return apart.transpose(2, 3).flatten(2, 3).view(x.dtype)


def _by_heads(x: Tensor, group: int) -> Tensor:
    """[B, H, N, …] of [B, Hkv, N · group, …]."""
    wide = _in_chunks(x)
    apart = wide.reshape(*wide.shape[:2], wide.shape[2] // group, group, *wide.shape[3:])
    return apart.transpose(2, 3).flatten(1, 2).view(x.dtype)


def _in_chunks(x: Tensor) -> Tensor:
    """Rows of whole chunks as fewer elements of 16 bytes: PyTorch copies element by element, a third as fast."""
    each = _CHUNK.itemsize // x.element_size()
    if x.dim() < 4 or x.stride(-1) != 1 or x.shape[-1] % each or x.data_ptr() % _CHUNK.itemsize:
        return x
    return x if any(step % each for step in (*x.stride()[:-1], x.storage_offset())) else x.view(_CHUNK)
