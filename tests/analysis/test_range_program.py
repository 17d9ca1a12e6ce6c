"""Masks as programs over ranges: steps are written once, and read only where the checks before them have passed."""

from __future__ import annotations

from hypothesis import given, settings

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.range_program import (
    Alternative,
    Clipped,
    End,
    Offset,
    Position,
    RangeProgram,
    Some,
    Sum,
    asks,
    range_program,
    reads,
)
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import range_code
from flashgen.ir.expr import Expr
from tests.ir.expressions import expr
from tests.ir.strategies import conditions_on_positions


def test_a_window() -> None:
    """i - j is summed up once, for both sides of both bounds."""
    assert range_program(expr("j <= i and i - j < 8")) == RangeProgram(
        steps=(
            Position(ROW),
            Position(COLUMN),
            Sum(((0, 1), (1, -1))),
            Offset(-1, ()),
            Clipped(2, (), (End(3, None),)),
            Offset(8, ()),
            Clipped(2, (End(5, None),), ()),
            Offset(0, ()),
            Offset(7, ()),
            Clipped(2, (End(7, None),), (End(8, None),)),
        ),
        kept=((Some(9),),),
        dropped=((Some(4),), (Some(6),)),
    )


def test_masks_that_keep_all_or_nothing() -> None:
    everything = range_program(expr("true"))
    assert (everything.kept, everything.dropped) == (((),), ())
    nothing = range_program(expr("false"))
    assert (nothing.kept, nothing.dropped) == ((), ((),))


def test_a_mask_is_lowered_once() -> None:
    assert range_program(expr("j <= i")) is range_program(expr("j <= i"))


def assert_ordered(program: RangeProgram, alternatives: tuple[Alternative, ...]) -> None:
    assert all(register < len(program.steps) for checks in alternatives for each in checks for register in asks(each))


@settings(max_examples=60)
@given(conditions_on_positions(3))
def test_steps_read_earlier_ones_and_are_different(keep: Expr) -> None:
    program = range_program(keep)
    assert len(set(program.steps)) == len(program.steps)
    assert all(register < number for number, step in enumerate(program.steps) for register in reads(step))
    assert_ordered(program, program.kept + program.dropped)


@settings(max_examples=60)
@given(conditions_on_positions(3))
def test_printed_names_are_in_order_and_read(keep: Expr) -> None:
    code = range_code(keep, Placement(()))
    named = [line.split()[2] for line in code.lines]
    assert named == [f"t{n}" for n in range(len(named) - 2)] + ["may_drop", "may_keep"][: len(named)]
    text = " ".join((*code.lines, code.result))
    assert all(text.count(name) > 1 for name in named)
