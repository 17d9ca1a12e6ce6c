"""Two warpgroups that share 64 rows and weigh key tiles in turns, above D 320: plans, numbers, planted mistakes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import planned, variant_of
from tests.cuda.hopper import EARLY, LATE, changed, hopper, random
from tests.cuda.nvrtc import check_registers, needs_nvrtc
from tests.numeric.helpers import failures
from tests.slices import one_of

TARGET = GPUS["sm_90a"]
CAUSAL, LATENT, ALL = "head_dim 384  mask causal", "head_dim 576/512  mask causal", "head_dim 384"
PINNED = "schedule { Br = 64  Bc = 64  warps = 8 }"  # without a cluster
NONE = "head_dim 384  mask j > 1000"
FEW = "head_dim 384  mask j < 40"  # one tile of keys: the warpgroups do not wait for each other


# How many blocks share copies, of those that take turns; 0: none take turns.
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("head_dim 512  mask causal", 2),
        ("head_dim 576/512", 2),
        ("head_dim 384  score softcap(s, 30)  dropout 0.1", 2),
        ("head_dim 512  layout block 64: random_blocks(0.1, 1)", 1),  # each visits what the other's rows keep
        ("head_dim 512  mask causal and window_left(4000)", 2),
        ("head_dim 512  mask causal and window_left(1000)", 1),
        ("head_dim 336", 2),  # padded to 384
        ("head_dim 64/512", 0),  # K has no two halves
        ("head_dim 448", 0),  # V has an odd number of panels
        ("head_dim 510", 0),  # rows that are no multiples of 16 bytes
        ("head_dim 512  weights sigmoid(s)", 0),
        ("head_dim 512  score -sqdist", 0),
        ("head_dim 512  tensor doc: i32[B, Nk]  mask same_document(doc)", 0),  # what a mask reads by column
        ("head_dim 320", 0),  # a warpgroup has whole rows
    ],
)
def test_who_takes_turns(text: str, blocks: int) -> None:
    _, plan = planned(f"attention a {{ dtype bf16  {text} }}", "sm_90a")
    (tiles,) = (each.forward for each in plan.elements)
    assert tiles.warpgroups
    assert tiles.ping_pong is (blocks > 0)
    assert tiles.cluster == max(blocks, 1)
    if blocks:
        assert (tiles.Br, tiles.Bc, tiles.warps, tiles.split, tiles.s_columns) == (64 * blocks, 64, 8, 2, 64)
        assert (tiles.cluster, tiles.rows) == (blocks, 64)
        assert 8 * tiles.registers[0] + 4 * tiles.registers[1] <= 65536 // 32


def test_smaller_head_dimensions_have_nothing_of_it() -> None:
    for head_dim in ("64", "256", "320"):
        variant = variant_of(f"attention a {{ dtype bf16  head_dim {head_dim}  mask causal }}")
        assert "PanelHalf" not in emit_cuda(TARGET.plan(variant)).whole


def test_turns_have_one_stage() -> None:
    """Pinned to two, others multiply."""
    _, plan = planned("attention a { dtype bf16  head_dim 384  schedule { stages = 2 } }", "sm_90a")
    (tiles,) = (each.forward for each in plan.elements)
    assert (tiles.ping_pong, tiles.stages) == (False, 2)


# One tile and many, even and odd; grouped heads; rows and keys that are none; lists; whatever scores and weights read.
SPECS = {
    "causal": (CAUSAL, (1, 4, 2, 200, 330)),
    "latent": (LATENT, (1, 2, 1, 130, 200)),
    "one tile": (ALL, (1, 3, 1, 5, 33)),
    "all": (ALL, (2, 1, 1, 129, 320)),
    "alone": (f"{CAUSAL}  {PINNED}", (1, 4, 2, 200, 330)),
    "window": ("head_dim 512  mask causal and window_left(60)", (1, 2, 2, 300, 130)),
    "capped": ("head_dim 400/384  score softcap(s, 20)  mask causal  dropout 0.2", (1, 1, 1, 129, 257)),
    "sink": ("head_dim 384  tensor sink: f32[H]  weights softmax(sink = sink[h])  mask causal", (1, 2, 1, 100, 150)),
    "slopes": ("head_dim 384  tensor slope: f32[H]  score s - slope[h] * (i - j)  mask causal", (1, 2, 1, 131, 200)),
    "bias": ("head_dim 384  tensor bias: bf16[H, Nq, Nk]  score s + bias[h, i, j]", (1, 2, 1, 70, 150)),
    "blocks": ("head_dim 384  layout block 64: popcount(I ^ J) == 1", (1, 2, 1, 300, 330)),
    "pairs": ("head_dim 384  tensor keep_: bool[Nq, Nk]  mask keep_[i, j]", (1, 2, 1, 130, 200)),
    "listed": ("head_dim 384  tensor keep_: bool[Nq, Nk]  mask causal or keep_[i, j]", (1, 2, 1, 200, 330)),
}
QUICK, ALONE = ("causal", "capped"), ("alone", "window", "blocks", "pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in SPECS]
)
def test_results_and_bytes(name: str) -> None:
    text, shape = SPECS[name]
    elements = (ElementType.BF16, ElementType.F16) if name == "latent" else (ElementType.BF16,)
    for element in elements:
        spec = flashgen.loads(
            f"attention turns_{name.replace(' ', '_')} {{ dtype {element}  {text} }}", backend="reference"
        ).spec
        op = load_spec(spec, "emulator", "sm_90a")
        assert all(each.elements[0].forward.ping_pong for each in op.plan.values())
        assert all((each.elements[0].forward.cluster == 1) is (name in ALONE) for each in op.plan.values())
        case = verify_case(op, spec.head_dims[0], element, Shape(*shape))
        assert case.ok, failures(case)
        assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def test_float32_beside_it() -> None:
    """A plan of all element types has both kinds of tiles."""
    spec = flashgen.loads(f"attention turns_of_all {{ {CAUSAL} }}", backend="reference").spec
    op = load_spec(spec, "emulator", "sm_90a")
    for element, turns in ((ElementType.BF16, True), (ElementType.F32, False)):
        assert all(each.by_element[element].forward.ping_pong is turns for each in op.plan.values())
        case = verify_case(op, spec.head_dims[0], element, Shape(1, 1, 1, 70, 140))
        assert case.ok, failures(case)


def error(op: AttentionOp, shift: float = 0.0) -> float:
    """Of o, over several tiles whose scores grow by so much from each to the next."""
    D, Dv = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    q, k, v = random(1, 2, 200, D, seed=0), random(1, 1, 420, D, seed=1), random(1, 1, 420, Dv, seed=2)
    q[..., 0], k[..., 0] = D**0.5, shift * (torch.arange(420) // 64)
    exact = op.reference(*(x.double() for x in (q, k, v)))
    return float((op(q, k, v) - exact).norm() / exact.norm())


@pytest.mark.parametrize("shift", [0.0, 9.0, -9.0])
def test_maxima_that_grow_from_tile_to_tile(shift: float) -> None:
    """Each warpgroup rescales its O where the other one's tile has larger scores, in turn."""
    op = changed(f"grown_by_{[0.0, 9.0, -9.0].index(shift)}", ALL, "forward", "$^", "", count=0)
    assert error(op, shift) < 0.01


