"""What each pointer of ``struct Arguments`` points to: an address and the bytes that a kernel may touch behind it.

In: the layout, the head dimension and the values of one call. Out: a mapping by field name, without null pointers and
without the workspace. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashgen.ir.spec import HeadDim
from flashgen.plan.arguments import Field, dimension_field, stride_field
from flashgen.runtime.kernel import ArgumentLayout, Values
from flashgen.runtime.schedule import ELEMENT_BYTES, span

_CAPTURED_BYTES = {"float": 4, "fg::f16": 2, "fg::bf16": 2, "int32_t": 4, "int64_t": 8, "bool": 1}


def extents(layout: ArgumentLayout, head_dim: HeadDim, values: Values) -> Mapping[str, tuple[int, int]]:
    """Address and bytes of every tensor of the call."""
    known = {name: value for name, value in layout.named(values).items() if isinstance(value, int)}
    found = {}
    for field in layout.fields:
        if "pointer" in field.kind and field.name != "workspace" and known[field.name]:
            found[field.name] = (known[field.name], _bytes(field, head_dim, known))
    return found


def _bytes(field: Field, head_dim: HeadDim, known: Mapping[str, int]) -> int:
    size = ELEMENT_BYTES[known["element"]]
    heads, kv_heads = known["batch"] * known["heads"], known["batch"] * known["kv_heads"]
    queries, keys = heads * known["q_len"], kv_heads * known["kv_len"]
    match field.name:
        case "q" | "k" | "v" | "d_o" as name:
            counts = ("heads", "q_len") if name in ("q", "d_o") else ("kv_heads", "kv_len")
            strides = tuple(known[f"{name}_stride_{axis}"] for axis in "bhn")
            width = head_dim.qk if name in ("q", "k") else head_dim.v
            return size * span((known["batch"], *(known[each] for each in counts)), strides, width)
        case "o":
            return size * queries * head_dim.v
        case "dq":
            return size * queries * head_dim.qk
        case "dk":
            return size * keys * head_dim.qk
        case "dv":
            return size * keys * head_dim.v
        case "lse" | "d_lse":
            return 4 * queries
        case "seed_at":
            return 8
        case name if name.startswith("param_"):
            return 4
        case name if name.startswith("grad_"):
            return 4 * math.prod(_dimensions(name.removeprefix("grad_"), known))
        case name:
            captured = name.removeprefix("tensor_")
            dimensions = _dimensions(captured, known)
            strides = tuple(known[stride_field(captured, axis)] for axis in range(len(dimensions)))
            return _CAPTURED_BYTES[field.element] * span(dimensions, strides, 1)


def _dimensions(captured: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """The dimensions of a captured tensor; none for a param."""
    found: list[int] = []
    while dimension_field(captured, len(found)) in known:
        found.append(known[dimension_field(captured, len(found))])
    return tuple(found)
