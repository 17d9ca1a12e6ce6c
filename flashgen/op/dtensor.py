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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.op.captured import check_defaults
from flashgen.op.dtensor_spread import spread_of
from flashgen.op.lengths import lengths, unseen_lengths
from flashgen.op.registered import NAMESPACE, Registered, fake_forward, first_of
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import refuse_distributed


@functools.cache
def _learn(name: str) -> None:
    op, qualified = first_of(name), f"{NAMESPACE}::{name}"

    def register(suffix: str, rule: Callable[..., Any]) -> None:
        def ruled(_: type, operator: Any, types: object, args: Sequence[Any], kwargs: object) -> Any:  # noqa: ARG001
            with torch.no_grad():
                return rule(op, operator, args)

        torch.library.register_torch_dispatch(f"{qualified}{suffix}", DTensor, ruled)

    register("", _forward)
    register("_backward", _backward)


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
        found = fake_forward(signature, None, *own)
    else:
        found = operator(*own, *spread.numbers, args[-1])
    if not signature.has_lse:
        return spread.results[0].returned(found, spread.mesh)
    return tuple(each.returned(x, spread.mesh) for each, x in zip(spread.results, found, strict=True))


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
        o, lse, parts = spread.results
        rows = [each.passed(x) for each, x in zip((o, lse, o, lse, parts), arriving, strict=False)]
        found = operator(*rows, *own, *spread.numbers, deterministic, needs)
    wanted = [operand for operand, need in zip(spread.operands, needs, strict=False) if need]
    return [
        x if operand is None else operand.returned(x, spread.mesh) for x, operand in zip(found, wanted, strict=True)
    ]


def _check_idle(op: Registered, tensors: Sequence[Any], own: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raises what others raise on a rank that holds nothing, so that nobody waits.

    ``own`` are the tensors as this rank has them.
    """
    signature, checker, spec = op.signature, op.engine.checker, op.engine.spec
    (q, k, v), captured = tensors[:3], tensors[3 : 3 + len(spec.tensors)]
    pairs: list[tuple[int, int]] | None = None
    if signature.kind.ragged:
        starts, most = own[-2:], (numbers[-2], numbers[-1])
        is_seen = not (q.is_cuda and all(x.is_cuda for x in starts)) or checker.lengths.why_seen(own[:-2], most)
        found = (lengths if is_seen else unseen_lengths)(starts[0], starts[1], (q.shape[0], k.shape[0]), most)
        numbers, pairs = (*numbers[:-2], found.max_q, found.max_k, found.count), found.pairs
    _, sizes = checker.checks.shapes(spec, q, k, v, captured, numbers)
    checker.check_types(q, k, v, captured)
    head_dim = HeadDim(q.shape[-1], v.shape[-1])
    if pairs is None:
        checker.indices.check(head_dim, sizes)
        pairs = [(sizes["Nq"], sizes["Nk"])]
    else:
        checker.lengths.check(head_dim, sizes, pairs)
    values = own[3 + len(spec.tensors) : signature.tensor_arguments - len(signature.kind.tensors)]
    for q_len, kv_len in {each for each in pairs if all(each)}:
        check_defaults(spec, values, {**sizes, "Nq": q_len, "Nk": kv_len})
