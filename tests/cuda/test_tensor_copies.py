"""K and V, or Q and dO, by tensor copies in kernels for Hopper, on the emulator: strides, windows, planted mistakes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.targets.gpu.launches import forward_launches
from tests.cuda.helpers import launched, of_type, planned
from tests.cuda.hopper import changed, emitted_for, hopper, random

# Blocks that copy for themselves, and blocks with warps that copy for the others.
NOBODY_COPIES = "if constexpr (!has_producers) Team::barrier();  "
ALONE = "schedule { Br = 64  Bc = 64  warps = 4 }"
SERVED = "schedule { Br = 128  Bc = 64  warps = 8 }"
ALL = "i - j < 70000"  # every pair of few queries: masks that relate no queries to keys have other blocks
# Masks under which the backward pass is of these two kinds.
SHORT, LONG = "mask causal and window_left(120)", "mask causal"


def test_who_takes_tensor_copies() -> None:
    for text, expected in (
        ("head_dim 64  mask causal", True),
        ("head_dim 40/24  mask causal", True),
        ("head_dim 36  mask causal", False),  # rows that are no multiples of 16 bytes
        ("head_dim 64/36  mask causal", False),
        ("head_dim 64  score -sqdist", True),
    ):
        variant, plan = planned(f"attention a {{ {text} }}", "sm_90a")
        tiles = plan.by_element[ElementType.F16].forward
        assert tiles.tensor_copies is expected
        backward = expected and not variant.uses_sqdist  # norms of Q want everyone at once
        assert plan.by_element[ElementType.F16].backward.tensor_copies is backward
        *_, launch = forward_launches(of_type(plan, ElementType.F16), dropped=False).launches
        assert [box.tensor for box in launch.boxes] == (["q", "k", "v"] if expected else [])
        launches = launched(plan)
        for name in ("keys_f16",) if variant.uses_sqdist else ("backward_f16", "keys_f16"):
            boxes = launches[f"{plan.symbol}_{name}"].boxes
            assert [box.tensor for box in boxes] == (["q", "d_o"] if backward else [])
        single = plan.by_element[ElementType.F32]
        assert not single.forward.tensor_copies
        assert not single.backward.tensor_copies
    _, plan = planned("attention a { head_dim 64  mask causal }", "sm_90")
    assert not any(each.forward.tensor_copies or each.backward.tensor_copies for each in plan.elements)


def strided(heads: int, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two tensors that lie in memory in many ways."""
    x, y = random(2, heads, rows, 64, seed=1), random(2, heads, rows, 64, seed=2)
    return {
        "heads inside": (
            x.transpose(1, 2).contiguous().transpose(1, 2),
            y.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        ),
        "expanded": (x[:, :1].expand(-1, heads, -1, -1), y[:1].expand(2, -1, -1, -1)),
        "one for all": (x[:1, :1].expand(2, heads, -1, -1), y[:1, 1:2].expand(2, heads, -1, -1)),
        "parts of rows": (
            random(2, heads, 2 * rows, 192, seed=3)[:, :, ::2, 64:128],
            random(2, heads, rows, 96, seed=4)[..., 8:72],
        ),
        "one row for all": (x[:, :, :1].expand(-1, -1, rows, -1), y),
        "one number": (x, random(1, seed=5).expand(2, heads, rows, 64)),
    }


KEYS, QUERIES = strided(2, 170), strided(2, 130)


@pytest.mark.parametrize("name", KEYS)
def test_any_strides(name: str) -> None:
    op = hopper(f"head_dim 64  {SHORT}")
    q, (k, v) = random(2, 4, 130, 64, seed=0), KEYS[name]
    o = op(q, k, v)
    assert torch.equal(o, op(q, k.contiguous(), v.contiguous()))
    exact = op.reference(q, k, v, dtype=torch.float64)
    assert (o.double() - exact).abs().max() < 0.02


def gradients(op: AttentionOp, *tensors: Tensor, deterministic: bool = False) -> tuple[Tensor, ...]:
    """Those of q, k and v for q, k, v and d_o."""
    *inputs, d_o = tensors
    learned = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(op(*learned, deterministic=deterministic), learned, d_o)


def assert_close_to_exact(found: tuple[Tensor, ...], op: AttentionOp, *tensors: Tensor) -> None:
    *inputs, d_o = (x.double() for x in tensors)
    learned = [x.requires_grad_() for x in inputs]
    exact = torch.autograd.grad(op.reference(*learned), learned, d_o)
    for ours, truth in zip(found, exact, strict=True):
        assert (ours.double() - truth).abs().max() < 0.01 * truth.abs().max()


STRIDED = [*((name, SHORT) for name in QUERIES), ("expanded", LONG), ("one number", LONG)]


