"""What calls of ops over ranks go through: ragged batches, checkpoints, torch.compile, repeats, no checks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flashgen.distributed import Partition, context_parallel, partition
from flashgen.distributed.partition import METHODS
from flashgen.verification.verify import relative_error
from tests.distributed.cases import op_of
from tests.distributed.ranks import run

SINKS = "attention sinks { head_dim 16 tensor z: f32[B, H] grad weights softmax(sink = z[b, h]) mask j < i }"
RAGGED = {
    "sinks": SINKS,
    "slopes": "attention slopes { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * abs(i - j) }",
    "table": "attention table { head_dim 16 tensor t: f32[Nq] grad score s * t[i] mask window(9) }",
    "dropped": "attention dropped { head_dim 16 mask causal dropout 0.3 }",
}
STARTS = [0, 17, 17, 60, 61, 90]


def _ragged(name: str, method: str, dealt: str | None) -> float:
    """The largest error of a rank's rows and gradients, beside those of one process."""
    op, total = op_of(RAGGED[name], "reference"), STARTS[-1]
    generator = torch.Generator().manual_seed(0)
    shapes = ((total, 4, 16), (total, 2, 16), (total, 2, 16), (total, 4, 16))
    q, k, v, d_o = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    starts, count = torch.tensor(STARTS, dtype=torch.int32), len(STARTS) - 1
    extents = {"slope": (4,), "z": (count, 4), "t": (43,)}
    captured = {
        each.name: torch.randn(extents[each.name], generator=generator).requires_grad_() for each in op.spec.tensors
    }
    options = {"seed": 3} if name == "dropped" else {}
    documents = op_of("attention d { head_dim 16 tensor doc: i32[Nq] mask doc[i] == doc[j] }", "reference")
    doc = torch.bucketize(torch.arange(total), starts[1:-1], right=True).int()
    held = None if dealt is None else partition(documents, total, dist.get_world_size(), method=dealt, doc=doc)
    rank = dist.get_rank()
    rows = torch.arange(total).tensor_split(dist.get_world_size())[rank] if held is None else held.positions(rank)

    def step(call: Any, given: list[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        o, lse = call(*leaves, return_lse=True, **captured, **options)
        loss = (o * given[3]).sum() + (lse.clamp_min(-100) * 0.3).sum()
        return [o.detach(), lse.T.detach(), *torch.autograd.grad(loss, [*leaves, *captured.values()])]

    truth = step(lambda *x, **named: op.varlen(*x, starts, starts, **named), [q, k, v, d_o])
    sharded = context_parallel(op, None, method, held)
    found = step(lambda *x, **named: sharded.varlen(*x, starts, **named), [x[rows] for x in (q, k, v, d_o)])
    far = [relative_error(x, y[rows]) for x, y in zip(found[:5], truth, strict=False)]
    summed = [relative_error(x, y) for x, y in zip(found[5:], truth[5:], strict=True)]
    return max(far) + max(0.0, *(x - 1e-5 for x in summed), 0.0)


def _without_positions(length: int) -> list[str]:
    """What goes wrong with tensors of whole sequences that are spread, of which some ranks have nothing, and back."""
    op = op_of("attention c { head_dim 16 mask causal }", "reference")
    world, found = dist.get_world_size(), []
    held = [partition(op, length, world, method=each) for each in METHODS]
    held.append(Partition(length, ((), ((0, length),), *[()] * (world - 2)), (0.0, 1.0, *[0.0] * (world - 2))))
    for dealt, (dim, shape) in itertools.product(held, ((2, (1, 2, length, 4)), (0, (length,)), (-1, (3, length)))):
        whole = torch.arange(float(math.prod(shape))).reshape(shape).requires_grad_()
        own = dealt.shard(whole, dim)
        again = dealt.gather(own, dim)
        (gradient,) = torch.autograd.grad((again * whole.detach()).sum(), whole)
        if not torch.equal(again, whole):
            found.append(f"{dealt.spans}, dimension {dim} of {shape}: {again}")
        if not torch.equal(gradient, whole):
            found.append(f"{dealt.spans}, dimension {dim} of {shape}, its gradient: {gradient}")
    return found


@pytest.mark.parametrize("length", [0, 1, 2])
def test_ranks_without_positions(length: int) -> None:
    assert run(_without_positions, 3, length) == [[], [], []]


def _too_long(method: str) -> str:
    """What a rank says of a sequence that is longer than what is captured, and that another rank holds."""
    op = op_of("attention short { head_dim 16 tensor t: f32[16] score s * t[i] }", "reference")
    rank, t = dist.get_rank(), torch.ones(16)
    q, k, v = (torch.ones(20, 2, 16) for _ in range(3))
    try:
        context_parallel(op, None, method).varlen(q, k, v, torch.tensor([0, 4, 8, 20, 23, 40], dtype=torch.int32), t=t)
    except ValueError as error:
        dist.barrier()  # nobody waits for anything else
        return f"{rank}: {error}"
    return f"{rank}: nothing"


def test_every_rank_refuses_a_sequence_that_one_holds() -> None:
    for method in ("ring", "all_gather"):
        for rank, said in enumerate(run(_too_long, 2, method)):
            assert said.startswith(f"{rank}: sequence 4, of 17 positions: 'short': index 'i' of tensor 't' is 16"), said


def _sinks_beyond(method: str) -> str:
    """What a rank says of a sink that no part of the keys reads, but rows whose keys are all there."""
    op = op_of(
        "attention beyond { head_dim 16 tensor z: f32[Nk // 64] weights softmax(sink = z[h]) mask causal }", None
    )
    q, k, v = (torch.ones(1, 2, 9, 16) for _ in range(3))
    try:
        context_parallel(op, None, method)(q, k, v, z=torch.ones(0))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_every_rank_refuses_a_sink_that_some_would_read() -> None:
    for method in ("ring", "all_gather", "ulysses"):
        for said in run(_sinks_beyond, 2, method):
            assert "index 'h' of tensor 'z' is 1, but dimension 0 of it has 0 entries" in said, (method, said)


def test_ragged_batches() -> None:
    for name in RAGGED:
        for method in ("ring", "all_gather", "ulysses"):
            dealt = "documents" if name == "slopes" else None
            assert max(run(_ragged, 2, name, method, dealt)) < 1e-9, (name, method)


def _around() -> dict[str, float]:
    op = op_of(SINKS, "reference")
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    z = torch.randn(1, 2, requires_grad=True)
    dealt = partition(op, 20 * dist.get_world_size(), dist.get_world_size())
    dist.broadcast(z.data, 0)
    sharded = context_parallel(op, None, "ring", dealt)

    def gradients(call: Any) -> list[Tensor]:
        o = call(q, k, v)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v, z))]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return sharded(q, k, v, z=z, deterministic=True)

    plain = gradients(call)

    def far(other: list[Tensor]) -> float:
        return max(float((x - y).abs().max()) for x, y in zip(plain, other, strict=True))

    unchecked = context_parallel(op, None, "ring", dealt, check=False)
    compiled = torch.compile(lambda q, k, v: call(2 * q, k, v) + 1, backend="eager")
    eager = gradients(lambda q, k, v: call(2 * q, k, v) + 1)
    again = gradients(compiled)
    return {
        "again": far(gradients(call)),
        "checkpoint": far(gradients(lambda *x: checkpoint(call, *x, use_reentrant=False))),
        "unchecked": far(gradients(lambda q, k, v: unchecked(q, k, v, z=z))),
        "compiled": max(float((x - y).abs().max()) for x, y in zip(eager, again, strict=True)),
    }


