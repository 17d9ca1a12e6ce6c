"""Random specs over DTensors: each rank in turn in this process, with a group that sends nothing.

What needs no communication is computed by every rank alone, so that a group of ranks that do not exist is enough; what
they found is put together by its placements, and is what one device finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import flashgen
from flashgen import SpecError
from flashgen.ir.shape import Shape
from flashgen.op.dtensor_spread import indexed
from flashgen.verification.inputs import Inputs, random_inputs
from tools.fuzz.draws import Machine, draw

RANKS = 2
SHAPE = Shape(3, 4, 2, 9, 7)


@contextmanager
def rank_of(number: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=number, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def part(x: Tensor, dim: int, rank: int) -> Tensor:
    chunks = x.chunk(RANKS, dim)
    return chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)


def results(op: Any, given: Mapping[str, Tensor], rest: dict[str, Any], arriving: list[Tensor]) -> dict[str, Tensor]:
    """o, lse where there is one, and every gradient."""
    declared = {each.name for each in (*op.spec.tensors, *op.spec.params) if each.grad}
    # No operator of PyTorch's: those of DTensors remember the mesh of the first rank that asked.
    leaves = {name: x.requires_grad_(name in declared | {"q", "k", "v"}) for name, x in given.items()}
    has_lse = op.spec.weights.form.normalised
    captured = {name: x for name, x in leaves.items() if name not in "qkv"}
    found = op(leaves["q"], leaves["k"], leaves["v"], return_lse=has_lse, **captured, **rest)
    found = list(found) if has_lse else [found]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(found, list(wanted.values()), arriving[: len(found)])
    named = {f"d{name}": x for name, x in zip(wanted, gradients, strict=True)}
    return dict(zip(("o", "lse"), found, strict=False)) | named


def joined(parts: list[DTensor]) -> tuple[Tensor, Tensor]:
    """The whole, and how far rounding leaves it from that of one device: every part of a sum is rounded once."""
    (placement,) = parts[0].placements
    own = [each.to_local().detach() for each in parts]
    if isinstance(placement, Shard):
        x = torch.cat(own, placement.dim).double()
        return x, x.abs() * torch.finfo(own[0].dtype).eps
    terms = torch.stack(own).double() if placement.is_partial() else own[0].double()[None]
    return terms.sum(0), 2 * terms.abs().sum(0) * torch.finfo(own[0].dtype).eps


def check(op: Any, inputs: Inputs, axis: str, chance: random.Random) -> None:
    dim = {"b": 0, "h": 1}[axis]
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.captured}
    tensors |= {name: x for name, x in inputs.params.items() if isinstance(x, Tensor)}
    rest: dict[str, Any] = {name: x for name, x in inputs.params.items() if not isinstance(x, Tensor)}
    if op.spec.dropout is not None:
        rest["seed"] = 7
    arriving = [inputs.d_o, inputs.d_lse.to(torch.float64)]
    truth = results(op, tensors, rest, arriving)
    dims: dict[str, int | None] = {"q": dim, "k": dim, "v": dim}
    for each in op.spec.tensors:
        names = ("b",) if axis == "b" else ("h", "hkv")
        there = [d for d, name in indexed(op.spec, each).items() if name in names]
        dims[each.name] = chance.choice([None, *there])
    found: list[dict[str, Any]] = []
    for rank in range(RANKS):
        with rank_of(rank) as mesh:

            def placed(x: Tensor, dim: int | None, mesh: DeviceMesh = mesh, rank: int = rank) -> DTensor:
                own = x.detach() if dim is None else part(x.detach(), dim, rank)
                where = Replicate() if dim is None else Shard(dim)
                return DTensor.from_local(own, mesh, [where], run_check=False, shape=x.shape, stride=x.stride())

            own = {name: placed(x, dims.get(name)) for name, x in tensors.items()}
            found.append(results(op, own, rest, [placed(x, dim) for x in arriving]))
    for name, x in truth.items():
        whole, slack = joined([each[name] for each in found])
        error = (whole - x.double()).abs()
        same = (whole == x) | (whole.isnan() & x.isnan()) | (error <= slack + 1e-6 * (1 + x.double().abs()))
        assert same.all(), f"{name}: {error[~same]}"


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 130), marks=pytest.mark.slow)])
def test_random_specs_are_those_of_one_device(seeds: range) -> None:
    judged = 0
    for seed in seeds:
        drawn = draw(seed, Machine("cpu"))
        chance = random.Random(seed)
        try:
            op = flashgen.loads(drawn.case.text, backend="reference")
        except SpecError:
            continue
        inputs = random_inputs(op.spec, SHAPE, op.spec.head_dims[0], torch.float64, seed=seed)
        try:
            op(inputs.q, inputs.k, inputs.v, **inputs.named)
        except ValueError:  # an index that leaves its tensor at these sizes
            continue
        for axis in "bh":
            try:
                check(op, inputs, axis, chance)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {axis}: {drawn.case.text}\n{error}") from None
            judged += 1
    assert judged > len(seeds)
