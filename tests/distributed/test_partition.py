"""Who holds which positions: each once, equal lengths, equal work; and what is no partition."""

from __future__ import annotations

from typing import Any, cast

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


@pytest.mark.parametrize("world", [2, 3, 8])
def test_one_run_a_rank_of_equal_work(world: int) -> None:
    op = flashgen.loads("attention w { head_dim 16 mask causal and window_left(1024) }", backend="reference")
    equal, runs = (partition(op, 8192 * world, world, method=method) for method in ("contiguous", "runs"))
    assert equal.imbalance > 0.005
    assert runs.imbalance < 0.005, str(runs)
    assert max(map(len, runs.spans)) == 1
    assert sum(runs.sent) <= 1.05 * sum(equal.sent)


@pytest.mark.parametrize("method", ["balanced", "contiguous", "head_tail", "runs"])
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
    with pytest.raises(ValueError, match=r"tensor 'doc' has shape \[21\]; the spec declares \[Nq\] = \[20\]"):
        partition(op, 20, 2, doc=torch.zeros(21, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"tensor 'doc' is torch.float32; the spec declares i32"):
        partition(op, 20, 2, doc=torch.zeros(20))
    with pytest.raises(TypeError, match="unknown argument 'docs'; did you mean 'doc'"):
        partition(op, 20, 2, doc=doc, docs=doc)
    other: Any = "causal"
    with pytest.raises(TypeError, match=r"'op' must be an op of flashgen.load or loads, not str"):
        partition(other, 20, 2)
    with pytest.raises(TypeError, match=r"'dtype' is 'bf16'; a torch.dtype is expected"):
        partition(op, 20, 2, doc=doc, dtype=cast("Any", "bf16"))
    near = flashgen.loads("attention n { head_dim 16 param n: i32 mask window_left(n) }", backend="reference")
    with pytest.raises(TypeError, match="missing argument 'n': the spec declares param n: i32"):
        partition(near, 20, 2)
    with pytest.raises(TypeError, match="argument 'n' must be a number or a 0-dim tensor"):
        partition(near, 20, 2, n="9")
    with pytest.raises(ValueError, match="'rank' is 2; one of 2 ranks is expected"):
        partition(op, 20, 2, doc=doc).shard(torch.zeros(1, 1, 20, 16), rank=2)
    with pytest.raises(TypeError, match="'x' must be a tensor, not list"):
        partition(op, 20, 2, doc=doc).shard(cast("Any", [1]), rank=0)
    with pytest.raises(ValueError, match="do not hold each of 9 positions once"):
        Partition(9, (((0, 4),), ((5, 9),)), (0.5, 0.5))
    for unordered in (((5, 9), (0, 4)), ((0, 4), (9, 5))):
        with pytest.raises(ValueError, match=r"the spans of rank 0, .*, do not ascend"):
            Partition(9, (unordered, ((4, 5),)), (0.5, 0.5))
    with pytest.raises(ValueError, match="'work' has 0 shares; 2 are expected, one a rank"):
        Partition(9, (((0, 4),), ((4, 9),)), ())
    with pytest.raises(ValueError, match=r"is of 1073741824 positions; 0 to 1073741823 are expected"):
        Partition(2**30, (((0, 2**30),),), (1.0,))
    lists: Any = [[[0, 2], [2, 4]], [[4, 9]]]
    assert Partition(9, lists, (0.5, 0.5)).spans == (((0, 4),), ((4, 9),))
    with pytest.raises(ValueError, match="'x' has 7 rows in dimension 2; the partition says 20"):
        partition(op, 20, 2, doc=doc).shard(torch.zeros(1, 1, 7, 16), rank=0)
    with pytest.raises(RuntimeError, match="not initialised"):
        partition(op, 20, 2, doc=doc).shard(torch.zeros(1, 1, 20, 16))


def test_sizes_follow_from_captured_tensors() -> None:
    text = "attention d { head_dim 16 tensor d: i32[B, Nk] tensor t: i32[H] mask d[b, i] == d[b, j] and t[h] >= 0 }"
    op = flashgen.loads(text, backend="reference")
    d, t = torch.randint(0, 3, (2, 93), dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    found = partition(op, 93, 3, d=d, t=t)
    assert found == partition(op, 93, 3, d=d, t=t, batch=2, heads=4, kv_heads=1)
    assert found != partition(op, 93, 3, d=d[:1], t=t)
    with pytest.raises(ValueError, match=r"tensor 'd' has shape \[2, 93\]; the spec declares \[B, Nk\] = \[3, 93\]"):
        partition(op, 93, 3, d=d, t=t, batch=3)
    with pytest.raises(ValueError, match=r"tensor 'd' has shape \[93\]; the spec declares \[B, Nk\] = \[1, 93\]"):
        partition(op, 93, 3, d=d[0], t=t)
    with pytest.raises(ValueError, match="'batch' is 0; a positive integer is expected"):
        partition(op, 93, 3, d=d[:0], t=t)


def test_documents_of_half_a_billion_positions() -> None:
    op = flashgen.loads("attention chunks { head_dim 16 mask i // 4096 == j // 4096 }", backend="reference")
    found = partition(op, 2**29, 2, method="documents")
    assert found.imbalance < 0.02
    assert max(map(len, found.spans)) <= 64
    assert all(place % 4096 == 0 for own in found.spans for span in own for place in span)
    assert found.sent == (0, 0)


def test_whole_documents_send_nothing() -> None:
    op = flashgen.load("packed_documents", backend="reference")
    ends = torch.tensor([100, 3000, 3100, 5000, 8000, 8192])
    doc = torch.bucketize(torch.arange(8192), ends, right=True).to(torch.int32)[None]
    given: dict[str, Any] = {op.spec.tensors[0].name: doc}
    found = partition(op, 8192, 3, method="documents", **given)
    borders = {0, *ends.tolist()}
    assert all(place in borders for own in found.spans for span in own for place in span)
    assert found.sent == (0, 0, 0)
    chunks = flashgen.loads("attention chunks { head_dim 16 mask i // 30 == j // 30 }", backend="reference")
    assert all(start % 30 == 0 for own in partition(chunks, 200, 3, method="documents").spans for start, _ in own)
    assert partition(flashgen.load("causal", backend="reference"), 100, 3, method="documents").spans.count(()) == 2


@pytest.mark.parametrize("method", ["balanced", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_and_few_bits_of_what_a_mask_reads(dtype: torch.dtype, method: str) -> None:
    text = f"tensor gate: {'f32' if dtype is torch.float32 else 'bf16'}[Nk] mask gate[j] > 0.5 and causal"
    op = flashgen.loads(f"attention gated {{ head_dim 16 {text} }}", backend="reference")
    gate = torch.rand(160).to(dtype)
    negated = torch._neg_view(-gate)
    assert negated.is_neg()
    assert partition(op, 160, 3, method=method, gate=negated) == partition(op, 160, 3, method=method, gate=gate)
    assert partition(op, 160, 3, method=method, gate=gate.requires_grad_()).lengths


def test_a_mask_that_keeps_nothing_reads_no_list() -> None:
    text = "tensor idx: i32[Nq, 2] select 16: idx[i, :] mask i < i"
    op = flashgen.loads(f"attention nothing {{ head_dim 16 {text} }}", backend="reference")
    assert partition(op, 40, 2).lengths == (20, 20)


@pytest.mark.parametrize("method", ["contiguous", "balanced", "runs"])
@pytest.mark.parametrize("text", ["window(200)", "causal and i - j < 300", "doc[i] == doc[j] and causal", "causal"])
def test_little_is_sent_that_no_mask_keeps(text: str, method: str) -> None:
    """At most 1.1 times the rows that a kept pair needs."""
    N, world = 4096, 4
    op = flashgen.loads(f"attention a {{ head_dim 16 tensor doc: i32[Nq] mask {text} }}", backend="reference")
    doc = torch.bucketize(torch.arange(N), torch.tensor([100, 900, 2000, 3500]), right=True).int()
    found = partition(op, N, world, method=method, doc=doc, dtype=torch.float16)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    keep = {
        "window(200)": (i - j).abs() <= 200,
        "causal and i - j < 300": (j <= i) & (i - j < 300),
        "doc[i] == doc[j] and causal": (doc[:, None] == doc) & (j <= i),
        "causal": j <= i,
    }[text]
    owner = torch.empty(N, dtype=torch.int64)
    for rank in range(world):
        owner[found.positions(rank)] = rank
    needed = sum(int((keep[found.positions(rank)].any(0) & (owner != rank)).sum()) for rank in range(world))
    row = (16 + 16) * 2
    assert needed * row <= sum(found.sent) <= 1.1 * needed * row
    assert f"{max(found.sent) / 1e6:.3f} MB" in str(found)


def test_imbalance_on_many_ranks() -> None:
    for name, length in (("causal", 16384), ("sparse_butterfly", 16384)):
        found = partition(flashgen.load(name, backend="reference"), length, 16)
        assert found.imbalance < 0.05, (name, str(found))
