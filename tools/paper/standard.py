"""Standard attention: Algorithms 0 and 3 of the paper, for any spec, with S, P, dP and dS in the HBM.

In: a ``Problem`` and block sizes. Out: the results, with every HBM access counted. Without block sizes every matrix of
a line is moved once, which is how the paper counts (``plan.paper.standard_forward``); with them a matrix product loads
its operands again for every block, which is no less. Numbers in comments are the lines in arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.plan.arguments import gradient_field
from flashgen.plan.paper import BlockSizes
from flashgen.reference.tiled import Problem
from tools.paper.hbm import Hbm
from tools.paper.pairs import (
    Place,
    Row,
    add_sink_gradient,
    block_weights,
    blocks_of,
    captured_names,
    closed,
    divided,
    dropout,
    first_row,
    given_tensor,
    key_heads,
    log_sum,
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
from tools.paper.results import Backward, gradients_of, inputs_in_hbm


@dataclass(frozen=True)
class Standard:
    """``o`` [B, H, Nq, Dv], ``lse`` [B, H, Nq] (None: pointwise weights), and the matrices that Algorithm 3 needs."""

    problem: Problem
    o: Tensor
    lse: Tensor | None
    S: Tensor
    P: Tensor
    hbm: Hbm


def algorithm_0(problem: Problem, blocks: BlockSizes | None = None) -> Standard:
    """Standard attention: S = score(τ QKᵀ), P = weights(S), O = dropout(P) V, each through the HBM."""
    shard, hbm = problem.shard, inputs_in_hbm(problem)
    blocks = blocks or _whole(problem)
    like, sizes = hbm.result("Q"), (shard.batch, shard.heads, shard.q_len)
    for name in ("S", "P"):
        hbm.reserve(name, like, *sizes, shard.kv_len)
    hbm.reserve("O", like, *sizes, problem.v.shape[-1], output=True)
    if row_names(problem):
        hbm.reserve("lse", like, *sizes, output=True)
    columns = blocks_of(shard.kv_len, blocks.Bc)
    for b, h, shared, rows in _rows(problem, blocks):
        # 1: Load Q, K by blocks, compute S = QKᵀ, write S.
        Q_i = hbm.load("Q", b, h, rows)
        for each in columns:
            block = pairs(problem, hbm, Place(b, h, rows, each), Q_i, hbm.load("K", b, shared, each))
            hbm.store("S", block.S, b, h, rows, each)
    for b, h, _, rows in _rows(problem, blocks):
        # 2: Read S, compute P = softmax(S), write P. Blocks of whole rows.
        place = Place(b, h, rows, slice(0, shard.kv_len))
        block = stored_pairs(problem, hbm, place, hbm.load("S", b, h, rows))
        own, E = block_weights(block)
        row = closed(problem, merged(first_row(problem, hbm, b, h, rows), own, row_names(problem)))
        hbm.store("P", divided(rescale(own.m, row.m)[:, None] * E, row.ell), b, h, rows)
        if row_names(problem):
            hbm.store("lse", log_sum(row), b, h, rows)
    for b, h, shared, rows in _rows(problem, blocks):
        # 3: Load P and V by blocks, compute O = PV, write O.
        O_i = torch.zeros_like(hbm.result("O")[b, h, rows])
        for each in columns:
            P = hbm.load("P", b, h, rows, each) * dropout(problem, Place(b, h, rows, each))
            O_i = O_i + hbm.product(P, hbm.load("V", b, shared, each))
        hbm.store("O", O_i, b, h, rows)
    lse = hbm.result("lse") if row_names(problem) else None
    return Standard(problem, hbm.result("O"), lse, hbm.result("S"), hbm.result("P"), hbm)  # 4: Return O.


def algorithm_3(
    forward: Standard, d_o: Tensor, d_lse: Tensor | None = None, blocks: BlockSizes | None = None
) -> Backward:
    """The standard backward pass, from the P of Algorithm 0 and the gradients of O and (or None) the log-sum-exp.

    Beyond the paper's loads: S where weights are no softmax, and Q and K again where the derivative of the score needs
    their product.
    """
    problem = forward.problem
    blocks = blocks or _whole(problem)
    hbm = _with_forward(forward, d_o, d_lse)
    _values(problem, hbm, blocks)  # 1: Load P, dO by blocks, compute dV = Pᵀ dO, write dV.
    _weights(problem, hbm, blocks)  # 2: Load dO, V by blocks, compute dP = dO Vᵀ, write dP.
    for b, h, _, rows in _rows(problem, blocks):
        _scores(problem, hbm, b, h, rows)  # 3: Read P, dP, compute dS_ij = P_ij (dP_ij - Σ_l P_il dP_il), write dS.
    _queries(problem, hbm, blocks)  # 4: Load dS and K by blocks, compute dQ = dS K, write dQ.
    _keys(problem, hbm, blocks)  # 5: Load dS and Q by blocks, compute dK = dSᵀ Q, write dK.
    return gradients_of(problem, hbm)  # 6: Return dQ, dK, dV.


def _with_forward(forward: Standard, d_o: Tensor, d_lse: Tensor | None) -> Hbm:
    """The inputs of the backward pass, and room for its results and for dP and dS."""
    problem, hbm = forward.problem, inputs_in_hbm(forward.problem)
    like = hbm.result("Q")
    hbm.put("dO", d_o.detach().to(problem.compute))
    for name, matrix in (("S", forward.S), ("P", forward.P), ("lse", forward.lse)):
        if matrix is not None:
            hbm.put(name, matrix)
    if d_lse is not None and row_names(problem):
        hbm.put("dlse", d_lse.detach().to(problem.compute))
    for name in captured_names(problem):
        hbm.initialise(gradient_field(name), like, *given_tensor(problem, name).shape, output=True)
    for name in ("dP", "dS"):
        hbm.reserve(name, like, *forward.P.shape)
    for name, of in (("dQ", problem.q), ("dK", problem.k), ("dV", problem.v)):
        hbm.reserve(name, like, *of.shape, output=True)
    return hbm


def _values(problem: Problem, hbm: Hbm, blocks: BlockSizes) -> None:
    for b, shared, heads in key_heads(problem):
        for columns in blocks_of(problem.shard.kv_len, blocks.Bc):
            dV_j = torch.zeros_like(hbm.result("V")[b, shared, columns])
            for h, rows in row_blocks(problem, heads, blocks):
                P = hbm.load("P", b, h, rows, columns) * dropout(problem, Place(b, h, rows, columns))
                dV_j = dV_j + hbm.product(P.T, hbm.load("dO", b, h, rows))
            hbm.store("dV", dV_j, b, shared, columns)


def _weights(problem: Problem, hbm: Hbm, blocks: BlockSizes) -> None:
    for b, h, shared, rows in _rows(problem, blocks):
        dO_i = hbm.load("dO", b, h, rows)
        for columns in blocks_of(problem.shard.kv_len, blocks.Bc):
            Z = dropout(problem, Place(b, h, rows, columns))
            hbm.store("dP", hbm.product(dO_i, hbm.load("V", b, shared, columns).T) * Z, b, h, rows, columns)


def _queries(problem: Problem, hbm: Hbm, blocks: BlockSizes) -> None:
    again = not score_is_additive(problem)
    for b, h, shared, rows in _rows(problem, blocks):
        dQ_i = torch.zeros_like(hbm.result("Q")[b, h, rows])
        Q_i = hbm.load("Q", b, h, rows) if again else None
        for columns in blocks_of(problem.shard.kv_len, blocks.Bc):
            dS, K_j = hbm.load("dS", b, h, rows, columns), hbm.load("K", b, shared, columns)
            place = Place(b, h, rows, columns)
            block = pairs(problem, hbm, place, Q_i, K_j if again else None, gradients=True)
            dQ_i = dQ_i + through_score(block, dS).queries(Q_i, K_j)
        hbm.store("dQ", dQ_i, b, h, rows)


def _keys(problem: Problem, hbm: Hbm, blocks: BlockSizes) -> None:
    again = not score_is_additive(problem)
    for b, shared, heads in key_heads(problem):
        for columns in blocks_of(problem.shard.kv_len, blocks.Bc):
            dK_j = torch.zeros_like(hbm.result("K")[b, shared, columns])
            K_j = hbm.load("K", b, shared, columns) if again else None
            for h, rows in row_blocks(problem, heads, blocks):
                dS, Q_i = hbm.load("dS", b, h, rows, columns), hbm.load("Q", b, h, rows)
                place = Place(b, h, rows, columns)
                block = pairs(problem, hbm, place, Q_i if again else None, K_j, gradients=True)
                dK_j = dK_j + through_score(block, dS, captured=False).keys(Q_i, K_j)
            hbm.store("dK", dK_j, b, shared, columns)


def _scores(problem: Problem, hbm: Hbm, b: int, h: int, rows: slice) -> None:
    """Line 3 for a block of whole rows."""
    P, dP = hbm.load("P", b, h, rows), hbm.load("dP", b, h, rows)
    D_i = (P * dP).sum(-1) if row_names(problem) else torch.zeros_like(P[:, 0])
    if hbm.holds("dlse"):
        D_i = D_i - hbm.load("dlse", b, h, rows)
    place = Place(b, h, rows, slice(0, problem.shard.kv_len))
    weights = problem.spec.weights
    if weights.form.exponential:
        block = stored_pairs(problem, hbm, place, P)
        if weights.sink is not None:
            lse = hbm.load("lse", b, h, rows)
            add_sink_gradient(problem, hbm, b, h, rows, D_i, Row(lse, (lse != -torch.inf).to(lse.dtype)))
        dS = score_gradient(block, P, dP, D_i, D_i)
    else:
        block = stored_pairs(problem, hbm, place, hbm.load("S", b, h, rows))
        own, _ = block_weights(block)
        dS = score_gradient(block, P, dP, D_i, closed(problem, own).ell)
    hbm.store("dS", dS, b, h, rows)


def _rows(problem: Problem, blocks: BlockSizes) -> Iterator[tuple[int, int, int, slice]]:
    """Batch element, query head, its key/value head, and a block of query rows."""
    for b, shared, heads in key_heads(problem):
        for h, rows in row_blocks(problem, heads, blocks):
            yield b, h, shared, rows


def _whole(problem: Problem) -> BlockSizes:
    return BlockSizes(max(problem.shard.q_len, 1), max(problem.shard.kv_len, 1))
