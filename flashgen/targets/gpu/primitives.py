"""Stage 4, emit for GPUs: the primitive layer as text to paste, so that a source is one self-contained file.

In: what the kernel uses. Out: the files of ``templates/cuda/primitives`` in order, without their includes of each
other, and those of ``templates/primitives``, which CPUs have, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.emit.environment import environment, templates_folder
from flashgen.ir.types import ElementType

_PRIMITIVES = ("types.cuh", "team.cuh", "math.cuh", "captured.cuh", "shared_tile.cuh", "fragments.cuh", "reduce.cuh")

C_TYPES: Mapping[ElementType, str] = {
    ElementType.F16: "fg::half_t",
    ElementType.BF16: "fg::bfloat_t",
    ElementType.F32: "float",
    ElementType.F8E4M3: "fg::f8e4m3",
}


@dataclass(frozen=True)
class WarpgroupProducts:
    """What a source multiplies by warpgroups: widths in tiles of 8 columns, element types, and how."""

    tiles: tuple[int, ...]
    elements: tuple[ElementType, ...]
    spans: bool = False  # some have more columns than an instruction, or half of those of a tile
    turns: bool = False  # some are of half of a tile's panels
    clusters: bool = False  # blocks share copies


def primitives(
    *,
    dropout: bool,
    f8_cached: bool = False,
    f8: bool = False,
    parts: bool = False,
    listed: bool = False,
    warpgroups: WarpgroupProducts | None = None,
    pieces: bool = False,
    sequence_copies: bool = False,
    tangent: bool = False,
    pairs: bool = False,
    lines: bool = False,
) -> tuple[str, ...]:
    """The texts to paste, lowest layer first. ``sequence_copies``: tensor copies find rows of sequences; ``lines``: the
    mask is asked once a line.
    """
    more = {"philox.cuh": dropout, "eight_bits.cuh": f8_cached or f8, "parts.cuh": parts, "units.cuh": listed}
    more |= dict.fromkeys(("narrow_instructions.cuh", "narrow_tile.cuh"), f8_cached)
    more |= {"products_of_both.cuh": tangent, "pairs.cuh": pairs, "lane_bits.cuh": lines}
    names = (
        *(("dropout_instructions.cuh",) if dropout else ()),
        *_PRIMITIVES,
        *(name for name, is_used in more.items() if is_used),
    )
    folder = templates_folder() / "cuda" / "primitives"
    instructions = (folder / "instructions.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
    others = tuple(_without_includes((folder / name).read_text(encoding="utf-8")) for name in names)
    masks = ("standard.cuh", "../../primitives/ranges.h", "observed.cuh", *(("pieces.cuh",) if pieces else ()))
    of_masks = tuple(_without_includes((folder / name).read_text(encoding="utf-8")) for name in masks)
    of_warpgroups = _warpgroup_primitives(warpgroups, sequence_copies=sequence_copies, tangent=tangent)
    return (instructions, *others, *of_warpgroups, *of_masks)


def _warpgroup_primitives(
    products: WarpgroupProducts | None, *, sequence_copies: bool, tangent: bool
) -> tuple[str, ...]:
    if products is None:
        return ()
    elements = [{"name": str(each), "c_type": C_TYPES[each].removeprefix("fg::")} for each in products.elements]
    template = environment().get_template("cuda/primitives/warpgroup_instructions.cuh.jinja")
    instructions = template.render(tiles=products.tiles, elements=elements, clusters=products.clusters).lstrip()
    folder = templates_folder() / "cuda" / "primitives"
    of_8_bits = ("eight_bits_instructions.cuh", "warpgroup_eight_bits.cuh")
    more = {"warpgroup_spans.cuh": bool(products.spans)}
    more |= {"warpgroup_sums.cuh": tangent, "tensor_copies.cuh": True, "sequence_copies.cuh": sequence_copies}
    more |= dict.fromkeys(of_8_bits, ElementType.F8E4M3 in products.elements)
    more |= {"warpgroup_turns.cuh": products.turns, "clusters.cuh": products.clusters}
    others = ("warpgroup.cuh", *(name for name, is_used in more.items() if is_used))
    return (instructions, *(_without_includes((folder / name).read_text(encoding="utf-8")) for name in others))


def _without_includes(header: str) -> str:
    return re.sub(r"^#(pragma once|include .*)\n", "", header, flags=re.MULTILINE)
