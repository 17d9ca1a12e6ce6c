"""HBM bytes of the kernels for GPUs: of a shape, of a call, of the sequences of a ragged batch.

In: a ``Recipe``, the tiles of an element type, a shape, or the launches and values of one call and what captured
tensors hold. Out: bytes of q, k, v, o, the log-sum-exps, their gradients, delta and the sums of dQ, by the names of the
fields and of the parts of the workspace. Of a shape alone every gradient is summed by atomic additions, none is asked
of the log-sum-exp, and blocks find what they visit. Captured tensors are read element by element where the formula
needs them, mostly from caches, and are left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flashgen.analysis.observed import by_position
from flashgen.analysis.tiles import loads_of_kernels
from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.kinds.cached import ARRIVALS
from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.plan.arguments import params_of_values, sizes_of_values, starts_of_values
from flashgen.plan.launches import PassLaunches
from flashgen.plan.tile_counts import MaskedCall, counts_of_call, tile_counts
from flashgen.targets.gpu.block_bytes import BLOCK_BUFFERS
from flashgen.targets.gpu.kernel_bytes import DELTA, KERNELS, LSE_PARTS, TURNED, KernelBytes
from flashgen.targets.gpu.last_keys import shares_last
from flashgen.targets.gpu.launches import CLEARS, PART_O, PART_ROWS, dq_sums
from flashgen.targets.gpu.lists import OF_KEYS, OF_QUERIES
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tiles import ElementPlan

COUNTED = (
    *(name for name in OPERANDS if name != "lse_parts"),  # of extreme rows, whose number nobody knows
    *(DELTA.name, "workspace.dq", TURNED),
    *(OF_QUERIES, OF_KEYS, f"workspace.{OF_QUERIES}", f"workspace.{OF_KEYS}"),
    *(f"workspace.{PART_O}", f"workspace.{PART_ROWS}", *ARRIVALS),
)


def counted(variant: Variant) -> tuple[str, ...]:
    """The buffers whose bytes are known."""
    of_blocks = BLOCK_BUFFERS if variant.listed is not None else ()
    return (*COUNTED, *of_blocks, *((LSE_PARTS.name,) if variant.weights.form.divided else ()))


def kernels_of(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The kernels of a pass that touch operands, where gradients are summed by atomic additions."""
    if name == "forward":
        return ("turn", "forward") if recipe.variant.kind.f8 else ("forward",)
    rows = ("rows",) if recipe.row_state else ()
    return (*rows, *(("backward", "convert") if recipe.one_pass else ("keys", "queries")))


def bytes_of_shape(recipe: Recipe, tiles: ElementPlan, shape: Shape, name: str) -> Mapping[str, Mapping[str, int]]:
    """Of a pass at a shape, by kernel and buffer; the most that a call moves where its mask reads what it brings."""
    account = KernelBytes(recipe, tiles, asdict(shape), functools.partial(tile_counts, recipe.variant, shape))
    return {each: account.of(each, clears_dq=recipe.one_pass) for each in kernels_of(recipe, name)}


def bytes_of_call(
    recipe: Recipe,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
    multiprocessors: int | None = None,
) -> Mapping[str, int]:
    """Of the launches of a pass in one call, by buffer.

    ``values`` are those of ``struct Arguments``, ``captured`` the tensors that masks read, as NumPy arrays. Of how many
    ``multiprocessors`` depends what blocks share; without them nothing.
    """
    variant = recipe.variant
    shape = Shape(*(int(values[each]) for each in ("batch", "heads", "kv_heads", "q_len", "kv_len")))
    sizes, params = sizes_of_values(values), params_of_values(variant.spec, values)
    keep, seen = by_position(variant.keep, captured, sizes, params)
    call = MaskedCall(
        shape=shape,
        starts=starts_of_values(values),
        sizes=sizes,
        params=params,
        loads=loads_of_kernels(seen),
    )
    account = KernelBytes(
        recipe,
        tiles,
        {**values, **asdict(shape)},
        functools.cache(functools.partial(counts_of_call, keep, call)),
        {each.field: each for each in launches.lists if values.get(each.field)},
        asks_lse=bool(values.get("d_lse")),
    )
    found = Counter(account.making())
    for launch in launches.launches:
        kernel = launch.kernel.removeprefix(f"{symbol}_").partition("_")[0]
        if kernel in KERNELS:
            found.update(account.of(kernel, clears_dq=launch.kernel.endswith(CLEARS)))
        if kernel == "backward" and multiprocessors and shares_last(variant, tiles.backward):
            found.update(account.read_again(tiles.backward.blocks * multiprocessors))
    if variant.kind.f8 and not values["lse"]:  # which no backward pass will want
        del found["lse"]
    if not values["lse_parts"]:
        found.pop(LSE_PARTS.name, None)
    return found


def bytes_of_sequences(
    sequences: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """The same of a ragged batch, whose ``sequences`` are dense calls with values of their own.

    The kernel of delta goes over the rows of all. What says where sequences begin comes from caches, and is left out.
    """
    dense, found = replace(recipe, variant=replace(recipe.variant, kind=DENSE)), Counter[str]()
    of_all = [each for each in launches.launches if each.kernel.startswith(f"{symbol}_rows_")]
    of_each = replace(launches, launches=tuple(each for each in launches.launches if each not in of_all))
    for own in sequences:
        found.update(bytes_of_call(dense, tiles, symbol, of_each, {**values, **own}, captured))
    for launch in of_all:
        alone = replace(launches, launches=(replace(launch, kernel=launch.kernel.removesuffix(CLEARS)),))
        found.update(bytes_of_call(dense, tiles, symbol, alone, {**values, "batch": 1}, captured))
        if launch.kernel.endswith(CLEARS):
            found["workspace.dq"] += dq_sums(recipe.variant).value(values)
    return found
