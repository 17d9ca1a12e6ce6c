"""Mistakes planted in kernels: each is reported with its kind and the line that made it."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.hosts.emulator.program import kernel_names
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from tests.emulator.helpers import kernel, launch

FAULTS = [
    ("load_past_the_end", FaultKind.OUTSIDE, "'x'"),
    ("load_before_the_start", FaultKind.OUTSIDE, "4 bytes before 'x'"),
    ("load_across_the_end", FaultKind.OUTSIDE, "reads 16 bytes at byte 2032 of 'x', which has 2040"),
    ("store_outside", FaultKind.OUTSIDE, "writes 4 bytes at byte 2048 of 'y', which has 2048"),
    ("add_outside", FaultKind.OUTSIDE, "adds to 4 bytes"),
    ("copy_outside", FaultKind.OUTSIDE, "'x'"),
    ("null_pointer", FaultKind.OUTSIDE, "null pointer"),
    ("misaligned_load", FaultKind.MISALIGNED, "reads 16 bytes at byte 4 of 'x'"),
    ("misaligned_copy", FaultKind.MISALIGNED, "reads 16 bytes at byte 8 of 'x'"),
    ("misaligned_shared_store", FaultKind.MISALIGNED, "writes 8 bytes at byte 4 of shared memory"),
    ("load_of_what_is_written", FaultKind.GLOBAL_RACE, "'y' is loaded and was written"),
    ("store_to_what_was_loaded", FaultKind.GLOBAL_RACE, "'y' is written and was loaded"),
    ("stored_twice", FaultKind.GLOBAL_RACE, "'y' is stored and was stored by another thread"),
    ("shared_overflow", FaultKind.SHARED_OUTSIDE, "writes 4 bytes of shared memory at byte"),
    ("shared_underflow", FaultKind.SHARED_OUTSIDE, "at byte -4"),
    ("never_written", FaultKind.UNINITIALIZED, "byte 4 of shared memory"),
    ("partly_written", FaultKind.UNINITIALIZED, "byte 2 of shared memory"),
    ("added_to_nothing", FaultKind.UNINITIALIZED, "byte 0 of shared memory"),
    ("matrix_never_written", FaultKind.UNINITIALIZED, "byte 0 of shared memory"),
    ("two_lanes_write", FaultKind.RACE, "no warp barrier between"),
    ("no_warp_barrier_after_write", FaultKind.RACE, "no warp barrier between"),
    ("no_barrier_after_wait", FaultKind.RACE, "no warp barrier between"),
    ("barrier_before_wait", FaultKind.RACE, "no warp barrier between"),
    ("no_warp_barrier_before_write", FaultKind.RACE, "several lanes of warp"),
    ("many_readers", FaultKind.RACE, "several lanes of warp"),
    ("atomic_and_plain", FaultKind.RACE, "is read by warp 0 lane 5 and was written by warp 0 lane 4"),
    ("wait_too_weak", FaultKind.NOT_AWAITED, "no wait of warp 0 lane 0 has covered"),
    ("no_wait", FaultKind.NOT_AWAITED, "lane 0 has covered"),
    ("no_commit", FaultKind.NOT_COMMITTED, "has not committed"),
    ("store_under_a_copy", FaultKind.NOT_AWAITED, "writes byte 0"),
    ("divergent_barrier", FaultKind.DIVERGENCE, "lane 16 to 'block_barrier'"),
    ("divergent_shuffle", FaultKind.DIVERGENCE, "lane 0 of warp 0 comes to 'shuffle', but lane 16 to 'shuffle'"),
    ("shuffle_of_half_a_warp", FaultKind.DIVERGENCE, "but lane 16 has ended"),
    ("barrier_of_half_a_warp", FaultKind.DIVERGENCE, "lane 16 of warp 0 comes to 'block_barrier', but lane 0 has"),
    ("one_round_too_many", FaultKind.DIVERGENCE, "but lane 0 has ended"),
    ("two_matrices", FaultKind.DIVERGENCE, "but lane 7 to 'mma_f16'"),
]

# Between warps or blocks the scheduler's choice decides which line is the later one, and with copies also the kind.
BETWEEN = [
    ("no_barrier_after_write", {FaultKind.RACE}, {"FAULT", "OTHER"}),
    ("no_barrier_before_write", {FaultKind.RACE}, {"FAULT", "OTHER"}),
    ("two_warps_write", {FaultKind.RACE}, {"FAULT OTHER"}),
    ("readers_of_two_warps", {FaultKind.RACE}, {"FAULT", "OTHER"}),
    ("copy_over_what_is_read", {FaultKind.RACE, FaultKind.NOT_AWAITED}, {"FAULT", "OTHER"}),
    ("stored_by_two_blocks", {FaultKind.GLOBAL_RACE}, {"FAULT OTHER"}),
    ("stored_and_added", {FaultKind.GLOBAL_RACE}, {"STORED", "ADDED"}),
    ("two_barriers", {FaultKind.DEADLOCK}, {"FAULT", "OTHER"}),
    ("warp_left", {FaultKind.DEADLOCK}, {"FAULT", ""}),
]

SOURCE = kernel("faults")


@pytest.mark.parametrize(("name", "kind", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_within_a_warp(name: str, kind: FaultKind, says: str) -> None:
    error = failed(name, threads=32)
    assert error.kind is kind, str(error)
    assert says in error.message
    assert "FAULT" in error.line_text, str(error)
    assert not error.other_line or "OTHER" in error.other_line_text, str(error)
    assert f"{error.line} | {error.line_text}" in str(error)


@pytest.mark.parametrize(("name", "kinds", "marks"), BETWEEN, ids=[name for name, *_ in BETWEEN])
def test_between_warps_and_blocks_for_every_seed(name: str, kinds: set[FaultKind], marks: set[str]) -> None:
    errors = [failed(name, threads=64, blocks=2, seed=seed) for seed in range(12)]
    assert {error.kind for error in errors} == kinds
    for error in errors:
        assert {mark_of(error.line_text), mark_of(error.other_line_text)} == marks, str(error)


def test_the_parameters_of_every_kernel_stand_here() -> None:
    assert set(kernel_names(SOURCE)) == {name for name, *_ in FAULTS} | {name for name, *_ in BETWEEN}


MATMUL = [
    ("wait too weak", "copy_async_wait<1>()", "copy_async_wait<2>()", {FaultKind.NOT_AWAITED}),
    ("commit missing", "fg::copy_async_commit();  // first", "// ", {FaultKind.NOT_AWAITED}),
    ("no commit at all", "fg::copy_async_commit();", "", {FaultKind.NOT_COMMITTED}),
    (
        "barrier after the wait missing",
        "fg::block_barrier();  // the stage is there",
        "",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.RACE},
    ),
    (
        "barrier before the next copy missing",
        "fg::block_barrier();  // the stage is free",
        "",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    ("rows past the end", "(row0 + row) * p.K", "(row0 + 1 + row) * p.K", {FaultKind.OUTSIDE}),
    ("stage too small", "2 * 2 * tile * depth;", "2 * 2 * tile * depth - 16;", {FaultKind.RACE, FaultKind.NOT_AWAITED}),
    ("ring too long", "k0 / depth % 2", "k0 / depth % 3", {FaultKind.SHARED_OUTSIDE, FaultKind.UNINITIALIZED}),
]


@pytest.mark.parametrize(("old", "new", "kinds"), [each[1:] for each in MATMUL], ids=[each[0] for each in MATMUL])
def test_in_a_pipeline_that_was_right(old: str, new: str, kinds: set[FaultKind]) -> None:
    source = kernel("matmul")
    assert old in source
    n = np.zeros((128, 128), np.float16)
    with pytest.raises(EmulatorError) as caught:
        launch(
            source.replace(old, new),
            {"a": n, "b": n, "c": np.zeros((128, 128), np.float32), "M": 128, "N": 128, "K": 128},
            name="matmul_f16",
            grid=(2, 2, 1),
            threads=128,
            shared_bytes=16384,
        )
    assert caught.value.kind in kinds, str(caught.value)
    assert "load_matrix" in caught.value.line_text or "copy_async" in caught.value.line_text


def test_the_trace_leads_from_the_primitive_to_the_kernel() -> None:
    source = kernel("matmul").replace("(row0 + row) * p.K", "(row0 + 1 + row) * p.K")
    n = np.zeros((64, 64), np.float16)
    with pytest.raises(EmulatorError) as caught:
        launch(
            source,
            {"a": n, "b": n, "c": np.zeros((64, 64), np.float32), "M": 64, "N": 64, "K": 64},
            name="matmul_bf16",
            threads=128,
            shared_bytes=16384,
        )
    lines = source.splitlines()
    texts = [lines[line - 1] for line in caught.value.trace]
    assert "copy of A" in texts[0]
    assert "load_stage(p, shared" in texts[1]
    assert "matmul_bf16" in texts[2]


def failed(name: str, *, threads: int, blocks: int = 1, seed: int = 0) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        launch(
            SOURCE,
            {"x": np.zeros(510, np.float32), "y": np.zeros(512, np.float32), "n": 512},
            name=name,
            grid=(blocks, 1, 1),
            threads=threads,
            shared_bytes=0 if name == "shared_overflow" else 1024,
            seed=seed,
        )
    return caught.value


def mark_of(text: str) -> str:
    return text.partition("//")[2].strip()
