"""Each kind of products, whatever this machine would choose for a call: in vectors, of pairs, in matrix registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.toolchains.cpp import cpu_identity
from flashgen.verification import fitting
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import assert_close, failures, normal

# Head dimensions that no register divides, blocks narrower than one, every kind of weight, lists, captured gradients.
SPECS = {
    "odd": "head_dim 33/7  mask causal",
    "window": "head_dim 80  tensor rest: f32[H] grad  weights softmax(sink = rest[h])  mask causal and window_left(40)",
    "blocks": "head_dim 32  layout block 16: J <= I and J >= I - 2",
    "half_groups": "head_dim 64  layout block 16: random_blocks(0.5, 7) or I == J  weights relu(s)",
    "dilated": "head_dim 48  weights normalize(relu(s) * relu(s) + 0.1)  mask causal and (i - j) % 3 == 0",
    "distance": "head_dim 24  score s - 0.02 * sqdist  mask causal",
    "captured": "head_dim 40/24  dropout 0.1  param gain: f32 = 1.0 grad  tensor slope: f32[H] grad "
    " tensor gate: f32[B, H, Nk] grad  tensor table: f32[32, H] grad "
    " score gain * s - slope[h] * abs(i - j) + gate[b, h, j] + table[clamp(i - j, 0, 31), h]  mask causal",
    "distances": "head_dim 32  dropout 0.1 "
    " tensor table: f32[H, Nq + Nk] grad  tensor bucket: i32[Nq]  tensor far: f32[8] grad "
    " score s * cos(i - j) + table[h, Nk + i - j] - far[bucket[max(i - j, 0)] % 8] * log1p(abs(i - j))",
    "guarded": "head_dim 64  tensor table: f32[Nk, Hkv] grad  weights sigmoid(s) * exp(-0.02 * abs(i - j)) "
    " score s + table[i - j, hkv]  mask causal",
}
IN_SLICE = ("odd", "captured", "distances")  # of `make test`
SHAPES = (Shape(1, 2, 2, 1, 1), Shape(2, 4, 2, 45, 77), Shape(1, 2, 1, 203, 203), Shape(1, 1, 1, 300, 270))
HAS_REGISTERS, HAS_PAIRS = ("amx_bf16" in cpu_identity(), "avx512_bf16" in cpu_identity())
# As compilers are told: with matrix registers, or what stands for them in vectors, for calls of any size; with vectors
# of pairs, or what stands for these; and without either, which is what all other tests are about where there are none.
KINDS = {
    "registers": f"-DFLASHGEN_MATRIX_PRODUCTS={1 if HAS_REGISTERS else 2} -DFLASHGEN_FEWEST_ROWS=1",
    "pairs": f"-DFLASHGEN_MATRIX_PRODUCTS=0 -DFLASHGEN_PAIR_PRODUCTS={1 if HAS_PAIRS else 2}",
}
if HAS_REGISTERS or HAS_PAIRS:
    KINDS["vectors"] = "-DFLASHGEN_MATRIX_PRODUCTS=0 -DFLASHGEN_PAIR_PRODUCTS=0"


@pytest.fixture(params=KINDS)
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], AttentionOp]:
    """An operator from a spec's name and body, by one kind of products."""
    kind = str(request.param)
    monkeypatch.setenv("CXX", f"c++ {KINDS[kind]}")
    return lambda name, body: flashgen.loads(f"attention {name}_in_{kind} {{ {body} }}")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_SLICE else pytest.mark.slow) for each in SPECS]
)
def test_every_element_type(name: str, load: Callable[[str, str], AttentionOp]) -> None:
    op = load(name, SPECS[name])
    for element in (ElementType.F32, ElementType.BF16, ElementType.F16):
        for seed, shape in enumerate(SHAPES):
            case = verify_case(op, op.spec.head_dims[0], element, fitting(op.spec, shape), seed=seed)
            assert case.ok, failures(case)


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite(what: str, dtype: torch.dtype, load: Callable[[str, str], AttentionOp]) -> None:
    """Infinities are multiplied as in float64, by what a bfloat16 holds and by others; NaN stays in its row."""
    op = load("not_finite", "head_dim 64")
    q, k, v = inputs = [normal(1, 2, 240, 64, seed=seed).to(dtype) for seed in range(3)]
    q[0, 0, ::2, 3:6] = 1.0
    q[0, 1, 11, 0] = torch.nan
    changed = inputs["qkv".index(what)]
    changed[0, 0, 7, 3], changed[0, 0, 60, 5] = torch.inf, -torch.inf
    o, lse = op(q, k, v, return_lse=True)
    exact, exact_lse = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, return_lse=True)
    for result, truth in ((o, exact), (lse, exact_lse)):
        assert torch.equal(result.isnan(), truth.isnan())
        assert torch.equal(result.isposinf(), truth.isposinf())
        assert torch.equal(result.isneginf(), truth.isneginf())
        finite = truth.isfinite()
        assert_close(result[finite], truth[finite], 2e-5 if dtype is torch.float32 else 4e-3)


def test_the_largest_and_the_smallest_numbers(load: Callable[[str, str], AttentionOp]) -> None:
    """Parts of numbers near the end of float32's range are not infinite; those of tiny ones are not lost."""
    op = load("extremes", "head_dim 32")
    q = normal(1, 1, 200, 32)
    for size, keys in ((3.4e38, 1), (1e-30, 200)):
        k, v = normal(1, 1, keys, 32, seed=1), torch.full((1, 1, keys, 32), size)
        assert_close(op(q, k, v) / size, torch.ones(1, 1, 200, 32), 1e-6)


def test_both_passes_find_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where tiles of one alone repay parts: sums of another order move the weight of a large score by 1e-3."""
    monkeypatch.setenv("CXX", f"c++ -DFLASHGEN_MATRIX_PRODUCTS={1 if HAS_REGISTERS else 2}")
    op = flashgen.loads("attention low_tiles { head_dim 40  mask i == j  schedule { Br = 16 backward_Br = 128 } }")
    q, k = (100.0 * normal(1, 2, 200, 40, seed=seed) for seed in range(2))
    v = normal(1, 2, 200, 40, seed=2).requires_grad_()
    (d_v,) = torch.autograd.grad(op(q, k, v).sum(), v)
    assert_close(d_v, torch.ones_like(v), 2e-6)
