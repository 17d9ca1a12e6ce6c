"""A call of a case on one of several ranks, and what all of them found as one.

In: a case, the number of a call. Out: ``Share``s, one a rank; of all of them the results of the whole. Ranks run
``share``, who judges them runs ``joined``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import flashgen
from flashgen.distributed import ContextParallel, Partition, context_parallel, partition
from flashgen.distributed.exchange import counting
from flashgen.op.dtensor_spread import indexed
from flashgen.op.op import AttentionOp
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import norm
from tools.fuzz.compiling import compiled
from tools.fuzz.draws import CallDraw, Case, Ranks
from tools.fuzz.inputs import Arguments, arguments, shown

Results = dict[str, Tensor]
# What of a call's results a rank has its rows of.
OWN = ("o", "lse", "dq", "dk", "dv")
_LAYOUTS = ("strided", "transposed", "offset", "padded", "negated", "conjugated")  # views that change no value


@dataclass(frozen=True)
class Share:
    """What a rank found: results of its ``rows``, None: of all; which differ between two runs; bytes that it sent, and
    those that were predicted. Of results that are ``parts`` the ranks' own ones add up to the whole. ``refused`` is why
    it computed nothing.
    """

    results: Results
    rows: Tensor | None = None
    unsteady: tuple[str, ...] = ()
    sent: tuple[int, int] = (0, 0)
    predicted: tuple[int, int] = (0, 0)
    refused: str = ""
    parts: tuple[str, ...] = ()


# -- on a rank ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _op(case: Case, scratch: Path) -> AttentionOp:
    return compiled(case, scratch)


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


@functools.cache
def _rows_op() -> AttentionOp:
    """Whose partitions are those of ragged batches, whose own masks count inside of sequences."""
    return flashgen.loads("attention rows { head_dim 1  mask causal }", backend="reference")


def share(case: Case, number: int, scratch: Path, results: Callable[..., Results]) -> Share:
    """What this rank finds, by ``results`` of ``judge``. Raises what calls raise."""
    call = case.calls[number]
    ranks = call.ranks
    assert ranks is not None, "the call is spread"
    torch.set_num_threads(1)
    op = _op(case, scratch)
    values = arguments(op.spec, call)
    if not ranks.method:
        return _of_dtensors(op, values, call, ranks, results)
    return _of_rows(op, values, call, ranks, results)


def _of_rows(
    op: AttentionOp, values: Arguments, call: CallDraw, ranks: Ranks, results: Callable[..., Results]
) -> Share:
    spec, world, rank = op.spec, dist.get_world_size(), dist.get_rank()
    total = values.inputs.q.shape[0] if call.lengths else call.shape[3]
    held = _partition(op, values, call, ranks, total)
    rows = torch.tensor_split(torch.arange(total), world)[rank] if held is None else held.positions(rank)
    own = _own(values.inputs, rows, call)
    methods: Any = tuple(ranks.method.split(",")) if ranks.mesh else ranks.method
    sharded = context_parallel(
        op, _mesh(ranks.mesh) if ranks.mesh else None, methods, held, check=ranks.checked, wide=call.wide,
        link=ranks.link or None,
    )  # fmt: skip
    options = {name: value for name, value in values.options.items() if name in ("deterministic", "seed", "dropout_p")}

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        attend: Callable[..., Any] = sharded
        if values.starts is not None:
            attend = functools.partial(_ragged, sharded, values.starts[0])
        if not spec.weights.form.normalised:
            return attend(given.q, given.k, given.v, **options, **given.named), None
        o, lse = attend(given.q, given.k, given.v, return_lse=True, **options, **given.named)
        return o, lse

    learned = replace(values, inputs=own).learned(spec, call.wants)
    found = results(spec, function, own, learned, call.wants)
    again = results(spec, function, own, learned, call.wants)
    sent, predicted = (0, 0), (0, 0)
    if not call.lengths and "ulysses" not in ranks.method and call.wants != "captured":
        choice = sharded.explain(own.q, own.k, own.v, **own.named)
        sent = _bytes(function, own)
        if choice.method != "ulysses":
            predicted = (choice.sent[rank], choice.sent_backward[rank])
        else:
            sent = (0, 0)
    return Share(found, rows, _unsteady(found, again, call), sent, predicted)


def _partition(op: AttentionOp, values: Arguments, call: CallDraw, ranks: Ranks, total: int) -> Partition | None:
    if not ranks.partition:
        return None
    if call.lengths:
        return partition(_rows_op(), total, ranks.world, method=ranks.partition)
    batch, heads, kv_heads = call.shape[:3]
    named: dict[str, Any] = {"batch": max(batch, 1), "heads": heads, "kv_heads": kv_heads}
    named |= {name: x.detach() if isinstance(x, Tensor) else x for name, x in values.inputs.named.items()}
    return partition(op, total, ranks.world, method=ranks.partition, **named)


def _own(inputs: Inputs, rows: Tensor, call: CallDraw) -> Inputs:
    """The rows of a rank, as they lie in memory."""
    dim, of_lse = (0, 1) if call.lengths else (2, 2)
    views = {name: view for name, view in call.views if view in _LAYOUTS}
    return replace(
        inputs,
        q=shown(inputs.q.index_select(dim, rows), views.get("q")),
        k=shown(inputs.k.index_select(dim, rows), views.get("k")),
        v=shown(inputs.v.index_select(dim, rows), views.get("v")),
        d_o=shown(inputs.d_o.index_select(dim, rows), views.get("d_o")),
        d_lse=shown(inputs.d_lse.index_select(of_lse, rows), views.get("d_lse")),
    )


def _ragged(sharded: ContextParallel, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    return sharded.varlen(q, k, v, starts, **others)


def _bytes(function: Callable[[Inputs], tuple[Tensor, Tensor | None]], own: Inputs) -> tuple[int, int]:
    """Sent forward and backward, of gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (own.q, own.k, own.v)]
    fixed = {name: x.detach() for name, x in own.captured.items()}
    params = {name: x.detach() if isinstance(x, Tensor) else x for name, x in own.params.items()}
    with counting() as forward:
        o, _ = function(
            dataclasses.replace(own, **dict(zip("qkv", leaves, strict=True)), captured=fixed, params=params)
        )
    with counting() as backward:
        if o.requires_grad:
            torch.autograd.grad(o, leaves, own.d_o.to(o.dtype), allow_unused=True)
    return forward.sent, backward.sent


