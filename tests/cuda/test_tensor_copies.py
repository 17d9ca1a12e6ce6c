"""K and V, or Q and dO, by tensor copies in kernels for Hopper, on the emulator: strides, windows, planted mistakes."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.backends import emulator_provider, launches_of
from flashgen.emit.cuda import cuda_symbol
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.types import ElementType
from flashgen.plan.cuda_devices import TARGETS
from flashgen.plan.cuda_launches import forward_launches
from flashgen.plan.cuda_lists import cuda_fields
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.runtime.emulated import EmulatedKernel
from flashgen.runtime.emulator import EmulatorError, FaultKind, compile_program
from flashgen.runtime.kernel import ArgumentLayout
from flashgen.runtime.lists import Shelf
from flashgen.runtime.op import AttentionOp, OpParts
from flashgen.runtime.schedule import Compiled
from flashgen.targets import source_for
from tests.cuda.helpers import launched, planned

TARGET = TARGETS["sm_90a"]
# Blocks that copy for themselves, and blocks with warps that copy for the others.
ALONE = "schedule { Br = 64  Bc = 64  warps = 4 }"
SERVED = "schedule { Br = 128  Bc = 64  warps = 8 }"
ALL = "i - j < 70000"  # every pair of few queries: masks that relate no queries to keys have other blocks
# Masks under which the backward pass is of these two kinds.
SHORT, LONG = "mask causal and window_left(120)", "mask causal"


@functools.cache
def hopper(text: str) -> AttentionOp:
    """An op on the emulator, with the kernels of Hopper's own target."""
    spec = flashgen.loads(f"attention copied {{ dtype bf16  {text} }}", backend="reference").spec
    return AttentionOp(OpParts(spec, {"cpu": emulator_provider(spec, TARGET)}, backend="emulator"))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_who_takes_tensor_copies() -> None:
    for text, expected in (
        ("head_dim 64  mask causal", True),
        ("head_dim 40/24  mask causal", True),
        ("head_dim 36  mask causal", False),  # rows that are no multiples of 16 bytes
        ("head_dim 64/36  mask causal", False),
        ("head_dim 64  score -sqdist", False),  # norms of K want everyone at once
    ):
        variant, plan = planned(f"attention a {{ {text} }}", "sm_90a")
        tiles = plan.by_element[ElementType.F16].forward
        assert tiles.tensor_copies is expected
        assert plan.by_element[ElementType.F16].backward.tensor_copies is expected
        *_, launch = forward_launches("a", variant, plan, ElementType.F16, dropped=False).launches
        assert [box.tensor for box in launch.boxes] == (["q", "k", "v"] if expected else [])
        launches = launched(variant, plan)
        for name in ("keys_f16",) if variant.uses_sqdist else ("backward_f16", "keys_f16"):
            boxes = launches[f"{cuda_symbol(variant)}_{name}"].boxes
            assert [box.tensor for box in boxes] == (["q", "d_o"] if expected else [])
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


