"""Who holds which positions: each once, equal lengths, equal work; and what is no partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.distributed import Partition, partition

GALLERY = ("causal", "plain", "sliding_window", "prefix_lm", "sparse_butterfly", "longformer")


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", GALLERY)
def test_work_and_lengths_are_equal(name: str, world: int) -> None:
    op = flashgen.load(name, backend="reference")
    captured: dict[str, Any] = {"length": torch.tensor([700], dtype=torch.int32)} if name == "prefix_lm" else {}
    found = partition(op, 8192, world, **captured)
    assert found.imbalance < 0.05, str(found)
    if name not in ("sparse_butterfly", "longformer"):  # of which a few rows see every key
        assert max(found.lengths) - min(found.lengths) <= 8


def test_documents_are_balanced_by_what_they_are() -> None:
    op = flashgen.load("packed_documents", backend="reference")
    ends = torch.tensor([100, 3000, 3100, 5000, 8000, 8192])
    doc = torch.bucketize(torch.arange(8192), ends, right=True).to(torch.int32)[None]
    given: dict[str, Any] = {op.spec.tensors[0].name: doc}
    assert partition(op, 8192, 4, **given).imbalance < 0.05
    assert partition(op, 8192, 4, method="contiguous", **given).imbalance > 0.2


@pytest.mark.parametrize("method", ["balanced", "contiguous", "head_tail"])
@pytest.mark.parametrize("length", [0, 1, 5, 203])
def test_every_position_once(length: int, method: str) -> None:
    op = flashgen.loads("attention c { head_dim 16 mask causal }", backend="reference")
    found = partition(op, length, 3, method=method)
    positions = torch.cat([found.positions(rank) for rank in range(3)])
    assert torch.equal(positions.sort().values, torch.arange(length))
    x = torch.randn(2, length)
    assert torch.equal(found.shard(x, 1, rank=1), x[:, found.positions(1)])


def test_what_is_no_partition_is_named() -> None:
    op = flashgen.loads("attention w { head_dim 16 tensor doc: i32[Nq] mask doc[i] == doc[j] }", backend="reference")
    doc = torch.zeros(20, dtype=torch.int32)
    with pytest.raises(ValueError, match="unknown method 'zigzag'; known are 'balanced'"):
        partition(op, 20, 2, method="zigzag", doc=doc)
    with pytest.raises(ValueError, match="'world' is 0"):
        partition(op, 20, 0, doc=doc)
    with pytest.raises(TypeError, match="'doc'"):
        partition(op, 20, 2)
    with pytest.raises(ValueError, match="do not hold each of 9 positions once"):
        Partition(9, (((0, 4),), ((5, 9),)), (0.5, 0.5))
    with pytest.raises(ValueError, match="'x' has 7 rows in dimension 2; the partition says 20"):
        partition(op, 20, 2, doc=doc).shard(torch.zeros(1, 1, 7, 16), rank=0)
    with pytest.raises(RuntimeError, match="not initialised"):
        partition(op, 20, 2, doc=doc).shard(torch.zeros(1, 1, 20, 16))
