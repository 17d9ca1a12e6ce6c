"""``op.decode`` on a GPU: numbers, graphs that are replayed on other lengths, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.appending import append
from flashgen.op.cached import cache_of
from flashgen.op.signature import F8
from flashgen.verification.verify import relative_error
from tests.gpu.helpers import capturing
from tests.numeric.test_decode import LENGTHS, PADDING
from tests.numeric.test_decode_on_gpus import FORMS, RICH, captured, check, in_pages, inputs

cuda: Any = torch.cuda
CAUSAL = "attention causal { head_dim 128  mask causal }"


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("page", [0, 1, 16, 256])
@pytest.mark.parametrize("text", [CAUSAL, *FORMS.values()])
def test_each_sequence_is_a_part_of_a_dense_call(text: str, page: int) -> None:
    op = flashgen.loads(text, backend="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = inputs(op, 6, 3, dtype)
        given = captured(op, 6) | {"leftpad": PADDING}
        if page:
            (k, given["block_table"]), (v, _) = in_pages(k, page), in_pages(v, page)
        for splits in (0, 1, 5):
            check(op, q.cuda(), k.cuda(), v.cuda(), LENGTHS.cuda(), num_splits=splits, **on_gpu(given))


def long_cache() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 20_000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def test_long_caches_are_split_and_repeat() -> None:
    op = flashgen.loads(CAUSAL, backend="cuda")
    lengths = torch.tensor([19_999, 300], dtype=torch.int32, device="cuda")
    first, second = (check(op, *long_cache_of_seed(), lengths) for _ in range(2))
    assert torch.equal(first, second)


def long_cache_of_seed() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return long_cache()


def test_a_graph_takes_other_lengths() -> None:
    """New rows, too; lengths change in place."""
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, k, v = long_cache()
    row = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 17], dtype=torch.int32, device="cuda")
    op.decode(q, k, v, lengths, k=row, v=row)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        o = op.decode(q, k, v, lengths, k=row, v=row)
    for numbers in ((5000, 3), (0, 19_999)):
        lengths.copy_(torch.tensor(numbers))
        wanted = op.decode(q, k.clone(), v.clone(), lengths, k=row, v=row)
        graph.replay()
        assert torch.equal(o, wanted)


def test_graphs_on_two_streams_do_not_count_together() -> None:
    """Each has counters of its own, and calls beside them have others; none is cleared between replays."""
    op, given = flashgen.loads(CAUSAL, backend="cuda"), long_cache()
    lengths = torch.tensor([19_999, 15_000], dtype=torch.int32, device="cuda")
    expected = op.decode(*given, lengths, num_splits=4)
    graphs, outputs = [cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with cuda.graph(graph):
            outputs.append(op.decode(*given, lengths, num_splits=4))
    streams = [cuda.Stream() for _ in graphs]
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with cuda.stream(stream):
                graph.replay()
        assert torch.equal(op.decode(*given, lengths, num_splits=4), expected)
    cuda.synchronize()
    assert all(torch.equal(o, expected) for o in outputs)


def test_a_call_does_not_wait() -> None:
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, k, v = long_cache()
    lengths = torch.tensor([100, 17], dtype=torch.int32, device="cuda")
    op.decode(q, k, v, lengths)
    cuda.synchronize()
    cuda._sleep(1_000_000_000)  # about half a second
    done = cuda.Event()
    op.decode(q, k, v, lengths)
    done.record()
    assert not done.query()
    cuda.synchronize()


@pytest.mark.parametrize("bad", [(2**31 - 1, 3), (-4, 3), (1, 3)])
def test_numbers_that_nobody_checked(bad: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read outside of tensors: the device goes on working. Asked to, the host names the sequence."""
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, k, v = long_cache()
    q = q.expand(2, 32, 2, 128)
    lengths = torch.tensor(bad, dtype=torch.int32, device="cuda")
    op.decode(q, k, v, lengths)
    op.decode(q, k, v, 9, cache_batch_idx=lengths)
    cuda.synchronize()
    monkeypatch.setenv("FLASHGEN_CHECK_LENGTHS", "1")
    with pytest.raises(ValueError, match="sequence 0"):
        op.decode(q, k, v, lengths)


