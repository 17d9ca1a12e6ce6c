"""What the CUDA templates keep in shared memory, byte for byte: declared here, counted, and printed into sources.

In: a variant, an element type, a tile. Out: ``Layout``s. A block of ``templates/cuda/forward`` and of
``templates/cuda/backward`` finds its parts by the constants that are printed, and asserts what lies in each.
"""

from __future__ import annotations

from typing import TypeAlias

from flashgen.analysis.levels import Level
from flashgen.analysis.selection import selected
from flashgen.analysis.variant import Variant, linear_factor
from flashgen.ir.types import ElementType
from flashgen.plan.by_blocks import ITEM, MOST_BLOCKS
from flashgen.targets.gpu.ahead import element_of
from flashgen.targets.gpu.layout import Layout, Part, Words
from flashgen.targets.gpu.recipe import recipe_of
from flashgen.targets.gpu.rules import LAST_BLOCK_MERGES
from flashgen.targets.gpu.tables import BackwardChoice, ForwardChoice, QueryChoice
from flashgen.targets.gpu.tiles import BackwardTiles, ForwardTiles, QueryTiles

FLOAT = WORD = 4
TURN = 128  # rows and columns of a tile that batch entries take turns at, at most: smaller ones divide it
WINDOW = 1024  # tiles that one list of visits covers
# What a block keeps beside a list of visits, in words: which rows its list is of, and what comes next.
PLACE_OF_QUERIES = Words(
    (
        ("k", "where K of the head begins: in elements, or its slab of a map"),
        ("v", "where V does"),
        ("head", "counted through the batch"),
        ("row0", "the first query of the tile"),
    )
)
TILES_OF_QUERIES = Words(
    (
        ("edges", "what the list begins and ends"),
        ("ordinal", "how many query tiles the block had before"),
        ("number", "of the query tile"),
        ("next", "the number of the one after it"),
    )
)
OPENED_TILE = Words(  # what a block that copies for itself knows of the next query tile, beside its place
    (
        ("q", "the slab of its queries"),
        ("number", "of the query tile"),
        ("partial", "the key tiles that it visits, a bit each: of these some pairs are kept"),
        ("full", "and of these all"),
    )
)
PRODUCER_TILES_OF_QUERIES = Words((*TILES_OF_QUERIES.names[:2], ("parts_before", "of the lists before this one")))
TILES_OF_KEYS = Words(
    (
        ("q", "where Q of the head begins: in elements, or its slab of a map"),
        ("d_o", "where dO does"),
        ("head", "the query head, counted through the batch"),
        ("column0", "the first key of the tile"),
        ("number", "of the key tile"),
        ("next", "the number of the one after it"),
    )
)
NOTES = 8  # words for any of these
VISIT_LIST = WORD * (3 + NOTES) + 2 * WINDOW // 8 + 2 * WINDOW
SEQUENCE = 5  # words of struct Sequence, beside these in ragged batches: templates/cuda/sequences.cuh.jinja
COPIED_LIST = 16 + 2 * WINDOW
MOST_COLUMNS = 256  # of a product of warpgroups
BINS = 256  # of a warp's histogram of contributions to a captured gradient
SIGNAL = 8  # an mbarrier
OPERAND = 1024  # where an operand of warpgroups begins: 8 rows of 128 bytes
KEYS_OF_SUMS = 448  # whose products of 8 bits are summed up before they go to sums of many tiles
MEASURERS = 2  # warps that take norms of keys, where others copy

# Tiles that are weighed up, or chosen.
_Forward: TypeAlias = ForwardChoice | ForwardTiles
_Backward: TypeAlias = BackwardChoice | BackwardTiles
_Queries: TypeAlias = QueryChoice | QueryTiles

