"""What an operator is timed against: PyTorch's own ways to compute the same attention.

In: an ``AttentionSpec`` and the arguments of a call. Out: a ``Peer``, or ``Inexpressible`` with the reason why a peer
cannot compute this spec.

    dense     the formula of any spec composed of PyTorch's operators, every Nq × Nk matrix formed
    standard  the paper's Algorithm 0: product, mask or bias, softmax, dropout, product
    sdpa      torch.nn.functional.scaled_dot_product_attention: with is_causal where that is all, else with a mask or
              bias of size Nq × Nk, which is made once, outside the time, in the peer's favour
    flex      torch.nn.attention.flex_attention, compiled, its block mask made outside the time; forward only on a CPU

Dropout of a peer makes other decisions than a spec's: it is used only where a drop probability is given for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from flashgen.analysis.differentiate import derivative
from flashgen.analysis.simplify import simplify
from flashgen.benchmark.flex import flex_peer
from flashgen.benchmark.peer import Arguments, Inexpressible, Peer
from flashgen.ir.build import apply
from flashgen.ir.expr import Symbol, SymbolKind, index, index_set, literal, score_input, substitute, walk
from flashgen.ir.spec import AttentionSpec, Softmax
from flashgen.reference.dense import param_values
from flashgen.reference.evaluate import Evaluator, Guard
from flashgen.reference.shard import Shard
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import dense

_MOST_COUNTED, _MOST_AT_ONCE = 2**26, 2**22

CAUSAL = apply("le", index("j"), index("i"))


def dense_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:  # noqa: ARG001 - the spec's own
    """PyTorch's operators one after the other, in the tensors' dtype."""

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:
        return dense(spec, q, k, v, named, inputs.q.dtype)[0]

    return Peer(run)


def sdpa_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:
    """``scaled_dot_product_attention``, for softmax over s plus a function of positions."""
    found = _additive(spec, inputs, drop)
    group = inputs.q.shape[1] // max(inputs.k.shape[1], 1)

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:  # noqa: ARG001 - the bias holds them
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=found.additive,
            dropout_p=drop or 0.0,
            is_causal=found.is_causal,
            scale=found.scale,
            enable_gqa=group > 1,
        )

    return Peer(run)


def standard_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:
    """Algorithm 0 as one writes it in PyTorch: S, P and the dropped P are formed; for what SDPA can, too.

    The mask or bias is made outside the time, in the peer's favour. Without a mask or bias a row sees every key.
    """
    found = _additive(spec, inputs, drop)
    additive = found.additive
    if found.is_causal:
        additive = torch.ones(inputs.q.shape[2], inputs.k.shape[2], dtype=torch.bool, device=inputs.q.device).tril()
    masked = None if additive is None or additive.dtype is not torch.bool else ~additive
    group = inputs.q.shape[1] // max(inputs.k.shape[1], 1)

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:  # noqa: ARG001 - the bias holds them
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ k.transpose(-1, -2) * found.scale
        if masked is not None:
            s = s.masked_fill(masked, -torch.inf)
        elif additive is not None:
            s = s + additive
        p = torch.softmax(s, -1)
        return (torch.nn.functional.dropout(p, drop) if drop else p) @ v

    return Peer(run)


@dataclass(frozen=True)
class _Additive:
    """softmax(scale · q·k + additive): a bias, or booleans that say which pairs are kept; ``is_causal`` instead."""

    scale: float
    additive: Tensor | None
    is_causal: bool


def _additive(spec: AttentionSpec, inputs: Inputs, drop: float | None) -> _Additive:
    """The spec in this form, with its bias at these arguments; ``drop``: a peer's own dropout will do."""
    _check_expressible(spec, own_dropout=drop is not None)
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    evaluate = _position_evaluator(spec, inputs, shard)
    scale = float(evaluate.real(spec.scale))
    bias = simplify(substitute(apply("to_float", spec.score), {score_input("s"): literal(0.0)}))
    keeps_all = spec.mask == literal(True) and spec.layout is None
    is_causal = spec.mask == CAUSAL and spec.layout is None and shard.q_len == shard.kv_len
    additive: Tensor | None = None
    if bias != literal(0.0):
        additive = evaluate.real(bias).expand(shard.batch, shard.heads, shard.q_len, shard.kv_len).to(inputs.q.dtype)
        is_causal = False
    if not keeps_all and not is_causal:
        keep = (
            evaluate.boolean(spec.mask)
            if spec.layout is None
            else evaluate.boolean(spec.mask) & evaluate.boolean(spec.layout.keep)
        )
        additive = keep if additive is None else torch.where(keep, additive, -torch.inf)
    return _Additive(scale, additive, is_causal)


