"""Dense attention straight from the IR: the judge of every backend.

In: an ``AttentionSpec`` and tensors of any floating type. Out: ``o`` and ``lse``, differentiable by autograd. Every
matrix of the formula is formed, [B, H, Nq, Nk] each; nothing is rearranged, tiled or rescaled online.

    S = score(τ Q Kᵀ)      keep = mask ∧ layout ∧ select ∧ S ≠ -inf
    P = weights(S)         P' = dropout(P)              O = P' V

A pair that is not kept has weight exactly 0, and no gradient passes through it. A row without a kept pair, or with a
denominator of 0, gives o = 0, lse = -inf and zero gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from flashgen.ir.build import constant_value
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, size, substitute, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.spec import AttentionSpec, Param, Select
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import TOTAL, WEIGHT, Form
from flashgen.reference.evaluate import Evaluator, Guard, TorchNamespace
from flashgen.reference.philox import drop_threshold, kept_pairs, survivor_scale
from flashgen.reference.shard import Shard


@dataclass(frozen=True)
class Dropout:
    """Drop probability and seed (an int, or a 0-dim int64 tensor)."""

    probability: float
    seed: int | Tensor


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    params: Mapping[str, Tensor | float] | None = None,
    shard: Shard | None = None,
    dropout: Dropout | None = None,
    dtype: torch.dtype | None = None,
    rounded: Callable[[Tensor], Tensor] | None = None,
    settles: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The attention of ``spec``, densely.

    ``q`` [B, H, Nq, D], ``k`` [B, Hkv, Nk, D], ``v`` [B, Hkv, Nk, Dv], converted to ``dtype`` (default:
    that of q). ``tensors`` and ``params`` by name; params left out take their defaults. ``shard`` places
    the call in a larger problem. ``dropout`` None: no dropout, whatever the spec says (see
    ``drop_probability``). ``rounded`` is applied to the weights [B, H, Nq, Nk] before
    the product with V. ``settles``: P of a row with one key is the constant 1 or -1, whose derivatives are exactly 0.

    Returns ``o`` [B, H, Nq, Dv] and ``lse`` [B, H, Nq], both in ``dtype``; ``lse``, the logarithm of the denominator,
    is None where the weights have none. Raises ``KeyError`` for a tensor or required param that is missing.
    """
    dtype = dtype or q.dtype
    shard = shard or Shard.whole(q.shape, k.shape)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if shard.heads == 0:
        k, v = k[:, :0], v[:, :0]
    if shard.group != 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, shard.group, -1, -1).flatten(1, 2) for x in (k, v))
    evaluate, indices = evaluator(spec, q, v, shard, tensors or {}, params or {}, dtype)
    guard = evaluate.guard
    keep = kept_by_position(spec, evaluate).expand(*q.shape[:3], k.shape[2])

    score = _score(spec, evaluate, q, k)
    keep = keep & (score != -torch.inf)
    guard.narrow(keep)
    # Masked pairs have a score of 0 from here on: no weight function sees -inf, or what a mask hides.
    score = torch.where(keep, score, 0.0)
    weight, lse = _weights(spec, evaluate, score)
    if settles and spec.weights.form.divided:
        weight = torch.where(keep.sum(-1, keepdim=True) == 1, weight.detach(), weight)
    if dropout is not None and dropout.probability > 0:
        threshold = drop_threshold(dropout.probability)
        survives = kept_pairs(dropout.seed, threshold, *(x.flatten() for x in indices))
        weight = weight * survivor_scale(threshold) * survives  # as in PyTorch, a row of NaN stays one, also if dropped
    return (weight if rounded is None else rounded(weight)) @ v, lse