@pytest.mark.parametrize(
    ("name", "mask"), [pytest.param(*each, marks=pytest.mark.slow if n % 2 else ()) for n, each in enumerate(STRIDED)]
)
def test_any_strides_backward(name: str, mask: str) -> None:
    op = hopper(f"head_dim 64  {mask}")
    (q, d_o), k, v = QUERIES[name], random(2, 1, 90, 64, seed=6), random(2, 1, 90, 64, seed=7)
    found = gradients(op, q, k, v, d_o, deterministic=True)
    packed = gradients(op, q.contiguous(), k, v, d_o.contiguous(), deterministic=True)
    assert all(torch.equal(x, y) for x, y in zip(found, packed, strict=True))
    assert_close_to_exact(found, op, q, k, v, d_o)
    assert_close_to_exact(gradients(op, q, k, v, d_o), op, q, k, v, d_o)


@pytest.mark.parametrize("schedule", [ALONE, SERVED])
def test_several_windows_of_tiles(schedule: str) -> None:
    """Each begins with fresh signals, whatever the number of parts of the one before."""
    op = hopper(f"head_dim 16  mask (j < 300 or j >= 65500 and j != 65600) and {ALL}  {schedule}")
    q, k, v = random(1, 1, 100, 16, seed=0), random(1, 1, 66000, 16, seed=1), random(1, 1, 66000, 16, seed=2)
    exact = op.reference(q, k, v, dtype=torch.float64)
    assert (op(q, k, v).double() - exact).abs().max() < 0.01


WINDOWS = r"(window \+=? |first\(\) \+ )(?:fg::)?WINDOW"


@pytest.mark.parametrize("mask", [SHORT, LONG])
def test_windows_of_two_tiles_backward(mask: str) -> None:
    """Query heads that share keys, too, begin with fresh signals."""
    text = f"head_dim 16  {mask}  schedule {{ backward_Br = 64 }}"

    op = changed(f"windows_{mask == SHORT}", text, "backward", WINDOWS, r"\g<1>2", count=6)
    q, d_o = random(1, 2, 400, 16, seed=0), random(1, 2, 400, 16, seed=1)
    k, v = random(1, 1, 200, 16, seed=2), random(1, 1, 200, 16, seed=3)
    for deterministic in (False, True):
        assert_close_to_exact(gradients(op, q, k, v, d_o, deterministic=deterministic), op, q, k, v, d_o)


@pytest.mark.parametrize("schedule", [ALONE, SERVED])
def test_windows_of_two_tiles_forward(schedule: str) -> None:
    """Some rows of a warp keep keys of an earlier window, others do not: O and the sums of rows shrink together."""
    text = f"head_dim 16  mask window_left(100) and causal and {ALL}  {schedule}"

    op = changed(
        f"windows_forward_{schedule == SERVED}",
        text,
        "forward",
        WINDOWS,
        r"\g<1>2",
        count=3,
    )
    q, k, v = random(1, 2, 700, 16, seed=0), random(1, 2, 700, 16, seed=1), random(1, 2, 700, 16, seed=2)
    exact = op.reference(q, k, v, dtype=torch.float64)
    assert (op(q, k, v).double() - exact).abs().max() < 0.02


def test_several_heads_that_nothing_is_carried_for() -> None:
    op = hopper("head_dim 64  weights relu(s) / Nk")
    q, d_o = random(1, 3, 300, 64, seed=0), random(1, 3, 300, 64, seed=1)
    k, v = random(1, 1, 150, 64, seed=2), random(1, 1, 150, 64, seed=3)
    assert_close_to_exact(gradients(op, q, k, v, d_o), op, q, k, v, d_o)


def run(name: str, text: str, old: str, new: str) -> None:
    """The forward pass over several tiles with one change in its source."""
    text = f"head_dim 64  mask {ALL}  {text}"
    op = changed(name, text, "forward", re.escape(old), new)
    assert bool(emitted_for(text).plan.elements[0].forward.producers) is (SERVED in text)
    op(random(1, 1, 900, 64, seed=0), random(1, 1, 300, 64, seed=1), random(1, 1, 300, 64, seed=2))


def run_backward(name: str, text: str, old: str, new: str) -> None:
    """The same for the backward pass."""
    op = changed(name, f"head_dim 64  {text}", "backward", re.escape(old), new)
    assert bool(emitted_for(f"head_dim 64  {text}").plan.elements[0].backward.producers) is (text == LONG)
    q, k, v, d_o = (random(1, 1, rows, 64, seed=rows) for rows in (500, 130, 131, 501))
    gradients(op, q, k, v[:, :, 1:], d_o[:, :, 1:])


