"""q, k and v of 8 bits: what calls mean, on kernels for them and on wider ones, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.flash import flash_attn_func
from flashgen.hosts.emulated import EmulatedKernel, recording
from flashgen.hosts.kernel import Prepared, Values
from flashgen.ir.shape import Shape
from flashgen.kinds.kind import PassName
from flashgen.op.eight_bits import fitting_factors, rounded_weights, to_8_bits
from flashgen.op.op import AttentionOp
from flashgen.verification.f8 import rows_of
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs, random_inputs
from flashgen.verification.verify import relative_error
from tools.fuzz.draws import CallDraw, Case, Machine
from tools.fuzz.judge import judge

from ..op.helpers import op as loaded

B, H, HKV, D = 2, 4, 2, 64
CAUSAL = "attention causal_f8 { head_dim 64, 40, 128/96  mask causal }"
# What a head, a row and a column know, a score that is no multiple of a product, and a mask that reads tensors.
RICH = """
attention rich_f8 {
    head_dim 64/32
    tensor slope: f32[H]
    tensor doc: i32[B, Nk]
    param gain: f32 = 0.5
    score gain * 8.0 * tanh(s / 8.0) - slope[h] * abs(i - j)
    mask causal and (doc[b, i] == doc[b, j] or j < 3)
    weights softmax(sink = slope[h])
    dropout 0.25
}
"""
FORMS = {
    "causal": CAUSAL,
    "rich": RICH,
    "sigmoid": "attention sigmoid_f8 { head_dim 32  weights sigmoid(s - log(float(Nk))) }",
    "squares": "attention squares_f8 { head_dim 96  weights normalize2(s * s) }",
    "blocks": "attention blocks_f8 { head_dim 32  layout block 16: popcount(I ^ J) < 2 }",
    "large": "attention large_f8 { head_dim 256  mask j <= i + 9 }",
}


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(rows: int = 100, keys: int = 100, width: int = D, v_width: int = D) -> dict[str, Any]:
    """q, k and v of 8 bits, and their factors, each another number."""
    q, k, v = random(B, H, rows, width), random(B, HKV, keys, width, seed=2), random(B, HKV, keys, v_width, seed=3)
    found: dict[str, Any] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        factors = fitting_factors(x, HKV) * random(B, HKV, seed=4).abs().add(1)
        found |= {f"{name}_descale": factors, name: to_8_bits(x, factors.repeat_interleave(x.shape[1] // HKV, 1))}
    return found


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """The numbers that are meant, in float64."""
    factors = {name: given[f"{name}_descale"].double() for name in "qkv"}
    return {
        name: given[name].double() * each.repeat_interleave(given[name].shape[1] // HKV, 1)[:, :, None, None]
        for name, each in factors.items()
    }


def emulated(text: str, target: str = "sm_90a") -> AttentionOp:
    return flashgen.loads(text, backend="emulator", target=target)


@pytest.mark.parametrize("backend", ["cpu", "reference", "tiled"])
def test_numbers_times_their_factors_are_what_is_attended_to(backend: str) -> None:
    op, given = loaded(CAUSAL, backend), arguments()
    o, lse = op(**given, return_lse=True)
    exact, exact_lse = op.reference(**wide(given), return_lse=True)
    assert o.dtype is torch.bfloat16
    assert relative_error(o, exact) < 4e-3  # that of rounding o
    assert relative_error(lse, exact_lse) < 1e-6
    assert relative_error(op.reference(**given), exact) < 1e-12
    assert relative_error(op.reference(**given, dtype=None), exact) < 1e-5


def test_factors_are_one_unless_given_and_may_be_a_number() -> None:
    op, given = loaded(CAUSAL, "cpu"), arguments()
    q, k, v = (given[name] for name in "qkv")
    plain = op(q, k, v)
    assert torch.equal(plain, op(q, k, v, q_descale=1.0, k_descale=torch.ones(B, HKV), v_descale=torch.ones(1)))
    assert relative_error(op(q, k, v, v_descale=0.25), plain.double() / 4) < 1e-9
    assert torch.equal(op(q, k, v, q_descale=0.5), op(q, k, v, k_descale=0.5))


def test_a_spec_without_float32_widens_to_what_it_has() -> None:
    given = arguments()
    op = flashgen.loads("attention narrow_f8 { head_dim 64 dtype bf16, f8e4m3 mask causal }", backend="cpu")
    assert relative_error(op(**given), op.reference(**wide(given))) < 1e-2
    with pytest.raises(TypeError, match="name f8e4m3 in its dtype statement, too"):
        flashgen.loads("attention other_f8 { head_dim 64 dtype bf16 }", backend="cpu")(**given)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.float32}, ValueError, "'k_descale' goes with q, k and v of 8 bits"),
        ({"k": torch.float32, "k_descale": None}, TypeError, "'k' is torch.float32, but 'q' is torch.float8_e4m3fn"),
        ({"q": torch.float32}, ValueError, "'q_descale' goes with q, k and v of 8 bits"),
        ({"k_descale": "1"}, TypeError, "'k_descale' must be a number or a tensor"),
        ({"v_descale": torch.ones(B, 3)}, ValueError, r"'v_descale' has shape \[2, 3\]; \[B, Hkv\] = \[2, 2\]"),
        ({"q_descale": torch.ones(B, HKV, dtype=torch.int32)}, TypeError, "'q_descale' is torch.int32"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = arguments()
    for name, value in change.items():
        given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(error, match=message):
        loaded(CAUSAL, "cpu")(**given)


def test_there_are_no_gradients() -> None:
    op, given = loaded(CAUSAL, "cpu"), arguments()
    given["v_descale"] = given["v_descale"].requires_grad_()
    with pytest.raises(RuntimeError, match="q, k and v of 8 bits have no gradients"):
        op(**given).sum().backward()


def test_ragged_and_jagged_calls_refuse_8_bits_by_name() -> None:
    op, given = loaded(CAUSAL, "cpu"), arguments()
    q, k, v = (given[name][0].transpose(0, 1) for name in "qkv")
    starts = torch.tensor([0, 100], dtype=torch.int32)
    with pytest.raises(TypeError, match="8 bits are for dense calls, and for the caches"):
        op.varlen(q, k, v, starts, starts)
    jagged = torch.nested.nested_tensor([random(H, 5, D)[0], random(H, 7, D)[0]], layout=torch.jagged)
    with pytest.raises(ValueError, match="go with dense q, k and v"):
        op(jagged, jagged, jagged, q_descale=1.0)


def test_compiled_programs_call_it() -> None:
    op, given = loaded(CAUSAL, "cpu"), arguments()
    found = torch.compile(lambda given: op(**given), backend="eager", fullgraph=True)(given)
    assert torch.equal(found, op(**given))


def test_flash_attention_takes_factors() -> None:
    given = arguments()
    rows = {name: x.transpose(1, 2) if name in "qkv" else x for name, x in given.items()}
    found = flash_attn_func(**rows, causal=True)
    assert found.dtype is torch.bfloat16
    truth = loaded("attention flash_f8 { head_dim 64 mask causal }", "cpu").reference(**wide(given))
    assert relative_error(found.transpose(1, 2), truth) < 4e-3


def test_weights_of_8_bits_begin_at_each_rows_largest() -> None:
    weights = torch.tensor([[0.0, 1e-9, 2e-9], [0.0, 0.0, 0.0], [1.0, 0.51, 1e-3]])
    found = rounded_weights(weights)
    assert torch.equal(found[1], weights[1])
    assert torch.allclose(found, weights, rtol=1 / 16, atol=0.0)
    assert len(set(rounded_weights(torch.linspace(0.5, 1, 1000)).tolist())) == 9  # three bits behind the first


# -- kernels for Hopper, on the emulator -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        "causal",
        "rich",
        *(pytest.param(each, marks=pytest.mark.slow) for each in FORMS if each not in ("causal", "rich")),
    ],
)
def test_kernels_multiply_8_bits(form: str) -> None:
    op = emulated(FORMS[form])
    for number, shape in enumerate((Shape(1, 2, 1, 70, 300), Shape(2, 2, 2, 33, 129), Shape(1, 1, 1, 1, 1))):
        inputs = random_inputs(op.spec, shape, op.spec.head_dims[0], torch.float32, realistic=number % 2 == 1)
        with recording() as counted:
            rows = rows_of(op, inputs)
        assert all(row.ok for row in rows), rows
        assert any(each.values["element"] == 3 for each in counted)


def test_it_moves_what_is_predicted_and_repeats() -> None:
    op, given = emulated(CAUSAL), arguments(130, 200)
    with recording() as counted:
        first, second = op(**given), op(**given)
    assert torch.equal(first, second)
    inputs = Inputs(**{name: given[name] for name in "qkv"}, captured={}, params={}, d_o=first, d_lse=first[..., 0])
    moved = hbm_bytes(op, inputs, counted)["forward"]
    assert moved.predicted == moved.counted
    traffic = counted[0].report.traffic
    assert traffic["q"].total == B * H * 130 * D
    assert traffic["o"].total == 2 * B * H * 130 * D
    shown = op.explain(given["q"], given["k"], given["v"])
    assert shown.forward.kernels[-1].name == "causal_f8_d64_f8_forward_f8e4m3"
    assert shown.element == "f8e4m3"


def test_factors_go_with_parts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is too large for 32 bits becomes several, of batches and heads, whose factors lie elsewhere."""
    op, given = emulated(CAUSAL), arguments(40, 40)
    whole = op(**given)
    original = EmulatedKernel.prepare

    def divided(self: EmulatedKernel, name: PassName, values: Values) -> Prepared:
        return original(dataclasses.replace(self, most=2 * 40 * D), name, values)

    monkeypatch.setattr(EmulatedKernel, "prepare", divided)
    other = emulated(CAUSAL.replace("causal_f8", "divided_f8"))
    with recording() as counted:
        assert torch.equal(other(**given), whole)
    assert len(counted) == 1


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-30, 1e30])
def test_factors_that_no_exponent_takes_in(factor: float) -> None:
    op, given = emulated(CAUSAL), arguments(33, 70)
    given["k_descale"] = given["k_descale"] * factor
    if factor == 1e30:
        given["q_descale"] = given["q_descale"] * 1e-30
    exact = op.reference(**wide(given))
    assert relative_error(op(**given), exact) < 0.04


