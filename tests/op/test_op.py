"""The op in eager mode: results, gradients, arguments, layouts, processes and threads."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from tests.op.helpers import CAUSAL, RICH, SIGMOID, captured, error, op, qkv, random

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def gradients(output: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    outputs = output if isinstance(output, tuple) else (output,)
    towards = [random(*each.shape, seed=9).to(each.dtype) for each in outputs]
    return torch.autograd.grad(outputs, inputs, towards)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stand_in", [None, "tiled"])
def test_forward_and_backward(backend: str, stand_in: str | None, dtype: torch.dtype) -> None:
    rich = op(RICH, stand_in or backend)
    inputs, arguments = qkv(dtype=dtype), captured()
    learned = [*inputs, arguments["slope"], arguments["table"]]
    output = rich(*inputs, return_lse=True, **arguments)
    truth = rich.reference(*inputs, return_lse=True, **arguments)
    found = (*output, *gradients(output, learned))
    assert [x.dtype for x in found] == [dtype, torch.float32, *[dtype] * 3, torch.float32, torch.bfloat16]
    for value, expected in zip(found, (*truth, *gradients(truth, learned)), strict=True):
        assert error(value, expected) < max(TOLERANCE[dtype], TOLERANCE[value.dtype])


def test_float64_runs_on_the_reference_backend() -> None:
    inputs = [x.detach().double().requires_grad_() for x in qkv(5)]
    assert torch.autograd.gradcheck(lambda *x: op(CAUSAL, "reference")(*x, return_lse=True), inputs, fast_mode=True)


def test_pointwise(backend: str) -> None:
    inputs = qkv()
    found, truth = op(SIGMOID, backend)(*inputs), op(SIGMOID, backend).reference(*inputs)
    for value, expected in zip((found, *gradients(found, inputs)), (truth, *gradients(truth, inputs)), strict=True):
        assert error(value, expected) < 2e-5


def test_head_dimensions(backend: str) -> None:
    inputs = qkv(v=8)
    assert error(op(CAUSAL, backend)(*inputs), op(CAUSAL, backend).reference(*inputs)) < 2e-5


def test_lse_carries_a_gradient_alone(backend: str) -> None:
    inputs = qkv()
    lse, truth = (f(*inputs, return_lse=True)[1] for f in (op(CAUSAL, backend), op(CAUSAL, backend).reference))
    found = torch.autograd.grad(lse.sin().sum(), inputs[:2])
    for value, expected in zip(found, torch.autograd.grad(truth.sin().sum(), inputs[:2]), strict=True):
        assert error(value, expected) < 2e-5


def test_output_is_the_same_where_nobody_asks_for_lse(backend: str) -> None:
    """Its memory is then not asked for: without gradients, with them, and after a call that had it."""
    inputs, causal = qkv(), op(CAUSAL, backend)
    wanted = causal(*inputs, return_lse=True)[0]
    with torch.no_grad():
        found = [causal(*inputs), causal(*inputs, return_lse=True)[0], causal(*inputs)]
    assert all(torch.equal(wanted, each) for each in (*found, causal(*inputs)))


def test_only_what_requires_a_gradient_gets_one(backend: str) -> None:
    inputs, arguments = qkv(), captured()
    expected = gradients(op(RICH, backend)(*inputs, **arguments), [inputs[1], arguments["slope"]])
    q, v = inputs[0].detach(), inputs[2].detach()
    arguments["table"] = arguments["table"].detach()
    o = op(RICH, backend)(q, inputs[1], v, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(gradients(o, [inputs[1], arguments["slope"]]), expected, strict=True))
    arguments["slope"] = arguments["slope"].detach()
    assert not op(RICH, backend)(q, inputs[1].detach(), v, **arguments).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend: str, mode: Any) -> None:
    inputs = qkv()
    with mode():
        o = op(CAUSAL, backend)(*inputs)
        assert not o.requires_grad
    assert torch.equal(o, op(CAUSAL, backend)(*inputs))


def test_params(backend: str) -> None:
    inputs, arguments = qkv(), captured()
    rich = op(RICH, backend)
    default = rich(*inputs, **arguments)
    assert torch.equal(default, rich(*inputs, bias=1 / 37, cut=2, ell=1, **arguments))
    ell = torch.tensor(1.0, requires_grad=True)
    given = rich(*inputs, bias=torch.tensor(1 / 37), cut=torch.tensor(2, dtype=torch.int32), ell=ell, **arguments)
    assert torch.equal(default, given)
    truth = rich.reference(*inputs, **arguments, ell=ell)
    assert error(*gradients(given, [ell]), *gradients(truth, [ell])) < 2e-5
    arguments.update(bias=0.5, cut=5, ell=0.75)
    assert error(rich(*inputs, **arguments), rich.reference(*inputs, **arguments)) < 2e-5


def test_dropout_seeds(backend: str) -> None:
    inputs, arguments = qkv(), captured()
    rich = op(RICH, backend)
    del arguments["seed"]
    torch.manual_seed(3)
    first, second = rich(*inputs, **arguments), rich(*inputs, **arguments)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, rich(*inputs, **arguments))
    state = torch.get_rng_state()
    silent = rich(*inputs, **arguments, dropout_p=0.0)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(silent, rich(*inputs, **arguments, dropout_p=0, seed=8))
    for seed in (7, -7, 2**64 - 7, torch.tensor(7)):
        heavy = rich(*inputs, **arguments, dropout_p=0.75, seed=seed)
        assert error(heavy, rich.reference(*inputs, **arguments, dropout_p=0.75, seed=seed)) < 2e-5
    assert torch.equal(rich(*inputs, **arguments, seed=-7), rich(*inputs, **arguments, seed=2**64 - 7))


def test_strides(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(kv_heads=4))
    expected = op(CAUSAL, backend)(q, k, v)

    def as_btnh(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def with_gaps(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)[..., :16]

    for relayout, order in ((as_btnh, (0, 2, 1, 3)), (with_gaps, (0, 1, 2, 3)), (wider, (0, 1, 2, 3))):
        inputs = [relayout(x).requires_grad_() for x in (q, k, v)]
        o = op(CAUSAL, backend)(*inputs)
        assert torch.equal(o, expected)
        assert o.permute(order).is_contiguous()
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        towards = random(2, 4, 16, 37).transpose(-1, -2)
        truth = torch.autograd.grad(op(CAUSAL, backend)(*plain), plain, towards)
        torch.testing.assert_close(torch.autograd.grad(o, inputs, towards), truth, rtol=0, atol=0)


def test_strides_of_single_elements(backend: str) -> None:
    """A dimension of 1 has any stride, and the tensor is contiguous all the same."""
    q, k, v = (x.detach()[:1, :1, :5].contiguous() for x in qkv())
    expected = op(CAUSAL, backend)(*(x.clone().requires_grad_() for x in (q, k, v)))
    for strides in ((7, 3, 16, 1), (80, 1 << 40, 16, 1)):
        inputs = [x.as_strided(x.shape, strides).requires_grad_() for x in (q, k, v)]
        assert all(x.is_contiguous() for x in inputs)
        o = op(CAUSAL, backend)(*inputs)
        assert torch.equal(o, expected)
        assert o.is_contiguous()
        assert [x.stride() for x in torch.autograd.grad(o.sum(), inputs)] == [(80, 80, 16, 1)] * 3


def test_the_default_type_of_pytorch_changes_nothing(backend: str) -> None:
    """lse and the sums of captured gradients are float32 whatever new tensors are by default."""
    inputs, arguments = qkv(), captured()
    learned = [*inputs, arguments["slope"]]
    expected = op(RICH, backend)(*inputs, return_lse=True, deterministic=True, **arguments)
    gradient = torch.autograd.grad(expected[0].sum(), learned)
    torch.set_default_dtype(torch.float64)
    try:
        found = op(RICH, backend)(*inputs, return_lse=True, deterministic=True, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(
            torch.equal(a, b) for a, b in zip(torch.autograd.grad(found[0].sum(), learned), gradient, strict=True)
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_expanded_tensors(backend: str) -> None:
    q = random(1, 1, 1, 16).expand(2, 4, 37, 16)
    k, v = (random(1, 1, 37, 16, seed=seed).requires_grad_() for seed in (1, 2))
    o = op(CAUSAL, backend)(q, k.expand(2, 4, 37, 16), v.expand(2, 4, 37, 16))
    truth = op(CAUSAL, backend).reference(q, k.expand(2, 4, 37, 16), v.expand(2, 4, 37, 16))
    assert error(o, truth) < 2e-5
    assert error(torch.autograd.grad(o.sum(), k)[0], torch.autograd.grad(truth.sum(), k)[0]) < 1e-4


@pytest.mark.parametrize("sizes", [(0, 4, 2, 5, 5), (2, 0, 0, 5, 5), (2, 4, 2, 0, 5), (2, 4, 2, 5, 0), (2, 0, 2, 5, 5)])
def test_empty(backend: str, sizes: tuple[int, int, int, int, int]) -> None:
    batch, heads, kv_heads, q_len, kv_len = sizes
    inputs = [
        torch.ones(batch, count, n, 16, requires_grad=True)
        for count, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]
    arguments = {
        "slope": torch.ones(heads, requires_grad=True),
        "doc": torch.zeros(batch, kv_len, dtype=torch.int32),
        "table": torch.ones(8, dtype=torch.bfloat16),
    }
    o, lse = op(RICH, backend)(*inputs, return_lse=True, q_start=0, **arguments)
    assert o.shape == (batch, heads, q_len, 16)
    assert not o.any()
    assert (lse == -math.inf).all()
    for x, gradient in zip(inputs, torch.autograd.grad(o.sum(), inputs), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


def test_nan_passes_through(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    q[0, 1, 20] = math.nan
    o, lse = op(CAUSAL, backend)(q, k, v, return_lse=True)
    assert o[0, 1, 20].isnan().all()
    assert lse[0, 1, 20].isnan()
    assert o[0, 0].isfinite().all()


def test_a_shard_is_a_slice_of_the_whole(backend: str) -> None:
    inputs, arguments = [x.detach() for x in qkv()], captured()
    rich = op(RICH, backend)
    o, lse = rich(*inputs, return_lse=True, **arguments)
    q, k, v = inputs
    part = rich(
        q[1:, 2:, 10:25], k[1:, 1:], v[1:, 1:], return_lse=True,
        b_start=1, h_start=2, q_start=10, q_total=37, **arguments,
    )  # fmt: skip
    torch.testing.assert_close(part, (o[1:, 2:, 10:25], lse[1:, 2:, 10:25]), rtol=1e-5, atol=1e-5)


def test_deterministic_follows_pytorch(backend: str) -> None:
    inputs, arguments = qkv(), captured()
    learned = [*inputs, arguments["slope"], arguments["table"]]

    def run(flag: bool | None) -> tuple[Tensor, ...]:
        return gradients(op(RICH, backend)(*inputs, deterministic=flag, **arguments), learned)

    expected = run(True)
    torch.use_deterministic_algorithms(True)
    try:
        found = run(None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_copies_and_pickles(backend: str) -> None:
    causal = op(CAUSAL, backend)
    assert copy.copy(causal) is causal
    assert copy.deepcopy({"op": causal})["op"] is causal
    again = pickle.loads(pickle.dumps(causal))
    assert again.name == causal.name
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(op(CAUSAL, "tiled"))


def test_loading_twice_is_one_operator(backend: str) -> None:
    first, second = (flashgen.loads(CAUSAL, backend=backend) for _ in range(2))
    assert first.name == second.name
    assert first.name.startswith("flashgen::causal_")
    inputs = qkv()
    assert torch.equal(first(*inputs), second(*inputs))
    assert op(CAUSAL, "reference").name != op(CAUSAL, "tiled").name


def test_what_an_op_tells(backend: str) -> None:
    causal = op(CAUSAL, backend)
    assert causal.spec.name == "causal"
    assert causal.backends == (("cpu", "reference") if backend == "cpu" else ("reference",))
    assert bool(causal.sources) == (backend == "cpu")  # the reference runs none
    assert causal.plan is not None
    assert causal.name in repr(causal)


def test_two_threads(backend: str) -> None:
    inputs, arguments = qkv(61), captured(61)
    learned = [*inputs, arguments["slope"]]
    expected = gradients(op(RICH, backend)(*inputs, deterministic=True, **arguments), learned)
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(5):
                found = gradients(op(RICH, backend)(*inputs, deterministic=True, **arguments), learned)
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append("differs")
        except Exception as exception:
            wrong.append(exception)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_with_different_shapes(backend: str) -> None:
    """Each finds its own call, whatever the other one has asked for last, and its own memory."""
    settings = [(n, heads) for n, heads in ((5, 4), (61, 4), (33, 2), (61, 2))]
    inputs = {each: qkv(each[0], heads=each[1]) for each in settings}
    causal = op(CAUSAL, backend)

    def results(setting: tuple[int, int]) -> list[Tensor]:
        o, lse = causal(*inputs[setting], return_lse=True)
        return [o, lse, causal(*inputs[setting]), *gradients((o, lse), inputs[setting])]

    expected = {each: results(each) for each in settings}
    wrong: list[object] = []
    start = threading.Barrier(2)

    def work(order: list[tuple[int, int]]) -> None:
        try:
            start.wait(60)
            wrong.extend(
                each
                for each in order * 20
                if not all(torch.equal(a, b) for a, b in zip(results(each), expected[each], strict=True))
            )
        except Exception as exception:
            wrong.append(exception)

    threads = [threading.Thread(target=work, args=(order,)) for order in (settings, settings[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(text: str, backend: str, inputs: list[Tensor], queue: Any) -> None:
    o = op(text, backend)(*inputs)
    torch.autograd.grad(o.sum(), inputs[0])
    queue.put(o.detach().numpy())


def test_a_forked_child(backend: str) -> None:
    """The parent has used its OpenMP threads; the child has none of them."""
    inputs = qkv(203)
    o = op(CAUSAL, backend)(*inputs)
    torch.autograd.grad(o.sum(), inputs)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(CAUSAL, backend, inputs, queue))
    child.start()
    found = torch.from_numpy(queue.get(timeout=60))
    child.join(60)
    assert child.exitcode == 0
    torch.testing.assert_close(found, o.detach())
