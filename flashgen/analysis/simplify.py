"""Simplifies expressions; recognises softmax that is written as normalised exponentials.

Stage: analyse. In: typed expressions. Out: equal ones with fewer operations; constants fold in double precision (ints
exactly, modulo 2**32). On floats an identity keeps NaN and infinities (``x * 0`` stays), may lose the sign of a zero,
and may move a constant factor (one rounding more or less; only factors of moderate size, so that no product over- or
underflows that did not before in any reasonable range). Does NOT turn divisions into multiplications, unless the
divisor is a power of two or meets another constant factor, or ``reciprocals`` asks for it. Does NOT use ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from flashgen.ir.build import fold
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, rewrite, score_input, substitute, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import Weights

_MINUS_INFINITY = literal(-math.inf)


def simplify(expr: Expr, *, reciprocals: bool = False, done: dict[Expr, Expr] | None = None) -> Expr:
    """An equal expression with fewer operations; ``reciprocals`` turns x / c into (1/c) x where x is of pairs.

    ``done`` as of ``rewrite``: expressions that share are simplified once where they do.
    """

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Apply):
            return node
        if reciprocals and node.op == "div" and (product := reciprocal(*node.args)) is not None:
            return product
        return improve(node)

    return rewrite(expr, rule, done)


def canonical_weights(weights: Weights, score: Expr) -> tuple[Weights, Expr]:
    """``normalize(exp(e))`` as softmax over ``e[s := score]``; other weights and their score as they are.

    A score of -inf is masked in every form. Where e does not take -inf to -inf, the new score says so itself.
    """
    if weights.weight is None or not weights.form.is_sum:
        return weights, score
    exponent = _exponent(simplify(weights.weight))
    if exponent is None:
        return weights, score
    s = score_input("s")
    new_score = substitute(exponent, {s: score})
    if simplify(substitute(exponent, {s: _MINUS_INFINITY})) != _MINUS_INFINITY:
        masked = make("eq", score, _MINUS_INFINITY)
        new_score = make("where", masked, _MINUS_INFINITY, new_score)
    return Weights(), simplify(new_score)


def _exponent(weight: Expr) -> Expr | None:
    """e where the weight is exp(e)."""
    match weight:
        case Apply(op=op, args=(e,)) if rate := OPERATORS[op].rate:
            return e if rate == 1 else make("mul", literal(rate), e)
        case Literal(type=ScalarType.FLOAT, value=value) if 0 < value < math.inf:
            return literal(math.log(value))
        case Apply(op="mul" | "div" as op, args=(x, y)):
            left, right = _exponent(x), _exponent(y)
            if left is not None and right is not None:
                return make("add" if op == "mul" else "sub", left, right)
    return None


# Identities: what a node over given arguments can be replaced by -----------------------------------------------------

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


def make(op: str, *args: Expr) -> Expr:
    """The simplified node ``op(args)`` over simplified arguments; its type follows from theirs."""
    scalar = OPERATORS[op].signature(tuple(arg.type for arg in args)).result
    return improve(Apply(scalar, op=op, args=args))


def improve(node: Apply) -> Expr:
    """The node, folded or replaced by an equal simpler one; its arguments are already simplified."""
    if all(isinstance(arg, Literal) for arg in node.args):
        value = fold(node.op, *(arg.value for arg in node.args if isinstance(arg, Literal)))
        if not math.isnan(value):
            return literal(value, span=node.span)
        return node
    rule = RULES.get(node.op)
    better = rule(*node.args) if rule is not None else None
    return node if better is None else better


def _is(expr: Expr, value: float) -> bool:
    """Whether the node is this number."""
    return isinstance(expr, Literal) and expr.type is not BOOL and expr.value == value


def _truth(expr: Expr) -> bool | None:
    return bool(expr.value) if isinstance(expr, Literal) and expr.type is BOOL else None


def _args(expr: Expr, op: str) -> tuple[Expr, ...] | None:
    return expr.args if isinstance(expr, Apply) and expr.op == op else None


def _movable(value: float) -> bool:
    """Whether a float factor may change places with other factors."""
    return 2.0**-40 <= abs(value) <= 2.0**40


def _factor(expr: Expr) -> tuple[Literal, Expr] | None:
    """(c, x) of a product c · x with a movable constant, which stands first."""
    args = _args(expr, "mul")
    if args is not None and isinstance(args[0], Literal):
        constant = args[0]
        if constant.type is INT or _movable(float(constant.value)):
            return constant, args[1]
    return None


def _combined(op: str, x: Literal, y: Literal) -> Literal | None:
    value = fold(op, x.value, y.value)
    return literal(value) if x.type is INT or _movable(float(value)) else None


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _add(x: Expr, y: Expr) -> Expr | None:
    if _is(x, 0):
        return y
    if _is(y, 0):
        return x
    if (negated := _args(y, "neg")) is not None:
        return make("sub", x, negated[0])
    if (negated := _args(x, "neg")) is not None:
        return make("sub", y, negated[0])
    return _offset(x, y) or _offset(y, x) or _same_choice("add", x, y)


def _sub(x: Expr, y: Expr) -> Expr | None:
    if _is(y, 0):
        return x
    if _is(x, 0):
        return make("neg", y)
    if (negated := _args(y, "neg")) is not None:
        return make("add", x, negated[0])
    if x.type is INT:
        if x == y:
            return literal(0)
        if isinstance(y, Literal):
            return _offset(x, literal(fold("neg", y.value)))
    return _same_choice("sub", x, y)


def _offset(x: Expr, constant: Expr) -> Expr | None:
    """(t ± c) + constant = t ± c', on ints."""
    if constant.type is not INT or not isinstance(constant, Literal) or not isinstance(x, Apply):
        return None
    if x.op not in ("add", "sub") or not isinstance(x.args[1], Literal):
        return None
    total = int(fold(x.op, constant.value, x.args[1].value) if x.op == "add" else constant.value - x.args[1].value)
    if not -(2**31) < total < 2**31:
        return None
    return make("add", x.args[0], literal(total)) if total >= 0 else make("sub", x.args[0], literal(-total))


