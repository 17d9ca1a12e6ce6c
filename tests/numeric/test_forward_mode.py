"""Kernels of forward mode: tangents of o and lse beside those of the dense formula, and what they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashgen
from flashgen.analysis.tangent import tangent_names
from flashgen.op.engine import Engine
from flashgen.op.forward_mode import ForwardMode
from flashgen.op.op import AttentionOp
from flashgen.reference import tiled

from ..op.helpers import CAUSAL, RICH, error, op, random

BIAS = "tensor bias: f32[B, H, Nq, Nk]  param cap: f32"
SPECS = {
    "causal": CAUSAL,
    "plain": "attention plain { head_dim 16 }",
    "bias": f"attention biased {{ head_dim 16 {BIAS} score cap * tanh(s / cap) + bias[b, h, i, j] mask j <= i + 40 }}",
    "alibi": "attention alibi { head_dim 16  tensor m: f32[H] grad  score s - m[h] * abs(i - j)  mask i - j < 60 }",
    "relative": "attention relative { head_dim 16 tensor t: f32[H, 64] score s + t[h, min(i - j, 63)] mask causal }",
    "sink": "attention sunk { head_dim 16  tensor z: f32[H, Nq] grad weights softmax(sink = 2 * z[h, i]) mask j < i }",
    "pointwise": "attention pointwise { head_dim 16 param g: f32 = 1.0 mask causal weights sigmoid(s * g - log(Nk)) }",
    "shares": "attention shares { head_dim 16  param g: f32 = 2.0  mask causal  weights normalize(exp(g * tanh(s))) }",
    "norms": "attention norms { head_dim 16  mask causal  weights normalize2(silu(s)) }",
    "distance": "attention distance { head_dim 16  param ell: f32 = 1.5 score -sqdist / (ell * ell) mask causal }",
    "dropped": "attention dropped { head_dim 16  tensor m: f32[H] grad score m[h] * s  dropout 0.3  mask causal }",
    "layout": "attention blocks { head_dim 16  score softcap(s, 3.0)  layout block 4: (I + J) % 2 == 0 }",
    "documents": "attention documents { head_dim 16  tensor doc: i32[B, Nk]  mask doc[b, i] == doc[b, j] }",
    "name": "attention named { head_dim 16  tensor x: f32[H] tensor t_x: f32[H] score s * x[h] + t_x[h] }",
}  # fmt: skip


REST = ((0, 0, 0, 0, None, None, None, None), False)

# Kinds that others stand for where time is short.
OTHERS = ("plain", "norms", "layout", "documents", "name")


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a kernel of forward mode ran; the tiled path is refused."""
    runs: list[int] = []
    run = ForwardMode.run

    def counted(*args: Any, **others: Any) -> Any:
        runs.append(1)
        return run(*args, **others)

    def refused(*_: Any) -> None:
        raise AssertionError("the tiled path ran")

    monkeypatch.setattr(ForwardMode, "run", counted)
    monkeypatch.setattr(tiled, "derive", refused)
    return runs


