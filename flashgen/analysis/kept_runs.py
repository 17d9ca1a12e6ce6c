"""The positions of a line that a mask keeps, as runs: the keys of a row, or the queries of a column.

Stage: analyse and after. In: the condition under which a pair is kept, and the axis along which the line runs. Out:
``Run``s, whose ends are sums of values that are constant along the line; a position is kept where one of the runs has
it. None where the mask has another form, so that each pair has to be checked. Kernels turn runs into bits once a line;
a pair of a masked tile then costs one selection.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.comparisons import natural_ends, sum_of
from flashgen.analysis.constraints import COLUMN, Term, Truth, is_point
from flashgen.analysis.kept import kept_terms
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.linear import Linear
from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.ir.expr import Apply, Expr, Symbol
from flashgen.ir.interval import INT_MAX

MOST_RUNS = 3  # of a line; beyond it a look at each pair costs no more


@dataclass(frozen=True)
class Blocks:
    """Positions p with every ``least`` ≤ (p + shift) // size ≤ every ``most``.

    The size is a point, which may be 0 or less, and the shift a sum of points.
    """

    shift: Linear
    size: Expr
    least: tuple[Linear, ...]
    most: tuple[Linear, ...]


@dataclass(frozen=True)
class Run:
    """Positions p in all ``blocks`` with every ``least`` ≤ p ≤ every ``most``, over the integers.

    The run is empty on a line where a sum of ``not_negative`` is below 0, or one of ``truths`` does not hold.
    """

    least: tuple[Linear, ...]
    most: tuple[Linear, ...]
    blocks: tuple[Blocks, ...] = ()
    not_negative: tuple[Linear, ...] = ()
    truths: tuple[Truth, ...] = ()


def kept_runs(keep: Expr, axis: Symbol) -> tuple[Run, ...] | None:
    """The runs along ``axis`` (i or j), for a line of the other axis; None where each pair has to be checked."""
    terms = kept_terms(keep)
    if not 0 < len(terms) <= MOST_RUNS:
        return None
    runs: list[Run] = []
    for term in terms:
        run = _run(term, axis)
        if run is None:
            return None
        runs.append(run)
    return tuple(runs) if any(run.least or run.most or run.blocks for run in runs) else None


def fits_position(end: Linear) -> bool:
    """Whether an end minus a position stays inside 32 bits in any call."""
    lo, hi = natural_ends(end)
    return lo >= -SIZE_LIMIT and hi <= INT_MAX


def _run(term: Term, axis: Symbol) -> Run | None:
    """A term as a run; None where a constraint depends on both positions in another way."""
    least: list[Linear] = []
    most: list[Linear] = []
    blocks: list[Blocks] = []
    not_negative: list[Linear] = []
    line = Level.ROW if axis == COLUMN else Level.COLUMN
    if term.unequal or any(level_of(each.condition) not in (line, Level.HEAD, Level.LAUNCH) for each in term.truths):
        return None
    for bound in term.bounds:
        if any(limit.sides for limit in (*bound.least, *bound.most)):
            return None  # it holds only where nothing wraps
        across = {atom: c for atom, c in bound.form.terms if level_of(atom) is line}
        from_least, from_most = (  # less what is the same along the line
            [Linear(each.constant, dict(each.points)).plus(Linear(0, across), -1) for each in limits]
            for limits in (bound.least, bound.most)
        )
        moving = [(atom, c) for atom, c in bound.form.terms if atom not in across]
        if not moving:
            not_negative += [*(Linear().plus(each, -1) for each in from_least), *from_most]
            continue
        atom, along = moving[0]
        divided = _divided(atom, axis)
        if len(moving) > 1 or along not in (-1, 1) or (atom != axis and divided is None):
            return None
        lower, upper = (from_least, from_most) if along > 0 else (from_most, from_least)
        ends = tuple(tuple(Linear().plus(each, along) for each in side) for side in (lower, upper))
        if divided is None:
            least += ends[0]
            most += ends[1]
        else:
            blocks.append(Blocks(*divided, *ends))
    return Run(tuple(least), tuple(most), tuple(blocks), tuple(not_negative), term.truths)


def _divided(atom: Expr, axis: Symbol) -> tuple[Linear, Expr] | None:
    """(s, c) of (p + s) // c, where the sum stays inside 32 bits in any call."""
    match atom:
        case Apply(op="floordiv", args=(x, c)) if is_point(c):
            total = sum_of(x)
            shift = total.without(axis)
            if total.terms.get(axis) == 1 and all(map(is_point, shift.terms)) and fits_position(total):
                return shift, c
    return None
