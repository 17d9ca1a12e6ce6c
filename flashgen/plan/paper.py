"""The FlashAttention paper's own block sizes, what they need of the SRAM, and the HBM accesses of its theorems.

In: the SRAM size M, lengths and head dimensions, all in elements as the paper counts them. Out: elements. The closed
forms are those of the algorithms as written (Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", NeurIPS 2022,
arXiv 2205.14135), and of the one that B.5 of that paper compares with (Rabe, Staats, "Self-attention does not need
O(n²) memory", arXiv 2112.05682); tests compare them with what ``tools.paper`` counts: HBM accesses and flops of the
matrix products. ``tools/paper/forms.py`` has those that nothing of flashgen asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim


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

    @classmethod
    def of(cls, shape: Shape, head_dim: HeadDim) -> Lengths:
        """Those of a call."""
        heads, kv_heads = shape.batch * shape.heads, shape.batch * shape.kv_heads
        return cls(heads, kv_heads, shape.q_len, shape.kv_len, head_dim.qk, head_dim.v)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Pairs, rows of queries, rows of keys as query heads see them, and as they are stored."""
        rows = self.heads * self.q_len
        return rows * self.kv_len, rows, self.heads * self.kv_len, self.kv_heads * self.kv_len


RABE_STAATS_QUERIES = 1024  # in a chunk, as their program has it