def _unsteady(found: Results, again: Results, call: CallDraw) -> tuple[str, ...]:
    """What differs between two runs that has to be the same."""
    settled = tuple(found) if call.deterministic else ("o", "lse")
    return tuple(name for name in settled if name in found and not _same(found[name], again[name]))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _of_dtensors(
    op: AttentionOp, values: Arguments, call: CallDraw, ranks: Ranks, results: Callable[..., Results]
) -> Share:
    """The op itself, on DTensors; every rank has all results.

    PyTorch would add up gradients of 16 bits in their own type: what is judged of them is the ranks' parts.
    """
    spec, mesh = op.spec, _mesh((ranks.world,))
    dim = {"batch": 0, "heads": 1}.get(ranks.sharded)
    axes = {"batch": ("b",), "heads": ("h", "hkv")}.get(ranks.sharded, ())

    def spread(x: Tensor, dim: int | None) -> Tensor:
        where: Placement = Replicate() if dim is None else Shard(dim)
        found: Tensor = distribute_tensor(x.detach().resolve_conj().resolve_neg().contiguous(), mesh, [where])
        return found

    given = values.inputs
    captured = {}
    for number, each in enumerate(spec.tensors):
        there = [d for d, name in indexed(spec, each).items() if name in axes]
        # In turn a part of each rank, whole on each, and no DTensor.
        choices: list[int | None] = [*there, None]
        kind = (call.seed + number) % (len(choices) + 1)
        x = given.captured[each.name]
        captured[each.name] = x if kind == len(choices) else spread(x, choices[kind])
    q, k, v, d_o, d_lse = (spread(x, dim) for x in (given.q, given.k, given.v, given.d_o, given.d_lse))
    own = replace(given, q=q, k=k, v=v, d_o=d_o, d_lse=d_lse, captured=captured)

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        attend: Any = op
        if not spec.weights.form.normalised:
            return attend(given.q, given.k, given.v, **values.options, **given.named), None
        o, lse = attend(given.q, given.k, given.v, return_lse=True, **values.options, **given.named)
        return o, lse

    learned = replace(values, inputs=own).learned(spec, call.wants)
    found, again = (results(spec, function, own, learned, call.wants) for _ in range(2))
    parts = tuple(name for name, x in found.items() if _is_rounded_part(x))
    found, again = ({name: _whole(x) for name, x in each.items()} for each in (found, again))
    return Share(found, None, _unsteady(found, again, call), parts=parts)


def _is_rounded_part(x: Tensor) -> bool:
    return isinstance(x, DTensor) and x.itemsize == 2 and any(each.is_partial() for each in x.placements)


def _whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    found: Tensor = x.to_local() if _is_rounded_part(x) else x.full_tensor()
    return found


# -- of all ranks ------------------------------------------------------------------------------------------------------


def joined(shares: Sequence[Share], call: CallDraw) -> tuple[Results, Mapping[str, str], Mapping[str, float]]:
    """The results of the whole, what ranks do not agree in, by kind, and how far rounded parts may move their sum."""
    first, wrong, moved = shares[0], dict[str, str](), dict[str, float]()
    found: Results = {}
    for name, x in first.results.items():
        if name in first.parts:
            parts = [each.results[name].double() for each in shares]
            found[name] = torch.stack(parts).sum(0)
            moved[name] = torch.finfo(x.dtype).eps / 2 * sum(map(norm, parts))
            continue
        if first.rows is None or name not in OWN:
            found[name] = x
            if not all(_same(x, each.results[name]) for each in shares):
                wrong["ranks differ"] = f"{name} is not the same on every rank"
            continue
        dim = (1 if name == "lse" else 0) if call.lengths else 2
        rows = torch.cat([each.rows for each in shares if each.rows is not None])
        found[name] = torch.cat([each.results[name] for each in shares], dim).index_select(dim, rows.argsort())
    for rank, each in enumerate(shares):
        for name in each.unsteady:
            wrong["other bits"] = f"{name} of rank {rank} differs between two runs of the same call"
        if each.sent != each.predicted:
            wrong["bytes"] = f"rank {rank} sent {each.sent} forward and backward, {each.predicted} were predicted"
    return found, wrong, moved