def test_checkpoints_and_compiled_models() -> None:
    for found in run(_around, 2):
        assert max(found.values()) == 0.0, found


class _Slopes(torch.nn.Module):
    """Attention of the rows of this rank, with a learned slope."""

    def __init__(self, sharded: Any) -> None:
        super().__init__()
        self.slope, self.sharded = torch.nn.Parameter(torch.linspace(0.1, 0.4, 4)), sharded

    def forward(self, *rows: Tensor) -> Tensor:
        found: Tensor = self.sharded(*rows, slope=self.slope)
        return found


def _under_ddp() -> tuple[str, float]:
    """What is said of sums that DDP makes again, and how far its own are from those of one process."""
    op = op_of(RAGGED["slopes"], "reference")
    dealt = partition(op, 60, dist.get_world_size())
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(1, 4, 60, 16, generator=generator) for _ in range(4))
    slope = torch.linspace(0.1, 0.4, 4, requires_grad=True)
    (truth,) = torch.autograd.grad((op(q, k, v, slope=slope) * d_o).sum(), slope)
    rows = [dealt.shard(x, rank=dist.get_rank()) for x in (q, k, v, d_o)]
    said = ""
    try:
        DistributedDataParallel(_Slopes(context_parallel(op, None, "ring", dealt)))(*rows[:3])
    except ValueError as error:
        said = str(error)
    model = DistributedDataParallel(_Slopes(context_parallel(op, None, "ring", dealt, sums=False)))
    (model(*rows[:3]) * rows[3]).sum().backward()
    gradient = model.module.slope.grad
    assert gradient is not None
    return said, relative_error(gradient * dist.get_world_size(), truth)  # DDP takes the mean


def test_ddp_adds_up_gradients_once() -> None:
    for said, error in run(_under_ddp, 2):
        assert said.startswith("DistributedDataParallel would add up the gradients of 'slope' over ranks again")
        assert error < 1e-5


DOCUMENTS = "attention documents { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal }"


def _looked_at() -> tuple[list[float], list[int]]:
    """Calls whose ranks do not ask each other: errors, and how often the mask was looked at before each."""
    op, N = op_of(DOCUMENTS, "reference"), 60
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 16, generator=generator) for _ in range(3))
    doc = torch.zeros(1, N, dtype=torch.int32)
    dealt = partition(op, N, dist.get_world_size(), method="contiguous", doc=doc)
    sharded = context_parallel(op, None, "ring", dealt, check=False)
    errors, looks = [], []

    def call(doc: Tensor) -> None:
        rows = [dealt.shard(x, rank=dist.get_rank()) for x in (q, k, v)]
        errors.append(relative_error(sharded(*rows, doc=doc), dealt.shard(op(q, k, v, doc=doc), rank=dist.get_rank())))
        looks.append(len(sharded._preparation._known))

    call(doc)
    call(doc)
    doc[:, 20:] = 1  # counted by PyTorch
    call(doc)
    call(doc)
    call(torch.ones_like(doc))
    with torch.inference_mode():
        call(torch.ones_like(doc))  # where nothing is counted, nothing is remembered
    return errors, looks


