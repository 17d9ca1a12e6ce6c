"""Shared memory of blocks, forward, of keys and of queries: which parts there are, and where they begin.

In: a recipe, an element type, a tile. Out: ``Layout``s, which are counted and printed: a block of
``forward`` and of ``backward`` in ``templates/include/flashgen`` finds its parts by the constants, and
asserts what lies in each.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.by_blocks import ITEM
from flashgen.targets.gpu.model import (
    BINS,
    COPIED_LIST,
    FLOAT,
    OPENED_TILE,
    OPERAND,
    PLACE_OF_QUERIES,
    SEQUENCE,
    SIGNAL,
    WORD,
    WORDS_OF_TILE,
    Layout,
    Part,
    element_of_keys,
    merging_bytes,
    padded,
    row_words,
    tile_bytes,
    visit_list,
)
from flashgen.targets.gpu.prefetch import element_of
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Backward, ByBlocks, Forward, Queries, Schedule
from flashgen.targets.gpu.score import Extremes


def staged_row(recipe: Recipe, Bc: int) -> int:
    """Bytes of a row of what pairs read ahead by way of shared memory: an odd number of chunks of 16 bytes.

    So the 8 rows that ldmatrix reads at once begin in different banks.
    """
    assert recipe.prefetch is not None
    return 16 * (Bc * element_of(recipe.variant, recipe.prefetch).bytes // 16 | 1)


def layout_of(recipe: Recipe, element: ElementType, tiles: Schedule, *, with_dq: bool = True) -> Layout:
    """That of a block with these tiles; of dK and dV ``with_dq``: it adds up dQ as well."""
    match tiles:
        case Forward():
            return forward_layout(recipe, element, tiles)
        case Backward():
            return backward_layout(recipe, element, tiles, with_dq=with_dq)
    assert isinstance(tiles, Queries)
    return query_layout(recipe, element, tiles)


def forward_layout(recipe: Recipe, element: ElementType, tiles: Forward) -> Layout:
    """Q, rings of K and V, P where warps share rows, the visits, norms and signals.

    Norms are there where the score uses them, signals where tensor copies have some, pages over caches. V of 8 bits is
    there once more, with its columns as rows. Forward mode has the tangents of Q, K and V beside them.

    Persistent blocks begin with the next query tile while they work on one, those with producers where Q may have two
    places, those that copy for themselves with room for its list of visits, too. Where pairs read ahead by way of
    shared memory each warp has a tile of its own rows. O takes the place of all at the end, unless blocks are
    persistent.
    """
    variant = recipe.variant
    if variant.listed is not None:
        return _block_layout(variant, element, tiles)
    Br, Bc, stages, seen = tiles.rows, tiles.Bc, tiles.stages, len(recipe.observed_columns)
    D, Dv, of_keys = padded(variant.head_dim.qk), padded(variant.head_dim.v), element_of_keys(variant, element)
    copies, has_producers = tiles.tensor_copies, tiles.producers > 0
    next_too, norms = tiles.prefetches_next, variant.uses_sqdist
    moves = variant.kind.ragged and tiles.self_loading
    turns, overlaps, divided = tiles.ping_pong, tiles.overlaps_next, tiles.split > 1
    tangents, places = variant.tangent is not None, stages if has_producers else 1
    v_bytes = tile_bytes(Dv, Bc, of_keys) if variant.kind.f8 else tile_bytes(Bc, Dv, of_keys)
    staged = Br * staged_row(recipe, Bc) if tiles.pairs_staged else 0
    row_parts, row_code = (tiles.split + turns, "4 * (split + 1) * BR") if turns else (tiles.split, "4 * split * BR")
    place, opened = len(PLACE_OF_QUERIES.names), len((*PLACE_OF_QUERIES.names, *OPENED_TILE.names))
    shown = 3 if seen and has_producers else 2
    parts = (
        Part("Q", "Q", tiles.q_places * tile_bytes(Br, D, element), "q_places * QTile::bytes"),
        Part("K", "K", stages * tile_bytes(Bc, D, of_keys), "stages * KTile::bytes"),
        Part("V", "V", stages * v_bytes, "stages * VTile::bytes"),
        Part("PAIRS", "what pairs read", staged, "P::pairs_staged * P::warps * StagedPairs::bytes"),
        Part("UNITS", "units of Q", variant.kind.f8_cached * FLOAT * Br, "4 * BR"),
        Part("SUMS", "sums of tiles", variant.kind.f8 * 2 * Br * Dv, "2 * BR * DVP"),
        Part("T_Q", "tangents of Q", tangents * tile_bytes(Br, D, element), "QTile::bytes"),
        Part("T_K", "tangents of K", tangents * stages * tile_bytes(Bc, D, element), "stages * KTile::bytes"),
        Part("T_V", "tangents of V", tangents * stages * tile_bytes(Bc, Dv, element), "stages * VTile::bytes"),
        Part("PP", "P", divided * tile_bytes(Br, Bc, element), "PTile::bytes"),
        Part("PARTS", "maxima and sums of rows", divided * FLOAT * row_parts * Br, row_code),
        Part("COPIED", "next list", next_too * COPIED_LIST, "self_loading * fg::COPIED_BYTES"),
        Part("NEXT_PLACE", "next list", next_too * WORD * place, "self_loading * int(sizeof(QueryPlace))"),
        Part("OPENED", "next list", opens(recipe, tiles) * WORD * opened, "self_loading * int(sizeof(OpenedTile))"),
        Part("NEXT_SEQUENCE", "next list", moves * WORD * SEQUENCE, "self_loading * int(sizeof(Sequence))"),
        Part("LIST", "list of tiles", (1 + has_producers) * visit_list(variant), "lists * int(sizeof(VisitList))"),
        Part("PAGES", "pages of a tile", variant.kind.cached * WORD * tiles.warps * Bc, "P::warps * TilePages::bytes"),
        Part("KK", "norms", norms * places * FLOAT * Bc, "norm_places * 4 * BC"),
        Part("T_KK", "norms", tangents * norms * places * FLOAT * Bc, "norm_places * 4 * BC"),
        Part("COLUMNS", "what the mask reads", copies * stages * seen * WORD * Bc, "copies * 4 * stages * SEEN * BC"),
        _signals("SIGNALS", copies * (4 if turns else stages) * shown, "copies * Signals::bytes"),
        _signals("V_SIGNALS", 4 * turns + 2 * stages * overlaps, "VSignals::bytes"),
        _signals("P_SIGNALS", 2 * turns, "PSignals::bytes / 2"),
        Part("NUMBERS", "tiles of a cluster", (tiles.cluster > 1) * 2 * WORD, "2 * 4"),
        _signals("NUMBER_SIGNALS", 4 * (tiles.cluster > 1), "NumberSignals::bytes"),
        _signals("Q_SIGNALS", copies * 2 * (tiles.q_places if overlaps else 1), "copies * QSignals::bytes"),
        _signals("START_SIGNALS", 4 * overlaps * (tiles.warps // 4 - 1), "(P::warps / 4 - 1) * StartSignals::bytes"),
        _signals("NORM_SIGNALS", norms * has_producers * 2 * stages, "has_producers * NormSignals::bytes"),
        _signals("LIST_SIGNALS", copies * has_producers * 4, "has_producers * ListSignals::bytes"),
    )
    if variant.kind.cached:
        return Layout(parts, Part("O", "O at the end", merging_bytes(Br, Dv), "Merged::bytes"))
    return Layout(
        parts, None if copies else Part("O", "O at the end", tile_bytes(Br, Dv, element), "!copies * OTile::bytes")
    )


def _signals(name: str, count: int, holds: str) -> Part:
    return Part(name, "signals", count * SIGNAL, holds, SIGNAL)


def opens(recipe: Recipe, tiles: Forward) -> bool:
    """Whether a persistent block of warps that do all finds by itself what the next query tile visits, and where."""
    alone = tiles.self_loading and not tiles.prefetches_next
    return alone and not recipe.variant.kind.ragged and not recipe.has_lists


def _block_layout(variant: Variant, element: ElementType, tiles: Forward) -> Layout:
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
    return _block_layout(variant, element, ByBlocks(64, variant.listed.block, 4)).bytes <= block_bytes


def backward_layout(recipe: Recipe, element: ElementType, tiles: Backward, *, with_dq: bool) -> Layout:
    """K, V, rings of Q and dO, dS and (where warps share keys) P, what rows carry, the visits, sums over the block.

    Rows carry what the mask reads by row, too. Signals where tensor copies have some. Persistent blocks for several key
    tiles have room for the next one's list of visits. Where warpgroups have halves of dQ, Q alone has stages. Blocks of
    a cluster have a part of the columns each, and places for what others send of S and dP; or a part of the keys each,
    and half of the columns of the other's K beside its dS.
    """
    variant, Br, Bc, stages, split = recipe.variant, tiles.Br, tiles.rows, tiles.stages, tiles.split
    D, Dv = (padded(width) // tiles.column_parts for width in (variant.head_dim.qk, variant.head_dim.v))
    exchanged, theirs = (tiles.column_parts > 1) * 2, tiles.divides_keys and with_dq
    halves = tiles.halves_dq
    more = stages if tiles.warpgroups and not halves else 1  # of dO and what rows carry
    ds = (stages if tiles.producers and not tiles.shares_keys else 1) * (with_dq or split > 1)
    pairs = sum(each.level is Level.PAIR for each in variant.gradients)
    words, has_producers, copies = len(row_words(recipe).names), tiles.producers > 0, tiles.tensor_copies
    served = has_producers and with_dq and tiles.persistent
    next_tiles = 4 * WORD * WORDS_OF_TILE
    next_too = with_dq and tiles.prefetches_next
    dq = Part("DQ", "dQ", has_producers * with_dq * FLOAT * Br * D, "(P::producers > 0 && atomic) * 4 * BR * DP")
    if halves:
        of_dq = "(P::warpgroups && atomic) * 4 * BR * 2 * P::dq_sent"
        dq = Part("DQ", "dQ", with_dq * FLOAT * Br * 2 * tiles.dq_sent, of_dq)
    tangents, turns = variant.kind.backward_only, with_dq and tiles.takes_turns(recipe)
    staged = Br * staged_row(recipe, Bc) if with_dq and tiles.pairs_staged else 0
    next_code = f"(persistent && P::producers > 0) * {next_tiles}"
    if variant.kind.ragged:
        next_tiles, next_code = 2 * WORD * (SEQUENCE + 1), "persistent * 2 * (4 + int(sizeof(Sequence)))"
    title = "lse, delta, norms" if variant.uses_sqdist else "lse, delta"
    parts = (
        Part("K", "K", tile_bytes(Bc, D, element), "KTile::bytes"),
        Part("V", "V", tile_bytes(Bc, Dv, element), "VTile::bytes"),
        Part("Q", "Q", stages * tile_bytes(Br, D, element), "stages * QTile::bytes"),
        Part("O", "dO", more * tile_bytes(Br, Dv, element), "more_stages * OTile::bytes"),
        Part("DS", "dS", ds * tile_bytes(Bc, Br, element), "(atomic || split > 1) * ds_stages * PTile::bytes"),
        Part("PP", "P", (split > 1) * tile_bytes(Bc, Br, element), "(split > 1) * PTile::bytes"),
        Part("EXCHANGE", "S and dP", exchanged * FLOAT * Br * Bc, "(P::cluster > 1) * 2 * 4 * BR * BC"),
        Part("THEIR_K", "K of the other block", theirs * tile_bytes(Bc, D // 2, element), "shares_dq * TheirK::bytes"),
        Part("THEIR_DS", "dS of the other block", theirs * tile_bytes(Bc, Br, element), "shares_dq * PTile::bytes"),
        Part("T_K", "tangents of K", tangents * tile_bytes(Bc, D, element), "KTile::bytes"),
        Part("T_V", "tangents of V", tangents * tile_bytes(Bc, Dv, element), "VTile::bytes"),
        Part("T_Q", "tangents of Q", tangents * stages * tile_bytes(Br, D, element), "stages * QTile::bytes"),
        Part("T_DS", "tangents of dS", tangents * with_dq * tile_bytes(Bc, Br, element), "atomic * PTile::bytes"),
        dq,
        Part("PAIRS", "what pairs read", staged, "(P::pairs_staged && atomic) * (BR / 16) * StagedPairs::bytes"),
        Part("ROWS", title, more * WORD * words * Br, "more_stages * row_bytes * BR"),
        Part("MARKS", title, more * 2 * (recipe.extremes is Extremes.MARKS) * Br, "more_stages * 2 * BR"),
        Part("COPIED", "next list", next_too * COPIED_LIST, "persistent * fg::COPIED_BYTES"),
        Part("NEXT_TILES", "next tile", served * next_tiles, next_code),
        Part("LIST", "list of tiles", visit_list(variant), "int(sizeof(VisitList))"),
        Part("SUMS", "sums, histograms", FLOAT * tiles.warps, "4 * P::warps"),
        Part("HISTOGRAM", "sums, histograms", FLOAT * tiles.warps * pairs * BINS, f"{4 * pairs} * BINS * P::warps"),
        Part("TURN", "turns", turns * more * WORD, "takes_turns * more_stages * 4"),
        _signals("SIGNALS", copies * (3 if has_producers else 2) * more, "P::tensor_copies * Signals::bytes"),
        _signals("Q_SIGNALS", halves * 2 * stages, "P::tensor_copies * QSignals::bytes"),
        _signals("EXCHANGE_SIGNALS", exchanged * tiles.warps, "2 * P::warps * int(sizeof(uint64_t))"),
        _signals("DS_SIGNALS", theirs * 2, "shares_dq * 2 * int(sizeof(uint64_t))"),
        _signals("PAIR_SIGNALS", 2 * (staged > 0), "(P::pairs_staged && atomic) * PairSignals::bytes"),
    )
    return Layout(parts)


def query_layout(recipe: Recipe, element: ElementType, tiles: Queries) -> Layout:
    """Q, dO, rings of K and V, dS where warps share rows, what rows carry, the visits."""
    variant, Br, Bc, stages = recipe.variant, tiles.Br, tiles.Bc, tiles.stages
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    tangents, norms = variant.kind.backward_only, variant.uses_sqdist
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
