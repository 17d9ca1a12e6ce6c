"""The sharding rule of an op: what a rank computes of q, k and v that are DTensors.

In: the operator's arguments, DTensors among them. Out: DTensors. Below autograd, so that both passes, autocast and
compiled graphs come by. A mesh dimension that shards q by batch elements (b), by heads (h) or by queries (i) shards
the call along that axis, and every rank calls the operator with what it has, told where that lies in the whole: masks,
positions and random bits are those of one device. Nothing is gathered that is sharded along the axes of the call.

    q, o      by b, h or i; lse alike
    k, v      by b and h alike; whole where i is sharded, or where ranks share key/value heads
    captured  by the dimension that an axis indexes, or whole: then gradients are ``Partial``, a sum over ranks
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.op.checks import check_captured
from flashgen.op.dtensor_spread import local, made, spread_of
from flashgen.op.lengths import lengths, unseen_lengths
from flashgen.op.per_sequence import check_numbers
from flashgen.op.plain import refuse_distributed
from flashgen.op.registered import NAMESPACE, Registered, first_of
from flashgen.op.signature import Signature


@functools.cache
def _learn(name: str) -> None:
    op, qualified = first_of(name), f"{NAMESPACE}::{name}"

    def forward(_: type, operator: Any, types: object, args: Sequence[Any], kwargs: object) -> Any:  # noqa: ARG001
        with torch.no_grad():
            return _forward(op, operator, args)

    def backward(_: type, operator: Any, types: object, args: Sequence[Any], kwargs: object) -> Any:  # noqa: ARG001
        with torch.no_grad():
            return _backward(op, operator, args)

    torch.library.register_torch_dispatch(qualified, DTensor, forward)
    torch.library.register_torch_dispatch(f"{qualified}_backward", DTensor, backward)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def learn(name: str) -> bool:
    """Register the rule of an op's two operators, once; while a graph is traced, too."""
    _learn(name)
    return True


