"""FlashAttention-2's loop order: rows outside in the forward pass, so that O, m and ℓ stay on the chip.

In: a ``Problem`` and block sizes. Out: as ``flash.py``, with every HBM access counted. Numbers in comments are the
lines of Algorithms 1 and 2 of Dao, "FlashAttention-2" (arXiv 2307.08691). The generated kernels follow this order.
"""

from __future__ import annotations

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
    key_heads,
    log_sum,
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
from tools.paper.results import Backward, Forward, backward_inputs, gradients_of, inputs_in_hbm


def flash2_forward(problem: Problem, blocks: BlockSizes, kept: Tensor | None = None) -> Forward:
    """The forward pass of FlashAttention-2. It keeps only L = m + log ℓ: ``m`` is L, and ``ell`` 1.

    ``kept`` [B, H, T_r, T_c] as in Algorithm 5; None: every block is visited.
    """
    shard, names = problem.shard, row_names(problem)
    hbm = inputs_in_hbm(problem)
    like, sizes = hbm.result("Q"), (shard.batch, shard.heads, shard.q_len)
    hbm.reserve("O", like, *sizes, problem.v.shape[-1], output=True)
    if names:
        hbm.reserve("L", like, *sizes)
    if kept is not None:
        hbm.put("M", kept)
    for b, shared, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks):  # 3: for 1 ≤ i ≤ T_r
            # 4: Load Q_i.  5: Initialize O_i = 0, ℓ_i = 0, m_i = -∞ on chip.
            Q_i = hbm.load("Q", b, h, rows)
            O_i = torch.zeros_like(hbm.result("O")[b, h, rows])
            row = first_row(problem, hbm, b, h, rows)
            for j, columns in enumerate(blocks_of(shard.kv_len, blocks.Bc)):  # 6: for 1 ≤ j ≤ T_c
                if kept is not None and not hbm.load("M", b, h, rows.start // blocks.Br, j):
                    continue
                # 7: Load K_j, V_j.
                K_j, V_j = hbm.load("K", b, shared, columns), hbm.load("V", b, shared, columns)
                # 8: S = Q_i K_jᵀ.
                block = pairs(problem, hbm, Place(b, h, rows, columns), Q_i, K_j)
                # 9: m_new = max(m, rowmax(S)), P̃ = exp(S - m_new), ℓ = e^(m - m_new) ℓ + rowsum(P̃).
                block_row, P = block_weights(block)
                new = merged(row, block_row, names)
                P = rescale(block_row.m, new.m)[:, None] * P * dropout(problem, block.place)
                # 10: O_i ← diag(e^(m - m_new)) O_i + P̃ V_j.
                O_i = rescale(row.m, new.m)[:, None] * O_i + hbm.product(P, V_j)
                row = new
            row = closed(problem, row)
            # 12: O_i ← diag(ℓ_i)⁻¹ O_i.  14: Write O_i.
            hbm.store("O", divided(O_i, row.ell), b, h, rows)
            if names:
                # 13: L_i = m_i + log ℓ_i.  15: Write L_i.
                hbm.store("L", log_sum(row), b, h, rows)
    if not names:
        return Forward(problem, hbm.result("O"), None, None, hbm)
    row = _row_of(problem, hbm.result("L"))
    return Forward(problem, hbm.result("O"), row.m if "m" in names else None, row.ell, hbm)


def flash2_backward(
    forward: Forward, d_o: Tensor, d_lse: Tensor | None, blocks: BlockSizes, kept: Tensor | None = None
) -> Backward:
    """The backward pass of FlashAttention-2: D once beforehand, one statistic a row, no O in the loop."""
    problem, shard = forward.problem, forward.problem.shard
    hbm = backward_inputs(forward, d_o, d_lse)
    like, names = hbm.result("Q"), row_names(problem)
    # 3: Initialize dQ = 0 in HBM.
    hbm.initialise("dQ", like, *problem.q.shape, output=True)
    for name, of in (("dK", problem.k), ("dV", problem.v)):
        hbm.reserve(name, like, *of.shape, output=True)
    if names:
        hbm.put("L", _log_sum(forward))
        _write_delta(problem, hbm, blocks)
    if kept is not None:
        hbm.put("M", kept)
    for b, shared, heads in key_heads(problem):
        for j, columns in enumerate(blocks_of(shard.kv_len, blocks.Bc)):  # 5: for 1 ≤ j ≤ T_c
            # 6: Load K_j, V_j.  7: Initialize dK_j = 0, dV_j = 0 on SRAM.
            K_j, V_j = hbm.load("K", b, shared, columns), hbm.load("V", b, shared, columns)
            dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
            for h, rows in row_blocks(problem, heads, blocks):  # 8: for 1 ≤ i ≤ T_r
                if kept is not None and not hbm.load("M", b, h, rows.start // blocks.Br, j):
                    continue
                # 9: Load Q_i, dO_i, L_i, D_i; O_i is not needed.
                Q_i, dO_i = hbm.load("Q", b, h, rows), hbm.load("dO", b, h, rows)
                row, D_i = fresh_row(problem, rows), torch.zeros_like(dO_i[:, 0])
                if names:
                    L_i, D_i = hbm.load("L", b, h, rows), hbm.load("D", b, h, rows)
                    row = _row_of(problem, L_i)
                block = pairs(problem, hbm, Place(b, h, rows, columns), Q_i, K_j, gradients=True)  # 10: S = Q_i K_jᵀ
                P, Z = probabilities(block, row), dropout(problem, block.place)  # 11: P = exp(S - L_i)
                dV_j = dV_j + hbm.product((P * Z).T, dO_i)  # 12: dV_j ← dV_j + Pᵀ dO_i
                dP = hbm.product(dO_i, V_j.T) * Z  # 13: dP = dO_i V_jᵀ
                dS = score_gradient(block, P, dP, D_i, row.ell)  # 14: dS = P ∘ (dP - D_i)
                # 15: Load dQ_i, dQ_i ← dQ_i + dS K_j, write back.
                products = through_score(block, dS)
                hbm.store("dQ", hbm.load("dQ", b, h, rows) + products.queries(Q_i, K_j), b, h, rows)
                dK_j = dK_j + products.keys(Q_i, K_j)  # 16: dK_j ← dK_j + dSᵀ Q_i
            # 18: Write dK_j, dV_j.
            hbm.store("dK", dK_j, b, shared, columns)
            hbm.store("dV", dV_j, b, shared, columns)
        for h, rows in rows_of_sinks(problem, heads, blocks):
            L_i, D_i = hbm.load("L", b, h, rows), hbm.load("D", b, h, rows)
            add_sink_gradient(problem, hbm, b, h, rows, D_i, _row_of(problem, L_i))
    return gradients_of(problem, hbm)


def _write_delta(problem: Problem, hbm: Hbm, blocks: BlockSizes) -> None:
    """4: D = rowsum(dO ∘ O), less the gradient of the log-sum-exp; write D."""
    shard = problem.shard
    hbm.reserve("D", hbm.result("Q"), shard.batch, shard.heads, shard.q_len)
    for b, _, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks):
            D_i = (hbm.load("dO", b, h, rows) * hbm.load("O", b, h, rows)).sum(-1)
            if hbm.holds("dlse"):
                D_i = D_i - hbm.load("dlse", b, h, rows)
            hbm.store("D", D_i, b, h, rows)


def _log_sum(forward: Forward) -> Tensor:
    assert forward.lse is not None, "rows carry a sum"
    return forward.lse


def _row_of(problem: Problem, L_i: Tensor) -> Row:
    """A row with log-sum-exp L: m = L and ℓ = 1; weights that have no maximum take ℓ = e^L."""
    if "m" in row_names(problem):
        return Row(L_i, torch.where(L_i == -torch.inf, 0.0, 1.0))
    return Row(torch.zeros_like(L_i), L_i.exp())
