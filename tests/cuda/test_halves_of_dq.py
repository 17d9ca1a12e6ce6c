"""Two warpgroups with half of the columns of dQ each, above D 128: plans, numbers, planted mistakes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flashgen.hosts.emulator.report import FaultKind
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.model import padded, spans_of_half
from flashgen.targets.gpu.tiles import HARMLESS_SPILL
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import planned, variant_of
from tests.cuda.hopper import EARLY, LATE
from tests.cuda.hopper_backward import check_mistake, check_results_and_bytes, check_windows_of_two_tiles
from tests.cuda.nvrtc import check_registers, needs_nvrtc

TARGET = GPUS["sm_90a"]
CAUSAL, LATENT = "head_dim 224  mask causal", "head_dim 192/128  mask causal"
SENT = "head_dim 192  mask causal"  # some of dQ leaves by way of shared memory


# Warpgroups that share a key, 2, 1 or (without warpgroups) 0.
@pytest.mark.parametrize(
    ("text", "sharing"),
    [
        ("head_dim 192/128  mask causal", 1),
        ("head_dim 160", 1),
        ("head_dim 192/128  score softcap(s, 30)", 2),  # the derivative beside P
        ("head_dim 192", 2),  # dK and dV of 64 keys are more than 160 registers of a thread
        ("head_dim 64/256", 2),
        ("head_dim 256  layout block 64: random_blocks(0.1, 1)", 2),
        ("head_dim 140", 0),  # rows that are no multiples of 16 bytes
        ("head_dim 256  score -sqdist", 0),  # norms of Q want everyone at once
        ("head_dim 320", 2),
        ("head_dim 336", 0),  # more than registers hold
    ],
)
def test_who_divides_dq(text: str, sharing: int) -> None:
    _, plan = planned(f"attention a {{ dtype bf16  {text} }}", "sm_90a")
    (tiles,) = (each.backward for each in plan.elements)
    assert tiles.halves_dq is (sharing > 0)
    assert tiles.shares_keys is (sharing == 2)
    if sharing:
        assert (tiles.Br, tiles.rows, tiles.warps, tiles.producers) == (64, 128 // sharing, 8, 4)
        assert 8 * tiles.registers[0] + 4 * tiles.registers[1] <= 65536 // 32
    choices = [each.choice for each in plan.decisions if each.about.startswith("backward")]
    assert ("divided among 2 warpgroups" in choices) is (sharing == 2)
    assert ("whole rows of dK and dV" in choices) is (sharing == 1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_smaller_head_dimensions_have_nothing_of_it(head_dim: int) -> None:
    variant = variant_of(f"attention a {{ dtype bf16  head_dim {head_dim}  mask causal }}")
    source = emit_cuda(TARGET.plan(variant))
    assert "Half" not in source.whole
    assert "dq_sent" not in source.whole


def test_sequences_have_other_kernels() -> None:
    """Tensor copies alone bring Q and dO, and their maps end where tensors do."""
    plan = TARGET.plan(replace(variant_of(f"attention a {{ {CAUSAL} }}"), kind=RAGGED))
    assert not any(each.backward.halves_dq for each in plan.elements)


def test_halves_are_spans_of_whole_instructions() -> None:
    for width in range(32, 577, 32):
        spans = spans_of_half(width, ElementType.BF16)
        assert 2 * sum(spans) == width
        assert all(span % 8 == 0 and 0 < span <= 256 for span in spans)
        assert spans[0] % 64 == 0 or width <= 96  # whole panels come first
    assert spans_of_half(256, ElementType.BF16) == (128,)
    assert spans_of_half(192, ElementType.F16) == (64, 32)
    assert spans_of_half(224, ElementType.BF16) == (64, 32, 16)


# Each kind of span; weights before dP and not; grouped heads; gradients of each level; no softmax; marks of extreme
# rows; what rows carry; warpgroups with keys of their own.
SPECS = {
    "causal": (CAUSAL, (1, 2, 1, 70, 90)),
    "capped": ("head_dim 224  score softcap(s, 20)  mask causal  dropout 0.2", (1, 1, 1, 70, 90)),
    "folded": ("head_dim 256  score softcap(s, 20)  mask causal", (1, 2, 1, 70, 90)),
    "sigmoid": ("head_dim 256/96  weights sigmoid(s - 2)", (1, 2, 1, 65, 129)),
    "bias": ("head_dim 248  tensor bias: f32[H, Nk] grad  score s + bias[h, j]", (1, 2, 1, 129, 70)),
    "blocks": ("head_dim 256  layout block 64: popcount(I ^ J) == 1", (1, 2, 1, 300, 300)),
    "table": (
        "head_dim 192  tensor table: f32[H, 65] grad  score s + table[h, clamp(i - j, -32, 32) + 32]",
        (1, 2, 2, 100, 150),
    ),
    "pieces": ("head_dim 288  mask causal", (1, 1, 1, 130, 70)),
    "latent": ("head_dim 192/128  mask causal", (1, 1, 1, 130, 190)),
    "window": ("head_dim 144  mask causal and window_left(60)", (1, 2, 2, 190, 130)),
    "slopes": ("head_dim 160  tensor slope: f32[H] grad  score s - slope[h] * (i - j)", (1, 2, 1, 131, 100)),
    "documents": ("head_dim 136/64  tensor doc: i32[B, Nk]  mask causal and same_document(doc)", (1, 2, 1, 140, 200)),
}
QUICK = ("causal", "capped", "documents")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in SPECS]
)
def test_results_and_bytes(name: str) -> None:
    text, shape = SPECS[name]
    check_results_and_bytes(f"halves_{name}", text, shape, lambda tiles: tiles.halves_dq)


@pytest.mark.slow
@pytest.mark.parametrize("text", [CAUSAL, LATENT])
def test_windows_of_two_tiles(text: str) -> None:
    """Each window, and each query head that shares the keys, begins with fresh signals."""
    check_windows_of_two_tiles(f"windows_{text == LATENT}", text)


# Where it is, what was planted, what the emulator may call it.
MISTAKES = {
    "P is not waited for": (CAUSAL, "known, ahead);\n      Team::barrier();", "known, ahead);", LATE),
    "dS is not waited for": (CAUSAL, "Team::barrier();  // dS is there\n      if", "if", LATE),
    "own keys, dS of the last tile is not waited for": (
        LATENT,
        "hand_over(n);\n        await_ds(n);",
        "hand_over(n);",
        LATE,
    ),
    "own keys, dS is not published": (
        LATENT,
        "fg::publish_shared();\n    fg::barrier_arrive(shared_ds",
        "fg::barrier_arrive(shared_ds",
        {FaultKind.NOT_PUBLISHED},
    ),
    "P takes the place of one that is in use": (
        CAUSAL,
        "fg::barrier_wait(USED_UP + part, threads);\n      share(p_tile(), weights);",
        "share(p_tile(), weights);",
        {FaultKind.RACE, FaultKind.DEADLOCK},
    ),
    "own keys, dS is not waited for, and takes the place of one that is in use": (
        LATENT,
        "if (!first && k == 0) await_ds(n - 1);",
        "",
        {FaultKind.RACE, FaultKind.DEADLOCK, FaultKind.NOT_PUBLISHED},
    ),
    "nobody says that P is used up": (
        CAUSAL,
        "fg::barrier_arrive(USED_UP + 1 - group(), threads);  // done with P and dS",
        "//",
        {FaultKind.DEADLOCK},
    ),
    "P and dS are not published": (
        CAUSAL,
        "own.at[0][t], lane);\n    fg::publish_shared();",
        "own.at[0][t], lane);",
        {FaultKind.NOT_PUBLISHED},
    ),
    "dO is given back before dV is there": (
        CAUSAL,
        "fg::wait_products<1>(dv);\n    if (n + 1 < visits.count()) signals().release(n);",
        "if (n + 1 < visits.count()) signals().release(n);\n    fg::wait_products<1>(dv);",
        EARLY,
    ),
    "own keys, dO is given back before dV is there": (
        LATENT,
        "fg::wait_products<0>(dv, p[k]);\n          if (n + 1 < visits.count()) signals().release(n);",
        "if (n + 1 < visits.count()) signals().release(n);\n          fg::wait_products<0>(dv, p[k]);",
        EARLY,
    ),
    "Q is given back before dK is there": (
        CAUSAL,
        "fg::wait_products<0>(dk);\n    if (n + stages < visits.count()) q_signals().release(n);",
        "if (n + stages < visits.count()) q_signals().release(n);\n    fg::wait_products<0>(dk);",
        EARLY,
    ),
    "dQ leaves before it is there": (CAUSAL, "fg::wait_products<1>(dq);\n        put_dq", "put_dq", LATE),
    "a piece of dQ leaves before it is there": (LATENT, "fg::wait_products<last ? pending : 0>(dq);", "", LATE),
    "dQ takes a place that has not left": (
        SENT,
        "fg::bulk_wait_read();  // what was sent before has left",
        ";",
        LATE,
    ),
    "no wait for Q": (CAUSAL, "q_signals().await(n);\n    if", "if", LATE),
    "no wait for dO": (CAUSAL, "      signals().await(n);\n      start_dp(dp, n)", "start_dp(dp, n)", LATE),
    "no wait for what rows carry": (CAUSAL, "signals().await(n, ROWS_SHOWN);\n  }", "}", LATE),
    "no wait for the room of dO": (CAUSAL, "    signals().await_room(n);\n", "", EARLY),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 6 else ()) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    text, old, new, kinds = MISTAKES[name]
    check_mistake(f"halves_{list(MISTAKES).index(name)}", text, re.escape(old), new, kinds)


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "head_dim 256  mask causal and window_left(100)",  # shorter rows than those that share dQ
        CAUSAL,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (LATENT, "head_dim 288", "head_dim 256  score softcap(s, 30)")
        ),
    ],
)
def test_it_stays_in_registers_and_no_product_waits(text: str) -> None:
    check_registers(text, "backward", "backward", most=HARMLESS_SPILL)  # none of it in a step


def test_padded_dimensions_have_halves() -> None:
    for head_dim in range(129, 257):
        assert padded(head_dim) % 32 == 0


def test_registers_of_the_model() -> None:
    """What a thread holds is counted by the queries that it weighs at a time, and fits."""
    for text, numbers in (("head_dim 256", 128 + 32), ("head_dim 192/128", 160 + 32), ("head_dim 288", 160 + 32)):
        variant, plan = planned(f"attention a {{ dtype bf16  {text} }}", "sm_90a")
        tiles = plan.by_element[ElementType.BF16].backward
        assert tiles.accumulators(variant, ElementType.BF16) == numbers
        assert numbers + 16 <= tiles.registers[0]
