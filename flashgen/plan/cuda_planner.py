"""Stage 3, plan for GPUs: the tiles of every pass and element type for one architecture, and why.

In: a ``Variant`` and a ``Target``. Out: a ``CudaPlan`` with its reasons and what it rejected. Candidates come from
``cuda_tables.py`` in the order of preference; every buffer that the templates keep is counted, and the first that fits
the shared memory of a block is taken. Kernels that turned out to spill registers are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic, SpecError
from flashgen.ir.types import ElementType
from flashgen.plan import cuda_tables
from flashgen.plan.cuda_devices import Target
from flashgen.plan.cuda_model import (
    backward_bytes,
    dq_column_groups,
    forward_bytes,
    has_light_mask,
    has_long_rows,
    has_small_blocks,
    has_whole_rows,
    is_plain,
    padded,
    query_bytes,
    stays_for_keys,
    takes_tensor_copies,
)
from flashgen.plan.cuda_plan import BackwardTiles, CudaPlan, ElementPlan, ForwardTiles, QueryTiles
from flashgen.plan.cuda_tables import BackwardChoice, ForwardChoice, QueryChoice
from flashgen.plan.plan import Rejection, kib

# Bytes of registers that a kernel may store and load again and still be taken: numbers that live across the loops, and
# are read once a tile at most.
HARMLESS_SPILL = 160
# The same where warpgroups multiply: what comes next has no warpgroups, and was measured to take 1.6 times as long.
HARMLESS_WARPGROUP_SPILL = 320
MOST_WARPS = 16
# Registers of a thread that may hold scores and outputs where scores take more than a product.
MOST_ACCUMULATORS = 168

Choice = TypeVar("Choice", ForwardChoice, BackwardChoice, QueryChoice)


@dataclass(frozen=True)
class Spill:
    """A tile whose kernel was compiled and spilled registers."""

    element: ElementType
    pass_name: str
    tile: ForwardChoice | BackwardChoice | QueryChoice
    bytes: int

    def is_of(self, element: ElementType, pass_name: str, tile: object) -> bool:
        """Whether it is this tile's."""
        return (self.element, self.pass_name, self.tile) == (element, pass_name, tile)


def plan_cuda(variant: Variant, target: Target, spills: Collection[Spill] = ()) -> CudaPlan:
    """The plan; ``SpecError`` where the spec pins tiles that cannot work, or nothing fits a type that it asks for."""
    _check_head_dim(variant)
    _check_schedule(variant)
    wanted = variant.spec.dtypes or (ElementType.F16, ElementType.BF16, ElementType.F32)
    plans: list[ElementPlan] = []
    block, multiprocessor = kib(target.block_bytes), kib(target.sm_bytes)
    reasons = [f"{block} of shared memory a block on {target.name}, {multiprocessor} a multiprocessor"]
    rejected: list[Rejection] = []
    for element in wanted:
        found = _plan_element(variant, target, element, spills, reasons, rejected)
        if found is not None:
            plans.append(found)
        elif variant.spec.dtypes is not None or element is not ElementType.F32:
            message = f"no tile of '{variant.spec.name}' in {element} fits {target.name} at head dimension "
            raise SpecError(
                [Diagnostic("E406", f"{message}{variant.head_dim}", variant.spec.span, notes=tuple(reasons))],
                variant.spec.sources,
            )
    return CudaPlan(
        spec_name=variant.spec.name,
        head_dim=str(variant.head_dim),
        target=target.name,
        sram_bytes=target.block_bytes,
        elements=tuple(plans),
        reasons=tuple(reasons),
        rejected=tuple(rejected),
    )


