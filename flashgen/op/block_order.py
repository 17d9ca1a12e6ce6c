"""Runs the forward pass of an op whose queries have lists of keys of their own by blocks of keys, some at a time.

In: the arguments of ``Engine.attend``, of a spec with its lists. Out: what it gives; None where the order of queries is
kept. ``plan/by_blocks.py`` decides, from the sizes of a call; what parts leave lies in the workspace of each of several
calls over some of the queries, one after another, which write where their rows belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.hosts.kernel import KernelProvider
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.by_blocks import BY_BLOCKS
from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.engine import Engine
from flashgen.op.selected import check_listed_blocks
from flashgen.plan.by_blocks import BlockOrder, block_order


class CallsByBlocks:
    """The forward pass of one spec with its lists among its captured tensors."""

    def __init__(self, spec: AttentionSpec, kernels: Mapping[str, KernelProvider | None]) -> None:
        assert spec.select is not None, "keys are selected"
        self._engine, self._select = Engine(spec, kernels, kind=BY_BLOCKS), spec.select
        self._listed = 3 + [each.name for each in spec.tensors].index(spec.select.tensor)

    def order(self, tensors: Tensors, rest: Rest) -> BlockOrder | None:
        """The order of a call; None where it is not by blocks."""
        call = self._engine.checker.find(tensors, rest)
        shard = call.shard
        if call.is_empty or call.kernel is None or shard.kv_start != 0 or shard.kv_len != shard.totals()[3]:
            return None
        shape = Shape(shard.batch, shard.heads, shard.kv_heads, shard.q_len, shard.kv_len)
        numbers = tensors[self._listed].shape[-1]
        return block_order(shape, numbers, self._select.block, call.head_dim, tensors[0].element_size())

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool) -> Attended | None:
        """``o``, ``lse`` and its parts; None where the call is not by blocks."""
        order = self.order(tensors, rest)
        if order is None:
            return None
        call, q = self._engine.checker.find(tensors, rest), tensors[0]
        check_listed_blocks(self._select, tensors[self._listed], call.sizes)
        o = torch.empty_strided(*call.o, dtype=call.written, device=call.device)
        lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
        parts = torch.empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device) if keeps_lse else None
        given: Any = rest[0]
        _, _, q_total, _ = call.shard.totals()
        for first in range(0, q.shape[2], order.queries):
            own = slice(first, first + order.queries)
            into = tuple(None if x is None else x[:, :, own] for x in (o, lse, parts))
            numbers: Any = (given[0] + first, *given[1:4], q_total, *given[5:])
            self._engine.attend((q[:, :, own], *tensors[1:]), (numbers, rest[1]), into=into)  # type: ignore[arg-type]
        return o, lse, parts
