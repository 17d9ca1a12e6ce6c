"""What a drawn call gives: by the op, and by the dense formula in the types that it is judged in.

In: a spec, the arguments of a call. Out: o, lse and gradients by name, of the second order where the draw asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.captured import Use, scales
from flashgen.ir.spec import AttentionSpec
from flashgen.op.eight_bits import rounded_weights
from flashgen.op.op import AttentionOp
from flashgen.reference.dense import Dropout, attention, drop_probability, param_values
from flashgen.reference.shard import Shard
from flashgen.reference.tiled import gives_nothing
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import second_order
from tools.fuzz.doors import through_door
from tools.fuzz.draws import CallDraw
from tools.fuzz.inputs import Arguments, Held
from tools.fuzz.mixed_order import mixed_order
from tools.fuzz.parts import has_parts, in_parts

_FAR = 2**40 + 2**31 + 12345
Results = dict[str, Tensor]
Function = Callable[[Inputs], "tuple[Tensor, Tensor | None]"]


def run(op: AttentionOp, spec: AttentionSpec, values: Arguments, call: CallDraw) -> Results:
    """o, lse and the gradients of a call."""
    return results_of(spec, calls(op, spec, values, call), values.inputs, values.learned(spec, call.wants), call.wants)


def calls(op: AttentionOp, spec: AttentionSpec, values: Arguments, drawn: CallDraw | None = None) -> Function:
    """The op at these values, which may be leaves."""

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        named = given.named | (_far_away(spec, given.captured) if drawn is not None and drawn.converted else {})
        call: Callable[..., Any] = op
        if values.held is not None:
            call = functools.partial(_cached, op, values.held)
        elif values.starts is not None:
            call = functools.partial(_ragged, op, values.starts)
        elif drawn is not None and drawn.door:
            call = through_door(op, spec, values, drawn.door)
        elif drawn is not None and drawn.parts and has_parts(spec):
            call = functools.partial(in_parts, op, drawn.parts, drawn.wide)
        if not spec.weights.form.normalised:
            return call(given.q, given.k, given.v, **values.options, **named), None
        o, lse = call(given.q, given.k, given.v, return_lse=True, **values.options, **named)
        return o, lse

    return function


def _far_away(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of int64 of which only differences or the order count, beyond 32 bits: they mean the same."""
    names = [each.name for each in spec.tensors]
    same = [names[n] for scale in scales(spec) if scale.use < Use.VALUE for n in scale.tensors]
    return {name: captured[name] + _FAR for name in same if captured[name].dtype is torch.int64}


