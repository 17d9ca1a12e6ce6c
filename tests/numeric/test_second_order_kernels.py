"""The backward pass of forward mode: second derivatives by kernels, beside those of the dense formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.forward_mode import ForwardMode
from flashgen.op.op import AttentionOp
from flashgen.reference import tiled
from flashgen.reference.programs import Forward, Of, Place, Program, Reverse
from flashgen.verification.verify import second_order
from tools.fuzz.mixed_order import through_tangents

from ..op.helpers import error, op, random
from .test_forward_mode import SPECS as MOVED
from .test_forward_mode import close, problem

_LEARNED = {
    "bias": ("bias: f32[B, H, Nq, Nk]  param cap: f32", "bias: f32[B, H, Nq, Nk] grad  param cap: f32 grad"),
    "relative": ("t: f32[H, 64]", "t: f32[H, 64] grad"),
    "pointwise": ("param g: f32 = 1.0", "param g: f32 = 1.0 grad"),
    "shares": ("param g: f32 = 2.0", "param g: f32 = 2.0 grad"),
    "distance": ("param ell: f32 = 1.5", "param ell: f32 = 1.5 grad"),
    "name": (
        "tensor x: f32[H] tensor t_x: f32[H] score s * x[h] + t_x[h]",
        "tensor x: f32[H] grad tensor t_x: f32[H] grad score s * x[h] + t_x[h] * abs(s)",
    ),
}
# Those of forward mode; whatever they capture has gradients, which are not 0.
SPECS = {name: text.replace(*_LEARNED.get(name, ("", ""))) for name, text in MOVED.items()} | {
    "columns": "attention columns { head_dim 16 tensor y: f32[B, H, Nk] grad score tanh(s * y[b, h, j]) mask causal }",
    "rows": "attention rows { head_dim 16  tensor y: f32[H, Nq] grad  score y[h, i] * abs(s) - s * s / 8 mask causal }",
}
OTHERS = ("plain", "norms", "layout", "documents", "name", "dropped", "shares", "relative", "columns")
Values = Mapping[str, Tensor]
Attend = Callable[[Values], tuple[Tensor, Tensor | None]]


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran of both kernels; the tiled path is refused."""
    runs: list[str] = []
    for name in ("run", "backward"):
        own = getattr(ForwardMode, name)

        def counted(mode: Any, kernel: Any, *args: Any, _own: Any = own, _name: str = name, **others: Any) -> Any:
            runs.append(_name if "t_q" in kernel.layout.slots else "of the op")
            return _own(mode, kernel, *args, **others)

        monkeypatch.setattr(ForwardMode, name, counted)

    def refused(*_: Any) -> None:
        raise AssertionError("the tiled path ran")

    monkeypatch.setattr(tiled, "derive", refused)
    return runs


def functions(
    attend: AttentionOp, inputs: Values, others: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Attend, Attend]:
    """Of what is learned: the op, and the formula in ``dtype``; rows that keep nothing have an lse of 0."""
    has_lse = attend.spec.weights.form.normalised

    def function(call: Any) -> Attend:
        def attended(learned: Values) -> tuple[Tensor, Tensor | None]:
            values = {**others, **inputs, **learned}
            q, k, v = (values.pop(name) for name in "qkv")
            if not has_lse:
                return call(q, k, v, **values), None
            o, lse = call(q, k, v, return_lse=True, **values)
            return o, torch.where(lse == -torch.inf, 0.0, lse)

        return attended

    return function(attend), function(lambda *x, **named: attend.reference(*x, dtype=dtype, **named))


def learned_of(attend: AttentionOp, inputs: Values) -> dict[str, Tensor]:
    names = {each.name for each in attend.spec.tensors if each.grad}
    names |= {each.name for each in attend.spec.params if each.grad}
    return {name: x for name, x in inputs.items() if name in ("q", "k", "v") or name in names}


def arriving(attend: AttentionOp, inputs: Values) -> tuple[Tensor, Tensor | None]:
    q, v = inputs["q"], inputs["v"]
    d_o = random(*q.shape[:-1], v.shape[-1], seed=90, dtype=q.dtype)
    return d_o, random(*q.shape[:-1], seed=91) if attend.spec.weights.form.normalised else None


