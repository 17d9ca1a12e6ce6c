"""Calls that ranks make together, each beside the same call of one process."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flashgen
from flashgen.diagnostics import SpecError
from flashgen.distributed import context_parallel, partition
from flashgen.distributed.exchange import counting
from flashgen.ir.shape import Shape
from flashgen.verification.inputs import Inputs, random_inputs
from flashgen.verification.verify import relative_error
from tools.fuzz.draws import Machine, draw
from tools.fuzz.inputs import check_size


@dataclass(frozen=True)
class Case:
    """A spec and a call of it."""

    text: str
    method: Any = "ring"
    sizes: tuple[int, int, int, int] = (2, 4, 2, 203)  # B, H, Hkv, N
    dealt: str | None = "balanced"
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None
    backend: str | None = None
    spread: float = 1.0  # of q and k: scores grow with its square
    seed: int = 3


def inputs_of(op: Any, case: Case) -> Inputs:
    """Random values, the same on every rank. ``doc`` are documents, one behind the other."""
    B, H, Hkv, N = case.sizes
    shape = Shape(B, H, Hkv, N, N)
    check_size(op.spec, shape, op.spec.head_dims[0])
    found = random_inputs(op.spec, shape, op.spec.head_dims[0], case.dtype, seed=case.seed)
    captured = dict(found.captured)
    if "doc" in captured:
        generator = torch.Generator().manual_seed(7)
        doc = torch.randint(0, 5, captured["doc"].shape, generator=generator, dtype=torch.int32)
        captured["doc"] = doc.sort(-1).values
    if "idx" in captured:  # blocks of 16 keys
        generator = torch.Generator().manual_seed(7)
        captured["idx"] = torch.randint(-1, -(-N // 16), captured["idx"].shape, generator=generator, dtype=torch.int32)
    return replace(found, q=found.q * case.spread, k=found.k * case.spread, captured=captured)


@dataclass(frozen=True)
class Found:
    """How far a rank's results are from those of one process; bytes that it sent, beside those predicted."""

    errors: Mapping[str, float]
    sent: tuple[int, int]
    predicted: tuple[int, int]
    method: str


@functools.cache
def op_of(text: str, backend: str | None) -> Any:
    """The op, loaded once a process."""
    return flashgen.loads(text, backend=backend)


def errors(case: Case) -> Found:
    """One case on this rank."""
    op = op_of(case.text, case.backend)
    B, H, Hkv, N = case.sizes
    inputs = inputs_of(op, case)
    learned_names = set(inputs.differentiable(op.spec)) - {"q", "k", "v"}
    captured = {
        name: x.detach().clone().requires_grad_() if name in learned_names and isinstance(x, Tensor) else x
        for name, x in inputs.named.items()
    }
    whole = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_o": inputs.d_o}
    d_lse = inputs.d_lse
    has_lse = op.spec.weights.form.normalised
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(call: Any, given: list[Tensor], with_lse: bool = True) -> tuple[dict[str, Tensor], int]:
        q, k, v, d_o, d_lse = given
        leaves = {name: x.detach().clone().requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
        learned = {name: x for name, x in captured.items() if isinstance(x, Tensor) and x.requires_grad and with_lse}
        values = captured if with_lse else {n: x.detach() if isinstance(x, Tensor) else x for n, x in captured.items()}
        found = call(*leaves.values(), return_lse=has_lse and with_lse, **values, **case.options)
        o, lse = found if has_lse and with_lse else (found, None)
        wide = torch.promote_types(o.dtype, torch.float32)
        loss = (o.to(wide) * d_o.to(wide)).sum()
        if lse is not None:
            loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * d_lse).sum()
        wanted = [*leaves.values(), *learned.values()]
        with counting() as counter:
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        found_gradients: Any = gradients
        names = (*leaves, *learned)
        results = {"o": o.detach()}
        results |= {f"d{name}": x for name, x in zip(names, found_gradients, strict=True) if x is not None}
        return results if lse is None else {**results, "lse": lse.detach()}, counter.sent

    truth, _ = step(op, [*whole.values(), d_lse])
    if not all(x[x != -torch.inf].isfinite().all() for x in truth.values()):
        raise ValueError("the results of one process are not finite")
    sizes: dict[str, Any] = {"batch": B, "heads": H, "kv_heads": Hkv}
    dealt = None if case.dealt is None else partition(op, N, world, method=case.dealt, **{**sizes, **captured})
    rows = torch.tensor_split(torch.arange(N), world)[rank] if dealt is None else dealt.positions(rank)
    sharded = context_parallel(op, None if case.mesh is None else mesh_of(case.mesh), case.method, dealt)
    parts = [x.index_select(2, rows) for x in (*whole.values(), d_lse)]
    choice = sharded.explain(parts[0], parts[1], parts[2], **captured)
    with counting() as counter, torch.no_grad():
        sharded(parts[0], parts[1], parts[2], **captured, **case.options)
    _, back = step(sharded, parts, with_lse=False)
    found, _ = step(sharded, parts)
    own = {"o", "lse", "dq", "dk", "dv"}
    far = {}
    for name, x in found.items():
        error = relative_error(x, truth[name].index_select(2, rows) if name in own else truth[name])
        # Gradients of what is captured are rounded to the type that it is declared in.
        rounding = 0.0 if name in own else 16 * torch.finfo(x.dtype).eps
        far[name] = 0.0 if error <= rounding else error
    return Found(far, (counter.sent, back), (choice.sent[rank], choice.sent_backward[rank]), choice.method)


@functools.cache
def mesh_of(shape: tuple[int, int]) -> Any:
    """A mesh of all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


def all_errors(cases: list[Case]) -> list[Found]:
    """The same of several, in one process."""
    return [errors(case) for case in cases]


def of_random_specs(seeds: list[int], methods: list[Any]) -> list[tuple[int, Any, str, float, bool]]:
    """Specs of the generator, in float64 on the reference: whatever rounding allows, the formula is the same.

    Of each spec and method the worst result, its error, and whether as many bytes were sent as predicted.
    """
    found = []
    for seed in seeds:
        spec = draw(seed, Machine("tiled")).spec
        assert spec is not None
        chance = random.Random(seed)
        group, kv_heads = chance.choice((1, 2)), chance.choice((1, 2, 3))
        for number, method in enumerate(methods):
            heads = group * kv_heads * (dist.get_world_size() if method == "ulysses" else 1)
            sizes = (chance.choice((1, 2)), heads, heads // group, chance.choice((1, 23, 70, 130)))
            dealt = ("balanced", "contiguous", "head_tail", None)[(seed + number) % 4]
            options = {"seed": seed} if "dropout" in spec.text else {}
            case = Case(spec.text, method, sizes, dealt, torch.float64, options, backend="reference", seed=seed)
            try:
                result = errors(case)
            except (SpecError, ValueError) as error:
                found.append((seed, method, f"refused: {error}", 0.0, True))
                continue
            worst = max(result.errors, key=lambda name: result.errors[name])
            found.append((seed, method, worst, result.errors[worst], result.sent == result.predicted))
    return found
