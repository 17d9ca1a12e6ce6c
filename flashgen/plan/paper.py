"""The FlashAttention paper's own block sizes, what they need of the SRAM, and the HBM accesses of its theorems.

In: the SRAM size M, lengths and head dimensions, all in elements as the paper counts them. Out: elements. The closed
forms are those of the algorithms as written (Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", NeurIPS 2022,
arXiv 2205.14135); tests compare them with what ``flashgen.reference.algorithms`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """B_r query rows by B_c keys."""

    Br: int
    Bc: int

    def __post_init__(self) -> None:
        if self.Br < 1 or self.Bc < 1:
            raise ValueError(f"blocks of {self.Br} × {self.Bc}: there is at least one row and one key in a block")


@dataclass(frozen=True)
class Lengths:
    """One attention: query heads and key/value heads over the whole batch, lengths, head dimensions."""

    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk: int
    v: int


def paper_blocks(sram: int, head_dim: int) -> BlockSizes:
    """Line 1 of Algorithm 1: B_c = ⌈M / 4d⌉, B_r = min(⌈M / 4d⌉, d), for M = ``sram`` elements."""
    Bc = -(-sram // (4 * head_dim))
    return BlockSizes(min(Bc, head_dim), Bc)


def forward_buffers(blocks: BlockSizes, qk: int, v: int) -> dict[str, int]:
    """What is on the chip at line 12 of Algorithm 1, by the paper's names."""
    Br, Bc = blocks.Br, blocks.Bc
    return {"Q": Br * qk, "K": Bc * qk, "V": Bc * v, "O": Br * v, "S, then P": Br * Bc, "l, m, new and old": 4 * Br}


def backward_buffers(blocks: BlockSizes, qk: int, v: int) -> dict[str, int]:
    """What is on the chip at line 20 of Algorithm 4, by the paper's names; P and dP give way to dS there."""
    Br, Bc = blocks.Br, blocks.Bc
    return {
        "Q": Br * qk,
        "dQ": Br * qk,
        "O": Br * v,
        "dO": Br * v,
        "K": Bc * qk,
        "dK": Bc * qk,
        "V": Bc * v,
        "dV": Bc * v,
        "S, then P": Br * Bc,
        "dP, then dS": Br * Bc,
        "l, m, D": 3 * Br,
    }


def standard_forward(lengths: Lengths) -> int:
    """HBM accesses of Algorithm 0: every matrix of a line is moved once. Θ(Nd + N²), Theorem 2."""
    each = lengths
    pairs = each.heads * each.q_len * each.kv_len
    rows, keys = each.heads * each.q_len, each.heads * each.kv_len
    first = rows * each.qk + keys * each.qk + pairs  # Q, K → S
    second = pairs + pairs + rows  # S → P, and the row's log-sum-exp
    third = pairs + keys * each.v + rows * each.v  # P, V → O
    return first + second + third


def standard_backward(lengths: Lengths) -> int:
    """HBM accesses of Algorithm 3. Θ(Nd + N²), Theorem 5."""
    each = lengths
    pairs = each.heads * each.q_len * each.kv_len
    rows, keys = each.heads * each.q_len, each.heads * each.kv_len
    stored_keys = each.kv_heads * each.kv_len
    values = pairs + rows * each.v + stored_keys * each.v  # P, dO → dV
    weights = rows * each.v + keys * each.v + pairs  # dO, V → dP
    scores = 3 * pairs  # P, dP → dS
    queries = pairs + keys * each.qk + rows * each.qk  # dS, K → dQ
    return values + weights + scores + queries + pairs + rows * each.qk + stored_keys * each.qk  # dS, Q → dK


def flash_forward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of Algorithm 1: K and V once, Q, O, l and m for every block of keys. Θ(N²d²/M), Theorem 2."""
    each = lengths
    rows = each.heads * each.q_len
    columns = -(-each.kv_len // blocks.Bc)
    keys = each.kv_heads * each.kv_len * (each.qk + each.v)
    return keys + rows * (each.v + 2) + columns * rows * (each.qk + 2 * each.v + 4)


def flash_backward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of Algorithm 4: Q, O, dO, l, m and twice dQ for every block of keys. Θ(N²d²/M), Theorem 5."""
    each = lengths
    rows = each.heads * each.q_len
    columns = -(-each.kv_len // blocks.Bc)
    keys = each.kv_heads * each.kv_len * (each.qk + each.v)
    return 3 * keys + rows * each.qk + columns * rows * (3 * each.qk + 2 * each.v + 2)


def lower_bound(lengths: Lengths) -> int:
    """What any exact forward pass moves: Q, K and V in, O out. Proposition 3's Ω(Nd), which is tight at M = Θ(Nd)."""
    each = lengths
    return each.heads * each.q_len * (each.qk + each.v) + each.kv_heads * each.kv_len * (each.qk + each.v)


def backward_lower_bound(lengths: Lengths) -> int:
    """What any backward pass moves that starts from Q, K, V, O and dO: those in, dQ, dK and dV out."""
    each = lengths
    return each.heads * each.q_len * 2 * (each.qk + each.v) + each.kv_heads * each.kv_len * 2 * (each.qk + each.v)


def io_bound(lengths: Lengths, sram: int) -> float:
    """N²d²/M of Theorem 2, without its constant, summed over heads; d² is D · Dv where the two differ."""
    each = lengths
    return each.heads * each.q_len * each.kv_len * each.qk * each.v / sram
