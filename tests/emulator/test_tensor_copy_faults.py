"""Mistakes with tensor copies and their mbarriers: each is reported with its kind and its line."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.hosts.emulator.program import kernel_names
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.tensor_maps import TensorMap
from tests.emulator.helpers import kernel, launch

# Name, warps, kind, what the message says.
FAULTS = [
    ("read_before_the_wait", 1, FaultKind.NOT_AWAITED, "a tensor copy of warp 0 lane 0 that no wait for its mbarrier"),
    ("written_before_the_wait", 1, FaultKind.NOT_AWAITED, "warp 0 lane 0 writes byte 0"),
    ("never_waited_for", 1, FaultKind.NOT_AWAITED, "the block ends, but no wait has covered this tensor copy"),
    ("product_of_warps_that_did_not_wait", 4, FaultKind.RACE, "which have not all waited for the tensor copy"),
    ("copied_over_a_product", 4, FaultKind.NOT_AWAITED, "byte 0 of shared memory, the target of a tensor copy"),
    ("copied_over_what_was_multiplied", 4, FaultKind.RACE, "was read by a product of warps 0 to 3"),
    ("copied_over_what_was_not_published", 1, FaultKind.NOT_PUBLISHED, "byte 0 of shared memory is overwritten"),
    ("copied_to_half_a_group", 1, FaultKind.MISALIGNED, "byte 512 of shared memory: rows of 128 bytes are permuted"),
    ("copied_outside", 1, FaultKind.SHARED_OUTSIDE, "copies to 16 bytes of shared memory at byte 4096"),
    ("rows_that_are_not_there", 1, FaultKind.OUTSIDE, "reads 16 bytes at byte 1024 of 'x', which has 1024"),
    ("slab_that_is_not_there", 1, FaultKind.OUTSIDE, "a box of slab 1, and the tensor has 1"),
    ("nothing_expected", 1, FaultKind.DEADLOCK, "which expects 0 bytes: tensor copies bring 1024"),
    ("more_expected", 1, FaultKind.DEADLOCK, "which expects 1152 bytes: tensor copies bring 1024"),
    ("less_expected", 1, FaultKind.MBARRIER, "brings 1024 bytes to the mbarrier at byte 3072"),
    ("too_much_expected", 1, FaultKind.MBARRIER, "expects 1048576 bytes"),
    ("arrival_missing", 1, FaultKind.DEADLOCK, "to which 1 of 2 arrivals have come"),
    ("one_arrival_more", 1, FaultKind.MBARRIER, "more arrivals than the 1 that the mbarrier"),
    ("phase_that_nobody_begins", 1, FaultKind.DEADLOCK, "to which 0 of 32 arrivals have come"),
    ("parity_of_two", 1, FaultKind.MBARRIER, "a phase of parity 2"),
    ("never_made", 1, FaultKind.MBARRIER, "there is no mbarrier at byte 3072"),
    ("made_twice", 1, FaultKind.MBARRIER, "is made again, and is still in use"),
    ("made_too_many", 1, FaultKind.MBARRIER, "the emulator follows 32 mbarriers"),
    ("made_at_half_a_word", 1, FaultKind.MISALIGNED, "8 bytes at byte 4 of shared memory"),
    ("not_published", 1, FaultKind.NOT_PUBLISHED, "an mbarrier, and counts a tensor copy"),
    ("overwritten", 1, FaultKind.MBARRIER, "the mbarrier at byte 3072 was overwritten"),
    ("invalidated_under_a_copy", 1, FaultKind.MBARRIER, "while a tensor copy is under way"),
    ("lanes_at_two_mbarriers", 1, FaultKind.DIVERGENCE, "lanes 0 and 9 of warp 0 come to 'mbarrier_wait' of different"),
    ("half_a_warp_waits", 1, FaultKind.DIVERGENCE, "'mbarrier_wait'"),
]
# Between warps the scheduler's choice decides which is the later one.
BETWEEN = [
    ("waited_for_by_another_warp", {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.RACE}),
    ("copied_over_what_is_read", {FaultKind.NOT_AWAITED, FaultKind.RACE}),
    ("made_without_a_barrier", {FaultKind.MBARRIER, FaultKind.RACE}),
    ("invalidated_while_in_use", {FaultKind.MBARRIER, FaultKind.RACE}),
]
OTHERS = {"made_for_nobody"}

SOURCE = kernel("tensor_copy_faults")
MAP = TensorMap("x", extents=(64, 16, 1), strides=(128, 1024), box=(64, 8), batch_slabs=0, head_slabs=0)


@pytest.mark.parametrize(("name", "warps", "kind", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults(name: str, warps: int, kind: FaultKind, says: str) -> None:
    for seed in range(3):
        error = failed(name, warps, seed)
        assert error.kind is kind, str(error)
        assert says in error.message, str(error)
        marks = {text.partition("//")[2].strip() for text in (error.line_text, error.other_line_text)}
        assert marks <= {"FAULT", "OTHER", ""}, str(error)
        assert "FAULT" in marks, str(error)


@pytest.mark.parametrize(("name", "kinds"), BETWEEN, ids=[name for name, _ in BETWEEN])
def test_between_warps_for_every_seed(name: str, kinds: set[FaultKind]) -> None:
    errors = [failed(name, 2, seed) for seed in range(12)]
    assert {error.kind for error in errors} == kinds
    for error in errors:
        assert error.line_text.partition("//")[2].strip() in ("FAULT", "OTHER"), str(error)


def test_a_barrier_for_nobody() -> None:
    error = failed("made_for_nobody", 1, 0)
    assert (error.kind, "0 arrivals: there are 1 to" in error.message) == (FaultKind.MBARRIER, True)
    assert "mbarrier_init" in error.line_text


def test_the_parameters_of_every_kernel_stand_here() -> None:
    assert set(kernel_names(SOURCE)) == {name for name, *_ in FAULTS} | {name for name, _ in BETWEEN} | OTHERS


def failed(name: str, warps: int, seed: int) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        launch(
            SOURCE,
            {"x": np.zeros((8, 64), np.uint16), "y": np.zeros(1, np.float32)},
            maps=[MAP],
            name=name,
            threads=32 * warps,
            shared_bytes=4096,
            seed=seed,
        )
    return caught.value
