"""FlashAttention: Algorithms 1, 2, 4 and 5 of the paper, for any spec.

In: a ``Problem`` and block sizes. Out: ``Forward`` and ``Backward``, with every HBM access counted. Numbers in comments
are the lines of Algorithm 2 (forward) and 4 (backward) in arXiv 2205.14135. The spec's score stands for τ QKᵀ, its
mask and layout for MASK, and where several query heads share a key/value head the rows of all of them follow one
another under each block of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.plan.paper import BlockSizes
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
    keeps_some,
    key_heads,
    merged,
    pairs,
    probabilities,
    rescale,
    row_blocks,
    row_names,
    rows_of_sinks,
    score_gradient,
    through_score,
)
from tools.paper.results import Backward, Forward, backward_inputs, gradients_of, inputs_in_hbm, results_of_rows


@dataclass(frozen=True)
class Step:
    """What lies in the HBM after one block of Algorithm 1: O_i [B_r, Dv], m_i and ℓ_i [B_r]."""

    place: Place
    O: Tensor  # noqa: E741 (the paper's O)
    row: Row


Watch = Callable[[Step], None]


def algorithm_1(problem: Problem, blocks: BlockSizes, watch: Watch | None = None) -> Forward:
    """FlashAttention. Algorithm 2 without dropout: its lines 5 to 16 are lines 6 to 19 there.

    ``watch`` sees every step. Raises ``ValueError`` for a problem with dropout.
    """
    if problem.dropout is not None and problem.dropout.probability > 0:
        raise ValueError("Algorithm 1 has no dropout; take Algorithm 2")
    return _forward(problem, blocks, None, watch)


def algorithm_2(problem: Problem, blocks: BlockSizes, watch: Watch | None = None) -> Forward:
    """The FlashAttention forward pass, with mask and dropout. The generator's state R is the seed (line 1)."""
    return _forward(problem, blocks, None, watch)


def algorithm_5(problem: Problem, blocks: BlockSizes, kept: Tensor | None = None) -> Forward:
    """Block-sparse FlashAttention: Algorithm 2 without the blocks (i, j) at which ``kept`` is false.

    ``kept`` [B, H, T_r, T_c]; None: the blocks in which the spec keeps a pair (``kept_blocks``).
    """
    return _forward(problem, blocks, kept_blocks(problem, blocks) if kept is None else kept, None)


def kept_blocks(problem: Problem, blocks: BlockSizes) -> Tensor:
    """Where a block holds a pair that mask and layout keep: bool [B, H, T_r, T_c]."""
    shard = problem.shard
    rows, columns = blocks_of(shard.q_len, blocks.Br), blocks_of(shard.kv_len, blocks.Bc)
    found = torch.zeros(shard.batch, shard.heads, len(rows), len(columns), dtype=torch.bool)
    for b in range(shard.batch):
        for h in range(shard.heads):
            for i, each in enumerate(rows):
                for j, keys in enumerate(columns):
                    found[b, h, i, j] = keeps_some(problem, Place(b, h, each, keys))
    return found


