"""What a spec does to one block of pairs: SCORE, MASK, weights and dropout, and their derivatives.

In: a ``Problem``, the place of a block, Q_i and K_j on the chip. Out: matrices [B_r, B_c] for the lines of the paper's
algorithms. Captured tensors are read from the HBM element by element, where the formula uses them, and their gradients
are added there. The score's own derivative comes from autograd; everything else of the backward pass is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Load, Symbol, SymbolKind, score_input, walk
from flashgen.ir.weights import D_PROBABILITY, DELTA, INVERSE, PROBABILITY
from flashgen.plan.arguments import gradient_field, tensor_field
from flashgen.plan.paper import BlockSizes
from flashgen.reference.dense import denominator, evaluator, kept_by_position, squared_distance, term, value_of
from flashgen.reference.evaluate import Evaluator
from flashgen.reference.philox import drop_threshold, kept_pairs, survivor_scale
from flashgen.reference.tiled import Problem
from tools.paper.hbm import Hbm

_S = score_input("s")


@dataclass(frozen=True)
class Place:
    """One block: a batch element, a query head, query rows, keys; all counted within the call."""

    b: int
    h: int
    rows: slice
    columns: slice


@dataclass(frozen=True)
class Row:
    """What a row of the softmax carries, [B_r] each: the maximum m and the sum ℓ of exp(s - m).

    Of other weights ℓ is the total of their form's terms while keys are added, and the denominator once ``closed``.
    """

    m: Tensor
    ell: Tensor


def blocks_of(length: int, size: int) -> list[slice]:
    """⌈length / size⌉ blocks; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def key_heads(problem: Problem) -> Iterator[tuple[int, int, range]]:
    """Batch element, key/value head, and the query heads that share it: the paper has one of each."""
    group = problem.shard.group
    for b in range(problem.shard.batch):
        for shared in range(problem.shard.kv_heads if problem.shard.heads else 0):
            yield b, shared, range(shared * group, (shared + 1) * group)


def row_blocks(problem: Problem, heads: range, blocks: BlockSizes) -> list[tuple[int, slice]]:
    """The T_r blocks of the rows of these query heads."""
    return [(h, rows) for h in heads for rows in blocks_of(problem.shard.q_len, blocks.Br)]


# -- the score of a block ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counting(Evaluator):
    """An evaluator whose captured tensors lie in the HBM."""

    hbm: Hbm = field(default_factory=Hbm)

    def _compute(self, node: Expr) -> tuple[Tensor, bool]:
        value, by_score = super()._compute(node)
        if isinstance(node, Load):
            self.hbm.read(tensor_field(node.tensor), value.numel())
        return value, by_score


@dataclass(frozen=True)
class Pairs:
    """A block of pairs on the chip.

    ``S`` [B_r, B_c] is the masked score, -∞ where a pair is not kept (``keep``). The graph of ``score``, the
    unmasked one, starts from ``dot``, ``sqdist`` and ``leaves``, the captured values that receive a gradient.
    """

    problem: Problem
    hbm: Hbm
    place: Place
    S: Tensor
    keep: Tensor
    score: Tensor
    dot: Tensor
    sqdist: Tensor | None
    leaves: Mapping[str, Tensor]
    evaluate: Evaluator


def pairs(
    problem: Problem, hbm: Hbm, place: Place, Q_i: Tensor | None, K_j: Tensor | None, *, gradients: bool = False
) -> Pairs:
    """S_ij^masked = MASK(score(Q_i K_jᵀ)). Without Q_i and K_j the products are 0, for where they do not matter."""
    shape = (place.rows.stop - place.rows.start, place.columns.stop - place.columns.start)
    dot = problem.q.new_zeros(shape, dtype=problem.compute)
    sqdist = None
    if Q_i is not None and K_j is not None:
        dot = hbm.product(Q_i, K_j.T)
        sqdist = squared_distance(Q_i, K_j) if uses_sqdist(problem) else None
    leaves = _leaves(problem) if gradients else {}
    if gradients:
        dot.requires_grad_()
        sqdist = None if sqdist is None else sqdist.requires_grad_()
    with torch.set_grad_enabled(gradients):
        evaluate = _evaluator_at(problem, hbm, place, leaves)
        keep = kept_by_position(problem.spec, evaluate)
        score = _score(problem, evaluate, dot, sqdist)
        keep = keep.expand(score.shape).logical_and(score != -torch.inf)
        evaluate.guard.narrow(keep)
        kept = keep[0, 0]
    S = torch.where(kept, score[0, 0].detach(), -torch.inf)
    return Pairs(problem, hbm, place, S, kept, score, dot, sqdist, leaves, evaluate)


