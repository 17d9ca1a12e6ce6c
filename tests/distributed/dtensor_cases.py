"""Calls of DTensors, each beside the same call of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

import flashgen
from flashgen.verification.verify import relative_error

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """A spec, a call of it, and where its tensors lie: ``q`` and ``kv``, and those captured by name (whole)."""

    text: str
    q: Placements
    kv: Placements | None = None
    captured: Mapping[str, Placements | None] = field(default_factory=dict)  # None: no DTensor
    sizes: tuple[int, int, int, int] = (2, 4, 2, 21)  # B, H, Hkv, N
    mesh: tuple[int, ...] = (2,)
    seed: int | None = None
    backend: str | None = "reference"
    starts: Mapping[str, int] = field(default_factory=dict)
    d_o: Placements | None = None


@dataclass(frozen=True)
class Found:
    """How far results are from those of one process, and where they lie."""

    errors: Mapping[str, float]
    placements: Mapping[str, Placements]


def compared(case: Case) -> Found:
    """The case on this rank. Whole results are compared, so that every rank's part counts."""
    op: Any = flashgen.loads(case.text, backend=case.backend)
    B, H, Hkv, N = case.sizes
    (dims,) = op.spec.head_dims
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = {"q": normal(B, H, N, dims.qk), "k": normal(B, Hkv, N, dims.qk), "v": normal(B, Hkv, N, dims.v)}
    totals = {"b": B, "h": H, "q": N}
    named = {f"{axis}_start": start for axis, start in case.starts.items()}
    named |= {f"{axis}_total": start + totals[axis] for axis, start in case.starts.items()}
    group = H // Hkv
    all_heads = case.starts.get("h", 0) + H
    sizes = {"B": case.starts.get("b", 0) + B, "H": all_heads, "Hkv": all_heads // group, "Nq": N, "Nk": N}
    for each in op.spec.tensors:
        shape = [sizes[str(extent)] for extent in each.shape]
        values[each.name] = normal(*shape) if each.grad else torch.randint(0, 3, shape, generator=generator).int()
    for param in op.spec.params:
        values[param.name] = torch.tensor(0.7)
    d_o, d_lse = normal(B, H, N, dims.v), normal(B, H, N)
    learned = [name for name in values if name not in {each.name for each in op.spec.tensors if not each.grad}]
    if case.seed is not None:
        named["seed"] = case.seed

    def step(given: Mapping[str, Tensor], d_o: Tensor, d_lse: Tensor) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_(name in learned) for name, x in given.items()}
        rest = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
        has_lse = op.spec.weights.form.normalised
        found = op(leaves["q"], leaves["k"], leaves["v"], return_lse=has_lse, **rest, **named)
        o, lse = found if has_lse else (found, None)
        loss = (o * d_o).sum() if lse is None else (o * d_o).sum() + (lse * d_lse).sum()
        gradients = torch.autograd.grad(loss, [leaves[name] for name in learned])
        results = {"o": o.detach(), **{f"d{name}": x for name, x in zip(learned, gradients, strict=True)}}
        return results if lse is None else {**results, "lse": lse.detach()}

    truth = step(values, d_o, d_lse)
    mesh = init_device_mesh("cpu", case.mesh)
    whole = (Replicate(),) * mesh.ndim
    where: dict[str, Placements | None] = dict.fromkeys(values, whole) | {"q": case.q, "k": case.kv or case.q}
    where |= {"v": case.kv or case.q, **case.captured}
    spread = {name: x if where[name] is None else distribute_tensor(x, mesh, where[name]) for name, x in values.items()}
    rows = (distribute_tensor(d_o, mesh, case.d_o or case.q), distribute_tensor(d_lse, mesh, whole))
    found = step(spread, *rows)
    placements = {name: x.placements for name, x in found.items() if isinstance(x, DTensor)}
    assert placements.keys() == truth.keys()
    return Found(
        {name: relative_error(x.full_tensor(), truth[name]) for name, x in found.items()},  # type: ignore[attr-defined]
        placements,
    )


def all_compared(cases: list[Case]) -> list[Found]:
    """Several, in one process."""
    return [compared(case) for case in cases]


def told(calls: Callable[[], list[Callable[[], Any]]]) -> list[str]:
    """What is said of each of several calls on this rank."""
    found = []
    for call in calls():
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
    dist.barrier()
    return found