def test_a_mask_is_looked_at_again_where_what_it_reads_was_written() -> None:
    for errors, looks in run(_looked_at, 2):
        assert max(errors) < 1e-6, errors
        assert looks == [1, 1, 2, 2, 3, 3]


def _asked_again() -> tuple[list[float], list[str], int]:
    """Calls whose ranks ask each other, again and again: errors, what is said, how many are remembered."""
    text = "attention again { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal dropout 0.2 }"
    op, rank, generator = op_of(text, "reference"), dist.get_rank(), torch.Generator().manual_seed(0)
    sharded = context_parallel(op, None, "ring")
    errors, said = [], []

    def call(lengths: list[int], doc: Tensor, seed: int, **more: Any) -> None:
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        q, k, v = (torch.randn(1, 2, ends[-1], 16, generator=generator) for _ in range(3))
        rows = [x[:, :, ends[rank] : ends[rank + 1]] for x in (q, k, v)]
        try:
            o = sharded(*rows, doc=doc, seed=seed, **more)
        except ValueError as error:
            said.append(str(error))
            return
        errors.append(relative_error(o, op(q, k, v, doc=doc, seed=seed)[:, :, ends[rank] : ends[rank + 1]]))

    doc = (torch.arange(40) // 15).to(torch.int32)[None]
    call([20, 20], doc, 1)
    call([20, 20], doc, 2)  # another seed
    call([11, 29], doc, 2)  # held otherwise
    call([20, 20], doc, 2)
    other = doc.clone()
    call([20, 20], other if rank else doc, 3)  # which holds the same
    other[:, 7] = 5
    call([20, 20], other if rank else doc, 3)
    call([20, 20], doc, 3, deterministic=bool(rank))
    call([20, 20], doc, 4)
    return errors, said, len(sharded._preparation._known)


def test_ranks_that_ask_each_other_find_what_changed() -> None:
    for errors, said, remembered in run(_asked_again, 2):
        assert len(errors) == 6
        assert max(errors) < 1e-6, errors
        assert [each.split(":")[0] for each in said] == [
            "ranks differ in what the mask reads",
            "ranks differ in options",
        ]
        assert remembered <= 8


FEW_BITS = "attention few { head_dim 16 tensor near: bf16[Nk] grad score s + near[i - j] mask causal dtype f32 }"


def _few_bits(backend: str, method: str, lengths: list[int], sums: bool = True) -> float:
    """How far gradients of a table in bfloat16 are from those in float64, in halves of its last bit.

    ``lengths`` are those of the sequences of a ragged batch; of one: the call is dense. Without ``sums`` a rank has the
    gradients of its own rows.
    """
    op, total = op_of(FEW_BITS, backend), sum(lengths)
    generator, starts = torch.Generator().manual_seed(0), torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v, d_o = (torch.randn(total, 3, 16, generator=generator) for _ in range(4))
    near = torch.randn(max(lengths), generator=generator).bfloat16()
    rows = torch.arange(total).tensor_split(dist.get_world_size())[dist.get_rank()]

    def gradient(call: Any, given: list[Tensor], near: Tensor, starts: tuple[Tensor, ...]) -> Tensor:
        leaf = near.clone().requires_grad_()
        q, k, v, d_o = (x.transpose(0, 1)[None] for x in given) if len(lengths) == 1 else given
        o = call(q, k, v, near=leaf) if len(lengths) == 1 else call.varlen(q, k, v, *starts, near=leaf)
        (found,) = torch.autograd.grad(o, leaf, d_o.to(o.dtype))
        return found

    sharded = context_parallel(op, None, method, sums=sums)
    wanted = d_o if sums else torch.zeros_like(d_o).index_copy(0, rows, d_o[rows])
    truth = gradient(op.reference, [x.double() for x in (q, k, v, wanted)], near.double(), (starts, starts))
    found = gradient(sharded, [x[rows] for x in (q, k, v, d_o)], near, (starts,))
    assert found.dtype is torch.bfloat16
    return float(((found - truth).abs() / (truth.abs() * 2.0**-8 + truth.abs().max() * 1e-5)).max())


def test_gradients_of_few_bits_are_rounded_once() -> None:
    for backend in ("reference", "cpu"):
        for method in ("ring", "all_gather", "ulysses"):
            for lengths in ([60], [3, 9, 1, 5, 2, 40]):
                for far in run(_few_bits, 3, backend, method, lengths):
                    assert far < 1.0, (backend, method, lengths, far)
    for far in run(_few_bits, 2, "reference", "ring", [3, 9, 1, 5, 2, 40, 7], False):
        assert far < 1.0, far
