"""What pairs read of captured tensors, two at once and ahead of products, and gradients that they store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flashgen.analysis.variant import DOT
from flashgen.hosts.emulated import EmulatedKernel, emulator_provider, recording
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp, OpParts
from flashgen.plan.arguments import stored_tensors
from flashgen.targets.gpu.launches import MOST_IN_TURN
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.score import SMALL
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import emitted, variant_of
from tests.cuda.hopper import TARGET, changed, hopper
from tests.cuda.targets import each_by_kind, emulated
from tests.numeric.helpers import failures, normal
from tests.slices import one_of

BIAS = "tensor bias: bf16[B, H, Nq, Nk] grad  score s + bias[b, h, i, j]"
# Rows on whole words and not, tiles that are full and cut off, columns that lie apart, other types, and orders.
SPECS = {
    "bias": (f"head_dim 64  {BIAS}  mask causal", Shape(2, 2, 1, 140, 202)),
    "odd": (f"head_dim 64  {BIAS}  mask causal", Shape(1, 2, 2, 77, 131)),
    "shared": ("head_dim 64  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]", Shape(2, 2, 1, 80, 200)),
    "order": (
        "head_dim 32  tensor bias: f16[Nq, B, Nk, H] grad  score s + 2 * bias[i, b, j, h]  mask causal",
        Shape(2, 2, 1, 70, 140),
    ),
    "scaled": (
        "head_dim 64  tensor bias: f16[B, H, Nq, Nk] grad  score s - 3 * bias[b, h, i, j]",
        Shape(1, 2, 1, 90, 66),
    ),
    "mask": ("head_dim 64  tensor keep: bool[B, Nq, Nk]  mask keep[b, i, j]", Shape(2, 2, 1, 70, 140)),
    "capped": (
        "head_dim 64  tensor bias: bf16[B, H, Nq, Nk] grad  score softcap(s + bias[b, h, i, j], 5.0)  mask causal",
        Shape(2, 2, 1, 70, 142),
    ),
    "sigmoid": (f"head_dim 64  {BIAS}  weights sigmoid(s - 3)", Shape(1, 2, 1, 66, 134)),
    # Whole chunks, where warps copy: what pairs read comes by way of shared memory.
    "chunks": (f"head_dim 128  {BIAS}  mask causal", Shape(2, 2, 1, 150, 264)),
    "chunks_of_a_mask": ("head_dim 128  tensor keep: bool[B, Nq, Nk]  mask keep[b, i, j]", Shape(2, 2, 1, 70, 144)),
    "chunks_sigmoid": (f"head_dim 128  {BIAS}  mask causal  weights sigmoid(s - 3)", Shape(1, 2, 1, 140, 136)),
    "shared_by_three": (
        "head_dim 64  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  mask causal",
        Shape(3, 2, 1, 130, 136),
    ),
    # Batch entries take turns at a gradient: 64 keys a warpgroup, shared keys, heads of a group, sums that are scaled.
    "turns": (
        "head_dim 128  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  mask causal",
        Shape(3, 2, 1, 150, 200),
    ),
    "turns_of_shared_keys": (
        "head_dim 192  tensor bias: f16[Nk, H, Nq] grad  score s - 3 * bias[j, h, i]  mask window_left(70)",
        Shape(2, 2, 2, 150, 141),
    ),
    "turns_with_dropout": (
        "head_dim 64  tensor bias: bf16[Nq, H, Nk] grad  score s + bias[i, h, j]  dropout 0.2",
        Shape(2, 4, 2, 140, 70),
    ),
    "shared_sigmoid": (
        "head_dim 64  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  weights sigmoid(s - 3)",
        Shape(4, 1, 1, 66, 134),
    ),
    "halves": (f"head_dim 192/128  {BIAS}  mask window_left(70)", Shape(1, 2, 2, 100, 102)),
    "wide": (f"head_dim 256  {BIAS}", Shape(1, 2, 1, 70, 90)),
}


@pytest.mark.parametrize(("name", "target"), one_of(4, each_by_kind(SPECS)))
def test_gradients(name: str, target: str) -> None:
    body, shape = SPECS[name]
    op = emulated(f"attention pairs_{name}_{target} {{ dtype bf16  {body} }}", target)
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, shape)
    assert case.ok, failures(case)


@pytest.mark.parametrize(
    ("body", "ahead"),
    [
        (BIAS, "bias[b, h, i, j]"),
        ("tensor bias: f32[H, Nq, Nk]  score s + bias[h, i, j]", None),  # two of them are two registers
        ("tensor bias: bf16[Nq, Nk, H]  score s + bias[i, j, h]", None),  # neighbours lie apart
        ("tensor bias: bf16[H, Nk]  score s + bias[h, j]", None),  # one of each key
        ("tensor bias: bf16[Nk, Nk]  score s + bias[min(i, j), j]", None),
        ("tensor keep: bool[Nq, Nk]  score s * 2  mask keep[i, j]", "keep[i, j]"),
    ],
)
def test_what_is_read_ahead(body: str, ahead: str | None) -> None:
    found = decide(variant_of(f"attention read {{ head_dim 64  dtype bf16  {body} }}")).prefetch
    assert (None if found is None else text(found)) == ahead


STAGED = {"bias": "head_dim 128  tensor bias: bf16[H, Nq, Nk]  score s + bias[h, i, j]  mask causal",
          "keep": "head_dim 128  tensor keep: bool[H, Nq, Nk]  mask keep[h, i, j]"}  # fmt: skip


@pytest.mark.parametrize("columns", [256, 259])
@pytest.mark.parametrize("name", STAGED)
def test_where_rows_lie_changes_no_bit(name: str, columns: int) -> None:
    """Rows of whole chunks, such rows that end within one, rows that begin within one, columns that lie apart."""
    op = hopper(STAGED[name])
    assert all(each.elements[0].forward.pairs_staged for each in op.plan.values())
    q, k, v = (normal(2, 2, n, 128, seed=n).bfloat16() for n in (150, columns, columns))
    numbers = normal(2, 150, columns, seed=4)
    own = numbers > -0.5 if name == "keep" else numbers.bfloat16()
    wide = own.new_zeros(2, 150, 304)
    wide[..., :columns], later = own, wide.clone()
    later[..., 3 : columns + 3] = own
    apart = own.transpose(1, 2).contiguous().transpose(1, 2)
    views: list[dict[str, Any]] = [{name: x} for x in (own, wide[..., :columns], later[..., 3 : columns + 3], apart)]
    found = [op(q, k, v, **each) for each in views]
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, **views[0])
    assert (found[0].double() - exact).abs().max() < 1.5e-2
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("columns", [256, 259])
def test_where_rows_lie_changes_no_bit_of_gradients(columns: int) -> None:
    op = hopper(STAGED["bias"])
    assert all(each.elements[0].backward.pairs_staged for each in op.plan.values())
    q, k, v = (normal(2, 2, n, 128, seed=n).bfloat16().requires_grad_() for n in (150, columns, columns))
    own, d_o = normal(2, 150, columns, seed=4).bfloat16(), normal(2, 2, 150, 128, seed=5).bfloat16()
    wide = own.new_zeros(2, 150, 304)
    wide[..., :columns], later = own, wide.clone()
    later[..., 3 : columns + 3] = own
    apart = own.transpose(1, 2).contiguous().transpose(1, 2)
    views = (own, wide[..., :columns], later[..., 3 : columns + 3], apart)
    found = [torch.autograd.grad(op(q, k, v, bias=x), (k, v), d_o) for x in views]
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = op.reference(*exact, dtype=torch.float64, bias=own)
    for x, y in zip(found[0], torch.autograd.grad(o, exact[1:], d_o.double()), strict=True):
        assert (x.double() - y).norm() < 4e-3 * y.norm()


@pytest.mark.parametrize("start", [200, 203])
def test_chunks_of_a_shard(start: int) -> None:
    op = hopper(STAGED["bias"])
    q, k, v = (normal(1, 2, n, 128, seed=n).bfloat16() for n in (170, 200, 200))
    whole: dict[str, Any] = {"q_start": 301, "kv_start": start, "q_total": 600, "kv_total": 696}
    bias = normal(2, 600, 696, seed=4).bfloat16()
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, bias=bias, **whole)
    assert (op(q, k, v, bias=bias, **whole).double() - exact).abs().max() < 1.5e-2


MISTAKES = {
    "nobody waits": (r"copy_async_wait<0>\(\);\n( +warp_barrier\(\);\n +staged_pairs)", r"\1"),
    "lanes do not meet": (r"warp_barrier\(\);\n( +staged_pairs)", r"\1"),
    "copied while it is read": (r"warp_barrier\(\);  // all have read what lies there\n", ""),
    "rows behind the last one": (r"row \+ own_row\(\) < row_count && ", ""),
    "the place of another warp": (r"Memory::PAIRS \+ warp_index\(\)", "Memory::PAIRS + 1 / (1 + warp_index())"),
}


@pytest.mark.parametrize("name", one_of(2, MISTAKES))
def test_mistakes_in_staging_are_seen(name: str) -> None:
    op = changed(f"planted_pairs_{list(MISTAKES).index(name)}", STAGED["bias"], "forward", *MISTAKES[name])
    q, k, v = (normal(1, 1, n, 128, seed=n).bfloat16() for n in (130, 520, 520))
    with pytest.raises(EmulatorError):
        op(q, k, v, bias=normal(1, 130, 520, seed=4).bfloat16())


BEFORE = r"pair_signals\(\)\."
MISTAKES_BACKWARD = {
    "nobody waits": (r"fg::copy_async_wait<0>\(\);\n( +fg::mbarrier_arrive\(pair)", r"\1"),
    "read before it is there": (rf"{BEFORE}await\(n\);\n", ""),
    "copied while it is read": (rf"{BEFORE}await_room\(n\);\n", ""),
    "room before it is read": (rf"( +staged_pairs.*load.*\n)( +if .*{BEFORE}release.*\n)", r"\2\1"),
}


@pytest.mark.parametrize("name", one_of(2, MISTAKES_BACKWARD))
def test_mistakes_in_staging_backward_are_seen(name: str) -> None:
    text = STAGED["bias"].replace("[H, Nq, Nk]", "[H, Nq, Nk] grad")
    case = f"planted_pairs_backward_{list(MISTAKES_BACKWARD).index(name)}"
    op = changed(case, text, "backward", *MISTAKES_BACKWARD[name])
    q, k, v = (normal(1, 1, n, 128, seed=n).bfloat16().requires_grad_() for n in (130, 520, 520))
    with pytest.raises(EmulatorError):
        torch.autograd.grad(op(q, k, v, bias=normal(1, 130, 520, seed=4).bfloat16()).sum(), k)


@pytest.mark.parametrize(
    ("body", "is_shared"),
    [
        (BIAS, False),
        (STAGED["bias"].removeprefix("head_dim 128  "), True),
        ("tensor bias: f32[Nk, Nq]  score s + bias[j, i]", True),
        ("tensor bias: bf16[H, Nk]  score s + bias[h, j]", False),
        ("tensor keep: bool[Nq, Nk]  mask keep[i, j]", True),
        (f"{BIAS} + table[i, j]  tensor table: f16[Nq, Nk]", True),
    ],
)
def test_which_tiles_take_their_batch_entries_together(body: str, *, is_shared: bool) -> None:
    assert decide(variant_of(f"attention read {{ head_dim 64  dtype bf16  {body} }}")).batch_inside is is_shared


IN_TURN = "head_dim 128  tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]  mask causal"
MISTAKES_IN_TURN = {
    "nobody waits": (r"fg::global_await\(.*?\);", ";"),
    "nobody waits for the first one": (r"fg::min\(1, int\(number\)\)", "0"),
    "all wait for the first one alone": (r" : number;", " : fg::min(1, int(number));"),
    "for fewer warps than there are": (r"others \* P::warps", "others * (P::warps - 1)"),
    "for more than there are": (r"others \* P::warps", "others * (P::warps + 1)"),
    "nobody leaves": (r"if \(fg::lane_index\(\) == 0\) fg::global_leave\(.*?\);", ""),
    "sums of another tile": (r"tile_of_turn\(int n\) const {\n", "\\g<0>    n = 0;\n"),
    "sums of another warp": (r"own = warp_key / 16 \*", "own = warp_key / 32 *"),
}


@pytest.mark.parametrize("batch", [1, MOST_IN_TURN, MOST_IN_TURN + 1])
def test_few_batch_entries_take_turns(batch: int) -> None:
    q, k, v = (normal(batch, 1, n, 128, seed=n).bfloat16().requires_grad_() for n in (130, 200, 200))
    bias = normal(1, 130, 200, seed=4).bfloat16().requires_grad_()
    with recording() as counted:
        torch.autograd.grad(hopper(IN_TURN)(q, k, v, bias=bias).sum(), bias)
    (backward,) = [each for each in counted if each.name == "backward"]
    assert any(each.name == "turns" for each in backward.launches.buffers) is (batch <= MOST_IN_TURN)


SHARED = "tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]"
TURNED = "tensor bias: bf16[Nk, H, Nq] grad  score s + bias[j, h, i]"
# Of what nobody visits: dS is not a number where nobody stores one, on the emulator.
CLEARED = {
    "bias": (f"head_dim 128  {BIAS}  mask causal and window_left(100)", (2, 2, 1, 300, 393)),
    "odd": (f"head_dim 128  {BIAS}  mask causal and window_left(20)", (1, 2, 2, 290, 297)),
    "turns": (
        f"head_dim 128  {SHARED}  mask causal",
        (2, 2, 1, 300, 520),
    ),
    "turned": (
        f"head_dim 192  {TURNED}  mask i > j + 90",
        (2, 1, 1, 200, 264),
    ),
    "cluster": (
        f"head_dim 384  {BIAS}  mask causal",
        (1, 1, 1, 70, 200),
    ),
    "turns_of_clusters": (
        f"head_dim 320  {SHARED}  mask causal",
        (2, 1, 1, 70, 200),
    ),
    "nothing": (
        f"head_dim 64  {SHARED}  mask j < 0",
        (2, 1, 1, 140, 150),
    ),
    "parts": (
        f"head_dim 128  {SHARED}  mask j > i + 200",
        (2, 2, 2, 70, 600),
    ),
}


@pytest.mark.parametrize("name", one_of(3, CLEARED))
def test_what_nobody_visits_is_cleared(name: str) -> None:
    body, (batch, heads, kv_heads, rows, columns) = CLEARED[name]
    op = hopper(body)
    width = op.spec.head_dims[0].qk
    q, d_o = (normal(batch, heads, rows, width, seed=n).bfloat16() for n in (1, 2))
    k, v = (normal(batch, kv_heads, columns, width, seed=n).bfloat16() for n in (3, 4))
    sizes = {"B": batch, "H": heads, "Nq": rows, "Nk": columns}
    bias = normal(*(sizes[str(text(each))] for each in op.spec.tensors[0].shape), seed=5).bfloat16().requires_grad_()
    with recording() as counted:
        found = torch.autograd.grad(op(q, k, v, bias=bias), bias, d_o)[0]
    (whole,) = [set(each.launches.whole) for each in counted if each.name == "backward"]
    assert whole == {"stored_bias"}
    wide = bias.detach().double().requires_grad_()
    o = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, bias=wide)
    exact = torch.autograd.grad(o, wide, d_o.double())[0] if o.requires_grad else torch.zeros_like(wide)
    assert bool(found.isfinite().all())
    assert (found.double() - exact).norm() <= 5e-3 * exact.norm()


MISTAKES_IN_CLEARING = {
    "nobody": (r"if \(fg::ballot\(visited\) == 0\) clear_tile", "if (false) clear_tile"),
    "one tile too few": (r"tile < last; tile", "tile < last - 1; tile"),
    "a tile that is visited": (r"if \(fg::ballot\(visited\) == 0\)", "if (fg::ballot(visited) == 0 || tile == 1)"),
    "columns past the last one": (r"if \(n % BC < keys\) ", ""),
}


@pytest.mark.parametrize("name", one_of(2, MISTAKES_IN_CLEARING))
def test_what_nobody_clears_is_seen(name: str) -> None:
    case = f"planted_clearing_{list(MISTAKES_IN_CLEARING).index(name)}"
    op = changed(case, f"head_dim 128  {BIAS}  mask causal", "backward", *MISTAKES_IN_CLEARING[name])
    q, k, v = (normal(1, 1, n, 128, seed=n).bfloat16().requires_grad_() for n in (200, 300, 300))
    bias = normal(1, 1, 200, 300, seed=4).bfloat16().requires_grad_()
    try:
        found = torch.autograd.grad(op(q, k, v, bias=bias).sum(), bias)[0]
    except EmulatorError:
        return
    assert bool(found.isnan().any())


@pytest.mark.parametrize(("Br", "Bc", "warps"), one_of(2, [(64, 64, 4), (128, 64, 4), (64, 128, 8)]))
def test_pinned_tiles_stage_pairs_where_a_warp_is_left(Br: int, Bc: int, warps: int) -> None:
    """Short calls take other tiles than the planner's own, of which no warp may be left that copies pairs."""
    schedule = f"schedule {{ backward_Br = {Br}  backward_Bc = {Bc}  backward_warps = {warps} }}"
    op = hopper(f"head_dim 64  {BIAS}  mask causal  {schedule}")
    for each in op.plan.values():
        tiles = each.elements[0].backward
        assert (tiles.Br, tiles.Bc, tiles.warps) == (Br, Bc, warps)
        assert not tiles.pairs_staged or 32 * tiles.producers > tiles.Br
    q, d_o = (normal(2, 2, 140, 64, seed=n).bfloat16().requires_grad_() for n in (1, 2))
    k, v = (normal(2, 2, 200, 64, seed=n).bfloat16().requires_grad_() for n in (3, 4))
    bias = normal(2, 2, 140, 200, seed=5).bfloat16().requires_grad_()
    found = torch.autograd.grad(op(q, k, v, bias=bias), (q, k, v, bias), d_o)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    o = op.reference(*exact[:3], dtype=torch.float64, bias=exact[3])
    for x, y in zip(found, torch.autograd.grad(o, exact, d_o.double()), strict=True):
        assert (x.double() - y).norm() < 4e-3 * y.norm()


