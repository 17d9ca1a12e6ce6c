"""Proves that linear forms over indices and sizes are never negative, whatever the sizes.

Stage: analyse. In: a ``Linear`` and facts. Out: proved, or not known. Indices are replaced by their ends, 0 and size -
1; min, max, clamp, abs and conditionals are split into cases, floor divisions are bounded from both sides. Sizes are at
least 1 and below ``SIZE_LIMIT``; the op refuses larger ones. Does NOT look for counterexamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashgen.analysis.ranging import NO_FACTS, Facts, Linear, RangeEvaluator, range_of_form
from flashgen.analysis.simplify import make
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, index, literal, size
from flashgen.ir.interval import INT_MIN, IntRange, Range

SIZE_LIMIT = 2**30  # positions, heads and batches are fewer, so that sums of two do not wrap
SIZE_OF = {"b": "B", "h": "H", "hkv": "Hkv", "i": "Nq", "j": "Nk"}
_MAX_CASES = 7  # how deep the search for a proof goes
_MAX_STEPS = 2000  # how far it goes altogether

Case = tuple[Linear, Expr | None]  # a form that must not be negative where the condition holds


def symbol_ranges(sizes: Mapping[str, int] | None) -> dict[Expr, Range]:
    """Ranges of indices and sizes, for given sizes or for all. A size of 0 leaves its index at 0."""
    ranges: dict[Expr, Range] = {}
    for name, extent in SIZE_OF.items():
        lo, hi = (1, SIZE_LIMIT - 1) if sizes is None else (sizes[extent], sizes[extent])
        ranges[size(extent)] = IntRange(lo, hi)
        ranges[index(name)] = IntRange(0, max(hi - 1, 0))
    return ranges


class Prover:
    """Proofs over all sizes; ``evaluator`` holds the ranges of ``symbol_ranges(None)``."""

    def __init__(self, evaluator: RangeEvaluator) -> None:
        self._evaluator = evaluator
        self._steps = _MAX_STEPS

    def inside(self, position: Expr, extent: Expr, facts: Facts = NO_FACTS) -> bool:
        """Whether 0 ≤ position < extent, always."""
        at, end = self._evaluator.linear(position, facts), self._evaluator.linear(extent, facts)
        return self.nonnegative(at, facts) and self.nonnegative(end.plus(at, -1).plus(Linear(-1)), facts)

    def outside(self, position: Expr, extent: Expr, facts: Facts = NO_FACTS) -> bool:
        """Whether position < 0 always, or extent ≤ position always."""
        at, end = self._evaluator.linear(position, facts), self._evaluator.linear(extent, facts)
        below = Linear(-1).plus(at, -1)
        return self.nonnegative(below, facts) or self.nonnegative(at.plus(end, -1), facts)

    def nonnegative(self, form: Linear, facts: Facts = NO_FACTS, depth: int = _MAX_CASES) -> bool:
        """Whether the form is never negative where the facts hold."""
        lowest, _ = range_of_form(form, lambda atom: self._evaluator.range(atom, facts), facts.sums)
        if lowest >= 0:
            return True
        self._steps -= 1
        if depth == 0 or self._steps < 0:
            return False
        return any(all(self._case(case, facts, depth - 1) for case in cases) for cases in self._reductions(form, facts))

    def _case(self, case: Case, facts: Facts, depth: int) -> bool:
        form, condition = case
        inside = facts if condition is None else self._evaluator.assume(facts, condition)
        return inside is None or self.nonnegative(form, inside, depth)

    def _reductions(self, form: Linear, facts: Facts) -> Iterator[tuple[Case, ...]]:
        """Sets of cases, any of which suffices: where its condition holds, a case is no more than the form."""
        yield from self._divisions(form, facts)
        for atom, coefficient in form.terms.items():
            rest = form.without(atom)
            alternatives = list(self._alternatives(atom, coefficient, facts))
            for cases in alternatives:
                yield tuple((rest.plus(value, coefficient), condition) for value, condition in cases)
            if alternatives:  # the last one loses nothing: another order of atoms finds no more
                return
        for atom, coefficient in form.terms.items():
            if isinstance(atom, Apply) and atom.op == "floordiv":
                yield from self._scaled(atom, coefficient, form.without(atom), facts)
        for key, known in facts.sums.items():
            shorter = form.plus(Linear(0, dict(key)), -1).plus(Linear(known.lo))
            if len(shorter.terms) < len(form.terms) or self._has_other_cases(shorter, form):
                yield ((shorter, None),)
        ended = self._at_ends(form)
        if ended.terms != form.terms:
            yield ((ended, None),)

    def _alternatives(self, atom: Expr, coefficient: int, facts: Facts) -> Iterator[tuple[Case, ...]]:
        """The values that an atom may have, or bounds of it on the side that matters."""

        def form(expr: Expr) -> Linear:
            return self._evaluator.linear(expr, facts)

        match atom:
            case Apply(op="where", args=(c, x, y)):
                yield (form(x), c), (form(y), make("not", c))
            case Apply(op="min" | "max" as op, args=(x, y)):
                if (op == "min") is (coefficient < 0):  # min is no more than either
                    yield ((form(x), None),)
                    yield ((form(y), None),)
                less = apply("le", x, y)
                first, second = (less, make("not", less)) if op == "min" else (make("not", less), less)
                yield (form(x), first), (form(y), second)
            case Apply(op="clamp", args=(x, lo, hi)):
                yield ((form(apply("min", apply("max", x, lo), hi)), None),)
            case Apply(op="abs", args=(x,)) if self._lowest(x, facts) > INT_MIN:
                negative = apply("lt", x, literal(0))
                yield (form(x), make("not", negative)), (Linear().plus(form(x), -1), negative)
            case Apply(op="mod", args=(_, n)) if self._lowest(n, facts) >= 1:
                yield ((Linear() if coefficient > 0 else form(n).plus(Linear(-1)), None),)

    def _scaled(self, atom: Apply, coefficient: int, rest: Linear, facts: Facts) -> Iterator[tuple[Case, ...]]:
        """c · (x // c) is between x - c + 1 and x: the form times c."""
        x, divisor = atom.args
        if isinstance(divisor, Literal) and divisor.value > 0:
            c = int(divisor.value)
            bound = self._evaluator.linear(x, facts).plus(Linear(1 - c if coefficient > 0 else 0))
            yield ((Linear().plus(rest, c).plus(bound, coefficient), None),)

    def _divisions(self, form: Linear, facts: Facts) -> Iterator[tuple[Case, ...]]:
        """m (x // c) - m (y // c) + m k ≥ 0 where x + k c ≥ y: floor division is monotone."""
        atoms = [(a, m) for a, m in form.terms.items() if isinstance(a, Apply) and a.op == "floordiv"]
        for above, m in atoms:
            for below, n in atoms:
                divisor = above.args[1]
                if (
                    m <= 0
                    or n != -m
                    or below.args[1] != divisor
                    or not isinstance(divisor, Literal)
                    or divisor.value <= 0
                ):
                    continue
                if len(form.terms) == 2 and form.constant % m == 0:
                    shift = Linear(form.constant // m * int(divisor.value))
                    x, y = (self._evaluator.linear(each.args[0], facts) for each in (above, below))
                    yield ((x.plus(y, -1).plus(shift), None),)

    def _at_ends(self, form: Linear) -> Linear:
        """The form with each index at the end that makes the form smallest."""
        for atom, coefficient in form.terms.items():
            if isinstance(atom, Symbol) and atom.kind is SymbolKind.INDEX:
                end = Linear(-1, {size(SIZE_OF[atom.name]): 1})
                form = form.without(atom).plus(end if coefficient < 0 else Linear(), coefficient)
        return form

    def _has_other_cases(self, form: Linear, before: Linear) -> bool:
        """Whether a form of as many terms has an atom with cases in the place of another one."""
        new = form.terms.keys() - before.terms.keys()
        return len(form.terms) == len(before.terms) and any(isinstance(atom, Apply) for atom in new)

    def _lowest(self, expr: Expr, facts: Facts) -> int:
        found = self._evaluator.range(expr, facts)
        assert isinstance(found, IntRange)
        return found.lo
