"""What the argument struct of one call says: the sizes of its captured tensors, its params, where it begins."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from flashgen.ir.spec import AttentionSpec
from flashgen.plan.arguments import param_field

_TOTALS = {"B": "b_total", "H": "h_total", "Nq": "q_total", "Nk": "kv_total"}


def sizes_of_values(values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that captured tensors have, by their names in specs."""
    sizes = {size: int(values[field]) for size, field in _TOTALS.items()}
    sizes["Hkv"] = sizes["H"] // (int(values["heads"]) // int(values["kv_heads"]))
    return sizes


def params_of_values(spec: AttentionSpec, values: Mapping[str, Any]) -> dict[str, float]:
    """The params by their names in the spec: floats are float32 in ``struct Arguments``."""
    found = {param.name: values[param_field(param.name)] for param in spec.params}
    return {name: ctypes.c_float(x).value if isinstance(x, float) else x for name, x in found.items()}


def starts_of_values(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Which batch entry, head, query and key of the whole are the first of the call."""
    b, h, q, kv = (int(values[f"{axis}_start"]) for axis in ("b", "h", "q", "kv"))
    return b, h, q, kv
