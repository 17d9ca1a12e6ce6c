"""Stage 3, plan for GPUs: the launches of every pass, and what lies in the workspace.

In: a ``GpuPlan`` of one element type. Out: ``PassLaunches``; the launch of each kernel that calls start, which a source
holds alone. The kernels are those of ``entries.cuh.jinja`` in ``templates/cuda`` and its headers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product

from flashgen.analysis.by_blocks import UNIT
from flashgen.analysis.selection import ListedBlocks
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Load
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.kinds.operand import HEAD_ROWS
from flashgen.plan.arguments import dimension_field, gradient_field, stored_field
from flashgen.plan.by_blocks import BROUGHT, COUNTED, ITEM, QUERIES, STATE_BYTES, part_bytes
from flashgen.plan.launches import (
    TURNED_KEYS,
    Box,
    Buffer,
    Count,
    Factor,
    Launch,
    PassLaunches,
    Splits,
    Sum,
    TileCounter,
)
from flashgen.targets.gpu.diagonals import diagonal_buffers, diagonal_counts, run_buffers
from flashgen.targets.gpu.lists import lists_of_keys, lists_of_queries, made_in_workspace
from flashgen.targets.gpu.model import (
    FLOAT,
    LIST_STARTS_BYTES,
    LISTERS,
    MERGING_THREADS,
    MERGING_WARPS,
    MOST_MERGED_ALONE,
    TURN,
    padded,
    panel_width,
)
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Backward, Forward
from flashgen.targets.gpu.tiles import GpuPlan, merging_shares

# Buffers: query tiles, and key tiles, that persistent blocks have taken, beyond one each.
TILE_COUNTER, KEY_TILE_COUNTER = "tile_counter", "key_tile_counter"
CLEARS = "_clear"  # the end of the name of a kernel that clears the sums of dQ as well
# V of 8 bits with its columns as rows.
TURNED_V = "turned_v"
# What a part of a sequence's keys leaves for the merge: O as lanes hold it, and of each row what its sums are of.
PART_O, PART_ROWS = "part_o", "part_rows"
MOST_THREADS = 1024  # of blocks that wait for memory at a time: more of them bring it no faster
# By blocks of keys: the queries that list each, what of them a block of threads takes, and how many it is.
LISTED, ITEMS, ITEM_COUNTS = "listed", "items", "item_counts"
COUNTS, RANKS = "counts", "ranks"  # of each block of keys, how many list it; of each number of a list, which it is
LEAST_KEYS = 128  # of a part that nobody asked for
# Where several blocks work on a key tile: what each leaves of dK and dV, and how many have left theirs.
PART_SUMS, PART_ARRIVALS = "part_sums", "part_arrivals"
# Where batch entries take turns at a gradient that they share: of each tile how many have claimed one, and how many
# warps are done with theirs; what these have added up so far.
TURNS, TURN_SUMS = "turns", "turn_sums"
MOST_IN_TURN = 4  # batch entries that take turns (rules.IN_TURN): of more no time was measured
LEAST_TURN = 64  # rows and columns of a tile that they take turns at, where it is small
GRANULE = 16  # rows or columns of one range of what the mask reads


def _heads(variant: Variant, heads: str = "heads") -> tuple[Factor, ...]:
    """Those of the batch: of the sequences of a ragged one, rows are counted together."""
    return (Factor(heads),) if variant.kind.ragged else (Factor("batch"), Factor(heads))


def _tiles(variant: Variant, length: str, tile: int) -> Factor:
    """Tiles of a head's rows; in a ragged batch as many as its sequences have at most."""
    return Factor(length, tile, "batch" if variant.kind.ragged and tile > 1 else "")


def captured_elements(variant: Variant) -> dict[str, Count]:
    """The number of elements behind each captured gradient."""
    found: dict[str, Count] = {}
    for gradient in variant.gradients:
        rank = len(gradient.read.indices) if isinstance(gradient.read, Load) else 0
        factors = tuple(Factor(dimension_field(gradient.name, axis)) for axis in range(rank))
        found[gradient_field(gradient.name)] = Count(factors)
    return found


