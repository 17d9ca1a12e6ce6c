"""Captured tensors of 64 bits: what a call computes is what their numbers mean, or it is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.op import narrowing
from tests.op.helpers import op

N = 40
HEAD = "attention narrow { head_dim 16"
STAMPS = 1_700_807_049_216 + 2**31 + (torch.arange(N) - N // 2) * 1000  # milliseconds, across a multiple of 2**32
SECONDS = 1.7e9 + (torch.arange(N) ** 2).double() / 4
IDS = torch.arange(N) // 7 * 2**32 + 5
SELF = torch.eye(N, dtype=torch.bool)
FAR = torch.tensor([-(2**63), 2**63 - 1] * (N // 2))

Keep = Callable[[Tensor, Tensor], Tensor]
MASKS: dict[str, tuple[str, Keep, Tensor]] = {
    "time stamps in order": ("t[j] <= t[i]", lambda x, y: y <= x, STAMPS),
    "a window of time": ("abs(t[i] - t[j]) < 5000", lambda x, y: (x - y).abs() < 5000, STAMPS),
    "ids": ("t[i] == t[j]", lambda x, y: x == y, IDS),
    "ids at both ends": ("t[i] == t[j]", lambda x, y: x == y, FAR),
    "unequal ids": ("t[i] != t[j] or i == j", lambda x, y: (x != y) | SELF, IDS),
}


def qkv(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*rows, 16, generator=generator) for _ in range(3)]


def truth(q: Tensor, k: Tensor, v: Tensor, moved: Tensor | float = 0.0, keep: Tensor | None = None) -> Tensor:
    scores = q.double() @ k.double().mT / 4 + moved
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return scores.softmax(-1) @ v.double()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_ints_of_64_bits(name: str) -> None:
    text, keep, stamps = MASKS[name]
    run = op(f"{HEAD} tensor t: {'i32' if stamps is IDS else 'i64'}[Nk] mask {text} }}", "reference")
    q, k, v = qkv(1, 2, N)
    expected = truth(q, k, v, keep=keep(stamps[:, None], stamps[None]))
    close(run(q, k, v, t=stamps), expected)
    close(run.reference(q, k, v, t=stamps), expected)
    close(run(q, k, v, t=stamps, q_start=0, q_total=N), expected)
    x, y, z = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
    ends = torch.tensor([0, N], dtype=torch.int32)
    close(run.varlen(x, y, z, ends, ends, t=stamps), expected[0].transpose(0, 1))
    close(run.decode(q[:, :, -1:], k, v, N, t=stamps), expected[:, :, -1:])


def test_of_a_shard_the_whole_decides() -> None:
    run = op(f"{HEAD} tensor t: i64[Nk] mask t[j] <= t[i] }}", "reference")
    q, k, v = qkv(1, 2, N)
    expected = truth(q, k, v, keep=STAMPS[None] <= STAMPS[:, None])
    for first in (0, 16):
        part = run(q[:, :, first : first + 16], k, v, t=STAMPS, q_start=first, q_total=N)
        close(part, expected[:, :, first : first + 16])


def test_tensors_that_meet_keep_one_scale() -> None:
    run = op(f"{HEAD} tensor x: i64[Nq] tensor y: i32[Nk] mask x[i] >= y[j] or i == j }}", "reference")
    q, k, v = qkv(1, 2, N)
    first, second = IDS.flip(0) + torch.arange(N) % 3, torch.arange(N, dtype=torch.int32) % 9
    close(run(q, k, v, x=first, y=second), truth(q, k, v, keep=(first[:, None] >= second[None]) | SELF))


REFUSED = {
    "t[j] % 7 > 2": (STAMPS, r"tensor 't' has 64 bits and holds numbers beyond i32.* t - t\.min\(\)"),
    "t[j] > i": (STAMPS, "'t' has 64 bits and holds numbers beyond i32"),
    "t[j] - t[i] < 9": (IDS, r"'t' has 64 bits and holds numbers 2\*\*31 and more apart"),
    "t[j] - t[i] <= 9": (FAR, r"'t' has 64 bits and holds numbers 2\*\*31 and more apart"),
}


@pytest.mark.parametrize("mask", REFUSED)
def test_ints_that_count_for_more_are_refused(mask: str) -> None:
    run = op(f"{HEAD} tensor t: i64[Nk] mask {mask} }}", "reference")
    given, message = REFUSED[mask]
    with pytest.raises(ValueError, match=message):
        run(*qkv(1, 2, N), t=given)
    with pytest.raises(ValueError, match=message):
        run.reference(*qkv(1, 2, N), t=given)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_differences_of_float64(backend: str) -> None:
    run = op(f"{HEAD} tensor t: f32[Nk] grad score s - 0.1 * abs(t[i] - t[j]) }}", backend)
    q, k, v = qkv(1, 2, N)
    seconds = SECONDS.clone().requires_grad_()
    expected = truth(q, k, v, -0.1 * (seconds[:, None] - seconds[None]).abs())
    found = run(q, k, v, t=seconds)
    close(found, expected)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (learned,) = torch.autograd.grad((found * weight).sum(), seconds)
    (right,) = torch.autograd.grad((expected * weight).sum(), seconds)
    assert learned.dtype is torch.float64
    torch.testing.assert_close(learned, right, atol=1e-5, rtol=1e-4)


def test_an_order_of_float64_is_exact() -> None:
    """Neighbours among numbers that float32 does not tell apart, infinities and NaN."""
    run = op(f"{HEAD} tensor t: f32[Nk] mask t[j] <= t[i] or i == j }}", "reference")
    q, k, v = qkv(1, 2, N)
    numbers = 1.0 + torch.randperm(N, generator=torch.Generator().manual_seed(3)).double() * 2**-40
    numbers[3], numbers[5], numbers[7], numbers[9] = math.inf, -math.inf, math.nan, numbers[8]
    keep = (numbers[None] <= numbers[:, None]) | SELF
    close(run(q, k, v, t=numbers), truth(q, k, v, keep=keep))


def test_infinite_time_stamps_take_no_part_in_the_middle() -> None:
    run = op(f"{HEAD} tensor t: f32[Nk] score s - 0.1 * min(abs(t[i] - t[j]), 9) }}", "reference")
    q, k, v = qkv(1, 2, N)
    seconds = torch.where(torch.arange(N) == 3, math.inf, SECONDS)
    near = (seconds[:, None] - seconds[None]).abs().clamp(max=9)
    near[3, 3] = 0
    rows = [n for n in range(N) if n != 3]  # there inf - inf is NaN
    close(run(q, k, v, t=seconds)[:, :, rows], truth(q, k, v, -0.1 * near)[:, :, rows])


LOST = {
    "score s + 1e-9 * t[j]": SECONDS,
    "score s - abs(t[i] - t[j])": SECONDS + torch.rand(N, generator=torch.Generator().manual_seed(4)).double() * 1e7,
    "mask t[j] > 1.5e9": SECONDS,
    "mask floor(t[i] / 3600) == floor(t[j] / 3600)": SECONDS,
}


@pytest.mark.parametrize("formula", LOST)
def test_float64_that_float32_loses_is_refused(formula: str) -> None:
    run = op(f"{HEAD} tensor t: f32[Nk] {formula} }}", "reference")
    with pytest.raises(ValueError, match=r"tensor 't' is torch\.float64 and holds numbers beyond f32.*t\.float\(\)"):
        run(*qkv(1, 2, N), t=LOST[formula])
    run(*qkv(1, 2, N), t=LOST[formula].float())


def test_ordinary_float64_is_rounded() -> None:
    run = op(f"{HEAD} tensor t: f32[Nk] score s + t[j] }}", "reference")
    q, k, v = qkv(1, 2, N)
    for bias in (
        torch.randn(N, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
        -1e30 * SELF[3].double(),
    ):
        assert torch.equal(run(q, k, v, t=bias), run(q, k, v, t=bias.float()))


def test_vmap_numbers_each_sample_by_itself() -> None:
    run = op(f"{HEAD} tensor t: i64[Nk] mask t[i] == t[j] }}", "reference")
    q, k, v = qkv(1, 2, N)
    each = torch.stack([IDS, IDS.flip(0) + 3])

    def attended(ids: Tensor) -> Tensor:
        return run(q, k, v, t=ids)

    found = torch.vmap(attended)(each)
    for own, ids in zip(found, each, strict=True):
        close(own, truth(q, k, v, keep=ids[:, None] == ids[None]))


def test_graphs_take_a_middle_off() -> None:
    torch._dynamo.reset()
    run: Any = op(f"{HEAD} tensor t: i64[Nk] mask t[j] <= t[i] }}", "reference")
    q, k, v = qkv(1, 2, N)

    def attended(t: Tensor) -> Any:
        return run(q, k, v, t=t)

    compiled: Any = torch.compile(attended, backend="aot_eager", fullgraph=True)
    close(compiled(STAMPS), truth(q, k, v, keep=STAMPS[None] <= STAMPS[:, None]))
    with pytest.raises(RuntimeError, match=r"'t' has 64 bits and holds numbers 2\*\*31 and more apart"):
        compiled(IDS)


def test_calls_of_8_bits() -> None:
    run = op(f"{HEAD} tensor t: i64[Nk] mask t[j] <= t[i] }}", "reference")
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(1, 2, N))
    found = run(q, k, v, t=STAMPS)
    torch.testing.assert_close(found, run(q, k, v, t=torch.arange(N)))


def test_what_is_kept_of_a_tensor_holds_while_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nobody looks at values."""
    monkeypatch.setattr(narrowing, "_is_kept", lambda _: True)
    run = op(f"{HEAD} tensor t: i64[Nk] mask t[j] <= t[i] }}", "reference")
    q, k, v = qkv(1, 2, N)
    stamps = STAMPS.clone()
    for _ in range(2):
        close(run(q, k, v, t=stamps), truth(q, k, v, keep=stamps[None] <= stamps[:, None]))
    made = run.narrowing.narrowed([stamps])[0]
    assert run.narrowing.narrowed([stamps])[0] is made
    stamps[:5] += 10**9
    close(run(q, k, v, t=stamps), truth(q, k, v, keep=stamps[None] <= stamps[:, None]))
    close(run(q, k, v, t=IDS), truth(q, k, v, keep=IDS[None] <= IDS[:, None]))
