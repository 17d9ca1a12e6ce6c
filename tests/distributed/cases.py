"""Calls that ranks make together, each beside the same call of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashgen
from flashgen.distributed import context_parallel, partition
from flashgen.distributed.exchange import counting
from flashgen.verification.verify import relative_error


@dataclass(frozen=True)
class Case:
    """A spec and a call of it."""

    text: str
    method: str = "all_gather"
    sizes: tuple[int, int, int, int] = (2, 4, 2, 203)  # B, H, Hkv, N
    dealt: str | None = "balanced"
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


def captured_of(op: Any, case: Case) -> dict[str, Any]:
    """Random values of what the spec captures; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    B, H, Hkv, N = case.sizes
    sizes = {"B": B, "H": H, "Hkv": Hkv, "Nq": N, "Nk": N}
    found: dict[str, Any] = {}
    for tensor in op.spec.tensors:
        shape = [sizes[str(each)] for each in tensor.shape]
        if tensor.name == "doc":
            found["doc"] = torch.randint(0, 5, shape, generator=generator, dtype=torch.int32).sort(-1).values
        elif tensor.name == "idx":  # blocks of 16 keys
            found["idx"] = torch.randint(-1, -(-N // 16), shape, generator=generator, dtype=torch.int32)
        else:
            found[tensor.name] = torch.randn(shape, generator=generator).requires_grad_(tensor.grad)
    for param in op.spec.params:
        found[param.name] = torch.tensor(0.1).requires_grad_(param.grad)
    return found


def errors(case: Case) -> tuple[dict[str, float], int, int]:
    """How far a rank's results are from those of one process; bytes sent forward, and those that were predicted."""
    op = flashgen.loads(case.text)
    B, H, Hkv, N = case.sizes
    (head_dim,) = op.spec.head_dims
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (B, H, N, head_dim.qk), "k": (B, Hkv, N, head_dim.qk), "v": (B, Hkv, N, head_dim.v)}
    shapes["d_o"] = (B, H, N, head_dim.v)
    whole = {name: torch.randn(shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}
    d_lse = torch.randn(B, H, N, generator=generator)
    captured = captured_of(op, case)
    has_lse = op.spec.weights.form.normalised
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(call: Any, given: list[Tensor]) -> dict[str, Tensor]:
        q, k, v, d_o, d_lse = given
        leaves = {name: x.detach().clone().requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
        learned = {name: x for name, x in captured.items() if isinstance(x, Tensor) and x.requires_grad}
        found = call(*leaves.values(), return_lse=has_lse, **captured, **case.options)
        o, lse = found if has_lse else (found, None)
        loss = (o.float() * d_o.float()).sum()
        if lse is not None:
            loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * d_lse).sum()
        wanted = [*leaves.values(), *learned.values()]
        gradients = torch.autograd.grad(loss, wanted)
        names = (*leaves, *learned)
        results = {"o": o.detach(), **{f"d{name}": x for name, x in zip(names, gradients, strict=True)}}
        return results if lse is None else {**results, "lse": lse.detach()}

    truth = step(op, [*whole.values(), d_lse])
    sizes = {"batch": B, "heads": H, "kv_heads": Hkv}
    dealt = None if case.dealt is None else partition(op, N, world, method=case.dealt, **sizes, **captured)
    rows = torch.tensor_split(torch.arange(N), world)[rank] if dealt is None else dealt.positions(rank)
    sharded = context_parallel(op, None, case.method, dealt)
    parts = [x.index_select(2, rows) for x in (*whole.values(), d_lse)]
    choice = sharded.explain(parts[0], parts[1], parts[2], **captured)
    with counting() as counter, torch.no_grad():
        sharded(parts[0], parts[1], parts[2], **captured, **case.options)
    found = step(sharded, parts)
    own = {"o", "lse", "dq", "dk", "dv"}
    return (
        {
            name: relative_error(x, truth[name].index_select(2, rows) if name in own else truth[name])
            for name, x in found.items()
        },
        counter.sent,
        choice.sent[rank],
    )


def all_errors(cases: list[Case]) -> list[tuple[dict[str, float], int, int]]:
    """The same of several, in one process."""
    return [errors(case) for case in cases]
