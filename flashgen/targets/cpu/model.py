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
    is_forward, rows = name in ("forward", "jvp"), Br
    match products:
        case Products.VECTORS:
            sizes = (_forward if is_forward else _backward)(variant, Br, Bc, lanes)
        case Products.PAIRS:
            sizes = (_pair_forward if is_forward else _pair_backward)(variant, Br, Bc, lanes)
        case _:
            sizes = (_matrix_forward if is_forward else _matrix_backward)(variant, products.parts, Br, Bc, lanes)
            rows = _matrix_padded(variant, Br, Bc)[2]
    if name == "jvp":  # the state of a row has one number more
        sizes = _with_tangents(sizes, FLOAT * rows)
    elif name == "jvp_backward":  # dO has no tangent; the state of a row has t(lse) and epsilon, too
        sizes = _with_tangents(sizes, FLOAT * 2 * rows) | {"dO, tangents": 0, "captured gradients, tangents": 0}
    return {name: size for name, size in sizes.items() if size}


def working_set(variant: Variant, products: Products, name: str, Br: int, Bc: int, lanes: int) -> int:
    """All of them."""
    return sum(buffers(variant, products, name, Br, Bc, lanes).values())


def _forward(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """Qᵀ, K, V, Sᵀ, O or Oᵀ, and the row state."""
    D, Dp, Dvp = _padded(variant, lanes)
    ld, bc = Br + lanes, round_up(Bc, KEY_MULTIPLE)
    floats = {
        "Q": D * ld,
        "K": bc * Dp,
        "V": bc * Dvp,
        "S, then P": bc * ld,
        "O": Dvp * (Br if lanes >= LANES_OF_ROWS else ld),
        "row state": 2 * Br,
        "diagonals": _diagonals(variant, Br, Bc, lanes),
    }
    return {name: FLOAT * count for name, count in floats.items()}


def _with_tangents(sizes: dict[str, int], of_rows: int) -> dict[str, int]:
    """The buffers of a pass, each with its tangent, of which the state of rows has so many bytes."""
    own = {"row state": of_rows, "diagonals": 0}
    return sizes | {f"{name}, tangents": own.get(name, size) for name, size in sizes.items()}


def _backward(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """Q, Qᵀ, dO, dOᵀ, K, V, Sᵀ (then Pᵀ), dPᵀ (then dSᵀ), dQᵀ, the tile's dK and dV, the row state, partial sums."""
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
        "diagonals": _diagonals(variant, Br, Bc, lanes, backward=True),
        "captured gradients": _captured(variant, Br, Bc * lanes),
    }
    return {name: FLOAT * count for name, count in floats.items()}


def _pair_forward(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same in pairs of bfloat16: Q in pairs of features, K and V as rows, V in pairs of rows, too."""
    D, Dv, _, _ = _matrix_padded(variant, Br, Bc)
    bc, gap = round_up(Bc, KEY_MULTIPLE), 2 * lanes
    return _forward(variant, Br, Bc, lanes) | {
        "Q": BFLOAT16 * D * (Br + lanes),
        "K": BFLOAT16 * bc * (D + gap),
        "V": BFLOAT16 * bc * (Dv + gap + _padded(variant, lanes)[2]),
    }


def _pair_backward(variant: Variant, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same backward: Q and dO in pairs either way, K in pairs of rows, too, and rows of P and dS beside scores."""
    D, Dv, _, _ = _matrix_padded(variant, Br, Bc)
    _, Dp, Dvp = _padded(variant, lanes)
    bc, gap = round_up(Bc, KEY_MULTIPLE), 2 * lanes
    scores = FLOAT * bc * (Br + lanes) + BFLOAT16 * bc * (Br + gap)
    return _backward(variant, Br, Bc, lanes) | {
        "Q": BFLOAT16 * (D * (Br + lanes) + Br * Dp),
        "dO": BFLOAT16 * (Dv * (Br + lanes) + Br * Dvp),
        "K": BFLOAT16 * bc * (D + gap + Dp),
        "V": BFLOAT16 * bc * (Dv + gap),
        "S, then P": scores,
        "dP, then dS": scores,
    }


def _matrix_forward(variant: Variant, parts: int, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same in matrix registers: Q in pairs, K, V and Vᵀ, two strips of S and of P, Oᵀ and the row state.

    Operands are bfloat16, ``parts`` of them a number.
    """
    D, Dv, rows, bc = _matrix_padded(variant, Br, Bc)
    operand = BFLOAT16 * parts
    return {
        "Q": operand * D * rows,
        "K": operand * bc * D,
        "V": 2 * operand * bc * Dv,
        "S, then P": 2 * (FLOAT + operand) * bc * MATRIX_DEPTH,
        "O": FLOAT * _padded(variant, lanes)[2] * (rows + lanes),
        "row state": FLOAT * 2 * rows,
        "diagonals": FLOAT * _diagonals(variant, rows, Bc, lanes),
    }


def _matrix_backward(variant: Variant, parts: int, Br: int, Bc: int, lanes: int) -> dict[str, int]:
    """The same backward: Q and dO in pairs either way, K and Kᵀ, V, two strips of S and dP, all of P and dS."""
    D, Dv, rows, bc = _matrix_padded(variant, Br, Bc)
    _, Dp, Dvp = _padded(variant, lanes)
    operand = BFLOAT16 * parts
    scores = 2 * FLOAT * bc * MATRIX_DEPTH + operand * bc * rows
    return {
        "Q": 2 * operand * D * rows,
        "dO": 2 * operand * Dv * rows,
        "K": 2 * operand * bc * D,
        "V": operand * bc * Dv,
        "S, then P": scores,
        "dP, then dS": scores + 2 * operand * bc * MATRIX_DEPTH,
        "dQ": FLOAT * Dp * (rows + lanes),
        "dK": FLOAT * bc * Dp,
        "dV": FLOAT * bc * Dvp,
        "row state": FLOAT * 3 * rows,
        "diagonals": FLOAT * _diagonals(variant, rows, Bc, lanes, backward=True),
        "captured gradients": FLOAT * _captured(variant, rows, Bc * lanes),
    }


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
    """The same of pairs. Fitted on a Zen 5, B 1, H 1, N 4,096, in turns.

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
    """The same backward: K is transposed and dK and dV are read and written once for Br rows, dQ once for Bc keys.

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


def _diagonals(variant: Variant, rows: int, columns: int, lanes: int, *, backward: bool = False) -> int:
    """What is computed once a diagonal, and partial sums of gradients that belong to diagonals."""
    variant = over_diagonals(variant)
    sums = sum(each.level is Level.DIAGONAL for each in variant.gradients) if backward else 0
    return (len(diagonal_values(variant)) + sums) * (round_up(rows + columns, lanes) + lanes)


def _matrix_padded(variant: Variant, Br: int, Bc: int) -> tuple[int, int, int, int]:
    sizes = (variant.head_dim.qk, variant.head_dim.v, Br, Bc)
    D, Dv, rows, columns = (round_up(size, MATRIX_DEPTH) for size in sizes)
    return D, Dv, rows, columns


def _padded(variant: Variant, lanes: int) -> tuple[int, int, int]:
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    return D, round_up(D, lanes), round_up(Dv, lanes)
