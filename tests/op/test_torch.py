"""The op inside PyTorch's machinery: opcheck, compile, export, fake tensors, autocast, checkpointing, torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashgen.op.op import AttentionOp
from tests.op.helpers import CAUSAL, RICH, SIGMOID, captured, error, op, qkv, random

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]

OFFSETS = (0, 0, 0, 0, None, None, None, None, False)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch._dynamo.reset()


def rich_arguments() -> tuple[Any, ...]:
    """The positional arguments of the operator of ``RICH``."""
    c = captured()
    ell = torch.tensor(1.0, requires_grad=True)
    seed = torch.tensor(42)
    return (*qkv(), c["slope"], c["doc"], c["table"], torch.tensor(0.1), None, ell, seed, None, *OFFSETS)


def overload(attention: AttentionOp, suffix: str = "") -> Any:
    return getattr(torch.ops.flashgen, attention.name.partition("::")[2] + suffix).default


def test_opcheck(backend: str) -> None:
    opcheck(overload(op(CAUSAL, backend)), (*qkv(), *OFFSETS))
    opcheck(overload(op(RICH, backend)), rich_arguments())


def test_opcheck_pointwise_and_backward() -> None:
    opcheck(overload(op(SIGMOID, "reference")), (*qkv(), *OFFSETS))
    inputs = [x.detach() for x in qkv()]
    o, lse = op(CAUSAL, "reference")(*inputs, return_lse=True)
    parts = lse.new_zeros(*lse.shape, 2)
    arguments = (torch.ones_like(o), None, o, lse, parts, *inputs, *OFFSETS, [True, False, True])
    opcheck(overload(op(CAUSAL, "reference"), "_backward"), arguments, test_utils=("test_schema", "test_faketensor"))


def step(attention: AttentionOp, inputs: list[Tensor], arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    o, lse = attention(*inputs, return_lse=True, **arguments)
    learned = [*inputs, arguments["slope"]]
    return (o, lse, *torch.autograd.grad([(o * 2).sum(), lse.sum()], learned))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_graph_breaks(backend: str, compiler: str) -> None:
    if (backend, compiler) == ("reference", "inductor"):
        pytest.skip("one backend is enough for the slow compiler")
    inputs, arguments = qkv(), captured()
    rich = op(RICH, backend)

    @torch.compile(backend=compiler, fullgraph=True)
    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = rich(*x, return_lse=True, bias=0.3, **arguments)
        return o * 2, lse

    learned = [*inputs, arguments["slope"]]
    found = run(*inputs)
    o, lse = op(RICH, backend)(*inputs, return_lse=True, bias=0.3, **arguments)
    torch.testing.assert_close(found, (o * 2, lse))
    towards = [random(*x.shape) for x in found]
    truth = torch.autograd.grad([o * 2, lse], learned, towards)
    torch.testing.assert_close(torch.autograd.grad(found, learned, towards), truth)


def test_the_first_call_of_an_op_may_be_a_compiled_one(backend: str) -> None:
    """Nothing that a call reads may be left for an eager call to fill in."""
    inputs, arguments = [x.detach() for x in qkv()], captured()
    fresh = op(RICH.replace("attention rich", "attention called_first_by_a_compiler"), backend)
    run = torch.compile(lambda *x: fresh(*x, **arguments), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(*inputs), op(RICH, backend)(*inputs, **arguments))


def test_params_and_lengths_that_change_compile_at_most_twice(backend: str) -> None:
    """Once as it comes, once with symbols in place of what has changed."""
    counter, rich = CompileCounterWithBackend("aot_eager"), op(RICH, backend)
    run = torch.compile(
        lambda x, arguments, bias, p: rich(*x, bias=bias, dropout_p=p, **arguments),
        backend=counter,
        fullgraph=True,
    )
    for n, bias, p in ((37, 0.1, 0.5), (41, 0.2, 0.25), (53, 0.3, 0.125), (29, 0.7, 0.75), (61, -4.0, 0.375)):
        inputs, arguments = [x.detach() for x in qkv(n)], captured(n)
        found = run(inputs, arguments, bias, p)
        torch.testing.assert_close(found, op(RICH, backend)(*inputs, bias=bias, dropout_p=p, **arguments))
    assert counter.frame_count <= 2


def test_compiled_dropout_draws_from_the_generator(backend: str) -> None:
    inputs, arguments, rich = [x.detach() for x in qkv()], captured(), op(RICH, backend)
    del arguments["seed"]
    run = torch.compile(lambda *x: rich(*x, **arguments), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    first, second = run(*inputs), run(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, op(RICH, backend)(*inputs, **arguments))


class Layer(torch.nn.Module):
    """A module around an op."""

    def __init__(self, attention: AttentionOp) -> None:
        super().__init__()
        self.attention = attention
        self.project = torch.nn.Linear(16, 48)
        self.slope = torch.nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, doc: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        o: Tensor = self.attention(q, k, v, slope=self.slope, doc=doc, table=table, dropout_p=0.0)
        return o


def layer_inputs() -> tuple[Tensor, Tensor, Tensor]:
    c = captured()
    return random(2, 4, 37, 16), c["doc"].contiguous(), c["table"].detach()


def test_export(backend: str) -> None:
    layer, inputs = Layer(op(RICH, backend)), layer_inputs()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        layer, inputs, dynamic_shapes={"x": {2: length}, "doc": {1: length}, "table": None}, strict=False
    )
    assert any(op(RICH, backend).name.partition("::")[2] in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))
    longer = (random(2, 4, 50, 16), captured(50)["doc"].contiguous(), inputs[2])
    torch.testing.assert_close(program.module()(*longer), layer(*longer))


def test_fake_and_meta_tensors(backend: str) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 37, 16, requires_grad=True) for heads in (4, 2, 2))
        o, lse = op(CAUSAL, backend)(q, k, v, return_lse=True)
        assert (o.shape, lse.shape, lse.dtype) == ((2, 4, 37, 16), (2, 4, 37), torch.float32)
        assert [x.shape for x in torch.autograd.grad(o.sum(), [q, k, v])] == [q.shape, k.shape, v.shape]
    meta = [torch.empty(2, 4, 37, 16, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    o = op(CAUSAL, backend)(*meta)
    assert (o.device.type, o.dtype, o.shape) == ("meta", torch.bfloat16, (2, 4, 37, 16))


def test_autocast(backend: str) -> None:
    inputs, arguments = qkv(), captured()
    with torch.autocast("cpu", torch.bfloat16):
        arguments["slope"] = arguments["slope"].detach().bfloat16().requires_grad_()
        o = op(RICH, backend)(*inputs, **arguments)
        found = torch.autograd.grad(o.sum(), [*inputs, arguments["slope"]])
    assert o.dtype is torch.bfloat16
    assert [x.dtype for x in found] == [torch.float32] * 3 + [torch.bfloat16]
    half = [x.detach().bfloat16() for x in inputs]
    slope = arguments.pop("slope").detach().float()
    assert torch.equal(o, op(RICH, backend)(*half, slope=slope, **arguments))
    with torch.autocast("cpu", torch.float16):  # a mixture, as it leaves a projection and a cache
        mixed = op(CAUSAL, backend)(half[0], inputs[1], half[2].half())
    assert mixed.dtype is torch.float16


def test_autocast_to_a_type_that_the_spec_lacks() -> None:
    single = op("attention single { head_dim 16 dtype f32 mask causal }", "reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert single(*(x.bfloat16() for x in qkv())).dtype is torch.float32


def test_what_a_call_was_like_before_changes_nothing(backend: str) -> None:
    """The same tensors again, after a plain call: every call asks what watches it."""
    inputs = [x.detach() for x in qkv()]
    causal = op(CAUSAL, backend)
    plain = causal(*inputs)
    seen: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    class Replace(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Named(Tensor):
        pass

    for mode in (Watch, Replace):
        with mode():
            assert torch.equal(causal(*inputs), plain)
        assert any(causal.name in each.replace(".", "::", 1) for each in seen)
        seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert causal(*inputs).dtype is torch.bfloat16
    with torch.inference_mode():
        assert causal(*inputs).is_inference()
    assert isinstance(causal(inputs[0].as_subclass(Named), *inputs[1:]), Named)
    with FakeTensorMode() as fakes:
        assert isinstance(causal(*(fakes.from_tensor(x) for x in inputs)), FakeTensor)
    learned = inputs[1].requires_grad_()
    assert causal(*inputs).requires_grad
    assert causal(inputs[0], torch.nn.Parameter(learned), inputs[2]).requires_grad
    with torch.no_grad():
        assert not causal(*inputs).requires_grad
    assert torch.equal(causal(*(x.detach() for x in inputs)), plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(backend: str, use_reentrant: bool) -> None:
    """The second forward pass draws the seed of the first."""
    inputs, arguments = qkv(), captured()
    del arguments["seed"]

    def run(*x: Tensor) -> Tensor:
        o: Tensor = op(RICH, backend)(*x, deterministic=True, **arguments)
        return o

    torch.manual_seed(0)
    truth = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(0)
    o = checkpoint(run, *inputs, use_reentrant=use_reentrant)
    assert isinstance(o, Tensor)
    torch.autograd.backward(o.square().sum())
    assert all(x.grad is not None and torch.equal(x.grad, y) for x, y in zip(inputs, truth, strict=True))


def test_torch_func(backend: str) -> None:
    inputs = [x.detach() for x in qkv()]

    def loss(*x: Tensor) -> Tensor:
        return op(CAUSAL, backend)(*x).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))


def test_tensors_that_torch_func_has_left_behind(backend: str) -> None:
    """What a function under ``torch.func`` lets escape is a wrapper, which looks like a tensor and has no memory."""
    kept, inputs = [], [x.detach() for x in qkv()]

    def leak(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    torch.func.grad(leak)(inputs[0])
    expected = op(CAUSAL, backend)(*inputs)
    with torch.no_grad():
        assert torch.equal(op(CAUSAL, backend)(kept[0], *inputs[1:]), expected)
    learned = inputs[1].requires_grad_()
    o = op(CAUSAL, backend)(kept[0], learned, inputs[2])
    truth = torch.autograd.grad(op(CAUSAL, backend)(*inputs).sum(), learned)
    assert torch.equal(torch.autograd.grad(o.sum(), learned)[0], truth[0])


def test_the_dispatcher_and_the_short_way_agree(backend: str) -> None:
    """Plain eager calls skip the dispatcher; a profiler sees the operator."""
    inputs, arguments = qkv(), captured()
    arguments["deterministic"] = True
    direct = step(op(RICH, backend), inputs, arguments)
    with torch.profiler.profile() as profile:
        dispatched = step(op(RICH, backend), inputs, arguments)
    assert all(torch.equal(a, b) for a, b in zip(direct, dispatched, strict=True))
    names = {event.name for event in profile.events() or ()}
    assert {op(RICH, backend).name, op(RICH, backend).name + "_backward"} <= names


@pytest.mark.parametrize("text", [CAUSAL, SIGMOID])
def test_flops_are_counted_densely(backend: str, text: str) -> None:
    inputs, call = qkv(kv_heads=4), op(text, backend)  # a counter knows the ops that are there when it is made
    with FlopCounterMode(display=False) as forward:
        o = call(*inputs)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(o.sum(), inputs)
    assert forward.get_total_flops() == 4 * 2 * 4 * 37 * 37 * 16
    assert backward.get_total_flops() == 10 * 2 * 4 * 37 * 37 * 16


def test_flops_over_a_cache_are_of_the_rows_that_are_filled(backend: str) -> None:
    q, k, v = qkv()
    lengths, call = torch.tensor([5, 30], dtype=torch.int32), op(CAUSAL, backend)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call.decode(q[:, :, :3], k, v, lengths)
    assert counter.get_total_flops() == 4 * 4 * 3 * (5 + 30) * 16


def test_hooks_on_saved_tensors(backend: str) -> None:
    inputs, packed = qkv(), []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = op(CAUSAL, backend)(*inputs)
    together = "Cpp" in type(o.grad_fn).__name__  # lse and its parts, in C++
    assert len(packed) == (5 if together else 6)  # q, k, v, o, lse and its parts
    truth = op(CAUSAL, backend).reference(*inputs)
    for x, y in zip(torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(truth.sum(), inputs), strict=True):
        assert error(x, y) < 1e-4