def test_a_graph_that_has_to_know_lengths_is_refused() -> None:
    op = flashgen.loads(RICH, backend="cuda")
    q, k, v = (x.cuda() for x in inputs(op, 6, 1, torch.bfloat16))
    given = on_gpu(captured(op, 6))
    op.decode(q, k, v, LENGTHS.cuda(), **given)
    lengths = LENGTHS.cuda()
    with pytest.raises(ValueError, match="wait for cache_seqlens"), capturing(q):
        op.decode(q, k, v, lengths, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F8])
@pytest.mark.parametrize("widths", [(128, 128), (40, 24), (33, 7)])
@pytest.mark.parametrize("page", [0, 7, 16])
def test_new_rows_lie_where_a_cpu_writes_them(page: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Among them some that were stored by the kernel byte by byte, and heads that lie side by side."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, new, rows = 3, 2, 5, page or 48
    entries = 21 if page else batch
    cached = [
        torch.randn(entries, rows, heads, width, generator=generator).to(dtype).transpose(1, 2) for width in widths
    ]
    fresh = [torch.randn(batch, new, heads, width, generator=generator).transpose(1, 2) for width in widths]
    fresh = [x.to(torch.bfloat16 if dtype is F8 else dtype) for x in fresh]
    given: dict[str, Any] = {"block_table": None, "cache_batch_idx": None, "leftpad": None}
    if page:
        given["block_table"] = torch.randperm(21, generator=generator).view(3, 7)
    if dtype is F8:
        given |= {"k_descale": torch.rand(batch, heads, generator=generator) + 0.1, "v_descale": 0.02}
    q, lengths = torch.empty(batch, heads, 1, widths[0]), torch.tensor([0, 11, 43])

    def written(device: str) -> list[Tensor]:
        own = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
        k, v = (x.to(device, copy=True) for x in cached)
        found = append(cache_of(q.to(device), k, v, lengths.to(device), **own), k, v, *(x.to(device) for x in fresh))
        return [x.cpu() for x in (k.view(torch.uint8), v.view(torch.uint8), found.lengths)]

    assert all(torch.equal(x, y) for x, y in zip(written("cuda"), written("cpu"), strict=True))


def test_sequences_that_fill_up_a_batch_have_no_rows() -> None:
    """Their pages are none: nothing of them is written, and the device goes on working."""
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, row = (torch.randn(3, heads, 1, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
    k = torch.randn(8, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[3, 5, -1, -1], [1, 2, 0, 7], [-1] * 4], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([20, 63, 0], dtype=torch.int32, device="cuda")
    mine, wanted = k.clone(), k.clone()
    wanted[5, :, 4], wanted[7, :, 15] = row[0, :, 0], row[1, :, 0]
    o = op.decode(q, mine, mine.clone(), lengths, k=row, v=row, block_table=table)
    assert torch.equal(mine, wanted)
    exact = op.reference.decode(q[:2], wanted, k, lengths[:2], k=row[:2], v=row[:2], block_table=table[:2].clamp(min=0))
    assert relative_error(o[:2], exact) < 0.01


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_new_rows_in_a_compiled_step() -> None:
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, k, v = long_cache()
    row = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 17], dtype=torch.int32, device="cuda")

    @torch.compile(fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        return op.decode(q, k, v, lengths, k=row, v=row) * 2

    mine, theirs = (k.clone(), v.clone()), (k.clone(), v.clone())
    with torch.no_grad():
        assert torch.equal(step(q, *mine, lengths), op.decode(q, *theirs, lengths, k=row, v=row) * 2)
    assert torch.equal(mine[0], theirs[0])
    assert not torch.equal(mine[0], k)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize(("queries", "splits", "count"), [(1, 4, 2), (1, 33, 2), (16, 16, 3)])
def test_a_step_is_few_kernels(queries: int, splits: int, count: int) -> None:
    """New rows, and parts, which the last one merges; where they leave much a third kernel does."""
    op = flashgen.loads(CAUSAL, backend="cuda")
    q, k, v = long_cache()
    q = q.expand(-1, -1, queries, -1).contiguous()
    row = torch.randn(2, 8, queries, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 17], dtype=torch.int32, device="cuda")
    op.decode(q, k, v, lengths, k=row, v=row, num_splits=splits)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op.decode(q, k, v, lengths, k=row, v=row, num_splits=splits)
        cuda.synchronize()
    kernels = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    assert len(kernels) == count, kernels
