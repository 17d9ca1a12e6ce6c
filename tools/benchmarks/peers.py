"""What an operator is timed against: PyTorch's own ways to compute the same attention.

In: an ``AttentionSpec`` and the arguments of a call. Out: a ``Peer``, or ``Inexpressible`` with the reason why a peer
cannot compute this spec.

    dense     the formula of any spec composed of PyTorch's operators, every Nq × Nk matrix formed
    standard  the paper's Algorithm 0: product, mask or bias, softmax, dropout, product
    sdpa      torch.nn.functional.scaled_dot_product_attention: with is_causal where that is all, else with a mask or
              bias of size Nq × Nk, which is made once, outside the time, in the peer's favour
    rabe_staats   the same in chunks of 1024 queries by √Nk keys under checkpoints, as Rabe and Staats have it; its mask
              or bias is evaluated chunk by chunk within the time, so that nothing of size Nq × Nk is formed
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
from torch.utils.checkpoint import checkpoint

from flashgen.analysis.differentiate import derivative
from flashgen.analysis.simplify import simplify
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Symbol, SymbolKind, index, index_set, literal, score_input, substitute, walk
from flashgen.ir.spec import AttentionSpec
from flashgen.plan.paper import rabe_staats_blocks
from flashgen.reference.dense import param_values
from flashgen.reference.evaluate import Evaluator, Guard
from flashgen.reference.shard import Shard
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import dense
from tools.benchmarks.flex import flex_peer
from tools.benchmarks.peer import Arguments, Inexpressible, Peer, lowered_inputs

_MOST_COUNTED, _MOST_AT_ONCE = 2**26, 2**22

CAUSAL = apply("le", index("j"), index("i"))


def dense_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:  # noqa: ARG001 - the spec's own
    """PyTorch's operators one after the other, in the tensors' dtype."""

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:
        return dense(spec, q, k, v, named, inputs.q.dtype)[0]

    return Peer(run)


def sdpa_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:
    """``scaled_dot_product_attention``, for softmax over s plus a function of positions."""
    found = _additive(_terms(spec, inputs, drop), spec, inputs)
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
    found = _additive(_terms(spec, inputs, drop), spec, inputs)
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


def rabe_staats_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:
    """``tools/paper/rabe_staats.py`` as one writes it in PyTorch; for what SDPA can, too."""
    terms = _terms(spec, inputs, drop)
    blocks = rabe_staats_blocks(inputs.q.shape[2], inputs.k.shape[2])
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    q_len, kv_len, device = inputs.q.shape[2], inputs.k.shape[2], inputs.q.device
    rows = [torch.arange(n, min(n + blocks.Br, q_len), device=device) for n in range(0, q_len, blocks.Br)]
    columns = [torch.arange(n, min(n + blocks.Bc, kv_len), device=device) for n in range(0, kv_len, blocks.Bc)]
    group = inputs.q.shape[1] // max(inputs.k.shape[1], 1)

    def summary(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk's own output, sum and maximum; no gradient goes through the maximum."""
        s = q @ k.transpose(-1, -2) * terms.scale
        if terms.bias is not None or terms.keep is not None:
            at = _position_evaluator(spec, inputs, shard, i, j)
            if terms.bias is not None:
                s = s + at.real(terms.bias).to(s.dtype)
            if terms.keep is not None:
                s = s.masked_fill(~at.boolean(terms.keep), -torch.inf)
        m = s.detach().amax(-1, keepdim=True)
        p = (s - m.masked_fill(m == -torch.inf, 0.0)).exp()
        ell = p.sum(-1, keepdim=True)
        return (torch.nn.functional.dropout(p, drop) if drop else p) @ v, ell, m

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:  # noqa: ARG001 - the terms read them
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found = []
        for i in rows:
            q_i, own = q.narrow(2, int(i[0]), len(i)), []
            for j in columns:
                given = (q_i, k.narrow(2, int(j[0]), len(j)), v.narrow(2, int(j[0]), len(j)), i, j)
                own.append(
                    checkpoint(summary, *given, use_reentrant=False) if torch.is_grad_enabled() else summary(*given)
                )
            largest = torch.stack([m for _, _, m in own]).amax(0)
            largest = largest.masked_fill(largest == -torch.inf, 0.0)
            factors = [(m - largest).exp() for _, _, m in own]
            o, ell = torch.zeros_like(own[0][0]), torch.zeros_like(own[0][1])
            for factor, (own_o, own_ell, _) in zip(factors, own, strict=True):
                o, ell = o + factor * own_o, ell + factor * own_ell
            found.append(o / ell)
        return torch.cat(found, 2)

    return Peer(run)


@dataclass(frozen=True)
class _Terms:
    """softmax(scale · q·k + bias) over the pairs that ``keep`` says, None where it is 0, or all are kept."""

    scale: float
    bias: Expr | None
    keep: Expr | None


@dataclass(frozen=True)
class _Additive:
    """softmax(scale · q·k + additive): a bias, or booleans that say which pairs are kept; ``is_causal`` instead."""

    scale: float
    additive: Tensor | None
    is_causal: bool


