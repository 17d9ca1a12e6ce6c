"""Backward above D 256 by clusters of two blocks with half of the columns each: plans, numbers, planted mistakes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import flashgen
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.targets.gpu.tiles import HARMLESS_SPILL
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import planned, variant_of
from tests.cuda.hopper import EARLY_IN_CLUSTERS, LATE, changed
from tests.cuda.hopper_backward import (
    check_gradients_repeat,
    check_mistake,
    check_results_and_bytes,
    check_windows_of_two_tiles,
    gradients,
)
from tests.cuda.nvrtc import check_registers, needs_nvrtc

TARGET = GPUS["sm_90a"]
CAUSAL = "head_dim 384  mask causal"


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("head_dim 512  mask causal", 2),
        ("head_dim 512  score softcap(s, 20)", 2),
        ("head_dim 320", 2),
        ("head_dim 64/384", 2),
        ("head_dim 448/128  layout block 64: random_blocks(0.1, 1)", 2),
        ("head_dim 384  tensor sink: f32[H] grad  weights softmax(sink = sink[h])", 2),
        ("head_dim 256", 1),  # registers hold all of dK and dV
        ("head_dim 336", 1),  # halves are no whole instructions
        ("head_dim 288", 1),
        ("head_dim 576/512", 1),  # nor do halves fit registers
        ("head_dim 384  tensor slope: f32[H] grad  score s - slope[h] * (i - j)", 2),
        ("head_dim 384  score -sqdist", 1),
    ],
)
def test_who_divides_columns(text: str, cluster: int) -> None:
    variant, plan = planned(f"attention a {{ dtype bf16  {text} }}", "sm_90a")
    (tiles,) = (each.backward for each in plan.elements)
    assert tiles.column_parts == cluster
    choices = [each.choice for each in plan.decisions if each.about.startswith("backward")]
    assert (f"{tiles.cluster} blocks" in choices) is (tiles.cluster > 1)
    if cluster > 1:
        assert (tiles.Br, tiles.Bc, tiles.warps, tiles.producers, tiles.split) == (64, 64, 8, 4, 2)
        assert tiles.accumulators(variant, ElementType.BF16) + 16 <= tiles.registers[0]


def test_sequences_have_other_kernels() -> None:
    plan = TARGET.plan(replace(variant_of(f"attention a {{ {CAUSAL} }}"), kind=RAGGED))
    assert all(each.backward.cluster == 1 for each in plan.elements)


def test_other_types_have_blocks_of_their_own() -> None:
    """One source has kernels of all types: those of float32 have all columns."""
    variant = variant_of("attention a { dtype f16, f32  head_dim 320 }")
    plan = TARGET.plan(variant)
    assert [each.backward.cluster for each in plan.elements] == [2, 1]
    op = flashgen.loads("attention both { dtype f16, f32  head_dim 320  mask causal }", backend="emulator")
    assert op.spec.dtypes is not None


# Halves of whole panels and not; each way to weigh pairs; grouped heads; gradients of each level, which one block adds
# up; what rows carry; lists of tiles.
SPECS = {
    "causal": ("head_dim 512  mask causal", (1, 2, 1, 70, 90)),
    "narrow": ("head_dim 512/64  mask causal", (1, 2, 1, 90, 130)),
    "wide values": ("head_dim 64/384", (1, 2, 1, 90, 130)),
    "panels": ("head_dim 320  mask causal", (1, 1, 1, 130, 70)),
    "window": ("head_dim 448/384  mask causal and window_left(60)", (1, 2, 2, 190, 130)),
    "dropout": ("head_dim 384  score softcap(s, 20)  mask causal  dropout 0.2", (1, 1, 1, 70, 90)),
    "folded": ("head_dim 512/320  score softcap(s, 20)  mask causal", (1, 2, 1, 70, 90)),
    "sigmoid": ("head_dim 384/512  weights sigmoid(s - 2)", (1, 2, 1, 65, 129)),
    "bias": ("head_dim 384  tensor bias: f32[H, Nk]  score s + bias[h, j]", (1, 2, 1, 129, 70)),
    "blocks": ("head_dim 512  layout block 64: popcount(I ^ J) == 1", (1, 2, 1, 300, 300)),
    "sink": (
        "head_dim 384  tensor sink: f32[H] grad  weights softmax(sink = sink[h])  mask causal",
        (1, 2, 1, 100, 150),
    ),
    "slopes": ("head_dim 384  tensor slope: f32[H] grad  score s - slope[h] * (i - j)", (1, 2, 1, 131, 100)),
    "keys": ("head_dim 512  tensor bias: f32[H, Nk] grad  score s + bias[h, j]  mask causal", (1, 2, 1, 129, 70)),
    "pairs": ("head_dim 384  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]", (1, 2, 1, 129, 70)),
    "table": (
        "head_dim 320  tensor table: f32[H, 65] grad  score s + table[h, clamp(i - j, -32, 32) + 32]",
        (1, 2, 2, 100, 150),
    ),
    "all at once": (
        "head_dim 384  tensor t: f32[H] grad  score softcap(s, 20) * t[h]  mask causal",
        (1, 2, 1, 70, 90),
    ),
    "documents": (
        "head_dim 384/128  tensor doc: i32[B, Nk]  mask causal and same_document(doc)",
        (1, 2, 1, 140, 200),
    ),
}
QUICK = ("causal", "slopes")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in SPECS]
)
def test_results_and_bytes(name: str) -> None:
    text, shape = SPECS[name]
    check_results_and_bytes(f"columns_{name}", text, shape, lambda tiles: tiles.cluster > 1)


def test_gradients_repeat() -> None:
    """Two numbers have one sum: both blocks form the same weights, whoever comes first."""
    check_gradients_repeat("columns_repeat", CAUSAL)


@pytest.mark.slow
def test_windows_of_two_tiles() -> None:
    """What is exchanged is counted from window to window, and from head to head."""
    check_windows_of_two_tiles("columns_windows", CAUSAL)


# What was planted, what the emulator may call it.
MISTAKES = {
    "sums are read before they are there": (
        "fg::mbarrier_wait(exchange_signal(which, fg::warp_index()), (exchanged + n) % 2);",
        "",
        LATE,
    ),
    "dP is sent before it is there": (
        "fg::wait_products<0>(dp);\n        send(dp, OF_DP);  //",
        "send(dp, OF_DP);  //",
        LATE,
    ),
    "S is sent before it is there": ("fg::wait_products<1>(s);\n        send(", "send(", {FaultKind.NOT_AWAITED}),
    "nobody says how much comes": (
        "if (fg::lane_index() == 0) fg::mbarrier_expect(signal,",
        "if (fg::lane_index() > 31) fg::mbarrier_expect(signal,",
        {FaultKind.DEADLOCK},
    ),
    "blocks do not wait until both have begun": (
        "make_exchange();\n      fg::Cluster<P::cluster>::barrier();",
        "make_exchange();\n      fg::block_barrier();",
        EARLY_IN_CLUSTERS | {FaultKind.DEADLOCK},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 3 else ()) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    old, new, kinds = MISTAKES[name]
    check_mistake(f"columns_{list(MISTAKES).index(name)}", CAUSAL, re.escape(old), new, kinds)


@pytest.mark.slow
def test_to_whom_is_sent_shows_in_numbers() -> None:
    old, new = "signal, fg::cluster_rank() ^ 1", "signal, fg::cluster_rank()"  # to itself
    op = changed("columns_sent", CAUSAL, "backward", re.escape(old), new)
    assert not gradients(op) < 0.1


def test_s_has_to_be_read_before_dp_is_sent() -> None:
    """What comes next from the other block takes the place of S."""
    old, new = (
        r"(?s)receive\(s, OF_S, n\);([^}]*?)(send\(dp, OF_DP\);)  //",
        r"\1\2 receive(s, OF_S, n); //",
    )
    op = changed("columns_order", CAUSAL, "backward", old, new)
    with pytest.raises(EmulatorError) as caught:
        gradients(op)
    assert caught.value.kind in LATE


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "head_dim 512  mask causal",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("head_dim 320", "head_dim 512  score softcap(s, 30)")
        ),
    ],
)
def test_it_stays_in_registers_and_no_product_waits(text: str) -> None:
    check_registers(text, "backward", "backward", most=HARMLESS_SPILL)  # none of it in a step
