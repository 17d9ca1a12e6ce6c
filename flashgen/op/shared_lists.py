"""Dense calls whose queries have lists of keys of their own, which the heads of a group share: other kernels run.

In: a call of an op's engine, its tensors with the lists. Out: its results; None where the engine's own kernels are to
run. A tile of many queries of one head reads nearly every key, as each query selects other keys. The heads of a group
select the same keys, and are the rows of a tile instead.

Forward, kernels by blocks of keys take a block for all queries that list it, some of the queries at a time
(``plan/by_blocks.py`` decides). Else kernels for caches run, whose tile has the heads of one query. Backward, dense
kernels run of a spec whose rows are the heads of a group, query by query (``by_groups``), over copies of q,
o and d_o in that order.

    measured: see tools/benchmarks/README.md, "Caches and selected keys"
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.selection import by_groups, has_list_for_each_query, selection_of
from flashgen.hosts.kernel import KernelProvider, of_spec
from flashgen.hosts.schedule import MOST_ELEMENTS
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, Select
from flashgen.kinds.cached import CACHED
from flashgen.kinds.slices import BY_BLOCKS, PARTS
from flashgen.op.call import Attended, Call, Rest, Saved, Tensors
from flashgen.op.engine import Engine
from flashgen.op.selected import check_listed_blocks
from flashgen.op.tensor_kinds import laid, layout_like
from flashgen.plan.by_blocks import KEPT, block_order

LEAST_GROUP = 8  # heads that share a list: a tile has 16 rows, and queries that are in one read each other's keys

_CHUNK = torch.complex128

Kernels = Mapping[str, KernelProvider | None]


def shared_lists(spec: AttentionSpec, kernels: Kernels) -> SharedLists | None:
    """What runs in the place of dense kernels; None for specs whose lists are not of each query and shared."""
    found = selection_of(spec)
    if found is None or "h" in found.axes or not has_list_for_each_query(found.tensors) or spec.dropout is not None:
        return None
    return SharedLists(spec, kernels, found.select)


class SharedLists:
    """An ``Instead`` of ``engine.py``."""

    def __init__(self, spec: AttentionSpec, kernels: Kernels, select: Select) -> None:
        self._spec, self._kernels, self._select = spec, kernels, select
        self._cached, self._blocks = Engine(spec, kernels, kind=CACHED), Engine(spec, kernels, kind=BY_BLOCKS)
        self._of_rows = functools.cache(self._make_of_rows)
        self._listed = 3 + [each.name for each in spec.tensors].index(select.tensor)

    def describe(self, call: Call, tensors: Tensors) -> str:
        at_once, is_grouped = self._queries_at_once(call, tensors), self._is_grouped(call, tensors)
        if not (at_once or is_grouped):
            return ""
        forward = "forward kernels for caches run, a query a tile"
        if at_once:
            forward = "forward kernels by blocks of keys run, each for the queries that list it"
        backward = "dense ones of a spec of such rows" if is_grouped else "dense ones"
        return f"the heads that share a list are the rows of a tile: {forward}, backward {backward}"

    def attend(self, call: Call, tensors: Tensors, rest: Rest, keeps_lse: bool) -> Attended | None:
        at_once = self._queries_at_once(call, tensors)
        if at_once:
            return self._by_blocks(at_once, call, tensors, rest, keeps_lse)
        if not self._is_grouped(call, tensors):
            return None
        q, k = tensors[0], tensors[1]
        given: Any = rest[0]
        whole: Any = (given[2], given[3], given[6], given[7], 1), rest[1]
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
        nothing = lengths[:0]
        places = (lengths, nothing, nothing, lengths[:, None][:, :0], *[q.new_empty((0, 0), dtype=torch.float32)] * 2)
        return self._cached.attend((*tensors, *places), whole, keeps_lse)

    def gradients(
        self, call: Call, d_o: Tensor, rows: Saved, tensors: Tensors, rest: Rest, needs: Sequence[bool]
    ) -> list[Tensor] | None:
        group, shard, q = call.shard.group, call.shard, tensors[0]
        if not self._is_grouped(call, tensors) or self._spec.layout is not None or shard.q_start != 0:
            return None
        engine = self._of_rows(group, q.element_size() == 2)
        if engine is None or shard.q_len * group * max(q.shape[-1], tensors[2].shape[-1]) > MOST_ELEMENTS:
            return None
        numbers_of_rows: Any = (0, 0, shard.b_start, shard.h_start // group, *_totals(rest[0], group))
        moved: Any = tuple(None if x is None else _by_rows(x, group) for x in rows)
        of_rows = (_by_rows(q, group), *tensors[1:])
        found = engine.gradients(_by_rows(d_o, group), moved, of_rows, (numbers_of_rows, rest[1]), needs)
        if needs[0]:
            found[0] = laid(_by_heads(found[0], group), layout_like(q, q.shape))
        return found

    def _queries_at_once(self, call: Call, tensors: Tensors) -> int:
        """The queries that a call by blocks of keys takes at a time; 0 for calls that are not by blocks."""
        shard = call.shard
        is_there = call.kernel is not None and call.kernel.of(BY_BLOCKS) is not None
        if not is_there or call.is_empty or shard.kv_start != 0 or shard.kv_len != shard.totals()[3]:
            return 0
        shape = Shape(shard.batch, shard.heads, shard.kv_heads, shard.q_len, shard.kv_len)
        numbers, element_bytes = tensors[self._listed].shape[-1], tensors[0].element_size()
        order = block_order(shape, numbers, self._select.block, call.head_dim, element_bytes)
        return 0 if order is None else order.queries

    def _by_blocks(self, at_once: int, call: Call, tensors: Tensors, rest: Rest, keeps_lse: bool) -> Attended:
        """Parts of rows lie in the workspace of each of several calls, which write where their rows belong."""
        check_listed_blocks(self._select, tensors[self._listed], call.sizes)
        o = torch.empty_strided(*call.o, dtype=call.written, device=call.device)
        lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
        parts = torch.empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device) if keeps_lse else None
        given: Any = rest[0]
        _, _, q_total, _ = call.shard.totals()
        for first in range(0, call.shard.q_len, at_once):
            own = slice(first, first + at_once)
            into = tuple(None if x is None else x[:, :, own] for x in (o, lse, parts))
            numbers: Any = (given[0] + first, *given[1:4], q_total, *given[5:])
            of_some = (tensors[0][:, :, own], *tensors[1:])
            self._blocks.attend(of_some, (numbers, rest[1]), into=into)  # type: ignore[arg-type]
        return o, lse, parts

    def _is_grouped(self, call: Call, tensors: Tensors) -> bool:
        """Whether few enough keys are listed, of a call over the whole of a sequence or its end."""
        kernel, shard = call.kernel, call.shard
        if kernel is None or not kernel.shares_lists or call.is_empty:
            return False
        if kernel.of(CACHED) is None or kernel.of(PARTS) is None:  # an edited source has no kernels of other kinds
            return False
        _, _, q_total, kv_total = shard.totals()
        is_whole = shard.kv_start == 0 and shard.kv_len == kv_total == q_total == shard.q_start + shard.q_len
        queries, numbers = -(-16 // shard.group), tensors[self._listed].shape[-1]
        few = shard.group >= LEAST_GROUP and KEPT * queries * numbers * self._select.block <= shard.kv_len
        return is_whole and few

    def _make_of_rows(self, group: int, narrow: bool) -> Engine | None:
        """The engine whose rows are the heads of groups; None where no provider has another spec's kernels."""
        spec = by_groups(self._spec, group, narrow=narrow)
        found = {device: of_spec(each, spec) for device, each in self._kernels.items()}
        known = {device: each for device, each in found.items() if each is not None}
        return Engine(spec, known) if known else None


def _totals(given: Any, group: int) -> tuple[int | None, ...]:
    """The totals Nq, Nk, B and H of a call whose rows are the heads of groups."""
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
