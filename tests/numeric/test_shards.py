"""A kernel that works on one shard of a problem computes the same thing as on one machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from tests.numeric.helpers import assert_close, normal

B, H, N, D = 2, 4, 120, 64

# Everything that can depend on a position does.
TEXT = """
attention sharded {
    head_dim 64
    tensor slope: f32[H] grad
    tensor bias: f32[B, Nk] grad
    score s - slope[h] * abs(i - j) / Nk + bias[b, j] * (b + 1) + sin(i * 0.1)
    mask (j <= i or (i + j + h) % 5 == 0) and i < Nq - b
}
"""


@pytest.fixture(scope="module")
def op() -> AttentionOp:
    return flashgen.loads(TEXT)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    found = {name: normal(B, H, N, D, seed=seed) for seed, name in enumerate("qkv")}
    return found | {"slope": normal(H, seed=5).abs(), "bias": normal(B, N, seed=6)}


def test_shards_of_queries_heads_and_batch(op: AttentionOp, tensors: dict[str, Tensor]) -> None:
    q, k, v, slope, bias = tensors.values()
    whole, whole_lse = op(q, k, v, slope=slope, bias=bias, return_lse=True)
    for b in range(B):
        for h in (0, 2):
            for rows in (slice(0, 50), slice(50, 51), slice(51, N)):
                part, lse = op(
                    q[b : b + 1, h : h + 2, rows],
                    k[b : b + 1, h : h + 2],
                    v[b : b + 1, h : h + 2],
                    slope=slope,
                    bias=bias,
                    return_lse=True,
                    b_start=b,
                    h_start=h,
                    q_start=rows.start,
                    b_total=B,
                    h_total=H,
                    q_total=N,
                )
                assert_close(part, whole[b : b + 1, h : h + 2, rows], 1e-6, "o")
                assert_close(lse, whole_lse[b : b + 1, h : h + 2, rows], 1e-6, "lse")


def test_shards_of_keys_merge_by_their_lse(op: AttentionOp, tensors: dict[str, Tensor]) -> None:
    q, k, v, slope, bias = tensors.values()
    whole, whole_lse = op(q, k, v, slope=slope, bias=bias, return_lse=True)
    parts = [
        op(q, k[:, :, keys], v[:, :, keys], slope=slope, bias=bias, return_lse=True, kv_start=keys.start, kv_total=N)
        for keys in (slice(0, 31), slice(31, 100), slice(100, N))
    ]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    o = sum(torch.where(part_lse.isfinite(), (part_lse - lse).exp(), 0.0)[..., None] * part for part, part_lse in parts)
    assert isinstance(o, Tensor)
    assert_close(lse, whole_lse, what="lse")
    assert_close(o, whole, what="o")


def test_gradients_of_shards_add_up(op: AttentionOp, tensors: dict[str, Tensor]) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    q, k, v, slope, bias = leaves.values()
    d_o = normal(B, H, N, D, seed=8)
    whole = torch.autograd.grad(op(q, k, v, slope=slope, bias=bias), list(leaves.values()), d_o)
    total = [torch.zeros_like(leaf) for leaf in leaves.values()]
    for rows in (slice(0, 70), slice(70, N)):
        part = op(q[:, :, rows], k, v, slope=slope, bias=bias, q_start=rows.start, q_total=N)
        gradients = torch.autograd.grad(part, list(leaves.values()), d_o[:, :, rows])
        total = [old + new for old, new in zip(total, gradients, strict=True)]
    for name, summed, exact in zip(leaves, total, whole, strict=True):
        assert_close(summed, exact, what=f"the gradient of '{name}'")


def test_the_reference_takes_the_same_offsets(op: AttentionOp, tensors: dict[str, Tensor]) -> None:
    q, k, v, slope, bias = tensors.values()
    starts = {"q_start": 30, "kv_start": 20, "b_start": 1, "h_start": 1}
    places: dict[str, Any] = starts | {"q_total": N, "kv_total": N, "b_total": B, "h_total": H}
    q, k, v = q[1:, 1:3, 30:90], k[1:, 1:3, 20:], v[1:, 1:3, 20:]
    own = op(q, k, v, slope=slope, bias=bias, **places)
    exact = op.reference(q, k, v, slope=slope, bias=bias, dtype=torch.float64, **places)
    assert_close(own, exact, what="o")


@pytest.mark.parametrize("name", ["q_start", "kv_start", "b_start", "h_start"])
def test_a_negative_start_is_refused(op: AttentionOp, tensors: dict[str, Tensor], name: str) -> None:
    q, k, v, slope, bias = tensors.values()
    with pytest.raises(ValueError, match=name):
        op(q, k, v, slope=slope, bias=bias, **wrong(name, -1))


@pytest.mark.parametrize("name", ["q_total", "kv_total", "b_total", "h_total"])
def test_a_total_that_is_too_small_is_refused(op: AttentionOp, tensors: dict[str, Tensor], name: str) -> None:
    q, k, v, slope, bias = tensors.values()
    with pytest.raises(ValueError, match=name):
        op(q, k, v, slope=slope, bias=bias, **wrong(name, 1))


@pytest.mark.parametrize(("starts", "name"), [({"h_start": 1}, "h_start"), ({"h_start": 2, "h_total": 5}, "h_total")])
def test_heads_that_share_keys_do_so_in_the_whole(starts: dict[str, Any], name: str) -> None:
    """Where the spec reads hkv, it would be another head's; other specs do not care."""
    q, (k, v) = torch.randn(1, 2, 4, 16), torch.randn(2, 1, 1, 4, 16)
    reads = flashgen.loads("attention reads_hkv { head_dim 16  tensor t: f32[Hkv]  score s + t[hkv] }", backend="cpu")
    number = starts[name]
    for call in (reads, reads.reference):
        with pytest.raises(ValueError, match=f"'{name}' is {number}, but the spec reads hkv or Hkv: it must be a mul"):
            call(q, k, v, t=torch.randn(2), **starts)
    (flat_q, flat_k, flat_v), lengths = (
        (x[0].transpose(0, 1) for x in (q, k, v)),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=f"'{name}' is {number}"):
        reads.varlen(flat_q, flat_k, flat_v, lengths, lengths, t=torch.randn(2), **starts)
    with pytest.raises(ValueError, match=f"'{name}' is {number}"):
        reads.decode(q, k, v, torch.tensor([4], dtype=torch.int32), t=torch.randn(2), **starts)
    flashgen.loads("attention reads_h { head_dim 16  score s + h }", backend="cpu")(q, k, v, **starts)


def wrong(name: str, value: int) -> Any:
    return {name: value}
