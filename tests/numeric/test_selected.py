"""Selected keys on CPUs: every kind of list against the dense formula, and only what is selected is visited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.op import selected
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error

from ..op.helpers import op as loaded

PER_QUERY = """
attention per_query {
    head_dim 32
    tensor idx: i32[B, Hkv, Nq, 4]
    tensor slope: f32[H] grad
    select 16: idx[b, hkv, i, :]
    score s - slope[h] * sin(i - j)
    mask i - j < 90
}
"""
PER_BLOCK = """
attention per_block {
    head_dim 32
    tensor idx: i64[B, H, ceildiv(Nq, 64), 2]
    select 64: idx[b, h, i // 64, :]
}
"""
SHARED = "attention shared { head_dim 32  tensor top: i32[B, Nq, 9]  select 1: top[b, i, :]  mask causal  dropout 0.3 }"
BY_LENGTH = "attention lengths { head_dim 32  tensor idx: i32[Nq, 2]  select 8: idx[Nq-1-i, :]  weights sigmoid(s) }"
B, H, HKV, NQ, NK = 2, 4, 2, 150, 200
LISTS = {
    PER_QUERY: ("idx", (B, HKV, NQ, 4), 16),
    PER_BLOCK: ("idx", (B, H, 3, 2), 64),
    SHARED: ("top", (B, NQ, 9), 1),
    BY_LENGTH: ("idx", (NQ, 2), 8),
}


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def captured(op: AttentionOp, text: str) -> dict[str, Any]:
    name, shape, block = LISTS[text]
    numbers = torch.randint(-2, -(-NK // block) + 2, shape, generator=torch.Generator().manual_seed(3))
    found: dict[str, Any] = {name: numbers if "i64" in text else numbers.int()}
    if op.spec.dropout is not None:
        found["seed"] = 7
    if "slope" in text:
        found["slope"] = random(H, seed=4).requires_grad_()
    return found


def results(function: Any, inputs: list[Tensor], named: dict[str, Any]) -> list[Tensor]:
    o = function(*inputs, **named)
    learned = [*inputs, *(x for x in named.values() if isinstance(x, Tensor) and x.requires_grad)]
    return [o, *torch.autograd.grad(o, learned, random(*o.shape, seed=5).to(o.dtype))]


@pytest.mark.parametrize("text", LISTS, ids=["per query", "per block", "shared", "by length"])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_results_and_gradients(text: str, backend: str) -> None:
    op = loaded(text, backend)
    inputs = [random(*s, 32, seed=n).requires_grad_() for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK)))]
    named = captured(op, text)
    for own, truth in zip(results(op, inputs, named), results(op.reference, inputs, named), strict=True):
        assert relative_error(own, truth) < 2e-5


@pytest.mark.parametrize("text", [PER_QUERY, SHARED, BY_LENGTH], ids=["per query", "shared", "by length"])
def test_sequences_of_a_ragged_batch(text: str) -> None:
    op = loaded(text, "cpu")
    lengths = torch.tensor([[150, 200], [33, 70]])
    starts = [torch.cat([torch.zeros(1, dtype=torch.int64), lengths[:, n].cumsum(0)]).int() for n in (0, 1)]
    rows = lengths.sum(0).tolist()
    inputs = [random(rows[n], h, 32, seed=n).requires_grad_() for n, h in ((0, H), (1, HKV), (1, HKV))]
    named = captured(op, text)

    def call(function: Any) -> Any:
        return lambda q, k, v, **given: function(q, k, v, *starts, **given)

    found = results(call(op.varlen), inputs, named), results(call(op.reference.varlen), inputs, named)
    for own, truth in zip(*found, strict=True):
        assert relative_error(own, truth) < 2e-5


def test_shards_read_lists_of_the_whole() -> None:
    op = loaded(PER_QUERY, "cpu")
    q, k, v = (random(*s, 32, seed=n) for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK))))
    named = captured(op, PER_QUERY)
    whole = op(q, k, v, **named)
    part = op(q[:, :, 70:120], k, v, q_start=70, q_total=NQ, **named)
    assert relative_error(part, whole[:, :, 70:120]) < 1e-6


def test_queries_over_a_cache() -> None:
    op = loaded(PER_QUERY, "cpu")
    room, named = 150, captured(op, PER_QUERY)
    q, k, v = (random(*s, 32, seed=n) for n, s in enumerate(((B, H, 3), (B, HKV, room), (B, HKV, room))))
    filled = torch.tensor([150, 40], dtype=torch.int32)
    with torch.no_grad():
        found = op.decode(q, k, v, filled, **named)
        truth = op.reference.decode(q, k, v, filled, **named)
    assert relative_error(found, truth) < 2e-5


def test_one_list_for_each_sequence_over_pages() -> None:
    op = loaded("attention paged { head_dim 32  tensor idx: i32[B, Hkv, 3]  select 8: idx[b, hkv, :] }", "cpu")
    q, k, v = (random(*s, 32, seed=n) for n, s in enumerate(((2, H, 2), (9, HKV, 16), (9, HKV, 16))))
    named: dict[str, Any] = {
        "cache_seqlens": torch.tensor([50, 64], dtype=torch.int32),
        "block_table": torch.tensor([[8, 3, 1, 0], [2, 7, 4, 6]], dtype=torch.int32),
        "idx": torch.tensor([[[0, 6, -1], [3, 3, 9]], [[7, 1, 2], [5, 0, 4]]], dtype=torch.int32),
    }
    with torch.no_grad():
        assert relative_error(op.decode(q, k, v, **named), op.reference.decode(q, k, v, **named)) < 2e-5


def test_nothing_is_read_of_tiles_that_nobody_selects() -> None:
    """Whatever stands there, no result and no gradient is of it."""
    op = loaded("attention near { head_dim 32  tensor idx: i32[Nq, 1]  select 64: idx[i, :] }", "cpu")
    length = 1024
    q, k, v = (random(1, 1, length, 32, seed=n) for n in range(3))
    k[:, :, 512:], v[:, :, 512:] = torch.nan, torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    idx = (torch.arange(length) // 256).int()[:, None]
    o = op(*inputs, idx=idx)
    gradients = torch.autograd.grad(o, inputs, torch.ones_like(o))
    assert all(x.isfinite().all() for x in (o, *gradients))
    assert not gradients[1][:, :, 512:].any()


def test_a_row_that_selects_nothing_gives_zeros() -> None:
    op = loaded(PER_QUERY, "cpu")
    named = captured(op, PER_QUERY)
    named["idx"][:, :, 10] = torch.tensor([-1, -7, 13, 99], dtype=torch.int32)
    q, k, v = (random(*s, 32, seed=n) for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK))))
    o, lse = op(q, k, v, return_lse=True, **named)
    assert not o[:, :, 10].any()
    assert torch.all(lse[:, :, 10] == -torch.inf)


def test_results_repeat_whatever_the_order_of_a_list() -> None:
    op = loaded(PER_QUERY, "cpu")
    named = captured(op, PER_QUERY)
    inputs = [random(*s, 32, seed=n).requires_grad_() for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK)))]
    first = results(op, inputs, {**named, "deterministic": True})
    mixed = named | {"idx": named["idx"].flip(-1), "deterministic": True}
    assert all(torch.equal(x, y) for x, y in zip(first, results(op, inputs, mixed), strict=True))


def test_wrong_lists_are_named() -> None:
    op = loaded(PER_QUERY, "cpu")
    q, k, v = (random(*s, 32) for s in ((B, H, NQ), (B, HKV, NK), (B, HKV, NK)))
    named = captured(op, PER_QUERY)
    with pytest.raises(ValueError, match=r"'idx' has shape \[2, 2, 150, 3\]; the spec declares \[B, Hkv, Nq, 4\]"):
        op(q, k, v, **{**named, "idx": named["idx"][..., :3]})
    with pytest.raises(TypeError, match=r"'idx' is torch\.float32"):
        op(q, k, v, **{**named, "idx": named["idx"].float()})
    with pytest.raises(TypeError, match="missing argument 'idx'"):
        op(q, k, v, slope=named["slope"])


def test_a_compiled_call() -> None:
    op = loaded(PER_QUERY, "cpu")
    named = captured(op, PER_QUERY)
    inputs = [random(*s, 32, seed=n).requires_grad_() for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK)))]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for own, eager in zip(results(compiled, inputs, named), results(op, inputs, named), strict=True):
        assert relative_error(own, eager) < 1e-6


@pytest.mark.parametrize("plant", ["bits", "tiles"])
def test_a_planted_fault_is_seen(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that is missing, of a block or of a tile, is an error beyond any tolerance."""
    made = getattr(selected, f"_{plant}")

    def faulty(*given: Any) -> Tensor:
        found: Tensor = made(*given).clone()
        first = found.flatten().nonzero()[0]
        found.view(-1)[first] = 0
        return found

    op, named = loaded(PER_QUERY, "cpu"), captured(loaded(PER_QUERY, "cpu"), PER_QUERY)
    q, k, v = (random(*s, 32, seed=n) for n, s in enumerate(((B, H, NQ), (B, HKV, NK), (B, HKV, NK))))
    monkeypatch.setattr(selected, f"_{plant}", faulty)
    assert relative_error(op(q, k, v, **named), op.reference(q, k, v, **named)) > 1e-3
