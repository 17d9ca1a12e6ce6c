"""What flashgen does not differentiate or map is refused by name, in whatever way it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.helpers import CAUSAL, RICH, captured, op, qkv

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]
TANGENT = r"'\w+' has no forward-mode derivative .*op\.reference"
MAPPED = r"'\w+' cannot be mapped by torch\.vmap: make the mapped dimension a part of the batch"


def dual(x: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_dual_queries_keys_and_values(backend: str, position: int, requires_grad: bool) -> None:
    inputs = [x.detach().requires_grad_(requires_grad) for x in qkv(9)]
    causal = op(CAUSAL, backend)
    run = getattr(torch.ops.flashgen, causal.name.partition("::")[2])
    with forward_ad.dual_level():
        causal(*inputs)  # no input has a tangent
        inputs[position] = dual(inputs[position])
        for call in (
            lambda: causal(*inputs),
            lambda: causal(*inputs, return_lse=True),
            lambda: run(*inputs, 0, 0, 0, 0, None, None, None, None, False),
        ):
            with pytest.raises(RuntimeError, match=TANGENT):
                call()
            with torch.no_grad(), pytest.raises(RuntimeError, match=TANGENT):
                call()
        exact = forward_ad.unpack_dual(causal.reference(*inputs))  # type: ignore[no-untyped-call]
        assert exact.tangent is not None
    causal(*(x.detach() for x in qkv(9)))


@pytest.mark.parametrize("name", ["slope", "table", "ell", "bias"])
def test_dual_captured_values(backend: str, name: str) -> None:
    """By every way to a tangent, also of ``bias``, which the spec gives no gradient."""
    inputs, given = [x.detach() for x in qkv(9)], captured(9)
    given |= {"ell": torch.tensor(1.5), "bias": torch.tensor(0.25)}
    value = given[name].detach()

    def call(x: Tensor) -> Tensor:
        o: Tensor = op(RICH, backend)(*inputs, **{**given, name: x})
        return o

    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=TANGENT):
            call(dual(value))
        with torch.no_grad(), pytest.raises(RuntimeError, match=TANGENT):
            call(dual(value))
    with pytest.raises(RuntimeError, match=TANGENT):
        torch.func.jvp(call, (value,), (torch.ones_like(value),))
    with pytest.raises(RuntimeError, match=TANGENT):
        torch.func.jacfwd(call)(value)
    with pytest.raises(RuntimeError, match=MAPPED):
        torch.vmap(call)(torch.stack([value, value]))


def test_inference_mode_drops_tangents_of_all_operators(backend: str) -> None:
    """PyTorch's own among them: no operator hears of them."""
    q, k, v = (x.detach() for x in qkv(9))
    with forward_ad.dual_level():
        x = dual(q)
        with torch.inference_mode():
            for o in (op(CAUSAL, backend)(x, k, v), x.sin()):
                assert forward_ad.unpack_dual(o).tangent is None  # type: ignore[no-untyped-call]


def test_a_dual_gradient_that_arrives(backend: str) -> None:
    inputs = qkv(9)
    with forward_ad.dual_level():
        o = op(CAUSAL, backend)(*inputs)
        with pytest.raises(RuntimeError, match=TANGENT):
            torch.autograd.grad(o, inputs, dual(torch.ones_like(o)))


def test_duals_that_something_watches(backend: str) -> None:
    inputs = [x.detach() for x in qkv(9)]

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Named(Tensor):
        pass

    with forward_ad.dual_level():
        q = dual(inputs[0])
        watch = Watch()  # type: ignore[no-untyped-call]
        for watching in (watch, torch.profiler.profile(), torch.autocast("cpu", torch.bfloat16)):
            with watching, pytest.raises(RuntimeError, match=TANGENT):
                op(CAUSAL, backend)(q, *inputs[1:])
        with pytest.raises(RuntimeError, match=TANGENT):
            op(CAUSAL, backend)(q.as_subclass(Named), *inputs[1:])


Change = Callable[[Callable[[Tensor], Tensor], Tensor], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), TANGENT),
        (lambda f, x: torch.func.jacfwd(f)(x), TANGENT),
        (lambda f, x: torch.func.hessian(f)(x), TANGENT),
        (lambda f, x: torch.func.grad(lambda y: torch.func.jvp(f, (y,), (y,))[1])(x), TANGENT),
        (lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)), TANGENT),
        (lambda f, x: torch.vmap(f)(torch.stack([x, x])), MAPPED),
        (lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack([x, x])), MAPPED),
        (lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).sum())(x), "cannot be differentiated again"),
    ],
)
def test_transforms_of_torch_func(backend: str, change: Change, message: str) -> None:
    q, k, v = (x.detach() for x in qkv(3))
    with pytest.raises(RuntimeError, match=message):
        change(lambda x: op(CAUSAL, backend)(x, k, v).square().sum(), q)


def test_compiled_transforms_are_not_silent() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv(3))

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        return torch.func.jvp(lambda y: op(CAUSAL, "reference")(y, k, v), (x,), (x,))

    with pytest.raises(Exception, match=r"forward-mode|setup_context|forward AD"):
        run(q)


def test_second_derivatives(backend: str) -> None:
    inputs = qkv(9)
    first = torch.autograd.grad(op(CAUSAL, backend)(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(first[0].sum(), inputs)
