"""The runs of a mask as code: of a row the keys that it keeps, of a column the queries.

In: what a mask keeps of a line, and where its code is placed. Out: ``RunCode``s, of which templates make a function
that returns a lane's elements as bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flashgen.analysis.constraints import Truth
from flashgen.analysis.kept import Blocks, Run, fits_position, kept_runs
from flashgen.analysis.levels import level_of
from flashgen.analysis.ranging import Linear
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_sum
from flashgen.ir.expr import Expr, Symbol


@dataclass(frozen=True)
class RunCode:
    """A run: where it begins, its last position, and what the line has to satisfy, each where there is such a thing.

    ``lines`` name what these read.
    """

    lines: tuple[str, ...]
    least: str | None
    most: str | None
    condition: str | None


def runs_of_line(keep: Expr, axis: Symbol, placement: Placement) -> tuple[RunCode, ...] | None:
    """The keys of a tile that a row keeps (axis ``COLUMN``), or the queries of a column; None: pairs are asked."""
    runs = kept_runs(keep, axis)
    return None if runs is None else tuple(_run(n, run, placement) for n, run in enumerate(runs))


def _run(number: int, run: Run, placement: Placement) -> RunCode:
    names = [f"blocks{number}_{n}" for n in range(len(run.blocks))]
    lines = (f"const auto {x} = {_blocks(each, placement)};" for x, each in zip(names, run.blocks, strict=True))
    conditions = [f"{_sum(each, placement, wide=True)} >= 0" for each in run.not_negative]
    conditions += [_truth(each, placement) for each in run.truths]
    return RunCode(
        lines=tuple(lines),
        least=_tightest("max", [*_ends(run.least, placement), *(f"fg::position({name}.lo)" for name in names)]),
        most=_tightest("min", [*_ends(run.most, placement), *(f"fg::position({name}.hi)" for name in names)]),
        condition=" && ".join(conditions) or None,
    )


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