def _plan_element(
    variant: Variant,
    target: Target,
    element: ElementType,
    spills: Collection[Spill],
    reasons: list[str],
    rejected: list[Rejection],
) -> ElementPlan | None:
    """The tiles of one element type; None, with a reason, where a pass has none that fits."""

    def choose(pass_name: str, choices: Sequence[Choice], size: Callable[[Any], int]) -> Choice | None:
        for choice in choices:
            needed = size(choice)
            spilled = [each.bytes for each in spills if each.is_of(element, pass_name, choice)]
            if needed > target.block_bytes:
                why = f"{element}: needs {needed / 1024:.1f} KiB, {kib(target.block_bytes)} are there"
            elif spilled and choice is not choices[-1]:
                why = f"{element}: {_describe(choice)} spills {max(spilled)} bytes of registers"
            else:
                blocks = target.sm_bytes // (needed + 1024)
                reasons.append(
                    f"{pass_name}, {element}: B_r × B_c = {_describe(choice)}, {needed / 1024:.1f} KiB: "
                    f"{blocks} {'block fits' if blocks == 1 else 'blocks fit'} a multiprocessor's shared memory"
                )
                return choice
            rejected.append(Rejection(pass_name, choice.Br, choice.Bc, why))
        reasons.append(f"{pass_name}, {element}: left out, because no tile fits")
        return None

    def forward_size(choice: ForwardChoice) -> int:
        return forward_bytes(variant, element, choice)

    def backward_size(choice: BackwardChoice) -> int:
        return backward_bytes(variant, element, choice, with_dq=True)

    def query_size(choice: QueryChoice) -> int:
        return query_bytes(variant, element, choice)

    forward = choose("forward", _forward_choices(variant, element, target), forward_size)
    backward = choose("backward", _backward_choices(variant, element, target), backward_size)
    queries = choose("queries", _query_choices(variant, element, target), query_size)
    if forward is None or backward is None or queries is None:
        return None
    return ElementPlan(
        element,
        ForwardTiles(
            sram_bytes=forward_size(forward),
            tensor_copies=takes_tensor_copies(variant, element, forward),
            **asdict(forward),
        ),
        BackwardTiles(
            sram_bytes=backward_size(backward),
            keys_sram_bytes=backward_bytes(variant, element, backward, with_dq=False),
            dq_column_groups=dq_column_groups(padded(variant.head_dim.qk), backward.Br, backward.warps, element)
            if backward.warpgroups
            else 1,
            tensor_copies=takes_tensor_copies(variant, element, backward),
            stays=stays_for_keys(variant, element, backward),
            **asdict(backward),
        ),
        QueryTiles(sram_bytes=query_size(queries), **asdict(queries)),
    )