@pytest.mark.parametrize(
    ("name", "mask"), [*((name, SHORT) for name in QUERIES), ("expanded", LONG), ("one number", LONG)]
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


@functools.cache
def emitted_for(text: str) -> tuple[CudaPlan, KernelSource]:
    spec = flashgen.loads(f"attention planted {{ dtype bf16  {text} }}", backend="reference").spec
    return source_for(analyse(spec, spec.head_dims[0]), TARGET, ElementType.BF16)


def changed(name: str, text: str, pass_name: str, old: str, new: str, *, count: int = 1) -> AttentionOp:
    """An op whose source is that of a spec but for one pass, where a pattern occurs ``count`` times.

    With another forward pass it has no backward one.
    """
    spec = flashgen.loads(f"attention planted {{ dtype bf16  {text} }}", backend="reference").spec
    variant = analyse(spec, spec.head_dims[0])
    plan, source = emitted_for(text)
    forward, mark, backward = source.text.partition("// ---- Backward")
    part, found = re.subn(old, new, forward if pass_name == "forward" else backward)
    assert mark
    assert found == count
    program = compile_program(part if pass_name == "forward" else forward + mark + part, name=source.name)
    compiled = Compiled(program, launches_of(variant, plan, source.symbol, ElementType.BF16))
    kernel = EmulatedKernel(ArgumentLayout(cuda_fields(variant)), variant.head_dim, lambda _: compiled)
    # An op is known by what it computes, so that each of these has to be called by another name.
    return AttentionOp(OpParts(replace(spec, name=name), {"cpu": lambda *_: kernel}, backend="emulator"))


# In loops over the windows of a list, how many tiles one has.
WINDOWS = r"(window \+=? |first\(\) \+ )WINDOW"


@pytest.mark.parametrize("mask", [SHORT, LONG])
def test_windows_of_two_tiles_backward(mask: str) -> None:
    """Query heads that share keys, too, begin with fresh signals."""
    text = f"head_dim 16  {mask}  schedule {{ backward_Br = 64 }}"

    op = changed(f"windows_{mask == SHORT}", text, "backward", WINDOWS, r"\g<1>2", count=5)
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
        count=5,
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
    assert bool(emitted_for(text)[0].elements[0].forward.loaders) is (SERVED in text)
    op(random(1, 1, 900, 64, seed=0), random(1, 1, 300, 64, seed=1), random(1, 1, 300, 64, seed=2))


def run_backward(name: str, text: str, old: str, new: str) -> None:
    """The same for the backward pass."""
    op = changed(name, f"head_dim 64  {text}", "backward", re.escape(old), new)
    assert bool(emitted_for(f"head_dim 64  {text}")[0].elements[0].backward.loaders) is (text == LONG)
    q, k, v, d_o = (random(1, 1, rows, 64, seed=rows) for rows in (500, 130, 131, 501))
    gradients(op, q, k, v[:, :, 1:], d_o[:, :, 1:])


# Where it is, what was planted, what the emulator may call it.
MISTAKES = {
    "alone, no barrier before the next part": (
        ALONE,
        "if constexpr (!served) Team::barrier();  // everyone is done with the places of part n + 1\n      signals()",
        "signals()",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "alone, no wait for a part": (
        ALONE,
        "signals().await(parts_before + n);",
        "",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED},
    ),
    "alone, no wait for Q": (
        ALONE,
        "if constexpr (P::tensor_copies) q_signals().await(visits.offset(TURN));",
        "",
        {FaultKind.NOT_AWAITED},
    ),
    "alone, the next tile before everyone is done with this one": (
        ALONE,
        "offsets[NEXT], next_number);\n    Team::barrier();",
        "offsets[NEXT], next_number);",
        {FaultKind.UNINITIALIZED, FaultKind.RACE},
    ),
    "alone, old signals": (
        ALONE,
        "if (threadIdx.x == 0) signals().make(turn > 0 || !another, threads, 1);",
        "if (threadIdx.x == 0 && turn == 0) signals().make(false, threads, 1);",
        {FaultKind.NOT_AWAITED},
    ),
    "alone, bytes of K alone": (
        ALONE,
        " + (has_v ? int(VTile::bytes) : 0)",
        "",
        {FaultKind.MBARRIER},
    ),
    "served, no wait for room": (
        SERVED,
        "signals().await_room(parts_before + n);",
        "",
        {FaultKind.MBARRIER},
    ),
    "served, released by half of the warps": (
        SERVED,
        "      signals().make(false, threads, 1, 32);",
        "      signals().make(false, threads / 2, 1, 32);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "served, no signals": (
        SERVED,
        "      signals().make(false, threads, 1, 32);",
        "",
        {FaultKind.MBARRIER},
    ),
    "served, no wait for Q": (
        SERVED,
        "if constexpr (P::tensor_copies) q_signals().await(visits.offset(TURN));",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, no wait for the room of Q": (
        SERVED,
        "q_signals().await_room(turn);",
        "",
        {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "served, Q released before its products are done": (
        SERVED,
        "    Weights p;\n",
        "    Weights p;\n    release_q();\n",
        {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "served, no wait for a list": (
        SERVED,
        "list_signals().await(list);",
        "",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "served, no wait for the room of a list": (
        SERVED,
        "      list_signals().await_room(n);\n      turn_to(n);\n      if (turn > 0)",
        "      turn_to(n);\n      if (turn > 0)",
        {FaultKind.RACE, FaultKind.MBARRIER},
    ),
    "served, a list that is given back before it is read": (
        SERVED,
        "      const bool done = ends();\n      list_signals().release(list);",
        "      list_signals().release(list);\n      const bool done = ends();",
        {FaultKind.RACE},
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
        "if constexpr (!served) Team::barrier();  // everyone is done with the place of tile n + 1\n      signals()",
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
        "signals().await(n);",
        "",
        {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED, FaultKind.RACE},
    ),
    "served, no wait for room": (
        LONG,
        "signals().await_room(n);",
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
        "if (thread == 0) start_tile(n);",
        "if (thread == 0) start_tile(n);\n        fg::mbarrier_arrive(signals().full(n));\n        if (false)",
        {FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.MBARRIER},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    schedule, old, new, kinds = MISTAKES[name]
    with pytest.raises(EmulatorError) as caught:
        run(f"planted_{list(MISTAKES).index(name)}", schedule, old, new)
    check(caught.value, kinds)


@pytest.mark.parametrize("name", BACKWARD_MISTAKES)
def test_mistakes_in_a_backward_kernel_that_was_right(name: str) -> None:
    mask, old, new, kinds = BACKWARD_MISTAKES[name]
    with pytest.raises(EmulatorError) as caught:
        run_backward(f"planted_backward_{list(BACKWARD_MISTAKES).index(name)}", mask, old, new)
    check(caught.value, kinds)


# From tile to tile: blocks of one warpgroup whose lists come while they work on another query tile.
BLOCKS = "layout block 64: I == J or hash(I, J, 3) % 4 == 0"
PASSING: dict[str, tuple[str, tuple[int, ...]]] = {  # batch, heads, heads of keys, queries, keys
    "blocks": (BLOCKS, (1, 6, 3, 500, 640)),
    "few visits, or none": ("layout block 64: hash(I, J, 5) % 7 == 0", (2, 4, 2, 700, 640)),
    "partial and full tiles": ("mask hash(i // 100, j // 130, 7) % 3 == 0 and i % 97 != 5", (1, 4, 4, 600, 700)),
    "documents": ("tensor doc: i32[B, Nk]  mask causal and same_document(doc)", (2, 4, 2, 600, 600)),
    "a head's bias": (f"tensor tau: f32[H]  score s * tau[h]  {BLOCKS}", (1, 6, 3, 500, 640)),
    "distance": (f"tensor slope: f32[H]  score s - slope[h] * (i - j)  {BLOCKS}", (1, 6, 3, 500, 640)),
    "sink": (f"tensor sink: f32[H]  weights softmax(sink = sink[h])  {BLOCKS}", (1, 6, 3, 500, 640)),
    "normalize": (f"weights normalize(relu(s) ** 2 + 0.01)  {BLOCKS}", (1, 6, 3, 500, 640)),
    "pointwise": (f"weights relu(s) / Nk  {BLOCKS}", (1, 6, 3, 500, 640)),
    "dropout": (f"dropout 0.2  {BLOCKS}", (1, 6, 3, 500, 640)),
}


@functools.cache
def passing(name: str, head_dim: str = "64", dtype: str = "bf16") -> AttentionOp:
    """An op on the emulator, with the kernels of Hopper's own target."""
    text = f"attention passing {{ dtype {dtype}  head_dim {head_dim}  {PASSING[name][0]} }}"
    spec = flashgen.loads(text, backend="reference").spec
    return AttentionOp(OpParts(spec, {"cpu": emulator_provider(spec, TARGET)}, backend="emulator"))


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [*((name, "64", "bf16") for name in PASSING), ("blocks", "64/32", "bf16"), ("normalize", "128", "f16")],
)
def test_from_tile_to_tile(name: str, head_dim: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's first products beside the last ones of another; bit by bit what comes of tiles one after another."""
    op, (batch, heads, kv_heads, q_len, kv_len) = passing(name, head_dim, dtype), PASSING[name][1]
    width, v_width = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    element = torch.float16 if dtype == "f16" else torch.bfloat16
    q = random(batch, heads, q_len, width, seed=0).to(element)
    k = random(batch, kv_heads, kv_len, width, seed=1).to(element)
    v = random(batch, kv_heads, kv_len, v_width, seed=2).to(element)
    of_heads = torch.linspace(-0.3, 1.2, heads)
    documents = torch.arange(batch * kv_len).reshape(batch, kv_len) // 150 % 4
    known = {"doc": documents.int(), "tau": of_heads, "slope": of_heads, "sink": of_heads}
    arguments: dict[str, Any] = {each: known[each] for each in known if f"tensor {each}" in PASSING[name][0]}
    arguments |= {"seed": 3} if name == "dropout" else {}

    def outputs() -> tuple[Tensor, ...]:
        return (op(q, k, v, **arguments),) if name == "pointwise" else op(q, k, v, **arguments, return_lse=True)

    own = outputs()
    exact = op.reference(q, k, v, **arguments, dtype=torch.float64)
    assert (own[0].double() - exact).abs().max() < 0.02
    monkeypatch.setattr(Shelf, "find", lambda *_: None)
    assert all(torch.equal(x, y) for x, y in zip(own, outputs(), strict=True))


def test_tiles_of_several_windows_do_not_pass_on() -> None:
    text = "attention windows { dtype bf16  head_dim 16  mask hash(i // 64, j // 64, 3) % 150 == 0 }"
    spec = flashgen.loads(text, backend="reference").spec
    op = AttentionOp(OpParts(spec, {"cpu": emulator_provider(spec, TARGET)}, backend="emulator"))
    q, k, v = random(1, 1, 640, 16, seed=0), random(1, 1, 66000, 16, seed=1), random(1, 1, 66000, 16, seed=2)
    exact = op.reference(q, k, v, dtype=torch.float32)
    assert (op(q, k, v) - exact).abs().max() < 0.02


# What was planted, what the emulator may call it.
PASSING_MISTAKES = {
    "Q of the next tile into the place of this one": (
        "copy_q(q_tile(1 - q_place),",
        "copy_q(q_tile(q_place),",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "bytes of Q are not counted": (
        "fg::mbarrier_expect(there, QTile::bytes + KTile::bytes);",
        "fg::mbarrier_expect(there, KTile::bytes);",
        {FaultKind.MBARRIER},
    ),
    "the next tile before its list is there": (
        "    fg::copy_async_wait<0>();  // what this thread reads of it\n",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "no wait for Q of the next tile": (
        "    q_signals().await(turn);\n",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "K of the next tile into a place that is not free": (
        "if (n + 1 == visits.count() && knows_next()) begin_next(n + 1);",
        "if (n + 1 == visits.count() && knows_next()) begin_next(n);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "the next list before everyone sees it": (
        "counts + uint32_t(number) * 0x10001u);\n  Team::barrier();",
        "counts + uint32_t(number) * 0x10001u);",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "a list that only its copiers have waited for": (
        "    fg::copy_async_wait<0>();\n    await_part(n);",
        "    await_part(n);",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "the place of this tile is read when it is the next one's": (
        "    write(before, factors);\n    clear_by_moves",
        "    write(this->place(), factors);\n    clear_by_moves",
        set[FaultKind](),
    ),
    "no wait for the last product": (
        "    fg::wait_products<0>(o, p);\n    write(before, factors);",
        "    write(before, factors);",
        {FaultKind.NOT_AWAITED},
    ),
    "stages that begin anew": (
        "n = int(unsigned(n) % NUMBERS);",
        "n = 0;",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
    "phases that begin anew": (
        "n = int(unsigned(n) % NUMBERS);",
        "n = int(unsigned(n) % stages);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
}


def pass_on(name: str, old: str, new: str) -> tuple[Tensor, Tensor]:
    """What is found over blocks with one change in the source, and what is right."""
    text, (batch, heads, kv_heads, q_len, kv_len) = PASSING["blocks"]
    op = changed(name, f"head_dim 64  {text}", "forward", re.escape(old), new)
    q = random(batch, heads, q_len, 64, seed=0)
    k, v = (random(batch, kv_heads, kv_len, 64, seed=seed) for seed in (1, 2))
    return op(q, k, v), op.reference(q, k, v, dtype=torch.float64)


@pytest.mark.parametrize("name", PASSING_MISTAKES)
def test_mistakes_from_tile_to_tile(name: str) -> None:
    old, new, kinds = PASSING_MISTAKES[name]
    planted = f"planted_passing_{list(PASSING_MISTAKES).index(name)}"
    if kinds:
        with pytest.raises(EmulatorError) as caught:
            pass_on(planted, old, new)
        assert caught.value.kind in kinds, str(caught.value)
    else:
        found, exact = pass_on(planted, old, new)
        assert not (found.double() - exact).abs().max() < 0.02


def check(error: EmulatorError, kinds: set[FaultKind]) -> None:
    assert error.kind in kinds, str(error)
    assert error.line > 0
    assert any(word in str(error) for word in ("mbarrier", "copy_panel", "copy_tile", "product", "rows", "list"))


def test_without_a_mistake_it_is_right() -> None:
    for name, schedule in (("planted_alone", ALONE), ("planted_served", SERVED)):
        run(name, schedule, "struct ForwardMaps", "struct ForwardMaps")
    for name, mask in (("planted_backward_alone", SHORT), ("planted_backward_served", LONG)):
        run_backward(name, mask, "template <class T> struct Rows", "template <class T> struct Rows")
