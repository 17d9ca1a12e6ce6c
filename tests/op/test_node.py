"""Calls in C++ and their node of autograd: the very bits of the way through Python, and the same wherever that differs
from plain calls.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashgen.op import node
from flashgen.op.engine import Engine
from flashgen.store.cache import Cache
from tests.op.helpers import CAUSAL, SIGMOID, op, qkv, random
from tools.benchmarks import host_time

pytestmark = pytest.mark.slow  # the library takes half a minute to compile
TEXTS = {"causal": CAUSAL, "pointwise": SIGMOID, "wide": "attention wide { head_dim 64  mask i - j < 9 and i >= j }"}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    before = node.extension.module, node.extension.is_wanted, node.extension.why_not
    node.extension.load()
    assert node.extension.module is not None, node.extension.why_not
    yield
    node.extension.module, node.extension.is_wanted, node.extension.why_not = before


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a function where there is no such library."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(node.extension, "module", None)
            patch.setattr(node.extension, "is_wanted", False)
            return function()

    return run


def is_native(o: Tensor) -> bool:
    return o.grad_fn is not None and "Cpp" in type(o.grad_fn).__name__


def warmed(own: Callable[..., Any], x: list[Tensor], *gradients: Tensor) -> None:
    """Python runs each pass once, then C++ knows it."""
    for d_o in gradients or (torch.ones_like(own(*x)),):
        for _ in range(2):
            torch.autograd.grad(own(*x), x, d_o)
    assert is_native(own(*x))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def both(own: Callable[..., Any], x: list[Tensor], wanted: list[Tensor], gradient: Tensor) -> list[Tensor]:
    o = own(*x)
    return [o, *torch.autograd.grad(o, wanted, gradient)]


def shapes(name: str, dtype: torch.dtype) -> list[Tensor]:
    if name == "wide":
        return [random(1, 3, n, 64, seed=n, dtype=dtype).requires_grad_() for n in (50, 70, 70)]
    return qkv(v=16, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TEXTS)
def test_the_same_bits(name: str, dtype: torch.dtype, in_python: Callable[..., Any]) -> None:
    """However q, k, v and the gradient of o lie, and whichever gradients are wanted."""
    own, x = op(TEXTS[name], "cpu"), shapes(name, dtype)
    with torch.no_grad():
        turned = [y.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in x]
    for given in (x, turned, [x[0], turned[1], x[2]]):
        d_o = torch.randn_like(own(*given), memory_format=torch.contiguous_format)
        every = (d_o, d_o.transpose(1, 2).contiguous().transpose(1, 2), d_o[:1, :1, :1, :1].expand_as(d_o))
        warmed(own, given, *every)
        for gradient in every:
            for wanted in (given, given[:1], given[1:], given[1:2]):
                run = functools.partial(both, own, given, wanted, gradient)
                assert same(run(), in_python(run))
        with torch.no_grad():
            assert same([own(*given)], [in_python(functools.partial(own, *given))])
        assert not own(*(y.detach() for y in given)).requires_grad


PARAMS = """
attention params {
    head_dim 16
    param scaling: f32
    param window: i32 = 5
    scale scaling
    mask i >= j and i - j < window
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_come_with_each_call(
    dtype: torch.dtype, in_python: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers differ from call to call, and are none of what a plan keeps."""
    own, x = op(PARAMS, "cpu"), qkv(dtype=dtype)
    d_o = random(2, 4, 37, 16, seed=9, dtype=dtype)
    cases: list[dict[str, Any]] = [
        {"scaling": 0.25, "window": 9},
        {"scaling": torch.tensor(-1.5), "window": torch.tensor(3).int()},
        {"scaling": float("inf"), "window": 0},
        {"scaling": 0.5, "window": 40},
    ]
    expected = [in_python(functools.partial(both, functools.partial(own, **each), x, x, d_o)) for each in cases]
    warmed(functools.partial(own, **cases[0]), x, d_o)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "gradients", unexpected)
        for each, wanted in zip(cases, expected, strict=True):
            o = own(*x, **each)
            assert is_native(o)
            found = [o, *torch.autograd.grad(o, x, d_o)]
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, wanted, strict=True))
    o = own(*x, scaling=0.25)  # with a default, which Python computes
    assert not is_native(o)
    assert torch.equal(o, own(*x, scaling=0.25, window=5))


def test_params_are_those_of_the_forward_pass() -> None:
    own, x = op(PARAMS, "cpu"), qkv()
    scaling = torch.tensor(0.25)
    warmed(functools.partial(own, scaling=scaling, window=9), x)
    o = own(*x, scaling=scaling, window=9)
    assert is_native(o)
    scaling.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"param 'scaling' has shape \[1\]"):
        own(*x, scaling=scaling[None], window=9)


@pytest.mark.parametrize("text", [CAUSAL, SIGMOID])
def test_gradients_are_computed_without_python(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Python has computed those of each way that the gradient of o lies."""
    own, x = op(text, "cpu"), qkv()
    d_o = random(*own(*x).shape, seed=9)
    every = (d_o, d_o.transpose(1, 2).contiguous().transpose(1, 2))
    warmed(own, x, *every)
    expected = [torch.autograd.grad(own(*x), x, each) for each in every]
    monkeypatch.setattr(Engine, "gradients", unexpected)
    for each, gradients in zip(every, expected, strict=True):
        assert same(torch.autograd.grad(own(*x), x, each), gradients)


def unexpected(*_: Any) -> None:
    raise AssertionError("Python computed gradients")


def test_more_than_eight_ways_that_gradients_lie(in_python: Callable[..., Any]) -> None:
    own, x = op(CAUSAL, "cpu"), qkv()
    for n in range(12):
        wide = random(2, 4, 37, 16 + n, seed=n)[..., :16]
        for _ in range(3):
            found = both(own, x, x, wide)
        assert same(found, in_python(functools.partial(both, own, x, x, wide)))


def test_gradients_of_gradients(in_python: Callable[..., Any]) -> None:
    own, x = op(CAUSAL, "cpu"), qkv(9)
    d_o = random(2, 4, 9, 16, seed=9).requires_grad_()
    warmed(own, x, d_o.detach())

    def twice() -> Any:
        first = torch.autograd.grad(own(*x), x, d_o, create_graph=True)
        return torch.autograd.grad([y.square().sum() for y in first], [*x, d_o])

    assert same(twice(), in_python(twice))


@pytest.mark.parametrize("unpack", [lambda x: x.clone(), lambda x: x.mT.contiguous().mT, lambda x: x])
def test_hooks_of_saved_tensors(unpack: Callable[[Tensor], Tensor], in_python: Callable[..., Any]) -> None:
    """What they give back may lie otherwise than what was saved."""
    own, x = op(CAUSAL, "cpu"), qkv()
    d_o = random(2, 4, 37, 16, seed=9)
    warmed(own, x, d_o)

    def hooked() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda y: y, lambda y: unpack(y) if y.dim() == 4 and y.is_contiguous() else y
        ):
            o = own(*x)
        return torch.autograd.grad(o, x, d_o)

    def offloaded() -> Any:
        with torch.autograd.graph.save_on_cpu():
            o = own(*x)
        return torch.autograd.grad(o, x, d_o)

    for each in (hooked, offloaded):
        for found, wanted in zip(each(), in_python(each), strict=True):
            torch.testing.assert_close(found, wanted)


def test_checkpoints(in_python: Callable[..., Any]) -> None:
    own, x = op(CAUSAL, "cpu"), qkv()
    d_o = random(2, 4, 37, 16, seed=9)
    warmed(own, x, d_o)

    def again() -> Any:
        return torch.autograd.grad(checkpoint(lambda *y: own(*y).sin(), *x, use_reentrant=False), x, d_o)

    assert same(again(), in_python(again))


def test_what_autograd_refuses() -> None:
    own, x = op(CAUSAL, "cpu"), qkv()
    warmed(own, x)
    o = own(*x)
    o.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="second time"):
        o.sum().backward()  # type: ignore[no-untyped-call]
    k = x[1] * 1
    o = own(x[0], k, x[2])
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()  # type: ignore[no-untyped-call]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass."""