def param_values(spec: AttentionSpec, given: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    """The value of every param: given, or its default over the sizes and earlier params, in float32.

    Raises ``KeyError`` for a required one that is missing.
    """
    values = known_values(sizes)
    found: dict[str, float] = {}
    for param in spec.params:
        if param.name in given:
            value = given[param.name]
        elif param.default is None:
            raise KeyError(param.name)
        else:
            value = constant_number(substitute(param.default, values))
            if param.type is ScalarType.FLOAT:
                with np.errstate(over="ignore"):
                    value = float(np.float32(value))
        found[param.name] = float(value) if param.type is ScalarType.FLOAT else int(value)
        values |= known_values({}, (param,), found)
    return found


def known_values(
    sizes: Mapping[str, int], declared: Sequence[Param] = (), params: Mapping[str, float] = MappingProxyType({})
) -> dict[Expr, Expr]:
    """The values of sizes, and of the params that are ``declared``, as substitutions for their symbols."""
    own: dict[Expr, Expr] = {
        Symbol(each.type, name=each.name, kind=SymbolKind.PARAM): Literal(each.type, value=params[each.name])
        for each in declared
    }
    return {size(name): literal(value) for name, value in sizes.items()} | own


def drop_probability(spec: AttentionSpec, params: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The spec's drop probability for these params; 0 without a dropout statement."""
    if spec.dropout is None:
        return 0.0
    return float(constant_number(substitute(spec.dropout, known_values(sizes, spec.params, params))))


def constant_number(expr: Expr) -> float:
    """The value of an expression without symbols."""
    value = constant_value(expr)
    if value is None:
        raise AssertionError("the resolver lets params, shapes and dropout depend on sizes and params only")
    return value


def evaluator(
    spec: AttentionSpec,
    q: Tensor,
    v: Tensor,
    shard: Shard,
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Tensor | float],
    dtype: torch.dtype,
) -> tuple[Evaluator, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """An evaluator that knows indices, sizes and params; and the indices b, h, i, j, shaped to broadcast."""

    def positions(start: int, length: int, axis: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[axis] = length
        return torch.arange(start, start + length, device=q.device).view(shape)

    b, h = positions(shard.b_start, shard.batch, 0), positions(shard.h_start, shard.heads, 1)
    i, j = positions(shard.q_start, shard.q_len, 2), positions(shard.kv_start, shard.kv_len, 3)
    sizes = shard.sizes(q.shape[-1], v.shape[-1])
    symbols = {"b": b, "h": h, "hkv": h // shard.group, "i": i, "j": j}
    symbols |= {name: torch.tensor(value, device=q.device) for name, value in sizes.items()}
    if spec.layout is not None:
        symbols |= {"I": i // spec.layout.block, "J": j // spec.layout.block}
    values = {name: x.to(q.device) for name, x in params.items() if isinstance(x, Tensor)}
    if len(values) < len(spec.params):  # asked for here alone: what torch.vmap maps has no number
        plain = {name: x.item() if isinstance(x, Tensor) else x for name, x in params.items()}
        for name, value in param_values(spec, plain, sizes).items():
            values.setdefault(name, torch.tensor(value, dtype=torch.float64, device=q.device))
    return Evaluator(symbols, values, tensors, dtype, Guard()), (b, h, i, j)


def kept_by_position(spec: AttentionSpec, evaluate: Evaluator) -> Tensor:
    """Which pairs mask, layout and selection keep; broadcasts to [B, H, Nq, Nk]."""
    keep = evaluate.boolean(spec.mask)
    if spec.layout is not None:
        keep = keep & evaluate.boolean(spec.layout.keep)
    return keep if spec.select is None else keep & _is_selected(spec.select, evaluate)


def _is_selected(select: Select, evaluate: Evaluator) -> Tensor:
    """Whether a query's list contains the block of a key."""
    block = evaluate.symbols["j"].flatten() // select.block
    numbers = evaluate.listed(select.tensor, select.indices)
    blocks = int(block.max()) + 1 if block.numel() else 0
    # One more block at the end takes the numbers that name none.
    numbers = torch.where((numbers >= 0) & (numbers < blocks), numbers.long(), blocks)
    is_named = numbers.new_zeros((*numbers.shape[:-1], blocks + 1), dtype=torch.bool).scatter_(-1, numbers, value=True)
    found = is_named.index_select(-1, block)
    return found.squeeze(-2) if found.dim() > 1 else found  # no index is over keys


def _score(spec: AttentionSpec, evaluate: Evaluator, q: Tensor, k: Tensor) -> Tensor:
    """score(s, dot, sqdist), [B, H, Nq, Nk]."""
    dot = q @ k.transpose(-1, -2)
    symbols = {"dot": dot, "s": evaluate.real(spec.scale) * dot}
    if any(isinstance(node, Symbol) and node.name == "sqdist" for node in walk(spec.score)):
        symbols["sqdist"] = squared_distance(q, k)
    return evaluate.given(**symbols).real(spec.score).expand(dot.shape)


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """‖q - k‖², accumulated in at least float32 and rounded once, as a matrix product is."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, dtype = q.to(wide), k.to(wide), q.dtype
    squares = (q * q).sum(-1).unsqueeze(-1) + (k * k).sum(-1).unsqueeze(-2)
    return (squares - 2.0 * (q @ k.transpose(-1, -2))).to(dtype)


def _weights(spec: AttentionSpec, evaluate: Evaluator, score: Tensor) -> tuple[Tensor, Tensor | None]:
    """P [B, H, Nq, Nk] and the logarithm of the row's denominator, None where there is none."""
    keep = evaluate.guard.keep
    assert keep is not None, "the score has been masked"
    form = spec.weights.form
    if spec.weights.weight is None:
        return _softmax(spec.weights.sink, evaluate, score, keep)
    weight = torch.where(keep, evaluate.given(s=score).real(spec.weights.weight), 0.0)
    if not form.normalised:
        return weight, None
    total = term(form, weight).sum(-1, keepdim=True)
    some = total != 0  # true for NaN, which passes through
    safe = denominator(form, torch.where(some, total, 1.0))
    lse = torch.where(some, safe.log(), -torch.inf)
    return torch.where(some, weight / safe, 0.0), lse.squeeze(-1)


def _softmax(sink: Expr | None, evaluate: Evaluator, score: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    some = keep.any(-1, keepdim=True)
    top = score.new_full(some.shape, -torch.inf)
    if score.shape[-1] > 0:
        top = torch.where(keep, score.detach(), -torch.inf).amax(-1, keepdim=True)
    sunk = None if sink is None else evaluate.of_rows(some.shape).real(sink).expand(some.shape)
    if sunk is not None:
        top = torch.maximum(top, sunk.detach())
        some = some | (sunk != -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.where(keep, (score - top).exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    if sunk is not None:
        total = total + (sunk - top).exp()
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, safe.log() + top, -torch.inf)
    return weight / safe, lse.squeeze(-1)


def term(form: Form, weight: Tensor) -> Tensor:
    """The term that each weight adds to its row's total."""
    return value_of(form.term, {WEIGHT: weight}, weight)


def denominator(form: Form, total: Tensor) -> Tensor:
    """The denominator Z for each total."""
    return value_of(form.denominator, {TOTAL: total}, total)


def value_of(formula: Expr | None, values: Mapping[Expr, Tensor], like: Tensor) -> Tensor:
    """The value of a formula of a form of weights, in the type of ``like``."""
    match formula:
        case Literal(value=value):
            return like.new_full((), float(value))
        case Apply(op=op, args=args):
            operands = (value_of(each, values, like) for each in args)
            found: Tensor = OPERATORS[op].meaning(TorchNamespace(like.dtype), *operands)
            return found
        case Expr():
            return values[formula]
    raise AssertionError("a form without a denominator has no such formula")
