"""How many functions of Python a hot call enters: what shapes determine is ready by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashgen
from tools.digests.host import python_calls

SPEC = "attention hot { head_dim 64  mask causal }"
ROOM, BATCH = 128, 2
# By what is called: the most functions, the caller's own among them.
MOST = {"dense": 20, "varlen": 40, "decode": 40, "decode, new rows": 55, "new rows in pages": 60}


@pytest.mark.parametrize("called", MOST)
def test_hot_calls_enter_few_functions(called: str) -> None:
    op = flashgen.loads(SPEC, backend="cpu")
    q, k, v = (torch.randn(BATCH, 2, n, 64) for n in (1, ROOM, ROOM))
    rows, starts = torch.randn(16, 2, 64), torch.tensor([0, 4, 16], dtype=torch.int32)
    filled, table = torch.tensor([100, 7], dtype=torch.int32), torch.arange(8, dtype=torch.int32).view(BATCH, 4)
    k_pages, v_pages = (x.view(BATCH, 2, 4, 32, 64).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: op(k, k, v),
        "varlen": lambda: op.varlen(rows, rows, rows, starts, starts),
        "decode": lambda: op.decode(q, k, v, filled),
        "decode, new rows": lambda: op.decode(q, k, v, filled, k=q, v=q),
        "new rows in pages": lambda: op.decode(q, k_pages, v_pages, filled, k=q, v=q, block_table=table),
    }
    for _ in range(3):
        calls[called]()
    assert python_calls(calls[called]) <= MOST[called]
