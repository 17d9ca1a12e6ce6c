"""Lists of visits, shared or a call's own: the same results with and without, on any stream, in graphs, and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.hosts import schedule
from flashgen.hosts.cuda import CupyDriver
from flashgen.hosts.schedule import LIST_BYTES, MOST_LISTS, ListCache, SharedLists
from flashgen.ir.shape import Shape
from flashgen.op.op import AttentionOp
from tests.gpu.helpers import arguments, operator, results

cuda: Any = torch.cuda
LISTED = (
    *("bigbird", "dilated", "neighborhood_2d", "random_blocks"),
    *("sparse_butterfly", "sparse_fixed", "sparse_strided"),
)
TEXT = "attention salted { head_dim 64  dtype bf16  param salt: i32 = 1  mask hash(i // 32, j // 32, salt) % 8 == 0 }"
DOCUMENTS = """
attention %s { head_dim 64  dtype bf16  tensor doc: i32[B, Nk]  mask causal and same_document(doc) }
"""
LENGTHS = itertools.count(700)  # no length twice: each has lists of its own


def salted() -> AttentionOp:
    """A mask that reads a param."""
    return flashgen.loads(TEXT, backend="cuda")


class Watch:
    """Lets lists be found, at once, or not; keeps the caches that were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.list_caches: dict[int, ListCache[Any]] = {}
        self.asked, self.made, self.found = 0, 0, True
        own = ListCache.find

        def find(list_cache: ListCache[Any], lists: SharedLists, values: Any, make: Callable[[], Any]) -> Any:
            self.list_caches[id(list_cache)] = list_cache
            list_cache.eager = True
            self.asked += 1

            def count() -> Any:
                self.made += 1
                return make()

            return own(list_cache, lists, values, count) if self.found else None

        monkeypatch.setattr(ListCache, "find", find)

    def without(self, op: AttentionOp, inputs: Any, **options: Any) -> list[torch.Tensor]:
        """Results of blocks that find what they visit."""
        self.found = False
        try:
            return results(op, inputs, deterministic=True, **options)
        finally:
            self.found = True


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watching = Watch(monkeypatch)
    yield watching
    for list_cache in watching.list_caches.values():
        list_cache.most_bytes, list_cache.eager = LIST_BYTES, False


def same(own: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("shape", [Shape(2, 4, 2, 700, 700), Shape(1, 2, 2, 1333, 901)], ids=str)
def test_with_lists_and_without(name: str, shape: Shape, watch: Watch) -> None:
    op = operator(name)
    inputs = arguments(op, shape)
    expected = watch.without(op, inputs)
    watch.made = 0
    assert same(results(op, inputs, deterministic=True), expected)
    assert same(results(op, inputs, deterministic=True), expected)
    assert watch.made <= 3, "of forward, of keys, of queries"


def test_several_windows(watch: Watch) -> None:
    """More than 1024 tiles of keys, and of queries."""
    op = flashgen.loads(
        "attention wide { head_dim 64  dtype bf16  mask hash(i // 64, j // 64, 3) % 256 == 0 }", backend="cuda"
    )
    for lengths in ((300, 140_000), (140_000, 300)):
        inputs = arguments(op, Shape(1, 2, 2, *lengths))
        assert same(results(op, inputs, deterministic=True), watch.without(op, inputs))
    assert watch.made >= 4


def test_a_param_that_the_host_knows_and_one_that_it_does_not(watch: Watch) -> None:
    op = salted()
    inputs = arguments(op, Shape(1, 2, 2, 500, 500))
    named = {name: value for name, value in inputs.named.items() if name != "salt"}
    for salt in (1, 2, 1):
        own = op(inputs.q, inputs.k, inputs.v, salt=salt, **named)
        made = watch.made
        fetched = op(inputs.q, inputs.k, inputs.v, salt=torch.tensor(salt, dtype=torch.int32, device="cuda"), **named)
        assert watch.made == made
        assert torch.equal(own, fetched)
    assert watch.made == 2


def test_two_streams_ask_for_new_lists(watch: Watch) -> None:
    """One stream makes them, while it is kept busy; another one reads them at once."""
    op = operator("sparse_butterfly")
    streams = [cuda.Stream() for _ in range(3)]
    cases = [arguments(op, Shape(1, 4, 4, next(LENGTHS), 2000), seed=n) for n in range(8)]
    results(op, arguments(op, Shape(1, 4, 4, next(LENGTHS), 2000)))
    torch.cuda.synchronize()
    found = []
    for n, inputs in enumerate(cases):
        for stream in streams[n % 3 :] + streams[: n % 3]:
            with cuda.stream(stream):
                if stream is streams[n % 3]:
                    cuda._sleep(20_000_000)
                found.append((n, results(op, inputs, deterministic=True)))
    torch.cuda.synchronize()
    expected = [watch.without(op, inputs) for inputs in cases]
    assert all(same(own, expected[n]) for n, own in found)


def test_lists_go_while_kernels_wait_to_read_them(watch: Watch) -> None:
    """Their memory is not used for other lists before that."""
    op = salted()
    results(op, arguments(op, Shape(1, 4, 4, next(LENGTHS), 3000)))
    for list_cache in watch.list_caches.values():
        list_cache.most_bytes = 20_000  # three lists or so
    cases = [arguments(op, Shape(1, 4, 4, next(LENGTHS), 3000), seed=n) for n in range(24)]
    streams = [cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for n, inputs in enumerate(cases):
        with cuda.stream(streams[n % 2]):
            cuda._sleep(10_000_000)
            found.append(results(op, inputs, deterministic=True))
    torch.cuda.synchronize()
    assert watch.made > 24
    assert all(list_cache.bytes <= list_cache.most_bytes for list_cache in watch.list_caches.values())
    assert all(same(own, watch.without(op, inputs)) for own, inputs in zip(found, cases, strict=True))


def test_a_graph_outlives_lists(watch: Watch) -> None:
    """What is captured asks for none, before or after others do."""
    op = salted()
    inputs = arguments(op, Shape(1, 4, 2, next(LENGTHS), 900))
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):
        results(op, inputs)
    cuda.current_stream().wait_stream(beside)
    asked, graph = watch.asked, cuda.CUDAGraph()
    assert asked > 0
    with cuda.graph(graph):
        captured = results(op, inputs, deterministic=True)
    assert watch.asked == asked
    expected = watch.without(op, inputs)
    for list_cache in watch.list_caches.values():
        list_cache.most_bytes = list_cache.bytes
    for _ in range(4):
        results(op, arguments(op, Shape(1, 4, 2, next(LENGTHS), 900)))
    garbage = [torch.full((1 << 20,), -1, device="cuda") for _ in range(16)]
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, expected)
    del garbage


