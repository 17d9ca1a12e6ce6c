"""What each pointer of ``struct Arguments`` points to: an address and the bytes that a kernel may touch behind it.

In: the layout, the head dimension and the values of one call. Out: a mapping by field name, without null pointers and
without the workspace. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashgen.hosts.kernel import ArgumentLayout, Values
from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import FACTORS, PLACES
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Field, Operand, span
from flashgen.kinds.ragged import STARTS
from flashgen.plan.arguments import (
    dimension_field,
    gradient_field,
    param_place_field,
    stored_field,
    stride_field,
    table_field,
    tensor_field,
)

_CAPTURED_BYTES = {"float": 4, "fg::f16": 2, "fg::bf16": 2, "int32_t": 4, "int64_t": 8, "bool": 1}


def extents(
    layout: ArgumentLayout, head_dim: HeadDim, values: Values, operands: Mapping[str, Operand] = OPERANDS
) -> Mapping[str, tuple[int, int]]:
    """Address and bytes of every tensor of the call."""
    known = layout.ints(values)
    found = {}
    for field in layout.fields:
        if "pointer" in field.kind and field.name != "workspace" and known[field.name]:
            found[field.name] = (known[field.name], _bytes(field, head_dim, known, operands))
    return found


def _bytes(field: Field, head_dim: HeadDim, known: Mapping[str, int], operands: Mapping[str, Operand]) -> int:
    operand = operands.get(field.name)
    if operand is not None:
        return operand.known_bytes(known) * operand.reach(head_dim, known)
    match field.name:
        case "seed_at":
            return 8
        case name if name in STARTS:
            return 4 * (known["batch"] + 1)
        case "block_table":
            return 4 * known["batch"] * known["table_columns"]
        case name if name in PLACES or name.startswith(table_field("")):
            return 4 * known["batch"]
        case name if name in FACTORS:
            return 4 * known["batch"] * known["kv_heads"]
        case name if name.startswith(param_place_field("")):
            return 4
        case name if name.startswith(gradient_field("")):
            return 4 * math.prod(_dimensions(name.removeprefix(gradient_field("")), known))
        case name if name.startswith(stored_field("")):
            return _CAPTURED_BYTES[field.element] * math.prod(_dimensions(name.removeprefix(stored_field("")), known))
        case name:
            captured = name.removeprefix(tensor_field(""))
            dimensions = _dimensions(captured, known)
            strides = tuple(known[stride_field(captured, axis)] for axis in range(len(dimensions)))
            # A zero stands for what has no elements.
            return _CAPTURED_BYTES[field.element] * max(span(dimensions, strides, 1), 1)


def _dimensions(captured: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """The dimensions of a captured tensor; none for a param."""
    found: list[int] = []
    while dimension_field(captured, len(found)) in known:
        found.append(known[dimension_field(captured, len(found))])
    return tuple(found)
