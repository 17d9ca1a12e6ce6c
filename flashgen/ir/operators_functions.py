"""Rows of the operator table: exponentials, logarithms, roots, activations, trigonometry, rounding.

Stage: IR. In: nothing. Out: ``ROWS``. All take numbers, promoted to float, and give floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashgen.ir import interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.interval import Range
from flashgen.ir.operators_base import (
    HALF,
    ONE,
    ZERO,
    ArrayNamespace,
    Operator,
    Samples,
    bool_node,
    partials,
    real,
    real_node,
    row,
    smooth,
)

LN2 = math.log(2.0)
_SQRT_HALF = math.sqrt(0.5)


# ∂exp x = exp x
def _by_exp(x: Expr) -> Expr:
    return real_node("exp", x)


# ∂2^x = ln 2 · 2^x
def _by_exp2(x: Expr) -> Expr:
    return real_node("mul", LN2, real_node("exp2", x))


# ∂ln x = 1/x
def _by_log(x: Expr) -> Expr:
    return real_node("div", ONE, x)


# ∂log₂ x = 1/(x ln 2)
def _by_log2(x: Expr) -> Expr:
    return real_node("div", 1.0 / LN2, x)


# ∂ln(1 + x) = 1/(1 + x)
def _by_log1p(x: Expr) -> Expr:
    return real_node("div", ONE, real_node("add", ONE, x))


# ∂√x = 1/(2√x)
def _by_sqrt(x: Expr) -> Expr:
    return real_node("div", HALF, real_node("sqrt", x))


# ∂x^(-1/2) = -1/2 (x^(-1/2))³
def _by_rsqrt(x: Expr) -> Expr:
    r = real_node("rsqrt", x)
    return real_node("mul", -0.5, real_node("mul", r, real_node("mul", r, r)))


# ∂tanh x = 1 - tanh² x
def _by_tanh(x: Expr) -> Expr:
    t = real_node("tanh", x)
    return real_node("sub", ONE, real_node("mul", t, t))


# ∂σ(x) = σ(x) (1 - σ(x))
def _by_sigmoid(x: Expr) -> Expr:
    y = real_node("sigmoid", x)
    return real_node("mul", y, real_node("sub", ONE, y))


# silu x = x σ(x);  ∂ = σ(x) (1 + x (1 - σ(x)))
def _silu(xp: ArrayNamespace, x: Any) -> Any:
    return x * xp.sigmoid(x)


def _by_silu(x: Expr) -> Expr:
    y = real_node("sigmoid", x)
    return real_node("mul", y, real_node("add", ONE, real_node("mul", x, real_node("sub", ONE, y))))


# relu x = max(x, 0), NaN stays;  ∂ = [x > 0]
def _relu(xp: ArrayNamespace, x: Any) -> Any:
    return xp.where(x <= 0, 0.0, x)


def _by_relu(x: Expr) -> Expr:
    return real_node("where", bool_node("gt", x, ZERO), ONE, ZERO)


# gelu(-inf) is NaN here and the limit, 0, in kernels.
# gelu x = x Φ(x) = x (1 + erf(x/√2))/2;  ∂ = Φ(x) + x exp(-x²/2)/√(2π)
def _gelu(xp: ArrayNamespace, x: Any) -> Any:
    return 0.5 * x * (1.0 + xp.erf(x * _SQRT_HALF))


def _by_gelu(x: Expr) -> Expr:
    cdf = real_node("mul", HALF, real_node("add", ONE, real_node("erf", real_node("mul", x, _SQRT_HALF))))
    bell = real_node("exp", real_node("mul", -0.5, real_node("mul", x, x)))
    return real_node("add", cdf, real_node("mul", real_node("mul", 1 / math.sqrt(2 * math.pi), x), bell))


# ∂erf x = 2/√π exp(-x²)
def _by_erf(x: Expr) -> Expr:
    bell = real_node("exp", real_node("neg", real_node("mul", x, x)))
    return real_node("mul", 2 / math.sqrt(math.pi), bell)


# softplus x = log(1 + e^x) = max(x, 0) + log1p(e^-|x|);  ∂ = σ(x)
def _softplus(xp: ArrayNamespace, x: Any) -> Any:
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))


def _by_softplus(x: Expr) -> Expr:
    return real_node("sigmoid", x)


# ∂sin x = cos x, ∂cos x = -sin x
def _by_sin(x: Expr) -> Expr:
    return real_node("cos", x)


def _by_cos(x: Expr) -> Expr:
    return real_node("neg", real_node("sin", x))


# The distance to the nearest half, for tests.
def _step_kink(x: float) -> float:
    return abs(2 * x - round(2 * x)) / 2


def _function(
    name: str,
    meaning: Callable[..., Any],
    formula: Callable[..., Expr] | Expr,
    interval: Callable[..., Range],
    domain: tuple[float, float],
    kink: Callable[..., float] = smooth,
) -> Operator:
    """A row of float → float that every language calls by the same name."""
    return row(name, name, real, meaning, interval, Samples(floats=(domain,)), derivative=partials(formula), kink=kink)


_POSITIVE, _NEAR, _WIDE = (0.05, 9.0), (-5.0, 5.0), (-9.0, 9.0)

ROWS = (
    _function("exp", lambda xp, x: xp.exp(x), _by_exp, interval_float.exp, _NEAR),
    _function("exp2", lambda xp, x: xp.exp2(x), _by_exp2, interval_float.exp2, _NEAR),
    _function("log", lambda xp, x: xp.log(x), _by_log, interval_float.log, _POSITIVE),
    _function("log2", lambda xp, x: xp.log2(x), _by_log2, interval_float.log2, _POSITIVE),
    _function("log1p", lambda xp, x: xp.log1p(x), _by_log1p, interval_float.log1p, (-0.9, 9.0)),
    _function("sqrt", lambda xp, x: xp.sqrt(x), _by_sqrt, interval_float.sqrt, _POSITIVE),
    _function("rsqrt", lambda xp, x: xp.rsqrt(x), _by_rsqrt, interval_float.rsqrt, _POSITIVE),
    _function("tanh", lambda xp, x: xp.tanh(x), _by_tanh, interval_float.tanh, _NEAR),
    _function("sigmoid", lambda xp, x: xp.sigmoid(x), _by_sigmoid, interval_float.sigmoid, _WIDE),
    _function("silu", _silu, _by_silu, interval_float.silu, _WIDE),
    _function("relu", _relu, _by_relu, interval_float.relu, _NEAR, abs),
    _function("gelu", _gelu, _by_gelu, interval_float.gelu, _NEAR),
    _function("erf", lambda xp, x: xp.erf(x), _by_erf, interval_float.erf, _NEAR),
    _function("softplus", _softplus, _by_softplus, interval_float.softplus, _WIDE),
    _function("sin", lambda xp, x: xp.sin(x), _by_sin, interval_float.sin, _WIDE),
    _function("cos", lambda xp, x: xp.cos(x), _by_cos, interval_float.cos, _WIDE),
    _function("floor", lambda xp, x: xp.floor(x), ZERO, interval_float.floor, _WIDE, _step_kink),
    _function("ceil", lambda xp, x: xp.ceil(x), ZERO, interval_float.ceil, _WIDE, _step_kink),
    _function("round", lambda xp, x: xp.round(x), ZERO, interval_float.round_, _WIDE, _step_kink),
)