def captured(attend: AttentionOp, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    batch, heads, q_len, kv_len = shape
    extents = {"B": batch, "H": heads, "Nq": q_len, "Nk": kv_len}
    found: dict[str, Any] = {}
    for n, each in enumerate(attend.spec.tensors):
        sizes = [extents.get(getattr(extent, "name", ""), getattr(extent, "value", 0)) for extent in each.shape]
        x = random(*sizes, seed=40 + n)
        found[each.name] = (
            x if each.element.is_floating else (torch.arange(sizes[-1]) // 20).int().expand(sizes).clone()
        )
    found |= {each.name: torch.tensor(1.7) for each in attend.spec.params}
    return found | ({"seed": 5} if attend.spec.dropout is not None else {})


def both(
    attend: AttentionOp, inputs: dict[str, Tensor], tangents: dict[str, Tensor], others: dict[str, Any]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tangents of o and lse, of the op and of the formula in float64, as what has a tangent moves."""
    has_lse = attend.spec.weights.form.normalised

    def moved(call: Any) -> tuple[Tensor, ...]:
        def function(moving: dict[str, Tensor]) -> tuple[Tensor, ...]:
            values = {**others, **inputs, **moving}
            q, k, v = (values.pop(name) for name in "qkv")
            found = call(q, k, v, return_lse=has_lse, **values)
            return (found[0], torch.where(found[1] == -torch.inf, 0.0, found[1])) if has_lse else (found,)

        found: tuple[Tensor, ...] = torch.func.jvp(function, ({n: inputs[n] for n in tangents},), (tangents,))[1]
        return found

    return moved(attend), moved(lambda *args, **named: attend.reference(*args, dtype=torch.float64, **named))


def problem(attend: AttentionOp, shape: tuple[int, ...] = (2, 4, 2, 70, 90), dtype: Any = torch.float32) -> Any:
    batch, heads, kv_heads, q_len, kv_len = shape
    inputs = {
        "q": random(batch, heads, q_len, 16, seed=1, dtype=dtype),
        "k": random(batch, kv_heads, kv_len, 16, seed=2, dtype=dtype),
        "v": random(batch, kv_heads, kv_len, 16, seed=3, dtype=dtype),
    }
    more = captured(attend, (batch, heads, q_len, kv_len))
    floats = {name: x for name, x in more.items() if isinstance(x, Tensor) and x.is_floating_point()}
    tangents = {
        name: random(*x.shape, seed=60 + n, dtype=x.dtype) for n, (name, x) in enumerate((inputs | floats).items())
    }
    return inputs | floats, tangents, {name: x for name, x in more.items() if name not in floats}


def tiled_problem(attend: AttentionOp, *tensors: Tensor) -> tiled.Problem:
    """A call as what a kernel of forward mode takes."""
    engine = attend._registered.engine
    ((found, _),) = engine.problems(engine._kind_call(tensors, REST))
    return found


def close(found: tuple[Tensor, ...], truth: tuple[Tensor, ...], limit: float = 1e-5) -> None:
    for x, y in zip(found, truth, strict=True):
        assert x.isfinite().all()
        assert error(x, y) < limit


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in OTHERS else n for n in SPECS])
def test_tangents_of_all_that_moves(name: str, by_kernel: list[int]) -> None:
    attend = op(SPECS[name], "cpu")
    close(*both(attend, *problem(attend)))
    assert by_kernel


@pytest.mark.parametrize(
    "name", [n if n in ("sink", "distance") else pytest.param(n, marks=pytest.mark.slow) for n in SPECS]
)
def test_on_gpus(name: str, by_kernel: list[int]) -> None:
    """float32 by three products, which rounds as CPUs do, and bfloat16."""
    attend = op(SPECS[name], "emulator")
    close(*both(attend, *problem(attend, (1, 2, 1, 40, 50))))
    inputs, tangents, others = problem(attend, (1, 2, 1, 40, 50), torch.bfloat16)
    close(*both(attend, inputs, {n: x for n, x in tangents.items() if n != "k"}, others), limit=2e-2)
    assert len(by_kernel) == 2


def test_by_warpgroups(by_kernel: list[int]) -> None:
    attend = flashgen.loads(SPECS["sink"], backend="emulator", target="sm_90a")
    inputs, tangents, others = problem(attend, (1, 2, 1, 150, 160), torch.bfloat16)
    told = attend.explain(*(inputs[n] for n in "qkv"), z=inputs["z"]).jvp
    assert told is not None
    assert told.multiplies == "2 warpgroups"
    assert told.kernels[0].threads == 32 * (8 + 4)  # four warps copy
    for still in (["none"], ["q"], ["k"], ["v"], ["q", "k"]):
        close(*both(attend, inputs, {n: x for n, x in tangents.items() if n not in still}, others), limit=5e-3)
    assert len(by_kernel) == 5


@pytest.mark.parametrize(
    "name",
    [
        n if n == "documents" else pytest.param(n, marks=pytest.mark.slow)
        for n in ("alibi", "bias", "documents", "dropped", "layout", "pointwise", "relative", "shares")
    ],
)
def test_others_by_warpgroups(name: str, by_kernel: list[int]) -> None:
    attend = flashgen.loads(SPECS[name], backend="emulator", target="sm_90a")
    close(*both(attend, *problem(attend, (2, 4, 2, 200, 210), torch.bfloat16)), limit=5e-3)
    assert by_kernel


def test_rows_that_tensor_copies_do_not_bring(by_kernel: list[int]) -> None:
    text = "attention narrow { head_dim 20  mask causal }"
    attend = flashgen.loads(text, backend="emulator", target="sm_90a")
    q, k, v = (random(1, 2, 150, 20, seed=n, dtype=torch.bfloat16) for n in range(3))
    moves = {n: random(1, 2, 150, 20, seed=9 + ord(n), dtype=torch.bfloat16) for n in "qk"}
    close(*both(attend, dict(zip("qkv", (q, k, v), strict=True)), moves, {}), limit=5e-3)
    assert by_kernel


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_slopes_that_move_much(target: str, by_kernel: list[int]) -> None:
    """What all scores of a row change by alike is no part of what is rounded."""
    attend = flashgen.loads(SPECS["alibi"], backend="emulator", target=target)
    inputs, tangents, others = problem(attend, (1, 2, 2, 200, 200), torch.bfloat16)
    tangents["m"] = tangents["m"].abs() + 10.0
    (t_o, t_lse), (truth, of_lse) = both(attend, inputs, tangents, others)
    assert ((t_o.double() - truth).norm() / truth.norm()).item() < 4e-3
    assert error(t_lse, of_lse) < 1e-5
    assert by_kernel


def test_what_gpus_leave_to_the_tiled_path() -> None:
    for text, dtype in ((SPECS["plain"], torch.float16), ("attention wide { head_dim 192 }", torch.float32)):
        attend = op(text, "emulator")
        q, k, v = (random(1, 1, 5, attend.spec.head_dims[0].qk, seed=n, dtype=dtype) for n in range(3))
        assert attend._registered.engine._kernels_of_tangents(tiled_problem(attend, q, k, v), REST) is None
        assert attend.explain(q, k, v).jvp is None
    narrow = op(SPECS["sink"], "emulator")
    assert "on CPU bf16 and f32, head dimensions up to 128; else the tiled path" in narrow.plan.derivatives[0]
    told = narrow.explain(*(random(1, 2, 70, 16, seed=n) for n in range(3)), z=random(2, 70)).jvp
    assert told is not None
    assert (told.kernels[0].name, told.kernels[0].blocks) == ("sunk_d16_jvp_forward_f32", 4)


@pytest.mark.parametrize("name", ["bias", "distance", "sink"])
def test_any_subset_moves(name: str, by_kernel: list[int]) -> None:
    attend = op(SPECS[name], "cpu")
    inputs, tangents, others = problem(attend)
    for still in (["q"], ["k"], ["v"], ["q", "k"], ["q", "k", "v"], [n for n in tangents if n != "v"]):
        moving = {n: x for n, x in tangents.items() if n not in still}
        close(*both(attend, inputs, moving, others))
    assert len(by_kernel) == 6


def test_products_in_matrix_registers(by_kernel: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what stands for them, a strip of query rows at a time; scores that move with what is captured alone."""
    monkeypatch.setenv("CXX", "c++ -DFLASHGEN_MATRIX_PRODUCTS=2 -DFLASHGEN_FEWEST_ROWS=1")
    attend = flashgen.loads(SPECS["relative"].replace("relative", "relative_by_matrices"), backend="cpu")
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        inputs, tangents, others = problem(attend, (1, 2, 1, 100, 90), dtype)
        for moving in (tangents, {n: x for n, x in tangents.items() if n not in ("q", "k")}):
            close(*both(attend, inputs, moving, others), limit)
    assert len(by_kernel) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, by_kernel: list[int]) -> None:
    attend = op(SPECS["alibi"], "cpu")
    close(*both(attend, *problem(attend, dtype=dtype)), limit=1e-2 if dtype is torch.bfloat16 else 2e-3)
    assert by_kernel


def test_half_precision_in_matrix_registers(by_kernel: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what stands for them: weights and what they change by are not rounded to bfloat16."""
    monkeypatch.setenv("CXX", "c++ -DFLASHGEN_MATRIX_PRODUCTS=2 -DFLASHGEN_FEWEST_ROWS=1")
    attend = flashgen.loads(SPECS["alibi"].replace("alibi", "alibi_by_matrices"), backend="cpu")
    close(*both(attend, *problem(attend, dtype=torch.bfloat16)), limit=1e-2)
    assert by_kernel


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 4, 1, 1, 5000), (1, 2, 2, 300, 37), (0, 2, 2, 5, 5)])
def test_shapes(shape: tuple[int, ...], by_kernel: list[int]) -> None:
    """Few queries over many keys, whose sums are made in parts; rows that keep nothing; nothing at all."""
    attend = op(SPECS["bias"], "cpu")
    close(*both(attend, *problem(attend, shape)))
    assert bool(by_kernel) == (shape[0] > 0)


def test_a_part_of_a_larger_problem(by_kernel: list[int]) -> None:
    attend = op("attention shifted { head_dim 16  score s - 0.01 * h * (i - j) mask i - j < 50 and j <= i }", "cpu")
    inputs, tangents, others = problem(attend, (1, 2, 2, 64, 80))
    where = {"q_start": 90, "kv_start": 40, "h_start": 2, "h_total": 6}
    close(*both(attend, inputs, tangents, others | where))
    assert by_kernel


def test_sequences_of_a_ragged_batch(by_kernel: list[int]) -> None:
    attend = op(SPECS["alibi"], "cpu")
    q, k, v = (random(50, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
    starts = torch.tensor([0, 7, 7, 50], dtype=torch.int32)
    m = random(4, seed=5)

    def moved(call: Any, **others: Any) -> Any:
        attended = lambda *x: call(*x[:3], starts, starts, m=x[3], return_lse=True, **others)  # noqa: E731
        return torch.func.jvp(attended, (q, k, v, m), tuple(random(*x.shape, seed=9) for x in (q, k, v, m)))[1]

    close(moved(attend.varlen), moved(attend.reference.varlen, dtype=torch.float64))
    assert len(by_kernel) == 2


def test_selected_keys(by_kernel: list[int]) -> None:
    tensors = "tensor idx: i32[B, Nq, 3]  tensor m: f32[H] grad"
    attend = op(f"attention top {{ head_dim 16  {tensors}  select 8: idx[b, i, :]  score s * m[h] }}", "cpu")
    inputs, tangents, _ = problem(op(SPECS["alibi"], "cpu"), (2, 4, 2, 33, 64))
    idx = torch.randint(-1, 8, (2, 33, 3), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    close(*both(attend, inputs, tangents, {"idx": idx}))
    assert by_kernel


def test_scores_that_are_extreme(by_kernel: list[int]) -> None:
    attend = op(SPECS["causal"], "cpu")
    inputs, tangents, others = problem(attend)
    close(*both(attend, inputs | {"q": inputs["q"] * 300}, tangents, others), limit=1e-4)
    assert by_kernel


def test_what_is_masked_moves_nothing(by_kernel: list[int]) -> None:
    attend = op(SPECS["causal"], "cpu")
    inputs, tangents, others = problem(attend, (1, 2, 1, 20, 90))
    whole = both(attend, inputs, tangents, others)[0]
    for name in "kv":
        inputs[name], tangents[name] = inputs[name].clone(), tangents[name].clone()
    tangents["k"][:, :, 30:], inputs["k"][:, :, 40:] = torch.nan, torch.inf
    found = both(attend, inputs, tangents, others)[0]
    assert all(torch.equal(x, y) for x, y in zip(found, whole, strict=True))
    assert by_kernel


def test_o_and_lse_come_with_their_tangents() -> None:
    """One pass; the same bits on any number of threads."""
    attend = op(SPECS["alibi"], "cpu")
    inputs, tangents, _ = problem(attend, (1, 2, 2, 140, 140))
    engine = attend._registered.engine
    values = tuple(inputs[name] for name in ("q", "k", "v", "m"))
    own = tiled_problem(attend, *values)
    kernels = engine._kernels_of_tangents(own, REST)
    assert kernels is not None
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        moves = [tangents[name] for name in ("q", "k", "v", "m")]
        results.append(engine.forward_mode.run(kernels.forward, own, moves, keeps_o=True))
    torch.set_num_threads(threads)
    first, second = results
    o, lse = attend(inputs["q"], inputs["k"], inputs["v"], m=inputs["m"], return_lse=True)
    assert first.o is not None
    assert first.lse is not None
    assert second.o is not None
    close((first.o, first.lse), (o, lse), 1e-6)
    assert torch.equal(first.t_o, second.t_o)
    assert torch.equal(first.o, second.o)


@pytest.mark.parametrize("is_watched", [False, True])
def test_one_pass_gives_everything(is_watched: bool, by_kernel: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever way duals are made, whoever differentiates o besides: the forward kernel does not run."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the forward pass ran")

    monkeypatch.setattr(Engine, "attend", refused)
    attend = op(SPECS["causal"], "cpu")
    inputs, tangents, _ = problem(attend)
    q, k, v = (inputs[name].clone().requires_grad_(is_watched) for name in "qkv")
    moves = tuple(tangents[name] for name in "qkv")
    o, t_o = torch.func.jvp(attend, (q, k, v), moves)  # type: ignore[misc]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), moves, strict=True)]  # type: ignore[no-untyped-call]
        found = forward_ad.unpack_dual(attend(*duals))  # type: ignore[no-untyped-call]
    assert torch.equal(found.primal, o)
    assert torch.equal(found.tangent, t_o)
    assert len(by_kernel) == 2
    if is_watched:
        monkeypatch.undo()
        (gradient,) = torch.autograd.grad(o.square().sum(), q)
        (truth,) = torch.autograd.grad(attend.reference(q, k, v, dtype=torch.float64).square().sum(), q)
        close((gradient,), (truth,))


def test_what_runs_is_said() -> None:
    q = torch.randn(1, 2, 20, 16)
    attend = op(SPECS["causal"], "cpu")
    assert attend.plan.derivatives[0].startswith(
        "tangents: a kernel of forward mode, compiled when first asked for: on CPU all that the others take; else the"
    )
    told = attend.explain(q, q, q)
    assert told.jvp is not None
    assert "causal_d16_jvp" in str(told)
    for backend in ("tiled", "reference"):
        other = op(SPECS["causal"], backend)
        assert other.explain(q, q, q).jvp is None
        assert "by PyTorch's operators" in other.plan.derivatives[0]


def test_names_of_tangents_meet_no_other() -> None:
    assert tangent_names(op(SPECS["name"], "cpu").spec) == {"x": "t_t_x", "t_x": "t_t_t_x"}
    assert "table" in tangent_names(op(RICH, "cpu").spec)
    assert "cut" not in tangent_names(op(RICH, "cpu").spec)


def test_a_tangent_without_memory_of_its_own(by_kernel: list[int]) -> None:
    attend = op(SPECS["causal"], "cpu")
    inputs, tangents, _ = problem(attend)
    zeros = torch._efficientzerotensor(inputs["q"].shape)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(inputs[n], zeros if n == "q" else tangents[n]) for n in "qkv"]  # type: ignore[no-untyped-call]
        found = forward_ad.unpack_dual(attend(*duals)).tangent  # type: ignore[no-untyped-call]
    truth = both(attend, inputs, {n: x for n, x in tangents.items() if n != "q"}, {})[1]
    close((found,), truth[:1])
    assert by_kernel


@pytest.mark.slow
def test_a_compiled_function_moves() -> None:
    """Dynamo frees what nobody reads any more: a workspace that kernels know by its address was."""
    torch._dynamo.reset()
    op = flashgen.loads("attention compiled { head_dim 16  mask causal }")
    x = torch.randn(1, 2, 9, 16)
    compiled = torch.compile(lambda x: op(x, x, x), backend="eager")
    found, truth = (torch.func.jvp(each, (x,), (x,))[1] for each in (compiled, lambda x: op(x, x, x)))
    torch.testing.assert_close(found, truth)