def _terms(spec: AttentionSpec, inputs: Inputs, drop: float | None) -> _Terms:
    """The spec in this form; ``drop``: a peer's own dropout will do."""
    bias, keep = additive_terms(spec, own_dropout=drop is not None)
    if any(tensor.grad for tensor in spec.tensors) or any(param.grad for param in spec.params):
        raise Inexpressible("it takes its bias as one matrix, and passes no gradient to what that was made from")
    evaluate = _position_evaluator(spec, inputs, Shard.whole(inputs.q.shape, inputs.k.shape))
    return _Terms(float(evaluate.real(spec.scale)), bias, keep)


def additive_terms(spec: AttentionSpec, *, own_dropout: bool = False) -> tuple[Expr | None, Expr | None]:
    """The bias and the condition of softmax(scale · q·k + bias); None where it is 0, or all pairs are kept.

    Raises ``Inexpressible`` for every other formula, and for dropout unless a peer's ``own_dropout`` will do.
    """
    if not spec.weights.form.exponential or spec.weights.sink is not None:
        raise Inexpressible("it computes a plain softmax only")
    if spec.dropout is not None and not own_dropout:
        raise Inexpressible("its dropout makes other decisions")
    symbols = {node.name for node in walk(spec.score) if isinstance(node, Symbol) and node.kind is SymbolKind.SCORE}
    if not symbols <= {"s"} or simplify(derivative(apply("to_float", spec.score), score_input("s"))) != literal(1.0):
        raise Inexpressible("it adds a function of positions to s, and does nothing else with s")
    bias = simplify(substitute(apply("to_float", spec.score), {score_input("s"): literal(0.0)}))
    keep = spec.mask if spec.layout is None else simplify(apply("and", spec.mask, spec.layout.keep))
    return None if bias == literal(0.0) else bias, None if keep == literal(True) else keep


def _additive(terms: _Terms, spec: AttentionSpec, inputs: Inputs) -> _Additive:
    """With the bias as a matrix, at these arguments."""
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    evaluate = _position_evaluator(spec, inputs, shard)
    is_causal = terms.keep == CAUSAL and terms.bias is None and shard.q_len == shard.kv_len
    additive: Tensor | None = None
    if terms.bias is not None:
        shape = (shard.batch, shard.heads, shard.q_len, shard.kv_len)
        additive = evaluate.real(terms.bias).expand(shape).to(inputs.q.dtype)
    if terms.keep is not None and not is_causal:
        keep = evaluate.boolean(terms.keep)
        additive = keep if additive is None else torch.where(keep, additive, -torch.inf)
    return _Additive(terms.scale, additive, is_causal)


MakesPeer = Callable[[AttentionSpec, Inputs, float | None], Peer]


def _of_lowered(make: MakesPeer) -> MakesPeer:
    """The same peer of the spec that kernels are made for, which has a mask where a spec may select keys."""

    def made(spec: AttentionSpec, inputs: Inputs, drop: float | None) -> Peer:
        spec, inputs = lowered_inputs(spec, inputs)
        return make(spec, inputs, drop)

    return made


PEERS: Mapping[str, MakesPeer] = MappingProxyType(
    {
        "sdpa": _of_lowered(sdpa_peer),
        "standard": _of_lowered(standard_peer),
        "rabe_staats": _of_lowered(rabe_staats_peer),
        "flex": _of_lowered(flex_peer),
        "dense": dense_peer,
    }
)


def kept_share(spec: AttentionSpec, inputs: Inputs, most: int = _MOST_COUNTED) -> float:
    """The share of pairs that positions keep; of evenly spaced rows where there are more than ``most`` pairs."""
    spec, inputs = lowered_inputs(spec, inputs)
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


def _position_evaluator(
    spec: AttentionSpec, inputs: Inputs, shard: Shard, rows: Tensor | None = None, columns: Tensor | None = None
) -> Evaluator:
    """Evaluates what depends on positions, sizes, params and captured tensors; of these query rows and keys, or all."""
    sizes = shard.sizes(inputs.q.shape[-1], inputs.v.shape[-1])
    device = inputs.q.device
    symbols: dict[str, Tensor] = {name: torch.tensor(value, device=device) for name, value in sizes.items()}
    for axis, (name, length) in enumerate(
        zip("bhij", (shard.batch, shard.heads, shard.q_len, shard.kv_len), strict=True)
    ):
        chosen = {"i": rows, "j": columns}.get(name)
        positions = torch.arange(length, device=device) if chosen is None else chosen
        symbols[name] = positions.view([-1 if axis == place else 1 for place in range(4)])
    symbols["hkv"] = symbols["h"] // shard.group
    if spec.layout is not None:
        symbols |= {"I": symbols["i"] // spec.layout.block, "J": symbols["j"] // spec.layout.block}
    params = param_values(spec, {name: float(value) for name, value in inputs.params.items()}, sizes)
    values = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in params.items()}
    return Evaluator(symbols, values, inputs.captured, torch.float32, Guard())
