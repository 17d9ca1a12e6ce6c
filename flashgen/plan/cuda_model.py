"""What the CUDA templates keep in shared memory, byte for byte.

In: a variant, an element type, a tile. Out: bytes. The buffers are those of ``templates/cuda/forward.cuh.jinja`` and
``backward.cuh.jinja``; the generated source asserts that its own sizes are these.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level
from flashgen.analysis.variant import DOT, Variant
from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.spec import Softmax
from flashgen.ir.types import ElementType

WINDOW = 1024  # tiles that one list of visits covers
VISIT_LIST = 28 + 2 * WINDOW // 8 + 2 * WINDOW
BINS = 256  # of a warp's histogram of contributions to a captured gradient
FLOAT = 4
_LIGHT_MASK = 9  # nodes of the expression: a causal window has as many


def constant_factor(score: Expr) -> float | None:
    """c where a score is c · dot with a positive constant; then maxima are taken of dot itself."""
    match score:
        case Apply(op="mul", args=(Literal(value=float() as value), other)) if other == DOT and value > 0:
            return value
        case Apply(op="mul", args=(other, Literal(value=float() as value))) if other == DOT and value > 0:
            return value
    return 1.0 if score == DOT else None


def is_plain(variant: Variant) -> bool:
    """Whether a pair's weight takes no more than a product and an exponential, and its mask a comparison or two."""
    plain_score = isinstance(variant.weights, Softmax) and constant_factor(variant.score) is not None
    return plain_score and variant.spec.dropout is None and has_light_mask(variant)


def has_light_mask(variant: Variant) -> bool:
    """Whether the mask needs few registers: bounds on i - j do, divisions and captured tensors do not."""
    return variant.keep.size <= _LIGHT_MASK


def padded(head_dim: int) -> int:
    """A head dimension in whole matrix instructions; a large one is divided among two warps."""
    multiple = 16 if head_dim <= 128 else 32
    return -(-head_dim // multiple) * multiple


def tile_bytes(rows: int, columns: int, element: ElementType) -> int:
    """A ``SharedTile``: panels of 2, 4 or 8 chunks of 16 bytes a row."""
    chunks = columns * element.bytes // 16
    width = 8 if chunks >= 5 else 4 if chunks >= 3 else 2
    return -(-chunks // width) * width * 16 * rows


def forward_bytes(variant: Variant, element: ElementType, Br: int, Bc: int, stages: int) -> int:
    """Q, rings of K and V, the visits, norms where the score uses them; O takes their place at the end."""
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    keys = tile_bytes(Bc, D, element) + tile_bytes(Bc, Dv, element)
    total = tile_bytes(Br, D, element) + stages * keys + VISIT_LIST
    if variant.uses_sqdist:
        total += FLOAT * (Br + Bc)
    return max(total, tile_bytes(Br, Dv, element))


def backward_bytes(
    variant: Variant, element: ElementType, Br: int, Bc: int, warps: int, stages: int, split: int, *, with_dq: bool
) -> int:
    """K, V, a ring of Q, dO, dS and (where warps share keys) P, what rows carry, the visits, sums over the block."""
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    total = tile_bytes(Bc, D, element) + tile_bytes(Bc, Dv, element)
    total += stages * tile_bytes(Br, D, element) + tile_bytes(Br, Dv, element)
    total += ((with_dq or split > 1) + (split > 1)) * tile_bytes(Bc, Br, element)
    bins = BINS * sum(each.level is Level.PAIR for each in variant.gradients)
    return total + (3 if variant.uses_sqdist else 2) * FLOAT * Br + VISIT_LIST + FLOAT * warps * (1 + bins)


def query_bytes(variant: Variant, element: ElementType, Br: int, Bc: int, stages: int) -> int:
    """Q, dO, rings of K and V, what rows carry, the visits."""
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    total = tile_bytes(Br, D, element) + tile_bytes(Br, Dv, element)
    total += stages * (tile_bytes(Bc, D, element) + tile_bytes(Bc, Dv, element))
    total += (3 if variant.uses_sqdist else 2) * FLOAT * Br + (FLOAT * Bc if variant.uses_sqdist else 0)
    return total + VISIT_LIST
