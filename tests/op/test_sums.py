"""Parts of rows added up: PyTorch's operators against sums over all keys, and the kernel of GPUs against these."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from flashgen.distributed.partial import KERNEL, Arguments, Exponents, Seen, add_part, arguments, first_part
from flashgen.hosts.emulator.program import DeviceMemory, compile_program
from flashgen.hosts.standalone import grid

B, H, ROWS = 2, 3, 5
SOFTMAX, SQUARES = Exponents(0.125 / math.log(2.0), 1.0), Exponents(1.0, 2.0)

Part = tuple[Tensor, Tensor, Tensor | None]


def parts_of(width: int, count: int, spread: float = 1.0) -> list[Part]:
    """Parts of random rows; some of them have no keys."""
    generator = torch.Generator().manual_seed(0)
    found: list[Part] = []
    for n in range(count):
        o = torch.randn(B, H, ROWS, width, generator=generator)
        lse = spread * torch.randn(B, H, ROWS, generator=generator)
        lse[:, :, n], o[:, :, n] = -math.inf, 0.0
        lse[:, :, 4], o[:, :, 4] = -math.inf, 0.0  # of no part
        found.append((o, lse, torch.zeros(B, H, ROWS, 2)))
    return found


def summed(parts: list[Part], exponents: Exponents) -> Seen:
    """By PyTorch's operators, rows in the middle of others."""
    o, lse, extremes = parts[0]
    rows = first_part(o.clone(), lse, extremes, exponents)
    for each in parts[1:]:
        add_part(rows, *each, exponents)
    return rows


def by_kernel(parts: list[Part], exponents: Exponents) -> Seen:
    """By the kernel, under the emulator: rows that are some of seven."""
    program = compile_program(KERNEL.source.text, name="add_part")
    o, log, top = torch.zeros(B, H, 7, parts[0][0].shape[3]), *(torch.zeros(B, H, 7).double() for _ in range(2))
    at = slice(1, 1 + ROWS)
    rows = Seen(o[:, :, at], log[:, :, at], top[:, :, at])
    rows.o.copy_(parts[0][0])
    for n, (more, of_part, extremes) in enumerate(parts):
        packed = arguments(rows, more if n else None, of_part, extremes, exponents)
        memory, written = DeviceMemory(), []
        for name, x, first in (("o", o, rows.o), ("log", log, rows.log), ("top", top, rows.top)):
            size = x.numel() * x.element_size()
            place = memory.put(name, ctypes.string_at(x.data_ptr(), size))
            setattr(packed, name, place + first.data_ptr() - x.data_ptr())
            written.append((x, place, size))
        for name, given in (("part_o", more if n else None), ("part_lse", of_part), ("extremes", extremes)):
            if given is not None:
                content = ctypes.string_at(given.data_ptr(), given.numel() * given.element_size())
                setattr(packed, name, memory.put(name, content))
        program.launch("fg_add_part", (grid(rows.log.numel()), 1, 1), (256, 1, 1), 0, bytes(packed), memory.allocations)
        for x, place, size in written:
            ctypes.memmove(x.data_ptr(), place, size)
    assert (o[:, :, [0, 6]] == 0).all()
    return rows


@pytest.mark.parametrize("exponents", [SOFTMAX, SQUARES])
def test_sums_over_parts_are_those_over_all(exponents: Exponents) -> None:
    parts, p = parts_of(8, 3), exponents.degree
    rows = summed(parts, exponents)
    every = torch.stack([lse.double() for _, lse, _ in parts])
    lse = torch.logsumexp(p * every, 0) / p
    torch.testing.assert_close(rows.log, lse)
    weights = torch.where(every == -math.inf, 0.0, (every - lse).exp())
    o = sum(weight[..., None] * o for weight, (o, _, _) in zip(weights, parts, strict=True))
    assert isinstance(o, Tensor)
    torch.testing.assert_close(rows.o.double(), o, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "exponents"), [(8, SOFTMAX), (132, SOFTMAX), (33, SQUARES)])
def test_the_kernel_adds_what_operators_add(width: int, exponents: Exponents) -> None:
    parts = parts_of(width, 3, spread=20.0)
    if exponents is SOFTMAX:  # scores of which lse holds nothing
        for n, (_, lse, extremes) in enumerate(parts):
            assert extremes is not None
            extremes[:, :, 3] = torch.tensor([1e6 + n, 2.0 * n])
            lse[:, :, 3] = 0.0
    truth, found = summed(parts, exponents), by_kernel(parts, exponents)
    torch.testing.assert_close(found.log, truth.log, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.top, truth.top)
    torch.testing.assert_close(found.o, truth.o, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top", [-1e30, 1e6, 3e38])
def test_scores_of_which_lse_holds_nothing(top: float) -> None:
    """Three parts of as many keys, all of the same score: each has its share, and the last one twice the weight."""
    o = [torch.full((B, H, ROWS, 8), float(n)) for n in range(3)]
    far = [torch.tensor([top, log]).expand(B, H, ROWS, 2).contiguous() for log in (0.5, 0.5, 1.5)]
    lse = torch.full((B, H, ROWS), top / 8)
    parts: list[Part] = list(zip(o, [lse] * 3, far, strict=True))
    for rows in (summed(parts, SOFTMAX), by_kernel(parts, SOFTMAX)):
        torch.testing.assert_close(rows.o, torch.full_like(rows.o, 1 / 4 + 2 / 2), rtol=1e-6, atol=0)
        assert (rows.top == torch.tensor(top).double()).all()
        torch.testing.assert_close(rows.log, torch.full_like(rows.log, 2.5 * math.log(2)), rtol=1e-6, atol=0)


def test_what_crosses_to_the_kernel() -> None:
    assert ctypes.sizeof(Arguments) == 6 * 8 + 4 * 8 + 2 * 8 + 2 * 4
