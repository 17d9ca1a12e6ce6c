"""Rows of the operator table: exponentials, logarithms, roots, activations, trigonometry, rounding.

Stage: IR. In: nothing. Out: ``ROWS``. All take numbers, promoted to float, and give floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashgen.ir import interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.interval import Range
from flashgen.ir.interval_float import increasing, logistic
from flashgen.ir.operators_base import (
    HALF,
    ONE,
    ONE_INSTRUCTION,
    ZERO,
    ArrayNamespace,
    Cost,
    Folding,
    Library,
    Operator,
    Samples,
    asked,
    bool_node,
    partials,
    real,
    real_node,
    row,
    smooth,
)

LN2 = math.log(2.0)
_SQRT_HALF = math.sqrt(0.5)
_erf = np.frompyfunc(math.erf, 1, 1)


def _same(name: str) -> Library:
    """A function that NumPy, too, has by this name."""
    return Library((name,), getattr(np, name))


_RSQRT = Library(("rsqrt",), lambda x: 1 / np.sqrt(x))
_SIGMOID = Library(("sigmoid", "special_expit", "expit"), lambda x: 1 / (1 + np.exp(-x)))
_ATAN = Library(("atan", "arctan"), np.arctan)
_ERF = Library(("erf",), lambda x: np.asarray(_erf(x)).astype(np.asarray(x).dtype))


def _square(x: Expr) -> Expr:
    return real_node("mul", x, x)


# ∂x^(-1/2) = -1/2 (x^(-1/2))³
def _by_rsqrt(x: Expr) -> Expr:
    r = real_node("rsqrt", x)
    return real_node("mul", -0.5, real_node("mul", r, _square(r)))


# ∂σ(x) = σ(x) (1 - σ(x))
def _by_sigmoid(x: Expr) -> Expr:
    y = real_node("sigmoid", x)
    return real_node("mul", y, real_node("sub", ONE, y))


# silu x = x σ(x);  ∂ = σ(x) (1 + x (1 - σ(x)))
def _silu(xp: ArrayNamespace, x: Any) -> Any:
    return x * _SIGMOID(xp, x)


def _by_silu(x: Expr) -> Expr:
    y = real_node("sigmoid", x)
    return real_node("mul", y, real_node("add", ONE, real_node("mul", x, real_node("sub", ONE, y))))


# relu x = max(x, 0), NaN stays;  ∂ = [x > 0]
def _relu(xp: ArrayNamespace, x: Any) -> Any:
    return xp.where(x <= 0, 0.0, x)


# gelu x = x Φ(x) = x (1 + erf(x/√2))/2;  ∂ = Φ(x) + x exp(-x²/2)/√(2π). Below -40 the factor is 0.
def _gelu(xp: ArrayNamespace, x: Any) -> Any:
    x = xp.where(x < -40.0, -40.0, x)
    return 0.5 * x * (1.0 + _ERF(xp, x * _SQRT_HALF))


def _by_gelu(x: Expr) -> Expr:
    cdf = real_node("mul", HALF, real_node("add", ONE, real_node("erf", real_node("mul", x, _SQRT_HALF))))
    bell = real_node("exp", real_node("mul", -0.5, _square(x)))
    return real_node("add", cdf, real_node("mul", real_node("mul", 1 / math.sqrt(2 * math.pi), x), bell))


# softplus x = log(1 + e^x) = max(x, 0) + log1p(e^-|x|);  ∂ = σ(x). By a branch: derivatives of max and |x| at 0 are not
# those of softplus, from the second on.
def _softplus(xp: ArrayNamespace, x: Any) -> Any:
    above = x > 0
    return xp.where(above, x, 0.0) + _same("log1p")(xp, _same("exp")(xp, xp.where(above, -x, x)))


# ∂f(x) of f by name, where that is short; of step functions 0.
_DERIVATIVES: Mapping[str, Callable[[Expr], Expr] | Expr] = {
    "exp": lambda x: real_node("exp", x),
    "exp2": lambda x: real_node("mul", LN2, real_node("exp2", x)),
    "log": lambda x: real_node("div", ONE, x),
    "log2": lambda x: real_node("div", 1.0 / LN2, x),
    "log1p": lambda x: real_node("div", ONE, real_node("add", ONE, x)),
    "sqrt": lambda x: real_node("div", HALF, real_node("sqrt", x)),
    "rsqrt": _by_rsqrt,
    "tanh": lambda x: real_node("sub", ONE, _square(real_node("tanh", x))),
    "sigmoid": _by_sigmoid,
    "silu": _by_silu,
    "relu": lambda x: real_node("where", bool_node("gt", x, ZERO), ONE, ZERO),
    "gelu": _by_gelu,
    "erf": lambda x: real_node("mul", 2 / math.sqrt(math.pi), real_node("exp", real_node("neg", _square(x)))),
    "softplus": lambda x: real_node("sigmoid", x),
    "sin": lambda x: real_node("cos", x),
    "cos": lambda x: real_node("neg", real_node("sin", x)),
    "atan": lambda x: real_node("div", ONE, real_node("add", ONE, _square(x))),
    **dict.fromkeys(("floor", "ceil", "round"), ZERO),
}


# The distance to the nearest half, for tests.
def _step_kink(x: float) -> float:
    return abs(2 * x - round(2 * x)) / 2


# On constants --------------------------------------------------------------------------------------------------------


def _growth(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: math.inf if x == math.inf else function(x)


def _logarithm(function: Callable[[float], float], pole: float = 0.0) -> Callable[[float], float]:
    return lambda x: -math.inf if x == pole else function(x)


def _step(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: float(x) if math.isinf(x) else float(function(x))


def _inverse_root(x: float) -> float:
    return math.inf if x == 0 else 1 / math.sqrt(x)


def _log_1_exp(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _times_normal(x: float) -> float:
    return 0.0 if x == -math.inf else 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _times_logistic(x: float) -> float:
    return 0.0 if x == -math.inf else x * logistic(x)


# Rows ----------------------------------------------------------------------------------------------------------------


def _function(
    name: str,
    meaning: Callable[..., Any],
    interval: Callable[..., Range],
    domain: tuple[float, float],
    fold: Callable[[float], float],
    cost: Cost,
    *,
    rate: float = 0.0,
    kink: Callable[..., float] = smooth,
) -> Operator:
    """A row of float → float that every language calls by the same name."""
    return row(
        *(name, name, real, meaning, interval, Samples(floats=(domain,)), Folding(floats=fold, overflows=rate > 0)),
        derivative=partials(_DERIVATIVES[name]),
        cost=cost,
        rate=rate,
        kink=kink,
    )


_POSITIVE, _NEAR, _WIDE = (0.05, 9.0), (-5.0, 5.0), (-9.0, 9.0)
_EXP, _EXP2, _LOG, _LOG2 = _growth(math.exp), _growth(math.exp2), _logarithm(math.log), _logarithm(math.log2)
_LOG1P = _logarithm(math.log1p, -1.0)
_ON_CPUS = (0, 9)  # of tanh: a polynomial, where arguments are small

ROWS = (
    _function("exp", _same("exp"), increasing(math.exp, 0.0), _NEAR, _EXP, Cost(1, 1), rate=1.0),
    _function("exp2", _same("exp2"), increasing(math.exp2, 0.0), _NEAR, _EXP2, Cost(1, 0), rate=LN2),
    _function("log", _same("log"), interval_float.log, _POSITIVE, _LOG, Cost(1, 1)),
    _function("log2", _same("log2"), interval_float.log2, _POSITIVE, _LOG2, Cost(1, 0)),
    _function("log1p", _same("log1p"), interval_float.log1p, (-0.9, 9.0), _LOG1P, Cost(1, 6)),
    _function("sqrt", _same("sqrt"), interval_float.sqrt, _POSITIVE, math.sqrt, Cost(1, 2)),
    _function("rsqrt", _RSQRT, interval_float.rsqrt, _POSITIVE, _inverse_root, Cost(1, 0)),
    _function("tanh", _same("tanh"), increasing(math.tanh), _NEAR, math.tanh, Cost(2, 4, _ON_CPUS)),
    _function("sigmoid", _SIGMOID, increasing(logistic, 0.0), _WIDE, logistic, Cost(2, 2)),
    _function("silu", _silu, interval_float.silu, _WIDE, _times_logistic, Cost(2, 3)),
    _function("relu", _relu, interval_float.relu, _NEAR, lambda x: max(float(x), 0.0), ONE_INSTRUCTION, kink=abs),
    _function("gelu", _gelu, interval_float.gelu, _NEAR, _times_normal, Cost(1, 14)),
    _function("erf", _ERF, increasing(math.erf), _NEAR, math.erf, Cost(1, 14)),
    _function("softplus", _softplus, increasing(_log_1_exp, 0.0), _WIDE, _log_1_exp, Cost(2, 6)),
    _function("sin", _same("sin"), interval_float.sin, _WIDE, math.sin, Cost(1, 3)),
    _function("cos", _same("cos"), interval_float.cos, _WIDE, math.cos, Cost(1, 3)),
    _function("atan", _ATAN, increasing(math.atan), _NEAR, math.atan, Cost(1, 16)),
    _function(
        "floor", asked("floor"), interval_float.floor, _WIDE, _step(math.floor), ONE_INSTRUCTION, kink=_step_kink
    ),
    _function("ceil", asked("ceil"), interval_float.ceil, _WIDE, _step(math.ceil), ONE_INSTRUCTION, kink=_step_kink),
    _function("round", asked("round"), interval_float.round_, _WIDE, _step(round), ONE_INSTRUCTION, kink=_step_kink),
)