PEERS: Mapping[str, Callable[[AttentionSpec, Inputs, float | None], Peer]] = MappingProxyType(
    {"sdpa": sdpa_peer, "standard": standard_peer, "flex": flex_peer, "dense": dense_peer}
)


def _check_expressible(spec: AttentionSpec, *, own_dropout: bool) -> None:
    if not isinstance(spec.weights, Softmax) or spec.weights.sink is not None:
        raise Inexpressible("it computes a plain softmax only")
    if spec.dropout is not None and not own_dropout:
        raise Inexpressible("its dropout makes other decisions")
    symbols = {node.name for node in walk(spec.score) if isinstance(node, Symbol) and node.kind is SymbolKind.SCORE}
    if not symbols <= {"s"} or simplify(derivative(apply("to_float", spec.score), score_input("s"))) != literal(1.0):
        raise Inexpressible("it adds a function of positions to s, and does nothing else with s")
    if any(tensor.grad for tensor in spec.tensors) or any(param.grad for param in spec.params):
        raise Inexpressible("it takes its bias as one matrix, and passes no gradient to what that was made from")


def kept_share(spec: AttentionSpec, inputs: Inputs, most: int = _MOST_COUNTED) -> float:
    """The share of pairs that mask and layout keep; of evenly spaced rows where there are more than ``most`` pairs."""
    heads, q_len, kv_len = inputs.q.shape[1], inputs.q.shape[2], inputs.k.shape[2]
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    keep = spec.mask if spec.layout is None else apply("and", spec.mask, spec.layout.keep)
    axes = index_set(keep)
    if not axes or 0 in (heads, q_len, kv_len):
        return 1.0
    if axes <= {"i", "j"}:
        shard = replace(shard, batch=1, heads=shard.group, kv_heads=1, b_total=inputs.q.shape[0], h_total=heads)
    per_row = shard.batch * shard.heads * kv_len
    rows = range(0, q_len, max(1, per_row * q_len // most))
    step = max(1, _MOST_AT_ONCE // per_row)
    kept = 0.0
    for start in range(0, len(rows), step):
        evaluate = _position_evaluator(
            spec, inputs, shard, torch.tensor(rows[start : start + step], device=inputs.q.device)
        )
        value = evaluate.boolean(keep)
        full = (shard.batch, shard.heads, len(rows[start : start + step]), kv_len)
        kept += float(value.double().mean()) * math.prod(full)
    return kept / (per_row * len(rows))


def _position_evaluator(spec: AttentionSpec, inputs: Inputs, shard: Shard, rows: Tensor | None = None) -> Evaluator:
    """Evaluates what depends on positions, sizes, params and captured tensors; of these query rows, or all."""
    sizes = shard.sizes(inputs.q.shape[-1], inputs.v.shape[-1])
    device = inputs.q.device
    symbols: dict[str, Tensor] = {name: torch.tensor(value, device=device) for name, value in sizes.items()}
    for axis, (name, length) in enumerate(
        zip("bhij", (shard.batch, shard.heads, shard.q_len, shard.kv_len), strict=True)
    ):
        positions = rows if rows is not None and name == "i" else torch.arange(length, device=device)
        symbols[name] = positions.view([-1 if axis == place else 1 for place in range(4)])
    symbols["hkv"] = symbols["h"] // shard.group
    if spec.layout is not None:
        symbols |= {"I": symbols["i"] // spec.layout.block, "J": symbols["j"] // spec.layout.block}
    params = param_values(spec, {name: float(value) for name, value in inputs.params.items()}, sizes)
    values = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in params.items()}
    return Evaluator(symbols, values, inputs.captured, torch.float32, Guard())
