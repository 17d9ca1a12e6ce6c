"""o lies as q lies in memory, and each gradient as what it is the gradient of: through every call of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import flashgen
from flashgen.op.op import AttentionOp
from flashgen.op.tensor_kinds import laid, layout_like
from tests.op.helpers import CAUSAL, RICH, SIGMOID, captured, error, op, qkv, random

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]

# How [B, H, N, D] lies in memory, the outermost axis first: as it is, as projections, as sequences of a batch.
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]
ROWS = (0, 2, 1, 3)


def ordered(x: Tensor, order: tuple[int, ...] = ROWS) -> Tensor:
    """The same numbers, of which memory has the axes in this order."""
    back = [order.index(axis) for axis in range(x.dim())]
    return x.detach().permute(order).contiguous().permute(back).requires_grad_()


def is_ordered(x: Tensor, order: tuple[int, ...] = ROWS) -> bool:
    return x.permute(order).is_contiguous()


def plain(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()


@pytest.mark.parametrize("order", [*ORDERS, (1, 0, 2, 3), (2, 1, 0, 3)])
@pytest.mark.parametrize("cut", [slice(None), slice(1, 3)])
def test_the_order_is_that_of_pytorch(order: tuple[int, ...], cut: slice) -> None:
    """Of whole tensors and of parts of larger ones."""
    x = ordered(torch.zeros(4, 5, 6, 8), order).detach()[cut, cut, cut, cut.start or 0 :]
    assert layout_like(x, x.shape)[1] == torch.empty_like(x).stride()
    wide = torch.empty_strided(*layout_like(x, (*x.shape[:-1], 24)))
    assert is_ordered(wide, order)


def test_what_has_no_order_is_contiguous() -> None:
    x = torch.zeros(2, 1, 6, 8).expand(2, 3, 6, 8)
    for each in (x, x.transpose(1, 2), torch.zeros(0, 6, 3, 8).transpose(1, 2)):
        assert torch.empty_strided(*layout_like(each, each.shape)).is_contiguous()
    assert laid(x, layout_like(x, x.shape)).is_contiguous()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", [CAUSAL, SIGMOID, RICH], ids=["causal", "sigmoid", "rich"])
def test_results_lie_as_inputs(backend: str, text: str, order: tuple[int, ...]) -> None:
    check(op(text, backend), order, captured() if text is RICH else {})


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("text", [CAUSAL, RICH], ids=["causal", "rich"])
def test_results_of_gpus_lie_as_inputs(target: str, text: str) -> None:
    emulated = flashgen.loads(text, backend="emulator", target=target)
    check(emulated, ROWS, captured() if text is RICH else {}, torch.bfloat16)
    check(emulated, ORDERS[2], captured() if text is RICH else {}, torch.bfloat16, deterministic=True)


def check(
    attention: AttentionOp,
    order: tuple[int, ...],
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    deterministic: bool | None = None,
) -> None:
    """The same bits as of contiguous tensors, in the order of the inputs, whatever the order of d_o."""
    given = qkv(dtype=dtype)
    own, contiguous = [ordered(x, order) for x in given], [plain(x) for x in given]
    o = attention(*own, deterministic=deterministic, **arguments)
    assert torch.equal(o, attention(*contiguous, deterministic=deterministic, **arguments))
    assert is_ordered(o, order)
    truth = attention(*contiguous, deterministic=True, **arguments)
    d_o = random(*o.shape, seed=9, dtype=dtype)
    for arriving in (d_o, ordered(d_o, order).detach(), random(1, seed=9, dtype=dtype).expand(o.shape)):
        expected = torch.autograd.grad(truth, contiguous, arriving, retain_graph=True)
        found = torch.autograd.grad(o, own, arriving, retain_graph=True)
        for x, wanted in zip(found, expected, strict=True):
            assert is_ordered(x, order)
            assert error(x, wanted) < 2 * torch.finfo(dtype).eps


def test_heads_are_joined_without_a_copy(backend: str) -> None:
    q, k, v = (ordered(x) for x in qkv())
    o = op(CAUSAL, backend)(q, k, v)
    joined = o.transpose(1, 2).reshape(2, 37, -1)
    assert joined.data_ptr() == o.data_ptr()


def with_gaps(x: Tensor) -> Tensor:
    """Every second element of wider rows, in the order of projections: kernels read a copy."""
    apart = torch.stack([x, x], -1).flatten(-2).transpose(1, 2).contiguous().transpose(1, 2)
    return apart[..., ::2].detach().requires_grad_()


def of_packed(x: Tensor) -> Tensor:
    """A part of the rows of packed q, k and v."""
    return ordered(torch.cat([x, x, x], -1)).detach()[..., : x.shape[-1]].requires_grad_()


def misaligned(x: Tensor) -> Tensor:
    """Rows that do not begin where kernels for GPUs copy from."""
    return ordered(torch.cat([x, x[..., :1]], -1)).detach()[..., 1:].requires_grad_()


@pytest.mark.parametrize("arrange", [with_gaps, of_packed, misaligned])
@pytest.mark.parametrize("backend", ["reference", "cpu", "emulator"])
def test_what_kernels_have_to_copy_has_its_order(backend: str, arrange: Callable[[Tensor], Tensor]) -> None:
    own = [arrange(x) for x in qkv()]
    contiguous = [plain(x) for x in own]
    o, expected = op(CAUSAL, backend)(*own), op(CAUSAL, backend)(*contiguous)
    assert torch.equal(o, expected)
    assert is_ordered(o)
    d_o = random(*o.shape, seed=9)
    truth = torch.autograd.grad(expected, contiguous, d_o)
    for x, wanted in zip(torch.autograd.grad(o, own, d_o), truth, strict=True):
        assert is_ordered(x)
        assert error(x, wanted) < 1e-6


def test_copied_keys_alone_have_their_own_order(backend: str) -> None:
    q, k, v = qkv()
    own = [plain(q), with_gaps(k), ordered(v, ORDERS[2])]
    o = op(CAUSAL, backend)(*own)
    assert o.is_contiguous()
    d_q, d_k, d_v = torch.autograd.grad(o.sum(), own)
    assert d_q.is_contiguous()
    assert is_ordered(d_k)
    assert is_ordered(d_v, ORDERS[2])


@pytest.mark.parametrize("text", [CAUSAL, SIGMOID])
def test_fake_tensors_lie_as_real_ones(backend: str, text: str) -> None:
    inputs = [ordered(x) for x in qkv()]
    name = op(text, backend).name.partition("::")[2]
    overload = getattr(torch.ops.flashgen, name).default
    opcheck(overload, (*inputs, *(0, 0, 0, 0, None, None, None, None, False)))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        o = op(text, backend)(*fakes)
        assert is_ordered(o)
        assert all(is_ordered(x) for x in torch.autograd.grad(o.sum(), fakes))
    assert is_ordered(op(text, backend)(*(x.detach().to("meta") for x in inputs)))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_graphs_rely_on_it(backend: str, compiler: str) -> None:
    torch._dynamo.reset()
    attention, weight = op(CAUSAL, backend), random(64, 64, seed=4)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v).transpose(1, 2).reshape(2, q.shape[2], -1) @ weight

    made = torch.compile(layer, fullgraph=True, backend=compiler, dynamic=True)
    for n in (37, 21):
        inputs = [ordered(x) for x in qkv(n)]
        expected = [plain(x) for x in inputs]
        found, truth = made(*inputs), layer(*expected)
        assert error(found, truth) < 1e-6
        gradients = torch.autograd.grad(found.sum(), inputs)
        for x, wanted in zip(gradients, torch.autograd.grad(truth.sum(), expected), strict=True):
            assert error(x, wanted) < 1e-6


def test_exported_programs_rely_on_it(backend: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found: Tensor = op(CAUSAL, backend)(q, k, v).transpose(1, 2)
            return found.reshape(q.shape[0], q.shape[2], -1)

    inputs = tuple(ordered(x).detach() for x in qkv())
    n = torch.export.Dim("n", min=2, max=100)
    program = torch.export.export(Layer(), inputs, dynamic_shapes=({2: n}, {2: n}, {2: n}), strict=False)
    for count in (37, 5):
        own = tuple(ordered(x).detach() for x in qkv(count))
        assert error(program.module()(*own), Layer()(*own)) < 1e-6


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulator"])
def test_ragged_batches_lie_as_their_rows(backend: str) -> None:
    """[T, H, D], and the same with all rows of a head together."""
    starts = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
    rows = [x.detach()[0, :, :21].transpose(0, 1) for x in qkv()]
    results = []
    for order in ((0, 1, 2), (1, 0, 2)):
        own = q, k, v = [ordered(x, order) for x in rows]
        o = op(CAUSAL, backend).varlen(q, k, v, starts, starts)
        results.append((o, *torch.autograd.grad(o, own, random(*o.shape, seed=9))))
        assert all(x.stride() == like.stride() for x, like in zip(results[-1], (own[0], *own), strict=True))
    for x, y in zip(*results, strict=True):
        assert error(x, y) < 1e-6


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulator"])
@pytest.mark.parametrize("n", [1, 3, 9])
def test_decoded_rows_lie_as_queries(backend: str, n: int) -> None:
    q, k, v = (x.detach() for x in qkv())
    lengths = torch.tensor([37, 30], dtype=torch.int32)
    o = op(CAUSAL, backend).decode(ordered(q[:, :, :n]), k, v, lengths)
    assert torch.equal(o, op(CAUSAL, backend).decode(q[:, :, :n], k, v, lengths))
    assert is_ordered(o)
    assert is_ordered(op(CAUSAL, backend).decode(with_gaps(q[:, :, :n]), k, v, lengths))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_eight_bits_lie_as_queries(target: str) -> None:
    attention = flashgen.loads(
        "attention narrow { head_dim 32  dtype f16, bf16, f8e4m3  mask causal }", backend="emulator", target=target
    )
    given = [random(2, h, 37, 32, seed=h).to(torch.float8_e4m3fn) for h in (4, 2, 2)]
    own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    o = attention(*own)
    assert torch.equal(o, attention(*given))
    assert is_ordered(o)


def test_tangents_lie_as_results(backend: str) -> None:
    inputs = [ordered(x) for x in qkv(9)]
    moves = [random(*x.shape, seed=n) for n, x in enumerate(inputs)]
    found = torch.func.jvp(op(CAUSAL, backend), tuple(x.detach() for x in inputs), tuple(moves))
    expected = torch.func.jvp(op(CAUSAL, backend), tuple(plain(x).detach() for x in inputs), tuple(moves))
    for x, wanted in zip(found, expected, strict=True):
        assert is_ordered(x)
        assert error(x, wanted) < 1e-6


def test_derivatives_of_gradients_know_the_order(backend: str) -> None:
    found = []
    for arrange in (plain, ordered):
        own = [arrange(x) for x in qkv(9)]
        (d_q,) = torch.autograd.grad(op(CAUSAL, backend)(*own).sin().sum(), own[:1], create_graph=True)
        found.append((d_q, *torch.autograd.grad(d_q.cos().sum(), own)))
    for x, y in zip(*found, strict=True):
        assert error(x, y) < 1e-5


def test_mapped_calls_know_the_order(backend: str) -> None:
    given = [torch.stack([x.detach(), 2 * x.detach()]) for x in qkv()]
    own = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in given]
    assert torch.equal(torch.vmap(op(CAUSAL, backend))(*own), torch.vmap(op(CAUSAL, backend))(*given))