def _same_choice(op: str, x: Expr, y: Expr) -> Expr | None:
    """where(c, a, b) ± where(c, a', b') = where(c, a ± a', b ± b')."""
    left, right = _args(x, "where"), _args(y, "where")
    if left is None or right is None or left[0] != right[0]:
        return None
    return make("where", left[0], make(op, left[1], right[1]), make(op, left[2], right[2]))


def _mul(x: Expr, y: Expr) -> Expr | None:
    if isinstance(y, Literal):
        return make("mul", y, x)
    if (negated := _args(y, "neg")) is not None:
        return make("neg", make("mul", x, negated[0]))
    if isinstance(x, Literal):
        return _scaled(x, y)
    if (negated := _args(x, "neg")) is not None:
        return make("neg", make("mul", negated[0], y))
    if (product := _factor(x)) is not None:
        return make("mul", product[0], make("mul", product[1], y))
    if (product := _factor(y)) is not None:
        return make("mul", product[0], make("mul", x, product[1]))
    return None


def _scaled(c: Literal, x: Expr) -> Expr | None:
    """c · x."""
    if c.value == 1:
        return x
    if c.value == -1:
        return make("neg", x)
    if c.value == 0:
        return literal(0) if c.type is INT else None
    if (product := _factor(x)) is not None and (c.type is INT or _movable(float(c.value))):
        total = _combined("mul", c, product[0])
        return None if total is None else make("mul", total, product[1])
    if (quotient := _args(x, "div")) is not None and _movable(float(c.value)):
        numerator, denominator = quotient
        if isinstance(denominator, Literal) and (total := _combined("div", c, denominator)) is not None:
            return make("mul", total, numerator)
        if isinstance(numerator, Literal) and (total := _combined("mul", c, numerator)) is not None:
            return make("div", total, denominator)
    return None


