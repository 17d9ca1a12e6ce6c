"""Single functions of PyTorch mean in a mod what they mean to FlexAttention: values and gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name

from flashgen.diagnostics import SpecError
from flashgen.flex import create_block_mask, flex_attention, to_spec
from tests.flex.helpers import assert_close, gradients, inputs, judged

Mod = Callable[..., Any]
BYTES, SIGNED = torch.arange(24, dtype=torch.uint8), torch.arange(-12, 12, dtype=torch.int8)
HALVES = torch.arange(24, dtype=torch.float16)
IDS = torch.zeros(4, 24, dtype=torch.int64)
WEIGHTS = torch.zeros(4, 24, requires_grad=True)
TABLE, LARGE, INFINITY = torch.zeros(24, 3), 256, float("inf")


class Factor(enum.IntEnum):
    THREE = 3


class Weight(float):
    """A number of a class of its own."""


def _in_place(s: Any) -> Any:
    first, second, third = s.clone(), s.clone(), s.clone()
    F.relu(first, inplace=True)
    F.silu(second, True)
    return first + second + F.leaky_relu(third, 0.1, inplace=True) * third


SCORES: dict[str, Mod] = {
    # functions
    "float_power of ints": lambda s, b, h, i, j: s + torch.float_power(2, i - j).clamp(max=3),
    "float_power j**8": lambda s, b, h, i, j: s + torch.float_power(j, 8) / 1e10,
    "softplus threshold": lambda s, b, h, i, j: F.softplus(s, 1, 0.0),
    "softplus beta threshold": lambda s, b, h, i, j: F.softplus(s, 2.0, threshold=0.5),
    "softplus beta": lambda s, b, h, i, j: F.softplus(30 * s, 0.5),
    "gelu(tanh)": lambda s, b, h, i, j: F.gelu(s, approximate="tanh"),
    "inplace": lambda s, b, h, i, j: _in_place(s),
    "an enum": lambda s, b, h, i, j: s + (i - j) * Factor.THREE * 0.1 + h * Weight(0.5),
    "shape.numel()": lambda s, b, h, i, j: (
        s * BYTES.shape.numel() / 24 + TABLE.shape[:1].numel() * TABLE[i].shape.numel()
    ),
    "the same object": lambda s, b, h, i, j: _same(s) + _same(s.clone()),
    "by PyTorch's names": lambda s, b, h, i, j: _by_name(s, i, j),
    "torch.special": lambda s, b, h, i, j: torch.special.erf(s) + torch.special.exp2(-(i * 0.1)),
    "a power": lambda s, b, h, i, j: s + (i + 1) ** -2.0 + torch.pow(2.0, -i) + (i % 5) ** 2,
    "in place": lambda s, b, h, i, j: torch.where(_narrowed(i, j), s, _refilled(s, i)),
    "shapes of one": lambda s, b, h, i, j: s.view(1)[0] + s[None].sum() + s.reshape(()) * s.unsqueeze(0).squeeze(),
    "powers in place": lambda s, b, h, i, j: s.clone().pow_(2) + i.clone().mul_(2) * 0.1,
    # types of few bits
    "uint8": lambda s, b, h, i, j: s + torch.where((BYTES[j] > 5) & (BYTES[i] != 255), 0.5, 0) + BYTES[j].int(),
    "uint8 & 254": lambda s, b, h, i, j: s + (BYTES[j] & 254).clamp(3, 200).float() / 100,
    "zeros_like(uint8)": lambda s, b, h, i, j: s + torch.where(i > j, BYTES[j], torch.zeros_like(BYTES[j])),
    "~int8": lambda s, b, h, i, j: s + (~SIGNED[j]).float() + SIGNED[i].to(torch.int16),
    "full_like(float16)": lambda s, b, h, i, j: s + torch.full_like(HALVES[j], 0.5),
    # conversions
    "to(int)": lambda s, b, h, i, j: s + (h + 1) * ((i > j).to(int) + (j > 3).to(int)),
    "to(float)": lambda s, b, h, i, j: s + ((i > j).to(float) + (j > 3).to(dtype=float)),
    "to(device, dtype)": lambda s, b, h, i, j: s + (i > j).to("cpu", int) + (i > j).to(torch.int32, True),
    "type_as": lambda s, b, h, i, j: s + (i > j).type_as(i) + (j > 3).type_as(i),
    "type_as(a row)": lambda s, b, h, i, j: s + (1.7 * i).type_as(IDS[h]) + (2.7 * j).to(IDS[h]),
    "type(tensor type)": lambda s, b, h, i, j: s + (3 * s).type(torch.LongTensor) * 0.5,
    "type(text)": lambda s, b, h, i, j: s + (3 * s).type("torch.LongTensor") * 0.5,
    "full_like(dtype=float)": lambda s, b, h, i, j: s * torch.full_like(i, 2.7, dtype=float),  # type: ignore[arg-type]
    "new_full(dtype=int)": lambda s, b, h, i, j: s * s.new_full((), 2.7, dtype=int),
}
MASKS: dict[str, Mod] = {
    "isclose of infinities": lambda b, h, i, j: torch.isclose((j - 5) * INFINITY, (i - 5) * INFINITY) | (i == 5),
    "isclose of one infinity": lambda b, h, i, j: torch.isclose(i * 1.0, (j + 1) * INFINITY) | (i >= j),
    "isclose of numbers": lambda b, h, i, j: torch.isclose(i * 1.0, j * 1.0, rtol=0.1),
    "ones_like(dtype=bool)": lambda b, h, i, j: torch.ones_like(i, dtype=bool),  # type: ignore[arg-type]
}
REFUSED: list[tuple[Mod, str, str]] = [
    (lambda s, b, h, i, j: s + (i + 1) ** -2, "E603", "negative integer powers are not allowed"),
    (lambda s, b, h, i, j: F.gelu(s, approximate="exact"), "E603", "no approximate='exact'"),
    (lambda s, b, h, i, j: s + SIGNED[j].to(torch.uint8), "E603", "torch.uint8 would drop bits"),
    (lambda s, b, h, i, j: s + SIGNED[j].byte(), "E603", "torch.uint8 would drop bits"),
    (lambda s, b, h, i, j: s + ~BYTES[j], "E603", "torch.uint8 wraps at the ends of that type, 0 and 255"),
    (lambda s, b, h, i, j: s + (BYTES[j] | -2), "E603", "-2 as torch.uint8 wraps"),
    (lambda s, b, h, i, j: torch.where(BYTES[j] > -1, s, -s), "E603", "-1 as torch.uint8 wraps"),
    (lambda s, b, h, i, j: torch.where(BYTES[j] == LARGE, s, -s), "E603", "256 as torch.uint8 wraps"),
    (lambda s, b, h, i, j: s + BYTES[j].masked_fill(i > j, SIGNED[j]), "E603", "torch.uint8 would drop bits"),
    (lambda s, b, h, i, j: s + BYTES[j].clone().bitwise_or_(i), "E603", "torch.uint8 would drop bits"),
    (lambda s, b, h, i, j: s + HALVES[j].clone().add_(s), "E603", "torch.float16 would round"),
    (lambda s, b, h, i, j: s + HALVES[j].bfloat16(), "E603", "torch.bfloat16 would round"),
    (lambda s, b, h, i, j: s + i.to("int64"), "E603", "'int64' is no type of numbers"),
    (lambda s, b, h, i, j: s + i.to(torch.LongTensor), "E603", "'LongTensor' is no type of numbers"),
    (lambda s, b, h, i, j: s + i.type(int), "E603", "'int' is no type of tensors"),
    (lambda s, b, h, i, j: s if i.type() == "torch.LongTensor" else 2 * s, "E602", "ask for x.dtype"),
    (lambda s, b, h, i, j: torch.add(s, 1, out=s), "E602", "'add' of a mod writes to no tensor that it is given"),
    (lambda s, b, h, i, j: TABLE.add_(s), "E602", "cannot change a captured tensor"),
    (lambda s, b, h, i, j: s.to(complex).real, "E603", "cannot convert to torch.complex128"),
]


def _same(s: Any) -> Any:
    for number, same in enumerate(
        (
            s.contiguous(), s.to(s.dtype), s.to("cpu"), s.to(s), s.to(s.dtype, True), s.type(s.dtype), +s, s.type_as(s),
            torch.positive(s), torch.as_tensor(s),
        )
    ):  # fmt: skip
        same.add_(number + 1)
    for other in (s.clone(), s.to(s.dtype, copy=True), s.to(s.dtype, False, True), s * 1):
        other.add_(100)
    return s


def _narrowed(i: Any, j: Any) -> Any:
    keep = i >= j
    same = keep
    keep &= i - j < 9
    keep |= j < 2
    keep ^= j == 5
    half = i.clone()
    half >>= 1
    half <<= 2
    half |= 1
    return same & (half % 5 != 0)


def _refilled(s: Any, i: Any) -> Any:
    first, second, third = s.clone(), s.clone(), i.clone()
    first.zero_()
    second.copy_(i)
    third.fill_(2.7)
    fourth = i.clone()
    fourth.long().add_(7)
    return first + second * 0.1 + third + fourth


def _by_name(s: Any, i: Any, j: Any) -> Any:
    keep = torch.logical_and(i > 1, other=torch.lt(input=j, other=i))
    x = torch.where(keep, s, other=-s) + torch.where(condition=keep, input=s, other=s * 2)
    x = torch.add(x, other=i, alpha=0.1) + torch.pow(s, exponent=2) + torch.pow(self=2.0, exponent=s)
    x = torch.div(x, other=2) + torch.maximum(s, other=x) + torch.clamp(input=s, min=0) + torch.tanh(input=s)
    x = x + torch.full_like(input=i, fill_value=3) + F.gelu(input=s) + torch.full(size=(), fill_value=LARGE)
    x = torch.lerp(x, end=s, weight=0.3)
    return torch.addcmul(x, tensor1=s, tensor2=s, value=0.1) + torch.remainder(input=i, other=3)


@pytest.mark.parametrize("name", SCORES)
def test_in_a_score_mod(name: str) -> None:
    q, k, v = wanted = inputs(q_len=12, kv_len=12)
    mine = flex_attention(q, k, v, SCORES[name], return_lse=True, backend="reference")
    theirs = judged(q, k, v, SCORES[name])
    for x, y in zip((*mine, *gradients(mine, wanted)), (*theirs, *gradients(theirs, wanted)), strict=True):
        assert_close(x, y, 1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the judge: PyTorch maps isclose by a loop
@pytest.mark.parametrize("name", MASKS)
def test_in_a_mask_mod(name: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    mask = create_block_mask(MASKS[name], None, None, q.shape[2], k.shape[2])
    mine = flex_attention(q, k, v, None, mask, backend="reference")
    assert_close(mine, judged(q, k, v, None, MASKS[name])[0])


def _frozen(of: str) -> Mod:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            w = 2 * s if of == "the score" else WEIGHTS[h][j] if of == "a row" else WEIGHTS[h, j]
            d = (i - j).float() * TABLE[i, 0] + WEIGHTS.exp()[h, j]
        return s + w + d + TABLE[i, 0].detach()

    return mod


@pytest.mark.parametrize("of", ["an element", "a row", "the score"])
def test_values_without_their_gradient_are_refused(of: str) -> None:
    q, k, v = inputs()
    with pytest.raises(SpecError, match="'no_grad' takes a value out of the gradient"):
        flex_attention(q, k, v, _frozen(of), backend="reference")
    with torch.no_grad():
        flex_attention(q, k, v, _frozen(of), backend="reference")
    with pytest.raises(SpecError, match="'no_grad' takes a value out of the gradient"):
        flex_attention(q, k, v, _frozen(of), backend="reference")


TIES: dict[str, Callable[[Any], Any]] = {
    "clamp(min)": lambda x: x.clamp(min=0),
    "clamp(max)": lambda x: torch.clamp(x, max=0),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: torch.clamp_max(x, 0),
    "clamp": lambda x: x.clamp(0, 2),
    "clamp by a tensor": lambda x: x.clamp(min=x.exp() - 1),
    "fmod": lambda x: torch.fmod(x, 1.0),
    "fmod by a tensor": lambda x: torch.fmod(x + 2.3, x + 1.1) + torch.fmod(x - 2.3, -x - 1.1),
    "relu": torch.relu,
    "abs": torch.abs,
}


@pytest.mark.parametrize("name", TIES)
def test_derivatives_at_ties(name: str) -> None:
    """A learned table that begins with zeros."""
    table = torch.zeros(4, 24, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + TIES[name](table[h, j]) * (1 + i)

    q, k, v = inputs()
    mine = gradients(flex_attention(q, k, v, mod, return_lse=True, backend="reference"), [table])
    theirs = gradients(judged(q, k, v, mod), [table])
    assert_close(mine[0], theirs[0], 1e-4)


@pytest.mark.parametrize(("mod", "code", "words"), REFUSED)
def test_what_is_refused(mod: Mod, code: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        to_spec(score_mod=mod)
    assert caught.value.diagnostics[0].code == code
    assert words in str(caught.value)