@pytest.mark.parametrize("name", one_of(3, MISTAKES_IN_TURN))
def test_mistakes_in_turns_are_seen(name: str) -> None:
    case = f"planted_turns_{list(MISTAKES_IN_TURN).index(name)}"
    op = changed(case, IN_TURN, "backward", *MISTAKES_IN_TURN[name])
    q, k, v = (normal(3, 1, n, 128, seed=n).bfloat16().requires_grad_() for n in (130, 200, 200))
    bias = normal(1, 130, 200, seed=4).bfloat16().requires_grad_()
    with pytest.raises(EmulatorError):
        torch.autograd.grad(op(q, k, v, bias=bias).sum(), bias)


@pytest.mark.parametrize(
    ("body", "takes"),
    [
        (IN_TURN, True),
        (IN_TURN.replace("s + bias", "2 * s - bias"), True),
        (IN_TURN.replace("s + bias", "s * bias"), False),  # dS is not what a pair adds
        (IN_TURN.replace("bf16[", "f32["), False),  # one to add to in any case
        (IN_TURN.replace("[H, Nq, Nk]", "[B, H, Nq, Nk]").replace("bias[", "bias[b, "), False),
        (IN_TURN.replace("[H, Nq, Nk]", "[Nq, Nk]").replace("bias[h, ", "bias["), False),
        (IN_TURN.replace("causal", "doc[b, j]  tensor doc: bool[B, Nk]"), False),  # tiles of some batch entries
        (
            f"{IN_TURN}  tensor more: bf16[H, Nk, Nq] grad".replace("bias[h, i, j]", "bias[h, i, j] + more[h, j, i]"),
            False,
        ),
    ],
)
def test_which_gradients_batch_entries_take_turns_at(body: str, *, takes: bool) -> None:
    variant = variant_of(f"attention turns {{ dtype bf16  {body} }}")
    plan = GPUS["sm_90a"].plan(variant)
    assert (plan.recipe.in_turn is not None) is takes
    assert plan.by_element[ElementType.BF16].backward.takes_turns(plan.recipe) is takes
    assert not any(each.backward.takes_turns(plan.recipe) for each in GPUS["sm_80"].plan(variant).elements)