def _div(x: Expr, y: Expr) -> Expr | None:
    if (negated := _args(x, "neg")) is not None:
        return make("neg", make("div", negated[0], y))
    product = _factor(x)
    if isinstance(y, Literal):
        value = float(y.value)
        if value == 1:
            return x
        if value != 0 and not math.isinf(value) and abs(math.frexp(value)[0]) == 0.5 and _movable(value):
            return make("mul", literal(1 / value), x)
        if product is not None and _movable(value) and (total := _combined("div", product[0], y)) is not None:
            return make("mul", total, product[1])
        return None
    if product is not None:
        return make("mul", product[0], make("div", product[1], y))
    below = _factor(y)
    if isinstance(x, Literal) and below is not None and (total := _combined("div", x, below[0])) is not None:
        return make("div", total, below[1])
    return None


def reciprocal(x: Expr, y: Expr) -> Expr | None:
    """x / c = (1/c) x, one rounding more, for numbers and sizes.

    For scores alone: an int that is computed from positions could change.
    """
    if not any(isinstance(node, Symbol) and node.kind is SymbolKind.SCORE for node in walk(x)):
        return None
    if isinstance(y, Literal) and _movable(float(y.value)):
        return make("mul", literal(1 / float(y.value)), x)
    of = _args(y, "to_float")
    if of is not None and isinstance(of[0], Symbol) and of[0].kind is SymbolKind.SIZE:
        return make("mul", make("div", literal(1.0), y), x)
    return None


def _neg(x: Expr) -> Expr | None:
    if (inner := _args(x, "neg")) is not None:
        return inner[0]
    if (inner := _args(x, "sub")) is not None:
        return make("sub", inner[1], inner[0])
    inner = _args(x, "mul")
    if inner is not None and isinstance(inner[0], Literal):
        return make("mul", literal(fold("neg", inner[0].value)), inner[1])
    return None


def _floordiv(x: Expr, y: Expr) -> Expr | None:
    if x.type is not INT or not isinstance(y, Literal):
        return None
    if y.value == 1:
        return x
    inner = _args(x, "floordiv")
    if inner is not None and isinstance(inner[1], Literal) and inner[1].value > 0 and y.value > 0:
        divisor = int(inner[1].value * y.value)
        return make("floordiv", inner[0], literal(divisor)) if divisor < 2**31 else None
    return None


def _mod(x: Expr, y: Expr) -> Expr | None:
    return literal(0) if x.type is INT and (_is(y, 1) or _is(y, -1)) else None


def _pow(x: Expr, y: Expr) -> Expr | None:
    if _is(x, 2):
        return make("exp2", y)
    if _is(x, 1):
        return literal(1.0)
    return _small_power(x, y) or (make("div", literal(1.0), x) if _is(y, -1) else None)


def _small_power(x: Expr, y: Expr) -> Expr | None:
    if not isinstance(y, Literal) or y.value not in (0, 1, 2, 3, 4):
        return None
    if y.value == 0:
        return literal(1.0 if x.type is FLOAT else 1)
    if y.value == 1:
        return x
    square = make("mul", x, x)
    if y.value == 2:
        return square
    return make("mul", x, square) if y.value == 3 else make("mul", square, square)


def _extreme(op: str) -> Callable[[Expr, Expr], Expr | None]:
    """min and max: of a value with itself or with the infinity that never wins, and of two constants with a value."""
    neutral = math.inf if op == "min" else -math.inf

    def rule(x: Expr, y: Expr) -> Expr | None:
        if x == y or _is(y, neutral):
            return x
        if _is(x, neutral):
            return y
        inner = _args(x, op)
        if inner is not None and isinstance(y, Literal) and isinstance(inner[1], Literal):
            return make(op, inner[0], literal(fold(op, inner[1].value, y.value)))
        return None

    return rule