def test_the_host_waits_for_nothing(watch: Watch) -> None:
    """Not when lists are made, either."""
    op = operator("sparse_butterfly")
    for _ in range(2):  # kernels are compiled; what PyTorch asks the device for it keeps
        results(op, arguments(op, Shape(1, 4, 4, next(LENGTHS), 800)), deterministic=True)
    inputs = arguments(op, Shape(1, 4, 4, next(LENGTHS), 800))
    torch.cuda.synchronize()
    made = watch.made
    cuda._sleep(8_000_000_000)  # about four seconds: other processes may keep the host busy
    done = cuda.Event()
    own = results(op, inputs, deterministic=True)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert watch.made > made
    assert same(own, watch.without(op, inputs))


def test_lengths_that_change_do_not_fill_memory(watch: Watch) -> None:
    op = salted()
    inputs = arguments(op, Shape(1, 1, 1, 2048, 2048))
    for n in range(2 * MOST_LISTS):
        op(inputs.q[:, :, : 2048 - n], inputs.k, inputs.v)
        if n == MOST_LISTS:
            before = cuda.memory_reserved()
    (list_cache,) = watch.list_caches.values()
    assert watch.made == 2 * MOST_LISTS
    assert len(list_cache) <= MOST_LISTS
    assert cuda.memory_reserved() <= before


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own, of PyTorch's own
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # with which inductor begins
def test_graphs_of_inductor(watch: Watch) -> None:
    """What a warm-up makes is not memory of the graph, which has to be empty afterwards."""
    op = salted()
    inputs = arguments(op, Shape(1, 2, 2, next(LENGTHS), 640))

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return op(2 * q, k, v).sin()

    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        found = step(inputs.q, inputs.k, inputs.v).clone()
    assert watch.made > 0
    torch.testing.assert_close(found, op(2 * inputs.q, inputs.k, inputs.v).sin(), rtol=2e-2, atol=2e-2)


# Lists of a call ------------------------------------------------------------------------------------------------------


def test_documents_with_lists_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call makes its own; a captured one makes those of what its tensors hold when it is replayed."""
    found: list[str] = []
    function = CupyDriver.function

    def finding(driver: CupyDriver, path: Path, name: str, shared_bytes: int) -> int:
        found.append(name)
        return function(driver, path, name, shared_bytes)

    monkeypatch.setattr(CupyDriver, "function", finding)
    listed, bare = (flashgen.loads(DOCUMENTS % name, backend="cuda") for name in ("with_lists", "without_lists"))
    shape = Shape(2, 4, 2, 1500, 1500)
    first, second = (arguments(listed, shape, seed=seed) for seed in (0, 1))
    monkeypatch.setattr(schedule, "LEAST_BLOCKS", 1 << 30)
    expected = [results(bare, each, deterministic=True) for each in (first, second)]
    assert not any("order_of" in name for name in found)
    monkeypatch.setattr(schedule, "LEAST_BLOCKS", 1)
    assert same(results(listed, first, deterministic=True), expected[0])
    for which in ("forward", "keys", "queries"):
        assert any(f"order_of_{which}" in name for name in found)
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    held = arguments(listed, shape, seed=0)
    with cuda.stream(beside):
        results(listed, held, deterministic=True)
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = results(listed, held, deterministic=True)
    for inputs, truth in ((second, expected[1]), (first, expected[0])):
        for name in ("q", "k", "v", "d_o"):
            getattr(held, name).copy_(getattr(inputs, name))
        held.captured["doc"].copy_(inputs.captured["doc"])
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, truth)
