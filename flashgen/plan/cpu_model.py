"""What the CPU templates keep in cache, byte for byte, and what a tile costs beside its matrix products.

In: a variant, a tile, the vector width. Out: bytes and an estimate. The buffers are those of
``templates/cpu/forward.h.jinja`` and ``backward.h.jinja``; a test compares with the size of their ``Scratch``.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level
from flashgen.analysis.variant import Variant

KEY_MULTIPLE = 4  # fg::row_multiple of tile_product.h
FLOAT = 4
# Of a causal sequence: pairs in tiles on the diagonal that are computed for nothing, as a fraction, are (Br + Bc) / N.
TYPICAL_LENGTH = 4096
# Measured: 128 keys run 1 % faster than 64 where a core's caches are its own, and 3 to 15 % slower where another guest
# of the host runs on the core's second thread.
ROOMY_COLUMNS, CROWDED = 64, 0.03


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
    captured = sum({Level.ROW: Br, Level.COLUMN: Bc * lanes}.get(each.level, 0) for each in variant.gradients)
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
        "captured gradients": captured,
    }
    return {name: FLOAT * count for name, count in floats.items() if count}


def backward_working_set(variant: Variant, Br: int, Bc: int, lanes: int) -> int:
    """All of them."""
    return sum(backward_buffers(variant, Br, Bc, lanes).values())


def overhead(variant: Variant, Br: int, Bc: int) -> float:
    """Work beside the products, as a fraction of theirs.

    A key tile is copied once for Br rows; Oᵀ is read, rescaled and written once for Bc keys; a tile on the border of
    the mask computes about half its pairs for nothing, which counts for more the larger the tile; and many keys leave
    little room for the next ones on their way in.
    """
    copied = 5.0 / Br
    rescaled = 1.5 / Bc
    border = 0.0 if variant.keep_everything else (Br + Bc) / TYPICAL_LENGTH
    crowded = CROWDED * max(0.0, Bc / ROOMY_COLUMNS - 1.0)
    return copied + rescaled + border + crowded


def _padded(variant: Variant, lanes: int) -> tuple[int, int, int]:
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    return D, round_up(D, lanes), round_up(Dv, lanes)
