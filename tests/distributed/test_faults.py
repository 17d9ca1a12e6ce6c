"""What one rank does wrong is said on every rank, by name, and nobody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flashgen
from flashgen.distributed import context_parallel, partition
from tests.distributed.cases import mesh_of
from tests.distributed.ranks import Ranks, run

TEXT = "attention packed { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] }"


class Unready(torch.Tensor):
    """Raises what no argument's mistake does."""

    def dim(self) -> int:
        raise OSError("not there yet")


def _messages() -> list[str]:
    """What is said of each mistake, which rank 1 makes alone."""
    op = flashgen.loads(TEXT)
    other = flashgen.loads("attention causal { head_dim 16 mask causal }")
    is_wrong = dist.get_rank() == 1
    x, long = torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 11, 16)
    doc = torch.zeros(1, 20, dtype=torch.int32)
    starts, two = (torch.tensor(each, dtype=torch.int32) for each in ([0, 20], [0, 4, 20]))
    rows = [x[0].transpose(0, 1)] * 3
    dealt = partition(op, 20, 2, doc=doc)
    sharded, held = context_parallel(op, partition=dealt), context_parallel(op)

    def wrong(bad: Callable[[], Any], good: Callable[[], Any]) -> str:
        try:
            (bad if is_wrong else good)()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def right() -> Any:
        return sharded(x, x, x, doc=doc)

    return [
        wrong(lambda: sharded(long, long, long, doc=doc), right),
        wrong(lambda: sharded(x, x, x), right),
        wrong(lambda: sharded(x, x, x, doc=doc + torch.arange(20, dtype=torch.int32)), right),
        wrong(lambda: sharded(x, long, x, doc=doc), right),
        wrong(lambda: sharded(x.half(), x.half(), x.half(), doc=doc), right),
        wrong(lambda: sharded(x, x, x, doc=doc, return_lse=True), right),
        wrong(lambda: context_parallel(op, sums=False)(x, x, x, doc=doc), lambda: held(x, x, x, doc=doc)),
        wrong(lambda: context_parallel(other)(x, x, x), lambda: held(x, x, x, doc=doc)),
        wrong(lambda: held(x[..., :8], x[..., :8], x, doc=doc), lambda: held(x, x, x, doc=doc)),
        wrong(*[lambda: context_parallel(op, method="ulysses")(*[torch.zeros(1, 1, 10, 16)] * 3, doc=doc)] * 2),
        wrong(*[lambda: context_parallel(op, method="zigzag")] * 2),
        wrong(*[lambda: context_parallel(op, method=("ring", "ulysses"))] * 2),
        wrong(*[lambda: context_parallel(op, mesh_of((2, 1)), method=("ring", "all_gather"))] * 2),
        wrong(*[lambda: context_parallel(op, mesh_of((2, 1)))] * 2),
        wrong(*[lambda: context_parallel(op, method="ring", check=False)] * 2),
        wrong(lambda: sharded(x, x.to("meta"), x, doc=doc), right),
        wrong(lambda: sharded(x, x, x, doc=doc, window=3), right),
        wrong(lambda: sharded(x, x, x, doc=doc.to("meta")), right),
        wrong(lambda: sharded(x, x, x, doc=doc.to_sparse()), right),
        wrong(lambda: sharded(*[torch.nested.nested_tensor([x[0]], layout=torch.jagged)] * 3, doc=doc), right),
        wrong(lambda: sharded(Unready(), x, x, doc=doc), right),
        wrong(
            lambda: sharded.varlen(x, x, x, starts, doc=doc),
            lambda: sharded.varlen(*rows, starts, doc=doc),
        ),
        wrong(*[lambda: context_parallel(op, method="ring").varlen(*rows, two, doc=doc.expand(2, 20))] * 2),
        wrong(
            lambda: sharded.varlen(*rows, starts.to("meta"), doc=doc),
            lambda: sharded.varlen(*rows, starts, doc=doc),
        ),
        wrong(*[lambda: sharded.varlen(*rows, starts.bool(), doc=doc)] * 2),
        wrong(lambda: sharded(*[x.to("meta")] * 3, doc=doc), right),
        wrong(*[lambda: sharded(*[DTensor.from_local(x, mesh_of((2, 1)))] * 3, doc=doc)] * 2),
        wrong(*[lambda: context_parallel(op, method=cast("Any", None))] * 2),
        wrong(*[lambda: context_parallel(op, wide=cast("Any", "yes"))] * 2),
        wrong(lambda: torch.func.vmap(lambda x: sharded(x, x, x, doc=doc))(x[None]), right),
        wrong(*[lambda: context_parallel(op, cast("Any", "cp"))] * 2),
        wrong(*[lambda: context_parallel(op, partition=partition(op, 20, 3, doc=doc))] * 2),
        wrong(right, right),
    ]


