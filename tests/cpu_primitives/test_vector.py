"""Masks, selection, lanes and reductions."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.cpu_primitives.calls import pointer


def test_every_mixture_of_select_and_logic(primitives: ctypes.CDLL) -> None:
    assert primitives.check_select() == 0


def test_first_lanes(primitives: ctypes.CDLL) -> None:
    width = primitives.width()
    x = np.arange(1, 17, dtype=np.float32)
    for n in range(width + 1):
        out = np.full(16, -1, np.float32)
        primitives.first_lanes(pointer(out), pointer(x), n)
        assert out[:width].tolist() == [*x[:n], *[0] * (width - n)]
        out[:] = -1
        primitives.first_lanes_stored(pointer(out), pointer(x), n)
        assert out.tolist() == [*x[:n], *[-1] * (16 - n)]


def test_reductions(primitives: ctypes.CDLL) -> None:
    width = primitives.width()
    x = np.random.default_rng(5).normal(size=16).astype(np.float32)
    out = np.empty(3, np.float32)
    primitives.across_lanes(pointer(out), pointer(x))
    folded = x[:width]
    while len(folded) > 1:
        folded = folded[: len(folded) // 2] + folded[len(folded) // 2 :]
    assert out.tolist() == [folded[0], x[:width].max(), x[:width].min()]
    x[width - 1] = np.nan
    primitives.across_lanes(pointer(out), pointer(x))
    assert np.isnan(out).all()
