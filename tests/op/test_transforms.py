"""Derivatives of every order and mode, in whatever way they are asked for, beside those of the dense formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.op.helpers import CAUSAL, RICH, SIGMOID, close, of_rich, op, qkv, random

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]
# Where derivatives go wrong: at what is masked, at kinks, at rows of their own, in what has no lse.
SPECS = {
    "causal": CAUSAL,
    "rich": RICH,
    "pointwise": SIGMOID,
    "masked log": "attention logs { head_dim 16  tensor slope: f32[H] grad score s - slope[h] * log(i - j) mask j<i }",
    "pruned": "attention pruned { head_dim 16  score where(s > 0.1, s * s, -inf)  mask causal }",
    "kinks": "attention kinks { head_dim 16  score max(abs(s), 0.5) + relu(s - 0.2) + min(s, 0.1) * s }",
    "sink": "attention sink { head_dim 16  tensor z: f32[H] grad weights softmax(sink = z[h] * z[0]) mask j <= i - 1 }",
    "shares": "attention shares { head_dim 16  mask causal  weights normalize(softplus(s)) }",
    "norms": "attention norms { head_dim 16  mask causal  weights normalize2(silu(s)) }",
    "distance": "attention distance { head_dim 16  param ell: f32 = 1.5 grad score -sqdist / (ell * ell) mask causal }",
    "layout": "attention blocks { head_dim 16  score softcap(s, 3.0)  layout block 4: (I + J) % 2 == 0 }",
}  # fmt: skip


def dual(x: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(x, random(*x.shape, seed=77, dtype=x.dtype))  # type: ignore[no-untyped-call]
    return made


def given(name: str, n: int = 9) -> dict[str, Any]:
    """What a spec of ``SPECS`` captures, floats ready to be differentiated by."""
    if name == "rich":
        return of_rich(n)
    named = {"masked log": {"slope": random(4, seed=5)}, "sink": {"z": random(4, seed=5)}}
    return named.get(name, {"ell": torch.tensor(1.5)} if name == "distance" else {})


class Both:
    """An op and its dense formula in float64, as functions of everything that has a gradient."""

    def __init__(self, name: str, backend: str, n: int = 9, dtype: torch.dtype = torch.float32) -> None:
        self.op = op(SPECS[name], backend)
        arguments = given(name, n)
        spec = self.op.spec
        self.learned = [*(x.name for x in spec.tensors if x.grad), *(x.name for x in spec.params if x.grad)]
        self.others = {key: x for key, x in arguments.items() if key not in self.learned}
        inputs = [x.detach() for x in qkv(n, dtype=dtype)]
        self.inputs = (*inputs, *(arguments[key] for key in self.learned))
        self.tangents = tuple(random(*x.shape, seed=50 + k, dtype=x.dtype) for k, x in enumerate(self.inputs))
        self.has_lse = self.op.spec.weights.form.normalised

    def run(self, call: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *more = inputs
        named = {**self.others, **dict(zip(self.learned, more, strict=True))}
        if not self.has_lse:
            return (call(q, k, v, **named),)
        o, lse = call(q, k, v, return_lse=True, **named)
        return o, torch.where(lse == -torch.inf, 0.0, lse)

    def own(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.run(self.op, *inputs)

    def exact(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.run(self.op.reference, *inputs)


def number(outputs: tuple[Tensor, ...]) -> Tensor:
    """One number that depends on all results, and not linearly."""
    return sum(
        (x.double().square().sum() + x.double().sin().sum() for x in outputs), torch.zeros((), dtype=torch.float64)
    )


def gradients(f: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.func.grad(lambda *x: number(f(*x)), argnums=tuple(range(len(inputs))))(*inputs)
    return found


Change = Callable[[Callable[..., Any], Both], Any]
CHANGES: dict[str, Change] = {
    "jvp": lambda f, both: torch.func.jvp(f, both.inputs, both.tangents),
    "forward over reverse": lambda f, both: torch.func.jvp(lambda *x: gradients(f, x), both.inputs, both.tangents)[1],
    "reverse over forward": lambda f, both: gradients(
        lambda *x: torch.func.jvp(f, x, both.tangents)[1], both.inputs
    ),
    "reverse over reverse": lambda f, both: gradients(lambda *x: gradients(f, x), both.inputs),
    "vjp of jvp by tangents": lambda f, both: gradients(
        lambda *t: torch.func.jvp(f, both.inputs, t)[1], both.tangents
    ),
}  # fmt: skip


def eager(change: str, f: Callable[..., Any], both: Both) -> Any:
    """The same by PyTorch's autograd alone, whose hooks hold at every order: what the dense formula is asked by."""
    leaves = tuple(x.clone().requires_grad_() for x in both.inputs)
    moves = tuple(x.clone().requires_grad_() for x in both.tangents)
    if change == "reverse over reverse":
        first = torch.autograd.grad(number(f(*leaves)), leaves, create_graph=True)
        return torch.autograd.grad(number(first), leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, moves, strict=True)]  # type: ignore[no-untyped-call]
        outputs = f(*duals)
        if change == "forward over reverse":
            outputs = torch.autograd.grad(number(outputs), duals)
        found = [forward_ad.unpack_dual(x) for x in outputs]  # type: ignore[no-untyped-call]
        tangents = tuple(x.tangent for x in found)
    if change == "jvp":
        return tuple(x.primal for x in found), tangents
    if change == "forward over reverse":
        return tangents
    return torch.autograd.grad(number(tangents), leaves if change == "reverse over forward" else moves)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SPECS)