def stored_pairs(problem: Problem, hbm: Hbm, place: Place, S: Tensor) -> Pairs:
    """The block whose masked score was stored: its weights can be formed again, but nothing behind the score."""
    leaves = _leaves(problem)
    evaluate = _evaluator_at(problem, hbm, place, leaves)
    keep = S.isneginf().logical_not()
    evaluate.guard.narrow(keep[None, None])
    return Pairs(problem, hbm, place, S, keep, S[None, None], torch.zeros_like(S), None, leaves, evaluate)


def keeps_some(problem: Problem, place: Place) -> bool:
    """Whether mask and layout keep a pair of a block; nothing is counted, since masks of blocks are made beforehand."""
    return bool(kept_by_position(problem.spec, _evaluator_at(problem, Hbm(), place, {})).any())


def captured_names(problem: Problem) -> tuple[str, ...]:
    """The captured tensors, and the params that are tensors, that receive a gradient."""
    declared = [each.name for each in problem.spec.tensors if each.grad]
    declared += [each.name for each in problem.spec.params if each.grad]
    given = {**problem.params, **problem.tensors}
    return tuple(name for name in declared if isinstance(given.get(name), Tensor))


def given_tensor(problem: Problem, name: str) -> Tensor:
    """A captured tensor, or a param that is one."""
    value = problem.tensors.get(name, problem.params.get(name))
    assert isinstance(value, Tensor)
    return value


def uses_sqdist(problem: Problem) -> bool:
    """Whether the score needs ‖q_i - k_j‖²."""
    return score_input("sqdist") in set(walk(problem.spec.score))


def score_is_additive(problem: Problem) -> bool:
    """Whether the score is τ QKᵀ plus what does not depend on it: its derivatives then need neither Q nor K."""
    learned = {param.name for param in problem.spec.params if param.grad}
    scaled_by = {node.name for node in walk(problem.spec.scale) if isinstance(node, Symbol)}
    return _is_additive(problem.spec.score) and not learned & scaled_by


def _is_additive(expr: Expr) -> bool:
    if expr == _S:
        return True
    if isinstance(expr, Apply) and expr.op in ("add", "sub"):
        first, second = expr.args
        if _is_additive(first):
            return not _depends_on_score(second)
        return expr.op == "add" and _is_additive(second) and not _depends_on_score(first)
    return False


def _depends_on_score(expr: Expr) -> bool:
    return any(isinstance(node, Symbol) and node.kind is SymbolKind.SCORE for node in walk(expr))


def _leaves(problem: Problem) -> dict[str, Tensor]:
    """Captured tensors and params that receive a gradient, each the start of a graph."""
    return {
        name: given_tensor(problem, name).detach().to(problem.compute).requires_grad_()
        for name in captured_names(problem)
    }