def test_who_watches_sees_the_operators() -> None:
    """Modes, transforms, casts and subclasses get what they got, both passes."""
    own, x = op(CAUSAL, "cpu"), qkv()
    warmed(own, x)
    with Watching() as watching:
        o = own(*x)
    assert any("flashgen" in name for name in watching.seen)
    assert not is_native(o)
    o = own(*x)
    assert is_native(o)
    with Watching() as watching:
        torch.autograd.grad(o, x, torch.ones_like(o))
    assert any("backward" in name for name in watching.seen)
    named = own(x[0].detach().as_subclass(Named).requires_grad_(), *x[1:])
    assert isinstance(named, Named)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(*x).dtype is torch.bfloat16
    found = torch.func.grad(lambda q: own(q, *x[1:]).sum())(x[0])
    torch.testing.assert_close(found, torch.autograd.grad(own(*x).sum(), x[0])[0])
    with torch.inference_mode():
        assert own(*x).is_inference()


def test_other_numbers_of_threads(in_python: Callable[..., Any]) -> None:
    own, x = op(CAUSAL, "cpu"), qkv()
    warmed(own, x)
    before = torch.get_num_threads()
    o = own(*x)
    try:
        torch.set_num_threads(before + 1)
        found = torch.autograd.grad(o, x, torch.ones_like(o))
    finally:
        torch.set_num_threads(before)
    assert same(found, in_python(lambda: torch.autograd.grad(own(*x), x, torch.ones_like(o))))


