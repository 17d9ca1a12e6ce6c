"""What a row of the operator table is, and the parts that rows are made of, typing rules first.

Stage: IR. In: nothing. Out: ``Operator``, ``ArrayNamespace`` for the ``operators_*`` modules. Does NOT know any
operator: rows are in the family modules, the table in ``operators.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, Protocol

from flashgen.ir.expr import Apply, Expr, literal
from flashgen.ir.interval import MASK32, IntRange, Range
from flashgen.ir.types import ScalarType

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


class TypingError(Exception):
    """A user's expression that has no type. ``argument`` is the operand at fault, where one is."""

    def __init__(self, message: str, *, argument: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.argument = argument
        self.hint = hint


@dataclass(frozen=True)
class Signature:
    """The types that the operands are promoted to, and the type of the result."""

    arguments: tuple[ScalarType, ...]
    result: ScalarType


TypingRule = Callable[[str, tuple[ScalarType, ...]], Signature]


def _refuse(spelling: str, wanted: str, types: tuple[ScalarType, ...], k: int, hint: str) -> TypingError:
    place = "" if len(types) == 1 else f" as operand {k + 1}"
    return TypingError(f"'{spelling}' takes {wanted}, not {types[k].noun}{place}", argument=k, hint=hint)


def _numbers(spelling: str, types: tuple[ScalarType, ...]) -> ScalarType:
    """The common type of numbers: float if one of them is."""
    for k, scalar in enumerate(types):
        if scalar is BOOL:
            raise _refuse(spelling, "numbers", types, k, "write int(…) to count a condition as 0 or 1")
    return FLOAT if FLOAT in types else INT


def numeric(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """int… → int; with a float among them all promote to float."""
    common = _numbers(spelling, types)
    return Signature((common,) * len(types), common)


def real(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Numbers → float."""
    _numbers(spelling, types)
    return Signature((FLOAT,) * len(types), FLOAT)


def integer(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """int… → int."""
    for k, scalar in enumerate(types):
        if scalar is not INT:
            raise _refuse(spelling, "ints", types, k, "write int(…)")
    return Signature(types, INT)


def comparison(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Numbers, promoted → bool."""
    return Signature((_numbers(spelling, types),) * len(types), BOOL)


def equality(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Two bools, or numbers, promoted → bool."""
    if types == (BOOL, BOOL):
        return Signature(types, BOOL)
    if BOOL in types:
        raise TypingError(
            f"'{spelling}' cannot compare {types[0].noun} with {types[1].noun}",
            argument=types.index(BOOL),
            hint="write int(…) to count a condition as 0 or 1",
        )
    return comparison(spelling, types)


def logical(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """bool… → bool."""
    for k, scalar in enumerate(types):
        if scalar is not BOOL:
            raise _refuse(spelling, "conditions", types, k, "compare it: '… != 0'")
    return Signature(types, BOOL)


def bitwise(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Ints → int, bools → bool."""
    if all(scalar is BOOL for scalar in types):
        return Signature(types, BOOL)
    for k, scalar in enumerate(types):
        if scalar is not INT:
            hint = "a power is written 'x ** y'" if spelling == "^" and scalar is FLOAT else ""
            raise _refuse(spelling, "two ints or two bools", types, k, hint)
    return Signature(types, INT)


def selection(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """bool, T, T → T, numbers promoted."""
    if types[0] is not BOOL:
        raise TypingError(
            f"the condition of '{spelling}' must be a bool, not {types[0].noun}",
            argument=0,
            hint="compare it: '… != 0'",
        )
    if types[1:] == (BOOL, BOOL):
        return Signature(types, BOOL)
    if BOOL in types[1:]:
        raise TypingError(
            f"the branches of '{spelling}' are {types[1].noun} and {types[2].noun}",
            argument=1 + types[1:].index(BOOL),
            hint="write int(…) to count a condition as 0 or 1",
        )
    common = _numbers(spelling, types[1:])
    return Signature((BOOL, common, common), common)


def conversion(result: ScalarType) -> TypingRule:
    """Any type → ``result``."""

    def rule(_spelling: str, types: tuple[ScalarType, ...]) -> Signature:
        return Signature(types, result)

    return rule


# Rows -----------------------------------------------------------------------------------------------------------------


class ArrayNamespace(Protocol):
    """All that ``Operator.meaning`` asks of an array library.

    Arrays are bool, int (held in 64 bits, always inside the 32-bit range) or float (the namespace's working
    precision); 0-dimensional for scalars. Besides the names below they support ``+ - * / & | ^ << >> < <= > >= == !=``
    and unary ``-`` with broadcasting, and a Python scalar beside an array, here and in functions of two or three
    arguments, without changing the type.
    Gradients of torch's own functions are the conventions of the language, so a torch namespace forwards to them.
    """

    def is_float(self, x: Any) -> bool: ...
    def to_float(self, x: Any) -> Any:
        """Bool or int to the working precision; floats unchanged."""

    def to_int(self, x: Any) -> Any:
        """Bool, or a float inside ±2**31 that is no NaN, to 64-bit int, truncating; ints unchanged."""

    def where(self, c: Any, x: Any, y: Any) -> Any: ...
    def isnan(self, x: Any) -> Any: ...
    def logical_not(self, x: Any) -> Any: ...
    def minimum(self, x: Any, y: Any) -> Any:
        """Int or float; NaN wins."""

    def maximum(self, x: Any, y: Any) -> Any: ...
    def clamp(self, x: Any, lo: Any, hi: Any) -> Any:
        """min(max(x, lo), hi); int or float; NaN wins."""

    def floor_divide(self, x: Any, y: Any) -> Any:
        """Int (y is never 0) or float, as Python's; float by 0 is x / 0."""

    def remainder(self, x: Any, y: Any) -> Any:
        """Int (y is never 0) or float, as Python's; float by 0 is NaN."""

    def abs(self, x: Any) -> Any: ...
    def pow(self, x: Any, y: Any) -> Any: ...
    def floor(self, x: Any) -> Any: ...
    def ceil(self, x: Any) -> Any: ...
    def round(self, x: Any) -> Any:
        """Half to even."""

    def call(self, function: Library, x: Any) -> Any:
        """The library's own function of floats, with its gradient."""


@dataclass(frozen=True)
class Library:
    """A function of floats that array libraries have; itself the meaning of a row.

    ``torch`` are its names there, the first as an attribute of the module; ``numpy`` takes and gives an array.
    """

    torch: tuple[str, ...]
    numpy: Callable[[Any], Any]

    def __call__(self, xp: ArrayNamespace, x: Any) -> Any:
        return xp.call(self, x)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A meaning that Python's own operator states for every namespace."""
    return lambda _xp, *args: function(*args)


def asked(name: str) -> Callable[..., Any]:
    """A meaning that each namespace states under this name."""
    return lambda xp, *args: getattr(xp, name)(*args)


def wrap(x: Any) -> Any:
    """A 64-bit int array to the 32-bit range, modulo 2**32."""
    return ((x + 2**31) & MASK32) - 2**31


@dataclass(frozen=True)
class Samples:
    """Where tests sample an operator: one (low, high) an argument; bools and ints round the ends."""

    floats: tuple[tuple[float, float], ...] = ()
    ints: tuple[tuple[int, int], ...] = ()


# Ints beyond this many bits are refused while folding, so that no expression can take long.
MOST_BITS = 256


class NoValueError(Exception):
    """A constant expression without a value: it divides by zero, or is ``too_large``."""

    def __init__(self, message: str, *, by_zero: bool = False, too_large: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.by_zero = by_zero
        self.too_large = too_large


def far_too_large() -> NoValueError:
    """An int of more than ``MOST_BITS``."""
    return NoValueError("the constant is far too large to fit in 32 bits", too_large=True)


@dataclass(frozen=True)
class Folding:
    """An operator on constants, in Python's own arithmetic: ints are exact, floats double.

    ``ints`` takes ints and bools, ``floats`` numbers; None where the table has no such operands, or where an operator
    of 32-bit patterns folds as its ``meaning`` says. They raise ``NoValueError``, or ``ValueError`` and
    ``OverflowError`` as Python's functions do. ``overflows``: an infinity of finite numbers is one that did not fit.
    """

    ints: Callable[..., Any] | None = None
    floats: Callable[..., Any] | None = None
    overflows: bool = False


def folding(of_numbers: Callable[..., Any], *, overflows: bool = False) -> Folding:
    """The same function of ints and of floats."""
    return Folding(of_numbers, of_numbers, overflows)


def nonzero(divide: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A division that refuses zero."""

    def checked(x: Any, y: Any) -> Any:
        if y == 0:
            raise NoValueError("division by zero", by_zero=True)
        return divide(x, y)

    return checked


@dataclass(frozen=True)
class Cost:
    """Instructions of an operator in a kernel: special functions, and others. ``on_cpus`` where they differ there."""

    specials: int = 0
    others: int = 1
    on_cpus: tuple[int, int] | None = None


ONE_INSTRUCTION = Cost()


def smooth(*_args: float) -> float:
    """No point without a derivative anywhere near."""
    return float("inf")


class Strength(IntEnum):
    """How tightly an operator binds in the language, as in Python; calls and names most of all."""

    CONDITIONAL = 0
    OR = 1
    AND = 2
    NOT = 3
    COMPARISON = 4
    BIT_OR = 5
    BIT_XOR = 6
    BIT_AND = 7
    SHIFT = 8
    SUM = 9
    PRODUCT = 10
    UNARY = 11
    POWER = 12
    CALL = 13


Derivative = Callable[[tuple[Expr, ...], int], Expr]
_WORDS = frozenset({"and", "or", "not"})


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    ``arity`` -1 takes one or more. ``spelling`` is the language's, for messages. ``typing(spelling, types)`` raises
    ``TypingError``. ``meaning(xp, *args)`` is the value over arrays (see ``ArrayNamespace``); differentiable.
    ``derivative(args, k)`` is ∂/∂args[k] as an expression, None where the result is never a float; asked only of
    float arguments. ``interval(*ranges)`` is a range that holds the value on every backend in float32.
    ``c`` is an infix or prefix operator, or a function in namespace ``fg``; ``interval_c`` a function in
    ``fg::ranges``. ``kink(*args)`` is the distance to the nearest point without a derivative, for tests.
    ``fold`` is the operator on constants, ``cost`` what it costs in a kernel. ``function`` is the name by which the
    language calls it, empty where it has a sign or a word, with ``fewest`` to ``most`` arguments (None: no limit).
    ``strength`` is that of its sign or word. e^(``rate`` · x) is an exponential. Of a comparison ``opposite`` is the
    one that holds where it does not (NaN aside), ``flipped`` the one of swapped operands.
    """

    name: str
    spelling: str
    typing: TypingRule
    meaning: Callable[..., Any]
    interval: Callable[..., Range]
    samples: Samples
    fold: Folding
    _: KW_ONLY
    derivative: Derivative | None = None
    cost: Cost = ONE_INSTRUCTION
    c: str = ""
    interval_c: str = ""
    arity: int = 0
    function: str = ""
    most: int | None = 0
    strength: Strength = Strength.CALL
    opposite: str = ""
    flipped: str = ""
    rate: float = 0.0
    kink: Callable[..., float] = smooth

    def __post_init__(self) -> None:
        """C++ spells it by its name unless said otherwise, and the samples show how many arguments it takes.

        A spelling that is a name is a function's; ``most`` is the row's arity unless said otherwise.
        """
        arity = self.arity or len(self.samples.floats or self.samples.ints)
        called = self.spelling if self.spelling.isidentifier() and self.spelling not in _WORDS else ""
        found = {"arity": arity, "c": self.c or self.name, "interval_c": self.interval_c or self.name}
        found |= {"function": self.function or called, "most": arity if self.most == 0 else self.most}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def fewest(self) -> int:
        """Arguments that the language's function takes at least."""
        return max(self.arity, 1)

    @property
    def is_comparison(self) -> bool:
        """Whether it compares two values of one type."""
        return bool(self.opposite)

    @property
    def is_infix(self) -> bool:
        """Whether ``c`` is an operator sign and no function name."""
        return not (self.c[0].isalpha() or self.c[0] == "_")

    def signature(self, types: tuple[ScalarType, ...]) -> Signature:
        """The promoted operand types and the result type; raises ``TypingError``."""
        if self.arity >= 0 and len(types) != self.arity:
            raise TypingError(f"'{self.spelling}' takes {_count(self.arity)}, {len(types)} given")
        if not types:
            raise TypingError(f"'{self.spelling}' takes at least 1 argument, none given")
        return self.typing(self.spelling, types)


row = Operator  # as the tables are written


def _count(n: int) -> str:
    return f"{n} argument" if n == 1 else f"{n} arguments"


def either(on_ints: Callable[..., Range], on_others: Callable[..., Range]) -> Callable[..., Range]:
    """The range rule of an operator that is typed by ``numeric``, on floats, too, or by ``bitwise``, on bools, too."""

    def rule(*args: Range) -> Range:
        return on_ints(*args) if isinstance(args[0], IntRange) else on_others(*args)

    return rule


# Formulas: float nodes, written without the table ---------------------------------------------------------------------

ONE = literal(1.0)
ZERO = literal(0.0)
HALF = literal(0.5)
MINUS_ONE = literal(-1.0)


def real_node(op: str, *args: Expr | float) -> Expr:
    """A float node over float arguments."""
    return Apply(FLOAT, op=op, args=tuple(as_expr(a) for a in args))


def bool_node(op: str, *args: Expr | float) -> Expr:
    """A comparison of floats, or logic."""
    return Apply(BOOL, op=op, args=tuple(as_expr(a) for a in args))


def as_expr(x: Expr | float) -> Expr:
    """A Python float as a literal."""
    return x if isinstance(x, Expr) else literal(float(x))


def partials(*formulas: Callable[..., Expr] | Expr) -> Derivative:
    """∂/∂args[k] is ``formulas[k]``: a function of the arguments, or a constant."""

    def derivative(args: tuple[Expr, ...], k: int) -> Expr:
        formula = formulas[k]
        return formula if isinstance(formula, Expr) else formula(*args)

    return derivative


FLAT = partials(ZERO, ZERO)  # step functions