def test_derivatives(name: str, change: str) -> None:
    """By torch.func and by autograd, beside those of the formula."""
    both = Both(name, "tiled")
    truth = eager(change, both.exact, both)
    for found in (CHANGES[change](both.own, both), eager(change, both.own, both)):
        for x, y in zip(found, truth, strict=True):
            close(x, y)


@pytest.mark.parametrize("change", CHANGES)
def test_derivatives_beside_kernels(change: str) -> None:
    """First passes are the kernels', everything else is not."""
    both = Both("rich", "cpu", 37)
    found, truth = CHANGES[change](both.own, both), eager(change, both.exact, both)
    for x, y in zip(found, truth, strict=True):
        close(x, y)


def third_order(f: Callable[..., Any], both: Both) -> Any:
    return torch.func.jvp(
        lambda *x: torch.func.jvp(lambda *y: gradients(f, y), x, both.tangents)[1], both.inputs, both.tangents
    )[1]


def test_third_order(backend: str) -> None:
    both = Both("causal", backend)
    close(third_order(both.own, both), third_order(both.exact, both))
    leaves = [x.clone().requires_grad_() for x in both.inputs]
    found: list[Tensor] = []
    truth: list[Tensor] = []
    for f, results in ((both.own, found), (both.exact, truth)):
        gradient: Any = number(f(*leaves))
        for _ in range(3):
            each = torch.autograd.grad(gradient, leaves, create_graph=True)
            gradient = number(each)
            results += [x.detach() for x in each]
    close(found, truth)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_dual_queries_keys_and_values(backend: str, position: int, requires_grad: bool) -> None:
    inputs = [x.detach().requires_grad_(requires_grad) for x in qkv(9)]
    causal = op(CAUSAL, backend)
    run = getattr(torch.ops.flashgen, causal.name.partition("::")[2])
    with forward_ad.dual_level():
        causal(*inputs)  # no input has a tangent
        inputs[position] = dual(inputs[position])
        exact = forward_ad.unpack_dual(causal.reference(*inputs)).tangent  # type: ignore[no-untyped-call]
        for call in (
            lambda: causal(*inputs),
            lambda: causal(*inputs, return_lse=True)[0],
            lambda: run(*inputs, 0, 0, 0, 0, None, None, None, None, False)[0],
        ):
            close(forward_ad.unpack_dual(call()).tangent, exact)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                close(forward_ad.unpack_dual(call()).tangent, exact)  # type: ignore[no-untyped-call]
    causal(*(x.detach() for x in qkv(9)))


