"""Gives a spec the masks that a call brings: ``torch.nn.MultiheadAttention``'s padding and attention masks.

In: an ``AttentionSpec`` and which masks come, in which form. Out: the spec with a captured tensor for each, dropping
pairs where it is boolean, added to the score where it is a float.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, index, size
from flashgen.ir.spec import AttentionSpec, CapturedTensor
from flashgen.ir.types import ElementType, ScalarType

PADDING, PAIRS = "key_padding_mask", "attn_mask"
# The name of each mask's dimensions: which sizes, and which indices read it.
_PLACES = {
    (PADDING, 2): (("B", "Nk"), ("b", "j")),
    (PAIRS, 2): (("Nq", "Nk"), ("i", "j")),
    (PAIRS, 4): (("B", "H", "Nq", "Nk"), ("b", "h", "i", "j")),
}


class Form(NamedTuple):
    """One mask of a call: ``name`` is ``PADDING`` or ``PAIRS``; what is not boolean is added to the score."""

    name: str
    dimensions: int
    is_bool: bool


def masked(spec: AttentionSpec, masks: Iterable[Form], *, causal: bool) -> AttentionSpec:
    """The spec with the masks of a call. Raises ``ValueError`` where it has a tensor of a mask's name."""
    for form in masks:
        spec = _masked(spec, form)
    return replace(spec, mask=apply("and", spec.mask, apply("le", index("j"), index("i")))) if causal else spec


def _masked(spec: AttentionSpec, form: Form) -> AttentionSpec:
    taken = [*(tensor.name for tensor in spec.tensors), *(param.name for param in spec.params)]
    if form.name in taken:
        raise ValueError(f"'{form.name}' is a captured value of '{spec.name}' already; pass None")
    sizes, indices = _PLACES[form.name, form.dimensions]
    element = ElementType.BOOL if form.is_bool else ElementType.F32
    tensor = CapturedTensor(form.name, element, tuple(size(each) for each in sizes), grad=not form.is_bool)
    kind = ScalarType.BOOL if form.is_bool else ScalarType.FLOAT
    read: Expr = Load(kind, tensor=form.name, indices=tuple(index(each) for each in indices))
    spec = replace(spec, tensors=(*spec.tensors, tensor))
    if form.is_bool:
        return replace(spec, mask=apply("and", spec.mask, apply("not", read)))
    return replace(spec, score=apply("add", spec.score, read))