@pytest.mark.parametrize("text", one_of(3, [CAUSAL, ALL, f"{ALL}  {PINNED}"]))
def test_windows_of_a_few_tiles(text: str) -> None:
    """Turns go on from window to window, whatever number of tiles each has."""
    windows = r"(window \+=? |first\(\) \+ )WINDOW"
    for tiles in (1, 2, 3):
        op = changed(f"windows_{tiles}_{len(text)}", text, "forward", windows, rf"\g<1>{tiles}", count=3)
        for shift in (0.0, 9.0):
            assert error(op, shift) < 0.01


def test_sequences() -> None:
    """Of lengths from none to several tiles; NaN behind the end of one changes no bit of others."""
    variant = variant_of(f"attention a {{ dtype bf16  {CAUSAL} }}")
    assert all(each.forward.ping_pong for each in TARGET.plan(replace(variant, kind=RAGGED)).elements)
    op = hopper(CAUSAL)
    lengths = ((5, 5), (0, 3), (130, 130), (0, 0), (70, 150), (9, 0), (1, 1), (200, 66))
    q_starts, k_starts = (torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True))
    q, k, v = (random(int(starts[-1]), n, 384, seed=n) for starts, n in ((q_starts, 2), (k_starts, 1), (k_starts, 1)))
    whole = op.varlen(q, k, v, q_starts, k_starts)
    exact = op.reference.varlen(q, k, v, q_starts, k_starts)
    assert (whole.float() - exact.float()).norm() < 0.01 * exact.float().norm()
    for n in (2, 4):  # what lies before and behind others
        for x, starts in ((q, q_starts), (k, k_starts), (v, k_starts)):
            x[starts[n] : starts[n + 1]] = torch.nan
    beside = op.varlen(q, k, v, q_starts, k_starts)
    for n in (0, 5, 6, 7):
        rows = slice(int(q_starts[n]), int(q_starts[n + 1]))
        assert torch.equal(whole[rows], beside[rows])


