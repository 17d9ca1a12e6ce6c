"""Rows of the operator table: exponentials, logarithms, roots, activations, trigonometry, rounding.

Stage: IR. In: nothing. Out: ``ROWS``. All take numbers, promoted to float, and give floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashgen.ir import interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.operators_base import (
    HALF,
    ONE,
    ZERO,
    ArrayNamespace,
    Operator,
    Samples,
    smooth,
    bool_node,
    flat,
    real,
    real_node,
)
from flashgen.ir.interval import Range

LN2 = math.log(2.0)
_SQRT_HALF = math.sqrt(0.5)


# ∂exp x = exp x
def _d_exp(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("exp", *args)


# ∂2^x = ln 2 · 2^x
def _d_exp2(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("mul", LN2, real_node("exp2", *args))


# ∂ln x = 1/x
def _d_log(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("div", ONE, *args)


# ∂log₂ x = 1/(x ln 2)
def _d_log2(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("div", 1.0 / LN2, *args)


# ∂ln(1 + x) = 1/(1 + x)
def _d_log1p(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("div", ONE, real_node("add", ONE, *args))


# ∂√x = 1/(2√x)
def _d_sqrt(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("div", HALF, real_node("sqrt", *args))


# ∂x^(-1/2) = -1/2 (x^(-1/2))³
def _d_rsqrt(args: tuple[Expr, ...], k: int) -> Expr:
    r = real_node("rsqrt", *args)
    return real_node("mul", -0.5, real_node("mul", r, real_node("mul", r, r)))


# ∂tanh x = 1 - tanh² x
def _d_tanh(args: tuple[Expr, ...], k: int) -> Expr:
    t = real_node("tanh", *args)
    return real_node("sub", ONE, real_node("mul", t, t))


# ∂σ(x) = σ(x) (1 - σ(x))
def _d_sigmoid(args: tuple[Expr, ...], k: int) -> Expr:
    y = real_node("sigmoid", *args)
    return real_node("mul", y, real_node("sub", ONE, y))


# silu x = x σ(x);  ∂ = σ(x) (1 + x (1 - σ(x)))
def _silu(xp: ArrayNamespace, x: Any) -> Any:
    return x * xp.sigmoid(x)


def _d_silu(args: tuple[Expr, ...], k: int) -> Expr:
    y = real_node("sigmoid", *args)
    return real_node("mul", y, real_node("add", ONE, real_node("mul", args[0], real_node("sub", ONE, y))))


# relu x = max(x, 0), NaN stays;  ∂ = [x > 0]
def _relu(xp: ArrayNamespace, x: Any) -> Any:
    return xp.where(x <= 0, 0.0, x)


def _d_relu(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("where", bool_node("gt", args[0], ZERO), ONE, ZERO)


# gelu(-inf) is NaN here and the limit, 0, in kernels.
# gelu x = x Φ(x) = x (1 + erf(x/√2))/2;  ∂ = Φ(x) + x exp(-x²/2)/√(2π)
def _gelu(xp: ArrayNamespace, x: Any) -> Any:
    return 0.5 * x * (1.0 + xp.erf(x * _SQRT_HALF))


def _d_gelu(args: tuple[Expr, ...], k: int) -> Expr:
    x = args[0]
    cdf = real_node("mul", HALF, real_node("add", ONE, real_node("erf", real_node("mul", x, _SQRT_HALF))))
    bell = real_node("exp", real_node("mul", -0.5, real_node("mul", x, x)))
    return real_node("add", cdf, real_node("mul", real_node("mul", 1 / math.sqrt(2 * math.pi), x), bell))


# ∂erf x = 2/√π exp(-x²)
def _d_erf(args: tuple[Expr, ...], k: int) -> Expr:
    x = args[0]
    bell = real_node("exp", real_node("neg", real_node("mul", x, x)))
    return real_node("mul", 2 / math.sqrt(math.pi), bell)


# softplus x = log(1 + e^x) = max(x, 0) + log1p(e^-|x|);  ∂ = σ(x)
def _softplus(xp: ArrayNamespace, x: Any) -> Any:
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))


def _d_softplus(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("sigmoid", *args)


# ∂sin x = cos x, ∂cos x = -sin x
def _d_sin(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("cos", *args)


def _d_cos(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("neg", real_node("sin", *args))


def _step_kink(x: float) -> float:
    return abs(2 * x - round(2 * x)) / 2


def _function(
    name: str,
    meaning: Callable[..., Any],
    derivative: Callable[[tuple[Expr, ...], int], Expr],
    ranges: Callable[..., Range],
    low: float,
    high: float,
    kink: Callable[..., float] = smooth,
) -> Operator:
    """A row of float → float that every language calls by the same name."""
    samples = Samples(floats=((low, high),))
    return Operator(name, 1, name, real, meaning, derivative, ranges, name, name, samples, kink)


ROWS = (
    _function("exp", lambda xp, x: xp.exp(x), _d_exp, interval_float.exp, -6.0, 6.0),
    _function("exp2", lambda xp, x: xp.exp2(x), _d_exp2, interval_float.exp2, -6.0, 6.0),
    _function("log", lambda xp, x: xp.log(x), _d_log, interval_float.log, 0.05, 9.0),
    _function("log2", lambda xp, x: xp.log2(x), _d_log2, interval_float.log2, 0.05, 9.0),
    _function("log1p", lambda xp, x: xp.log1p(x), _d_log1p, interval_float.log1p, -0.9, 9.0),
    _function("sqrt", lambda xp, x: xp.sqrt(x), _d_sqrt, interval_float.sqrt, 0.05, 9.0),
    _function("rsqrt", lambda xp, x: xp.rsqrt(x), _d_rsqrt, interval_float.rsqrt, 0.05, 9.0),
    _function("tanh", lambda xp, x: xp.tanh(x), _d_tanh, interval_float.tanh, -5.0, 5.0),
    _function("sigmoid", lambda xp, x: xp.sigmoid(x), _d_sigmoid, interval_float.sigmoid, -9.0, 9.0),
    _function("silu", _silu, _d_silu, interval_float.silu, -9.0, 9.0),
    _function("relu", _relu, _d_relu, interval_float.relu, -3.0, 3.0, abs),
    _function("gelu", _gelu, _d_gelu, interval_float.gelu, -5.0, 5.0),
    _function("erf", lambda xp, x: xp.erf(x), _d_erf, interval_float.erf, -3.0, 3.0),
    _function("softplus", _softplus, _d_softplus, interval_float.softplus, -9.0, 9.0),
    _function("sin", lambda xp, x: xp.sin(x), _d_sin, interval_float.sin, -9.0, 9.0),
    _function("cos", lambda xp, x: xp.cos(x), _d_cos, interval_float.cos, -9.0, 9.0),
    _function("floor", lambda xp, x: xp.floor(x), flat, interval_float.floor, -9.0, 9.0, _step_kink),
    _function("ceil", lambda xp, x: xp.ceil(x), flat, interval_float.ceil, -9.0, 9.0, _step_kink),
    _function("round", lambda xp, x: xp.round(x), flat, interval_float.round_, -9.0, 9.0, _step_kink),
)
