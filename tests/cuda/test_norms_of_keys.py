"""Scores over squared distances by warpgroups, on the emulator: who takes norms of keys, and what waits for them."""

from __future__ import annotations

import re
from operator import attrgetter

import pytest
import torch

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.types import ElementType
from tests.cuda.helpers import planned
from tests.cuda.hopper import changed, hopper, random

SCORE = "head_dim 64  score -sqdist / 16"
ALONE = "schedule { Br = 64  Bc = 64  warps = 4 }"
SERVED = "schedule { Br = 128  Bc = 64  warps = 8 }"
ALL = "i - j < 70000"  # every pair of few queries: masks that relate no queries to keys have other blocks


@pytest.mark.parametrize("width", ["16", "20", "40/24", "64", "128", "192/128", "256", "320", "512"])
def test_forward_tiles_are_those_of_other_scores(width: str) -> None:
    for mask in ("", "mask causal", "mask causal and window_left(100)"):
        (_, with_norms), (_, without) = (
            planned(f"attention a {{ head_dim {width}  {score}  {mask} }}", "sm_90a") for score in ("score -sqdist", "")
        )
        for element in (ElementType.F16, ElementType.BF16):
            ours, others = (plan.by_element[element].forward for plan in (with_norms, without))
            assert ours.warpgroups
            if others.ping_pong:  # two warpgroups by turns, beside which nobody takes norms
                rows = others.Br // others.cluster  # of a block
                assert (ours.Br, ours.Bc, ours.split, ours.ping_pong) == (rows, others.Bc, others.split, False)
            elif (mask, ours.producers) == ("mask causal", 4) and not others.producers:  # who copies takes the norms
                assert (ours.Br, ours.Bc) == (192, 128)
            else:
                of = attrgetter("Br", "Bc", "warps", "producers", "tensor_copies", "split", "ping_pong", "cluster")
                assert of(ours) == of(others)
        assert not with_norms.by_element[ElementType.F32].forward.warpgroups


@pytest.mark.parametrize("schedule", [ALONE, SERVED])
def test_several_windows_of_tiles(schedule: str) -> None:
    """Norms of rows stay from window to window, those of keys follow the parts."""
    mask = f"mask window_left(100) and causal and {ALL}"
    text, windows = (
        f"head_dim 16  score -sqdist / 4  {mask}  {schedule}",
        r"(window \+=? |first\(\) \+ )(?:fg::)?WINDOW",
    )
    op = changed(f"windows_of_norms_{schedule == SERVED}", text, "forward", windows, r"\g<1>2", count=3)
    q, k, v = random(1, 2, 700, 16, seed=0), random(1, 2, 700, 16, seed=1), random(1, 2, 700, 16, seed=2)
    exact = op.reference(q, k, v, dtype=torch.float64)
    assert (op(q, k, v).double() - exact).abs().max() < 0.02


def test_from_tile_to_tile() -> None:
    """The next query tile begins beside this one, with norms of its own."""
    op = hopper(f"{SCORE}  tensor doc: i32[B, Nk]  mask causal and same_document(doc)  {ALONE}")
    rows = 900
    q, k, v = (random(2, 2, rows, 64, seed=n) * (1 + n % 2) for n in range(3))
    doc = (torch.arange(rows) // 170).int().expand(2, -1).contiguous()
    exact = op.reference(q, k, v, doc=doc, dtype=torch.float64)
    assert (op(q, k, v, doc=doc).double() - exact).abs().max() < 0.02


TAKE = "if (n < count) take_norms_of(n);"
SAY = "mbarrier_arrive(this->norm_signals().full(parts_before + n));"
# Where it is, what was planted, what the emulator may call it.
MISTAKES = {
    "alone, no barrier after norms": (
        ALONE,
        "measure<threads>(n, int(threadIdx.x));\n    Team::barrier();",
        "measure<threads>(n, int(threadIdx.x));",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, norms that nobody awaits": (
        SERVED,
        "return norm_signals().await(parts_before + n);",
        "return;",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, norms of keys that are not there": (
        SERVED,
        f"        signals().await(parts_before + n);\n        {TAKE}",
        f"        {TAKE}",
        {FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.MBARRIER},
    ),
    "served, said before they are taken": (
        SERVED,
        f"        {TAKE}\n        {SAY}",
        f"        {SAY}\n        {TAKE}",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, one place for the norms of two tiles": (
        SERVED,
        " + stage_of<norm_places>(part_of(n)) * BC",
        "",
        {FaultKind.RACE},
    ),
    "served, room without those who take norms": (
        SERVED,
        "signals().make(false, threads + BESIDE, 1, 32);",
        "signals().make(false, threads, 1, 32);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "served, lists without them": (
        SERVED,
        "list_signals().make(false, threads + 32 * COPIERS + BESIDE, 32 * FINDERS);",
        "list_signals().make(false, threads + 32 * COPIERS, 32 * FINDERS);",
        {FaultKind.RACE, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "served, norms of rows before Q is there": (
        SERVED,
        "    this->await_q();\n",
        "    if constexpr (P::tensor_copies) this->take_norms_of_rows();\n    this->await_q();\n",
        {FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if n % 2 else ()) for n, name in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    schedule, old, new, kinds = MISTAKES[name]
    text = f"{SCORE}  mask {ALL}  {schedule}"
    op = changed(f"planted_norms_{list(MISTAKES).index(name)}", text, "forward", re.escape(old), new)
    with pytest.raises(EmulatorError) as caught:
        op(random(1, 1, 900, 64, seed=0), random(1, 1, 300, 64, seed=1), random(1, 1, 300, 64, seed=2))
    assert caught.value.kind in kinds
