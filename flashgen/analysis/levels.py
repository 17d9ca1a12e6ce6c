"""Levels: how often a value has to be computed, read off its index set.

A value that depends on nothing but sizes and params is computed once a launch; one over b and h once a head;
over i once a row; over j once a column; over i - j alone once a diagonal; over both once a pair. The emitter places
every subexpression at its level, and the gradient of a captured value is reduced over the loops outside its level
before it is stored.
"""

from enum import Enum

from flashgen.ir.expr import Expr, Load, index, index_set, walk
from flashgen.ir.types import ScalarType


class Level(Enum):
    """The loop in which a value changes."""

    LAUNCH = "launch"
    HEAD = "head"
    ROW = "row"
    COLUMN = "column"
    DIAGONAL = "diagonal"
    PAIR = "pair"

    def is_vector(self, lanes: "Level") -> bool:
        """Whether values differ within a vector of neighbouring ``lanes``, which are rows or columns."""
        return self in (lanes, Level.DIAGONAL, Level.PAIR)


def level_of(expr: Expr) -> Level:
    """The level of an expression."""
    indices = index_set(expr)
    positions = {"i": Level.ROW, "j": Level.COLUMN, "distance": Level.DIAGONAL}
    found = [level for name, level in positions.items() if name in indices]
    if found:
        return found[0] if len(found) == 1 else Level.PAIR
    return Level.HEAD if indices else Level.LAUNCH


def kept_level(expr: Expr) -> Level:
    """The level at which a kernel stores a value: floats alone are stored by diagonals; ints and bools by pairs."""
    level = level_of(expr)
    return Level.PAIR if level is Level.DIAGONAL and expr.type is not ScalarType.FLOAT else level


def mask_axes(keep: Expr) -> frozenset[str]:
    """The axes, of ``b`` and ``h``, along which a mask may differ; ``hkv`` where heads of a group share the mask."""
    found = index_set(keep) & {"b", "h"}
    return found if "h" not in found or index("h") in set(walk(keep)) else found - {"h"} | {"hkv"}


def observed_loads(keep: Expr) -> tuple[tuple[Load, ...], tuple[Load, ...]]:
    """The loads of a mask by row, and by column: those whose indices have one position of the pair."""
    loads = [node for node in walk(keep) if isinstance(node, Load)]
    return (
        tuple(each for each in loads if level_of(each) is Level.ROW),
        tuple(each for each in loads if level_of(each) is Level.COLUMN),
    )