def _forward(problem: Problem, blocks: BlockSizes, kept: Tensor | None, watch: Watch | None) -> Forward:
    shard, names = problem.shard, row_names(problem)
    hbm = inputs_in_hbm(problem)
    # 3: Initialize O = 0, ℓ = 0, m = -∞ in HBM.
    like, sizes = hbm.result("Q"), (shard.batch, shard.heads, shard.q_len)
    hbm.initialise("O", like, *sizes, problem.v.shape[-1], output=True)
    for name in names:
        hbm.initialise(name, like, *sizes, value=-torch.inf if name == "m" else 0.0)
    if kept is not None:
        hbm.put("M", kept)
    for b, shared, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks) if problem.spec.weights.sink else ():
            row = first_row(problem, hbm, b, h, rows)
            for name in names:
                hbm.store(name, getattr(row, name), b, h, rows)
        for j, columns in enumerate(blocks_of(shard.kv_len, blocks.Bc)):  # 6: for 1 ≤ j ≤ T_c
            K_j = V_j = None
            for h, rows in row_blocks(problem, heads, blocks):  # 8: for 1 ≤ i ≤ T_r
                if kept is not None and not hbm.load("M", b, h, rows.start // blocks.Br, j):
                    continue  # Algorithm 5, line 9: if M_ij ≠ 0
                if K_j is None or V_j is None:
                    # 7: Load K_j, V_j; here, so that a column of blocks without pairs loads nothing.
                    K_j, V_j = hbm.load("K", b, shared, columns), hbm.load("V", b, shared, columns)
                # 9: Load Q_i, O_i, ℓ_i, m_i.
                Q_i, O_i = hbm.load("Q", b, h, rows), hbm.load("O", b, h, rows)
                row = _load_row(problem, hbm, b, h, rows)
                # 10, 11: S = τ Q_i K_jᵀ, S^masked = MASK(S).
                block = pairs(problem, hbm, Place(b, h, rows, columns), Q_i, K_j)
                # 12: m̃ = rowmax(S^masked), P̃ = exp(S^masked - m̃), ℓ̃ = rowsum(P̃).
                block_row, P = block_weights(block)
                # 13: m_new = max(m_i, m̃), ℓ_new = e^(m_i - m_new) ℓ_i + e^(m̃ - m_new) ℓ̃.
                new = merged(row, block_row, names)
                # 14: P̃^dropped = dropout(P̃, p).
                P_dropped = P * dropout(problem, block.place)
                # 15: O_i ← diag(ℓ_new)⁻¹ (diag(ℓ_i) e^(m_i - m_new) O_i + e^(m̃ - m_new) P̃^dropped V_j).
                before, here = rescale(row.m, new.m), rescale(block_row.m, new.m)
                ell, new_ell = closed(problem, row).ell, closed(problem, new).ell
                O_i = divided((ell * before)[:, None] * O_i + here[:, None] * hbm.product(P_dropped, V_j), new_ell)
                hbm.store("O", O_i, b, h, rows)
                # 16: Write ℓ_i ← ℓ_new, m_i ← m_new.
                for name in names:
                    hbm.store(name, getattr(new, name), b, h, rows)
                if watch is not None:
                    watch(Step(block.place, O_i, new))
    return Forward(problem, hbm.result("O"), *results_of_rows(problem, hbm), hbm)  # 19: Return O, ℓ, m, R.


def algorithm_4(
    forward: Forward, d_o: Tensor, d_lse: Tensor | None, blocks: BlockSizes, kept: Tensor | None = None
) -> Backward:
    """The FlashAttention backward pass, from what Algorithm 1, 2 or 5 has returned and the gradient of O.

    ``d_lse`` [B, H, Nq] is the gradient of the log-sum-exp, None where it was not used. With ``kept`` the blocks are
    left out that Algorithm 5 leaves out (Appendix B.6).
    """
    problem, shard = forward.problem, forward.problem.shard
    hbm = backward_inputs(forward, d_o, d_lse)
    like = hbm.result("Q")
    # 5: Initialize dQ = 0, dK = 0, dV = 0 in HBM.
    for name, of in (("dQ", problem.q), ("dK", problem.k), ("dV", problem.v)):
        hbm.initialise(name, like, *of.shape, output=True)
    if kept is not None:
        hbm.put("M", kept)
    for b, shared, heads in key_heads(problem):
        for j, columns in enumerate(blocks_of(shard.kv_len, blocks.Bc)):  # 6: for 1 ≤ j ≤ T_c
            # 7: Load K_j, V_j.  8: Initialize dK̃_j = 0, dṼ_j = 0 on SRAM.
            K_j, V_j = hbm.load("K", b, shared, columns), hbm.load("V", b, shared, columns)
            dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
            for h, rows in row_blocks(problem, heads, blocks):  # 9: for 1 ≤ i ≤ T_r
                if kept is not None and not hbm.load("M", b, h, rows.start // blocks.Br, j):
                    continue
                # 10: Load Q_i, O_i, dO_i, dQ_i, ℓ_i, m_i.
                Q_i, O_i, dO_i, dQ_i = (hbm.load(name, b, h, rows) for name in ("Q", "O", "dO", "dQ"))
                row = _load_row(problem, hbm, b, h, rows)
                # 11, 12: S = τ Q_i K_jᵀ, S^masked = MASK(S).
                block = pairs(problem, hbm, Place(b, h, rows, columns), Q_i, K_j, gradients=True)
                # 13: P = diag(ℓ_i)⁻¹ exp(S^masked - m_i).
                P = probabilities(block, row)
                # 14, 15: the dropout mask Z, P^dropped = P ∘ Z.
                Z = dropout(problem, block.place)
                P_dropped = P * Z
                # 16: dṼ_j ← dṼ_j + (P^dropped)ᵀ dO_i.
                dV_j = dV_j + hbm.product(P_dropped.T, dO_i)
                # 17, 18: dP^dropped = dO_i V_jᵀ, dP = dP^dropped ∘ Z.
                dP = hbm.product(dO_i, V_j.T) * Z
                # 19: D_i = rowsum(dO_i ∘ O_i), less the gradient of the log-sum-exp.
                D_i = _delta(problem, hbm, b, h, rows, dO_i, O_i)
                # 20: dS = P ∘ (dP - D_i).
                dS = score_gradient(block, P, dP, D_i, row.ell)
                # 21: Write dQ_i ← dQ_i + τ dS K_j.
                products = through_score(block, dS)
                hbm.store("dQ", dQ_i + products.queries(Q_i, K_j), b, h, rows)
                # 22: dK̃_j ← dK̃_j + τ dSᵀ Q_i.
                dK_j = dK_j + products.keys(Q_i, K_j)
            # 24: Write dK_j ← dK̃_j, dV_j ← dṼ_j.
            hbm.store("dK", dK_j, b, shared, columns)
            hbm.store("dV", dV_j, b, shared, columns)
        for h, rows in rows_of_sinks(problem, heads, blocks):
            O_i, dO_i = (hbm.load(name, b, h, rows) for name in ("O", "dO"))
            D_i = _delta(problem, hbm, b, h, rows, dO_i, O_i)
            add_sink_gradient(problem, hbm, b, h, rows, D_i, _load_row(problem, hbm, b, h, rows))
    return gradients_of(problem, hbm)  # 26: Return dQ, dK, dV.


def _load_row(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice) -> Row:
    carried = {name: hbm.load(name, b, h, rows) for name in row_names(problem)}
    return replace(fresh_row(problem, rows), **carried)


def _delta(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice, dO_i: Tensor, O_i: Tensor) -> Tensor:
    """D_i; 0 for pointwise weights, whose rows have no denominator."""
    if not row_names(problem):
        return torch.zeros_like(dO_i[:, 0])
    D_i = (dO_i * O_i).sum(-1)
    return D_i - hbm.load("dlse", b, h, rows) if hbm.holds("dlse") else D_i