@pytest.mark.parametrize("name", ["slope", "table", "ell", "bias"])
def test_dual_captured_values(name: str) -> None:
    """By every way to a tangent, also of ``bias``, which the spec gives no gradient."""
    inputs, arguments = [x.detach() for x in qkv(9)], given("rich")
    value = arguments[name]

    def run(call: Callable[..., Any], x: Tensor) -> Tensor:
        return torch.cat([each.flatten() for each in call(*inputs, return_lse=True, **{**arguments, name: x})])

    rich, tangent = op(RICH, "tiled"), random(*value.shape, seed=3, dtype=value.dtype)
    truth = torch.func.jvp(lambda x: run(rich.reference, x), (value,), (tangent,))[1]
    close(torch.func.jvp(lambda x: run(rich, x), (value,), (tangent,))[1], truth)
    close(torch.func.jacfwd(lambda x: run(rich, x))(value), torch.func.jacfwd(lambda x: run(rich.reference, x))(value))
    values = torch.stack([value, value / 2])
    close(torch.vmap(lambda x: run(rich, x))(values), torch.stack([run(rich, x) for x in values]))


def test_inference_mode_drops_tangents_of_all_operators(backend: str) -> None:
    """PyTorch's own among them: no operator hears of them."""
    q, k, v = (x.detach() for x in qkv(9))
    with forward_ad.dual_level():
        x = dual(q)
        with torch.inference_mode():
            for o in (op(CAUSAL, backend)(x, k, v), x.sin()):
                assert forward_ad.unpack_dual(o).tangent is None  # type: ignore[no-untyped-call]


def test_a_dual_gradient_that_arrives(backend: str) -> None:
    inputs, causal = qkv(9), op(CAUSAL, backend)
    arriving = random(2, 4, 9, 16, seed=3)
    with forward_ad.dual_level():
        found = torch.autograd.grad(causal(*inputs), inputs, dual(arriving))
        truth = torch.autograd.grad(causal.reference(*inputs), inputs, dual(arriving).double())
        for x, y in zip(found, truth, strict=True):
            close(forward_ad.unpack_dual(x).tangent, forward_ad.unpack_dual(y).tangent)  # type: ignore[no-untyped-call]


def test_duals_that_something_watches(backend: str) -> None:
    inputs = [x.detach() for x in qkv(9)]
    causal = op(CAUSAL, backend)

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Named(Tensor):
        pass

    with forward_ad.dual_level():
        q = dual(inputs[0])
        truth = forward_ad.unpack_dual(causal.reference(q, *inputs[1:])).tangent  # type: ignore[no-untyped-call]
        watch = Watch()  # type: ignore[no-untyped-call]
        for watching, limit in (
            (watch, 1e-4),
            (torch.profiler.profile(), 1e-4),
            (torch.autocast("cpu", torch.bfloat16), 2e-2),
        ):
            with watching:
                close(forward_ad.unpack_dual(causal(q, *inputs[1:])).tangent, truth, limit)  # type: ignore[no-untyped-call]
        close(forward_ad.unpack_dual(causal(q.as_subclass(Named), *inputs[1:])).tangent, truth)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    both = Both("causal", "tiled", dtype=dtype)
    for change in ("jvp", "reverse over reverse"):
        found, truth = (CHANGES[change](f, both) for f in (both.own, both.exact))
        if change == "jvp":
            found, truth = found[1], truth[1]
        assert found[0].dtype is dtype
        close(found, truth, 3e-2)


IN_REGIONS: dict[str, Callable[[Callable[..., Any], Tensor, Tensor], Any]] = {
    "grad": lambda f, x, _: torch.func.grad(f)(x),
    "vjp": lambda f, x, _: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(f), (x,), (t,))[1],
    "vmap of grad": lambda f, x, t: torch.vmap(torch.func.grad(f))(torch.stack((x, t))),
}


