"""``op.decode``: each sequence over its rows of a cache is a part of a dense call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error

from ..op.helpers import op as loaded

CAUSAL = "attention causal { head_dim 64  mask causal }"
# Everything that positions, lengths and heads decide; what only training has.
POSITIONAL = """
attention positional {
    head_dim 64, 64/32
    tensor slope: f32[H]
    tensor by_key: f32[B, Nk]
    param ell: f32 = 1 / Nk
    score s - slope[h] * (i - j) + by_key[b, j] * ell
    mask causal and (i - j < 70 or j < 2)
    weights softmax(sink = slope[h])
    dropout 0.5
}
"""
WEIGHTS = "attention weighs { head_dim 64  mask causal  weights sigmoid(s) }"
B, H, HKV, CAPACITY = 3, 8, 2, 256
LENGTHS = torch.tensor([200, 5, 77], dtype=torch.int32)
PADDING = torch.tensor([3, 0, 70], dtype=torch.int32)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def captured(op: AttentionOp) -> dict[str, Any]:
    if op.spec.name != "positional":
        return {}
    return {"slope": random(H, seed=5).abs(), "by_key": random(B, CAPACITY, seed=6)}


def inputs(dtype: torch.dtype = torch.float32, queries: int = 1, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q = random(B, H, queries, 64, dtype=dtype)
    return q, random(B, HKV, CAPACITY, 64, seed=1, dtype=dtype), random(B, HKV, CAPACITY, width, seed=2, dtype=dtype)


def paged(cache: Tensor, page: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """The rows in shuffled pages, and where they are; NaN in pages of nobody."""
    each = CAPACITY // page
    places = torch.randperm(B * each + spare, generator=torch.Generator().manual_seed(page))[: B * each].view(B, each)
    pages = torch.full((B * each + spare, HKV, page, cache.shape[3]), torch.nan, dtype=cache.dtype)
    pages[places] = cache.view(B, HKV, each, page, cache.shape[3]).transpose(1, 2)
    return pages, places.int()


@pytest.mark.parametrize("backend", ["cpu", "reference", "tiled"])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("text", [CAUSAL, POSITIONAL, WEIGHTS])
def test_each_sequence_is_a_part_of_a_dense_call(text: str, queries: int, backend: str) -> None:
    op = loaded(text, backend)
    has_lse = op.spec.weights.form.normalised
    for dtype, tolerance in TOLERANCE.items():
        width = 32 if text == POSITIONAL else 64
        q, k, v = inputs(dtype, queries, width)
        given = captured(op)
        found = op.decode(q, k, v, LENGTHS, leftpad=PADDING, return_lse=has_lse, **given)
        exact = op.reference.decode(q, k, v, LENGTHS, leftpad=PADDING, return_lse=has_lse, **given)
        o, lse = found if has_lse else (found, None)
        truth, truth_lse = exact if has_lse else (exact, None)
        assert relative_error(o, truth) < tolerance
        if lse is not None and truth_lse is not None:
            assert relative_error(lse, truth_lse) < 1e-4
        for b, (length, before) in enumerate(zip(LENGTHS.tolist(), PADDING.tolist(), strict=True)):
            own: dict[str, Any] = {"slope": given["slope"], "by_key": given["by_key"][:, :length]} if given else {}
            if own:
                own["by_key"] = own["by_key"].clone()
            if op.spec.dropout is not None:
                own["dropout_p"] = 0.0
            part = op.reference(
                q[b : b + 1], k[b : b + 1, :, before:length], v[b : b + 1, :, before:length], q_start=length - queries,
                kv_start=before, q_total=length, kv_total=length, b_start=b, b_total=B,
                **own,
            )  # fmt: skip
            assert torch.equal(truth[b], part[0])


@pytest.mark.parametrize("page", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_pages_hold_the_same_rows(dtype: torch.dtype, page: int) -> None:
    op = loaded(CAUSAL, "cpu")
    q, k, v = inputs(dtype, 3)
    (k_pages, table), (v_pages, _) = paged(k, page), paged(v, page)
    for padding in (None, PADDING):
        dense = op.decode(q, k, v, LENGTHS, leftpad=padding)
        assert torch.equal(op.decode(q, k_pages, v_pages, LENGTHS, block_table=table, leftpad=padding), dense)
    exact = op.reference.decode(q, k_pages, v_pages, LENGTHS, block_table=table, leftpad=PADDING)
    assert (
        relative_error(op.decode(q, k_pages, v_pages, LENGTHS, block_table=table, leftpad=PADDING), exact)
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("page", [0, 4, 64])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_new_rows_are_written_first(backend: str, page: int) -> None:
    op = loaded(CAUSAL, backend)
    q, k, v = inputs(queries=2)
    new_k, new_v = random(B, HKV, 3, 64, seed=8), random(B, HKV, 3, 64, seed=9)
    want_k, want_v = k.clone(), v.clone()
    for b, length in enumerate(LENGTHS.tolist()):
        want_k[b, :, length : length + 3], want_v[b, :, length : length + 3] = new_k[b], new_v[b]
    wanted = op.decode(q, want_k, want_v, LENGTHS + 3)
    if not page:
        exact = op.reference.decode(q, k, v, LENGTHS, k=new_k, v=new_v)
        found = op.decode(q, k, v, LENGTHS, k=new_k, v=new_v)
        assert torch.equal(k, want_k)
        assert torch.equal(v, want_v)
    else:
        (k, table), (v, _) = paged(k, page), paged(v, page)
        exact = op.reference.decode(q, k, v, LENGTHS, k=new_k, v=new_v, block_table=table)
        found = op.decode(q, k, v, LENGTHS, k=new_k, v=new_v, block_table=table)
        assert torch.equal(k[table.long()].transpose(1, 2).flatten(2, 3), want_k)
    assert torch.equal(found, wanted)
    assert relative_error(found, exact) < 2e-6


def test_entries_of_a_larger_cache() -> None:
    op = loaded(CAUSAL, "cpu")
    q, k, v = inputs()
    entries = torch.tensor([3, 0, 4], dtype=torch.int32)
    larger = [torch.full((5, HKV, CAPACITY, 64), torch.nan) for _ in range(2)]
    for to, x in zip(larger, (k, v), strict=True):
        to[entries.long()] = x
    found = op.decode(q, larger[0], larger[1], LENGTHS, cache_batch_idx=entries)
    assert torch.equal(found, op.decode(q, k, v, LENGTHS))


def test_a_loop_is_the_whole() -> None:
    """Row by row with a cache, and at once."""
    op = loaded(POSITIONAL, "cpu")
    q, k, v = random(B, H, 20, 64), random(B, HKV, 20, 64, seed=1), random(B, HKV, 20, 32, seed=2)
    slope = random(H, seed=3).abs()
    k_cache, v_cache, by_key = torch.zeros(B, HKV, 32, 64), torch.zeros(B, HKV, 32, 32), torch.zeros(B, 32)
    rows = [
        op.decode(
            q[:, :, n : n + 1],
            k_cache,
            v_cache,
            n,
            k=k[:, :, n : n + 1],
            v=v[:, :, n : n + 1],
            slope=slope,
            by_key=by_key,
        )
        for n in range(20)
    ]
    whole = op.reference(q, k, v, slope=slope, by_key=torch.zeros(B, 20), dropout_p=0.0)
    assert relative_error(torch.cat(rows, 2), whole) < 2e-6


def test_threads_change_no_bit_and_empty_sequences_give_zeros() -> None:
    op = loaded(CAUSAL, "cpu")
    q, k, v = inputs()
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(op.decode(q, k, v, LENGTHS, leftpad=torch.tensor([0, 5, 0])))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not found[0][1].any()


# Weights that count from a maximum, that are bounded, that are divided, and that have no denominator; a sink; tiles of
# queries; a window that leaves most of a cache alone; scores so far apart that parts of the keys weigh nothing.
SPLIT = {
    "softmax": "score s * 30 - abs(i - j) * 2",
    "capped": "score 20 * tanh(s / 20)  weights softmax(sink = 1.5)",
    "sink": "score s - 0.1 * (i - j)  weights softmax(sink = 0.5)",
    "far": "score s - 1000 * (i - j)",
    "relu": "weights normalize(relu(s))",
    "squares": "weights normalize2(s)",
    "sigmoid": "weights sigmoid(s - 3)",
    "window": "mask causal and i - j < 9",
    "distance": "score s - 0.3 * sqdist",
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_splits_of_the_keys_are_merged(name: str, queries: int) -> None:
    """Of so many as are asked for, on any number of threads; more than there are tiles of keys, too."""
    text = SPLIT[name] if "mask" in SPLIT[name] else f"mask causal  {SPLIT[name]}"
    op = loaded(f"attention split {{ head_dim 64  schedule {{ Bc = 16 }}  {text} }}", "cpu")
    has_lse = op.spec.weights.form.normalised
    threads = torch.get_num_threads()
    lengths = torch.tensor([200, 40, 77])
    for dtype, tolerance in TOLERANCE.items():
        q, k, v = inputs(dtype, queries)
        padding = torch.tensor([3, 0, 37])
        exact = op.reference.decode(q, k, v, lengths, leftpad=padding, return_lse=has_lse)
        for splits in (1, 2, 5, 100):
            found = []
            for count in (1, 3):
                torch.set_num_threads(count)
                options: dict[str, Any] = {"leftpad": padding, "num_splits": splits, "return_lse": has_lse}
                found.append(op.decode(q, k, v, lengths, **options))
            torch.set_num_threads(threads)
            for x, y, truth in zip(*(each if has_lse else (each,) for each in (*found, exact)), strict=True):
                assert torch.equal(x, y)
                assert torch.equal(x.isinf(), truth.isinf())
                assert relative_error(x.masked_fill(x.isinf(), 0), truth.masked_fill(truth.isinf(), 0)) < 2 * tolerance


@pytest.mark.parametrize("queries", [1, 4])
def test_long_caches_and_dense_calls_of_few_queries_are_split(queries: int) -> None:
    """By lengths alone: the bits are those of any number of threads."""
    op = loaded(POSITIONAL, "cpu")
    q, k, v = random(2, H, queries, 64), random(2, HKV, 5000, 64, seed=1), random(2, HKV, 5000, 32, seed=2)
    given: dict[str, Any] = {"slope": 0.01 * random(H, seed=5).abs(), "by_key": random(2, 5000, seed=6)}
    lengths = torch.tensor([5000, 4097])
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        whole = op(q, k, v, q_start=5000 - queries, dropout_p=0.0, return_lse=True, **given)
        found.append((*op.decode(q, k, v, lengths, return_lse=True, **given), *whole))
    torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for each in found[1:] for x, y in zip(each, found[0], strict=True))
    exact = op.reference.decode(q, k, v, lengths, return_lse=True, **given)
    dense = op.reference(q, k, v, q_start=5000 - queries, dropout_p=0.0, return_lse=True, **given)
    for x, y in zip(found[0], (*exact, *dense), strict=True):
        assert relative_error(x, y) < 4e-6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_compiled_whole() -> None:
    op = loaded(CAUSAL, "cpu")
    q, k, v = inputs()
    row = random(B, HKV, 1, 64, seed=4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        return op.decode(q, k, v, lengths, k=row, v=row) * 2

    mine, theirs = (k.clone(), v.clone()), (k.clone(), v.clone())
    assert torch.equal(step(q, *mine, LENGTHS), op.decode(q, *theirs, LENGTHS, k=row, v=row) * 2)
    assert torch.equal(mine[0], theirs[0])


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


ROW = torch.zeros(3, 2, 1, 64)
WRONG: dict[str, dict[str, Any]] = {
    "make 257 rows of sequence 1; the cache has room for 256": {"cache_seqlens": i32(1, 257, 3)},
    "make -1 rows of sequence 2": {"cache_seqlens": i32(1, 2, -1)},
    "'leftpad' of sequence 0 is -2": {"leftpad": i32(-2, 0, 0)},
    "'leftpad' of sequence 2 is 9, of 8 rows": {"leftpad": i32(0, 0, 9)},
    "sequence 1 has 0 rows in the cache, but 1 queries": {"cache_seqlens": i32(1, 0, 3)},
    "'cache_batch_idx' of sequence 1 is 3; the cache has 3 entries": {"cache_batch_idx": i32(0, 3, 1)},
    "'cache_batch_idx' of sequence 2 is -1": {"cache_batch_idx": i32(0, 2, -1)},
    "'block_table' of sequence 2 names page 3 at 0": {"block_table": i32(0, 1, 3)[:, None]},
    "'block_table' of sequence 0 names page -1 at 0": {"block_table": i32(-1, 1, 2)[:, None]},
    "'block_table' has shape": {"block_table": i32(0, 1, 2)},
    "'cache_seqlens' has shape": {"cache_seqlens": i32(1, 2)},
    "'cache_seqlens' is torch.float32": {"cache_seqlens": torch.ones(3)},
    "'cache_seqlens' must be a tensor \\(i32\\[3\\]\\) or an int, not list": {"cache_seqlens": [1, 2, 3]},
    "make 2147483647 rows of sequence 1": {"cache_seqlens": torch.tensor([1, 5 + 2**32, 3])},
    "make 2147483647 rows of sequence 0": {"cache_seqlens": 5 + 2**32},
    "'leftpad' of sequence 1 is 2147483647, of 6 rows": {"leftpad": torch.tensor([0, 2**32, 0])},
    "'cache_batch_idx' of sequence 0 is 2147483647": {"cache_batch_idx": torch.tensor([2**32, 1, 2])},
    "names page 2147483647 at 0": {"block_table": torch.tensor([[0], [2**32], [2]])},
    "'cache_batch_idx' goes with a": {"cache_batch_idx": i32(0, 1, 2), "block_table": i32(0, 1, 2)[:, None]},
    "what is new make 257 rows of sequence 0": {"cache_seqlens": 256, "k": ROW, "v": ROW},
    "what is new make 2147483648 rows of sequence 0": {"cache_seqlens": 2**40, "k": ROW, "v": ROW},
    "'cache_seqlens' of sequence 1 is -1; rows before": {"cache_seqlens": i32(1, -1, 3), "k": ROW, "v": ROW},
    "'cache_batch_idx' of sequence 1 is 7; the cache has 3": {"cache_batch_idx": i32(0, 7, 1), "k": ROW, "v": ROW},
    "of sequence 1 names page -3 at 0": {"block_table": i32(0, -3, 2)[:, None], "k": ROW, "v": ROW},
    "'k' has shape": {"k": torch.zeros(3, 1, 1, 64), "v": ROW},
    "at the same place": {"cache_batch_idx": i32(0, 0, 1), "cache_seqlens": 8, "k": ROW, "v": ROW},
    "dimension 0 must be 3, the batch size": dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 2, 256, 64)),
    "'v_cache' has shape": {"v_cache": torch.zeros(3, 2, 255, 64)},
    "unknown argument 'page_table'": {"page_table": i32(0, 1, 2)},
}  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_named(said: str, backend: str) -> None:
    op = loaded(CAUSAL, backend)
    q, k, v = inputs()
    right: dict[str, Any] = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": i32(4, 6, 8)}
    op.decode(**right)
    for function in (op.decode, op.reference.decode):
        with pytest.raises((ValueError, TypeError), match=said):
            function(**{**right, **WRONG[said]})
    assert torch.equal(k, inputs()[1]), "nothing is written"


def test_samples_of_vmap_write_to_the_cache() -> None:
    op = loaded(CAUSAL, "reference")
    q, k, v, row = (torch.stack([x, -2 * x]) for x in (*inputs(), random(B, HKV, 1, 64, seed=4)))
    k_one, v_one = k.clone(), v.clone()

    def step(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Any:
        return op.decode(q, k, v, LENGTHS, k=row, v=row)

    found = torch.vmap(step)(q, k, v, row)
    assert torch.equal(found, torch.stack([step(*each) for each in zip(q, k_one, v_one, row, strict=True)]))
    assert torch.equal(k, k_one)
    assert torch.equal(v, v_one)


def test_what_inference_mode_leaves_behind_serves_autograd() -> None:
    """Tensors that calls of a batch size have in common are saved for backward."""
    op = loaded(CAUSAL, "reference")
    q, k = torch.randn(11, H, 1, 64), torch.randn(11, HKV, 8, 64)
    with torch.inference_mode():
        op.decode(q, k, k, 5)
    assert op.decode(q.requires_grad_(), k, k, 5).requires_grad


def test_a_length_of_numpy_and_the_reference_in_parts() -> None:
    op, (q, k, v) = loaded(CAUSAL, "reference"), inputs()
    length: Any = np.int64(4)
    assert torch.equal(op.reference.decode(q, k, v, 4, num_splits=3), op.reference.decode(q, k, v, 4))
    assert torch.equal(op.decode(q, k, v, length), op.decode(q, k, v, 4))
    compiled = loaded(CAUSAL, "cpu")
    assert torch.equal(compiled.decode(q, k, v, 4, num_splits=2**70), compiled.decode(q, k, v, 4, num_splits=2**31 - 1))


def test_what_is_not_there_is_refused_by_name() -> None:
    op = loaded(CAUSAL, "cpu")
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"'k_cache' is torch\.float16, but 'q' is torch\.float32; q, k_cache and"):
        op.decode(q, k.half(), v, 4)
    with pytest.raises(ValueError, match="'k_descale' goes with a cache of 8 bits"):
        op.decode(q, k, v, 4, k_descale=torch.ones(3, 2))
    for function in (op.decode, op.reference.decode):
        with pytest.raises(ValueError, match="'num_splits' is -1"):
            function(q, k, v, 4, num_splits=-1)
    with pytest.raises(ValueError, match="k and v are written to the cache together"):
        op.decode(q, k, v, 4, k=k[:, :, :1])
    with pytest.raises(RuntimeError, match="decode has no gradients"):
        op.decode(q.requires_grad_(), k, v, 4).sum().backward()


def test_a_cache_holds_no_graph_of_what_is_written() -> None:
    op = loaded(CAUSAL, "reference")
    q, k, v = inputs()
    rows = random(B, HKV, 1, 64, seed=4).requires_grad_()
    o = op.decode(q, k, v, LENGTHS, k=rows, v=rows)
    assert k.grad_fn is None
    assert not k.requires_grad
    with pytest.raises(RuntimeError, match="decode has no gradients"):
        o.sum().backward()
    exact = op.reference.decode(q, *inputs()[1:], LENGTHS, k=rows, v=rows)
    assert relative_error(o.detach(), exact.detach()) < 2e-6
    assert torch.autograd.grad(exact.sum(), rows)[0].any(), "the formula has gradients"


@pytest.mark.parametrize("heads", [(8, 2), (48, 2), (10, 2), (34, 1), (3, 3)])
@pytest.mark.parametrize("text", [CAUSAL, WEIGHTS, "attention dropped { head_dim 64  mask causal  dropout 0.5 }"])
def test_heads_of_one_query_are_rows(text: str, heads: tuple[int, int]) -> None:
    """Of dense calls, too: more heads than a vector has lanes, numbers that do not divide it, none that share."""
    op = loaded(text, "cpu")
    has_lse = op.spec.weights.form.normalised
    options: dict[str, Any] = {"seed": 3} if op.spec.dropout is not None else {}
    for dtype, tolerance in TOLERANCE.items():
        q = random(B, heads[0], 1, 64, dtype=dtype).requires_grad_()
        k, v = (random(B, heads[1], 90, 64, seed=n, dtype=dtype).requires_grad_() for n in (1, 2))
        options["return_lse"] = has_lse
        found = op(q, k, v, q_start=70, **options)
        exact = op.reference(q, k, v, q_start=70, **options)
        for x, y in zip(found, exact, strict=True) if has_lse else ((found, exact),):
            assert relative_error(x.detach(), y.detach()) < tolerance
        o, truth = (found[0], exact[0]) if has_lse else (found, exact)
        own = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        for x, y in zip(own, torch.autograd.grad(truth.square().sum(), (q, k, v)), strict=True):
            assert relative_error(x, y) < 8 * tolerance
        if op.spec.dropout is None:
            length = torch.full((B,), 71, dtype=torch.int32)
            decoded = op.decode(q.detach(), k.detach(), v.detach(), length)
            assert relative_error(decoded, truth.detach()) < tolerance


def test_rows_that_are_heads_read_nothing_behind_a_tensor() -> None:
    """What the mask reads of a row is read at its position alone, at the end of the tensor."""
    op = loaded(
        "attention documents { head_dim 64  tensor doc: i32[B, Nk]  mask causal and doc[b, i] == doc[b, j] }", "cpu"
    )
    k, v = random(B, HKV, CAPACITY, 64, seed=1), random(B, HKV, CAPACITY, 64, seed=2)
    q = random(B, H, 1, 64)
    # Behind each row of the tensor stands another document: a row at a later position would see none of the keys.
    doc = torch.full((B, 2 * CAPACITY), -1, dtype=torch.int32)
    doc[:, :CAPACITY] = torch.arange(CAPACITY) // 100
    lengths = torch.full((B,), CAPACITY, dtype=torch.int32)
    found = op.decode(q, k, v, lengths, doc=doc[:, :CAPACITY])
    assert relative_error(found, op.reference.decode(q, k, v, lengths, doc=doc[:, :CAPACITY])) < 2e-6


def halves(form: str) -> tuple[Tensor, Tensor]:
    """Two caches in one tensor."""
    match form:
        case "of rows":
            return torch.zeros(B, HKV, CAPACITY, 128).chunk(2, -1)  # type: ignore[return-value]
        case "of pages":
            return torch.zeros(B, 2, HKV, CAPACITY, 64).unbind(1)  # type: ignore[return-value]
        case "of heads":
            return torch.zeros(B, CAPACITY, 2 * HKV, 64).transpose(1, 2).chunk(2, 1)  # type: ignore[return-value]
    return torch.zeros(2, B, HKV, CAPACITY, 64).unbind(0)  # type: ignore[return-value]


@pytest.mark.parametrize("form", ["of rows", "of pages", "of heads", "one behind the other"])
def test_rows_are_written_to_halves_of_a_tensor(form: str) -> None:
    op = loaded(CAUSAL, "reference")
    q, k, v = random(B, H, 1, 64), random(B, HKV, 1, 64, seed=1), random(B, HKV, 1, 64, seed=2)
    caches = halves(form)
    op.decode(q, *caches, LENGTHS, k=k, v=v)
    for cache, x in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[torch.arange(B), :, LENGTHS.long()], x[:, :, 0])


@pytest.mark.filterwarnings("ignore:Dynamo does not know")  # how what raised is run again
@pytest.mark.parametrize("door", ["op", "reference", "compiled"])
def test_caches_whose_rows_share_memory_are_refused(door: str) -> None:
    op = loaded(CAUSAL, "reference")
    decode = {"op": op.decode, "reference": op.reference.decode, "compiled": torch.compile(op.decode, backend="eager")}
    q, k, v = random(B, H, 1, 64), random(B, HKV, 1, 64, seed=1), random(B, HKV, 1, 64, seed=2)
    whole, other = torch.zeros(B, HKV, CAPACITY, 64), torch.zeros(B, HKV, CAPACITY, 64)
    expanded = torch.zeros(B, 1, CAPACITY, 64).expand(B, HKV, CAPACITY, 64)

    def refused(k_cache: Tensor, v_cache: Tensor, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            decode[door](q, k_cache, v_cache, LENGTHS, k=k, v=v)

    refused(expanded, whole, r"'k_cache' is expanded: along dimension 1 all 2 have the same memory.*k_cache.clone\(\)")
    refused(whole, expanded, r"'v_cache' is expanded")
    if door != "compiled":  # where tensors that are traced lie is not known
        refused(whole, whole, "'k_cache' and 'v_cache' share memory")
        wide = torch.zeros(B, HKV, CAPACITY + 1, 64)
        refused(wide[:, :, 1:], wide[:, :, :-1], "'k_cache' and 'v_cache' share memory")
        refused(wide[:, :, :-1], wide[:, :, 1:], "'k_cache' and 'v_cache' share memory")
    op.decode(q, expanded, expanded, LENGTHS)  # what is only read may share
    assert not whole.any()
    decode[door](q, whole, other, LENGTHS, k=k, v=v)