# Masks under which a mistake shows, where others keep the blocks and warpgroups together.
OTHERS = {
    "sums take the place of what is read": FEW,
    "a number in the place of one that is read": NONE,
}
# What was planted, what the emulator may call it.
MISTAKES = {
    "P is not waited for": ("    p_signals().await(parts_before + n);\n", "", LATE),
    "P is waited for by another phase": (
        "await(parts_before + n);\n    load",
        "await(parts_before + n + 2);\n    load",
        EARLY | {FaultKind.DEADLOCK},
    ),
    "the first half of K is not waited for": ("    signals().await(half_of(n, 0));\n", "", LATE),
    "the second half of K is not waited for": ("    signals().await(half_of(n, 1));\n", "", LATE),
    "K is waited for by another phase": ("signals().await(half_of(n, 0))", "signals().await(half_of(n + 2, 0))", EARLY),
    "V is not waited for": ("    v_signals().await(half_of(n, group()));\n", "", LATE),
    "the first half of K is given back too early": (
        "warpgroup_wait<1>();\n    release_half(signals(), n, 0);",
        "release_half(signals(), n, 0);\n    warpgroup_wait<1>();",
        EARLY,
    ),
    "the second half of K is given back too early": (
        "warpgroup_wait<1>();\n    release_half(signals(), n, 0);",
        "warpgroup_wait<1>();\n    release_half(signals(), n, 0);\n    release_half(signals(), n, 1);",
        EARLY,
    ),
    "V is given back too early": (
        "wait_products<0>(o, p);\n    release_half(v_signals(), n, group());",
        "release_half(v_signals(), n, group());\n    wait_products<0>(o, p);",
        EARLY,
    ),
    "maxima are read before they are there": (
        "p_signals().await(parts_before + n);\n    load(p, this->p_tile(), warp_row);\n    follow_maxima();",
        "follow_maxima();\n    p_signals().await(parts_before + n);\n    load(p, this->p_tile(), warp_row);",
        LATE,
    ),
    "sums take the place of what is read": (
        "    barrier_of_both();  // those of the tile before have been read\n",
        "",
        LATE,
    ),
    "a copy over what the other block reads": ("if (own) await_half(of, number);", "if (own) ;", EARLY),
    "bytes of a phase that is not there yet": (
        "else if (number >= ring) of.await(number - ring);",
        "",
        {FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "copies to a block that has not begun": (
        "barrier_of_all();\n    const int warp",
        "block_barrier();\n    const int warp",
        EARLY | {FaultKind.NOT_PUBLISHED},
    ),
    "arrivals at the block's own signals": (
        "mbarrier_arrive_at(of.empty(half_of(n, h)), h)",
        "mbarrier_arrive_at(of.empty(half_of(n, h)), cluster_rank())",
        EARLY | {FaultKind.DEADLOCK},
    ),
    "a number in the place of one that is read": (
        "      number_signals().await_room(n);\n",
        "",
        EARLY | {FaultKind.DEADLOCK},
    ),
    "a number that is not there yet": (
        "    mbarrier_wait_for_cluster(number_signals().full(n), NumberSignals::parity(n));\n",
        "",
        EARLY | {FaultKind.DEADLOCK},
    ),
    "nobody awaits room": ("if (number >= 2) mbarrier_wait(", "if (number < 0) mbarrier_wait(", EARLY),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 4 else ()) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    old, new, kinds = MISTAKES[name]
    text = OTHERS.get(name, CAUSAL)
    op = changed(f"turns_{list(MISTAKES).index(name)}", text, "forward", re.escape(old), new)
    with pytest.raises(EmulatorError) as caught:
        error(op)
    assert caught.value.kind in kinds, str(caught.value)


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "head_dim 512  mask causal",
        *(pytest.param(each, marks=pytest.mark.slow) for each in (LATENT, "head_dim 512  score softcap(s, 30)")),
    ],
)
def test_it_stays_in_registers_and_no_product_waits(text: str) -> None:
    check_registers(text, "forward", "forward")