def observed_buffers(recipe: Recipe) -> tuple[Buffer, ...]:
    """Ranges of what the mask reads, numbers of diagonals, their elements: at the start of every pass's workspace."""
    variant, found = recipe.variant, []
    if recipe.observed_rows:
        size = 8 * len(recipe.observed_rows)
        found.append(Buffer("row_bounds", Count((*_heads(variant), _tiles(variant, "q_len", GRANULE)), size)))
    if recipe.observed_columns:
        size = 8 * len(recipe.observed_columns)
        found.append(Buffer("column_bounds", Count((*_heads(variant), _tiles(variant, "kv_len", GRANULE)), size)))
    return (*found, *diagonal_buffers(variant), *run_buffers(variant, len(recipe.runs)))


def _observe(plan: GpuPlan) -> list[Launch]:
    """It starts every pass: each has a workspace of its own."""
    recipe, variant = plan.recipe, plan.recipe.variant
    found = (("q_len", recipe.observed_rows), ("kv_len", recipe.observed_columns))
    granules = (_tiles(variant, length, GRANULE) for length, loads in found if loads)
    ranges = (Count((*_heads(variant), each), divide=128) for each in granules)
    counts = (*ranges, *diagonal_counts(variant, divide=128))
    return [Launch(f"{plan.symbol}_observe", Sum(counts), 128, 0)] if counts else []


def forward_buffers(recipe: Recipe, tiles: Forward) -> tuple[Buffer, ...]:
    """The workspace of the forward pass. Blocks are persistent that tensor copies serve."""
    if not tiles.tensor_copies:
        return observed_buffers(recipe)
    first = (Buffer(TURNED_V, turned_v(recipe.variant)),) if recipe.variant.kind.f8 else ()
    return (*first, *observed_buffers(recipe), Buffer(TILE_COUNTER, Count((), 4), clear=True))


def turned_v(variant: Variant) -> Count:
    """Bytes of V of 8 bits, turned, in whole blocks of keys."""
    return Count((*_heads(variant, "kv_heads"), Factor("kv_len", TURNED_KEYS)), TURNED_KEYS * variant.head_dim.v)


def atomic_buffers(
    recipe: Recipe, *, persistent: bool, turns: bool = False, parts: tuple[Buffer, ...] = ()
) -> tuple[Buffer, ...]:
    """The workspace where atomic additions of floats are allowed, of ``persistent`` blocks or others.

    With ``turns`` batch entries take them at the sums of a gradient. ``parts`` are buffers of ``shared_buffers``.
    """
    if not recipe.one_pass:
        return (*observed_buffers(recipe), *_delta(recipe))
    clear = not recipe.row_state  # else the kernel of delta clears both
    dq = Buffer("dq", dq_sums(recipe.variant), clear=clear)
    counters = (Buffer(KEY_TILE_COUNTER, Count((), 4), clear=clear),) if persistent else ()
    return (*observed_buffers(recipe), *_delta(recipe), dq, *counters, *(_turn_buffers() if turns else ()), *parts)


def shared_buffers(recipe: Recipe, tiles: Backward) -> tuple[Buffer, ...]:
    """Where several blocks work on each of the last key tiles, of which there are no more than half."""
    variant = recipe.variant
    if not shares_last(variant, tiles):
        return ()
    size, key_tiles = bytes_of_part(variant, tiles), (*_heads(variant, "kv_heads"), _tiles(variant, "kv_len", tiles.Bc))
    arrivals = Buffer(PART_ARRIVALS, Count((), 4 * MOST_UNITS), clear=not recipe.row_state)
    return (arrivals, Buffer(PART_SUMS, Count(key_tiles, size, 2, MOST_UNITS * size)))


def _turn_buffers() -> tuple[Buffer, Buffer]:
    """For as many tiles as there are at most: who has claimed a turn and who is done, and sums as lanes have them."""
    least, most = (
        Count((Factor("heads"), Factor("kv_len", each), Factor("q_len", each)), 1) for each in (LEAST_TURN, TURN)
    )
    counts, sums = replace(least, times=8), replace(most, times=4 * TURN * TURN)
    return Buffer(TURNS, counts, clear=True), Buffer(TURN_SUMS, sums)