def _ragged(op: AttentionOp, starts: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    return op.varlen(q, k, v, *starts, **others)


def _cached(op: AttentionOp, held: Held, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    """Rows that the call is to write are NaN in the cache before."""
    if not held.new:
        return op.decode(q, k, v, **others)
    written = [held.sequence(k, v, b, first, end) for b, (first, end) in enumerate(held.written)]
    new = [torch.stack(rows).to(q.dtype) for rows in zip(*written, strict=True)]
    for x in (k, v):
        held.put(x, [math.nan] * len(written), held.written)
    return op.decode(q, k, v, k=new[0], v=new[1], **others)


def reference(spec: AttentionSpec, values: Arguments, given: Inputs, call: CallDraw, dtype: torch.dtype) -> Results:
    """The same of the dense formula."""

    def function(given: Inputs) -> tuple[Tensor, Tensor | None]:
        return dense(spec, values, given, dtype)

    learned = dataclasses.replace(values, inputs=given).learned(spec, call.wants)
    found = results_of(spec, function, given, learned, call.wants)
    return found | second(spec, function, given, learned, call) if is_second(call, values) else found


def dense(spec: AttentionSpec, values: Arguments, given: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The reference at these values, which may be leaves."""
    if values.held is not None:
        return _dense_of_cache(spec, values, values.held, given, dtype)
    if values.starts is None:
        return _dense(spec, values, given, values.shard, dtype)
    heads, width = given.q.shape[1], given.v.shape[2]
    rows = [given.q.new_zeros((0, heads, width), dtype=dtype)]
    sums = [given.q.new_zeros((heads, 0), dtype=dtype)]
    for shard, q_rows, k_rows in values.sequences():
        if gives_nothing(spec, shard):
            rows.append(given.q.new_zeros((shard.q_len, heads, width), dtype=dtype))
            sums.append(given.q.new_full((heads, shard.q_len), -torch.inf, dtype=dtype))
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (given.q[q_rows], given.k[k_rows], given.v[k_rows]))
        o, lse = _dense(spec, values, dataclasses.replace(given, q=q, k=k, v=v), shard, dtype)
        rows.append(o[0].transpose(0, 1))
        sums.append(sums[0] if lse is None else lse[0])
    return torch.cat(rows), torch.cat(sums, 1) if spec.weights.form.normalised else None


def _dense_of_cache(
    spec: AttentionSpec, values: Arguments, held: Held, given: Inputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    o = given.q.new_zeros((*given.q.shape[:-1], given.v.shape[3]), dtype=dtype)
    lse = given.q.new_full(given.q.shape[:-1], -torch.inf, dtype=dtype)
    for b, shard in values.of_cache():
        if gives_nothing(spec, shard):
            continue
        length, padding = held.cached[b]
        k, v = (x[None] for x in held.sequence(given.k, given.v, b, padding, length))
        rows, sums = _dense(spec, values, dataclasses.replace(given, q=given.q[b : b + 1], k=k, v=v), shard, dtype)
        o[b] = rows[0]
        if sums is not None:
            lse[b] = sums[0]
    return o, lse if spec.weights.form.normalised else None


def _dense(
    spec: AttentionSpec, values: Arguments, given: Inputs, shard: Shard, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    plain_params = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in given.params.items()}
    sizes = shard.sizes(given.q.shape[-1], given.v.shape[-1])
    probability = 0.0  # over a cache nothing is dropped
    if values.held is None:
        probability = drop_probability(spec, param_values(spec, plain_params, sizes), sizes)
        probability = float(values.options.get("dropout_p", probability))
    return attention(
        spec,
        *(values.rows(given) if values.held is None else (given.q, given.k, given.v)),
        tensors=given.captured,
        params=given.params,
        shard=shard,
        dropout=Dropout(probability, values.options["seed"]) if probability else None,
        dtype=dtype,
        rounded=functools.partial(rounded_weights, phase=values.phase)
        if values.phase and dtype is torch.bfloat16
        else None,
    )


def is_second(call: CallDraw, values: Arguments) -> bool:
    """Whether derivatives of the second order are judged; a cache has none, nor have 8 bits."""
    return call.order > 1 and values.held is None and values.factors is None


def second(
    spec: AttentionSpec, function: Function, given: Inputs, learned: Mapping[str, Tensor], call: CallDraw
) -> Results:
    """Tangents and gradients of gradients; as for gradients one arrives through lse with ``all``."""
    still = [name for name in learned if (name if name in ("q", "k", "v") else "captured") in call.still]

    def of_leaves(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return function(_with(spec, given, leaves))

    d_lse = given.d_lse if call.wants == "all" else None
    judged = mixed_order if call.mixed else second_order
    return judged(of_leaves, learned, given.d_o, d_lse, still)


def _with(spec: AttentionSpec, given: Inputs, leaves: Mapping[str, Tensor]) -> Inputs:
    """The inputs with leaves in the place of what they are made of."""
    names = {tensor.name for tensor in spec.tensors}
    return Inputs(
        leaves.get("q", given.q),
        leaves.get("k", given.k),
        leaves.get("v", given.v),
        {name: leaves.get(name, x) for name, x in given.captured.items()},
        {name: x if name in names else leaves.get(name, x) for name, x in given.params.items()},
        given.d_o,
        given.d_lse,
    )


def results_of(
    spec: AttentionSpec,
    function: Function,
    given: Inputs,
    learned: Mapping[str, Tensor],
    wants: str,
) -> Results:
    """o, lse and gradients. With ``all`` the gradient of lse arrives, too; else lse is only a result."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in learned.items()}
    o, lse = function(_with(spec, given, leaves))
    found = {"o": o.detach()}
    outputs, arriving = [o], [given.d_o]
    if lse is not None:
        found["lse"] = lse.detach()
        if wants == "all":
            outputs.append(lse)
            arriving.append(given.d_lse.to(lse.dtype))
    connected = [(x, gradient) for x, gradient in zip(outputs, arriving, strict=True) if x.requires_grad]
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if connected and leaves:
        results, arrived = zip(*connected, strict=True)
        gradients = torch.autograd.grad(results, list(leaves.values()), arrived, materialize_grads=True)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
