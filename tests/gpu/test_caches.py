"""``op.decode`` on a GPU: numbers, graphs that are replayed on other lengths, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
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
