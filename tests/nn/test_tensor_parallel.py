"""Heads of a module over two ranks, alone and with FSDP2: losses and gradients are those of one process."""

# mypy: disable-error-code="no-untyped-call,attr-defined,union-attr,arg-type"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashgen
from flashgen.nn import Attention, MultiheadAttention
from flashgen.nn.parallel import HeadParallel
from tests.distributed.ranks import run

SPEC = """attention parallel { head_dim 16
    tensor slope: f32[H] grad tensor sink: f32[Hkv] grad param gain: f32 = 1.5 grad
    score gain * s - slope[h] * (i - j) mask causal weights softmax(sink = sink[hkv]) }"""
SHARED = """attention shared { head_dim 16 tensor slope: f32[H] grad param gain: f32 = 1.5 grad
    score gain * s - slope[h] * (i - j) mask causal }"""


class Block(nn.Module):
    """Projections that can be spread over ranks, around an attention."""

    def __init__(self, text: str, kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.wo = nn.Linear(32, 64), nn.Linear(64, 32)
        self.wk, self.wv = (nn.Linear(32, 16 * kv_heads) for _ in range(2))
        self.attention = Attention(flashgen.loads(text, backend="reference"), heads=4, kv_heads=kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        return self.wo(self.attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))


def step(block: Block) -> dict[str, Tensor]:
    loss = block(batch()).square().mean()
    loss.backward()
    gradients = {name: x.grad for name, x in block.named_parameters()}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()}
    return {"loss": loss.detach(), **whole}


def spread(block: Block, mesh: Any) -> Block:
    shared = block.attention.kv_heads < mesh.size()
    plan: dict[str, Any] = {"wq": ColwiseParallel(), "attention": HeadParallel(), "wo": RowwiseParallel()}
    plan |= {} if shared else {"wk": ColwiseParallel(), "wv": ColwiseParallel()}
    parallelize_module(block, mesh, plan)
    return block


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def steps() -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    heads, shared, both = (
        spread(Block(SPEC, 2), line),
        spread(Block(SHARED, 1), line),
        spread(Block(SPEC, 2), grid["tp"]),
    )
    for each in (both.attention, both):
        fully_shard(each, mesh=grid["fsdp"])
    found = {"heads": step(heads), "shared": step(shared), "both": step(both)}
    said = [
        told(lambda: parallelize_module(MultiheadAttention(32, 2, spec=heads.attention.op), line, HeadParallel())),
        told(lambda: parallelize_module(Attention(shared.attention.op, heads=3), line, HeadParallel())),
        told(lambda: heads.attention(*[torch.zeros(1, 3, 5, 16)] * 3)),
    ]
    return found, said


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_steps_are_those_of_one_process() -> None:
    alone = {"heads": step(Block(SPEC, 2)), "shared": step(Block(SHARED, 1))}
    for found, said in run(steps, 2):
        for kind, results in found.items():
            for name, x in alone["shared" if kind == "shared" else "heads"].items():
                torch.testing.assert_close(results[name], x, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")
        assert said[0].startswith("TypeError: HeadParallel is for flashgen.nn.Attention, not MultiheadAttention")
        assert said[1].startswith("ValueError: 3 query heads of 3 key/value heads cannot be dealt out to 2 ranks")
        assert said[2].startswith("ValueError: 'q' has 3 heads; all 4 or a rank's 2 of them are expected")