def test_every_rank_says_what_one_did_wrong() -> None:
    first, second = run(_messages, 2)
    assert first == second
    expected = [
        "ValueError: rank 1: 'q' has 11 rows; the partition says 10",
        "TypeError: rank 1: missing argument 'doc': the spec declares tensor doc: i32[B, Nq]",
        "ValueError: ranks differ in what the mask reads",
        "ValueError: rank 1: q, k and v have 10, 11 and 10 rows",
        "ValueError: ranks differ in 'q': rank 0 has [1, 2, n, 16] torch.float32",
        "ValueError: ranks differ in options: rank 0 has return_lse False",
        "ValueError: ranks differ in options: rank 0 has return_lse False, dropout_p None, deterministic None, link",
        "ValueError: ranks differ in the op",
        "ValueError: rank 1: head dimension 8 of q and 16 of v; 'packed' is compiled for 16",
        "ValueError: method 'ulysses': 1 query heads cannot be dealt out to 2 ranks; 'ring' and 'all_gather' can",
        "ValueError: unknown method 'zigzag'; known are 'auto', 'all_gather', 'ring', 'ulysses'",
        "ValueError: 'method' names 2 methods, one for each dimension of a DeviceMesh; 'mesh' is NoneType",
        "ValueError: 'method' is ('ring', 'all_gather'); of two dimensions one is 'ulysses'",
        "ValueError: 'mesh' has the dimensions ('outer', 'inner'); choose the one that the sequence is spread over",
        "ValueError: check=False takes a partition and a method other than 'auto'",
        "ValueError: rank 1: 'k' is on meta, but 'q' is on cpu",
        "TypeError: rank 1: unknown argument 'window'",
        "ValueError: rank 1: tensor 'doc' is on meta, but 'q' is on cpu",
        "TypeError: rank 1: 'doc' has layout torch.sparse_coo; a dense tensor (torch.strided) is expected",
        "TypeError: rank 1: 'q' is a NestedTensor; context_parallel takes this rank's rows of all sequences",
        "RuntimeError: rank 1: OSError: not there yet",
        "ValueError: rank 1: 'q' has shape [1, 2, 10, 16]; [n, H, D] is expected",
        "ValueError: tensor 'doc' has shape [2, 20]; the spec declares [B, Nq] = [2, 16]",
        "ValueError: rank 1: 'cu_seqlens' is on meta and has no numbers; ranks have to know where sequences begin",
        "TypeError: rank 0: 'cu_seqlens' is torch.bool; a tensor of cumulative lengths (i32[B + 1]) is expected",
        "ValueError: rank 1: 'q' is on meta; gloo, which this group has, takes tensors on CPUs",
        "TypeError: rank 0: 'q' is a DTensor; context_parallel takes this rank's rows (to_local())",
        "ValueError: unknown method None; known are 'auto', 'all_gather', 'ring', 'ulysses'",
        "TypeError: 'wide' must be a bool, not str",
        "TypeError: rank 1: 'q' is a tensor of torch.func (vmap, grad, jvp): context_parallel has no rule for these",
        "TypeError: 'mesh' must be a DeviceMesh or a process group, not str",
        "ValueError: the partition is for 3 ranks; the group has 2",
        "nothing",
    ]
    for said, wanted in zip(first, expected, strict=True):
        assert said.startswith(wanted), said


