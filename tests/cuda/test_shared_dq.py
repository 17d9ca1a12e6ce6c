"""Backward at D 256 by clusters of two blocks that exchange dS: plans, numbers, bytes, planted mistakes."""

from __future__ import annotations

import re

import pytest

from flashgen.hosts.emulator.report import FaultKind
from flashgen.ir.types import ElementType
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import planned
from tests.cuda.hopper import EARLY_IN_CLUSTERS, LATE
from tests.cuda.hopper_backward import (
    check_gradients_repeat,
    check_mistake,
    check_results_and_bytes,
    check_windows_of_two_tiles,
)
from tests.cuda.nvrtc import check_registers, needs_nvrtc

TARGET = GPUS["sm_90a"]
CAUSAL = "head_dim 256  mask causal"


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        (CAUSAL, True),
        ("head_dim 256/64  score softcap(s, 20)", True),
        ("head_dim 256  mask causal and window_left(9000)", True),
        ("head_dim 256  mask causal and window_left(100)", False),  # both would visit what either keeps
        ("head_dim 256  tensor bias: bf16[H, Nq, Nk]  score s + bias[h, i, j]", True),
        ("head_dim 192  mask causal", False),  # a warpgroup's part of dQ is no whole panel
        ("head_dim 64/256", False),
        ("head_dim 256  dropout 0.2", False),  # P is not formed first
        ("head_dim 256  tensor slope: f32[H] grad  score s - slope[h] * (i - j)", False),  # gradients beside
        ("head_dim 256  layout block 64: random_blocks(0.1, 1)", False),
    ],
)
def test_who_shares_dq(text: str, shares: bool) -> None:
    variant, plan = planned(f"attention a {{ dtype bf16  {text} }}", "sm_90a")
    (tiles,) = (each.backward for each in plan.elements)
    assert tiles.divides_keys is shares
    if shares:
        assert (tiles.Br, tiles.Bc, tiles.cluster, tiles.rows, tiles.column_parts) == (64, 128, 2, 64, 1)
        assert tiles.accumulators(variant, ElementType.BF16) + 32 + 16 <= tiles.registers[0]  # dQ beside


# Odd numbers of key tiles, and one; grouped heads; what pairs read.
SPECS = {
    "causal": (CAUSAL, (1, 2, 1, 200, 200)),
    "one tile": ("head_dim 256", (1, 1, 1, 70, 50)),
    "odd": ("head_dim 256  mask causal", (2, 4, 2, 130, 300)),
    "no queries kept": ("head_dim 256  mask causal", (1, 1, 1, 40, 300)),
    "window": ("head_dim 256  mask causal and window_left(9000)", (1, 2, 1, 260, 260)),
    "narrow values": ("head_dim 256/64", (1, 1, 1, 100, 129)),
    "folded": ("head_dim 256/128  score softcap(s, 20)  mask causal", (1, 2, 1, 70, 90)),
    "bias": ("head_dim 256  tensor bias: bf16[H, Nq, Nk]  score s + bias[h, i, j]", (1, 2, 1, 129, 70)),
    "prefix": ("head_dim 256  param p: i32 = 150  mask causal or j < p", (1, 1, 1, 200, 330)),
}
QUICK = ("causal", "one tile", "bias")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in SPECS]
)
def test_results_and_bytes(name: str) -> None:
    text, shape = SPECS[name]
    check_results_and_bytes(f"dq_{name}", text, shape, lambda tiles: tiles.divides_keys)


def test_gradients_repeat() -> None:
    """Where dQ has a kernel of its own nothing is exchanged, and copies are shared all the same."""
    check_gradients_repeat("dq_repeat", CAUSAL)


@pytest.mark.slow
def test_windows_of_two_tiles() -> None:
    """Each window, and each query head that shares the keys, begins with fresh signals in both blocks."""
    check_windows_of_two_tiles("dq_windows", CAUSAL)


# What was planted, what the emulator may call it.
MISTAKES = {
    "dS of the other block is not waited for": ("fg::mbarrier_wait(ds_signals().came(), n % 2);", "", LATE),
    "dS is sent over what the other reads": (
        "if constexpr (adds) fg::mbarrier_wait(ds_signals().taken(), (n - 1) % 2);",
        "",
        EARLY_IN_CLUSTERS,
    ),
    "the other is told before dQ is there": (
        "fg::wait_products<1>(dq);\n      fg::mbarrier_arrive_at(ds_signals().taken(), fg::cluster_rank() ^ 1);",
        "fg::mbarrier_arrive_at(ds_signals().taken(), fg::cluster_rank() ^ 1);\n      fg::wait_products<1>(dq);",
        EARLY_IN_CLUSTERS,
    ),
    "nobody says that dS is used up": (
        "fg::mbarrier_arrive_at(ds_signals().taken(), fg::cluster_rank() ^ 1);",
        "",
        {FaultKind.DEADLOCK},
    ),
    "dS is sent before all have shared theirs": (
        "    Team::barrier();  // dS is there\n    if constexpr (shares_dq) send_ds(n);",
        "    if constexpr (shares_dq) send_ds(n);\n    Team::barrier();",
        LATE | {FaultKind.NOT_PUBLISHED},
    ),
    "a copy does not wait for the other block": (
        "for (int rank = 0; rank < P::cluster; ++rank) fg::mbarrier_arrive_at(of.empty(n), rank);",
        "for (int k = 0; k < P::cluster; ++k) fg::mbarrier_arrive_at(of.empty(n), fg::cluster_rank());",
        EARLY_IN_CLUSTERS,
    ),
    "a window begins before both are done": (
        "fg::Cluster<P::cluster>::barrier();  //",
        "fg::barrier_meet(1, P::threads);  //",
        EARLY_IN_CLUSTERS | {FaultKind.DEADLOCK},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 3 else ()) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    old, new, kinds = MISTAKES[name]
    check_mistake(f"dq_{list(MISTAKES).index(name)}", CAUSAL, re.escape(old), new, kinds)


@needs_nvrtc
@pytest.mark.parametrize("text", [CAUSAL, pytest.param("head_dim 256  score softcap(s, 30)", marks=pytest.mark.slow)])
def test_it_stays_in_registers_and_no_product_waits(text: str) -> None:
    check_registers(text, "backward", "backward")