def _abs(x: Expr) -> Expr | None:
    if _args(x, "abs") is not None:
        return x
    return make("abs", inner[0]) if (inner := _args(x, "neg")) is not None else None


# Logic ----------------------------------------------------------------------------------------------------------------


def _not(x: Expr) -> Expr | None:
    if (inner := _args(x, "not")) is not None:
        return inner[0]
    opposite = OPERATORS[x.op].opposite if isinstance(x, Apply) else ""
    if opposite and isinstance(x, Apply) and (x.op in ("eq", "ne") or x.args[0].type is not FLOAT):
        return make(opposite, *x.args)  # with NaN neither of < and ≥ holds
    return None


def _junction(neutral: bool) -> Callable[[Expr, Expr], Expr | None]:
    """``and`` (neutral: true) and ``or`` (neutral: false)."""

    def rule(x: Expr, y: Expr) -> Expr | None:
        for one, other in ((x, y), (y, x)):
            if (truth := _truth(one)) is not None:
                return other if truth is neutral else one
        if x == y:
            return x
        return literal(not neutral) if make("not", x) == y else None

    return rule


def _comparison(op: str) -> Callable[[Expr, Expr], Expr | None]:
    def rule(x: Expr, y: Expr) -> Expr | None:
        if x == y and op in ("lt", "gt"):
            return literal(False)
        if x == y and x.type is not FLOAT:
            return literal(op in ("le", "ge", "eq"))
        for one, other in ((x, y), (y, x)):
            if (truth := _truth(one)) is not None:
                return other if truth is (op == "eq") else make("not", other)
        return None

    return rule


def _where(c: Expr, x: Expr, y: Expr) -> Expr | None:
    if (truth := _truth(c)) is not None:
        return x if truth else y
    if x == y:
        return x
    if (inner := _args(c, "not")) is not None:
        return make("where", inner[0], y, x)
    if x.type is BOOL and (logic := _where_of_bools(c, x, y)) is not None:
        return logic
    if (inner := _args(x, "where")) is not None and inner[0] == c:
        return make("where", c, inner[1], y)
    if (inner := _args(y, "where")) is not None and inner[0] == c:
        return make("where", c, x, inner[2])
    return None


def _where_of_bools(c: Expr, x: Expr, y: Expr) -> Expr | None:
    if _truth(x) is True:
        return make("or", c, y)
    if _truth(x) is False:
        return make("and", make("not", c), y)
    if _truth(y) is True:
        return make("or", make("not", c), x)
    return make("and", c, x) if _truth(y) is False else None


def _bits(op: str) -> Callable[[Expr, Expr], Expr | None]:
    """& | ^ of ints with 0 or with itself; on bools they are logic."""

    def rule(x: Expr, y: Expr) -> Expr | None:
        if x.type is BOOL:
            return make({"bitand": "and", "bitor": "or", "bitxor": "ne"}[op], x, y)
        for one, other in ((x, y), (y, x)):
            if _is(one, 0):
                return one if op == "bitand" else other
        if x == y:
            return literal(0) if op == "bitxor" else x
        return None

    return rule


def _shift(x: Expr, n: Expr) -> Expr | None:
    return x if _is(n, 0) else None


RULES: Mapping[str, Callable[..., Expr | None]] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "mul": _mul,
        "div": _div,
        "neg": _neg,
        "floordiv": _floordiv,
        "mod": _mod,
        "pow": _pow,
        "ipow": _small_power,
        "min": _extreme("min"),
        "max": _extreme("max"),
        "abs": _abs,
        "not": _not,
        "and": _junction(True),
        "or": _junction(False),
        **{op: _comparison(op) for op, row in OPERATORS.items() if row.is_comparison},
        "where": _where,
        "bitand": _bits("bitand"),
        "bitor": _bits("bitor"),
        "bitxor": _bits("bitxor"),
        "shl": _shift,
        "shr": _shift,
    }
)