def emulated_op(spec: AttentionSpec, kernel: EmulatedKernel) -> AttentionOp:
    return AttentionOp(OpParts(spec, {"cpu": lambda *_: kernel}, backend="emulator"))


def test_a_divided_call_adds_up() -> None:
    """Of a part the last one knows nothing of the others."""
    op = hopper(IN_TURN)
    q, k, v = (normal(4, 1, n, 128, seed=n).bfloat16().requires_grad_() for n in (70, 66, 66))
    bias, d_o = normal(1, 70, 66, seed=4).bfloat16().requires_grad_(), normal(4, 1, 70, 128, seed=5).bfloat16()
    whole = torch.autograd.grad(op(q, k, v, bias=bias), bias, d_o)[0]
    kernel: Any = emulator_provider(op.spec, TARGET)(op.spec.head_dims[0], 0)
    divided = emulated_op(replace(op.spec, name="divided_turns"), replace(kernel, most=2 * 70 * 128))
    assert (torch.autograd.grad(divided(q, k, v, bias=bias), bias, d_o)[0] - whole).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (BIAS, ["bias"]),
        ("tensor bias: f16[Nk, B, Nq, H] grad  score s + bias[j, b, i, h]", ["bias"]),
        (BIAS.replace(" grad", ""), []),
        ("tensor bias: f32[B, H, Nq, Nk] grad  score s + bias[b, h, i, j]", []),  # sums are float32 already
        ("tensor bias: bf16[H, Nq, Nk] grad  score s + bias[h, i, j]", []),  # batch entries share elements
        ("tensor bias: bf16[B, H, Nk, Nk] grad  score s + bias[b, h, i, j]  mask i < Nk", []),
        ("tensor bias: bf16[B, H, Nq, Nk] grad  score s + bias[b, h, i, j] + bias[b, h, i, 0]", []),
    ],
)
def test_what_pairs_store(body: str, stored: list[str]) -> None:
    source = f"attention kept {{ head_dim 64  dtype bf16  {body} }}"
    assert [each.name for each in stored_tensors(variant_of(source).spec)] == stored
    in_turn, code = decide(variant_of(source)).in_turn is not None, emitted(source, "sm_90a").text
    assert ("stores_pairs = true" in code) == (bool(stored) or in_turn)
    assert ("takes_turns = 1" in code) == in_turn


