"""The runs of a mask as code: of a row the keys that it keeps, of a column the queries.

In: what a mask keeps of a line, and where its code is placed. Out: ``LineCode``, of which templates make a function
that returns a lane's elements as bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.constraints import COLUMN, ROW, Truth
from flashgen.analysis.kept_runs import Run, fits_position, kept_runs
from flashgen.analysis.levels import level_of
from flashgen.analysis.linear import Linear
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_sum
from flashgen.ir.expr import Expr, Symbol


@dataclass(frozen=True)
class RunCode:
    """A run: where it begins, its last position, and what the line has to satisfy, each where there is such a thing."""

    least: str | None
    most: str | None
    condition: str | None


@dataclass(frozen=True)
class LineCode:
    """The runs of a line."""

    runs: tuple[RunCode, ...]


def keys_of_row(keep: Expr, placement: Placement) -> LineCode | None:
    """Which keys of a tile a row keeps; None where each pair is asked."""
    return _line(keep, COLUMN, placement)


def queries_of_column(keep: Expr, placement: Placement) -> LineCode | None:
    """Which queries of a tile a column is kept by; None where each pair is asked."""
    return _line(keep, ROW, placement)


def _line(keep: Expr, axis: Symbol, placement: Placement) -> LineCode | None:
    runs = kept_runs(keep, axis)
    return None if runs is None else LineCode(tuple(_run(run, placement) for run in runs))


def _run(run: Run, placement: Placement) -> RunCode:
    conditions = [f"{_sum(each, placement, wide=True)} >= 0" for each in run.not_negative]
    conditions += [_truth(each, placement) for each in run.truths]
    return RunCode(
        least=_tightest("max", run.least, placement),
        most=_tightest("min", run.most, placement),
        condition=" && ".join(conditions) or None,
    )


def _tightest(choose: str, ends: tuple[Linear, ...], placement: Placement) -> str | None:
    code = ""
    for end in ends:
        own = _end(end, placement)
        code = f"fg::{choose}({code}, {own})" if code else own
    return code or None


def _end(end: Linear, placement: Placement) -> str:
    """An end in 32 bits, so that a position may be taken from it."""
    if fits_position(end):
        return _sum(end, placement, wide=False)
    return f"fg::position({_sum(end, placement, wide=True)})"


def _sum(total: Linear, placement: Placement, *, wide: bool) -> str:
    values = ((placement.value("end_of_run", atom, level_of(atom)), c) for atom, c in total.terms.items())
    return c_sum(total.constant, ((f"int64_t({value})" if wide else value, c) for value, c in values))


def _truth(truth: Truth, placement: Placement) -> str:
    code = placement.value("holds", truth.condition, level_of(truth.condition))
    return code if truth.value else f"!{code}"