COPYING_REGISTERS = 24  # of a thread that only copies
FINDING_REGISTERS = 32  # at least, of one that finds visits
_REGISTERS = 65536  # of a multiprocessor
_MOST_REGISTERS = 240
WORDS_OF_TILE = 6  # what a block knows of a key tile that warps which copy have found
FEW_QUERIES = 4  # of a tile over a cache, whose selected keys are asked for one by one
MERGED_WEIGHTS = 2048  # of parts, by rows, that those who merge have at a time
MOST_MERGED_ALONE = LAST_BLOCK_MERGES.limit  # bytes that parts leave of a tile, for its last block to merge them
MERGING_WARPS = 4  # by blocks of keys: of a block of threads that merges, 16 rows each
LISTERS = 256  # threads of a block that turns lists
LIST_STARTS_BYTES = 4 * (MOST_BLOCKS + 2 * LISTERS // 32)  # where each block of keys begins, sums of warps
MERGING_THREADS = 512  # of a block that merges and does nothing else, so that a thread has 128 registers


def registers(warps: int, producers: int, least: int) -> tuple[int, int]:
    """Registers of a thread that multiplies, where producers keep no more than ``least``, and what these then have.

    A block begins with equal shares, of a multiple of 8, and they can be dealt out again; to ask for more would wait
    for ever.
    """
    whole = _REGISTERS // (32 * (warps + producers)) // 8 * 8 * (warps + producers)
    multiplying = min((whole - least * producers) // warps // 8 * 8, _MOST_REGISTERS)
    return multiplying, (whole - multiplying * warps) // producers // 8 * 8


def finders(variant: Variant, tiles: ForwardTiles) -> int:
    """Of the producer warps of the forward pass those that find visits: one copies, or two where warpgroups take turns,
    others take norms of keys.
    """
    return tiles.producers - 1 - tiles.takes_turns - (MEASURERS if variant.uses_sqdist else 0)


def padded(head_dim: int) -> int:
    """A head dimension in whole matrix instructions; a large one is divided among two warps, a larger among four."""
    multiple = 16 if head_dim <= 128 else 32 if head_dim <= 256 else 64
    return -(-head_dim // multiple) * multiple


def panel_width(columns: int, element: ElementType) -> int:
    """Columns of one panel of a ``SharedTile``: 2, 4 or 8 chunks of 16 bytes."""
    chunks = columns * element.bytes // 16
    return (8 if chunks >= 5 else 4 if chunks >= 3 else 2) * 16 // element.bytes


def tile_bytes(rows: int, columns: int, element: ElementType) -> int:
    """A ``SharedTile``: whole panels."""
    width = panel_width(columns, element)
    return -(-columns // width) * width * element.bytes * rows


def element_of_keys(variant: Variant, element: ElementType) -> ElementType:
    """In which K and V lie in shared memory, where q is of ``element``."""
    return ElementType.F8E4M3 if variant.f8_cached else element


def spans_of_half(columns: int, element: ElementType) -> tuple[int, ...]:
    """The columns of products of a warpgroup that has half of a tile's: of whole panels, of what is left of each."""
    width = panel_width(columns, element)
    panels, rest = divmod(columns, width)
    return tuple(each for each in (panels // 2 * width, panels % 2 * width // 2, rest // 2) if each)


def dq_column_groups(head_dim: int, Br: int, warps: int, element: ElementType) -> int:
    """How many warpgroups share 64 rows of dQ, each with columns that end where a panel does, or all within one."""
    row_groups = max(n for n in range(1, warps // 4 + 1) if Br // 64 % n == 0)
    panel = panel_width(head_dim, element)

    def works(count: int) -> bool:
        width = head_dim // count
        return count == 1 or (head_dim % (8 * count) == 0 and (width % panel == 0 or panel % width == 0))

    return max(n for n in range(1, warps // 4 // row_groups + 1) if works(n))


def notes(variant: Variant) -> int:
    """Words of what a block keeps beside a list of visits."""
    return NOTES + SEQUENCE * variant.ragged


def visit_list(variant: Variant) -> int:
    """Bytes of a list of visits."""
    return VISIT_LIST + WORD * SEQUENCE * variant.ragged


def staged_row(variant: Variant, Bc: int) -> int:
    """Bytes of a row of what pairs read ahead by way of shared memory: an odd number of chunks of 16 bytes.

    So the 8 rows that ldmatrix reads at once begin in different banks.
    """
    load = recipe_of(variant).ahead
    assert load is not None
    return 16 * (Bc * element_of(variant, load).bytes // 16 | 1)


def forward_layout(variant: Variant, element: ElementType, tiles: _Forward) -> Layout:
    """Q, rings of K and V, P where warps share rows, the visits, norms and signals.

    Norms are there where the score uses them, signals where tensor copies have some, pages over caches. V of 8 bits is
    there once more, with its columns as rows. Forward mode has the tangents of Q, K and V beside them.

    Persistent blocks begin with the next query tile while they work on one, those with producers where Q may have two
    places, those that copy for themselves with room for its list of visits, too. Where pairs read ahead by way of
    shared memory each warp has a tile of its own rows. O takes the place of all at the end, unless blocks are
    persistent.
    """
    if variant.listed is not None:
        return _block_layout(variant, element, tiles)
    Br, Bc, stages, seen = tiles.rows, tiles.Bc, tiles.stages, len(recipe_of(variant).observed_columns)
    D, Dv, of_keys = padded(variant.head_dim.qk), padded(variant.head_dim.v), element_of_keys(variant, element)
    copies, has_producers = tiles.tensor_copies, tiles.producers > 0
    next_too, norms = tiles.begins_next and not has_producers, variant.uses_sqdist
    moves = variant.ragged and copies and not has_producers
    read, divided = copies * stages * seen * WORD * Bc, tiles.split > 1
    turns = tiles.takes_turns
    signals = copies * (4 if turns else stages) * SIGNAL * (3 if seen and has_producers else 2)
    tangents, places = variant.tangent is not None, stages if has_producers else 1
    signals_of_q = tiles.q_places if tiles.goes_over else 1
    parts = (
        Part("Q", "Q", tiles.q_places * tile_bytes(Br, D, element), "q_places * QTile::bytes"),
        Part("K", "K", stages * tile_bytes(Bc, D, of_keys), "stages * KTile::bytes"),
        Part(
            *("V", "V"),
            stages * (tile_bytes(Dv, Bc, of_keys) if variant.f8 else tile_bytes(Bc, Dv, of_keys)),
            "stages * VTile::bytes",
        ),
        Part(
            "PAIRS",
            "what pairs read",
            Br * staged_row(variant, Bc) if tiles.pairs_staged else 0,
            "P::pairs_staged * P::warps * StagedPairs::bytes",
        ),
        Part("UNITS", "units of Q", variant.f8_cached * FLOAT * Br, "4 * BR"),
        Part("SUMS", "sums of tiles", variant.f8 * 2 * Br * Dv, "2 * BR * DVP"),
        Part("T_Q", "tangents of Q", tangents * tile_bytes(Br, D, element), "QTile::bytes"),
        Part("T_K", "tangents of K", tangents * stages * tile_bytes(Bc, D, element), "stages * KTile::bytes"),
        Part("T_V", "tangents of V", tangents * stages * tile_bytes(Bc, Dv, element), "stages * VTile::bytes"),
        Part("PP", "P", divided * tile_bytes(Br, Bc, element), "PTile::bytes"),
        Part(
            *("PARTS", "maxima and sums of rows", divided * FLOAT * (tiles.split + turns) * Br),
            "4 * (split + 1) * BR" if turns else "4 * split * BR",
        ),
        Part("COPIED", "next list", next_too * COPIED_LIST, "self_loading * COPIED_BYTES"),
        Part(
            *("NEXT_PLACE", "next list", next_too * WORD * len(PLACE_OF_QUERIES.names)),
            "self_loading * int(sizeof(QueryPlace))",
        ),
        Part(
            *("OPENED", "next list", opens(variant, tiles) * WORD * len((*PLACE_OF_QUERIES.names, *OPENED_TILE.names))),
            "self_loading * int(sizeof(OpenedTile))",
        ),
        Part("NEXT_SEQUENCE", "next list", moves * WORD * SEQUENCE, "self_loading * int(sizeof(Sequence))"),
        Part("LIST", "list of tiles", (1 + has_producers) * visit_list(variant), "lists * int(sizeof(VisitList))"),
        Part("PAGES", "pages of a tile", variant.cached * WORD * tiles.warps * Bc, "P::warps * TilePages::bytes"),
        Part("KK", "norms", norms * places * FLOAT * Bc, "norm_places * 4 * BC"),
        Part("T_KK", "norms", tangents * norms * places * FLOAT * Bc, "norm_places * 4 * BC"),
        Part("COLUMNS", "what the mask reads", read, "copies * 4 * stages * SEEN * BC"),
        Part("SIGNALS", "signals", signals, "copies * Signals::bytes", SIGNAL),
        Part(
            *("V_SIGNALS", "signals", (4 * turns + 2 * stages * tiles.goes_over) * SIGNAL),
            "VSignals::bytes" if turns else "goes_over * VSignals::bytes",
            SIGNAL,
        ),
        Part("P_SIGNALS", "signals", turns * 2 * SIGNAL, "PSignals::bytes / 2", SIGNAL),
        Part("NUMBERS", "tiles of a cluster", (tiles.cluster > 1) * 2 * WORD, "2 * 4"),
        Part("NUMBER_SIGNALS", "signals", (tiles.cluster > 1) * 4 * SIGNAL, "NumberSignals::bytes", SIGNAL),
        Part("Q_SIGNALS", "signals", copies * 2 * signals_of_q * SIGNAL, "copies * QSignals::bytes", SIGNAL),
        Part(
            *("START_SIGNALS", "signals", tiles.goes_over * 4 * (tiles.warps // 4 - 1) * SIGNAL),
            "goes_over * (P::warps / 4 - 1) * StartSignals::bytes",
            SIGNAL,
        ),
        Part(
            "NORM_SIGNALS",
            "signals",
            norms * has_producers * 2 * stages * SIGNAL,
            "has_producers * NormSignals::bytes",
            SIGNAL,
        ),
        Part(
            *("LIST_SIGNALS", "signals", copies * has_producers * 4 * SIGNAL),
            "has_producers * ListSignals::bytes",
            SIGNAL,
        ),
    )
    if variant.cached:
        return Layout(parts, Part("O", "O at the end", merging_bytes(Br, Dv), "Merging::bytes"))
    return Layout(
        parts, None if copies else Part("O", "O at the end", tile_bytes(Br, Dv, element), "!copies * OTile::bytes")
    )


def opens(variant: Variant, tiles: _Forward) -> bool:
    """Whether a persistent block of warps that do all finds by itself what the next query tile visits, and where."""
    alone = tiles.tensor_copies and not tiles.producers and not tiles.begins_next
    return alone and not variant.ragged and not recipe_of(variant).has_lists


def _block_layout(variant: Variant, element: ElementType, tiles: _Forward) -> Layout:
    """K and V of a block of keys, for each four warps two tiles of Q, and what an item has."""
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    of_q = 2 * (tiles.warps // 4) * tile_bytes(64, D, element)
    return Layout(
        (
            Part("K", "K", tile_bytes(tiles.Bc, D, element), "KTile::bytes"),
            Part("V", "V", tile_bytes(tiles.Bc, Dv, element), "VTile::bytes", OPERAND),
            Part("Q", "Q", of_q, "2 * groups * QTile::bytes", OPERAND),
            Part("NOTES", "units of rows of an item", 16 * ITEM, "16 * ITEM"),
        )
    )


def fits_blocks(variant: Variant, element: ElementType, block_bytes: int) -> bool:
    """By blocks of keys: whether four warps have room for what they multiply."""
    assert variant.listed is not None, "kernels go through blocks of keys"
    return _block_layout(variant, element, ForwardChoice(64, variant.listed.block, 4)).bytes <= block_bytes


def merging_bytes(Br: int, Dv: int) -> int:
    """Over caches: rows, what each part's count for, and sums, four to a thread or all of a tile; O needs no more."""
    return 12 * Br + FLOAT * MERGED_WEIGHTS + max(4 * FLOAT * MERGING_THREADS, FLOAT * Br * Dv)


def finds_selected(variant: Variant, element: ElementType, tiles: ForwardTiles) -> bool:
    """Over caches: whether tiles with a selected key are found first. Their numbers take the place of K and V."""
    widths = (padded(variant.head_dim.qk), padded(variant.head_dim.v))
    room = tiles.stages * sum(tile_bytes(tiles.Bc, width, element_of_keys(variant, element)) for width in widths)
    return selected(variant.keep, variant.spec.tensors) is not None and room >= 2 * WINDOW


def merging_shares(variant: Variant, tiles: ForwardTiles) -> int:
    """Over caches: blocks that merge a tile's parts, each with so much of the columns: 32 or more, or a warp's."""
    width = variant.head_dim.v
    if tiles.split > 1:
        if width != padded(width):
            return 1
        counts = range(width // 32 // tiles.split * tiles.split, tiles.split, -tiles.split)
        return next((count for count in counts if width % (16 * count) == 0), tiles.split)
    return next(count for count in (4, 2, 1) if count == 1 or width % (32 * count) == 0)


def merging_warps(variant: Variant, tiles: ForwardTiles) -> int:
    """Over caches: warps of a team that has all rows of a tile, and a block's columns."""
    return tiles.warps // (tiles.split if merging_shares(variant, tiles) > 1 else 1)


def backward_layout(variant: Variant, element: ElementType, tiles: _Backward, *, with_dq: bool) -> Layout:
    """K, V, rings of Q and dO, dS and (where warps share keys) P, what rows carry, the visits, sums over the block.

    Rows carry what the mask reads by row, too. Signals where tensor copies have some. Persistent blocks for several key
    tiles have room for the next one's list of visits. Where warpgroups have halves of dQ, Q alone has stages. Blocks of
    a cluster have a part of the columns each, and places for what others send of S and dP; or a part of the keys each,
    and half of the columns of the other's K beside its dS.
    """
    Br, Bc, stages, split = tiles.Br, tiles.keys, tiles.stages, tiles.split
    D, Dv = (padded(width) // tiles.column_parts for width in (variant.head_dim.qk, variant.head_dim.v))
    exchanged, theirs = (tiles.column_parts > 1) * 2, tiles.divides_keys and with_dq
    halves = tiles.dq_in_halves
    more = stages if tiles.warpgroups and not halves else 1  # of dO and what rows carry
    ds = (stages if tiles.producers and not tiles.shares_keys else 1) * (with_dq or split > 1)
    pairs = sum(each.level is Level.PAIR for each in variant.gradients)
    words, has_producers, copies = len(row_words(variant).names), tiles.producers > 0, tiles.tensor_copies
    served = has_producers and with_dq and tiles.persistent
    next_tiles = 4 * WORD * WORDS_OF_TILE
    next_too = with_dq and tiles.begins_next
    dq = Part("DQ", "dQ", has_producers * with_dq * FLOAT * Br * D, "(P::producers > 0 && atomic) * 4 * BR * DP")
    if tiles.dq_in_halves:
        dq = Part(
            "DQ",
            "dQ",
            with_dq * FLOAT * Br * 2 * (tiles.dq_sent or 0),
            "(P::warpgroups && atomic) * 4 * BR * 2 * P::dq_sent",
        )
    signals = copies * (3 if has_producers else 2) * more * SIGNAL
    tangents, turns = variant.backward_only, with_dq and takes_turns(variant, tiles)
    staged = with_dq and tiles.pairs_staged
    title = "lse, delta, norms" if variant.uses_sqdist else "lse, delta"
    parts = (
        Part("K", "K", tile_bytes(Bc, D, element), "KTile::bytes"),
        Part("V", "V", tile_bytes(Bc, Dv, element), "VTile::bytes"),
        Part("Q", "Q", stages * tile_bytes(Br, D, element), "stages * QTile::bytes"),
        Part("O", "dO", more * tile_bytes(Br, Dv, element), "more_stages * OTile::bytes"),
        Part("DS", "dS", ds * tile_bytes(Bc, Br, element), "(atomic || split > 1) * ds_stages * PTile::bytes"),
        Part("PP", "P", (split > 1) * tile_bytes(Bc, Br, element), "(split > 1) * PTile::bytes"),
        Part("EXCHANGE", "S and dP", exchanged * FLOAT * Br * Bc, "(P::cluster > 1) * 2 * 4 * BR * BC"),
        Part("THEIR_K", "K of the other block", theirs * tile_bytes(Bc, D // 2, element), "shares_dq * HalfOfK::bytes"),
        Part("THEIR_DS", "dS of the other block", theirs * tile_bytes(Bc, Br, element), "shares_dq * PTile::bytes"),
        Part("T_K", "tangents of K", tangents * tile_bytes(Bc, D, element), "KTile::bytes"),
        Part("T_V", "tangents of V", tangents * tile_bytes(Bc, Dv, element), "VTile::bytes"),
        Part("T_Q", "tangents of Q", tangents * stages * tile_bytes(Br, D, element), "stages * QTile::bytes"),
        Part("T_DS", "tangents of dS", tangents * with_dq * tile_bytes(Bc, Br, element), "atomic * PTile::bytes"),
        dq,
        Part(
            "PAIRS",
            "what pairs read",
            Br * staged_row(variant, Bc) if staged else 0,
            "(P::pairs_staged && atomic) * (BR / 16) * StagedPairs::bytes",
        ),
        Part("ROWS", title, more * WORD * words * Br, "more_stages * 4 * RowWords::count * BR"),
        Part("MARKS", title, more * 2 * carries_marks(variant) * Br, "more_stages * 2 * BR"),
        Part("COPIED", "next list", next_too * COPIED_LIST, "persistent * COPIED_BYTES"),
        Part(
            *("NEXT_TILES", "next tile", served * (2 * WORD * (SEQUENCE + 1) if variant.ragged else next_tiles)),
            "persistent * 2 * (4 + int(sizeof(Sequence)))"
            if variant.ragged
            else f"(persistent && P::producers > 0) * {next_tiles}",
        ),
        Part("LIST", "list of tiles", visit_list(variant), "int(sizeof(VisitList))"),
        Part("SUMS", "sums, histograms", FLOAT * tiles.warps, "4 * P::warps"),
        Part("HISTOGRAM", "sums, histograms", FLOAT * tiles.warps * pairs * BINS, f"{4 * pairs} * BINS * P::warps"),
        Part("TURN", "turns", turns * more * WORD, "takes_turns * more_stages * 4"),
        Part("SIGNALS", "signals", signals, "P::tensor_copies * Signals::bytes", SIGNAL),
        Part("Q_SIGNALS", "signals", halves * 2 * stages * SIGNAL, "P::tensor_copies * QSignals::bytes", SIGNAL),
        Part(
            *("EXCHANGE_SIGNALS", "signals", exchanged * tiles.warps * SIGNAL),
            "(P::cluster > 1) * 2 * P::warps * int(sizeof(uint64_t))",
            SIGNAL,
        ),
        Part(
            *("DS_SIGNALS", "signals", theirs * 2 * SIGNAL),
            "shares_dq * 2 * int(sizeof(uint64_t))",
            SIGNAL,
        ),
        Part(
            "PAIR_SIGNALS", "signals", staged * 2 * SIGNAL, "(P::pairs_staged && atomic) * PairSignals::bytes", SIGNAL
        ),
    )
    return Layout(parts)


def takes_turns(variant: Variant, tiles: _Backward) -> bool:
    """Whether batch entries add to a gradient in turn: one of the warps that copy waits for a tile's."""
    fits = TURN % tiles.Br == 0 and TURN % tiles.Bc == 0
    return recipe_of(variant).in_turn is not None and _has_spare_warps(tiles) and fits


def stored_whole(variant: Variant, tiles: _Backward) -> tuple[str, ...]:
    """Captured tensors every element of whose gradients blocks store: warps that copy clear what nobody visits."""
    recipe = recipe_of(variant)
    stored = recipe.stored if _has_spare_warps(tiles) else ()
    in_turn = (recipe.in_turn,) if recipe.in_turn is not None and takes_turns(variant, tiles) else ()
    return tuple(each.name for each in (*stored, *in_turn))


def _has_spare_warps(tiles: _Backward) -> bool:
    return tiles.warpgroups and tiles.producers > 0 and tiles.tensor_copies and not tiles.persistent


def row_words(variant: Variant) -> Words:
    """What a row carries for dK and dV, in words of 4 bytes."""
    seen = recipe_of(variant).observed_rows
    names = [("lse", "as exponents need it, or 1 / Z"), ("delta", "rowsum(dO ∘ O) - d(lse)")]
    names += [("top", "what scores are counted from")] if _carries_tops(variant) else []
    names += [("qq", "|q|²")] if variant.uses_sqdist else []
    if variant.backward_only:
        names += [("moved", "t(lse)"), ("epsilon", "rowsum(d(tO) ∘ tO)")]
    names += [(f"seen{number or ''}", "what the mask reads") for number in range(len(seen))]
    return Words(tuple(names))


def _carries_tops(variant: Variant) -> bool:
    unlike = variant.weights.form.exponential and linear_factor(variant) is None
    return unlike and not recipe_of(variant).bounded


def carries_marks(variant: Variant) -> bool:
    """Whether rows carry two bytes more that say whether their scores are extreme, in the place of a top."""
    return variant.weights.form.exponential and linear_factor(variant) is not None


def query_layout(variant: Variant, element: ElementType, tiles: _Queries) -> Layout:
    """Q, dO, rings of K and V, dS where warps share rows, what rows carry, the visits."""
    Br, Bc, stages, norms = tiles.Br, tiles.Bc, tiles.stages, variant.uses_sqdist
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    tangents = variant.backward_only
    parts = (
        Part("Q", "Q", tile_bytes(Br, D, element), "QTile::bytes"),
        Part("T_Q", "tangents of Q", tangents * tile_bytes(Br, D, element), "QTile::bytes"),
        Part("T_K", "tangents of K", tangents * stages * tile_bytes(Bc, D, element), "stages * KTile::bytes"),
        Part("T_V", "tangents of V", tangents * stages * tile_bytes(Bc, Dv, element), "stages * VTile::bytes"),
        Part("O", "dO", tile_bytes(Br, Dv, element), "OTile::bytes"),
        Part("K", "K", stages * tile_bytes(Bc, D, element), "stages * KTile::bytes"),
        Part("V", "V", stages * tile_bytes(Bc, Dv, element), "stages * VTile::bytes"),
        Part("DS", "dS", (tiles.split > 1) * tile_bytes(Br, Bc, element), "PTile::bytes"),
        Part("ROWS", "lse, delta", 2 * FLOAT * Br, "8 * BR"),
        Part("KK", "norms", norms * FLOAT * Bc, "4 * BC"),
        Part("LIST", "list of tiles", visit_list(variant), "int(sizeof(VisitList))"),
    )
    return Layout(parts)
