"""What the emulator counts equals what one counts by hand: bytes of global memory, wavefronts of shared memory."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest

from flashgen.hosts.emulator.program import compile_program
from flashgen.hosts.emulator.report import Report, SharedRequests, Traffic
from tests.emulator.helpers import Outcome, kernel, launch

BANKS = kernel("banks")


def test_bytes_of_a_tiled_product() -> None:
    report = product(256, 128, 64).report
    column_tiles, row_tiles = 128 // 64, 256 // 64
    assert report.traffic == {
        "a": Traffic(loaded=2 * 256 * 64 * column_tiles),
        "b": Traffic(loaded=2 * 64 * 128 * row_tiles),
        "c": Traffic(stored=4 * 256 * 128),
    }
    assert report.hbm_bytes == 2 * 256 * 64 * column_tiles + 2 * 64 * 128 * row_tiles + 4 * 256 * 128


def test_bytes_of_copies_that_are_not_valid_are_not_counted() -> None:
    report = launch(
        kernel("primitives"),
        {"x": np.zeros((100, 4), np.float32), "y": np.zeros((128, 4), np.float32), "n": 100},
        name="copy_async",
        grid=(2, 1, 1),
        threads=64,
        shared_bytes=1024,
    ).report
    assert report.traffic == {"x": Traffic(loaded=16 * 100), "y": Traffic(stored=16 * 128)}


def test_atomic_additions_are_counted_apart() -> None:
    report = launch(
        kernel("primitives"),
        {"x": np.zeros(300, np.int32), "y": np.zeros(8, np.float32), "n": 300},
        name="histogram",
        grid=(3, 1, 1),
        threads=128,
        shared_bytes=32,
    ).report
    assert report.traffic == {"x": Traffic(loaded=4 * 300), "y": Traffic(added=3 * 8 * 4)}


def test_asynchronous_additions_are_counted() -> None:
    report = launch(
        kernel("primitives"),
        {"x": np.zeros((12, 128), np.float32), "y": np.zeros((2, 128), np.float32), "n": 2},
        name="bulk_add",
        threads=64,
        shared_bytes=2 * 512,
    ).report
    assert report.traffic == {"x": Traffic(loaded=512 * 12), "y": Traffic(added=512 * 12)}


def test_reports_add_up() -> None:
    one, other = product(64, 64, 32).report, product(128, 64, 32).report
    total = Report.total([one, other])
    assert total.hbm_bytes == one.hbm_bytes + other.hbm_bytes
    assert total.traffic["a"].loaded == 2 * 64 * 32 + 2 * 128 * 32
    assert [each.requests for each in total.shared] == [3 * each.requests for each in one.shared]


def test_the_swizzles_of_the_product_have_no_conflicts() -> None:
    report = product(64, 64, 64).report
    assert not any(each.conflicts for each in report.shared)
    # Of each warp: per stage of 32, 2 loads of A's fragments and 2 x 4 of B's.
    loads = [each for each in report.shared if "load_matrix" in line_of(kernel("matmul"), each)]
    assert [each.requests for each in loads] == [4 * 2 * 2, 4 * 2 * 2 * 4]
    assert all(each.least == 4 * each.requests for each in loads)


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 8, 16, 31, 32])
def test_words_apart_by_a_stride(stride: int) -> None:
    # 32 banks: the lanes fall into 32 / gcd of them; with stride 0 they share one word.
    expected = gcd(stride, 32) if stride else 1
    assert counted("load_4", stride) == (1, expected, 1)


def test_stores_and_half_a_warp() -> None:
    assert counted("store_4", 1) == (1, 1, 1)
    assert counted("store_4", 4) == (1, 4, 1)
    assert counted("half_a_warp", 1) == (1, 1, 1)
    assert counted("half_a_warp", 8) == (1, 8, 1)  # 16 odd lanes in banks 8 and 24


@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 1), (2, 1), (4, 2), (64, 32)])
def test_two_bytes_a_lane(stride: int, wavefronts: int) -> None:
    assert counted("load_2", stride) == (1, wavefronts, 1)


@pytest.mark.parametrize(("stride", "each"), [(1, 1), (2, 2), (16, 16)])
def test_eight_bytes_a_lane_come_in_halves(stride: int, each: int) -> None:
    assert counted("load_8", stride) == (1, 2 * each, 2)


@pytest.mark.parametrize(("stride", "each"), [(1, 1), (2, 2), (8, 8)])
def test_sixteen_bytes_a_lane_come_in_quarters(stride: int, each: int) -> None:
    assert counted("load_16", stride) == (1, 4 * each, 4)


@pytest.mark.parametrize(("stride", "each"), [(16, 1), (64, 4), (128, 8), (144, 1), (256, 8), (272, 1)])
def test_rows_of_matrices(stride: int, each: int) -> None:
    assert counted("load_matrix", stride) == (1, 4 * each, 4)


def test_swizzled_rows_of_matrices() -> None:
    assert counted("load_swizzled_matrix", 0) == (1, 4, 4)


@pytest.mark.parametrize(("stride", "each"), [(16, 1), (32, 2), (128, 8)])
def test_asynchronous_copies_write_in_quarters(stride: int, each: int) -> None:
    assert counted("copies", stride) == (1, 4 * each, 4)


def test_conflicts_tell_who_called() -> None:
    report = launch(BANKS, {"stride": 32}, name="two_callers", shared_bytes=4096).report
    ((trace, wavefronts),) = compile_program(BANKS, name="test").conflicts(report, report)
    lines = BANKS.splitlines()
    assert wavefronts == 2 * 31
    assert ["INNER" in lines[trace[0] - 1], "OUTER" in lines[trace[1] - 1]] == [True, True]


def test_each_time_a_line_is_passed_is_a_request() -> None:
    assert counted("two_rounds", 8) == (2, 1 + 8, 2)


def counted(name: str, stride: int) -> tuple[int, int, int]:
    """Requests, wavefronts and least wavefronts of the marked line of a kernel."""
    shared = launch(BANKS, {"stride": stride}, name=name, shared_bytes=32768).report.shared
    marked = [each for each in shared if "HERE" in line_of(BANKS, each)]
    assert len(marked) == 1
    return marked[0].requests, marked[0].wavefronts, marked[0].least


def line_of(source: str, requests: SharedRequests) -> str:
    return source.splitlines()[requests.line - 1]


def product(M: int, N: int, K: int, *, seed: int = 0, host_threads: int = 1) -> Outcome:
    return launch(
        kernel("matmul"),
        {
            "a": np.zeros((M, K), np.float16),
            "b": np.zeros((K, N), np.float16),
            "c": np.zeros((M, N), np.float32),
            "M": M,
            "N": N,
            "K": K,
        },
        name="matmul_f16",
        grid=(N // 64, M // 64, 1),
        threads=128,
        shared_bytes=16384,
        seed=seed,
        host_threads=host_threads,
    )
