"""Stage 4, emit for GPUs: where the parts of the workspace lie, as the kernels' code finds them.

In: a ``GpuPlan`` of one element type, passes. Out: C++ functions of ``struct Arguments``, one for each buffer that the
templates ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from flashgen.kinds.kind import PassName
from flashgen.plan.launches import ALIGNMENT, Buffer, Count, Factor, Sum
from flashgen.targets.gpu import launches
from flashgen.targets.gpu.diagonals import DIAGONALS, ELEMENTS
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tiles import GpuPlan

_BUFFER_FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "row_bounds": ("row_bounds_of", "int2"),
    "column_bounds": ("column_bounds_of", "int2"),
    "delta": ("delta_of", "float"),
    "epsilon": ("epsilon_of", "float"),
    "dq": ("dq_sums", "float"),
    "largest": ("largest_of", "uint32_t"),
    DIAGONALS: ("diagonals_of", "float"),
    ELEMENTS: ("elements_by_distance", "int32_t"),
    launches.TURNS: ("turns_of", "uint32_t"),
    launches.TURN_SUMS: ("turn_sums", "float4"),
    launches.TILE_COUNTER: ("tile_counter_of", "uint32_t"),
    launches.KEY_TILE_COUNTER: ("key_tile_counter_of", "uint32_t"),
    launches.PART_ARRIVALS: ("arrivals_of_parts", "uint32_t"),
    launches.PART_SUMS: ("sums_of_parts", "float4"),
    launches.TURNED_V: ("turned_v_of", "uint8_t"),
}


def workspace_code(plan: GpuPlan, passes: Collection[PassName]) -> str:
    """Functions that find the buffers of the workspace, as ``PassLaunches.offsets`` places them."""
    recipe, kind = plan.recipe, plan.recipe.variant.kind
    if kind.cached:
        return _of_caches(plan)
    if recipe.variant.listed is not None:
        return _by_blocks(plan)
    lines = []
    code = _of_ragged_batches if kind.ragged else count_code
    found: list[tuple[Buffer, ...]] = []
    if "forward" in passes:
        found.append(launches.forward_buffers(recipe, plan.own.forward))
    if "backward" in passes:
        tiles = plan.own.backward
        turns, parts = tiles.takes_turns(recipe), launches.shared_buffers(recipe, tiles)
        found.append(launches.atomic_buffers(recipe, persistent=tiles.persistent, turns=turns, parts=parts))
        found.append(launches.exact_buffers(recipe))
    for buffers in found:
        before: list[Buffer] = []
        for buffer in buffers:
            at = " + ".join(_aligned_code(each.bytes, code) for each in before) or "0"
            if buffer.name in _BUFFER_FUNCTIONS:
                more = _of_sequence(buffer.name, recipe) if kind.ragged else ""
                pointer = _pointer_code(*_BUFFER_FUNCTIONS[buffer.name], at, more)
                if pointer not in lines:
                    lines.append(pointer)
            before.append(buffer)
        sums = [each for each in buffers if each.name.startswith("exact_")]
        if sums:
            first = " + ".join(_aligned_code(each.bytes, code) for each in buffers if each not in sums)
            lines.append("FG_DEVICE uint64_t* exact_sums(const Arguments& a, int k) {")
            lines.append(f"  int64_t at = {first};")
            for number, each in enumerate(sums[:-1]):
                lines.append(f"  if (k > {number}) at += {_aligned_code(each.bytes, code)};")
            lines.append("  return reinterpret_cast<uint64_t*>(static_cast<char*>(a.workspace) + at);")
            lines.append("}")
    return "\n".join(lines)


def _of_caches(plan: GpuPlan) -> str:
    """What parts of keys leave."""
    rows, o = launches.part_buffers(plan.recipe.variant, plan.own.forward)[::-1]
    assert (rows.name, o.name) == (launches.PART_ROWS, launches.PART_O)
    behind_o = _aligned_code(o.bytes, lambda count: count_code(count).replace("a.batch", "a.sequences"))
    return f"""struct Parts {{
  static FG_DEVICE float* o(const Arguments& a) {{ return static_cast<float*>(a.workspace); }}
  static FG_DEVICE float2* rows(const Arguments& a) {{
    return reinterpret_cast<float2*>(static_cast<char*>(a.workspace) + {behind_o});
  }}
}};"""


def _by_blocks(plan: GpuPlan) -> str:
    """What parts leave, and behind it lists."""
    types = {
        launches.PART_O: "char",
        launches.PART_ROWS: "float2",
        launches.LISTED: "uint32_t",
        launches.ITEMS: "uint4",
        launches.ITEM_COUNTS: "uint32_t",
        launches.RANKS: "uint32_t",
        launches.COUNTS: "uint32_t",
    }
    lines, at = ["struct Parts {"], "0"
    for buffer in launches.block_buffers(plan.recipe.variant, plan.own.element):
        name, c_type = buffer.name.removeprefix("part_"), types[buffer.name]
        lines.append(f"  static FG_DEVICE {c_type}* {name}(const Arguments& a) {{")
        lines.append(f"    return reinterpret_cast<{c_type}*>(static_cast<char*>(a.workspace) + {at});")
        lines.append("  }")
        at += f" + {_aligned_code(buffer.bytes, count_code)}"
    return "\n".join((*lines, "};"))


def _pointer_code(function: str, c_type: str, at: str, more: str) -> str:
    return (
        f"FG_DEVICE {c_type}* {function}(const Arguments& a) {{\n"
        f"  return reinterpret_cast<{c_type}*>(static_cast<char*>(a.workspace) + {at}){more};\n}}"
    )


def _of_sequence(buffer: str, recipe: Recipe) -> str:
    """What is added to the start of a buffer of a ragged batch: elements before those of the sequence."""
    granules = {"row_bounds": ("q_begin", recipe.observed_rows), "column_bounds": ("kv_begin", recipe.observed_columns)}
    if buffer == "delta":
        return " + a.q_begin"
    if buffer == "dq":
        return f" + a.heads * first_tile<16>(a.q_begin, a.sequence) * {16 * padded(recipe.variant.head_dim.qk)}"
    if buffer in granules:
        begin, loads = granules[buffer]
        return f" + a.heads * first_tile<{launches.GRANULE}>(a.{begin}, a.sequence) * {len(loads)}"
    return ""


def _of_ragged_batches(count: Count | Sum) -> str:
    """A count over what ``Arguments`` of a sequence know of the call."""
    code = count_code(count)
    for field, of_the_call in (("batch", "sequences"), ("q_len", "q_rows"), ("kv_len", "kv_rows")):
        code = code.replace(f"a.{field}", f"a.{of_the_call}")
    return code


def _aligned_code(count: Count | Sum, code: Callable[[Count | Sum], str]) -> str:
    return f"fg::round_up({code(count)}, {ALIGNMENT})"


def count_code(count: Count | Sum) -> str:
    """A count as code over the fields of ``struct Arguments``; what it is divided by is left out."""
    if isinstance(count, Sum):
        return " + ".join(count_code(each) for each in count.counts)
    factors = [_factor_code(each) for each in count.factors]
    return " * ".join([f"int64_t({count.times})", *factors] if count.times != 1 or not factors else factors)


def _factor_code(factor: Factor) -> str:
    tiles = f"a.{factor.size}" if factor.tile == 1 else f"fg::ceil_div(a.{factor.size}, {factor.tile})"
    return f"({tiles} + a.{factor.more})" if factor.more else tiles