def dq_sums(variant: Variant) -> Count:
    """Bytes of the sums of dQ, in whole groups of 16 rows."""
    return Count((*_heads(variant), _tiles(variant, "q_len", 16)), 16 * padded(variant.head_dim.qk) * 4)


def exact_buffers(recipe: Recipe) -> tuple[Buffer, ...]:
    """The workspace where results have to repeat."""
    if not recipe.captured:
        return (*observed_buffers(recipe), *_delta(recipe))
    elements = captured_elements(recipe.variant)
    sums = (Buffer(f"exact_{name}", Count(elements[name].factors, 8), clear=True) for name in recipe.captured)
    largest = Buffer("largest", Count((), 4 * len(recipe.captured)), clear=True)
    return (*observed_buffers(recipe), *_delta(recipe), largest, *sums)


def _delta(recipe: Recipe) -> tuple[Buffer, ...]:
    """What rows carry beside lse; in the backward pass of forward mode two numbers."""
    variant = recipe.variant
    names = ("delta", "epsilon") if variant.kind.backward_only else ("delta",)
    rows = Count((*_heads(variant), Factor(HEAD_ROWS if variant.kind.slices else "q_len")), 4)
    return tuple(Buffer(name, rows) for name in names) if recipe.row_state else ()


def forward_launches(plan: GpuPlan, *, dropped: bool) -> PassLaunches:
    """The forward pass."""
    symbol, recipe, variant = plan.symbol, plan.recipe, plan.recipe.variant
    element, tiles = plan.own.element, plan.own.forward
    name = f"{symbol}_forward_{element}{'_dropout' if dropped else ''}"
    grid = Count((*_heads(variant), _tiles(variant, "q_len", tiles.Br)), tiles.cluster)
    boxes: tuple[Box, ...] = ()
    if tiles.tensor_copies:
        boxes = (*_boxes(plan, ("q",), tiles.rows), *_boxes(plan, ("k", "v"), tiles.Bc))
        if variant.kind.f8:
            boxes = (*boxes[:-1], Box("v", variant.head_dim.v, panel_width(tiles.Bc, element), 1, turned=True))
        if variant.tangent is not None:
            boxes += (*_boxes(plan, ("t_q",), tiles.Br), *_boxes(plan, ("t_k", "t_v"), tiles.Bc))
    tile_counter = TileCounter(TILE_COUNTER, tiles.blocks) if tiles.tensor_copies else None
    launch = Launch(name, grid, tiles.threads, tiles.sram_bytes, boxes, tile_counter, cluster=tiles.cluster)
    lists = lists_of_queries(plan, "forward", tiles, launch)
    turning = Count((*_heads(variant, "kv_heads"), Factor("kv_len", TURNED_KEYS)))
    turn = (Launch(f"{symbol}_turn_{element}", turning, 256, 0),) if variant.kind.f8 else ()
    launches = (*_observe(plan), *made_in_workspace(lists), *turn, launch)
    return PassLaunches(forward_buffers(recipe, tiles), launches, lists, variant.kind.operands)


def work_tiles(tiles: Forward) -> Count:
    """Blocks of one part of the keys: the tiles of rows of every sequence and key/value head."""
    return Count((Factor("batch"), Factor("kv_heads"), Factor("group_rows", tiles.Br)))


def part_buffers(variant: Variant, tiles: Forward) -> tuple[Buffer, ...]:
    """The workspace over caches; none where keys are not split."""
    factors = (*work_tiles(tiles).factors, Factor("splits"), Factor("merges"))
    return (
        Buffer(PART_O, Count(factors, 4 * tiles.Br * padded(variant.head_dim.v))),
        Buffer(PART_ROWS, Count(factors, 8 * tiles.Br)),
    )