def test_threads_at_once() -> None:
    own, failed = op(CAUSAL, "cpu"), []

    def work(number: int) -> None:
        x = qkv(20 + number)
        wanted = None
        for _ in range(200):
            found = torch.autograd.grad(own(*x).square().sum(), x)
            wanted = wanted or found
            if not same(found, wanted):
                failed.append(number)

    workers = [threading.Thread(target=work, args=(number % 3,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


def test_mistakes_read_the_same(in_python: Callable[..., Any]) -> None:
    own, x = op(CAUSAL, "cpu"), qkv()
    warmed(own, x)
    for wrong in ([x[0], x[1][:1], x[2]], [x[0], x[1].double(), x[2]], [x[0], None, x[2]], [x[0].to("meta"), *x[1:]]):
        said = []
        for run in (lambda: own(*wrong), lambda: in_python(lambda: own(*wrong))):  # noqa: B023 - it runs at once
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                run()
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]


CALLBACKS = {
    "launch": ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    ),
    "clear": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p),
    "encode": ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    ),
    "stream": ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)),
}  # fmt: skip


class Recording(host_time.NoDriver):
    """Writes down what it is asked for, in C as in Python: pointers left out, as each call has its own."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.size_of_struct = 0
        own = {"launch": self._launch, "clear": self._clear, "encode": self._encode, "stream": self._on_host}
        self._kept = [CALLBACKS[name](function) for name, function in own.items()]

    def function(self, path: Any, name: str, shared_bytes: int) -> int:
        return 1000 + len(name)

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        self._launch(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)

    def clear(self, address: int, size: int, stream: int) -> None:
        self._clear(address, 0, size, stream)

    def stream(self) -> int:
        return 77

    def entry_points(self) -> tuple[int, int, int, int]:
        launch, clear, encode, stream = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept)
        return launch, clear, encode, stream

    def _launch(self, *given: Any) -> int:
        place = ctypes.cast(given[9], ctypes.POINTER(ctypes.c_void_p)).contents.value
        behind = ctypes.string_at((place or 0) + 96, self.size_of_struct - 96)  # the pointers
        self.launched.append((*given[:9], behind))
        return 0

    def _clear(self, address: int, value: int, size: int, stream: int) -> int:
        self.launched.append(("clear", value, size, stream))
        return 0

    def _encode(self, words: int, *given: Any) -> int:
        rank = given[1]

        def numbers(kind: Any, at: int, count: int) -> list[int]:
            return list((kind * count).from_address(at))

        shape = numbers(ctypes.c_uint64, given[3], rank), numbers(ctypes.c_uint64, given[4], rank - 1)
        box = numbers(ctypes.c_uint32, given[5], rank), numbers(ctypes.c_uint32, given[6], rank)
        self.encoded.append((given[0], rank, *map(tuple, (*shape, *box)), *given[7:]))
        return 0

    def _on_host(self, index: int, found: Any) -> int:
        found[0] = 77
        return 0


@pytest.mark.parametrize(
    ("clause", "params"),
    [
        ("", {}),
        ("mask causal and window_left(64)", {}),
        ("param scaling: f32  param cap: f32  scale scaling  score cap * tanh(s / cap)", {"scaling": 0.3, "cap": 7.0}),
    ],
    ids=["plain", "mask", "params"],
)
@pytest.mark.parametrize("n", [33, 4096])
def test_a_gpu_is_asked_for_the_same(
    clause: str, params: dict[str, Any], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches in their order, their numbers and bytes, what is cleared and described, as Python asks for them."""
    driver = Recording()
    monkeypatch.setattr(host_time, "NoDriver", lambda: driver)
    own = host_time.imitated(
        f"attention asked_{n}_{len(clause)} {{ head_dim 64 {clause} }}"
    )  # with an engine of its own
    x = [random(1, 2, n, 64, seed=k, dtype=torch.bfloat16).requires_grad_() for k in range(3)]
    d_o = random(1, 2, n, 64, seed=4, dtype=torch.bfloat16)
    provider = own._parts.kernels["cpu"]
    kernel = None if provider is None else provider(own.spec.head_dims[0], 0)
    assert kernel is not None
    driver.size_of_struct = len(kernel.layout.pack(*kernel.layout.values({})))
    found = []
    for _ in range(3):
        driver.launched.clear()
        driver.encoded.clear()
        o = own(*x, **params)
        torch.autograd.grad(o, x, d_o)
        found.append((list(driver.launched), is_native(o)))
    assert [native for _, native in found] == [False, True, True]
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(found[2][0]) >= 4
    assert len(driver.encoded) == 5
    assert {(each[0], each[1], each[-4], each[-2], each[-1]) for each in driver.encoded} == {(1, 3, 0, 2, 0)}


def test_plans_are_read_to_their_end() -> None:
    """Words that are missing are an error, not memory that is read."""
    with pytest.raises(RuntimeError, match="ends too early"):
        node.extension.module.plan(struct.pack("3q", 6, 1, 1), b"", print, torch.empty(0))


def test_nothing_is_compiled_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("0", "off"):
        monkeypatch.setenv(node.ENVIRONMENT_VARIABLE, choice)
        fresh = node.Extension()
        assert fresh.ask() is None
        assert not fresh.is_wanted
        assert node.ENVIRONMENT_VARIABLE in fresh.why_not


def test_it_comes_while_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler works in another process once a process has called often enough; here it finds it in the cache."""
    monkeypatch.setenv(node.ENVIRONMENT_VARIABLE, "")
    monkeypatch.setattr(Cache, "find", lambda *_: None)
    fresh = node.Extension()
    for _ in range(node.PATIENCE - 1):
        assert fresh.ask() is None
    assert fresh.is_wanted
    fresh.ask()
    for worker in threading.enumerate():
        if worker.name == "flashgen-node":
            worker.join()
    assert fresh.module is not None, fresh.why_not
