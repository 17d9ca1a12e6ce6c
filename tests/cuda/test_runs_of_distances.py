"""Gradients by distance: of neighbouring distances with one element sums stay in registers until another one comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.recipe import decide
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import emitted, variant_of
from tests.cuda.hopper import hopper
from tests.cuda.targets import each_by_kind, emulated
from tests.numeric.helpers import assert_close, failures, normal
from tests.slices import one_of

T5 = (
    "scale 1  tensor table: f32[32, H] grad  let n = max(i - j, 0)  let far = 16 + int(log(n / 16) / log(8) * 16)  "
    "score 0.125 * s + table[n if n < 16 else min(far, 31), h]  mask causal"
)
SPECS = {
    "t5": (f"head_dim 64  {T5}", Shape(1, 4, 2, 420, 420)),
    "wide": (f"head_dim 128  {T5}", Shape(1, 2, 1, 300, 420)),
    # An element comes back, heads of batch entries have their own, distances are negative, too, and all have several.
    "again": (
        "head_dim 64  tensor table: f32[H, 3] grad  score s + table[h, (i - j + 3000) // 160 % 3]",
        Shape(1, 2, 1, 330, 450),
    ),
    "batch": (
        "head_dim 32  tensor table: f32[B, H, 9] grad  score s - 2 * table[b, h, clamp((i - j) // 50, -4, 4) + 4]",
        Shape(2, 2, 2, 200, 260),
    ),
    "single": ("head_dim 64  tensor table: f32[5, H] grad  score s + table[(i - j) % 5, h]", Shape(1, 2, 1, 70, 200)),
    "one": (
        "head_dim 64  tensor table: f32[1, H] grad  score s + table[min(abs(i - j), 0), h]",
        Shape(1, 2, 1, 300, 200),
    ),
    "far": (
        "head_dim 64  tensor table: f32[H, 12] grad  score 500 * s + 400 * table[h, min(abs(i - j) // 20, 11)]",
        Shape(1, 1, 1, 200, 300),
    ),
}


@pytest.mark.parametrize("repeats", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "target"), one_of(2, each_by_kind(SPECS)))
def test_gradients(name: str, target: str, *, repeats: bool) -> None:
    body, shape = SPECS[name]
    op = emulated(f"attention runs_{name} {{ dtype bf16, f32  {body} }}", target)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(repeats)
    try:
        for element in (ElementType.BF16, ElementType.F32):
            case = verify_case(op, op.spec.head_dims[0], element, shape)
            assert case.ok, failures(case)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("body", "runs"),
    [
        (T5, 1),
        (SPECS["batch"][0].partition("  ")[2], 1),
        # What a pair adds is no constant times dS, or goes to no element of its distance.
        ("tensor table: f32[H, 64] grad  score s * table[h, min(abs(i - j), 63)]", 0),
        ("tensor table: f32[H, 64] grad  score s + table[h, i * 3 % 64] * 2", 0),
        # Weights that are no exponentials, and dropout: sums are formed pair by pair.
        (f"{T5}  dropout 0.1", 0),
        ("tensor table: f32[H, 64] grad  score s + table[h, min(abs(i - j), 63)]  weights sigmoid(s)", 0),
        # No gradient, or no table of its numbers.
        ("tensor table: f32[H, 64]  score s + table[h, min(abs(i - j), 63)]", 0),
    ],
)
def test_which_have_runs(body: str, runs: int) -> None:
    text = f"attention r {{ head_dim 64  {body} }}"
    assert len(decide(variant_of(text)).runs) == runs
    assert ("elements_by_distance(" in emitted(text).whole) == bool(runs)


def test_shards_find_their_runs() -> None:
    """Rows and keys that begin anywhere: gradients of parts add up to that of the whole."""
    op = hopper("head_dim 64  tensor table: f32[H, 5] grad  score s + table[h, min(abs(i - j) // 90, 4)]", "f32")
    q, k, v = (normal(1, 2, 300, 64, seed=seed) for seed in range(3))
    table, d_o = normal(2, 5, seed=3), normal(1, 2, 300, 64, seed=4)

    def gradient(rows: slice, **starts: Any) -> torch.Tensor:
        own = table.clone().requires_grad_()
        o = op(q[:, :, rows].requires_grad_(), k, v, table=own, **starts)
        return torch.autograd.grad(o, own, d_o[:, :, rows])[0]

    whole = gradient(slice(0, 300))
    parts = [gradient(slice(n, n + 100), q_start=n, q_total=300, kv_total=300) for n in (0, 100, 200)]
    assert_close(sum(parts, torch.zeros_like(whole)), whole, 1e-4, "table")
