"""Ragged batches by tensor copies and persistent blocks, on the emulator: planted races and leaks show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.hosts.emulator.report import EmulatorError
from flashgen.op.op import AttentionOp

from .test_sequences import changed, emitted

LENGTHS = ((5, 5), (0, 3), (130, 130), (0, 0), (70, 150), (9, 0), (1, 1), (200, 66))
SPOILED = (1, 2, 6)  # sequences of NaN
# Blocks that copy for themselves, and blocks with warps that copy for the others.
ALONE = "attention alone { head_dim 64  dtype bf16  mask causal and window_left(120) }"
SERVED = "attention served { head_dim 64  dtype bf16  mask causal  schedule { Br = 128  Bc = 64  warps = 8 } }"
# What is planted: a text of the source and what stands in its place.
OF_COPIES = {
    "keys without an end": ("{int(a.kv_begin), int(a.kv_len)}", "{int(a.kv_begin), int(a.kv_rows - a.kv_begin)}"),
    "rows of the sequence before": ("rows.begin + rows.count, SEQUENCE_END", "rows.begin, SEQUENCE_END"),
    "more rows than there are": ("SEQUENCE_END - rows.count + row", "SEQUENCE_END + row"),
}
OF_STORES = {
    "O over a neighbour's rows": (
        "(to, sums.at[m], warp_row + 16 * m, count)",
        "(to, sums.at[m], warp_row + 16 * m, Base::BR)",
    ),
}
OF_ALONE = {
    "the next sequence too early": ("if (ended) this->move_to(sequence_before);", ""),
    "the sequence before": ("if constexpr (Base::moves) move_to(sequence());", ""),
    "the next sequence unknown": ("if (another) this->move_to(noted(next_sequence()));", ""),
}
OF_SERVED = {
    "a tile before it is known": (
        "Finders::barrier(); const int number = visits.noted(&Notes::head);",
        "const int number = visits.noted(&Notes::head);",
    ),
    "no list without keys": ("(moves && window == 0) || window < tiles()", "window < tiles()"),
}
OF_THE_BACKWARD_PASS = {
    "queries without an end": ("{int(a.q_begin), int(a.q_len)}", "{int(a.q_begin), int(a.q_rows - a.q_begin)}"),
    "dV over a neighbour's rows": ("(to_dv, dv.at[0], warp_key, place.count)", "(to_dv, dv.at[0], warp_key, BC)"),
    "a tile before the other is done": ("fg::barrier_meet(Base::TILE_KNOWN, P::threads);", ""),
    "one place for two tiles": ("(memory + Memory::NEXT_TILES) + n % (moves ? 2 : 4)", "(memory + Memory::NEXT_TILES)"),
    "dK of the next sequence": ("move_to(sequence); store_keys(before);", "store_keys(before);"),
    "signals that nobody made": ("first = first && tiles() == 0;", "first = false;"),
    "K and V that nobody awaits": ("if (tiles() == 0) fg::copy_async_wait<0>();", ""),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(varlen: Callable[..., Any], *, backward: bool, spoiled: tuple[int, ...] = ()) -> list[list[Tensor]]:
    """o and the gradients, of each sequence that holds no NaN."""
    q_starts, k_starts = (torch.tensor([0, *each]).cumsum(0).int() for each in zip(*LENGTHS, strict=True))
    rows = [(int(starts[-1]), heads) for starts, heads in ((q_starts, 2), (k_starts, 1), (k_starts, 1), (q_starts, 2))]
    q, k, v, d_o = (random(*shape, 64, seed=n) for n, shape in enumerate(rows))
    for n in spoiled:
        for x, starts in ((q, q_starts), (k, k_starts), (v, k_starts), (d_o, q_starts)):
            x[starts[n] : starts[n + 1]] = torch.nan
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    o = varlen(*leaves, q_starts, k_starts)
    found = [(o.detach(), q_starts)]
    if backward:
        found += zip(torch.autograd.grad(o, leaves, d_o), (q_starts, k_starts, k_starts), strict=True)
    others = [n for n in range(len(LENGTHS)) if n not in SPOILED]
    return [[x[starts[n] : starts[n + 1]] for n in others] for x, starts in found]


def is_right(op: AttentionOp, *, backward: bool) -> bool:
    """Whether sequences beside NaN are what they are alone, and as the formula has them."""
    try:
        found = results(op.varlen, backward=backward, spoiled=SPOILED)
    except EmulatorError:
        return False
    exact = results(op.reference.varlen, backward=backward)
    return all(
        bool(torch.isfinite(x).all()) and (x.float() - y.float()).abs().max() <= 0.02 * y.float().abs().max() + 1e-3
        for own, truth in zip(found, exact, strict=True)
        for x, y in zip(own, truth, strict=True)
        if y.numel()
    )


@pytest.mark.parametrize("text", [ALONE, SERVED], ids=["alone", "served"])
def test_no_number_of_a_neighbour(text: str) -> None:
    """Rows behind the end of a sequence are the next one's: NaN there changes no bit of o, dk and dv."""
    op = changed(f"neighbours_{text == ALONE}", of=text, target="sm_90a")
    assert is_right(op, backward=True)
    clean, beside = (results(op.varlen, backward=True, spoiled=spoiled) for spoiled in ((), SPOILED))
    for n in (0, 2, 3):  # dq is added up in any order
        assert all(torch.equal(x, y) for x, y in zip(clean[n], beside[n], strict=True))


def test_these_are_both_kinds() -> None:
    for text, producers in ((ALONE, False), (SERVED, True)):
        (tiles,) = emitted(text, "sm_90a")[1].plan.elements
        for each in (tiles.forward, tiles.backward):
            assert each.tensor_copies
            assert (each.producers > 0) is producers
        assert tiles.backward.persistent is producers


PLANTED = [
    *((ALONE, name, change) for name, change in (OF_COPIES | OF_STORES | OF_ALONE).items()),
    *((SERVED, name, change) for name, change in OF_SERVED.items()),
]


@pytest.mark.parametrize(("text", "name", "change"), PLANTED, ids=[name for _, name, _ in PLANTED])
def test_mistakes_show(text: str, name: str, change: tuple[str, str]) -> None:
    op = changed(f"planted_hopper_{[each[1] for each in PLANTED].index(name)}", change, of=text, target="sm_90a")
    assert not is_right(op, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_BACKWARD_PASS)
def test_mistakes_of_the_backward_pass_show(name: str) -> None:
    number = list(OF_THE_BACKWARD_PASS).index(name)
    op = changed(f"planted_hopper_back_{number}", OF_THE_BACKWARD_PASS[name], of=SERVED, target="sm_90a")
    assert not is_right(op, backward=True)