def over_reverse(function: Attend, learned: Values, moves: Values) -> Values:
    """The tangent of a gradient, to which what arrives at o and lse belongs."""

    def loss(x: Values) -> Tensor:
        o, lse = function(x)
        return o.square().sum() + (0.0 if lse is None else lse.sin().sum())

    directions = {name: moves[name] for name in learned}
    found: Values = torch.func.jvp(torch.func.grad(loss), (dict(learned),), (directions,))[1]
    return found


def check(attend: AttentionOp, given: tuple[Any, Any, Any], limit: float = 1e-4) -> tuple[Values, Values]:
    inputs, moves, others = given
    own, truth = functions(attend, inputs, others)
    learned, (d_o, d_lse) = learned_of(attend, inputs), arriving(attend, inputs)
    results = []
    for each in (own, truth):
        found = {**second_order(each, learned, d_o, d_lse), **through_tangents(each, learned, moves, d_o, d_lse)}
        results.append(found | {f"over {n}": x for n, x in over_reverse(each, learned, moves).items()})
    for name, x in results[1].items():
        close((results[0][name],), (x,), limit)
    return results[0], results[1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in OTHERS else n for n in SPECS])
def test_all_ways_to_the_second_order(name: str, by_kernel: list[str]) -> None:
    """Gradients of gradients, gradients through tangents, tangents of gradients."""
    attend = op(SPECS[name], "cpu")
    check(attend, problem(attend))
    assert by_kernel.count("backward") == 3


