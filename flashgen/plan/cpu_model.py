"""What the CPU templates keep in cache, byte for byte, and what a tile costs beside its matrix products.

In: a variant, a tile, the vector width. Out: bytes and an estimate. The buffers are those of
``templates/cpu/forward.h.jinja`` and ``backward.h.jinja``; a test compares with the size of their ``Scratch``.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level
from flashgen.analysis.variant import Variant
from flashgen.analysis.window import window_width

KEY_MULTIPLE = 4  # fg::row_multiple of tile_product.h
MATRIX_DEPTH = 32  # fg::matrix_depth of matrix_product.h, and the rows whose scores are held at a time
FLOAT, BFLOAT16 = 4, 2
# A row keeps half of so many keys, on average, unless its mask is a window.
TYPICAL_LENGTH = 4096
# Measured: 128 keys run 1 % faster than 64 where a core's caches are its own, and 3 to 15 % slower where another guest
# of the host runs on the core's second thread.
ROOMY_COLUMNS, CROWDED = 64, 0.06
# Rows that keep nothing of a tile are left out in groups of so many.
VECTOR_ROWS = 16
# Beside products of matrix registers the mask shows, in all rows of a tile on the border: as so many more of them.
MASKED = 0.25


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def forward_buffers(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """Bytes that the loop over key tiles touches: Qᵀ, K, V, Sᵀ, Oᵀ and the row state."""
    D, Dp, Dvp = _padded(variant, lanes)
    ld, bc = Br + lanes, round_up(Bc, KEY_MULTIPLE)
    floats = {"Q": D * ld, "K": bc * Dp, "V": bc * Dvp, "S, then P": bc * ld, "O": Dvp * ld, "row state": 2 * Br}
    return {name: FLOAT * count for name, count in floats.items()}


def forward_working_set(variant: Variant, Br: int, Bc: int, lanes: int) -> int:
    """All of them."""
    return sum(forward_buffers(variant, Br, Bc, lanes).values())


def backward_buffers(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """Bytes that the loop over key tiles touches.

    Q, Qᵀ, dO, dOᵀ, K, V, Sᵀ (then Pᵀ), dPᵀ (then dSᵀ), dQᵀ, the tile's rows of dK and dV, the row state, and the
    partial sums of captured gradients.
    """
    D, Dp, Dvp = _padded(variant, lanes)
    ld, bc = Br + lanes, round_up(Bc, KEY_MULTIPLE)
    floats = {
        "Q": Br * Dp + D * ld,
        "dO": Br * Dvp + variant.head_dim.v * ld,
        "K": bc * Dp,
        "V": bc * Dvp,
        "S, then P": bc * ld,
        "dP, then dS": bc * ld,
        "dQ": Dp * ld,
        "dK": bc * Dp,
        "dV": bc * Dvp,
        "row state": 3 * Br,
        "captured gradients": _captured(variant, Br, Bc * lanes),
    }
    return {name: FLOAT * count for name, count in floats.items() if count}


def backward_working_set(variant: Variant, Br: int, Bc: int, lanes: int) -> int:
    """All of them."""
    return sum(backward_buffers(variant, Br, Bc, lanes).values())


def matrix_forward_buffers(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same of bfloat16 in matrix registers: pairs of Q, rows of K, Vᵀ, S of some rows, Oᵀ and the row state."""
    D, Dv, rows, bc = _matrix_padded(variant, Br, Bc)
    ld, Dvp = rows + lanes, _padded(variant, lanes)[2]
    return {
        "Q": FLOAT * (D // 2) * ld,
        "K": BFLOAT16 * bc * D,
        "V": BFLOAT16 * Dv * (bc + MATRIX_DEPTH),
        "S, then P": FLOAT * bc * MATRIX_DEPTH,
        "O": FLOAT * Dvp * ld,
        "row state": FLOAT * 2 * rows,
    }


def matrix_backward_buffers(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same backward: pairs of Q and dO either way, K and Kᵀ, P and dS of some rows as scores, of all as weights."""
    D, Dv, rows, bc = _matrix_padded(variant, Br, Bc)
    _, Dp, Dvp = _padded(variant, lanes)
    ld = rows + lanes
    scores = FLOAT * bc * MATRIX_DEPTH + BFLOAT16 * bc * (rows + MATRIX_DEPTH)
    sizes = {
        "Q": FLOAT * ((D // 2) * ld + rows // 2 * (Dp + lanes)),
        "dO": FLOAT * ((Dv // 2) * ld + rows // 2 * (Dvp + lanes)),
        "K": BFLOAT16 * (bc * D + D * (bc + MATRIX_DEPTH)),
        "V": BFLOAT16 * bc * Dv,
        "S, then P": scores,
        "dP, then dS": scores,
        "dQ": FLOAT * Dp * ld,
        "dK": FLOAT * bc * Dp,
        "dV": FLOAT * bc * Dvp,
        "row state": FLOAT * 3 * rows,
        "captured gradients": FLOAT * _captured(variant, rows, Bc * lanes),
    }
    return {name: size for name, size in sizes.items() if size}


def overhead(variant: Variant, Br: int, Bc: int) -> float:
    """Work beside the products, as a fraction of theirs.

    A key tile is copied once for Br rows; Oᵀ, or dQᵀ, is read and written once for Bc keys; on the border of the mask
    pairs are computed for nothing; many keys leave little room for the next ones on their way in. Fitted on a causal
    window of 256, where 128 × 32 takes 0.93 of the time of 128 × 16 and of 128 × 64.
    """
    crowded = CROWDED * max(0.0, Bc / ROOMY_COLUMNS - 1.0)
    return 5.0 / Br + 4.0 / Bc + _border(variant, Bc, VECTOR_ROWS) + crowded


def matrix_forward_overhead(variant: Variant, Br: int, Bc: int) -> float:
    """Work beside the products of matrix registers, as a fraction of theirs.

    V is transposed once for Br rows, sums of O enter and leave the registers once for Bc keys, and more than 64 keys do
    not stay in the L1 cache between the products. Fitted on a Xeon with AMX: 256 × 64 takes 0.97 (D 64) and 0.9 (D 128)
    of the time of 128 × 64, and 256 × 128 1.1 and 1.04 of that of 256 × 64. In a window of 256 keys 256 × 64
    takes 1.05 of the time of 128 × 64.
    """
    crowded = 0.07 * max(0.0, Bc / ROOMY_COLUMNS - 1.0)
    return 16.0 / Br + 4.0 / Bc + _border(variant, Bc, MATRIX_DEPTH + MASKED * Br) + crowded


def matrix_backward_overhead(variant: Variant, Br: int, Bc: int) -> float:
    """The same backward: K is transposed and dK and dV are read and written once for Br rows, dQ once for Bc keys.

    Fitted like the forward pass: 256 × 128 takes 0.89 of the time of 256 × 64, which takes 0.91 to 0.96 of 128 × 64.
    """
    return 25.0 / Br + 13.0 / Bc + _border(variant, Bc, MATRIX_DEPTH + MASKED * Br)


def _border(variant: Variant, Bc: int, rows: float) -> float:
    """Pairs computed for nothing beside those that are kept: half of what the border crosses, Bc × rows each."""
    if variant.keep_everything:
        return 0.0
    width = window_width(variant.keep)
    borders, kept = (1, TYPICAL_LENGTH / 2) if width is None else (2, max(1, width))
    return borders * (Bc + rows) / 2 / kept


def _captured(variant: Variant, of_row: int, of_column: int) -> int:
    """Partial sums of gradients that belong to rows and to columns."""
    return sum({Level.ROW: of_row, Level.COLUMN: of_column}.get(each.level, 0) for each in variant.gradients)


def _matrix_padded(variant: Variant, Br: int, Bc: int) -> tuple[int, int, int, int]:
    sizes = (variant.head_dim.qk, variant.head_dim.v, Br, Bc)
    D, Dv, rows, columns = (round_up(size, MATRIX_DEPTH) for size in sizes)
    return D, Dv, rows, columns


def _padded(variant: Variant, lanes: int) -> tuple[int, int, int]:
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    return D, round_up(D, lanes), round_up(Dv, lanes)
