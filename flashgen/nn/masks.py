"""Adds the masks of a call to a spec: ``torch.nn.MultiheadAttention``'s padding and attention masks.

In: an op, by its name, and the forms of the masks. Out: the op of the spec with a captured tensor for each mask, which
drops pairs where it is boolean, and is added to the score where it is float. It is made once, on the same backend, and
looked up by names and numbers alone, so that ``torch.compile`` does not trace its making.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import torch

from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, index, size
from flashgen.ir.spec import AttentionSpec, CapturedTensor
from flashgen.ir.types import ElementType
from flashgen.op.loading import load_spec
from flashgen.op.op import BaseOp

PADDING, PAIRS = "key_padding_mask", "attn_mask"
# The name of each mask's dimensions: which sizes, and which indices read it.
_PLACES = {
    (PADDING, 2): (("B", "Nk"), ("b", "j")),
    (PAIRS, 2): (("Nq", "Nk"), ("i", "j")),
    (PAIRS, 4): (("B", "H", "Nq", "Nk"), ("b", "h", "i", "j")),
}
# One mask of a call: ``PADDING`` or ``PAIRS``, how many dimensions it has, and whether it is boolean.
Form = tuple[str, int, bool]

# The ops, by names that they have here. Attributes, as torch.compile looks at each when it is asked for.
_OPS = SimpleNamespace()
_NAMES: dict[tuple[str, tuple[Form, ...], bool], str] = {}
_ORIGINS: dict[str, BaseOp] = {}
_LOCK = threading.Lock()


def origin_name(op: BaseOp) -> str:
    """The name by which ``masked_op`` knows an op; the same in every process."""
    return _ORIGINS.setdefault(op.name, op).name


def masked_op(origin: str, masks: tuple[Form, ...], causal: bool) -> BaseOp:
    """The op of a spec with the masks of a call. Raises what ``masked`` raises."""
    op: BaseOp = getattr(_OPS, _made(origin, masks, causal))
    return op


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made(origin: str, masks: tuple[Form, ...], causal: bool) -> str:
    """The name among ``_OPS`` of the op."""
    with _LOCK:
        name = _NAMES.get((origin, masks, causal))
        if name is None:
            op = _ORIGINS[origin]
            made = op.of_spec(masked(op.spec, masks, causal=causal), load_spec)
            name = _NAMES[origin, masks, causal] = f"op{len(_NAMES)}"
            setattr(_OPS, name, made)
        return name


def masked(spec: AttentionSpec, masks: Iterable[Form], *, causal: bool) -> AttentionSpec:
    """The spec with the masks of a call. Raises ``ValueError`` where it has a tensor of a mask's name."""
    for name, dimensions, is_bool in masks:
        if name in (*(tensor.name for tensor in spec.tensors), *(param.name for param in spec.params)):
            raise ValueError(f"'{name}' is a captured value of '{spec.name}' already; pass None")
        sizes, indices = _PLACES[name, dimensions]
        element = ElementType.BOOL if is_bool else ElementType.F32
        tensor = CapturedTensor(name, element, tuple(size(each) for each in sizes), grad=not is_bool)
        read: Expr = Load(element.scalar, tensor=name, indices=tuple(index(each) for each in indices))
        spec = replace(spec, tensors=(*spec.tensors, tensor))
        if is_bool:
            spec = replace(spec, mask=apply("and", spec.mask, apply("not", read)))
        else:
            spec = replace(spec, score=apply("add", spec.score, read))
    return replace(spec, mask=apply("and", spec.mask, apply("le", index("j"), index("i")))) if causal else spec