@pytest.mark.slow
def test_products_in_matrix_registers(by_kernel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what stands for them, a strip of query rows at a time."""
    monkeypatch.setenv("CXX", "c++ -DFLASHGEN_MATRIX_PRODUCTS=2 -DFLASHGEN_FEWEST_ROWS=1")
    attend = flashgen.loads(SPECS["relative"].replace("relative", "relative_of_matrices"), backend="cpu")
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        check(attend, problem(attend, (1, 2, 1, 100, 90), dtype), limit)
    assert by_kernel.count("backward") == 6


ONE_KEY = [
    ("cpu", "normalize2(silu(s))"),
    ("cpu", "normalize(s * s)"),
    ("cpu", "normalize2(y[h, j] * s)"),
    ("cpu", "normalize(relu(s))"),
    ("emulator", "normalize2(silu(s))"),
    ("emulator", "normalize(relu(s))"),
    ("tiled", "normalize2(silu(s))"),
    ("reference", "normalize(s * s)"),
]


@pytest.mark.parametrize(("backend", "weights"), ONE_KEY)
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_rows_that_keep_one_key(backend: str, weights: str, size: float) -> None:
    """P is 1 or -1 there, however a weight w near 0 moves: rounding may leave nothing, times (w'/w)².

    So it is in the first row of each document, in first gradients, too, and where all but one of a row's weights are 0,
    as they are by relu. Other rows keep keys whose weights are not small.
    """
    captured = "tensor doc: i32[Nq]" + ("  tensor y: f32[H, Nk] grad" if "y[" in weights else "")
    text = f"attention one {{ head_dim 16  {captured}  mask causal and doc[i] == doc[j]  weights {weights} }}"
    attend, first = op(text, backend), [0, 9, 11]
    documents = torch.tensor([0] * 9 + [1] * 2 + [2] * 30, dtype=torch.int32)
    inputs, moves, _ = problem(attend, (2, 4, 2, 41, 41))
    inputs["q"][:, :, first] *= size
    if "relu" in weights:  # of two keys one has a negative score
        before, own_key = (torch.nn.functional.normalize(inputs["k"][:, :, n], dim=-1) for n in (9, 10))
        inputs["q"][:, :, 10] = (size * (own_key - before)).repeat_interleave(2, 1)
        first.append(10)
    learned, (d_o, d_lse) = learned_of(attend, inputs), arriving(attend, inputs)
    own, truth = functions(attend, inputs, {"doc": documents})

    q = learned["q"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(own({**learned, "q": q})[0], q, d_o)
    assert not gradient[:, :, [0, 9, 11]].any()

    def of_o(function: Attend) -> Attend:
        return lambda x: (function(x)[0], None)

    found, expected = (through_tangents(of_o(each), learned, moves, d_o, None) for each in (own, truth))
    assert not found["q"][:, :, first].any()
    for name, x in expected.items():
        if not name.startswith("t("):
            close((found[name],), (x,), 2e-5)
    # lse = log |w| moves, and its derivatives are as large as 1 / w², which multiplies what scores are rounded by.
    in_float32 = functions(attend, inputs, {"doc": documents}, torch.float32)[1]
    found, expected, reached = (through_tangents(each, learned, moves, d_o, d_lse) for each in (own, truth, in_float32))
    for name, x in expected.items():
        close((found[name],), (x,), max(2e-5, 2 * error(reached[name], x)))


def test_one_key_among_the_parts_of_few_rows(by_kernel: list[str]) -> None:
    """Threads share the keys of a row, and what is counted of them is added up."""
    attend = op("attention few { head_dim 16  mask j == 4000 or i > 0  weights normalize2(silu(s)) }", "cpu")
    inputs, moves, others = problem(attend, (1, 2, 1, 3, 5000))
    inputs["q"][:, :, 0] *= 1e-4
    learned, d_o = learned_of(attend, inputs), arriving(attend, inputs)[0]
    own, formula = functions(attend, inputs, others)
    found = through_tangents(lambda x: (own(x)[0], None), learned, moves, d_o, None)
    truth = through_tangents(lambda x: (formula(x)[0], None), learned, moves, d_o, None)
    assert not found["q"][:, :, 0].any()
    close(tuple(found[name] for name in "qkv"), tuple(truth[name] for name in "qkv"))
    assert by_kernel


@pytest.mark.parametrize("target", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_rows_that_keep_one_key_in_half_precision(target: str, by_kernel: list[str]) -> None:
    """There o is rounded to 8 bits, by warpgroups that give its tangent on Hopper, and a part in 100 was left."""
    text = "attention ones { head_dim 16  mask causal  weights normalize2(silu(s)) }"
    attend = flashgen.loads(text, backend="emulator", target=target)
    given = problem(attend, (1, 2, 1, 40, 50), torch.bfloat16)
    given[0]["q"][:, :, 0] /= 128
    (d_o, _), (own, _) = arriving(attend, given[0]), functions(attend, given[0], {})
    learned = learned_of(attend, given[0])
    found = through_tangents(lambda x: (own(x)[0], None), learned, given[1], d_o, None)
    assert not found["q"][:, :, 0].any()
    check(attend, problem(attend, (1, 2, 1, 40, 50), torch.bfloat16), limit=5e-2)
    assert by_kernel.count("backward") == 4


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 4, 1, 3, 300), (1, 2, 2, 300, 37), (0, 2, 2, 5, 5)])
def test_shapes(shape: tuple[int, ...], by_kernel: list[str]) -> None:
    attend = op(SPECS["sink"], "cpu")
    check(attend, problem(attend, shape))
    assert bool(by_kernel) == (shape[0] > 0)


def test_one_captured_value_after_the_other(by_kernel: list[str]) -> None:
    """What is remembered of a pass holds which values have gradients, and not only how many."""
    attend = op(
        "attention two { head_dim 16  tensor m: f32[H] grad  tensor z: f32[H] grad  score s - m[h] * abs(i - j) "
        "weights softmax(sink = z[h])  mask causal }",
        "cpu",
    )
    q, k, v = (random(1, 2, 20, 16, seed=n) for n in range(3))
    given = {"m": random(2, seed=4), "z": random(2, seed=5)}
    for name, x in given.items():

        def of_call(call: Any, name: str = name, x: Tensor = x, **named: Any) -> Tensor:
            found: Tensor = torch.func.hessian(lambda y: call(q, k, v, **{**given, name: y}, **named).square().sum())(x)
            return found

        close((of_call(attend),), (of_call(attend.reference, dtype=torch.float64),), limit=1e-4)
    assert by_kernel


def test_half_precision(by_kernel: list[str]) -> None:
    attend = op(SPECS["sink"], "cpu")
    check(attend, problem(attend, dtype=torch.bfloat16), limit=3e-2)
    assert by_kernel


def test_scores_that_are_extreme(by_kernel: list[str]) -> None:
    attend = op(SPECS["causal"], "cpu")
    inputs, moves, others = problem(attend)
    check(attend, (inputs | {"q": inputs["q"] * 300}, moves, others), limit=2e-3)
    assert by_kernel


def test_what_is_masked_adds_nothing(by_kernel: list[str]) -> None:
    attend = op(SPECS["causal"], "cpu")
    inputs, moves, others = problem(attend, (1, 2, 1, 20, 90))
    learned, (d_o, d_lse) = learned_of(attend, inputs), arriving(attend, inputs)
    results = []
    for junk in (0.0, 50.0):
        spoilt = {name: x.clone() for name, x in moves.items()}
        values = {name: x.clone() for name, x in learned.items()}
        spoilt["k"][:, :, 30:] = values["k"][:, :, 30:] = values["v"][:, :, 30:] = junk
        own = functions(attend, values, others)[0]
        results.append(through_tangents(own, values, spoilt, d_o, d_lse))
    for name, x in results[0].items():
        y = results[1][name]
        assert torch.equal(x[:, :, :20], y[:, :, :20]), name
    assert by_kernel


def test_the_same_bits_on_any_number_of_threads(by_kernel: list[str]) -> None:
    attend = op(SPECS["bias"], "cpu")
    inputs, moves, others = problem(attend, (1, 2, 2, 150, 140))
    own, learned, (d_o, d_lse) = (
        functions(attend, inputs, others | {"deterministic": True})[0],
        learned_of(attend, inputs),
        arriving(attend, inputs),
    )
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(through_tangents(own, learned, moves, d_o, d_lse))
    torch.set_num_threads(threads)
    assert all(torch.equal(x, results[1][name]) for name, x in results[0].items())
    assert by_kernel


def test_sequences_of_a_ragged_batch(by_kernel: list[str]) -> None:
    attend = op(SPECS["sink"].replace("z: f32[H, Nq]", "z: f32[H]").replace("z[h, i]", "z[h]"), "cpu")
    q, k, v = (random(50, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
    starts, z = torch.tensor([0, 7, 7, 50], dtype=torch.int32), random(4, seed=5)

    def penalty(call: Any, **others: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, z)]
        o = call(*leaves[:3], starts, starts, z=leaves[3], **others)
        first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)

    close(penalty(attend.varlen), penalty(attend.reference.varlen, dtype=torch.float64), limit=1e-4)
    assert by_kernel.count("backward") == 2


def test_what_no_kernel_differentiates() -> None:
    """Tangents of values without a gradient, and orders above the second, go by the tiled path."""
    attend = op(MOVED["relative"], "cpu")
    inputs, moves, others = problem(attend, (1, 2, 1, 9, 9))
    t = moves["t"].clone().requires_grad_()

    def by_tangent(call: Any, **named: Any) -> Tensor:
        def moved(x: Tensor) -> Tensor:
            found: Tensor = call(*(inputs[n] for n in "qkv"), t=x, **others, **named)
            return found

        gradient: Tensor
        (gradient,) = torch.autograd.grad(torch.func.jvp(moved, (inputs["t"],), (t,))[1].sum(), t)
        return gradient

    close((by_tangent(attend),), (by_tangent(attend.reference, dtype=torch.float64),))

    def third(call: Any, **named: Any) -> Tensor:
        q = inputs["q"].clone().requires_grad_()
        value = call(q, inputs["k"], inputs["v"], t=inputs["t"], **others, **named).square().sum()
        for _ in range(2):
            (found,) = torch.autograd.grad(value, q, create_graph=True)
            value = found.square().sum()
        gradient: Tensor
        (gradient,) = torch.autograd.grad(value, q)
        return gradient

    close((third(attend),), (third(attend.reference, dtype=torch.float64),), limit=1e-4)


def test_what_runs_is_said() -> None:
    attend = op(SPECS["causal"], "cpu")
    q = random(1, 2, 20, 16, seed=1)
    said = attend.plan.derivatives[1]
    assert said.startswith(
        "derivatives of gradients and of tangents: kernels of forward mode and of its backward pass, compiled when "
        "first asked for: on CPU all that the others take; else the tiled path"
    )
    told = attend.explain(q, q, q).jvp_backward
    assert told is not None
    assert told.kernels[0].name == "causal_d16_jvp_backward"
    assert op(SPECS["causal"], "tiled").explain(q, q, q).jvp_backward is None


def test_second_order_as_gradients_of_tangents() -> None:
    """Which value is what, of programs of two steps."""
    base = Program((Place.QUERIES, Place.KEYS, Place.KEYS, Place.WHOLE), (Place.QUERIES, Place.SUMS))
    twice = base.reverse((0, 3), (1,)).reverse((4, 0), (1,)).gradient_of_tangent
    assert twice is not None
    assert (twice.moving, twice.arriving, twice.more) == ({3: 5}, {1: 4}, {})
    assert twice.outputs == ((Of.ARRIVING, 1), (Of.INPUT, 0))
    through = base.forward((2, 0)).reverse((1, 4, 5), (0, 1)).gradient_of_tangent
    assert through is not None
    assert (through.moving, through.arriving) == ({2: 4, 0: 5}, {0: 6, 1: 7})
    assert through.outputs == ((Of.INPUT, 1), (Of.TANGENT, 2), (Of.TANGENT, 0))
    over = base.reverse((1,), (0, 1)).forward((3, 5)).gradient_of_tangent
    assert over is not None
    assert (over.moving, over.arriving, over.more) == ({3: 6}, {0: 4, 1: 5}, {1: 7})
    assert over.outputs == ((Of.INPUT, 1),)
    assert base.forward((0,)).forward((0,)).gradient_of_tangent is None
    assert Program(base.inputs, base.outputs, (Reverse((0,), (0,)), Forward((0,)), Forward((0,)))).moved is None


ON_GPUS = ("sink", "pointwise", "columns")


@pytest.mark.parametrize(
    "name",
    [n if n == "sink" else pytest.param(n, marks=pytest.mark.slow) for n in SPECS if n != "distance"],
)
def test_on_gpus(name: str, by_kernel: list[str]) -> None:
    """float32 by three products, which rounds as CPUs do, and bfloat16; tangents by the backward pass."""
    attend = op(SPECS[name], "emulator")
    shape = (1, 2, 1, 40, 50)
    check(attend, problem(attend, shape))
    if name in ON_GPUS:
        check(attend, problem(attend, shape, torch.bfloat16), limit=5e-2)
    assert by_kernel.count("backward") == (6 if name in ON_GPUS else 3)


@pytest.mark.slow
def test_results_that_repeat_on_gpus(by_kernel: list[str]) -> None:
    """dQ has a kernel of its own then, and captured gradients are sums of integers."""
    attend = op(SPECS["bias"], "emulator")
    inputs, moves, others = problem(attend, (1, 2, 1, 40, 50))
    check(attend, (inputs, moves, others | {"deterministic": True}))
    assert by_kernel.count("backward") == 3


def test_what_gpus_leave_to_the_tiled_path() -> None:
    attend = op(SPECS["distance"], "emulator")
    q = random(1, 2, 20, 16, seed=1)
    told = attend.explain(q, q, q, ell=1.0)
    assert told.jvp is not None
    assert told.jvp_backward is None
    narrow = op(SPECS["causal"], "emulator")
    said = narrow.plan.derivatives[1]
    assert "on CPU bf16 and f32, head dimensions up to 128, scores without sqdist; else the tiled path" in said
    back = narrow.explain(q, q, q).jvp_backward
    assert back is not None
    assert [each.name for each in back.kernels] == [
        "causal_d16_jvp_rows_f32_clear",
        "causal_d16_jvp_backward_f32",
        "causal_d16_jvp_convert_f32",
    ]


@pytest.mark.slow
def test_what_masks_read_on_gpus(by_kernel: list[str]) -> None:
    """A kernel of its own finds ranges of it before each pass, of which forward mode's backward one has its own."""
    attend = op(SPECS["documents"], "emulator")
    check(attend, problem(attend, (1, 2, 1, 70, 70)))
    assert by_kernel.count("backward") == 3
