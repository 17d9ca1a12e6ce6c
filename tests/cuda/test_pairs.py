"""What pairs read of captured tensors, two at once and ahead of products, and gradients that they store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flashgen.analysis.variant import DOT
from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.shape import Shape
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import stored_tensors
from flashgen.runtime.emulator import EmulatorError
from flashgen.targets.gpu.near import FAR
from flashgen.targets.gpu.recipe import recipe_of
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import emitted, variant_of
from tests.cuda.hopper import changed, hopper
from tests.cuda.targets import each_by_kind, emulated
from tests.numeric.helpers import failures, normal
from tests.slices import one_of

BIAS = "tensor bias: bf16[B, H, Nq, Nk] grad  score s + bias[b, h, i, j]"
# Rows on whole words and not, tiles that are full and cut off, columns that lie apart, other types, and orders.
SPECS = {
    "bias": (f"head_dim 64  {BIAS}  mask causal", Shape(2, 2, 1, 140, 202)),
    "odd": (f"head_dim 64  {BIAS}  mask causal", Shape(1, 2, 2, 77, 131)),
    "shared": ("head_dim 64  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]", Shape(2, 2, 1, 80, 200)),
    "order": (
        "head_dim 32  tensor bias: f16[Nq, B, Nk, H] grad  score s + 2 * bias[i, b, j, h]  mask causal",
        Shape(2, 2, 1, 70, 140),
    ),
    "scaled": (
        "head_dim 64  tensor bias: f16[B, H, Nq, Nk] grad  score s - 3 * bias[b, h, i, j]",
        Shape(1, 2, 1, 90, 66),
    ),
    "mask": ("head_dim 64  tensor keep: bool[B, Nq, Nk]  mask keep[b, i, j]", Shape(2, 2, 1, 70, 140)),
    "capped": (
        "head_dim 64  tensor bias: bf16[B, H, Nq, Nk] grad  score softcap(s + bias[b, h, i, j], 5.0)  mask causal",
        Shape(2, 2, 1, 70, 142),
    ),
    "sigmoid": (f"head_dim 64  {BIAS}  weights sigmoid(s - 3)", Shape(1, 2, 1, 66, 134)),
    # Whole chunks, where warps copy: what pairs read comes by way of shared memory.
    "chunks": (f"head_dim 128  {BIAS}  mask causal", Shape(2, 2, 1, 150, 264)),
    "chunks_of_a_mask": ("head_dim 128  tensor keep: bool[B, Nq, Nk]  mask keep[b, i, j]", Shape(2, 2, 1, 70, 144)),
    "chunks_sigmoid": (f"head_dim 128  {BIAS}  mask causal  weights sigmoid(s - 3)", Shape(1, 2, 1, 140, 136)),
    "shared_by_three": (
        "head_dim 64  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  mask causal",
        Shape(3, 2, 1, 130, 136),
    ),
    "halves": (f"head_dim 192/128  {BIAS}  mask window_left(70)", Shape(1, 2, 2, 100, 102)),
    "wide": (f"head_dim 256  {BIAS}", Shape(1, 2, 1, 70, 90)),
}


@pytest.mark.parametrize(("name", "target"), one_of(4, each_by_kind(SPECS)))
def test_gradients(name: str, target: str) -> None:
    body, shape = SPECS[name]
    op = emulated(f"attention pairs_{name}_{target} {{ dtype bf16  {body} }}", target)
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, shape)
    assert case.ok, failures(case)


@pytest.mark.parametrize(
    ("body", "ahead"),
    [
        (BIAS, "bias[b, h, i, j]"),
        ("tensor bias: f32[H, Nq, Nk]  score s + bias[h, i, j]", None),  # two of them are two registers
        ("tensor bias: bf16[Nq, Nk, H]  score s + bias[i, j, h]", None),  # neighbours lie apart
        ("tensor bias: bf16[H, Nk]  score s + bias[h, j]", None),  # one of each key
        ("tensor bias: bf16[Nk, Nk]  score s + bias[min(i, j), j]", None),
        ("tensor keep: bool[Nq, Nk]  score s * 2  mask keep[i, j]", "keep[i, j]"),
    ],
)
def test_what_is_read_ahead(body: str, ahead: str | None) -> None:
    found = recipe_of(variant_of(f"attention read {{ head_dim 64  dtype bf16  {body} }}")).ahead
    assert (None if found is None else text(found)) == ahead


STAGED = {"bias": "head_dim 128  tensor bias: bf16[H, Nq, Nk]  score s + bias[h, i, j]  mask causal",
          "keep": "head_dim 128  tensor keep: bool[H, Nq, Nk]  mask keep[h, i, j]"}  # fmt: skip


@pytest.mark.parametrize("columns", [256, 259])
@pytest.mark.parametrize("name", STAGED)
def test_where_rows_lie_changes_no_bit(name: str, columns: int) -> None:
    """Rows of whole chunks, such rows that end within one, rows that begin within one, columns that lie apart."""
    op = hopper(STAGED[name])
    assert all(each.elements[0].forward.pairs_staged for each in op.plan.values())
    q, k, v = (normal(2, 2, n, 128, seed=n).bfloat16() for n in (150, columns, columns))
    numbers = normal(2, 150, columns, seed=4)
    own = numbers > -0.5 if name == "keep" else numbers.bfloat16()
    wide = own.new_zeros(2, 150, 304)
    wide[..., :columns], later = own, wide.clone()
    later[..., 3 : columns + 3] = own
    apart = own.transpose(1, 2).contiguous().transpose(1, 2)
    views: list[dict[str, Any]] = [{name: x} for x in (own, wide[..., :columns], later[..., 3 : columns + 3], apart)]
    found = [op(q, k, v, **each) for each in views]
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, **views[0])
    assert (found[0].double() - exact).abs().max() < 1.5e-2
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("start", [200, 203])
def test_chunks_of_a_shard(start: int) -> None:
    op = hopper(STAGED["bias"])
    q, k, v = (normal(1, 2, n, 128, seed=n).bfloat16() for n in (170, 200, 200))
    whole: dict[str, Any] = {"q_start": 301, "kv_start": start, "q_total": 600, "kv_total": 696}
    bias = normal(2, 600, 696, seed=4).bfloat16()
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, bias=bias, **whole)
    assert (op(q, k, v, bias=bias, **whole).double() - exact).abs().max() < 1.5e-2


MISTAKES = {
    "nobody waits": (r"fg::copy_async_wait<0>\(\);\n( +fg::warp_barrier\(\);\n +staged_pairs)", r"\1"),
    "lanes do not meet": (r"fg::warp_barrier\(\);\n( +staged_pairs)", r"\1"),
    "copied while it is read": (r"fg::warp_barrier\(\);  // all have read what lies there\n", ""),
    "rows behind the last one": (r"row \+ own_row\(\) < row_count && ", ""),
    "the place of another warp": (r"Memory::PAIRS \+ fg::warp_index\(\)", "Memory::PAIRS + 1 / (1 + fg::warp_index())"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_staging_are_seen(name: str) -> None:
    op = changed(f"planted_pairs_{list(MISTAKES).index(name)}", STAGED["bias"], "forward", *MISTAKES[name])
    q, k, v = (normal(1, 1, n, 128, seed=n).bfloat16() for n in (130, 520, 520))
    with pytest.raises(EmulatorError):
        op(q, k, v, bias=normal(1, 130, 520, seed=4).bfloat16())


@pytest.mark.parametrize(
    ("body", "is_shared"),
    [
        (BIAS, False),
        (STAGED["bias"].removeprefix("head_dim 128  "), True),
        ("tensor bias: f32[Nk, Nq]  score s + bias[j, i]", True),
        ("tensor bias: bf16[H, Nk]  score s + bias[h, j]", False),
        ("tensor keep: bool[Nq, Nk]  mask keep[i, j]", True),
        (f"{BIAS} + table[i, j]  tensor table: f16[Nq, Nk]", True),
    ],
)
def test_which_tiles_take_their_batch_entries_together(body: str, *, is_shared: bool) -> None:
    assert recipe_of(variant_of(f"attention read {{ head_dim 64  dtype bf16  {body} }}")).batch_inside is is_shared


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (BIAS, ["bias"]),
        ("tensor bias: f16[Nk, B, Nq, H] grad  score s + bias[j, b, i, h]", ["bias"]),
        (BIAS.replace(" grad", ""), []),
        ("tensor bias: f32[B, H, Nq, Nk] grad  score s + bias[b, h, i, j]", []),  # sums are float32 already
        ("tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]", []),  # batch entries share elements
        ("tensor bias: bf16[B, H, Nk, Nk] grad  score s + bias[b, h, i, j]  mask i < Nk", []),
        ("tensor bias: bf16[B, H, Nq, Nk] grad  score s + bias[b, h, i, j] + bias[b, h, i, 0]", []),
    ],
)
def test_what_pairs_store(body: str, stored: list[str]) -> None:
    source = f"attention kept {{ head_dim 64  dtype bf16  {body} }}"
    assert [each.name for each in stored_tensors(variant_of(source).spec)] == stored
    assert ("void store_pairs(" in emitted(source, "sm_90a").text) == bool(stored)


def test_a_gradient_that_repeats_is_the_stored_one_but_for_rounding() -> None:
    op = hopper(f"head_dim 64  {BIAS}  mask causal")
    shapes = (1, 2, 90, 64), (1, 2, 90, 64), (1, 2, 90, 64), (1, 2, 90, 90)
    found = []
    for repeats in (False, True):
        q, k, v, bias = (normal(*shape, seed=n).bfloat16().requires_grad_() for n, shape in enumerate(shapes))
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(repeats)
        try:
            o = op(q, k, v, bias=bias)
            found.append(torch.autograd.grad(o, bias, normal(*o.shape, seed=9).bfloat16())[0])
        finally:
            torch.use_deterministic_algorithms(before)
    stored, summed = found
    assert stored.dtype is summed.dtype is torch.bfloat16
    assert (stored.float() - summed.float()).norm() < 4e-3 * summed.float().norm()
    assert not stored.triu(1).any()


def _value(expr: Expr, dot: NDArray[np.float32]) -> NDArray[np.float32]:
    match expr:
        case Literal(value=value):
            return np.float32(value) * np.ones_like(dot)
        case Apply(op=op, args=args):
            first, second = (_value(each, dot) for each in args)
            return first * second if op == "mul" else first + second
    assert expr == DOT
    return dot


@pytest.mark.parametrize("cap", [2.0, 30.0, 50.0, -7.0])
def test_scores_near_0_are_right(cap: float) -> None:
    variant = variant_of(f"attention near {{ head_dim 64  score {cap} * tanh(s / {cap}) }}")
    near = recipe_of(variant).near
    assert near is not None
    assert near.bound == pytest.approx(FAR * abs(cap) * 8)  # of products, of which scores are an eighth
    dot = np.linspace(-near.bound, near.bound, 1_000_001).astype(np.float32)
    exact = cap * np.tanh(dot.astype(np.float64) / 8 / cap)
    assert np.abs(_value(near.score, dot) - exact).max() < 3.2e-7 * abs(cap)


def test_tiles_with_few_large_scores() -> None:
    """Of some warps all scores are near 0, of others none are or one is."""
    op = hopper("head_dim 64  score softcap(s, 5.0)  mask causal")
    q, k, v = (normal(1, 2, 150, 64, seed=seed) for seed in range(3))
    q[:, :, :70] /= 10
    q[:, :, 100] *= 30
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64)
    assert (op(q, k, v).double() - exact).abs().max() < 1.5e-2