def _evaluator_at(problem: Problem, hbm: Hbm, place: Place, leaves: Mapping[str, Tensor]) -> Evaluator:
    """Knows the coordinates of a block, the sizes, the params and the captured tensors."""
    shard, group = problem.shard, problem.shard.group
    _, h_total, _, kv_total = shard.totals()
    shared = place.h // group
    part = replace(
        shard.part(range(place.b, place.b + 1), range(shared, shared + 1), range(place.rows.start, place.rows.stop)),
        kv_len=place.columns.stop - place.columns.start,
        kv_start=shard.kv_start + place.columns.start,
        h_total=h_total,
        kv_total=kv_total,
    )
    tensors = {**problem.tensors, **{name: leaf for name, leaf in leaves.items() if name in problem.tensors}}
    params = {**problem.params, **{name: leaf for name, leaf in leaves.items() if name in problem.params}}
    found, _ = evaluator(problem.spec, problem.q, problem.v, part, tensors, params, problem.compute)
    h = torch.full((1, 1, 1, 1), shard.h_start + place.h, device=problem.q.device)
    symbols = {**found.symbols, "h": h, "hkv": h // group}
    return _Counting(symbols, found.params, found.tensors, found.dtype, found.guard, hbm=hbm)


def _score(problem: Problem, evaluate: Evaluator, dot: Tensor, sqdist: Tensor | None) -> Tensor:
    """score(s, dot, sqdist), [1, 1, B_r, B_c]."""
    symbols = {"dot": dot[None, None], "s": evaluate.real(problem.spec.scale) * dot[None, None]}
    symbols["sqdist"] = torch.zeros_like(symbols["dot"]) if sqdist is None else sqdist[None, None]
    return evaluate.given(**symbols).real(problem.spec.score).expand(1, 1, *dot.shape)


# -- weights -----------------------------------------------------------------------------------------------------------


def row_names(problem: Problem) -> tuple[str, ...]:
    """What of m and ℓ a spec's rows carry: exponential weights both, others with a denominator only ℓ, else nothing."""
    form = problem.spec.weights.form
    return ("m",) * form.exponential + ("ell",) * form.normalised


def fresh_row(problem: Problem, rows: slice) -> Row:
    """m = -∞ and ℓ = 0, where rows carry them; what they do not carry is the neutral m = 0, ℓ = 1."""
    names = row_names(problem)
    shape = rows.stop - rows.start
    zero = problem.q.new_zeros(shape, dtype=problem.compute)
    return Row(zero - torch.inf if "m" in names else zero, zero if "ell" in names else zero + 1.0)


def first_row(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice) -> Row:
    """The row before its first block: a fresh one, or a sink's, which is a key of its own whose value is 0."""
    if problem.spec.weights.sink is None:
        return fresh_row(problem, rows)
    sink = _sink(problem, hbm, b, h, rows, {}).reshape(-1)
    return Row(sink, (sink != -torch.inf).to(sink.dtype))


def block_weights(block: Pairs) -> tuple[Row, Tensor]:
    """m̃ = rowmax(S), P̃ = exp(S - m̃), ℓ̃ = rowsum(P̃) of a block by itself; P̃ = E(S) for other weights."""
    form = block.problem.spec.weights.form
    if form.exponential:
        m = block.S.amax(-1) if block.S.shape[-1] else block.S.new_full(block.S.shape[:1], -torch.inf)
        P = torch.where(block.keep, (block.S - _finite(m)[:, None]).exp(), 0.0)
    else:
        m = block.S.new_zeros(block.S.shape[0])
        P = _plain_weights(block, block.score.detach()).detach()
    return Row(m, term(form, P).sum(-1) if form.normalised else torch.ones_like(m)), P


def merged(row: Row, block_row: Row, names: Sequence[str]) -> Row:
    """m_new = max(m, m̃), ℓ_new = e^(m - m_new) ℓ + e^(m̃ - m_new) ℓ̃."""
    m = torch.maximum(row.m, block_row.m)
    if "ell" not in names:
        return Row(m, row.ell)
    return Row(m, rescale(row.m, m) * row.ell + rescale(block_row.m, m) * block_row.ell)


def closed(problem: Problem, row: Row) -> Row:
    """The row with its denominator for ℓ."""
    form = problem.spec.weights.form
    return Row(row.m, denominator(form, row.ell)) if form.normalised else row


def rescale(m: Tensor, m_new: Tensor) -> Tensor:
    """e^(m - m_new), 0 where m is -∞."""
    return (m - _finite(m_new)).exp()


def divided(matrix: Tensor, ell: Tensor) -> Tensor:
    """diag(ℓ)⁻¹ matrix; a row without weight stays 0."""
    some = ell != 0
    return torch.where(some[:, None], matrix / torch.where(some, ell, 1.0)[:, None], 0.0)


def log_sum(row: Row) -> Tensor:
    """The row's lse: m + log ℓ, -∞ where nothing was kept."""
    some = row.ell != 0
    return torch.where(some, _finite(row.m) + torch.where(some, row.ell, 1.0).log(), -torch.inf)


def probabilities(block: Pairs, row: Row) -> Tensor:
    """P_ij = diag(ℓ)⁻¹ exp(S - m), for any weights; the row is closed."""
    if block.problem.spec.weights.form.exponential:
        return divided(torch.where(block.keep, (block.S - _finite(row.m)[:, None]).exp(), 0.0), row.ell)
    return divided(_plain_weights(block, block.score.detach()).detach(), row.ell)


def dropout(problem: Problem, place: Place) -> Tensor:
    """Z_ij: the survivors' scale where a pair survives, 0 where it is dropped; 1 where there is no dropout."""
    chosen, shard = problem.dropout, problem.shard
    if chosen is None or chosen.probability == 0:
        return problem.q.new_ones((), dtype=problem.compute)

    def positions(start: int, local: slice) -> Tensor:
        return torch.arange(start + local.start, start + local.stop, device=problem.q.device)

    threshold = drop_threshold(chosen.probability)
    survives = kept_pairs(
        chosen.seed,
        threshold,
        positions(shard.b_start, slice(place.b, place.b + 1)),
        positions(shard.h_start, slice(place.h, place.h + 1)),
        positions(shard.q_start, place.rows),
        positions(shard.kv_start, place.columns),
    )
    return survives[0, 0].to(problem.compute) * survivor_scale(threshold)


def _finite(m: Tensor) -> Tensor:
    return torch.where(m == -torch.inf, 0.0, m)


def _plain_weights(block: Pairs, score: Tensor) -> Tensor:
    """E(S), 0 where a pair is not kept; no weight function sees what a mask hides."""
    weight = block.problem.spec.weights.weight
    assert weight is not None, "exponential weights have no function"
    keep = block.keep[None, None]
    value = block.evaluate.given(s=torch.where(keep, score, 0.0)).real(weight)
    return torch.where(keep, value, 0.0)[0, 0]


def _sink(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice, leaves: Mapping[str, Tensor]) -> Tensor:
    """The sink of each row, [1, 1, B_r, 1]."""
    sink = problem.spec.weights.sink
    assert sink is not None
    shape = torch.Size((1, 1, rows.stop - rows.start, 1))
    evaluate = _evaluator_at(problem, hbm, Place(b, h, rows, slice(0, 0)), leaves)
    return evaluate.of_rows(shape).real(sink).expand(shape)


# -- derivatives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductGradients:
    """What dS_ij becomes behind the score: the gradients of Q_i Kⱼᵀ (the paper's τ dS) and of ‖q_i - k_j‖²."""

    hbm: Hbm
    dot: Tensor
    sqdist: Tensor | None

    def queries(self, Q_i: Tensor | None, K_j: Tensor) -> Tensor:
        """The block's part of dQ_i: τ dS K_j."""
        found = self.hbm.product(self.dot, K_j)
        if self.sqdist is not None and Q_i is not None:
            found = found + 2.0 * (self.sqdist.sum(-1)[:, None] * Q_i - self.sqdist @ K_j)
        return found

    def keys(self, Q_i: Tensor, K_j: Tensor | None) -> Tensor:
        """The block's part of dK_j: τ dSᵀ Q_i."""
        found = self.hbm.product(self.dot.T, Q_i)
        if self.sqdist is not None and K_j is not None:
            found = found + 2.0 * (self.sqdist.sum(0)[:, None] * K_j - self.sqdist.T @ Q_i)
        return found


def score_gradient(block: Pairs, P: Tensor, dP: Tensor, D_i: Tensor, ell: Tensor) -> Tensor:
    """dS_ij = P_ij ∘ (dP_ij - D_i); for weights E(S) / ℓ it is E'(S) ∘ (dP_ij - D_i ∂ℓ/∂E) / ℓ, E' by autograd."""
    form = block.problem.spec.weights.form
    inverse = divided(torch.ones_like(D_i)[:, None], ell)
    values: dict[Expr, Tensor] = {PROBABILITY: P, D_PROBABILITY: dP, DELTA: D_i[:, None], INVERSE: inverse}
    gradient = value_of(form.backward, values, P)
    if form.exponential:
        return gradient
    start = block.score.detach().requires_grad_()
    with torch.enable_grad():
        E = _plain_weights(block, start)
    captured = list(block.leaves.values())
    d_score, *found = _pulled([E], [gradient], [start, *captured])
    _add_captured(block.hbm, block.leaves, found)
    assert d_score is not None
    return d_score[0, 0]


def through_score(block: Pairs, dS: Tensor, *, captured: bool = True) -> ProductGradients:
    """dS_ij behind the score. ``captured``: what it gives to captured values is added to their gradients."""
    starts = [block.dot] if block.sqdist is None else [block.dot, block.sqdist]
    gradient = torch.where(block.keep, dS, 0.0)[None, None]
    found = _pulled([block.score], [gradient], [*starts, *block.leaves.values()])
    if captured:
        _add_captured(block.hbm, block.leaves, found[len(starts) :])
    products = [torch.zeros_like(start) if each is None else each for start, each in zip(starts, found, strict=False)]
    return ProductGradients(block.hbm, products[0], products[1] if block.sqdist is not None else None)


def rows_of_sinks(problem: Problem, heads: range, blocks: BlockSizes) -> list[tuple[int, slice]]:
    """The blocks of rows of these query heads, of which each gives the sink a gradient once; none without a sink."""
    return row_blocks(problem, heads, blocks) if problem.spec.weights.sink and captured_names(problem) else []


def add_sink_gradient(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice, D_i: Tensor, row: Row) -> None:
    """The sink is a key whose value is 0: its dP is 0, so that it receives -P_sink D_i; rows without weight nothing."""
    leaves = _leaves(problem)
    sink, lse = _sink(problem, hbm, b, h, rows, leaves), log_sum(row)
    P_sink = torch.where(lse == -torch.inf, 0.0, (sink.detach().reshape(-1) - _finite(lse)).exp())
    found = _pulled([sink], [(-P_sink * D_i)[None, None, :, None]], list(leaves.values()))
    _add_captured(hbm, leaves, found)


def _pulled(outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor | None]:
    if not outputs[0].requires_grad:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True, retain_graph=True)


def _add_captured(hbm: Hbm, names: Iterable[str], gradients: Sequence[Tensor | None]) -> None:
    """Add to the gradients of captured values, in the HBM: one element for each that the block has touched."""
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            hbm.add(gradient_field(name), gradient, int((gradient != 0).sum()))