def test_a_gradient_that_repeats_is_the_stored_one_but_for_rounding() -> None:
    op = hopper(f"head_dim 64  {BIAS}  mask causal")
    shapes = (1, 2, 90, 64), (1, 2, 90, 64), (1, 2, 90, 64), (1, 2, 90, 90)
    found = []
    for repeats in (False, True):
        q, k, v, bias = (normal(*shape, seed=n).bfloat16().requires_grad_() for n, shape in enumerate(shapes))
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(repeats)
        try:
            o = op(q, k, v, bias=bias)
            found.append(torch.autograd.grad(o, bias, normal(*o.shape, seed=9).bfloat16())[0])
        finally:
            torch.use_deterministic_algorithms(before)
    stored, summed = found
    assert stored.dtype is summed.dtype is torch.bfloat16
    assert (stored.float() - summed.float()).norm() < 4e-3 * summed.float().norm()
    assert not stored.triu(1).any()


def _value(expr: Expr, dot: NDArray[np.float32]) -> NDArray[np.float32]:
    match expr:
        case Literal(value=value):
            return np.float32(value) * np.ones_like(dot)
        case Apply(op=op, args=args):
            first, second = (_value(each, dot) for each in args)
            return first * second if op == "mul" else first + second
    assert expr == DOT
    return dot


@pytest.mark.parametrize("cap", [2.0, 30.0, 50.0, -7.0])
def test_scores_near_0_are_right(cap: float) -> None:
    variant = variant_of(f"attention near {{ head_dim 64  score {cap} * tanh(s / {cap}) }}")
    small = decide(variant).score.small_tanh
    assert small is not None
    assert isinstance(small.bound, Literal)
    assert small.bound.value == pytest.approx(SMALL * abs(cap) * 8)  # of products, of which scores are an eighth
    dot = np.linspace(-small.bound.value, small.bound.value, 1_000_001).astype(np.float32)
    exact = cap * np.tanh(dot.astype(np.float64) / 8 / cap)
    assert np.abs(_value(small.score, dot) - exact).max() < 3.2e-7 * abs(cap)


def test_tiles_with_few_large_scores() -> None:
    """Of some warps all scores are near 0, of others none are or one is."""
    op = hopper("head_dim 64  score softcap(s, 5.0)  mask causal")
    q, k, v = (normal(1, 2, 150, 64, seed=seed) for seed in range(3))
    q[:, :, :70] /= 10
    q[:, :, 100] *= 30
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64)
    assert (op(q, k, v).double() - exact).abs().max() < 1.5e-2