@pytest.mark.parametrize(
    ("text", "width", "target"),
    [
        ("attention odd_f8 { head_dim 40 mask causal }", 40, "sm_90a"),
        ("attention norms_f8 { head_dim 32 score -sqdist / 20 }", 32, "sm_90a"),
        ("attention ampere_f8 { head_dim 32 mask causal }", 32, "sm_80"),
    ],
)
def test_where_no_kernel_takes_8_bits_they_are_widened(text: str, width: int, target: str) -> None:
    op, given = emulated(text, target), arguments(20, 30, width, width)
    with recording() as counted:
        found = op(**given)
    assert relative_error(found, op.reference(**wide(given))) < 4e-3
    assert all(each.values["element"] == 0 for each in counted)
    assert "q, k and v are widened to torch.float32" in str(op.explain(given["q"], given["k"], given["v"]))


def test_what_stands_for_an_empty_tensor_lives_as_long_as_the_kernel(tmp_path: Path) -> None:
    """Found by a random spec: memory that was given back was read."""
    text = "attention empty_f8 { head_dim 32 tensor bias: f32[Nk // 64] tensor id: i32[B] score s + bias[id[b]] }"
    call = CallDraw(0, "bf16", (1, 1, 1, 5, 5), eight_bits=True)
    for machine in (Machine("emulator", "sm_90a"), Machine("tiled")):
        verdict = judge(Case(text, (call,), machine), tmp_path)
        assert not verdict.findings
        assert verdict.results == 2
