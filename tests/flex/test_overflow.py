"""Ints of a mod that leave 32 bits are refused at the lengths where they do; those that are not are PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.diagnostics import SpecError
from flashgen.flex import create_block_mask, flex_attention, from_mods
from tests.flex.helpers import assert_close, inputs, judged

Mod = Callable[..., Any]
OFFSET, TABLE = 2**31 - 5, torch.arange(24) * 90_000_000

LEAVE: dict[str, Mod] = {
    "small factors": lambda b, h, i, j: (i * 131 * 131 * 251 * 251 + j) % 7 < 4,
    "i + captured": lambda b, h, i, j: (i + OFFSET + j) % 7 < 4,
    "of a remainder": lambda b, h, i, j: (i % 97) * 7919 * 104729 % 61 < 40,
    "of a remainder of a tensor": lambda b, h, i, j: (TABLE[j] % 97) * 7919 * 104729 % 61 < 40,
    "of bits": lambda b, h, i, j: (TABLE[j] & 1023) * 7919 * 104729 % 61 < 40,
    "of a minimum": lambda b, h, i, j: i.clamp(max=20) * 7919 * 104729 % 61 < 40,
    "of an absolute": lambda b, h, i, j: (i - j).abs() * 7919 * 104729 % 61 < 40,
    "of a square": lambda b, h, i, j: ((i - j) ** 2 - 600) * 7919 * 1047 % 61 < 40,
    "of a where": lambda b, h, i, j: torch.where(i > j, i, j) * 7919 * 104729 % 61 < 40,
    "of a condition": lambda b, h, i, j: ((i > j).int().long() + i) * 7919 * 104729 % 61 < 40,
    "of a float": lambda b, h, i, j: (i.float() / 3).long() * 7919 * 104729 % 61 < 40,
    "a shift": lambda b, h, i, j: (1 << (i + 10)) % 61 < 40,
}
STAY: dict[str, Mod] = {
    "divided first": lambda b, h, i, j: (i // 8 * 7919 * 104729) % 61 < 40,
    "a tensor": lambda b, h, i, j: (TABLE[j] // 3 * 2 + 1) % 7 < 4,
    "bounded": lambda b, h, i, j: (TABLE[j] % 16).clamp(0, 7) * 104729 * 131 % 61 < 40,
    "a logarithm": lambda b, h, i, j: ((i - j).abs().float().log() * 8).long().clamp(-20, 20) % 3 == 0,
}


@pytest.mark.parametrize("name", LEAVE)
def test_ints_that_leave_32_bits_are_refused(name: str) -> None:
    q, k, v = inputs()
    with pytest.raises(SpecError, match=r"E604.*reaches -?\d{10,} at these lengths"):
        flex_attention(q, k, v, None, create_block_mask(LEAVE[name], None, None, 24, 24), backend="reference")


@pytest.mark.parametrize("name", STAY)
def test_ints_that_stay_are_taken(name: str) -> None:
    q, k, v = inputs()
    mask = create_block_mask(STAY[name], None, None, 24, 24)
    assert_close(flex_attention(q, k, v, None, mask, backend="reference"), judged(q, k, v, None, STAY[name])[0])


def test_pictures_and_ops_of_given_lengths_ask_too() -> None:
    mod = LEAVE["of a remainder"]
    with pytest.raises(SpecError, match="E604"):
        str(create_block_mask(mod, None, None, 24, 24))
    with pytest.raises(SpecError, match="E604"):
        from_mods(mask_mod=mod, shape=(1, 1, 24, 24), backend="reference")
    from_mods(mask_mod=mod, shape=(1, 1, 2, 2), backend="reference")


def test_what_a_captured_number_makes_of_it() -> None:
    q, k, v = inputs()

    def scaled(factor: int) -> Mod:
        return lambda s, b, h, i, j: s + (i * factor + j) % 7

    for factor in (3, 80_000_000, 90_000_000, 3):
        if factor * 23 < 2**31:
            assert_close(
                flex_attention(q, k, v, scaled(factor), backend="reference"), judged(q, k, v, scaled(factor))[0]
            )
        else:
            with pytest.raises(SpecError, match=r"'i \* factor' reaches 2070000000"):
                flex_attention(q, k, v, scaled(factor * 1), backend="reference")


def _random_int(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(("i", "j", "(i - j)", "b", "h", "(TABLE[j] % 97)"))
    x, y, n = _random_int(chance, depth - 1), _random_int(chance, depth - 1), chance.choice((3, 17, 251, 7919, 104729))
    return chance.choice(
        (
            f"({x} * {n})", f"({x} * {n})", f"({x} + {y})", f"({x} - {y})", f"({x} * {y})", f"({x} % {n})",
            f"({x} // {n})",
            f"{x}.abs()", f"({x} ** 3)", f"(-{x})", f"torch.where(i > j, {x}, {y})", f"{x}.clamp(-{n}, {n})",
            f"({x} & {n})", f"torch.minimum({x}, {y})", f"({x} > {y}).long()", f"({x} << 7)", f"({x} >> 3)",
        )
    )  # fmt: skip


def test_random_ints_are_refused_or_pytorchs(seed: int) -> None:
    q, k, v = (x.detach() for x in inputs(batch=1, heads=2, kv_heads=2, q_len=12, kv_len=12))
    chance, refused = random.Random(seed), 0
    for _ in range(12):
        text = _random_int(chance, 4)
        mod: Mod = eval(f"lambda s, b, h, i, j: s + 0.1 * (({text}) % 61)", {"torch": torch, "TABLE": TABLE})
        try:
            mine = flex_attention(q, k, v, mod, backend="reference")
        except SpecError as error:
            if error.diagnostics[0].code != "E604":
                raise
            refused += 1
            continue
        torch.testing.assert_close(mine.double(), judged(q, k, v, mod)[0], rtol=1e-4, atol=1e-4, msg=text)
    assert refused < 12
