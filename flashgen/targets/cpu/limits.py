"""What no kernel for CPUs can do, whatever its tiles, and what of a schedule they have no use for.

In: a ``Variant``. Out: diagnostics, each with the place in the spec; sentences.
"""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic

# Query rows come in whole vectors, of 16 lanes at most, so that one tile works on every machine.
ROW_MULTIPLE = 16
MOST_ROWS_OR_COLUMNS = 1024


def limits(variant: Variant) -> tuple[Diagnostic, ...]:
    """Everything of a spec that is refused: pins that no template can work with."""
    schedule = variant.spec.schedule
    problems: list[str] = []
    for name in ("Br", "backward_Br"):
        value = getattr(schedule, name)
        if value is not None and (value % ROW_MULTIPLE or not ROW_MULTIPLE <= value <= MOST_ROWS_OR_COLUMNS):
            legal = f"a multiple of {ROW_MULTIPLE} up to {MOST_ROWS_OR_COLUMNS}"
            problems.append(f"'{name} = {value}': query rows are vector lanes; write {legal}")
    for name in ("Bc", "backward_Bc"):
        value = getattr(schedule, name)
        if value is not None and not 1 <= value <= MOST_ROWS_OR_COLUMNS:
            problems.append(f"'{name} = {value}': write 1 to {MOST_ROWS_OR_COLUMNS} keys")
    return tuple(
        Diagnostic("E403", f"the schedule cannot work on a CPU: {problem}", schedule.span) for problem in problems
    )


def unused_pins(variant: Variant) -> tuple[str, ...]:
    """A sentence for each pin of the schedule that a CPU kernel has no use for."""
    schedule = variant.spec.schedule
    names = ("warps", "stages", "backward_warps", "backward_stages")
    return tuple(
        f"'{name}' of the schedule, which is for GPUs: a CPU's kernels have no {name.split('_')[-1]}"
        for name in names
        if getattr(schedule, name) is not None
    )
