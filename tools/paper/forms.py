"""Closed forms of the algorithms of this folder beside those of ``flashgen.plan.paper``: memory, and flops of one.

In: lengths and the sizes of chunks, in elements. Out: elements beside inputs and outputs; flops.
"""

from __future__ import annotations

from flashgen.plan.paper import BlockSizes, Lengths, forward_flops, standard_backward_flops


def standard_memory(lengths: Lengths) -> int:
    """Beside inputs and outputs: S and P forward; backward dP and dS beside those."""
    return 2 * lengths.heads * lengths.q_len * lengths.kv_len


def flash_memory(lengths: Lengths) -> int:
    """Beside inputs and outputs: ℓ and m, Theorem 1's O(N); the backward pass takes nothing more."""
    return 2 * lengths.heads * lengths.q_len


def rabe_staats_memory(lengths: Lengths, blocks: BlockSizes, *, backward: bool = False) -> int:
    """Beside inputs and outputs: ℓ and m, one chunk's matrices, the summaries of one chunk of queries.

    A query's summaries are O(√N) with √N keys in a chunk. Backward one summary, its gradients, and those of the sums.
    """
    each = lengths
    Br, Bc = min(blocks.Br, each.q_len), min(blocks.Bc, each.kv_len)
    summary = Br * (each.v + 2)
    if backward:
        return 4 * Br * Bc + summary + 2 * Br * (each.v + 1)
    return 2 * each.heads * each.q_len + 2 * Br * Bc + -(-each.kv_len // blocks.Bc) * summary


def rabe_staats_backward_flops(lengths: Lengths) -> int:
    """The same, and S and every chunk's output again, which FlashAttention has no need of (B.5)."""
    return standard_backward_flops(lengths) + forward_flops(lengths)
