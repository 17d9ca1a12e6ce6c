"""The dropout generator: known answers, and decisions that depend on global coordinates alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashgen.reference.philox import drop_threshold, kept_pairs, philox, survivor_scale


def word(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


# Philox4x32-7 in the known-answer tests of Random123.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (word(value) for value in counter)
    assert tuple(int(each) for each in philox((c0, c1, c2, c3), key)) == expected


@pytest.mark.parametrize(
    ("probability", "threshold"),
    [(0.0, 0), (0.5, 2**14), (0.1, 3277), (1 - 2.0**-40, 2**15 - 1), (1e-12, 1), (0.97, 31785)],
)
def test_threshold(probability: float, threshold: int) -> None:
    assert drop_threshold(probability) == threshold
    assert survivor_scale(threshold) * (1 - threshold / 2**15) == pytest.approx(1.0, rel=1e-15)


@pytest.mark.parametrize(("i", "j"), [(7, 10), (7, 11), (8, 2), (15, 9), (31, 3), (8, 19), (3, 30), (1000, 1001)])
def test_one_decision_by_hand(i: int, j: int) -> None:
    b, h, seed = 3, 1, 0x1234_5678_9ABC_DEF0
    counter = (word(h), word(8 * (i // 16) + i % 8), word(b), word(4 * (j // 32) + j % 8 // 2))
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    word_of_both = int(words[2 * (j % 16 // 8) + i % 16 // 8])
    at = of_square(word_of_both, j // 16 % 2) >> 16 * (j % 2) & 0x7FFF
    for threshold in (at, at + 1):
        kept = kept_pairs(seed, threshold, word(b)[None], word(h)[None], word(i)[None], word(j)[None])
        assert bool(kept) == (at >= threshold)


def of_square(word: int, right: int) -> int:
    return (word << 8 & 0xFFFFFFFF | word >> 24) if right else word


def test_every_pair_has_high_bits_of_its_own() -> None:
    found = set()
    for i in range(32):
        for j in range(64):
            byte = (1, 3)[j % 2] if j // 16 % 2 == 0 else (0, 2)[j % 2]
            assert of_square(0xFF << 8 * byte, j // 16 % 2) >> 16 * (j % 2) & 0x7FFF == 0x7F00
            found.add((8 * (i // 16) + i % 8, 4 * (j // 32) + j % 8 // 2, 2 * (j % 16 // 8) + i % 16 // 8, byte))
    assert len(found) == 32 * 64


def agreement(threshold: int) -> float:
    """The correlation of two decisions where the low bits of one's number are the high ones of the other's."""
    shared = torch.arange(256, dtype=torch.float64)
    whole, rest = threshold >> 8, threshold & 255
    by_low_bits = (whole + (shared < rest).double()) / 128
    high = shared % 128
    by_high_bits = (high < whole).double() + (high == whole).double() * rest / 256
    p = threshold / 2**15
    assert by_low_bits.mean().item() == by_high_bits.mean().item() == p
    return ((by_low_bits * by_high_bits).mean().item() - p * p) / (p * (1 - p))


def test_numbers_that_share_bits_agree_by_chance() -> None:
    found = [agreement(threshold) for threshold in range(1, 2**15)]
    assert min(found) > -1e-12
    assert max(found) < 1 / 256
    assert agreement(drop_threshold(0.1)) == pytest.approx(0.00173, abs=1e-5)


def test_what_is_drawn_agrees_as_much() -> None:
    threshold = drop_threshold(0.2)  # of which it is most
    kept = kept_pairs(3, threshold, torch.arange(8), torch.arange(8), torch.arange(512), torch.arange(512))
    left, right = kept.double().view(8, 8, 512, 16, 2, 16).sub_(1 - threshold / 2**15).unbind(4)
    variance = threshold / 2**15 * (1 - threshold / 2**15)
    noise = 5 / left.numel() ** 0.5
    assert abs((left * right).mean().item() / variance - agreement(threshold)) < noise < agreement(threshold) / 2
    crossed = right.reshape(-1, 8, 2).flip(-1).reshape(left.shape)
    assert abs((left * crossed).mean().item() / variance - agreement(threshold)) < noise
    others = left[..., 2::2] * right[..., 1:-1:2], left[..., ::2] * left[..., 1::2], left[:, :, 1:] * right[:, :, :-1]
    for each in others:
        assert abs(each.mean().item() / variance) < 5 / each.numel() ** 0.5


def test_a_shard_draws_what_the_whole_draws() -> None:
    positions = [torch.arange(n) for n in (3, 4, 17, 23)]
    whole = kept_pairs(5, drop_threshold(0.4), *positions)
    for j0, j1 in ((0, 23), (1, 2), (3, 9), (4, 8), (22, 23), (7, 7)):
        b, h, i, j = positions
        part = kept_pairs(5, drop_threshold(0.4), b[1:], h[2:], i[5:11], j[j0:j1])
        assert torch.equal(part, whole[1:, 2:, 5:11, j0:j1])


def test_rate() -> None:
    kept = kept_pairs(9, drop_threshold(0.3), torch.arange(2), torch.arange(4), torch.arange(256), torch.arange(256))
    assert abs(kept.double().mean().item() - 0.7) < 0.003


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_as_ints_and_tensors(seed: int) -> None:
    positions = [torch.arange(n) for n in (1, 2, 5, 11)]
    signed = (seed + 2**63) % 2**64 - 2**63
    by_int = kept_pairs(seed, 2**14, *positions)
    assert torch.equal(by_int, kept_pairs(torch.tensor(signed), 2**14, *positions))
    assert torch.equal(by_int, kept_pairs(seed % 2**64, 2**14, *positions))


def test_another_seed_is_another_draw() -> None:
    positions = [torch.arange(n) for n in (1, 2, 16, 16)]
    low, high = (kept_pairs(seed, 2**14, *positions) for seed in (1, 1 << 32))
    assert not torch.equal(low, high)
