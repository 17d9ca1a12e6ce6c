"""The mask as kernels ask it: ranges of tiles, what they observe of captured tensors, and where visits are listed.

In: the recipe of a variant, and where its code is placed. Out: ``mask`` in templates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from flashgen.analysis.constraints import COLUMN, ROW, Truth
from flashgen.analysis.kept import Blocks, Run, fits_position, kept_runs
from flashgen.analysis.levels import level_of, mask_axes
from flashgen.analysis.pieces import block_sizes
from flashgen.analysis.ranging import Linear
from flashgen.analysis.selection import block_of, selected
from flashgen.analysis.variant import Variant
from flashgen.emit.context import masks_apart, observed_load
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import range_code
from flashgen.emit.spelling import c_sum
from flashgen.ir.expr import Expr, Symbol
from flashgen.kinds.operand import stride_of
from flashgen.plan.arguments import dimension_field, stride_field, tensor_field
from flashgen.targets.gpu.diagonals import diagonal_indices
from flashgen.targets.gpu.model import (
    OPENED_TILE,
    PLACE_OF_QUERIES,
    PRODUCER_TILES_OF_QUERIES,
    TILES_OF_KEYS,
    TILES_OF_QUERIES,
    joined,
    notes,
    visit_list,
)
from flashgen.targets.gpu.recipe import Lists, Recipe


def runs_of_line(keep: Expr, axis: Symbol, placement: Placement) -> tuple[dict[str, object], ...] | None:
    """The keys of a tile that a row keeps (axis ``COLUMN``), or the queries of a column; None: pairs are asked."""
    runs = kept_runs(keep, axis)
    return None if runs is None else tuple(_run(n, run, placement) for n, run in enumerate(runs))


def _run(number: int, run: Run, placement: Placement) -> dict[str, object]:
    """Where a run begins, its last position, and what the line has to satisfy, each where there is such a thing."""
    names = [f"blocks{number}_{n}" for n in range(len(run.blocks))]
    lines = (f"const auto {x} = {_blocks(each, placement)};" for x, each in zip(names, run.blocks, strict=True))
    conditions = [f"{_sum(each, placement, wide=True)} >= 0" for each in run.not_negative]
    conditions += [_truth(each, placement) for each in run.truths]
    return {
        "lines": tuple(lines),  # they name what the others read
        "least": _tightest("max", [*_ends(run.least, placement), *(f"fg::position({name}.lo)" for name in names)]),
        "most": _tightest("min", [*_ends(run.most, placement), *(f"fg::position({name}.hi)" for name in names)]),
        "condition": " && ".join(conditions) or None,
    }


def _blocks(blocks: Blocks, placement: Placement) -> str:
    """The range of their positions."""
    least, most = ([_sum(end, placement, wide=True) for end in ends] for ends in (blocks.least, blocks.most))
    first, last = (*least, "-fg::ranges::far")[0], (*most, "fg::ranges::far")[0]
    numbers = f"{{{first}, {last}}}"
    for end in least[1:]:
        numbers = f"fg::ranges::at_least({numbers}, {end})"
    for end in most[1:]:
        numbers = f"fg::ranges::at_most({numbers}, {end})"
    size = placement.value("size_of_blocks", blocks.size, level_of(blocks.size))
    code = f"fg::ranges::of_blocks({numbers}, {size})"
    if blocks.shift == Linear():
        return code
    return f"fg::ranges::shifted({code}, {_sum(Linear().plus(blocks.shift, -1), placement, wide=True)})"


def _tightest(choose: str, ends: Sequence[str]) -> str | None:
    return functools.reduce(lambda code, own: f"fg::{choose}({code}, {own})", ends) if ends else None


def _ends(ends: Iterable[Linear], placement: Placement) -> Iterator[str]:
    """Ends in 32 bits, so that a position may be taken from them."""
    for end in ends:
        fits = fits_position(end)
        code = _sum(end, placement, wide=not fits)
        yield code if fits else f"fg::position({code})"


def _sum(total: Linear, placement: Placement, *, wide: bool) -> str:
    values = ((placement.value("end_of_run", atom, level_of(atom)), c) for atom, c in total.terms.items())
    return c_sum(total.constant, ((f"int64_t({value})" if wide else value, c) for value, c in values))


def _truth(truth: Truth, placement: Placement) -> str:
    code = placement.value("holds", truth.condition, level_of(truth.condition))
    return code if truth.value else f"!{code}"


def mask_code(recipe: Recipe, placement: Placement, *, lines: bool) -> dict[str, object]:
    """Which tiles and pairs are kept; places what the mask observes.

    ``lines``: what a row or column keeps may be asked for at once. Warps that multiply for themselves have no registers
    for that: on sm_80 D 64 forward spilled 32 bytes more.
    """
    variant, loads = recipe.computed, (*recipe.observed_rows, *recipe.observed_columns)
    observed = tuple(observed_load(load, placement) for load in loads)
    names: dict[Expr, str] = {each.load: f"{each.struct}.{each.name}" for each in observed}
    return {
        "keep_range": range_code(variant.keep, placement, names),
        # What a line keeps, where it is known without a look at each pair.
        "keys_of_row": runs_of_line(variant.keep_of_pairs, COLUMN, placement) if lines else None,
        "queries_of_column": runs_of_line(variant.keep_of_pairs, ROW, placement) if lines else None,
        "selected": _selected(variant, placement),
        "listed": _listed(variant, placement),
        "by_head": "h" in mask_axes(variant.keep),  # heads that share keys have masks of their own
        "pieces": _pieces(variant.keep) if recipe.cuts else None,  # sizes of blocks, by rows and by columns
        "lists": _lists(recipe),
        "rows": tuple(each for each in observed if each.struct == "rows"),
        "columns": tuple(each for each in observed if each.struct == "columns"),
        # Whose numbers of diagonals a kernel reads, where there are some.
        "diagonals": masks_apart(diagonal_indices(variant)) if recipe.numbers else None,
        "words_of_notes": notes(variant),  # which blocks keep beside a list of visits
        "bytes_of_list": visit_list(variant),
        "notes": _notes(variant),  # structs of these
    }


def _lists(recipe: Recipe) -> dict[str, object] | None:
    """Lists of visits."""
    if not recipe.has_lists:
        return None
    axes = mask_axes(recipe.variant.keep)
    sharers = ("unsigned(a.heads)", "unsigned(a.kv_heads)")
    if "hkv" in axes:
        sharers = ("unsigned(a.heads) / unsigned(a.kv_heads)", "1u")
    return {
        "masks": masks_apart(axes),  # what of a call's heads has lists of its own
        "kept": recipe.lists is Lists.KEPT,  # by the host
        "longest_first": recipe.longest_first,
        # The number of lists of masks before that of a ``head`` counted through the batch, as the beginning of a sum.
        "mask_of_head": "head / sharers * tiles + " if "b" in axes else "",
        # So many heads in a row share a mask.
        "sharers_of_queries": sharers[0],
        "sharers_of_keys": sharers[1],
    }


def _selected(variant: Variant, placement: Placement) -> dict[str, object] | None:
    """The condition that asks whether a key is selected, in a block of keys together, over caches."""
    asked = selected(variant.keep, variant.spec.tensors) if variant.kind.cached else None
    if asked is None:
        return None
    return {"range": range_code(asked, placement), "block": block_of(variant.spec.tensors)}


def _listed(variant: Variant, placement: Placement) -> dict[str, object] | None:
    """By blocks of keys: a query's list."""
    listed = variant.listed
    if listed is None:
        return None
    name = listed.first.tensor
    return {
        # In which field its first number lies and where, how far apart the others do, and how many there are.
        "tensor": tensor_field(name),
        "offset": placement.offset_of_pair(listed.first),
        "stride": stride_field(name, listed.axis),
        "numbers": dimension_field(name, listed.axis),
        # The fields that say how far those of Q are.
        "heads_apart": stride_of("q", "h"),
        "rows_apart": stride_of("q", "n"),
        "block": listed.block,  # of so many keys is each number
    }


def _pieces(keep: Expr) -> str:
    sizes = (", ".join(str(size) for size in block_sizes(keep, axis)) for axis in (ROW, COLUMN))
    return ", ".join(f"fg::Blocks<{each}>()" for each in sizes)


def _notes(variant: Variant) -> str:
    """What blocks keep beside a list of visits; in ragged batches also which sequence it is of."""
    base = "Sequence" if variant.kind.ragged else ""
    return joined(
        (
            "// What blocks keep beside a list of visits: of query tiles (with producers, without), of key tiles.",
            PLACE_OF_QUERIES.struct("QueryPlace", base),
            OPENED_TILE.struct("OpenedTile", "QueryPlace"),
            "template <bool has_producers> struct QueryNotes;",
            "template <> " + TILES_OF_QUERIES.struct("QueryNotes<false>", "QueryPlace"),
            "template <> " + PRODUCER_TILES_OF_QUERIES.struct("QueryNotes<true>", "QueryPlace"),
            TILES_OF_KEYS.struct("KeyNotes", base),
        )
    )
