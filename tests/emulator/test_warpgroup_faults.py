"""Mistakes with products of warpgroups and asynchronous additions: each is reported with its kind and its line."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.hosts.emulator.program import kernel_names
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from tests.emulator.helpers import Outcome, kernel, launch

# Name, warpgroups, kind, what the message says.
FAULTS = [
    ("no_wait", 1, FaultKind.NOT_AWAITED, "ends, but no wait"),
    ("no_commit", 1, FaultKind.NOT_COMMITTED, "ends, but has not committed"),
    ("wait_before_commit", 1, FaultKind.NOT_COMMITTED, "ends, but has not committed"),
    ("wait_too_weak", 1, FaultKind.NOT_AWAITED, "ends, but no wait"),
    ("no_arrival", 1, FaultKind.NOT_ARRIVED, "since they started"),
    ("no_arrival_after_wait", 1, FaultKind.NOT_ARRIVED, "since their last wait"),
    ("accumulator_written_early", 1, FaultKind.NOT_AWAITED, "warp 2 lane 13 has written to an accumulator"),
    ("accumulator_scaled_early", 1, FaultKind.NOT_AWAITED, "warp 0 lane 0 has written to an accumulator"),
    ("operand_written_early", 1, FaultKind.NOT_AWAITED, "has written to an operand of this product in registers"),
    ("accumulator_of_two_widths", 1, FaultKind.NOT_AWAITED, "8 columns is multiplied into while it is one of 16"),
    ("not_published", 1, FaultKind.NOT_PUBLISHED, "byte 0 of shared memory"),
    ("published_before_the_write", 1, FaultKind.NOT_PUBLISHED, "byte 0 of shared memory"),
    ("published_before_the_second_write", 1, FaultKind.NOT_PUBLISHED, "did not come to 'publish_shared'"),
    ("published_after_the_barrier", 1, FaultKind.NOT_PUBLISHED, "between the write and the barrier after it"),
    ("published_by_another_thread", 1, FaultKind.NOT_PUBLISHED, "warp 1 lane 8, which wrote it"),
    ("no_barrier_after_write", 1, FaultKind.RACE, "no barrier between that write and the start"),
    ("warp_barrier_after_write", 2, FaultKind.RACE, "no barrier between that write and the start"),
    ("never_written", 1, FaultKind.UNINITIALIZED, "byte 0 of shared memory"),
    ("copy_not_awaited", 1, FaultKind.NOT_AWAITED, "no wait of warp 0 lane 0 has covered"),
    ("copy_published_before_it_landed", 1, FaultKind.NOT_PUBLISHED, "byte 0 of shared memory"),
    ("copy_awaited_under_the_product", 1, FaultKind.RACE, "no barrier between that write and the start"),
    ("stride_too_long", 1, FaultKind.UNINITIALIZED, "reads byte 2560 of shared memory"),
    ("stride_far_too_long", 1, FaultKind.SHARED_OUTSIDE, "reads 16 bytes of shared memory at byte 18432"),
    ("stride_of_half_a_chunk", 1, FaultKind.MISALIGNED, "parts 264 bytes apart"),
    ("stride_backwards", 1, FaultKind.MISALIGNED, "parts -256 bytes apart"),
    ("start_inside_a_chunk", 1, FaultKind.MISALIGNED, "reads 16 bytes at byte 2050"),
    ("overwritten_by_itself", 1, FaultKind.RACE, "byte 36 of shared memory is read by a product of warps 0 to 3"),
    ("overwritten_by_another_warp_of_its", 1, FaultKind.RACE, "was written by warp 3 lane 4"),
    ("overwritten_behind_barriers", 2, FaultKind.RACE, "was written by warp 6 lane 8"),
    ("overwritten_after_the_wait", 1, FaultKind.RACE, "byte 36 of shared memory is written by warp"),
    ("overwritten_after_a_warp_barrier", 1, FaultKind.RACE, "byte 36 of shared memory is written by warp"),
    ("lanes_apart", 1, FaultKind.DIVERGENCE, "comes to 'warpgroup_multiply', but lane 9 to"),
    ("warp_at_a_barrier", 1, FaultKind.DIVERGENCE, "but warp 0 of its warpgroup waits at a barrier"),
    ("warp_left", 1, FaultKind.DIVERGENCE, "but warp 2 of its warpgroup has ended"),
    ("two_matrices", 1, FaultKind.DIVERGENCE, "warp 3 lane 0 of a warpgroup multiply different matrices"),
    ("one_lane_adds", 1, FaultKind.DIVERGENCE, "warp 0 lane 0 and warp 3 lane 31"),
    ("addition_not_published", 1, FaultKind.NOT_PUBLISHED, "warp 0 lane 0, which wrote it"),
    ("addition_published_by_one_thread", 1, FaultKind.NOT_PUBLISHED, "warp 0 lane 1, which wrote it"),
    ("addition_without_barrier", 1, FaultKind.RACE, "byte 16 of shared memory is read by warp 0 lane 0"),
    ("addition_not_awaited", 1, FaultKind.NOT_AWAITED, "warp 0 lane 0 ends, but no wait has covered"),
    ("addition_not_committed", 1, FaultKind.NOT_COMMITTED, "warp 0 lane 0 ends, but has not committed"),
    (
        "addition_overwritten",
        1,
        FaultKind.RACE,
        "lane 3 while an asynchronous addition or copy of warp 0 lane 0 may still",
    ),
    (
        "addition_overwritten_by_its_thread",
        1,
        FaultKind.RACE,
        "lane 0 while an asynchronous addition or copy of warp 0 lane 0",
    ),
    ("addition_overwritten_after_the_wait", 1, FaultKind.RACE, "was read by warp 0 lane 0, with no warp barrier"),
    ("addition_of_half_a_chunk", 1, FaultKind.MISALIGNED, "adds 24 bytes asynchronously"),
    ("addition_misaligned", 1, FaultKind.MISALIGNED, "adds to 16 bytes at byte 8 of 'y'"),
    ("addition_outside", 1, FaultKind.OUTSIDE, "adds to 16 bytes at byte 2048 of 'y', which has 2048"),
]
OTHERS = {"accumulator_read_early", "warps_apart", "three_warps", "copied_over", "overwritten_by_another_warpgroup"}

SOURCE = kernel("warpgroup_faults")


@pytest.mark.parametrize(("name", "groups", "kind", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults(name: str, groups: int, kind: FaultKind, says: str) -> None:
    for seed in range(3):
        error = failed(name, threads=128 * groups, seed=seed)
        assert error.kind is kind, str(error)
        assert says in error.message
        assert "FAULT" in error.line_text, str(error)
        assert not error.other_line or "OTHER" in error.other_line_text, str(error)
        assert f"{error.line} | {error.line_text}" in str(error)


def test_the_parameters_of_every_kernel_stand_here() -> None:
    assert set(kernel_names(SOURCE)) == {name for name, *_ in FAULTS} | OTHERS


@pytest.mark.parametrize("writer", [0, 40, 80, 127])
@pytest.mark.parametrize("name", ["overwritten_after_the_wait", "overwritten_after_a_warp_barrier"])
def test_a_wait_speaks_for_its_own_warp_alone(name: str, writer: int) -> None:
    error = failed(name, threads=128, n=writer)
    assert error.kind is FaultKind.RACE
    assert f"written by warp {writer // 32} lane {writer % 32}" in error.message
    assert "FAULT" in error.line_text
    assert "OTHER" in error.other_line_text


def test_a_copy_over_an_operand() -> None:
    errors = [failed("copied_over", threads=256, seed=seed) for seed in range(8)]
    # Whether the copy is issued before or after the first warpgroup comes to its wait.
    assert {error.kind for error in errors} == {FaultKind.NOT_AWAITED, FaultKind.RACE}
    assert {frozenset(mark_of(error)) for error in errors} == {frozenset({"FAULT", "OTHER"})}


def test_nothing_orders_a_product_and_a_store_of_another_warpgroup() -> None:
    errors = [failed("overwritten_by_another_warpgroup", threads=256, seed=seed) for seed in range(8)]
    assert {error.kind for error in errors} == {FaultKind.RACE}
    assert {mark_of(error) for error in errors} == {("PRODUCT", "STORE"), ("STORE", "PRODUCT")}


def test_warps_of_a_warpgroup_at_two_lines() -> None:
    for seed in range(6):
        error = failed("warps_apart", threads=128, seed=seed)
        assert error.kind is FaultKind.DIVERGENCE
        assert "of its warpgroup to 'warpgroup_multiply' of line" in error.message
        assert set(mark_of(error)) == {"HERE", "THERE"}


def test_a_block_without_a_whole_warpgroup() -> None:
    error = failed("three_warps", threads=96)
    assert error.kind is FaultKind.DIVERGENCE
    assert "takes warps 0 to 3, but the block has 3 warps" in error.message
    assert "FAULT" in error.line_text


def test_an_accumulator_that_is_read_too_early_is_nan() -> None:
    y = call("accumulator_read_early", threads=128).arrays["y"]
    assert np.isnan(y[:128]).all()
    assert np.array_equal(y[256:384], np.zeros(128))


MATMUL = [
    ("products too late", "warpgroup_wait<1>()", "warpgroup_wait<2>()", {FaultKind.RACE, FaultKind.NOT_AWAITED}),
    ("no last wait", "fg::warpgroup_wait<0>();", "", {FaultKind.NOT_AWAITED}),
    ("no commit", "fg::warpgroup_commit();", "", {FaultKind.NOT_COMMITTED, FaultKind.RACE, FaultKind.NOT_AWAITED}),
    ("no arrival", "fg::warpgroup_arrive();", "", {FaultKind.NOT_ARRIVED}),
    ("not published", "fg::publish_shared();", "", {FaultKind.NOT_PUBLISHED}),
    (
        "no barrier",
        "fg::block_barrier();  // the stage is there",
        "// ",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.RACE},
    ),
    ("copies too late", "copy_async_wait<0>()", "copy_async_wait<1>()", {FaultKind.NOT_AWAITED, FaultKind.RACE}),
    ("ring too short", "stages = 3", "stages = 2", {FaultKind.RACE, FaultKind.NOT_AWAITED}),
    ("rows of another stage", "a_bytes, 0, 8 * 128", "a_bytes, 0, 8 * 1152", {FaultKind.UNINITIALIZED, FaultKind.RACE}),
]


@pytest.mark.parametrize(("old", "new", "kinds"), [each[1:] for each in MATMUL], ids=[each[0] for each in MATMUL])
def test_in_a_pipeline_that_was_right(old: str, new: str, kinds: set[FaultKind]) -> None:
    source = kernel("warpgroup_matmul")
    assert source.count(old) == 1
    x = np.zeros((256, 256), np.float16)
    for seed in range(3):
        with pytest.raises(EmulatorError) as caught:
            launch(
                source.replace(old, new),
                {"a": x, "b": x, "c": np.zeros((256, 256), np.float32), "M": 256, "N": 256, "K": 256},
                name="matmul_f16",
                grid=(4, 2, 1),
                threads=256,
                shared_bytes=3 * 24576,
                seed=seed,
            )
        assert caught.value.kind in kinds, str(caught.value)
        assert "warpgroup_multiply" in caught.value.line_text or "copy_async" in caught.value.line_text


def test_the_trace_leads_from_the_product_to_the_kernel() -> None:
    error = failed("stride_too_long", threads=128)
    lines = SOURCE.splitlines()
    assert "FAULT" in lines[error.trace[0] - 1]
    assert "a_bytes, 0, 512" in lines[error.trace[1] - 1]


def call(name: str, *, threads: int, seed: int = 0, n: int = 33) -> Outcome:
    x, y = np.zeros(512, np.float32), np.zeros(512, np.float32)
    return launch(SOURCE, {"x": x, "y": y, "n": n}, name=name, threads=threads, shared_bytes=4096, seed=seed)


def failed(name: str, *, threads: int, seed: int = 0, n: int = 33) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        call(name, threads=threads, seed=seed, n=n)
    return caught.value


def mark_of(error: EmulatorError) -> tuple[str, str]:
    line, other = (text.partition("//")[2].strip() for text in (error.line_text, error.other_line_text))
    return line, other
