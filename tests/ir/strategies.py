"""Random typed expressions over i, j, Nk (ints), s, p (floats) and a bool tensor, for property tests."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from flashgen.ir.build import apply, power
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, literal, score_input, size, substitute
from flashgen.ir.types import ScalarType

B, ROW, J, NK, S = index("b"), index("i"), index("j"), size("Nk"), score_input("s")
P = Symbol(ScalarType.FLOAT, name="p", kind=SymbolKind.PARAM)

_INTS = st.sampled_from([ROW, J, NK]) | st.integers(-9, 70).map(literal)
# Dyadic constants: moving them between products rounds nothing, so that steps stay where they are.
_FLOATS = st.sampled_from([S, P]) | st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 0.25, -3.0, 1.5]).map(literal)
_VALID = Load(ScalarType.BOOL, tensor="valid", indices=(J,))
_BOOLS = st.sampled_from([literal(True), literal(False), _VALID])

_INT_OPS = ("add", "sub", "mul", "floordiv", "mod", "min", "max", "bitand", "bitor", "bitxor", "ceildiv", "shl", "shr")
_FLOAT_OPS = ("add", "sub", "mul", "div", "min", "max", "add", "mul")
_FUNCTIONS = (
    "neg", "abs", "exp", "log", "log1p", "sqrt", "tanh", "sigmoid", "silu", "relu", "gelu", "erf", "softplus", "sin",
    "cos", "exp2", "rsqrt", "log2",
)  # fmt: skip
_STEPS = ("floor", "ceil", "round", "sign")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


@cache
def ints(depth: int) -> st.SearchStrategy[Expr]:
    """Int expressions."""
    if depth == 0:
        return _INTS
    inner = ints(depth - 1)
    return (
        _INTS
        | st.builds(apply, st.sampled_from(_INT_OPS), inner, inner)
        | st.builds(apply, st.sampled_from(("neg", "abs", "sign", "popcount")), inner)
        | st.builds(apply, st.just("clamp"), inner, inner, inner)
        | st.builds(apply, st.just("where"), bools(depth - 1), inner, inner)
        | st.builds(apply, st.just("hash"), inner, inner)
        | st.builds(lambda x, n: power(x, literal(n)), inner, st.integers(0, 3))
        | st.builds(apply, st.just("to_int"), floats(depth - 1) | bools(depth - 1))
    )


@cache
def floats(depth: int, *, steps: bool = True) -> st.SearchStrategy[Expr]:
    """Float expressions; without ``steps`` only those that are continuous in s and p almost everywhere."""
    if depth == 0:
        return _FLOATS
    inner = floats(depth - 1, steps=steps)
    functions = _FUNCTIONS + _STEPS if steps else _FUNCTIONS
    return (
        _FLOATS
        | st.builds(apply, st.sampled_from(_FLOAT_OPS), inner, inner)
        | st.builds(apply, st.sampled_from(functions), inner)
        | st.builds(apply, st.just("clamp"), inner, inner, inner)
        | st.builds(apply, st.just("where"), bools(depth - 1), inner, inner)
        | st.builds(lambda x, n: power(x, literal(n)), inner, st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, 4.0]))
        | st.builds(apply, st.just("to_float"), ints(depth - 1) if steps else _INTS)
    )


@cache
def bools(depth: int) -> st.SearchStrategy[Expr]:
    """Conditions."""
    if depth == 0:
        return _BOOLS
    inner = bools(depth - 1)
    return (
        _BOOLS
        | st.builds(apply, st.sampled_from(_COMPARISONS), ints(depth - 1), ints(depth - 1))
        | st.builds(apply, st.sampled_from(_COMPARISONS), floats(depth - 1), floats(depth - 1))
        | st.builds(apply, st.sampled_from(("and", "or", "eq", "ne", "bitxor")), inner, inner)
        | st.builds(apply, st.just("not"), inner)
    )


@st.composite
def conditions_on_positions(draw: st.DrawFn, depth: int) -> Expr:
    """Masks: up to four comparisons of ints, joined. In place of s and p stand the positions as floats."""
    valid = Load(ScalarType.BOOL, tensor="valid", indices=(B, J))
    inputs = {S: apply("to_float", ROW), P: apply("to_float", J), _VALID: valid}
    result: Expr | None = None
    for _ in range(draw(st.integers(1, 4))):
        x, y = draw(ints(depth - 1)), draw(ints(depth - 1))
        comparison = substitute(apply(draw(st.sampled_from(_COMPARISONS)), x, y), inputs)
        join = draw(st.sampled_from(("and", "or")))
        result = comparison if result is None else apply(join, result, comparison)
        result = apply("not", result) if draw(st.booleans()) else result
    assert result is not None
    return result
