"""Dense calls whose queries have lists of keys of their own, by kernels for caches: heads that share a list are rows.

In: the arguments of an op's engine. Out: what it computes; None where its own kernels are to run. A tile of many
queries of one head reads nearly every key, for each query selects others. The heads of a group select the same: kernels
for caches have them as the rows of a tile, one query a tile, and read what it selects once for all of them.

    an H100, 32k causal, 16 blocks of 64 of 512: see benchmarks/README.md, "Caches and selected keys"
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.analysis.selection import has_list_for_each_query
from flashgen.runtime.cached import CachedEngine
from flashgen.runtime.call import Rest
from flashgen.runtime.engine import Attended, Engine, Tensors
from flashgen.runtime.kernel import LibraryKernel

LEAST_GROUP = 8  # heads that share a list: a tile has 16 rows, and queries that are in one read each other's keys
KEPT = 8  # a query reads at most one key of so many


class GroupedCalls:
    """Those of one lowered spec, whose dense ``engine`` this is. A query's list has blocks of ``block`` keys."""

    def __init__(self, engine: Engine, block: int) -> None:
        self._engine, self._block = engine, block
        takes = has_list_for_each_query(engine.spec.tensors) and engine.spec.dropout is None
        self._cached = CachedEngine(engine.spec, engine.kernels) if takes else None

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool, numbers: int) -> Attended | None:
        """``o``, ``lse`` and its parts; ``numbers`` are those of a query's list."""
        if self._cached is None or not self.takes(tensors, rest, numbers):
            return None
        q, k = tensors[0], tensors[1]
        given: Any = rest[0]
        whole: Any = (given[2], given[3], given[6], given[7], 1), rest[1]
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
        nothing = lengths[:0]
        places = (lengths, nothing, nothing, lengths[:, None][:, :0], *[q.new_empty((0, 0), dtype=torch.float32)] * 2)
        return self._cached.attend((*tensors, *places), whole, keeps_lse)

    def takes(self, tensors: Tensors, rest: Rest, numbers: int) -> bool:
        """Whether a call goes this way."""
        if self._cached is None:
            return False
        call = self._engine.checker.find(tensors, rest)
        kernel, shard = call.kernel, call.shard
        if kernel is None or isinstance(kernel, LibraryKernel) or kernel.cached is None or call.is_empty:
            return False
        _, _, q_total, kv_total = shard.totals()
        is_whole = shard.kv_start == 0 and shard.kv_len == kv_total == q_total == shard.q_start + shard.q_len
        queries = -(-16 // shard.group)
        few = shard.group >= LEAST_GROUP and KEPT * queries * numbers * self._block <= shard.kv_len
        return is_whole and few
