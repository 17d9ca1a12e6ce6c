"""Stage 4, emit for GPUs: where the parts of the workspace lie, as the kernels' code finds them.

In: a ``Variant`` and a ``CudaPlan``. Out: C++ functions of ``struct Arguments``, one for each buffer that the templates
ask for.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.analysis.variant import Variant
from flashgen.plan.cuda_diagonals import DIAGONALS
from flashgen.plan.cuda_launches import KEY_TURNS, TURNS, atomic_buffers, exact_buffers, forward_buffers
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.plan.launches import ALIGNMENT, Buffer, Count, Sum

_BUFFER_FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "row_bounds": ("row_bounds_of", "int2"),
    "column_bounds": ("column_bounds_of", "int2"),
    "delta": ("delta_of", "float"),
    "dq": ("dq_sums", "float"),
    "largest": ("largest_of", "uint32_t"),
    DIAGONALS: ("diagonals_of", "float"),
    TURNS: ("turns_of", "uint32_t"),
    KEY_TURNS: ("key_turns_of", "uint32_t"),
}


def workspace_code(variant: Variant, plan: CudaPlan) -> str:
    """Functions that find the buffers of the workspace, as ``PassLaunches.offsets`` places them."""
    lines = []
    forward = (forward_buffers(variant),) if any(each.forward.tensor_copies for each in plan.elements) else ()
    stays = any(each.backward.stays for each in plan.elements)
    for buffers in (*forward, atomic_buffers(variant, stays=stays), exact_buffers(variant)):
        before: list[Buffer] = []
        for buffer in buffers:
            at = " + ".join(_aligned_code(each.bytes) for each in before) or "0"
            if buffer.name in _BUFFER_FUNCTIONS:
                pointer = _pointer_code(*_BUFFER_FUNCTIONS[buffer.name], at)
                if pointer not in lines:
                    lines.append(pointer)
            before.append(buffer)
        sums = [each for each in buffers if each.name.startswith("exact_")]
        if sums:
            first = " + ".join(_aligned_code(each.bytes) for each in buffers if each not in sums)
            lines.append("FG_DEVICE uint64_t* exact_sums(const Arguments& a, int k) {")
            lines.append(f"  int64_t at = {first};")
            for number, each in enumerate(sums[:-1]):
                lines.append(f"  if (k > {number}) at += {_aligned_code(each.bytes)};")
            lines.append("  return reinterpret_cast<uint64_t*>(static_cast<char*>(a.workspace) + at);")
            lines.append("}")
    return "\n".join(lines)


def _pointer_code(function: str, c_type: str, at: str) -> str:
    return (
        f"FG_DEVICE {c_type}* {function}(const Arguments& a) {{\n"
        f"  return reinterpret_cast<{c_type}*>(static_cast<char*>(a.workspace) + {at});\n}}"
    )


def _aligned_code(count: Count | Sum) -> str:
    return f"fg::round_up({count_code(count)}, {ALIGNMENT})"


def count_code(count: Count | Sum) -> str:
    """A count as code over the fields of ``struct Arguments``; what it is divided by is left out."""
    if isinstance(count, Sum):
        return " + ".join(count_code(each) for each in count.counts)
    factors = [
        f"a.{each.size}" if each.tile == 1 else f"fg::ceil_div(a.{each.size}, {each.tile})" for each in count.factors
    ]
    return " * ".join([f"int64_t({count.times})", *factors] if count.times != 1 or not factors else factors)
