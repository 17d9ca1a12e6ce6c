"""Calls over ranks beside one device, both judged by the float64 reference: outputs, lse and every gradient.

In: a spec by name, a method, an element type. Out: errors. Every rank calls the same functions in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashgen
from flashgen.distributed import context_parallel, partition
from flashgen.ir.shape import Shape
from flashgen.verification.inputs import random_inputs
from flashgen.verification.verify import relative_error

# The specs of the tests of ranks: causal, a window, biases, documents, pairs, sinks, dropout.
CHECKED = {
    "causal": "mask causal",
    "window": "mask window(20)",
    "alibi": "tensor slope: f32[H] grad score s - slope[h] * abs(i - j) mask causal",
    "documents": "tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal",
    "pairs": "tensor t: f32[H, Nq, Nk] grad param w: f32 grad score s * w + t[h, i, j]",
    "sinks": "tensor z: f32[H] grad weights softmax(sink = z[h]) mask window_left(30)",
    "dropped": "mask causal dropout 0.3",
}
CHECK_SHAPE = Shape(2, 4, 4, 301, 301)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


def checked_text(name: str) -> str:
    """Its spec."""
    return f"attention checked_{name} {{ head_dim 64  {CHECKED[name]} }}"


def errors(name: str, method: str, dtype: torch.dtype, device: str) -> dict[str, tuple[float, float]]:
    """How far results of this rank, and those of one device, are from the reference, by name."""
    op: Any = flashgen.loads(checked_text(name))
    inputs = random_inputs(op.spec, CHECK_SHAPE, op.spec.head_dims[0], dtype, seed=3)
    inputs = inputs.to(device)
    named = dict(inputs.named)
    if "doc" in named:
        generator = torch.Generator().manual_seed(7)
        doc = torch.randint(0, 5, named["doc"].shape, generator=generator, dtype=torch.int32)
        named["doc"] = doc.sort(-1).values.to(device)
    options = {"seed": 5} if name == "dropped" else {}
    learned = set(inputs.differentiable(op.spec)) - {"q", "k", "v"}
    N, rank, world = CHECK_SHAPE.q_len, dist.get_rank(), dist.get_world_size()
    held = partition(op, N, world, batch=CHECK_SHAPE.batch, heads=4, kv_heads=4, **named)
    sharded = context_parallel(op, method=method, partition=held)

    def step(call: Any, whole: Mapping[str, Tensor], d_lse: Tensor) -> dict[str, Tensor]:
        leaves = {each: whole[each].detach().clone().requires_grad_() for each in "qkv"}
        values = {each: x.detach().clone().requires_grad_() if each in learned else x for each, x in named.items()}
        o, lse = call(*leaves.values(), return_lse=True, **values, **options)
        wanted = {**leaves, **{each: values[each] for each in sorted(learned)}}
        loss = (o.float() * whole["d_o"].float()).sum() + (torch.where(lse.isfinite(), lse, 0.0) * d_lse).sum()
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        return {"o": o, "lse": lse, **{f"d{each}": x for each, x in zip(wanted, gradients, strict=True)}}

    whole = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_o": inputs.d_o}
    alone = step(op, whole, inputs.d_lse)
    exact = step(functools.partial(op.reference, dtype=torch.float64), whole, inputs.d_lse)
    found = step(sharded, {each: held.shard(x, rank=rank) for each, x in whole.items()},
                 held.shard(inputs.d_lse, rank=rank))  # fmt: skip
    own = {"o", "lse", "dq", "dk", "dv"}

    def error(name: str, x: Tensor) -> float:
        truth = exact[name]
        return relative_error(x, held.shard(truth, rank=rank) if name in own and x.shape != truth.shape else truth)

    return {name: (error(name, x), error(name, alone[name])) for name, x in found.items()}
