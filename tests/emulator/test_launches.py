"""Launches: repeatable by their seed, refused when impossible, compiled once, and right on several host threads."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

from flashgen.hosts.emulator.program import DeviceMemory, compile_program, kernel_names, kernel_source
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.toolchains.cpp import CompileFailed
from tests.emulator.helpers import kernel, launch
from tests.emulator.test_counts import product

EMPTY = '#include "flashgen_emulator.h"\nstruct A { int n; };\nextern "C" __global__ void nothing(const A) {}\n'


def total(seed: int, host_threads: int = 1) -> bytes:
    outcome = launch(
        kernel("schedule"),
        {"sum": np.zeros(1, np.float32), "n": 8},
        name="sum_in_any_order",
        grid=(8, 1, 1),
        threads=128,
        seed=seed,
        host_threads=host_threads,
    )
    return outcome.arrays["sum"].tobytes()


def test_a_seed_decides_everything() -> None:
    assert len({total(5) for _ in range(4)}) == 1


def test_seeds_differ() -> None:
    assert len({total(seed) for seed in range(8)}) > 1


def test_the_first_fault_is_the_same_for_a_seed() -> None:
    def message(seed: int) -> str:
        with pytest.raises(EmulatorError) as caught:
            launch(
                kernel("faults"),
                {"x": np.zeros(512, np.float32), "y": np.zeros(512, np.float32), "n": 512},
                name="no_barrier_before_write",
                grid=(7, 1, 1),
                threads=64,
                shared_bytes=1024,
                seed=seed,
            )
        return str(caught.value)

    assert len({message(3) for _ in range(4)}) == 1
    assert len({message(seed) for seed in range(8)}) > 1


def test_several_host_threads_count_the_same() -> None:
    exact = 0.0
    for k in range(8 * 128):
        exact += sum(1 / (1 + k + 977 * n) for n in range(8))
    assert np.frombuffer(total(0, host_threads=3), np.float32)[0] == pytest.approx(exact, rel=1e-4)
    reports = [product(128, 128, 64, seed=seed, host_threads=1 + seed % 3).report for seed in range(4)]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize(
    ("grid", "block", "says"),
    [
        ((1, 1, 1), (48, 1, 1), "multiple of 32"),
        ((1, 1, 1), (2048, 1, 1), "between 1 and 1024"),
        ((1, 0, 1), (32, 1, 1), "at least one block"),
        ((1, 65536, 1), (32, 1, 1), "65535"),
    ],
)
def test_impossible_launches(grid: tuple[int, int, int], block: tuple[int, int, int], says: str) -> None:
    with pytest.raises(EmulatorError, match=says) as caught:
        compile_program(EMPTY).launch("nothing", grid, block, 0, bytes(4), {})
    assert caught.value.kind is FaultKind.LAUNCH
    assert caught.value.line == 0


def test_arguments_of_another_size() -> None:
    with pytest.raises(ValueError, match="the arguments of 'nothing' have 4 bytes, not 8"):
        compile_program(EMPTY).launch("nothing", (1, 1, 1), (32, 1, 1), 0, bytes(8), {})


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="has no kernel 'something'; it has 'nothing'"):
        compile_program(EMPTY).launch("something", (1, 1, 1), (32, 1, 1), 0, bytes(4), {})


def test_nothing_to_do_and_nothing_counted() -> None:
    report = compile_program(EMPTY).launch("nothing", (3, 2, 1), (64, 2, 1), 4096, bytes(4), {"x": (4096, 0)})
    assert report.hbm_bytes == 0
    assert report.shared == ()


def test_errors_of_the_compiler_name_lines_of_the_kernel() -> None:
    with pytest.raises(CompileFailed) as caught:
        compile_program(EMPTY.replace("{}", "{ missing(); }"), name="broken")
    assert "broken.cu:3:" in caught.value.log


def test_shared_memory_has_one_door() -> None:
    with pytest.raises(CompileFailed, match="__shared__"):
        compile_program(EMPTY.replace("{}", "{ __shared__ float x[4]; }"))


def test_kernels_are_found_by_their_declarations() -> None:
    source = """
    // extern "C" __global__ void in_a_comment(const A a)
    extern "C" __global__ void __launch_bounds__(int(f(4)), 2) first(const A a) {}
    extern "C" __global__ __launch_bounds__(128)
        void second(__grid_constant__ const A a);
    """
    assert kernel_names(source) == ("first", "second")
    assert kernel_source(source, "x").text.count("#include") == kernel_source(source, "x").text.count("#include <")


def test_memory_is_fresh_aligned_and_apart() -> None:
    memory = DeviceMemory()
    first, second = memory.allocate("first", 100), memory.put("second", b"abc")
    assert first % 256 == second % 256 == 0
    assert abs(first - second) > 1 << 16
    assert memory.bytes_of("first") == b"\xff" * 100
    ctypes.memset(second, ord("z"), 2)
    assert memory.bytes_of("second") == b"zzc"
    assert memory.allocations == {"first": (first, 100), "second": (second, 3)}
    with pytest.raises(ValueError, match="'first' is already allocated"):
        memory.allocate("first", 1)


def test_fast_enough_for_attention() -> None:
    # 8192 products and 5120 loads of fragments: the matrix work of 1 x 2 x 256 x 64 forward.
    product(256, 256, 256)
    start = time.process_time()
    product(256, 256, 256)
    assert time.process_time() - start < 2.0
