"""bfloat16 by the kind of products that this machine would not choose: of matrices, in vectors, or float32's."""

from __future__ import annotations

import pytest

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.runtime.compiler import cpu_identity
from flashgen.verification import fitting
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures

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
}
SHAPES = (Shape(1, 2, 2, 1, 1), Shape(2, 4, 2, 45, 77), Shape(1, 2, 1, 203, 203), Shape(1, 1, 1, 300, 270))
OTHER = 0 if "amx_bf16" in cpu_identity() else 2  # as FLASHGEN_MATRIX_PRODUCTS says it


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"c++ -DFLASHGEN_MATRIX_PRODUCTS={OTHER}")
    op = flashgen.loads(f"attention {name}_by_{OTHER} {{ {SPECS[name]} }}")
    for seed, shape in enumerate(SHAPES):
        case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, fitting(op.spec, shape), seed=seed)
        assert case.ok, failures(case)