def prepared(signature: Signature, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors of a call that has DTensors among them: a seed is that of the mesh's first rank.

    Raises ``TypeError`` where one of q, k and v is none or a tensor that is none wants a gradient, and ``ValueError``
    where meshes differ.
    """
    if signature.kind in (CACHED, EIGHT_BITS):
        refuse_distributed("calls of 'decode'" if signature.kind is CACHED else "calls of 8 bits", tensors)
    mesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    names = signature.inputs_by_name
    for name, x in zip(names, tensors, strict=False):
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise ValueError(f"'{name}' is on {x.device_mesh}; another tensor of this call is on {mesh}")
        elif name in names[:3]:
            raise TypeError(
                f"'{name}' is no DTensor, but others of q, k and v are: distribute it over the same mesh "
                "(torch.distributed.tensor.distribute_tensor, or DTensor.from_local)"
            )
        elif x is not None and x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"'{name}' requires a gradient and is no DTensor, while q, k and v are: each rank would have a part of "
                "its gradient; distribute it over the same mesh (torch.distributed.tensor.distribute_tensor)"
            )
    own = list(tensors)
    at = len(names)
    if signature.has_dropout and own[at] is not None and not isinstance(own[at], DTensor):
        whole = [Replicate()] * mesh.ndim
        own[at] = DTensor.from_local(own[at], mesh, whole, run_check=True)  # which sends the first rank's
    return tuple(own)


def _forward(op: Registered, operator: Any, args: Sequence[Any]) -> Any:
    signature = op.signature
    count = signature.tensor_arguments
    tensors = args[:count]
    spread = spread_of(op, tensors, args[count:-1])
    own = spread.tensors(tensors)
    if spread.is_idle:
        _check_idle(op, tensors, own, args[count:-1])
    found = _nothing(op, own) if spread.is_idle else operator(*own, *spread.numbers, args[-1])
    if not signature.has_lse:
        return made(found, spread.mesh, spread.o.placements, spread.o.shape)
    o, lse, parts = found
    rows = spread.lse.placements
    return (
        made(o, spread.mesh, spread.o.placements, spread.o.shape),
        made(lse, spread.mesh, rows, spread.lse.shape),
        made(parts, spread.mesh, rows, torch.Size((*spread.lse.shape, 2))),
    )


def _backward(op: Registered, operator: Any, args: Sequence[Any]) -> list[Tensor]:
    signature = op.signature
    first = 5 if signature.has_lse else 1
    end = first + signature.tensor_arguments
    arriving, tensors, numbers = args[:first], args[first:end], args[end:-2]
    deterministic, needs = args[-2], args[-1]
    spread = spread_of(op, tensors, numbers)
    own = spread.tensors(tensors)
    if spread.is_idle:
        found = [torch.zeros_like(x) for x, need in zip(own, needs, strict=False) if need and x is not None]
    else:
        places = (spread.o.placements, *((spread.lse.placements, spread.o.placements) if first > 1 else ()))
        places += (spread.lse.placements,) * (first - len(places))
        rows = [local(x, where) if isinstance(x, DTensor) else x for x, where in zip(arriving, places, strict=True)]
        found = operator(*rows, *own, *spread.numbers, deterministic, needs)
    wanted = [operand for operand, need in zip(spread.operands, needs, strict=False) if need]
    return [
        x if operand is None else operand.gradient_of(x, spread.mesh) for x, operand in zip(found, wanted, strict=True)
    ]


def _check_idle(op: Registered, tensors: Sequence[Any], own: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raises what others raise on a rank that holds nothing, so that nobody waits.

    ``own`` are the tensors as this rank has them.
    """
    signature, checker, spec = op.signature, op.engine.checker, op.engine.spec
    kind, (q, k, v) = signature.kind, tensors[:3]
    head_dim = HeadDim(q.shape[-1], v.shape[-1])
    given = dict(zip(kind.numbers, numbers, strict=True))
    extents = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[-2], "kv": k.shape[-2]}
    heads, kv_heads = q.shape[1], k.shape[1]
    pairs: list[tuple[int, int]] = []
    if kind.ragged:
        starts, most = own[-2:], (given["max_seqlen_q"], given["max_seqlen_k"])
        is_seen = not (q.is_cuda and all(x.is_cuda for x in starts)) or checker.lengths.why_seen(own[:-2], most)
        found = (lengths if is_seen else unseen_lengths)(starts[0], starts[1], (q.shape[0], k.shape[0]), most)
        extents, pairs = {"b": found.count, "h": heads, "q": found.max_q, "kv": found.max_k}, found.pairs
    sizes = {"D": q.shape[-1], "Dv": v.shape[-1]}
    for name, letter in (("B", "b"), ("H", "h"), ("Nq", "q"), ("Nk", "kv")):
        total = given.get(f"{letter}_total")
        sizes[name] = given.get(f"{letter}_start", 0) + extents[letter] if total is None else total
    sizes["Hkv"] = sizes["H"] // max(heads // max(kv_heads, 1), 1)
    checker.check_types(q, k, v, tensors[3 : 3 + len(spec.tensors)])
    for declared, x in zip(spec.tensors, tensors[3:], strict=False):
        check_captured(declared, x, sizes, q.device)
    if kind.ragged:
        checker.lengths.check(head_dim, sizes, pairs)
    else:
        checker.indices.check(head_dim, sizes)
        pairs = [(sizes["Nq"], sizes["Nk"])]
    values = own[3 + len(spec.tensors) : signature.tensor_arguments - len(kind.tensors)]
    for q_len, kv_len in {each for each in pairs if all(each)}:
        check_numbers(spec, values, {**sizes, "Nq": q_len, "Nk": kv_len})


def _nothing(op: Registered, own: Sequence[Any]) -> Any:
    """The results of no row at all."""
    q, v = own[0], own[2]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not op.signature.has_lse:
        return o
    rows = op.signature.kind.rows(q)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return o, lse, q.new_empty((*rows, 2), dtype=torch.float32)