@pytest.mark.parametrize("change", IN_REGIONS)
def test_in_a_region_of_autocast(change: str, backend: str) -> None:
    """What transforms save has the type of the region, as what ran: kernels read beyond what was saved."""
    causal = op(CAUSAL, backend)
    q, k, v = (x.detach() for x in qkv(9))
    truth = IN_REGIONS[change](lambda x: causal.reference(x, k, v).square().sum(), q, q.flip(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = IN_REGIONS[change](lambda x: causal(x, k, v).float().square().sum(), q, q.flip(2))
    close(found, truth, 3e-2)


def test_the_backward_operator_takes_what_is_of_its_tensors(backend: str) -> None:
    causal = op(CAUSAL, backend)
    inputs = tuple(x.detach() for x in qkv(9))
    o, lse, parts = causal.engine.attend(inputs, ((0, 0, 0, 0, None, None, None, None), False))
    call = getattr(torch.ops.flashgen, f"{causal.name.split('::')[1]}_backward")
    rest = (0, 0, 0, 0, None, None, None, None, False, [True] * 3)
    for d_o in (o.bfloat16(), o[:, :, :4]):
        with pytest.raises(ValueError, match=r"'d_o' is torch.*; of q and v it is torch.float32"):
            call(d_o, None, o, lse, parts, *inputs, *(None,) * (causal.signature.tensor_arguments - 3), *rest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tangents_of_other_types(dtype: torch.dtype, backend: str) -> None:
    """Kernels take their addresses for those of tensors of the primals' types."""
    logs = op(SPECS["masked log"], backend)
    q, k, v = (x.detach() for x in qkv(9))
    slope = random(4, seed=5)
    moves = q.flip(2).to(dtype), slope.flip(0).to(dtype)

    def moved(run: Callable[..., Any], *tangents: Tensor) -> Any:
        with forward_ad.dual_level():
            pairs = zip((q, slope), tangents, strict=True)
            x, own = (forward_ad.make_dual(x, t) for x, t in pairs)  # type: ignore[no-untyped-call]
            return forward_ad.unpack_dual(run(x, k, v, slope=own)).tangent  # type: ignore[no-untyped-call]

    truth = moved(logs.reference, *(x.float() for x in moves))
    close(moved(logs, *moves), truth)
    close(torch.func.jvp(lambda x, s: logs(x, k, v, slope=s), (q, slope), moves)[1], truth)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_linearize(backend: str) -> None:
    """Which folds what does not follow from tangents: sums began in zeros of nothing, and stayed there."""
    causal = op(CAUSAL, backend)
    q, k, v = (x.detach() for x in qkv(9))
    _, linear = torch.func.linearize(lambda x: causal(x, k, v), q)
    for tangent in (q, q.flip(2)):
        close(linear(tangent), torch.func.jvp(lambda x: causal(x, k, v), (q,), (tangent,))[1])


def test_tangents_of_a_compiled_function(backend: str) -> None:
    """Dynamo compiles what stands below its graph breaks, and freed what kernels have the address of."""
    causal = op(CAUSAL, backend)
    q, k, v = (x.detach() for x in qkv(9))

    def attend(x: Tensor) -> Any:
        return causal(x, k, v)

    found = torch.func.jvp(torch.compile(attend, backend="eager"), (q,), (k.repeat(1, 2, 1, 1),))
    close(found, torch.func.jvp(attend, (q,), (k.repeat(1, 2, 1, 1),)))


def test_shapes_of_derivatives_need_no_numbers(backend: str) -> None:
    with FakeTensorMode():
        inputs = [torch.empty(2, heads, 37, 16, requires_grad=True) for heads in (4, 2, 2)]
        with forward_ad.dual_level():
            o = op(CAUSAL, backend)(*map(dual_of_ones, inputs))
            assert forward_ad.unpack_dual(o).tangent.shape == o.shape  # type: ignore[no-untyped-call]
        first = torch.autograd.grad(op(CAUSAL, backend)(*inputs).sum(), inputs, create_graph=True)
        assert [x.shape for x in torch.autograd.grad(first[0].sum(), inputs)] == [x.shape for x in inputs]


def dual_of_ones(x: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
    return made


def test_what_has_no_gradient_has_no_second_one() -> None:
    arguments, rich = given("rich"), op(RICH, "tiled")
    inputs = [x.detach() for x in qkv(9)]

    def loss(bias: Tensor) -> Any:
        named = {**arguments, "bias": bias}
        return torch.func.jvp(lambda x: rich(x, *inputs[1:], **named), (inputs[0],), (inputs[0],))[1].sum()

    with pytest.raises(ValueError, match=r"argument 'bias' requires a gradient, which the spec does not give it"):
        torch.func.grad(loss)(arguments["bias"])


def test_caches_have_no_derivatives(backend: str) -> None:
    causal, (q, k, v) = op(CAUSAL, backend), (x.detach() for x in qkv(9))
    with pytest.raises(RuntimeError, match=r"decode has no derivatives, of neither mode"):
        torch.func.jvp(lambda x: causal.decode(x, k, v, 9), (q[:, :, :2],), (q[:, :, :2],))


def test_ragged_batches() -> None:
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    rows = [random(12, heads, 16, seed=heads) for heads in (4, 2, 2)]
    tangents = [random(*x.shape, seed=9) for x in rows]
    causal = op(CAUSAL, "tiled")

    def run(call: Any, *x: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = call.varlen(*x, starts, starts, return_lse=True)
        return found

    for change in CHANGES.values():
        both = Both("causal", "tiled")
        both.inputs, both.tangents = tuple(rows), tuple(tangents)
        found, truth = (change(lambda *x, call=call: run(call, *x), both) for call in (causal, causal.reference))
        for x, y in zip(found, truth, strict=True):
            close(x, y)


def test_a_shard_of_a_larger_problem() -> None:
    both = Both("rich", "tiled", 37)
    part = {"q_start": 10, "q_total": 37, "h_start": 0}
    q = both.inputs[0][:, :, 10:25]
    both.inputs, both.tangents = (q, *both.inputs[1:]), (both.tangents[0][:, :, 10:25], *both.tangents[1:])
    whole = both.run
    both.run = lambda call, *x: whole(lambda *y, **named: call(*y, **named, **part), *x)  # type: ignore[method-assign]
    for name in ("jvp", "reverse over reverse"):
        found, truth = (CHANGES[name](f, both) for f in (both.own, both.exact))
        close(found[1] if name == "jvp" else found, truth[1] if name == "jvp" else truth)


def test_compiled_transforms_are_not_silent() -> None:
    torch._dynamo.reset()
    causal, (q, k, v) = op(CAUSAL, "reference"), (x.detach() for x in qkv(3))

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        return torch.func.jvp(lambda y: causal(y, k, v), (x,), (x,))

    with pytest.raises(Exception, match=r"setup_context|forward AD"):
        run(q)


# Memory ---------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that a tensor has that any operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return found


def test_no_matrix_of_all_pairs_is_formed() -> None:
    n = 2048
    window = op("attention window { head_dim 8  mask causal and window_left(63) }", "tiled")
    inputs = [random(1, 1, n, 8, seed=each).requires_grad_() for each in range(3)]
    seen = Largest()  # type: ignore[no-untyped-call]
    with seen:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(window(*map(dual, inputs))).tangent  # type: ignore[no-untyped-call]
        forward_over = torch.autograd.grad(tangent.square().sum(), inputs)
        first = torch.autograd.grad(window(*inputs).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), inputs)
    assert all(x.isfinite().all() for x in (*forward_over, *second))
    assert seen.most <= 1 << 18 <= n * n // 16
