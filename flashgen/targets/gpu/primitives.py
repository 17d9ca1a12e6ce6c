"""Stage 4, emit for GPUs: what a source takes of the primitive layer.

In: what the kernels use. Out: the includes of headers of ``templates/include``, and products of warpgroups, which are
printed: their instructions name every register.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.emit.environment import environment
from flashgen.ir.types import ElementType

_ALWAYS = ("captured", "fragments", "math", "observed", "reduce", "shared_tile", "spec", "team", "types")

C_TYPES: Mapping[ElementType, str] = {
    ElementType.F16: "fg::half_t",
    ElementType.BF16: "fg::bfloat_t",
    ElementType.F32: "float",
    ElementType.F8E4M3: "fg::f8e4m3",
}


@dataclass(frozen=True)
class WarpgroupProducts:
    """What a source multiplies by warpgroups: widths in tiles of 8 columns, the element type, and how."""

    tiles: tuple[int, ...]
    element: ElementType
    spans: bool = False  # some have more columns than an instruction, or half of those of a tile
    clusters: bool = False  # blocks share copies


def primitives(*more: str, warpgroups: WarpgroupProducts | None = None) -> str:
    """What stands first in a source: the includes of what every one uses, of ``more``, and products of warpgroups."""
    names = {*_ALWAYS, *more}
    if warpgroups is not None:
        used = {
            "clusters": warpgroups.clusters,
            "tensor_copies": True,
            "warpgroup": True,
            "warpgroup_eight_bits": warpgroups.element is ElementType.F8E4M3,
            "warpgroup_spans": warpgroups.spans,
        }
        names |= {name for name in used if used[name]}
    included = "".join(f'#include "flashgen/{name}.cuh"\n' for name in sorted(names))
    if warpgroups is None:
        return included
    template = environment().get_template("cuda/warpgroup_products.cuh.jinja")
    return template.render(included=included, products=warpgroups, c_type=C_TYPES[warpgroups.element])