def _leave() -> str:
    """Rank 1 ends before a call; the others say so."""
    if dist.get_rank() == 1:
        os._exit(1)
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    x = torch.zeros(1, 2, 10, 16)
    try:
        context_parallel(op, method="ring")(x, x, x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _leave_on_the_way() -> str:
    """The same in the middle of one: forward is done, and rank 1 does not go backward."""
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    x = torch.zeros(1, 2, 10, 16, requires_grad=True)
    o = context_parallel(op, method="ring")(x, x, x)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        o.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("leave", [_leave, _leave_on_the_way])
def test_a_rank_that_ends_is_named(leave: Callable[[], str]) -> None:
    started = time.monotonic()
    some = Ranks(2, seconds=30)
    said, _ = some.run(leave, may_end=True)
    some.end()
    assert said.startswith("rank 1 does not answer, asked for"), said
    assert time.monotonic() - started < 60


def _leave_before_heads_change_places() -> str:
    """Rank 1 of four ends where each is in one collective with all others."""
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    x = torch.zeros(1, 4, 10, 16)
    sharded = context_parallel(op, None, "ulysses", partition(op, 40, 4, method="contiguous"), check=False)
    sharded(x, x, x)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        sharded(x, x, x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("leave", [_leave, _leave_before_heads_change_places])
def test_of_many_ranks_the_one_that_ends_is_named(leave: Callable[[], str]) -> None:
    """It takes connections of others with it, who are there."""
    some = Ranks(4, seconds=30)
    found = some.run(leave, may_end=True)
    some.end()
    for said in (found[0], found[2], found[3]):
        assert said.startswith("rank 1 does not answer, asked for"), found


def _alone() -> float:
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    x = torch.randn(1, 2, 10, 16, requires_grad=True)
    found = context_parallel(op, method="ring")(x, x, x)
    return float((found - op(x, x, x)).abs().max().detach())


def test_a_mesh_of_one() -> None:
    assert run(_alone, 1)[0] < 1e-6


def _whole_and_back() -> list[float]:
    """``shard`` and ``gather``: values, gradients, and gradients of a penalty on gradients that mix all rows."""
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    dealt = partition(op, 23, dist.get_world_size())
    x = torch.arange(46.0, dtype=torch.float64).reshape(2, 23).requires_grad_()
    own = dealt.shard(x, 1)
    again = dealt.gather(own, 1)
    (gradient,) = torch.autograd.grad((again * x.detach()).sum(), x)
    rows = own.detach().requires_grad_()
    (of_whole,) = torch.autograd.grad(own.pow(3).sum(), x, create_graph=True)
    (of_rows,) = torch.autograd.grad(dealt.gather(rows, 1).mean().pow(3), rows, create_graph=True)
    (of_mean,) = torch.autograd.grad(of_rows.square().sum(), rows)
    expected = (36 / 46**2 * again.mean().pow(3)).detach()
    return [
        float((found - wanted).abs().max().detach())
        for found, wanted in (
            (again, x),
            (gradient, x),
            (torch.autograd.grad(of_whole.square().sum(), x)[0], 36 * x.pow(3)),
            (of_mean, expected.expand_as(rows)),
        )
    ]


def test_shard_and_gather_are_inverse_with_their_gradients() -> None:
    for found in run(_whole_and_back, 3):
        assert found[:3] == [0.0] * 3
        assert found[3] < 1e-9


def _of_a_group() -> list[str]:
    """What is said on each rank over a group and a mesh of the first alone, and over one with a backend a device."""
    op = flashgen.loads("attention causal { head_dim 16 mask causal }", backend="reference")
    first, mixed = dist.new_group([0]), dist.new_group(backend="cpu:gloo")
    mesh = DeviceMesh("cpu", [0])
    x = torch.zeros(1, 2, 10, 16)
    calls: list[Callable[[], Any]] = [
        lambda: context_parallel(op, first),
        lambda: context_parallel(op, mesh),
        lambda: partition(op, 10, 1).shard(x, group=first),
        lambda: context_parallel(op, mixed)(*[x.to("meta")] * 3),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_groups_that_lack_a_rank_or_have_several_backends() -> None:
    first, second = run(_of_a_group, 2)
    assert first[:3] == ["nothing"] * 3
    assert second[:3] == [
        f"ValueError: this rank (1) is none of the {whose}: only its ranks make the call"
        for whose in ("group's", "mesh's", "group's")
    ]
    assert (
        first[3]
        == second[3]
        == ("ValueError: rank 0: 'q' is on meta; gloo, which this group has, takes tensors on CPUs")
    )


def _of_no_rows() -> list[str]:
    """What is said where one rank holds all rows, or a sequence, that nobody can compute."""
    text = "attention drops { head_dim 8 dtype f32 param p: f32 = 1.0 / Nk dropout p }"
    op = flashgen.loads(text, backend="reference")
    has_all = dist.get_rank() == 0
    x = torch.zeros(1, 2, 20 if has_all else 0, 8)
    rows = [torch.zeros(19 if has_all else 1, 2, 8)] * 3
    calls: list[Callable[[], Any]] = [
        lambda: context_parallel(op, method="ring")(x, x, x, seed=1, dropout_p=1.0),
        lambda: context_parallel(op, method="all_gather")(x, x, x, seed=1, p=1.5),
        lambda: context_parallel(op, method="ring")(*[x.bfloat16()] * 3, seed=1),
        lambda: context_parallel(op, method="ring").varlen(*rows, torch.tensor([0, 19, 20]), seed=1),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(str(error))
    return said


def test_a_rank_without_rows_says_what_others_do() -> None:
    first, second = run(_of_no_rows, 2)
    assert first == second
    expected = [
        "'dropout_p' is 1.0; a drop probability lies in [0, 1)",
        "'dropout' is 1.5; a drop probability lies in [0, 1)",
        "rank 0: q, k and v are torch.bfloat16; 'drops' is built for torch.float32",
        "sequence 1, of 1 positions: 'dropout' is 1.0; a drop probability lies in [0, 1)",
    ]
    for found, wanted in zip(first, expected, strict=True):
        assert found.startswith(wanted), found


def _twice() -> list[str]:
    """What is said of a gradient penalty over ranks, by each method."""
    op = flashgen.loads("attention causal { head_dim 8 mask causal }", backend="reference")
    said = []
    for method in ("ring", "all_gather", "ulysses"):
        q, k, v = (torch.randn(1, 2, 10, 8).requires_grad_() for _ in range(3))
        o = context_parallel(op, method=cast("Any", method))(q, k, v)
        try:
            gradients = torch.autograd.grad(o.sum(), (q, k, v), create_graph=True)
            torch.autograd.grad(o.sum() + sum(each.square().sum() for each in gradients), (q, k, v))
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_gradients_of_gradients_are_refused_by_name() -> None:
    """What a backward pass sends is no node of a graph: second derivatives would lack it without a word."""
    for said in run(_twice, 2):
        assert all("(context_parallel) cannot be differentiated again" in each for each in said), said
