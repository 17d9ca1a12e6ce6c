"""Clusters under the emulator: blocks that share copies and arrive at each other's mbarriers, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.hosts.emulator.program import kernel_names
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.tensor_maps import TensorMap
from tests.emulator.helpers import Outcome, kernel, launch

SOURCE = kernel("clusters")
ROWS = 64
RIGHT = ("shared_copies", "told_numbers", "exchanged", "sent_boxes")
# Name, kinds, what messages say: which block comes first is the scheduler's choice.
FAULTS = [
    (
        "copied_before_all_have_begun",
        {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.NOT_PUBLISHED},
        "mbarrier|barrier between",
    ),
    ("copied_over_what_the_other_reads", {FaultKind.RACE, FaultKind.NOT_AWAITED}, "byte"),
    ("read_without_a_wait", {FaultKind.RACE, FaultKind.NOT_AWAITED}, "tensor copy"),
    ("told_without_a_signal", {FaultKind.RACE}, "byte 2048 of shared memory"),
    ("arrival_of_the_other_missing", {FaultKind.DEADLOCK}, "to which 1 of 2 arrivals have come"),
    ("arrives_where_all_have_ended", {FaultKind.MBARRIER}, "block 1 of the cluster, which has ended"),
    ("a_block_that_is_not_there", {FaultKind.MBARRIER}, "block 2 of a cluster of 2"),
    ("half_a_cluster_barrier", {FaultKind.DEADLOCK}, "'cluster_barrier' for warp 4, which has ended"),
    ("sent_over_what_the_other_reads", {FaultKind.RACE, FaultKind.MBARRIER}, "byte"),
    (
        "sent_before_all_have_begun",
        {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.NOT_PUBLISHED},
        "mbarrier|barrier between",
    ),
    ("sent_more_than_expected", {FaultKind.MBARRIER, FaultKind.DEADLOCK}, "what a thread sends|expects 256 bytes"),
    ("a_sent_box_overwritten", {FaultKind.RACE}, "may still read it|what was sent from there"),
    ("a_sent_box_not_published", {FaultKind.NOT_PUBLISHED}, "publish_shared"),
    (
        "a_sent_box_not_awaited",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED, FaultKind.MBARRIER},
        "tensor copy|nothing has written",
    ),
    ("a_barrier_of_the_block_for_the_cluster", {FaultKind.DEADLOCK}, "waits at 'block_barrier'"),
]


def run(name: str, *, blocks: int = 2, seed: int = 0, host_threads: int = 1) -> Outcome:
    """One launch."""
    x = np.arange(ROWS * 64, dtype=np.uint16).reshape(ROWS, 64)
    rows = TensorMap("x", extents=(64, ROWS, 1), strides=(128, 128 * ROWS), box=(64, 8), batch_slabs=0, head_slabs=0)
    return launch(
        SOURCE,
        {"x": x, "y": np.zeros(128 * blocks, np.float32)},
        maps=[rows],
        name=name,
        grid=(blocks, 1, 1),
        threads=128,
        shared_bytes=4096,
        seed=seed,
        host_threads=host_threads,
    )


@pytest.mark.parametrize("seed", range(8))
def test_blocks_share_copies(seed: int) -> None:
    found = run("shared_copies", blocks=6, seed=seed, host_threads=1 + seed % 2)
    sums = found.arrays["y"].reshape(6, 128).sum(1)
    assert (sums == np.arange(ROWS * 64).sum()).all()
    assert found.report.traffic["x"].loaded == 3 * 2 * ROWS * 64  # once a cluster


@pytest.mark.parametrize("seed", range(8))
def test_blocks_tell_each_other_numbers(seed: int) -> None:
    told = run("told_numbers", seed=seed).arrays["y"].reshape(2, 128)
    assert (told == [[7], [8]]).all()


@pytest.mark.parametrize("seed", range(8))
def test_blocks_exchange_numbers(seed: int) -> None:
    sums = run("exchanged", seed=seed).arrays["y"].reshape(2, 128)[:, :64]
    assert (sums == 8 * (np.array([[2], [1]]) + np.arange(64))).all()


@pytest.mark.parametrize("seed", range(8))
def test_blocks_send_what_they_have_in_shared_memory(seed: int) -> None:
    sums = run("sent_boxes", seed=seed).arrays["y"].reshape(2, 128)
    assert (sums == 2 * (60 + 4 * np.array([[1], [0]]))).all()


@pytest.mark.parametrize(("name", "kinds", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults(name: str, kinds: set[FaultKind], says: str) -> None:
    for seed in range(12):
        with pytest.raises(EmulatorError, match=says) as caught:
            run(name, seed=seed)
        assert caught.value.kind in kinds, str(caught.value)


def test_a_grid_has_whole_clusters() -> None:
    with pytest.raises(EmulatorError, match="a grid has whole clusters"):
        run("told_numbers", blocks=3)


def test_every_kernel_stands_here() -> None:
    assert set(kernel_names(SOURCE)) == {*RIGHT, *(name for name, *_ in FAULTS)}
