"""Stage 3, plan for GPUs: numbers that positions decide by their distance, kept in the workspace for every diagonal.

In: a ``Variant``. Out: the same over ``distance`` (``analysis/diagonals.py``), and the buffer. The first launch of a
pass computes each once for the Nq + Nk diagonals of those heads that they tell apart; for a pair it is a read then.
What takes no longer than that is computed for the pair.

Of elements that receive gradients by distance the launch also says which are the same over ``RUN`` distances.
"""

from __future__ import annotations

from flashgen.analysis.diagonals import by_distance, diagonal_values, over_diagonals
from flashgen.analysis.factors import LOG2_E, in_base_2
from flashgen.analysis.levels import Level
from flashgen.analysis.variant import CapturedGradient, Variant
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, index_set, literal
from flashgen.plan.launches import Buffer, Count, Factor, Sum
from flashgen.plan.work import takes_longer_than_a_read

DIAGONALS = "diagonals"
ELEMENTS = "elements_by_distance"
RUN = 32  # distances, one a lane of those that look at them
BEYOND = 64  # distances more than there are, at either end: a lane's rows and columns past the last ones read, too


def with_diagonals(variant: Variant) -> Variant:
    """The variant as kernels for GPUs compute it; gradients of reads are summed by pairs as before.

    Sequences of a ragged batch have diagonals of their own, as many together as there are rows, over a cache a pair is
    looked at once, and products of forward mode take three times as long: no table pays.
    """
    if not _has_tables(variant):
        return variant
    return over_diagonals(variant, takes_longer_than_a_read, sums=False)


def diagonal_numbers(variant: Variant) -> tuple[Expr, ...]:
    """What lies in memory for each diagonal."""
    return diagonal_values(with_diagonals(variant)) if _has_tables(variant) else ()


def _has_tables(variant: Variant) -> bool:
    return not (variant.kind.ragged or variant.kind.rows_of_heads or variant.tangent)


def diagonal_indices(variant: Variant) -> frozenset[str]:
    """Those of ``b`` and ``h`` that the numbers depend on."""
    return frozenset[str]().union(*(index_set(each) for each in diagonal_numbers(variant))) - {"distance"}


def diagonal_counts(variant: Variant, times: int = 1, divide: int = 1, tile: int = 1) -> tuple[Count, ...]:
    """The diagonals of the heads that the numbers tell apart, ``tile`` of them together: those of the queries' side and
    of the keys'.
    """
    if not diagonal_numbers(variant):
        return ()
    indices = diagonal_indices(variant)
    heads = tuple(Factor(size) for size, name in (("batch", "b"), ("heads", "h")) if name in indices)
    lengths = tuple(Count((*heads, Factor(length, tile)), times, divide) for length in ("q_len", "kv_len"))
    return (*lengths, Count(heads, 2 * BEYOND // tile * times, divide))


def diagonal_buffers(variant: Variant) -> tuple[Buffer, ...]:
    """Float32, a number behind the other."""
    counts = diagonal_counts(variant, 4 * len(diagonal_numbers(variant)))
    return (Buffer(DIAGONALS, Sum(counts)),) if counts else ()


def exponent_of(computed: Variant, score: Expr) -> Expr:
    """A score of such a variant in base 2; beside numbers by distance as a product, so that these stay what is kept."""
    return apply("mul", literal(LOG2_E), score) if diagonal_values(computed) else in_base_2(score)


def has_runs(variant: Variant, gradient: CapturedGradient) -> bool:
    """Whether what pairs add to a gradient is a number of the launch times dS, to elements that distances choose.

    Of those heads alone whose diagonals there are.
    """
    read = by_distance(gradient.read)
    if read is None or gradient.level is not Level.PAIR or not diagonal_numbers(variant):
        return False
    if gradient.times_score_gradient is None:
        return False
    return index_set(read) - {"distance"} <= diagonal_indices(variant)


def run_buffers(variant: Variant, gradients: int) -> tuple[Buffer, ...]:
    """Of the diagonals, by ``RUN`` of them, the element of each of the gradients, an int."""
    return (Buffer(ELEMENTS, Sum(diagonal_counts(variant, 4 * gradients, tile=RUN))),) if gradients else ()