# Where it is, what was planted, what the emulator may call it.
MISTAKES = {
    "alone, no barrier before the next part": (
        ALONE,
        f"{NOBODY_COPIES}// everyone is done with the places of part n + 1\n      signals()",
        "signals()",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "alone, no wait for a part": (
        ALONE,
        "\n      signals().await(parts_before + n);",
        "",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED},
    ),
    "alone, no wait for Q": (
        ALONE,
        "if constexpr (P::tensor_copies) q_signals().await(visits.noted(&Notes::ordinal));",
        "",
        {FaultKind.NOT_AWAITED},
    ),
    "alone, the next tile before everyone is done with this one": (
        ALONE,
        "notes()->next, next_work_tile);\n    Team::barrier();",
        "notes()->next, next_work_tile);",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "alone, phases of the tile before": (
        ALONE,
        "pass_parts(used, n);",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.RACE},
    ),
    "alone, bytes of K alone": (
        ALONE,
        " + (has_v ? int(VTile::bytes) : 0)",
        "",
        {FaultKind.MBARRIER},
    ),
    "served, no wait for room": (
        SERVED,
        "signals().await_room(parts_before + n);\n    if (lane_index() == 0) this->start_part(n);",
        "if (lane_index() == 0) this->start_part(n);",
        {FaultKind.MBARRIER},
    ),
    "served, released by half of the warps": (
        SERVED,
        "signals().make(false, threads + BESIDE, 1, 32);",
        "signals().make(false, threads / 2, 1, 32);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "served, no signals": (
        SERVED,
        "signals().make(false, threads + BESIDE, 1, 32);",
        ";",
        {FaultKind.MBARRIER},
    ),
    "served, no wait for Q": (
        SERVED,
        "if constexpr (P::tensor_copies) q_signals().await(visits.noted(&Notes::ordinal));",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, no wait for a list": (
        SERVED,
        "list_signals().await(list);",
        "",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, no wait for the room of a list": (
        SERVED,
        "      list_signals().await_room(n);\n      switch_to(n);\n      if constexpr (moves)",
        "      switch_to(n);\n      if constexpr (moves)",
        {FaultKind.RACE, FaultKind.MBARRIER},
    ),
    "served, boxes half a row too far": (
        SERVED,
        "copy_panel_async(to.base + panel * Tile::rows * Tile::width,",
        "copy_panel_async(to.base + 64 + panel * Tile::rows * Tile::width,",
        {FaultKind.MISALIGNED},
    ),
}


# The same for the backward pass.
BACKWARD_MISTAKES = {
    "alone, no barrier before the next tile": (
        SHORT,
        f"{NOBODY_COPIES}// everyone is done with the place of tile n + 1\n      signals()",
        "signals()",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "alone, bytes of Q alone": (
        SHORT,
        "QTile::bytes + OTile::bytes);",
        "QTile::bytes);",
        {FaultKind.MBARRIER},
    ),
    "served, no wait for a tile": (
        LONG,
        " signals().await(n);",
        "",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.RACE},
    ),
    "served, no wait for room": (
        LONG,
        " signals().await_room(n);",
        "",
        {FaultKind.MBARRIER, FaultKind.RACE},
    ),
    "served, what rows carry is not waited for": (
        LONG,
        "signals().await(n, ROWS_SHOWN);",
        "",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, arrival before what rows carry": (
        LONG,
        "Base::start_once_free(n, thread);",
        "Base::start_once_free(n, thread);\n      fg::mbarrier_arrive(Base::signals().full(n));\n      if (false)",
        {FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.MBARRIER},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    schedule, old, new, kinds = MISTAKES[name]
    with pytest.raises(EmulatorError) as caught:
        run(f"planted_{list(MISTAKES).index(name)}", schedule, old, new)
    check(caught.value, kinds)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if n % 2 else ()) for n, each in enumerate(BACKWARD_MISTAKES)],
)
def test_mistakes_in_a_backward_kernel_that_was_right(name: str) -> None:
    mask, old, new, kinds = BACKWARD_MISTAKES[name]
    with pytest.raises(EmulatorError) as caught:
        run_backward(f"planted_backward_{list(BACKWARD_MISTAKES).index(name)}", mask, old, new)
    check(caught.value, kinds)


def check(error: EmulatorError, kinds: set[FaultKind]) -> None:
    assert error.kind in kinds, str(error)
    assert error.line > 0
    assert any(
        word in str(error)
        for word in ("mbarrier", "copy_panel", "copy_tile", "product", "rows", "marks", "list", "noted", "opened")
    )


def test_without_a_mistake_it_is_right() -> None:
    for name, schedule in (("planted_alone", ALONE), ("planted_served", SERVED)):
        run(name, schedule, "struct MapsOfTangents", "struct MapsOfTangents")
    for name, mask in (("planted_backward_alone", SHORT), ("planted_backward_served", LONG)):
        run_backward(name, mask, "struct Maps", "struct Maps")
