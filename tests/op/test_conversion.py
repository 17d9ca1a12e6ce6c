"""Numbers and captured tensors of other types: converted, checked, with gradients in their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashgen
from tests.op.helpers import CAUSAL, RICH, captured, error, op, qkv, random

WIDE = """
attention wide {
    head_dim 16
    tensor page: i64[Nk]
    tensor pair: f16[H, Nk] grad
    tensor seen: bool[Nk]
    score s + pair[h, j] * (page[j] % 3)
    mask seen[j]
}
"""
N = 37
INTEGERS = [torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def results(call: Any, inputs: list[Tensor], learned: Tensor, name: str, **arguments: Any) -> list[Tensor]:
    """o, and the gradients of the inputs and of the captured tensor of this name."""
    o = call(*inputs, **arguments, **{name: learned})
    return [o.detach(), *torch.autograd.grad(o.sum(), [*inputs, learned])]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_any_integer_type(backend: str, dtype: torch.dtype) -> None:
    inputs, given = [x.detach() for x in qkv()], captured()
    declared = op(RICH, backend)(*inputs, **given)
    given["doc"] = given["doc"].to(dtype)
    assert torch.equal(op(RICH, backend)(*inputs, **given), declared)
    assert error(declared, op(RICH, backend).reference(*inputs, **given)) < 1e-5
    wide: dict[str, Any] = {"pair": random(4, N).half(), "seen": torch.arange(N) % 5 > 0}
    page = torch.arange(N)
    expected = op(WIDE, backend)(*inputs, page=page, **wide)
    assert torch.equal(op(WIDE, backend)(*inputs, page=page.to(dtype), **wide), expected)


def test_the_ends_of_i32(backend: str) -> None:
    inputs, given = [x.detach() for x in qkv()], captured()
    for end in (-(2**31), 2**31 - 1):
        given["doc"] = torch.full((2, N), end, dtype=torch.int32)
        declared = op(RICH, backend)(*inputs, cut=end, **given)
        given["doc"] = given["doc"].long()
        assert torch.equal(op(RICH, backend)(*inputs, cut=torch.tensor(end), **given), declared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_real_numbers_of_any_type(backend: str, dtype: torch.dtype) -> None:
    """The gradient is that of the declared type, in the type of what was passed."""
    inputs, given = qkv(), captured()
    slope = given.pop("slope").detach().to(dtype).requires_grad_()
    declared = slope.detach().float().requires_grad_()
    truth = results(op(RICH, backend), inputs, declared, "slope", **given)
    found = results(op(RICH, backend), inputs, slope, "slope", **given)
    assert found[-1].dtype is dtype
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, truth, strict=True))


def test_infinities_are_numbers_of_every_type(backend: str) -> None:
    text = "attention infinite { head_dim 16 tensor bias: f32[Nk] score s + bias[j] }"
    inputs = [x.detach() for x in qkv()]
    bias = torch.where(torch.arange(N) < 5, -torch.inf, 0.0)
    assert torch.equal(op(text, backend)(*inputs, bias=bias.double()), op(text, backend)(*inputs, bias=bias))


def test_float16_holds_less() -> None:
    inputs = [x.detach() for x in qkv()]
    given: dict[str, Any] = {"page": torch.arange(N), "seen": torch.ones(N, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"tensor 'pair' is torch\.float32 and holds numbers beyond f16"):
        op(WIDE, "reference")(*inputs, pair=torch.full((4, N), 7e4), **given)
    with pytest.raises(TypeError, match=r"tensor 'seen' is torch\.uint8; the spec declares bool .*takes bool tensors"):
        op(WIDE, "reference")(*inputs, pair=torch.ones(4, N), **{**given, "seen": torch.ones(N, dtype=torch.uint8)})


def test_numbers_of_numpy(backend: str) -> None:
    inputs, given = [x.detach() for x in qkv()], captured()
    expected = op(RICH, backend)(*inputs, bias=0.5, cut=3, dropout_p=0.5, **given)
    given["seed"] = np.uint8(given["seed"])
    found = op(RICH, backend)(*inputs, bias=np.float16(0.5), cut=np.int8(3), dropout_p=np.float32(0.5), **given)
    assert torch.equal(found, expected)
    later = op(CAUSAL, backend)(*inputs, q_start=np.int64(3), q_total=np.uint16(50))
    assert torch.equal(later, op(CAUSAL, backend)(*inputs, q_start=3, q_total=50))


def test_params_in_other_types(backend: str) -> None:
    inputs, given = qkv(), captured()
    ell = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
    found = results(op(RICH, backend), inputs, ell, "ell", cut=torch.tensor(3), **given)
    truth = results(op(RICH, backend), inputs, ell.detach().float().requires_grad_(), "ell", cut=3, **given)
    assert found[-1].dtype is torch.float64
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference", "emulator"])
@pytest.mark.parametrize("seed", [5, -5, 200])
def test_a_seed_of_any_integer_type(backend: str, seed: int) -> None:
    """The op and the reference draw the decisions of the same number."""
    text = "attention seeded { head_dim 16 dropout 0.5 }"
    inputs = [x.detach() for x in qkv(9)]
    expected = op(text, backend)(*inputs, seed=seed)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8, torch.uint64):
        if dtype.is_signed or seed > 0:
            given = torch.tensor(seed if dtype is not torch.int8 else min(seed, 100), dtype=dtype)
            own = op(text, backend)(*inputs, seed=given)
            assert error(own, op(text, backend).reference(*inputs, seed=given)) < 1e-5
            assert torch.equal(own, expected) == (int(given) == seed)


def test_seeds_beyond_63_bits() -> None:
    seeded = op("attention seeded { head_dim 16 dropout 0.5 }", "reference")
    inputs, seed = [x.detach() for x in qkv(9)], 2**63 + 5
    expected = seeded(*inputs, seed=seed)
    others: list[Any] = [torch.tensor(seed, dtype=torch.uint64), seed - 2**64, seed + 2**64, np.uint64(seed)]
    for same in others:
        assert torch.equal(seeded(*inputs, seed=same), expected)
        assert error(expected, seeded.reference(*inputs, seed=same)) < 1e-5


def test_converted_in_a_compiled_graph() -> None:
    """Values are looked at when they are there: nothing breaks the graph or waits while it is made."""
    torch._dynamo.reset()
    inputs, given = [x.detach() for x in qkv()], captured()
    rich = op(RICH, "reference")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(doc: Tensor, slope: Tensor) -> Tensor:
        o: Tensor = rich(*inputs, **{**given, "doc": doc, "slope": slope})
        return o

    doc, slope = given["doc"].long(), given["slope"].detach().double()
    assert torch.equal(run(doc, slope), rich(*inputs, **given))
    assert torch.equal(run(doc + 2**40, slope), rich(*inputs, **given))
    for wrong, message in (((doc * 2**40, slope), "beyond i32"), ((doc, slope + 1e39), "beyond f32")):
        with pytest.raises(RuntimeError, match=message):
            run(*wrong)


def test_the_operator_itself_is_strict() -> None:
    """``torch.ops`` has no name to convert by; what is wrong has one all the same."""
    seeded = op("attention seeded { head_dim 16 dropout 0.5 }", "reference")
    run = getattr(torch.ops.flashgen, seeded.name.partition("::")[2])
    inputs, rest = [x.detach() for x in qkv(9)], (0, 0, 0, 0, None, None, None, None, False)
    for seed, message in (
        (torch.tensor(5, dtype=torch.int32), r"'seed' is torch\.int32; the operator takes torch\.int64"),
        (torch.tensor([5, 6]), r"'seed' has shape \[2\]"),
        (torch.tensor(5, device="meta"), "is on meta, but 'q' is on cpu"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            run(*inputs, seed, None, *rest)
    name = seeded.name.partition("::")[2]
    rows, starts = [x[0].transpose(0, 1) for x in inputs], torch.tensor([0, inputs[0].shape[2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="'cu_seqlens_k' is on meta, but 'q' is on cpu"):
        getattr(torch.ops.flashgen, f"{name}_varlen")(
            *rows, torch.tensor(5), None, starts, starts.to("meta"), 0, 0, None, None, None, None, False
        )


def test_the_reference_is_exact(backend: str) -> None:
    """It takes a float64 table as it is: a judge rounds nothing."""
    inputs, given = [x.detach() for x in qkv()], captured()
    slope = given.pop("slope").detach().double() + 2.0**-40
    exact = op(RICH, backend).reference(*inputs, slope=slope, **given)
    assert not torch.equal(exact, op(RICH, backend).reference(*inputs, slope=slope.float(), **given))


def test_indices_are_checked_by_the_reference_as_well() -> None:
    packed = flashgen.loads("attention p { head_dim 16 tensor doc: i32[B, Nk] mask same_document(doc) }")
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=r"'p': index 'i' of tensor 'doc' .*Nq = 37"):
        packed.reference(q, k[:, :, :20], v[:, :, :20], doc=torch.zeros(2, 20, dtype=torch.int32))


def test_numbers_lie_on_the_cpu_whatever_the_default_device_is() -> None:
    q, k, v = qkv(9)
    attention = op("attention a { head_dim 16 param c: f32 = 1.0 score c * s dropout 0.1 }", "reference")
    wanted = attention(q, k, v, c=0.5, seed=3, dropout_p=0.2)
    with torch.device("meta"):
        assert torch.equal(attention(q, k, v, c=0.5, seed=3, dropout_p=0.2), wanted)
