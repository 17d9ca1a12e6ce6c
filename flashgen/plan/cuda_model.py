"""What the CUDA templates keep in shared memory, byte for byte.

In: a variant, an element type, a tile. Out: bytes. The buffers are those of ``templates/cuda/forward.cuh.jinja`` and
``backward.cuh.jinja``; the generated source asserts that its own sizes are these.
"""

from __future__ import annotations

from typing import TypeAlias

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.levels import Level, level_of, observed_loads
from flashgen.analysis.pieces import block_sizes
from flashgen.analysis.tiles import Tile, TileClass, classify
from flashgen.analysis.variant import Variant, constant_factor
from flashgen.ir.expr import Apply, Expr
from flashgen.ir.interval import IntRange
from flashgen.ir.spec import Softmax
from flashgen.ir.types import ElementType
from flashgen.plan.cuda_plan import BackwardTiles, ForwardTiles, QueryTiles
from flashgen.plan.cuda_tables import BackwardChoice, ForwardChoice, QueryChoice
from flashgen.plan.mask_lists import takes_longest_first

WINDOW = 1024  # tiles that one list of visits covers
VISIT_LIST = 44 + 2 * WINDOW // 8 + 2 * WINDOW
COPIED_LIST = 16 + 2 * WINDOW
PLACE = 16  # of a query tile and its keys
BINS = 256  # of a warp's histogram of contributions to a captured gradient
FLOAT = WORD = 4
WIDE = 128  # rows and columns of a tile
SIGNAL = 8  # an mbarrier
_LIGHT_MASK = 9  # nodes of the expression: a causal window has as many
_FAR = 8192 - 128
_FAR_SIZES = {"B": 1, "H": 1, "Hkv": 1, "Nq": 8192, "Nk": 8192}

# Tiles that are weighed up, or chosen.
_Forward: TypeAlias = ForwardChoice | ForwardTiles
_Backward: TypeAlias = BackwardChoice | BackwardTiles
_Queries: TypeAlias = QueryChoice | QueryTiles

COPYING_REGISTERS = 24  # of a thread that only copies
FINDING_REGISTERS = 32  # at least, of one that finds visits
_REGISTERS = 65536  # of a multiprocessor
_MOST_REGISTERS = 240