def _describe(choice: ForwardChoice | BackwardChoice | QueryChoice) -> str:
    stages = f"{choice.stages} stages" if choice.stages > 1 else "1 stage"
    count, what = (choice.warps // 4, "warpgroup") if choice.warpgroups else (choice.warps, "warp")
    warps = f"{count} {what}{'s' * (count > 1)}"
    return f"{choice.Br} × {choice.Bc} by {warps}, {stages}"


# -- candidates --------------------------------------------------------------------------------------------------------


def _forward_choices(variant: Variant, element: ElementType, target: Target) -> list[ForwardChoice]:
    """The table's; scores that are more than scaled products, and dropout, leave no registers for wide tiles."""
    single = element is ElementType.F32
    rows = _rows_for(variant, cuda_tables.SINGLE_FORWARD if single else cuda_tables.HALF_FORWARD)
    if not single and (not is_plain(variant) or target.capability < 80):  # without cp.async copies take registers, too
        narrow = [row for row in rows if _accumulators(row, padded(variant.head_dim.v)) <= MOST_ACCUMULATORS]
        rows = narrow or rows
    if not single and target.sm_bytes <= 100 * 1024 and 64 < variant.head_dim.qk <= 128:
        rows.sort(key=lambda row: row.Bc != 32 or row.Br != 128)  # two blocks a multiprocessor
    if not single and target.has_warpgroups and not variant.uses_sqdist:  # norms of K want everyone at once
        hopper = _rows_for(variant, _hopper_forward(variant))  # warps that copy do so by tensor copies alone
        rows = [*(row for row in hopper if not row.loaders or takes_tensor_copies(variant, element, row)), *rows]
    schedule = variant.spec.schedule
    return _pinned(rows, schedule.Br, schedule.Bc, schedule.warps, schedule.stages)


def _hopper_forward(variant: Variant) -> tuple[tuple[int, tuple[ForwardChoice, ...]], ...]:
    if has_whole_rows(variant):
        return cuda_tables.HOPPER_WHOLE_FORWARD
    if has_long_rows(variant):
        return cuda_tables.HOPPER_FORWARD
    return cuda_tables.HOPPER_BLOCK_FORWARD if has_small_blocks(variant) else cuda_tables.HOPPER_SHORT_FORWARD


def _hopper_backward(variant: Variant) -> tuple[tuple[int, tuple[BackwardChoice, ...]], ...]:
    if has_long_rows(variant):
        return cuda_tables.HOPPER_BACKWARD
    return cuda_tables.HOPPER_BLOCK_BACKWARD if has_small_blocks(variant) else cuda_tables.HOPPER_SHORT_BACKWARD


def _accumulators(choice: ForwardChoice, head_dim: int) -> int:
    """Registers of a thread that hold its scores and its part of O."""
    return choice.Br * (choice.Bc + head_dim) // (32 * choice.warps)


def _backward_choices(variant: Variant, element: ElementType, target: Target) -> list[BackwardChoice]:
    """The table's; masks that take registers go where a warp has half of a head dimension."""
    rows = _rows_for(variant, cuda_tables.SINGLE_BACKWARD if element is ElementType.F32 else cuda_tables.HALF_BACKWARD)
    widths = (padded(variant.head_dim.qk), padded(variant.head_dim.v))
    rows = [row for row in rows if all(width % (16 * row.split) == 0 for width in widths)]  # parts of one length
    if variant.head_dim.qk > 64 and not has_light_mask(variant):
        rows.sort(key=lambda row: row.split == 1)
    if element is not ElementType.F32 and target.has_warpgroups and not variant.uses_sqdist:
        rows = [*_rows_for(variant, _hopper_backward(variant)), *rows]
    schedule = variant.spec.schedule
    pins = (schedule.backward_Br, schedule.backward_Bc, schedule.backward_warps, schedule.backward_stages)
    return _pinned(rows, *pins)


def _query_choices(variant: Variant, element: ElementType, target: Target) -> list[QueryChoice]:
    if element is ElementType.F32:
        return _rows_for(variant, cuda_tables.SINGLE_QUERIES)
    rows = _rows_for(variant, cuda_tables.HALF_QUERIES)
    if not target.has_warpgroups:
        return rows
    hopper = cuda_tables.HOPPER_BLOCK_QUERIES if has_small_blocks(variant) else cuda_tables.HOPPER_QUERIES
    return [*_rows_for(variant, hopper), *rows]


def _rows_for(variant: Variant, table: tuple[tuple[int, tuple[Choice, ...]], ...]) -> list[Choice]:
    larger = max(variant.head_dim.qk, variant.head_dim.v)
    return list(next(rows for most, rows in table if larger <= most))


def _pinned(rows: list[Choice], Br: int | None, Bc: int | None, warps: int | None, stages: int | None) -> list[Choice]:
    """The candidates with what the schedule pins; warps follow the tile where they are left free."""
    if (Br, Bc, warps, stages) == (None, None, None, None):
        return rows
    found: dict[Choice, None] = {}
    pins = {"Br": Br, "Bc": Bc, "warps": warps, "stages": stages}

    def distance(row: Choice) -> tuple[bool, int]:
        """Of each kind what is like the pinned tile first: whether others copy depends on how wide it is."""
        return not row.warpgroups, sum(pin not in (None, getattr(row, name)) for name, pin in pins.items())

    for row in sorted(rows, key=distance):
        tile = replace(row, Br=Br or row.Br, Bc=Bc or row.Bc, stages=stages or row.stages)
        counts = [warps] if warps else sorted({row.warps, *range(1, MOST_WARPS + 1)}, key=lambda n: abs(n - row.warps))
        for count in counts:
            candidate = _alone(replace(tile, warps=count))
            if not list(_problems(candidate)):
                found[candidate] = None
                break
    return list(found)


def _alone(choice: Choice) -> Choice:
    """A warpgroup alone copies for itself, beside another block: who copies for it would be left too many registers."""
    if isinstance(choice, QueryChoice) or not 0 < choice.warps <= choice.loaders:
        return choice
    return replace(choice, loaders=0, blocks=2)


def _problems(choice: ForwardChoice | BackwardChoice | QueryChoice) -> Iterator[str]:
    """Why the templates cannot work with a tile; nothing where they can."""
    if choice.Br % 16 or choice.Bc % 16:
        yield "rows and columns come in multiples of 16"
    if choice.warpgroups:
        yield from _warpgroup_problems(choice)
    if isinstance(choice, BackwardChoice):
        if choice.warps % choice.split or choice.Bc % (16 * (choice.warps // choice.split)):
            yield "a warp has 16 or more whole keys: write B_c as a multiple of 16 times the warps"
        if choice.Br % (16 * choice.split):
            yield "warps that share keys divide the query rows into sixteens"
        if choice.Br > 32 * choice.warps:
            yield "there are fewer threads than query rows"
        if choice.stages > 2:
            yield "Q has one stage or two"
    elif choice.Br % (16 * choice.warps):
        yield "a warp has 16 or more whole query rows: write B_r as a multiple of 16 times the warps"


def _warpgroup_problems(choice: ForwardChoice | BackwardChoice | QueryChoice) -> Iterator[str]:
    rows, width = (choice.Bc, choice.Br) if isinstance(choice, BackwardChoice) else (choice.Br, choice.Bc)
    if choice.warps % 4 or rows != 16 * choice.warps:
        yield "a warpgroup has 64 rows"
    if isinstance(choice, BackwardChoice) and (choice.Br % 64 or choice.Br > 16 * choice.warps):
        yield "a warpgroup has 64 rows of dQ"
    if choice.stages != 2 or width > 256:
        yield "warpgroups have two stages of at most 256 rows"
    if not isinstance(choice, QueryChoice) and choice.blocks > 1 and choice.blocks * choice.warps > MOST_WARPS:
        yield "the blocks of a multiprocessor leave a thread 128 registers"


def _check_head_dim(variant: Variant) -> None:
    """Refuse head dimensions of which one is large, so that warps divide it, and the other cannot be divided."""
    widths = (padded(variant.head_dim.qk), padded(variant.head_dim.v))
    if max(widths) > 128 and any(width % 32 for width in widths):
        message = f"a GPU's kernels cannot divide head dimension {variant.head_dim} among two warps"
        note = "where one is above 128 both have to be multiples of 32: pad the smaller one of the tensors with zeros"
        raise SpecError([Diagnostic("E406", message, variant.spec.span, notes=(note,))], variant.spec.sources)


def _check_schedule(variant: Variant) -> None:
    """Refuse pins with which no candidate works, whatever the memory."""
    problems = []
    anything = Target("", 80, 0, 0)
    if not _forward_choices(variant, ElementType.F16, anything):
        problems.append("'Br', 'Bc' and 'warps' of the forward pass: a warp has 16 or more whole query rows")
    if not _backward_choices(variant, ElementType.F16, anything):
        problems.append("'backward_Br', 'backward_Bc' and 'backward_warps': a warp has 16 or more whole keys")
    if problems:
        span = variant.spec.schedule.span
        raise SpecError(
            [Diagnostic("E403", f"the schedule cannot work on a GPU: {problem}", span) for problem in problems],
            variant.spec.sources,
        )
