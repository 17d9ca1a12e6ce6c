"""What a form of weights says of a row, over tensors. In: a ``Form`` and tensors. Out: tensors, differentiable."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.operators import OPERATORS
from flashgen.ir.weights import D_PROBABILITY, DELTA, INVERSE, PROBABILITY, TOTAL, WEIGHT, Form
from flashgen.reference.namespace import TorchNamespace


def term(form: Form, weight: Tensor) -> Tensor:
    """What each weight adds to its row's total."""
    return _value(form.term, {WEIGHT: weight}, weight)


def denominator(form: Form, total: Tensor) -> Tensor:
    """Z of each total."""
    return _value(form.denominator, {TOTAL: total}, total)


def share(form: Form, probability: Tensor) -> Tensor:
    """∂Z/∂w of each pair, by its P before dropout."""
    return _value(form.share, {PROBABILITY: probability}, probability)


def backward(form: Form, P: Tensor, dP: Tensor, delta: Tensor, inverse: Tensor) -> Tensor:
    """dS of exponential weights, dw of others; ``inverse`` is 1 / Z."""
    return _value(form.backward, {PROBABILITY: P, D_PROBABILITY: dP, DELTA: delta, INVERSE: inverse}, P)


def _value(formula: Expr | None, values: Mapping[Expr, Tensor], like: Tensor) -> Tensor:
    match formula:
        case Literal(value=value):
            return like.new_full((), float(value))
        case Apply(op=op, args=args):
            found: Tensor = OPERATORS[op].meaning(TorchNamespace(like.dtype), *(_value(a, values, like) for a in args))
            return found
        case Expr():
            return values[formula]
    raise AssertionError("a form without a denominator has no such formula")