def registers(warps: int, loaders: int, least: int) -> tuple[int, int]:
    """What a thread that multiplies may have, where loaders keep no more than ``least``; and what these then have.

    A block begins with equal shares, of a multiple of 8, and they can be dealt out again; to ask for more would wait
    for ever.
    """
    whole = _REGISTERS // (32 * (warps + loaders)) // 8 * 8 * (warps + loaders)
    multiplying = min((whole - least * loaders) // warps // 8 * 8, _MOST_REGISTERS)
    return multiplying, (whole - multiplying * warps) // loaders // 8 * 8


def is_plain(variant: Variant) -> bool:
    """Whether a pair's weight takes no more than a product and an exponential, and its mask a comparison or two."""
    plain_score = isinstance(variant.weights, Softmax) and constant_factor(variant.score) is not None
    return plain_score and variant.spec.dropout is None and has_light_mask(variant)


def has_light_mask(variant: Variant) -> bool:
    """Whether the mask needs few registers: bounds on i - j do, divisions and captured tensors do not."""
    return variant.keep.size <= _LIGHT_MASK


def has_long_rows(variant: Variant) -> bool:
    """Whether queries keep keys however far back: for certain, or because the mask relates no queries to keys.

    Then a block has tiles enough to hide what it begins and ends with.
    """
    far = Tile(IntRange(0, 0), IntRange(0, 0), IntRange(_FAR, _FAR + 127), IntRange(0, 127), _FAR_SIZES)
    return has_whole_rows(variant) or classify(variant.keep, far) is TileClass.FULL


def has_small_blocks(variant: Variant) -> bool:
    """Whether the mask is drawn in blocks of fewer positions than a wide tile has."""
    return any(size < WIDE for axis in (ROW, COLUMN) for size in block_sizes(variant.keep, axis))


def has_whole_rows(variant: Variant) -> bool:
    """Whether the mask relates no queries to keys: a row has all tiles, or those before a length."""
    return not _relates_pairs(variant.keep)


def _relates_pairs(condition: Expr) -> bool:
    if isinstance(condition, Apply) and condition.op in ("and", "or", "not"):
        return any(_relates_pairs(each) for each in condition.args)
    return level_of(condition) is Level.PAIR


def padded(head_dim: int) -> int:
    """A head dimension in whole matrix instructions; a large one is divided among two warps."""
    multiple = 16 if head_dim <= 128 else 32
    return -(-head_dim // multiple) * multiple


def panel_width(columns: int, element: ElementType) -> int:
    """Columns of one panel of a ``SharedTile``: 2, 4 or 8 chunks of 16 bytes."""
    chunks = columns * element.bytes // 16
    return (8 if chunks >= 5 else 4 if chunks >= 3 else 2) * 16 // element.bytes


def tile_bytes(rows: int, columns: int, element: ElementType) -> int:
    """A ``SharedTile``: whole panels."""
    width = panel_width(columns, element)
    return -(-columns // width) * width * element.bytes * rows


def dq_column_groups(head_dim: int, Br: int, warps: int, element: ElementType) -> int:
    """How many warpgroups share 64 rows of dQ, each with columns that end where a panel does, or all within one."""
    row_groups = max(n for n in range(1, warps // 4 + 1) if Br // 64 % n == 0)
    panel = panel_width(head_dim, element)

    def works(count: int) -> bool:
        width = head_dim // count
        return count == 1 or (head_dim % (8 * count) == 0 and (width % panel == 0 or panel % width == 0))

    return max(n for n in range(1, warps // 4 // row_groups + 1) if works(n))


def takes_tensor_copies(variant: Variant, element: ElementType, tiles: _Forward | _Backward) -> bool:
    """Where warpgroups multiply, and rows are whole numbers of 16 bytes."""
    widths = (variant.head_dim.qk, variant.head_dim.v)
    return tiles.warpgroups and all(width * element.bytes % 16 == 0 for width in widths)


def stays_for_keys(variant: Variant, element: ElementType, tiles: _Backward) -> bool:
    """Whether a block that adds up dK, dV and dQ takes one key tile after another: where it copies for itself.

    Not where the mask reads captured tensors: documents took 1.03 to 1.06 times as long with it.
    """
    reads = any(observed_loads(variant.keep))
    return takes_tensor_copies(variant, element, tiles) and not tiles.loaders and not reads


def forward_buffers(variant: Variant, element: ElementType, tiles: _Forward) -> dict[str, int]:
    """Q, rings of K and V, the visits, norms where the score uses them, signals where tensor copies have some.

    Blocks that stay for several query tiles and copy for themselves begin with the next one while they work on one:
    they have room for its list of visits, and for its Q.
    """
    Br, Bc, stages, stays = tiles.Br, tiles.Bc, tiles.stages, takes_tensor_copies(variant, element, tiles)
    passes_on = stays and not tiles.loaders and takes_longest_first(variant)
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    found = {
        "Q": (1 + passes_on) * tile_bytes(Br, D, element),
        "K": stages * tile_bytes(Bc, D, element),
        "V": stages * tile_bytes(Bc, Dv, element),
        "list of tiles": (2 if tiles.loaders else 1) * VISIT_LIST,
        "next list": passes_on * (COPIED_LIST + PLACE),
    }
    found |= {"norms": FLOAT * (Br + Bc)} if variant.uses_sqdist else {}
    if stays:
        found["what the mask reads"] = stages * len(observed_loads(variant.keep)[1]) * WORD * Bc
    found = {name: size for name, size in found.items() if size}
    return found | _forward_signals(variant, element, tiles, sum(found.values()))


def forward_bytes(variant: Variant, element: ElementType, tiles: _Forward) -> int:
    """All of them; O takes the place of all at the end, unless blocks stay."""
    whole = sum(forward_buffers(variant, element, tiles).values())
    if takes_tensor_copies(variant, element, tiles):
        return whole
    return max(whole, tile_bytes(tiles.Br, padded(variant.head_dim.v), element))


def _forward_signals(variant: Variant, element: ElementType, tiles: _Forward, before: int) -> dict[str, int]:
    """Those of K and V, more for what the mask reads; the two of Q; with loaders, two for each list."""
    found = _signals(variant, element, tiles, before, stored=bool(observed_loads(variant.keep)[1]))
    if found:
        found["signals"] += (6 if tiles.loaders else 2) * SIGNAL
    return found


def _signals(
    variant: Variant, element: ElementType, tiles: _Forward | _Backward, before: int, *, stored: bool
) -> dict[str, int]:
    """Of tensor copies, after so many bytes: mbarriers for each stage, it is full and it is empty.

    One more says that what the loaders themselves have ``stored`` beside the copies is there.
    """
    if not takes_tensor_copies(variant, element, tiles):
        return {}
    each = 3 if stored and tiles.loaders else 2
    return {"signals": -before % SIGNAL + each * tiles.stages * SIGNAL}


def backward_buffers(variant: Variant, element: ElementType, tiles: _Backward, *, with_dq: bool) -> dict[str, int]:
    """K, V, rings of Q and dO, dS and (where warps share keys) P, what rows carry, the visits, sums over the block.

    Rows carry what the mask reads by row, too. Signals where tensor copies have some. Blocks that stay for several key
    tiles have room for the next one's list of visits.
    """
    Br, Bc, stages, split = tiles.Br, tiles.Bc, tiles.stages, tiles.split
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    more_stages = stages if tiles.warpgroups else 1  # of dO and what rows carry
    ds_stages = stages if tiles.loaders else 1
    bins = BINS * sum(each.level is Level.PAIR for each in variant.gradients)
    stays = stays_for_keys(variant, element, tiles)
    found = {
        "K": tile_bytes(Bc, D, element),
        "V": tile_bytes(Bc, Dv, element),
        "Q": stages * tile_bytes(Br, D, element),
        "dO": more_stages * tile_bytes(Br, Dv, element),
        "dS": (with_dq or split > 1) * ds_stages * tile_bytes(Bc, Br, element),
        "P": (split > 1) * tile_bytes(Bc, Br, element),
        "dQ": (tiles.loaders > 0 and with_dq) * FLOAT * Br * D,
        "lse, delta, norms" if variant.uses_sqdist else "lse, delta": more_stages
        * ((3 if variant.uses_sqdist else 2) + len(observed_loads(variant.keep)[0]))
        * FLOAT
        * Br,
        "next list": (with_dq and stays and takes_longest_first(variant)) * COPIED_LIST,
        "list of tiles": VISIT_LIST,
        "sums, histograms": FLOAT * tiles.warps * (1 + bins),
    }
    found |= _signals(variant, element, tiles, sum(found.values()), stored=True)
    return {name: size for name, size in found.items() if size}


def backward_bytes(variant: Variant, element: ElementType, tiles: _Backward, *, with_dq: bool) -> int:
    """All of them."""
    return sum(backward_buffers(variant, element, tiles, with_dq=with_dq).values())


def query_buffers(variant: Variant, element: ElementType, tiles: _Queries) -> dict[str, int]:
    """Q, dO, rings of K and V, what rows carry, the visits."""
    Br, Bc, stages = tiles.Br, tiles.Bc, tiles.stages
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    found = {
        "Q": tile_bytes(Br, D, element),
        "dO": tile_bytes(Br, Dv, element),
        "K": stages * tile_bytes(Bc, D, element),
        "V": stages * tile_bytes(Bc, Dv, element),
        "lse, delta": 2 * FLOAT * Br,
        "list of tiles": VISIT_LIST,
    }
    return found | ({"norms": FLOAT * (Br + Bc)} if variant.uses_sqdist else {})


def query_bytes(variant: Variant, element: ElementType, tiles: _Queries) -> int:
    """All of them."""
    return sum(query_buffers(variant, element, tiles).values())
