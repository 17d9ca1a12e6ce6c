"""Attention in chunks, Rabe and Staats, "Self-attention does not need O(n²) memory" (arXiv 2112.05682), for any spec.

In: a ``Problem`` and the sizes of chunks (``plan.paper.rabe_staats_blocks`` are theirs). Out: ``Forward`` and
``Backward``, with every HBM access counted. Every chunk of keys is summarized for a chunk of queries by an output of
its own with its maximum and its sum; when all are there they are combined. The backward pass comes from checkpoints
around the summary: each chunk is computed again, its output included. What FlashAttention does instead says B.5 of its
paper.

What is saved is memory, not accesses: a chunk is no block of the SRAM, so that each line moves its matrices once, as
those of Algorithms 0 and 3 do. The matrices of one chunk, and the summaries of one chunk of queries, take turns in
the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.ir.weights import PROBABILITY
from flashgen.plan.paper import BlockSizes
from flashgen.reference.dense import value_of
from flashgen.reference.tiled import Problem
from tools.paper.hbm import Hbm
from tools.paper.pairs import (
    Place,
    Row,
    add_sink_gradient,
    block_weights,
    blocks_of,
    closed,
    divided,
    dropout,
    first_row,
    fresh_row,
    key_heads,
    merged,
    pairs,
    rescale,
    row_blocks,
    row_names,
    score_gradient,
    score_is_additive,
    stored_pairs,
    through_score,
)
from tools.paper.results import Backward, Forward, backward_inputs, gradients_of, inputs_in_hbm


def rabe_staats_forward(problem: Problem, blocks: BlockSizes) -> Forward:
    """``blocks``: B_r queries and B_c keys in a chunk. m and ℓ are what the backward pass starts from."""
    shard, names = problem.shard, row_names(problem)
    hbm = inputs_in_hbm(problem)
    like, sizes = hbm.result("Q"), (shard.batch, shard.heads, shard.q_len)
    hbm.reserve("O", like, *sizes, problem.v.shape[-1], output=True)
    for name in names:
        hbm.reserve(name, like, *sizes)
    _reserve_chunk(problem, hbm, blocks, ("S", "P"))
    columns = blocks_of(shard.kv_len, blocks.Bc)
    _reserve_summaries(problem, hbm, blocks, len(columns))
    for b, shared, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks):
            for j, each in enumerate(columns):
                _summarize(problem, hbm, Place(b, h, rows, each), shared, j)
            # 4: Load all summaries of these queries, combine them, write O, and m and ℓ.
            row, O_i = first_row(problem, hbm, b, h, rows), torch.zeros_like(hbm.result("O")[b, h, rows])
            if columns:
                row, O_i = _combined(problem, hbm, row, rows)
            hbm.store("O", O_i, b, h, rows)
            for name in names:
                hbm.store(name, getattr(row, name), b, h, rows)
    m, ell = (hbm.result(name) if name in names else None for name in ("m", "ell"))
    return Forward(problem, hbm.result("O"), m, ell, hbm)


def rabe_staats_backward(forward: Forward, d_o: Tensor, d_lse: Tensor | None, blocks: BlockSizes) -> Backward:
    """The derivative of the forward pass, line by line, each chunk summarized again before its own.

    ``d_lse`` [B, H, Nq] is the gradient of the log-sum-exp, None where it was not used. Beyond the lines' loads, as in
    Algorithm 3: S where weights are no softmax, and Q and K again where the score's derivative needs their product.
    """
    problem, shard = forward.problem, forward.problem.shard
    hbm = backward_inputs(forward, d_o, d_lse)
    like = hbm.result("Q")
    for name, of in (("dQ", problem.q), ("dK", problem.k), ("dV", problem.v)):
        hbm.initialise(name, like, *of.shape, output=True)
    _reserve_chunk(problem, hbm, blocks, ("S", "P", "dP", "dS"))
    _reserve_summaries(problem, hbm, blocks, 1)
    longest, names = min(blocks.Br, shard.q_len), row_names(problem)
    for name in ("dA", "dO~"):  # of the sum of all chunks' outputs, and of one of them
        hbm.reserve(name, like, longest, problem.v.shape[-1])
    for name in ("dell", "dell~") if names else ():
        hbm.reserve(name, like, longest)
    columns = blocks_of(shard.kv_len, blocks.Bc)
    for b, shared, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks):
            here = slice(0, rows.stop - rows.start)
            D_i = _divide_gradients(problem, hbm, b, h, rows)
            if problem.spec.weights.sink is not None:
                add_sink_gradient(problem, hbm, b, h, rows, D_i, _row(problem, hbm, b, h, rows))
            for each in columns:
                place = Place(b, h, rows, each)
                _summarize(problem, hbm, place, shared, 0)  # 1 to 3 again: the checkpoint
                _chunk_gradients(problem, hbm, place, shared, here)
    return gradients_of(problem, hbm)


def _summarize(problem: Problem, hbm: Hbm, place: Place, shared: int, number: int) -> None:
    """One chunk: its output Õ, and m̃ and ℓ̃ where rows carry them, as summary ``number``."""
    at = _within(place)
    Q_i, K_j = hbm.load("Q", place.b, place.h, place.rows), hbm.load("K", place.b, shared, place.columns)
    # 1: Load Q_i, K_j, compute S = MASK(score(τ Q_i K_jᵀ)), write S.
    hbm.store("S", pairs(problem, hbm, place, Q_i, K_j).S, *at)
    # 2: Read S, compute m̃ = rowmax(S), P̃ = exp(S - m̃), ℓ̃ = rowsum(P̃), write them.
    block = stored_pairs(problem, hbm, place, hbm.load("S", *at))
    own, P = block_weights(block)
    hbm.store("P", P, *at)
    for name in row_names(problem):
        hbm.store(f"{name}~", getattr(own, name), number, at[0])
    # 3: Load P̃, V_j, compute Õ = dropout(P̃) V_j, write Õ.
    P_dropped = hbm.load("P", *at) * dropout(problem, place)
    V_j = hbm.load("V", place.b, shared, place.columns)
    hbm.store("O~", hbm.product(P_dropped, V_j), number, at[0])


def _combined(problem: Problem, hbm: Hbm, row: Row, rows: slice) -> tuple[Row, Tensor]:
    """m = max m̃, ℓ = Σ e^(m̃ - m) ℓ̃, O = diag(ℓ)⁻¹ Σ e^(m̃ - m) Õ over all chunks, of the row before the first."""
    names, here = row_names(problem), slice(0, rows.stop - rows.start)
    chunks = len(hbm.result("O~"))
    own = [_summary(problem, rows, {name: hbm.load(f"{name}~", j, here) for name in names}) for j in range(chunks)]
    for each in own:
        row = merged(row, each, names)
    total = torch.zeros_like(hbm.result("O~")[0, here])
    for j, each in enumerate(own):
        total = total + rescale(each.m, row.m)[:, None] * hbm.load("O~", j, here)
    row = closed(problem, row)
    return row, divided(total, row.ell)


def _divide_gradients(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice) -> Tensor:
    """What arrives at the sums over chunks: dA = diag(ℓ)⁻¹ dO, dℓ = -D / ℓ; D = rowsum(dO ∘ O) less that of the lse."""
    here = slice(0, rows.stop - rows.start)
    # 5: Load dO_i, and O_i and ℓ_i where rows carry a sum, compute dA and dℓ, write them.
    dO_i = hbm.load("dO", b, h, rows)
    if not row_names(problem):
        hbm.store("dA", dO_i, here)
        return torch.zeros_like(dO_i[:, 0])
    ell = hbm.load("ell", b, h, rows)
    D_i = (dO_i * hbm.load("O", b, h, rows)).sum(-1)
    if hbm.holds("dlse"):
        D_i = D_i - hbm.load("dlse", b, h, rows)
    hbm.store("dA", divided(dO_i, ell), here)
    hbm.store("dell", -divided(D_i[:, None], ell)[:, 0], here)
    return D_i


def _chunk_gradients(problem: Problem, hbm: Hbm, place: Place, shared: int, here: slice) -> None:
    """The derivative of one summary, from the S, P̃, m̃ that were computed again."""
    at, names = _within(place), row_names(problem)
    b, h, rows, columns = place.b, place.h, place.rows, place.columns
    Z = dropout(problem, place)
    # 6: Load dA, dℓ, m̃, m_i, compute dÕ = e^(m̃ - m) dA, dℓ̃ = e^(m̃ - m) dℓ, write them. No gradient goes through m̃.
    factor = torch.ones_like(hbm.result("dA")[here, 0])
    if "m" in names:
        factor = rescale(hbm.load("m~", 0, here), hbm.load("m", b, h, rows))
    hbm.store("dO~", factor[:, None] * hbm.load("dA", here), here)
    if names:
        hbm.store("dell~", factor * hbm.load("dell", here), here)
    # 7: Load P̃, dÕ, compute dV_j ← dV_j + dropout(P̃)ᵀ dÕ.
    P = hbm.load("P", *at)
    dV_j = hbm.product((P * Z).T, hbm.load("dO~", here))
    hbm.store("dV", hbm.load("dV", b, shared, columns) + dV_j, b, shared, columns)
    # 8: Load dÕ, V_j, dℓ̃, compute dP̃ = (dÕ V_jᵀ) ∘ Z + dℓ̃, write dP̃.
    dP = hbm.product(hbm.load("dO~", here), hbm.load("V", b, shared, columns).T) * Z
    if names:
        dP = dP + hbm.load("dell~", here)[:, None] * _shares(problem, hbm, place, P)
    hbm.store("dP", dP, *at)
    # 9: Read P̃, dP̃, compute dS = P̃ ∘ dP̃, write dS.
    P, dP = hbm.load("P", *at), hbm.load("dP", *at)
    stored = P if problem.spec.weights.form.exponential else hbm.load("S", *at)
    one = torch.ones_like(P[:, 0])  # the sum is divided by afterwards, in line 4
    hbm.store("dS", score_gradient(stored_pairs(problem, hbm, place, stored), P, dP, 0 * one, one), *at)
    again = not score_is_additive(problem)
    # 10: Load dS, K_j, compute dQ_i ← dQ_i + τ dS K_j.
    dS, K_j = hbm.load("dS", *at), hbm.load("K", b, shared, columns)
    Q_i = hbm.load("Q", b, h, rows) if again else None
    block = pairs(problem, hbm, place, Q_i, K_j if again else None, gradients=True)
    hbm.store("dQ", hbm.load("dQ", b, h, rows) + through_score(block, dS).queries(Q_i, K_j), b, h, rows)
    # 11: Load dS, Q_i, compute dK_j ← dK_j + τ dSᵀ Q_i.
    dS, Q_i = hbm.load("dS", *at), hbm.load("Q", b, h, rows)
    again_K = hbm.load("K", b, shared, columns) if again else None
    block = pairs(problem, hbm, place, Q_i if again else None, again_K, gradients=True)
    dK_j = through_score(block, dS, captured=False).keys(Q_i, again_K)
    hbm.store("dK", hbm.load("dK", b, shared, columns) + dK_j, b, shared, columns)


def _reserve_chunk(problem: Problem, hbm: Hbm, blocks: BlockSizes, names: tuple[str, ...]) -> None:
    shard = problem.shard
    for name in names:
        hbm.reserve(name, hbm.result("Q"), min(blocks.Br, shard.q_len), min(blocks.Bc, shard.kv_len))


def _reserve_summaries(problem: Problem, hbm: Hbm, blocks: BlockSizes, chunks: int) -> None:
    """Õ, and m̃ and ℓ̃ where rows carry them, of so many chunks of keys for one chunk of queries."""
    like, longest = hbm.result("Q"), min(blocks.Br, problem.shard.q_len)
    hbm.reserve("O~", like, chunks, longest, problem.v.shape[-1])
    for name in row_names(problem):
        hbm.reserve(f"{name}~", like, chunks, longest)


def _within(place: Place) -> tuple[slice, slice]:
    """The place of a chunk in the matrices of one chunk."""
    return slice(0, place.rows.stop - place.rows.start), slice(0, place.columns.stop - place.columns.start)


def _summary(problem: Problem, rows: slice, carried: dict[str, Tensor]) -> Row:
    """A chunk's own row: what rows do not carry is neutral."""
    fresh = fresh_row(problem, rows)
    return Row(carried.get("m", fresh.m), carried.get("ell", fresh.ell))


def _row(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice) -> Row:
    return _summary(problem, rows, {name: hbm.load(name, b, h, rows) for name in row_names(problem)})


def _shares(problem: Problem, hbm: Hbm, place: Place, E: Tensor) -> Tensor:
    """What dℓ, which is formed as for a sum, is to each weight: ∂ℓ/∂E. Only where it differs are ℓ_i loaded for it."""
    form = problem.spec.weights.form
    if form.is_sum:
        return torch.ones_like(E)
    probability = divided(E, hbm.load("ell", place.b, place.h, place.rows))
    return value_of(form.share, {PROBABILITY: probability}, probability)
