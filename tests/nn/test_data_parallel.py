"""Modules under DDP and FSDP2, with two processes that speak gloo: this one, which has started already, and another."""

# mypy: disable-error-code="no-untyped-call,attr-defined,union-attr,arg-type"

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashgen
from flashgen.nn import MultiheadAttention
from flashgen.toolchains import cpp
from tests.distributed.ranks import compile_by

WORLD = 2
PATIENCE = timedelta(seconds=200)  # of a process that waits for the other
SPEC = """
attention parallel {
    head_dim 16
    tensor slope: f32[H] grad
    param gain: f32 = 1.5 grad
    score gain * s - slope[h] * (i - j)
    mask causal
}
"""


def layer() -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(32, 2, batch_first=True, spec=flashgen.loads(SPEC))


def batch() -> Tensor:
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = module(x, x, x)[0]
    return found.square().mean()


def rank(number: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=number, world_size=WORLD, timeout=PATIENCE
    )
    try:
        found = gradients(number)
    finally:
        dist.destroy_process_group()
    torch.save(found, f"{folder}/gradients_{number}.pt")


def other_rank(_: int, folder: str, compiler: cpp.Compiler) -> None:
    compile_by(compiler)
    rank(1, folder)


def gradients(number: int) -> dict[str, dict[str, Tensor | None]]:
    own = batch().chunk(WORLD)[number]
    replicated = layer()
    parallel = nn.parallel.DistributedDataParallel(replicated)
    loss(parallel, own).backward()
    sharded = layer()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (WORLD,)))
    loss(sharded, own).backward()
    return {
        "ddp": {name: x.grad for name, x in replicated.named_parameters()},
        "fsdp": {name: x.grad.full_tensor() for name, x in sharded.named_parameters()},
    }


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_gradients_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    given = str(tmp_path), cpp.find_compiler()
    other = torch.multiprocessing.spawn(other_rank, given, nprocs=1, join=False)
    alone = layer()  # compiles while the other process starts, which then finds the kernels
    loss(alone, batch()).backward()
    rank(0, str(tmp_path))
    while not other.join():
        pass
    for number in range(WORLD):
        found = torch.load(tmp_path / f"gradients_{number}.pt")
        for kind in ("ddp", "fsdp"):
            for name, x in alone.named_parameters():
                assert torch.allclose(found[kind][name], x.grad, rtol=1e-4, atol=1e-6), f"{kind} {number}: {name}"
