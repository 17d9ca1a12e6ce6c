"""The sums of a row of weights, over tensors. In: a form of weights (``ir/weights.py``) and tensors. Out: tensors,
differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.operators import OPERATORS
from flashgen.ir.weights import TOTAL, WEIGHT, Form
from flashgen.reference.namespace import TorchNamespace


def term(form: Form, weight: Tensor) -> Tensor:
    """The term that each weight adds to its row's total."""
    return value_of(form.term, {WEIGHT: weight}, weight)


def denominator(form: Form, total: Tensor) -> Tensor:
    """The denominator Z for each total."""
    return value_of(form.denominator, {TOTAL: total}, total)


def value_of(formula: Expr | None, values: Mapping[Expr, Tensor], like: Tensor) -> Tensor:
    """The value of a formula of a form of weights, in the type of ``like``."""
    match formula:
        case Literal(value=value):
            return like.new_full((), float(value))
        case Apply(op=op, args=args):
            operands = (value_of(each, values, like) for each in args)
            found: Tensor = OPERATORS[op].meaning(TorchNamespace(like.dtype), *operands)
            return found
        case Expr():
            return values[formula]
    raise AssertionError("a form without a denominator has no such formula")