def paper_blocks(sram: int, head_dim: int) -> BlockSizes:
    """Line 1 of Algorithm 1: B_c = ⌈M / 4d⌉, B_r = min(⌈M / 4d⌉, d), for M = ``sram`` elements."""
    Bc = -(-sram // (4 * head_dim))
    return BlockSizes(min(Bc, head_dim), Bc)


def rabe_staats_blocks(q_len: int, kv_len: int) -> BlockSizes:
    """The chunks of Rabe and Staats: ⌈√Nk⌉ keys, so that there are as many chunks, and a fixed number of queries."""
    return BlockSizes(max(min(RABE_STAATS_QUERIES, q_len), 1), max(math.isqrt(max(kv_len, 1) - 1) + 1, 1))


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
    each, (pairs, rows, keys, _) = lengths, lengths.counts
    first = rows * each.qk + keys * each.qk + pairs  # Q, K → S
    second = pairs + pairs + rows  # S → P, and the row's log-sum-exp
    third = pairs + keys * each.v + rows * each.v  # P, V → O
    return first + second + third


def standard_backward(lengths: Lengths) -> int:
    """HBM accesses of Algorithm 3. Θ(Nd + N²), Theorem 5."""
    each, (pairs, rows, keys, stored_keys) = lengths, lengths.counts
    values = pairs + rows * each.v + stored_keys * each.v  # P, dO → dV
    weights = rows * each.v + keys * each.v + pairs  # dO, V → dP
    scores = 3 * pairs  # P, dP → dS
    queries = pairs + keys * each.qk + rows * each.qk  # dS, K → dQ
    return values + weights + scores + queries + pairs + rows * each.qk + stored_keys * each.qk  # dS, Q → dK


def flash_forward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of Algorithm 1: K and V once, Q, O, l and m for every block of keys. Θ(N²d²/M), Theorem 2."""
    each, (_, rows, _, stored_keys) = lengths, lengths.counts
    columns = -(-each.kv_len // blocks.Bc)
    return stored_keys * (each.qk + each.v) + rows * (each.v + 2) + columns * rows * (each.qk + 2 * each.v + 4)


def flash_backward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of Algorithm 4: Q, O, dO, l, m and twice dQ for every block of keys. Θ(N²d²/M), Theorem 5."""
    each, (_, rows, _, stored_keys) = lengths, lengths.counts
    columns = -(-each.kv_len // blocks.Bc)
    return 3 * stored_keys * (each.qk + each.v) + rows * each.qk + columns * rows * (3 * each.qk + 2 * each.v + 2)


def rabe_staats_forward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of chunks that are summarized: S and P̃ as in Algorithm 0, and O, m, ℓ of every chunk. Θ(Nd + N²)."""
    each, rows = lengths, lengths.counts[1]
    combined = -(-each.kv_len // blocks.Bc) * rows * (each.v + 2) + rows * (each.v + 2)  # Õ, m̃, ℓ̃ → O, m, ℓ
    return _summarized(lengths, blocks) + combined


def rabe_staats_backward(lengths: Lengths, blocks: BlockSizes) -> int:
    """HBM accesses of its derivative: every chunk is summarized again, and its sums are added to. Θ(Nd + N²)."""
    each, (pairs, rows, keys, stored_keys) = lengths, lengths.counts
    by_columns, by_rows = -(-each.kv_len // blocks.Bc) * rows, -(-each.q_len // blocks.Br) * keys
    starts = rows * each.qk + stored_keys * (each.qk + each.v)  # dQ, dK, dV = 0
    sums = rows * (3 * each.v + 2)  # dO, O, ℓ → dA, dℓ
    summary = by_columns * (2 * each.v + 5)  # dA, dℓ, m̃, m → dÕ, dℓ̃, and dℓ̃ again
    values = pairs + by_columns * each.v + by_rows * 2 * each.v  # P̃, dÕ → dV
    weights = by_columns * each.v + by_rows * each.v + pairs  # dÕ, V → dP̃
    scores = 3 * pairs  # P̃, dP̃ → dS
    queries = pairs + by_rows * each.qk + by_columns * 2 * each.qk  # dS, K → dQ
    d_keys = pairs + by_columns * each.qk + by_rows * 2 * each.qk  # dS, Q → dK
    return _summarized(lengths, blocks) + starts + sums + summary + values + weights + scores + queries + d_keys


def _summarized(lengths: Lengths, blocks: BlockSizes) -> int:
    """Every chunk of keys for every chunk of queries: Q, K → S → P̃, m̃, ℓ̃; P̃, V → Õ."""
    each, (pairs, rows, keys, _) = lengths, lengths.counts
    by_columns, by_rows = -(-each.kv_len // blocks.Bc) * rows, -(-each.q_len // blocks.Br) * keys
    return 4 * pairs + by_columns * (each.qk + each.v + 2) + by_rows * (each.qk + each.v)


def forward_flops(lengths: Lengths) -> int:
    """Of the matrix products QKᵀ and PV of every exact algorithm, without a mask."""
    return 2 * lengths.counts[0] * (lengths.qk + lengths.v)


def standard_backward_flops(lengths: Lengths) -> int:
    """dV, dP, dQ and dK."""
    return 2 * forward_flops(lengths)


def flash_backward_flops(lengths: Lengths) -> int:
    """dV, dP, dQ and dK, and S again."""
    return standard_backward_flops(lengths) + 2 * lengths.counts[0] * lengths.qk


def kernel_flops(lengths: Lengths, name: str) -> int:
    """Of our kernels, which form S again backward, as Algorithm 4 does."""
    return forward_flops(lengths) if name == "forward" else flash_backward_flops(lengths)


def lower_bound(lengths: Lengths) -> int:
    """What any exact forward pass moves: Q, K and V in, O out. Proposition 3's Ω(Nd), which is tight at M = Θ(Nd)."""
    _, rows, _, stored_keys = lengths.counts
    return (rows + stored_keys) * (lengths.qk + lengths.v)


def backward_lower_bound(lengths: Lengths) -> int:
    """What any backward pass moves that starts from Q, K, V, O and dO: those in, dQ, dK and dV out."""
    return 2 * lower_bound(lengths)


def io_bound(lengths: Lengths, sram: int) -> float:
    """N²d²/M of Theorem 2, without its constant, summed over heads; d² is D · Dv where the two differ."""
    return lengths.counts[0] * lengths.qk * lengths.v / sram
