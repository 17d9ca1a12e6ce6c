"""What the CPU templates keep in cache, byte for byte, and what a tile costs beside its matrix products.

In: a variant, a tile, the vector width. Out: bytes and an estimate. The buffers are those of
``templates/include/flashgen/cpu/forward.h`` and ``backward.h``; a test compares with the size of their ``Scratch``.
"""

from __future__ import annotations

from flashgen.analysis.diagonals import diagonal_values, over_diagonals
from flashgen.analysis.kept import window_width
from flashgen.analysis.levels import Level
from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.variant import Variant
from flashgen.targets.cpu.products import Products

KEY_MULTIPLE = 4  # fg::row_multiple of tile_product.h
MATRIX_DEPTH = 32  # fg::matrix_depth of matrix_product.h, and the rows whose scores are held at a time
FLOAT, BFLOAT16 = 4, 2
# A row keeps half of so many keys, on average, unless its mask is a window.
TYPICAL_LENGTH = 4096
# Measured: 128 keys run 1 % faster than 64 where a core's caches are its own, and 3 to 15 % slower where another guest
# of the host runs on the core's second thread. A window's rows keep few keys, so that visits weigh more: forward it
# takes 128 where so much of the L1 cache holds K (a Zen 5, D 64: 0.97 of the time; D 128, where it does not, 1.01).
ROOMY_COLUMNS, CROWDED = 64, 0.06
WINDOW_COLUMNS, L1_FOR_KEYS = 128, 2 / 3
# Vectors of so many lanes keep O as rows, shorter ones transposed.
LANES_OF_ROWS = 16
# Rows that keep nothing of a tile are left out in groups of so many.
VECTOR_ROWS = 16
# Beside products of one part in matrix registers the mask shows, in all rows of a tile on the border: as so many more.
MASKED = 0.25


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def buffers(variant: Variant, products: Products, name: str, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """Bytes that the loop of a pass over key tiles touches, by name; what a pass has no use for is left out."""
    back = int(name not in ("forward", "jvp"))
    multiple = KEY_MULTIPLE if products.in_vectors else MATRIX_DEPTH
    rows, bc = Br if products.in_vectors else round_up(Br, MATRIX_DEPTH), round_up(Bc, multiple)
    widths = (variant.head_dim.qk, variant.head_dim.v)
    (D, Dv), (Dp, Dvp) = widths, (round_up(width, lanes) for width in widths)
    ld, gap = rows + lanes, 2 * lanes
    if products is not Products.VECTORS:
        D, Dv = (round_up(width, MATRIX_DEPTH) for width in widths)
    match products:
        case Products.VECTORS:  # Qᵀ and Sᵀ; backward Q and dO either way
            q, d_o = FLOAT * (D * ld + back * rows * Dp), FLOAT * (Dv * ld + rows * Dvp)
            k, v = FLOAT * bc * Dp, FLOAT * bc * Dvp
            s = d_p = FLOAT * bc * ld
        case Products.PAIRS:  # pairs of features; forward V, backward K in pairs of rows, too, and P and dS as rows
            q, d_o = BFLOAT16 * (D * ld + back * rows * Dp), BFLOAT16 * (Dv * ld + rows * Dvp)
            k, v = BFLOAT16 * bc * (D + gap + back * Dp), BFLOAT16 * bc * (Dv + gap + (1 - back) * Dvp)
            s = d_p = FLOAT * bc * ld + back * BFLOAT16 * bc * (rows + gap)
        case _:  # forward V, backward Q, dO and K either way; strips of scores and P, backward all of P and dS
            operand, strips = BFLOAT16 * products.parts, 2 * bc * MATRIX_DEPTH
            q, d_o = (1 + back) * operand * D * rows, 2 * operand * Dv * rows
            k, v = (1 + back) * operand * bc * D, (2 - back) * operand * bc * Dv
            s = FLOAT * strips + operand * (bc * rows if back else strips)
            d_p = s + operand * strips
    sizes = {
        "Q": q,
        "dO": back * d_o,
        "K": k,
        "V": v,
        "S, then P": s,
        "dP, then dS": back * d_p,
        "O": (1 - back) * FLOAT * Dvp * (rows if products.in_vectors and lanes >= LANES_OF_ROWS else ld),
        "dQ": back * FLOAT * Dp * ld,
        "dK": back * FLOAT * bc * Dp,
        "dV": back * FLOAT * bc * Dvp,
        "row state": FLOAT * (2 + back) * rows,
        "diagonals": FLOAT * _diagonals(variant, rows, Bc, lanes, backward=back > 0),
        "captured gradients": back * FLOAT * _captured(variant, rows, Bc * lanes),
    }
    if name == "jvp":  # the state of a row has one number more
        sizes = _with_tangents(sizes, FLOAT * rows)
    elif name == "jvp_backward":  # dO has no tangent; the state of a row has t(lse) and epsilon, too
        sizes = _with_tangents(sizes, FLOAT * 2 * rows) | {"dO, tangents": 0, "captured gradients, tangents": 0}
    return {name: size for name, size in sizes.items() if size}


def working_set(variant: Variant, products: Products, name: str, Br: int, Bc: int, lanes: int) -> int:
    """All of them."""
    return sum(buffers(variant, products, name, Br, Bc, lanes).values())


def _with_tangents(sizes: dict[str, int], of_rows: int) -> dict[str, int]:
    """The buffers of a pass, each with its tangent, of which the state of rows has so many bytes."""
    own = {"row state": of_rows, "diagonals": 0}
    return sizes | {f"{name}, tangents": own.get(name, size) for name, size in sizes.items()}


def overhead(variant: Variant, products: Products, name: str, Br: int, Bc: int, l1_bytes: int) -> float:
    """Work beside the products, as a fraction of theirs."""
    is_forward = name in ("forward", "jvp")
    if products.in_vectors:
        group = KEY_MULTIPLE if is_forward and not is_irregular(variant.keep) else Bc
        in_pairs = products is Products.PAIRS
        roomy = _roomy_columns(variant, l1_bytes) if name == "forward" else ROOMY_COLUMNS
        beside = _pair_overhead(Br, Bc, is_forward=is_forward) if in_pairs else _vector_overhead(Br, Bc, roomy)
        return beside + _border(variant, group, VECTOR_ROWS)
    border = _border(variant, Bc, MATRIX_DEPTH + MASKED / products.multiplications * Br)
    return border + (_matrix_forward_overhead if is_forward else _matrix_backward_overhead)(products.parts, Br, Bc)


def _roomy_columns(variant: Variant, l1_bytes: int) -> int:
    """Keys of a tile that leave room for the next ones."""
    held = FLOAT * variant.head_dim.qk * WINDOW_COLUMNS <= L1_FOR_KEYS * l1_bytes
    return WINDOW_COLUMNS if held and window_width(variant.keep) is not None else ROOMY_COLUMNS


def _vector_overhead(Br: int, Bc: int, roomy: int) -> float:
    """Without the border, for both passes.

    A key tile is copied once for Br rows; Oᵀ, or dQᵀ, is read and written once for Bc keys; on the border of the mask
    pairs are computed for nothing; many keys leave little room for the next ones on their way in. Fitted on a causal
    window of 256: where all keys of a tile are computed, 128 × 32 takes 0.93 of the time of 128 × 16 and of 128 × 64;
    where they are trimmed, 128 × 64 takes 0.90 (D 64) and 0.87 (D 128) of that of 128 × 32.
    """
    crowded = CROWDED * max(0.0, Bc / roomy - 1.0)
    return 5.0 / Br + 4.0 / Bc + crowded


def _pair_overhead(Br: int, Bc: int, *, is_forward: bool) -> float:
    """Work beside products of pairs. Fitted on a Zen 5, B 1, H 1, N 4,096, in turns.

    Forward 128 × 64, 128 × 128, 256 × 64, 192 × 128 and 256 × 128 take 1.04 to 1.07, 1.03 to 1.06, 1.01 to 1.02, 1.01
    to 1.02 and 1 (D 64 and 128, plain and causal). Backward 64 × 64, 128 × 64, 192 × 64 and 192 × 128 take 1.08, 1.03,
    1.01 and 1 (plain), with a window of 256 192 × 16, 192 × 32 and 192 × 64 1.02 to 1.07, 1 to 1.04 and 1.05 to 1.08.
    """
    return (11.0 if is_forward else 8.0) / Br + 2.5 / Bc


def _matrix_forward_overhead(parts: int, Br: int, Bc: int) -> float:
    """Without the border.

    K and V are laid out for the registers once for Br rows, sums of O enter and leave them once for Bc keys, and of
    one part more than 64 keys do not stay in the L1 cache between the products. Fitted on a Xeon with AMX. One part:
    512 × 64 takes 0.96 of the time of 256 × 64, 256 × 128 1.1 (D 64) and 1.04 (D 128) of it. Three: at D 64 256 × 128,
    512 × 128 and 1024 × 128 take 180, 160 and 151 ms, 512 × 64 as long as 512 × 128, at D 128 1.15 times as long.
    """
    if parts > 1:
        return 65.0 / Br + 8.0 / Bc
    return 16.0 / Br + 4.0 / Bc + 0.07 * max(0.0, Bc / ROOMY_COLUMNS - 1.0)


def _matrix_backward_overhead(parts: int, Br: int, Bc: int) -> float:
    """Work beside products, backward: K is transposed, dK and dV read and written once for Br rows, dQ for Bc keys.

    Fitted like the forward pass. One part: 256 × 128 takes 0.89 of the time of 256 × 64, which takes 0.91 to 0.96 of
    128 × 64. Three: 128 × 128 takes 1.11 (D 64) and 1.04 (D 128) of the time of 256 × 128, 256 × 64 1.02 and 1.04.
    """
    return 30.0 / Br + 4.0 / Bc if parts > 1 else 25.0 / Br + 13.0 / Bc


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


def _diagonals(variant: Variant, rows: int, columns: int, lanes: int, *, backward: bool) -> int:
    """What is computed once a diagonal, and partial sums of gradients that belong to diagonals."""
    variant = over_diagonals(variant)
    sums = sum(each.level is Level.DIAGONAL for each in variant.gradients) if backward else 0
    return (len(diagonal_values(variant)) + sums) * (round_up(rows + columns, lanes) + lanes)
