"""The bits that kernels read, and the dense formula with a selection, against lists gone through one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.language import parse_text
from flashgen.op import selected
from flashgen.op.selected import CHECK_SELECTION, lowered_tensors
from flashgen.reference.dense import attention
from flashgen.verification.verify import relative_error

B, H, HKV, NQ, NK, D = 2, 4, 2, 70, 150, 8
SIZES = {"B": B, "H": H, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": D}
Rows = Callable[[int, int, int], tuple[int, ...]]
FORMS: dict[str, tuple[str, str, tuple[int, ...], Rows]] = {
    "of a query": ("B, Hkv, Nq, 5", "b, hkv, i, :", (B, HKV, NQ, 5), lambda b, h, i: (b, h // 2, i)),
    "of 16 queries": ("H, ceildiv(Nq, 16), 3", "h, i // 16, :", (H, 5, 3), lambda _, h, i: (h, i // 16)),
    "of a batch entry": ("B, 7", "b, :", (B, 7), lambda b, _, __: (b,)),
    "of all": ("4", ":", (4,), lambda *_: ()),
    "clamped": ("9, 2", "i + b, :", (9, 2), lambda b, _, i: (min(i + b, 8),)),
    "of lengths": ("Nq, 2", "Nq - 1 - i, :", (NQ, 2), lambda _, __, i: (NQ - 1 - i,)),
}


def lists(shape: tuple[int, ...], blocks: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(-3, blocks + 3, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def one_by_one(numbers: Tensor, rows: Rows, block: int) -> Tensor:
    kept = torch.zeros(B, H, NQ, NK, dtype=torch.bool)
    for b, h, i in itertools.product(range(B), range(H), range(NQ)):
        for number in numbers[rows(b, h, i)].tolist():
            if number >= 0:
                kept[b, h, i, number * block : (number + 1) * block] = True
    return kept


@pytest.mark.parametrize("block", [1, 3, 16, 64, 200])
@pytest.mark.parametrize("form", FORMS)
def test_the_dense_formula_and_the_bits(form: str, block: int) -> None:
    declared, indices, shape, rows = FORMS[form]
    own = parse_text(
        f"attention drawn {{ head_dim 8  tensor idx: i64[{declared}]  select {block}: idx[{indices}]  weights 1.0 }}"
    ).specs[0]
    numbers = lists(shape, -(-NK // block), torch.int64)
    truth = one_by_one(numbers, rows, block)
    q, k, v = torch.zeros(B, H, NQ, D), torch.zeros(B, HKV, NK, D), torch.randn(B, HKV, NK, D)
    o, _ = attention(own, q, k, v, tensors={"idx": numbers}, dtype=torch.float64)
    assert torch.equal(o, truth.double() @ v.double().repeat_interleave(2, 1))

    made = lowered_tensors(own, {"idx": numbers}, SIZES)
    assert ("tiles_idx" in made) == (form != "of lengths")
    for b, h, i in itertools.islice(itertools.product(range(B), range(H), range(NQ)), 0, None, 7):
        words = made["bits_idx"][rows(b, h, i)].tolist()
        own_bits = torch.tensor([bool(words[j // block // 32] >> j // block % 32 & 1) for j in range(NK)])
        assert torch.equal(own_bits, truth[b, h, i])


@pytest.mark.parametrize("form", ["of a query", "of 16 queries", "of a batch entry", "of all", "clamped"])
@pytest.mark.parametrize("block", [1, 48, 64])
def test_a_tile_holds_what_any_of_its_pairs_has(form: str, block: int) -> None:
    declared, indices, shape, rows = FORMS[form]
    own = parse_text(f"attention drawn {{ head_dim 8  tensor idx: i32[{declared}]  select {block}: idx[{indices}] }}")
    numbers = lists(shape, -(-NK // block))
    tiles = lowered_tensors(own.specs[0], {"idx": numbers}, SIZES)["tiles_idx"]
    truth, columns = one_by_one(numbers, rows, block), block * -(-64 // block)
    for b, h, row, column in itertools.product(range(B), range(H), range(2), range(-(-NK // columns))):
        axes = {"of a query": (b, h // 2, row), "of 16 queries": (h, row), "of a batch entry": (b,), "of all": ()}
        place = (*axes.get(form, (b, row)), column)
        inside = truth[b, h, 64 * row : 64 * row + 64, columns * column : columns * (column + 1)]
        assert tiles[place] == inside.any()


def test_numbers_beyond_32_bits_are_none() -> None:
    own = parse_text("attention drawn { head_dim 8  tensor idx: i64[3]  select 1: idx[:] }").specs[0]
    made = lowered_tensors(own, {"idx": torch.tensor([2**32 + 3, -(2**40), 31])}, SIZES)
    assert made["bits_idx"].tolist() == [-(2**31), 0, 0, 0, 0]


@pytest.mark.parametrize("sizes", [{"Nk": 0}, {"Nq": 0}, {"B": 0}])
def test_calls_without_pairs(sizes: dict[str, int]) -> None:
    own = parse_text("attention drawn { head_dim 8  tensor idx: i32[B, Nq, 2]  select 8: idx[b, i, :] }").specs[0]
    known = SIZES | sizes
    made = lowered_tensors(own, {"idx": torch.zeros(known["B"], known["Nq"], 2, dtype=torch.int32)}, known)
    assert made["bits_idx"].shape == (known["B"], known["Nq"], -(-known["Nk"] // 256))
    assert made["tiles_idx"].shape == (known["B"], -(-known["Nq"] // 64), -(-known["Nk"] // 64))


def test_numbers_are_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parse_text("attention drawn { head_dim 8  tensor idx: i32[2, 2]  select 64: idx[i % 2, :] }").specs[0]
    numbers = torch.tensor([[0, -1], [1, 3]], dtype=torch.int32)
    lowered_tensors(own, {"idx": numbers}, SIZES)
    monkeypatch.setenv(CHECK_SELECTION, "1")
    with pytest.raises(ValueError, match=r"tensor 'idx' names block 3 at \[1, 1\]; there are 3 blocks of 64 keys"):
        lowered_tensors(own, {"idx": numbers}, SIZES)


def test_the_formula_looks_at_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    op = flashgen.loads(
        "attention drawn { head_dim 8  tensor idx: i32[2, 2]  select 64: idx[i % 2, :] }", backend="reference"
    )
    numbers, x = torch.tensor([[0, -1], [1, 3]], dtype=torch.int32), torch.zeros(1, 1, 130, 8)
    rows, starts = x[0].transpose(0, 1), torch.tensor([0, 130])
    monkeypatch.setenv(CHECK_SELECTION, "1")
    for of in (op, op.reference):
        for call in (
            functools.partial(of, x, x, x),
            functools.partial(of.varlen, rows, rows, rows, starts, starts),
            functools.partial(of.decode, x, x, x, 130),
        ):
            call(idx=numbers.clamp(max=2))
            with pytest.raises(ValueError, match=r"tensor 'idx' names block 3 at \[1, 1\]; there are 3 blocks of 64"):
                call(idx=numbers)


def test_long_lists_are_gone_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parse_text("attention drawn { head_dim 8  tensor idx: i32[B, Nq, 9]  select 4: idx[b, i, :] }").specs[0]
    numbers = lists((B, NQ, 9), -(-NK // 4))
    whole = lowered_tensors(own, {"idx": numbers}, SIZES)
    monkeypatch.setattr(selected, "_AT_ONCE", 100)
    pieces = lowered_tensors(own, {"idx": numbers}, SIZES)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize("ragged", [False, True])
def test_derivatives_of_derivatives_read_the_lists(ragged: bool) -> None:
    text = "attention listed { head_dim 16  tensor idx: i32[B, Hkv, Nq, 2]  mask causal  select 8: idx[b, hkv, i, :] }"
    op = flashgen.loads(text, backend="cpu")
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 4, 16), (40, 2, 16)) if ragged else ((2, 4, 24, 16), (2, 2, 24, 16))
    q, k, tangent = (torch.randn(shapes[n], generator=generator) for n in (0, 1, 0))
    starts = torch.tensor([0, 16, 40], dtype=torch.int32)
    idx = torch.randint(-1, 3, (2, 2, 24, 2), generator=generator, dtype=torch.int32)

    def results(of: Any, q: Tensor) -> tuple[Tensor, Tensor]:
        own = k.to(q.dtype)

        def call(x: Tensor) -> Tensor:
            found: Tensor = of.varlen(x, own, own, starts, starts, idx=idx) if ragged else of(x, own, own, idx=idx)
            return found

        moved: Tensor = torch.func.jvp(call, (q,), (tangent.to(q.dtype),))[1]
        x = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return moved, torch.autograd.grad(first.square().sum(), x)[0]

    for found, exact in zip(results(op, q), results(op.reference, q.double()), strict=True):
        assert relative_error(found, exact) < 1e-5


def test_lists_that_say_which_list_is_whose() -> None:
    """An index that reads the lists themselves sees their numbers, not where they lie; each call by its own."""
    text = "tensor idx: i32[7, H, 3] select 1: idx[idx[3, h, 0] % 7, H - 1 - h, :]"
    op = flashgen.loads(f"attention own {{ head_dim 8 {text} }}")
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 300, 8, generator=generator) for _ in range(3))  # several tiles of keys
    for _ in range(4):
        numbers = torch.randint(-50, 300, (7, 2, 3), generator=generator).int()
        truth = op.reference(q, k, v, idx=numbers, dtype=torch.float64)
        assert relative_error(op(q, k, v, idx=numbers), truth) < 1e-5