def cached_launches(plan: GpuPlan) -> PassLaunches:
    """The forward pass over a cache: a kernel for the parts of keys, and one that merges those that are many."""
    symbol, variant, element, tiles = plan.symbol, plan.recipe.variant, plan.own.element, plan.own.forward
    blocks = work_tiles(tiles)
    threads = tiles.threads
    parts = Count((*blocks.factors, Factor("splits")))
    merges = Count((*blocks.factors, Factor("merges_apart")), merging_shares(tiles, variant))
    launches = (
        Launch(f"{symbol}_forward_{element}", parts, threads, tiles.sram_bytes),
        Launch(f"{symbol}_merge_{element}", merges, MERGING_THREADS, tiles.sram_bytes),
    )
    at_a_time = max(1, min(plan.sram_bytes // tiles.sram_bytes, MOST_THREADS // threads))
    splits = Splits(
        "splits",
        "merges",
        "merges_apart",
        "arrivals",
        ("group_rows", tiles.Br, 4 * padded(variant.head_dim.v)),
        MOST_MERGED_ALONE,
        blocks,
        Count((Factor("kv_len", tiles.Bc),)),
        at_a_time,
        max(1, LEAST_KEYS // tiles.Bc),
    )
    return PassLaunches(part_buffers(variant, tiles), launches, splits=splits, operands=variant.kind.operands)


def _lists_turned() -> tuple[Factor, ...]:
    """Blocks of threads that turn lists: of some queries of a key/value head."""
    return (Factor("batch"), Factor("kv_heads"), Factor("q_len", QUERIES))


def _numbers(listed: ListedBlocks) -> Factor:
    return Factor(dimension_field(listed.first.tensor, listed.axis))


def _items(listed: ListedBlocks) -> Sum:
    """The most that there may be: each key block has one more than it fills."""
    batch, _, spans = turned = _lists_turned()
    filled = Count((batch, Factor("heads"), spans, _numbers(listed)), QUERIES, UNIT * ITEM)
    return Sum((filled, Count((*turned, Factor("kv_len", listed.block)))))


def _item_bytes(listed: ListedBlocks) -> Sum:
    """Of all of them, as code counts them, which divides nothing."""
    filled, more = _items(listed).counts
    return Sum((replace(filled, times=16 * filled.times // filled.divide, divide=1), replace(more, times=16)))


def block_buffers(variant: Variant, element: ElementType) -> tuple[Buffer, ...]:
    """The workspace by blocks of keys: what parts leave, the queries that list a block, and who takes which of them."""
    listed = variant.listed
    assert listed is not None, "kernels go through blocks of keys"
    parts = (Factor("batch"), Factor("heads"), Factor("q_len"), _numbers(listed))
    turned = _lists_turned()
    return (
        Buffer(PART_O, Count(parts, part_bytes(variant.head_dim, element.bytes) // UNIT)),
        Buffer(PART_ROWS, Count(parts, STATE_BYTES)),
        Buffer(LISTED, Count((*turned, _numbers(listed)), 4 * QUERIES)),
        Buffer(ITEMS, _item_bytes(listed)),
        Buffer(ITEM_COUNTS, Count(turned, 4)),
        Buffer(RANKS, Count((Factor("batch"), Factor("kv_heads"), Factor("q_len"), _numbers(listed)), 4)),
        Buffer(COUNTS, Count((*turned, Factor("kv_len", listed.block)), 4), clear=True),
    )


def block_launches(plan: GpuPlan) -> PassLaunches:
    """The forward pass by blocks of keys: lists are turned, parts computed, and merged."""
    symbol, variant, listed = plan.symbol, plan.recipe.variant, plan.recipe.variant.listed
    element, tiles = plan.own.element, plan.own.forward
    assert listed is not None, "kernels go through blocks of keys"
    merged = Count((Factor("batch"), Factor("heads"), Factor("q_len")), divide=16 * MERGING_WARPS)
    turned = _lists_turned()
    launches = (
        Launch(f"{symbol}_count_{element}", Count(turned, QUERIES // COUNTED), LISTERS, 0),
        Launch(f"{symbol}_bring_{element}", Count(turned, QUERIES // BROUGHT), LISTERS, LIST_STARTS_BYTES),
        Launch(f"{symbol}_forward_{element}", _items(listed), tiles.threads, tiles.sram_bytes),
        Launch(f"{symbol}_merge_{element}", merged, 32 * MERGING_WARPS, 0),
    )
    return PassLaunches(block_buffers(variant, element), launches, operands=variant.kind.operands)


def _boxes(plan: GpuPlan, tensors: tuple[str, ...], rows: int, parts: int = 1) -> tuple[Box, ...]:
    """One panel each of a tile of these tensors, or of so many parts of their columns."""
    variant, element = plan.recipe.variant, plan.own.element
    operands = variant.kind.operands
    widths = {name: padded(operands[name].columns(variant.head_dim)) // parts for name in tensors}
    return tuple(Box(name, rows, panel_width(width, element), element.bytes) for name, width in widths.items())


def backward_launches(
    plan: GpuPlan,
    *,
    dropped: bool,
    deterministic: bool,
    captured: bool = True,
    turns: bool = False,
) -> PassLaunches:
    """The backward pass. ``deterministic``: every gradient is bitwise repeatable; ``captured``: one is wanted.

    With ``turns`` one that batch entries share is to be stored, if they can take turns.
    """
    symbol, recipe, variant = plan.symbol, plan.recipe, plan.recipe.variant
    element, tiles = plan.own.element, plan.own
    suffix = f"{element}{'_dropout' if dropped else ''}"
    cluster = tiles.backward.cluster
    key_grid = Count((*_heads(variant, "kv_heads"), _tiles(variant, "kv_len", tiles.backward.Bc)), cluster)
    query_grid = Count((*_heads(variant), _tiles(variant, "q_len", tiles.queries.Br)))
    brought = ("q", "d_o") if tiles.backward.tensor_copies else ()
    boxes = _boxes(plan, brought, tiles.backward.Br, tiles.backward.column_parts)

    def rows(how: str = "", *, clears: bool = False) -> list[Launch]:
        if not recipe.row_state:
            return []
        name = f"{symbol}_rows_{element}{how if recipe.sink_gradients else ''}{CLEARS if clears else ''}"
        grid = Count((*_heads(variant), Factor("q_len")), divide=rows_of_a_block(variant, element))
        return [Launch(name, grid, 128, 0)]

    def keys(kernel: str, how: str = "") -> Launch:
        shared = tiles.backward.sram_bytes if kernel == "backward" else tiles.backward.keys_sram_bytes
        tile_counter = (
            TileCounter(KEY_TILE_COUNTER, tiles.backward.blocks)
            if kernel == "backward" and tiles.backward.persistent
            else None
        )
        name = f"{symbol}_{kernel}_{suffix}{how}"
        return Launch(name, key_grid, tiles.backward.threads, shared, boxes, tile_counter, cluster=cluster)

    def queries(how: str = "") -> Launch:
        name = f"{symbol}_queries_{suffix}{how}"
        return Launch(name, query_grid, tiles.queries.threads, tiles.queries.sram_bytes)

    observe = _observe(plan)
    lists = lists_of_keys(plan, "keys", tiles.backward, keys("keys"))
    if not deterministic and recipe.one_pass:
        convert = Count((*_heads(variant), _tiles(variant, "q_len", 16)), divide=4)
        convert_launch = Launch(f"{symbol}_convert_{element}", convert, 128, 0)
        kernels = (*rows(clears=True), keys("backward"), convert_launch)
        turns = turns and tiles.backward.takes_turns(recipe)
        parts = shared_buffers(recipe, tiles.backward)
        buffers = atomic_buffers(recipe, persistent=tiles.backward.persistent, turns=turns, parts=parts)
        launches = [*observe, *made_in_workspace(lists), *kernels]
        in_turn = recipe.in_turn.name if recipe.in_turn is not None else None
        whole = {
            stored_field(each): MOST_IN_TURN if each == in_turn else None
            for each in tiles.backward.stored_whole(recipe)
        }
        return PassLaunches(buffers, tuple(launches), lists, variant.kind.operands, whole=whole)
    lists += lists_of_queries(plan, "queries", tiles.queries, queries())
    launches = [*observe, *made_in_workspace(lists)]
    if not deterministic or not recipe.captured:
        buffers = exact_buffers(recipe) if deterministic else atomic_buffers(recipe, persistent=False)
        return PassLaunches(buffers, (*launches, *rows(), keys("keys"), queries()), lists, variant.kind.operands)
    if captured:
        launches += rows("_measure")
        launches += [keys("keys", "_measure")] if recipe.key_gradients else []
        launches += [queries("_measure")] if recipe.query_gradients else []
    launches += [*rows("_exact"), keys("keys", "_exact"), queries("_exact" if recipe.query_gradients else "")]
    if captured:
        for name, elements in captured_elements(variant).items():
            grid = Count(elements.factors, divide=256)
            launches.append(Launch(f"{symbol}_settle_{name}", grid, 256, 0))
    return PassLaunches(exact_buffers(recipe), tuple(launches), lists, variant.kind.operands)


def rows_of_a_block(variant: Variant, element: ElementType) -> int:
    """Rows of O that a block of the first kernel of the backward pass takes."""
    head_dim = variant.head_dim.v
    chunk = 16 // variant.kind.operands["o"].element_bytes(element.bytes)
    chunks = head_dim // chunk if head_dim % chunk == 0 else head_dim
    lanes = 1
    while lanes < 32 and 2 * lanes <= chunks:
        lanes *= 2
    return 128 // lanes


def pass_launches(
    plan: GpuPlan, name: PassName, *, dropped: bool, deterministic: bool, captured: bool = True, turns: bool = False
) -> PassLaunches:
    """The launches of a pass; see ``backward_launches``."""
    variant = plan.recipe.variant
    if variant.listed is not None:
        return block_launches(plan)
    if variant.kind.cached:
        return cached_launches(plan)
    if name == "forward":
        return forward_launches(plan, dropped=dropped)
    return backward_launches(plan, dropped=dropped, deterministic=deterministic, captured=captured, turns=turns)


def started(plan: GpuPlan, passes: Collection[PassName]) -> Mapping[str, Launch]:
    """Every launch of these passes, by its kernel."""
    both, found = (False, True), dict[str, Launch]()
    drops = both if plan.recipe.variant.spec.dropout is not None else both[:1]
    for name, dropped, deterministic, captured in product(passes, drops, both, both):
        found |= pass_launches(plan, name, dropped=dropped, deterministic=deterministic, captured=captured).kernels
    return found


# Of the last key tiles, which several persistent blocks share: parts of one, of all, least tiles of queries of a part.
MOST_PARTS, MOST_UNITS, LEAST_PART = 8, 512, 8
PART_OVERHEAD = 4  # tiles of queries that take as long as what a part begins and ends with


def shares_last(variant: Variant, tiles: Backward) -> bool:
    """Whether several blocks work on each of the last key tiles, which persistent blocks that have others copy do."""
    return tiles.persistent and tiles.producers > 0 and not variant.kind.ragged


def parts_of_last(tiles: Backward, sizes: Mapping[str, int], blocks: int) -> tuple[int, int]:
    """How many key tiles are left once all ``blocks`` have had as many, and how many of these work on each.

    As ``parts_of`` of ``templates/include/flashgen/backward/warpgroup_visits.cuh`` has it.
    """
    key_tiles = sizes["batch"] * sizes["kv_heads"] * -(-sizes["kv_len"] // tiles.Bc)
    queries, group = -(-sizes["q_len"] // tiles.Br), sizes["heads"] // sizes["kv_heads"]
    rest, most = key_tiles % blocks, min(key_tiles // 2, MOST_UNITS)

    def cost(parts: int) -> int:
        return -(-rest * parts // blocks) * (-(-queries // parts) * group + PART_OVERHEAD)

    counts = (n for n in range(2, MOST_PARTS + 1) if n * LEAST_PART <= queries and rest * n <= most)
    return rest, min((1, *counts), key=cost) if rest else 1


def bytes_of_part(variant: Variant, tiles: Backward) -> int:
    """What one of these blocks leaves of dK and dV."""
    return FLOAT * tiles.Bc * (padded(variant.head_dim.qk) + padded(variant.head_dim.v))
