"""Barriers with a number, for some warps of a block: what they order, what they do not, and when they stay open."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.hosts.emulator.program import kernel_names
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from tests.emulator.helpers import Array, kernel, launch

SOURCE = kernel("barriers")

RACES = [
    "read_after_arriving",
    "written_after_arriving",
    "released_too_early",
    "lanes_that_arrive",
    "another_barrier",
]
OPEN = [
    ("too_few", "waits at 'barrier_wait' of barrier 3 for 96 threads, of which 64 have come"),
    ("two_counts", "of barrier 3 for"),
    ("twice", "comes to 'barrier_arrive' of barrier 3 again"),
    ("left_behind", "all have ended, but only 32 threads came, not 64"),
    ("no_such_barrier", "there are 1 to 15"),
    ("the_block_barrier", "there are 1 to 15"),
    ("half_a_warp", "for 48 threads: no whole warps"),
    ("crossed", "waits at 'barrier_wait' of barrier 1 for 64 threads, of which 32 have come"),
    ("one_at_the_block_barrier", "waits at 'block_barrier', but warp 0 at 'barrier_wait'"),
]
OTHERS = {"handed_over", "halves", "one_reader_left_out", "one_warpgroup_left_out", "lanes_at_two_barriers"}
OTHERS |= {"waits_at_two_places", "from_two_places"}


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_a_ring_that_is_handed_over(rows: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 99, (rows, 32)).astype(np.float32)
    for seed in range(4):
        y = call("handed_over", x, n=rows, seed=seed)[:96].reshape(3, 32)
        assert np.array_equal(y, [np.roll(x.sum(0), -shift) for shift in (1, 2, 3)])


def test_warps_that_wait_for_some_others() -> None:
    for seed in range(4):
        assert np.array_equal(call("halves", n=0, seed=seed)[:128], [2] * 64 + [3] * 64)


def test_warps_that_meet_from_two_places() -> None:
    for seed in range(4):
        assert np.array_equal(call("from_two_places", n=0, seed=seed)[:128], np.arange(128) ^ 64)


@pytest.mark.parametrize("name", RACES)
def test_what_is_not_ordered(name: str) -> None:
    for seed in range(6):
        error = failed(name, threads=64, seed=seed)
        assert error.kind in {FaultKind.RACE, FaultKind.UNINITIALIZED}, str(error)
        marks = {mark_of(error.line_text), mark_of(error.other_line_text)}
        assert marks == {"FAULT", "OTHER" if error.kind is FaultKind.RACE else ""}, str(error)


@pytest.mark.parametrize("warps", [3, 4, 5])
def test_every_reader_counts(warps: int) -> None:
    """Up to four that read at the same time; whichever it is that the writer does not wait for."""
    for left_out in range(1, warps):
        for seed in range(4):
            error = failed("one_reader_left_out", threads=32 * warps, n=left_out, seed=seed)
            assert error.kind is FaultKind.RACE, str(error)
            assert {mark_of(error.line_text), mark_of(error.other_line_text)} == {"FAULT", "OTHER"}
            assert f"warp {left_out}" in error.message


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_no_warpgroup_is_forgotten(groups: int) -> None:
    """However many of its warps read, and those of others after them."""
    for left_out in range(1, groups + 1):
        for seed in range(4):
            error = failed("one_warpgroup_left_out", threads=128 * (groups + 1), n=left_out, seed=seed)
            assert error.kind is FaultKind.RACE, str(error)
            assert {mark_of(error.line_text), mark_of(error.other_line_text)} == {"FAULT", "OTHER"}


@pytest.mark.parametrize(("name", "says"), OPEN, ids=[name for name, _ in OPEN])
def test_barriers_that_stay_open(name: str, says: str) -> None:
    for seed in range(3):
        error = failed(name, threads=64, seed=seed)
        assert error.kind is FaultKind.DEADLOCK, str(error)
        assert says in error.message
        assert "FAULT" in error.line_text
        assert not error.other_line or "OTHER" in error.other_line_text


def test_lanes_at_two_barriers() -> None:
    error = failed("lanes_at_two_barriers", threads=64)
    assert error.kind is FaultKind.DIVERGENCE
    assert "come to 'barrier_wait' of different barriers" in error.message
    assert "FAULT" in error.line_text


def test_all_who_wait_execute_one_instruction() -> None:
    """``bar.sync`` is aligned: what two branches of a program wait for is not defined."""
    error = failed("waits_at_two_places", threads=64)
    assert error.kind is FaultKind.DIVERGENCE
    assert "waits for barrier 1 here, but warp" in error.message
    assert error.line_text != error.other_line_text
    assert {mark_of(error.line_text), mark_of(error.other_line_text)} == {"FAULT"}


def test_the_parameters_of_every_kernel_stand_here() -> None:
    assert set(kernel_names(SOURCE)) == {*RACES, *(name for name, _ in OPEN)} | OTHERS


def call(name: str, x: Array | None = None, *, n: int, threads: int = 128, seed: int = 0) -> Array:
    """``y`` after the kernel."""
    inputs = np.zeros(32, np.float32) if x is None else x
    arguments: dict[str, Array | int] = {"x": inputs, "y": np.zeros(512, np.float32), "n": n}
    return launch(SOURCE, arguments, name=name, threads=threads, shared_bytes=1024, seed=seed).arrays["y"]


def failed(name: str, *, threads: int, n: int = 0, seed: int = 0) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        call(name, n=n, threads=threads, seed=seed)
    return caught.value


def mark_of(text: str) -> str:
    return text.partition("//")[2].split(" ")[1] if "//" in text else ""
