"""The launches of calls on GPUs, real or emulated, and the variants and tiles of their kernels.

In: a ``GpuPlan``, values of ``struct Arguments`` by name. Out: launches, the variant for each kind of call, the tiles
over a cache. ``gpu_provider.py`` stands on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from flashgen.analysis.by_blocks import objection_to_blocks, with_listed_blocks
from flashgen.analysis.selection import has_list_for_each_query
from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.hosts.explain_gpu import explain_jvp
from flashgen.hosts.explained_call import ExplainedCall
from flashgen.hosts.kernel import ELEMENTS
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import F8_CODE
from flashgen.kinds.slices import BY_BLOCKS
from flashgen.plan.arguments import gradient_field, stored_field, summed_tensors
from flashgen.plan.explanation import Explanation
from flashgen.plan.launches import PassLaunches
from flashgen.plan.measured import Pins
from flashgen.plan.plan import CallKind, Part
from flashgen.targets.gpu.by_shape import pins_of_rows
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.launches import pass_launches
from flashgen.targets.gpu.layouts import fits_blocks
from flashgen.targets.gpu.limits import ELEMENTS_OF_JVP, has_jvp, has_jvp_backward
from flashgen.targets.gpu.tables import WIDEST_JVP
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan

# The calls that kernels of forward mode take, and those of its backward pass, in words.
_NARROW = f"{' and '.join(map(str, ELEMENTS_OF_JVP))}, head dimensions up to {WIDEST_JVP}"
GPU_TANGENTS = (_NARROW, f"{_NARROW}, scores without sqdist")


@functools.lru_cache(maxsize=64)
def kernel_variant(spec: AttentionSpec, head_dim: HeadDim, kind: Kind = DENSE) -> Variant:
    """The variant that kernels of a kind compute. It is remembered, as each pass of a call asks for it."""
    if kind is BY_BLOCKS:
        return with_listed_blocks(spec, head_dim)
    variant = analyse(spec, head_dim)
    if kind is FORWARD_MODE:
        return with_tangent(variant)
    if kind is FORWARD_MODE_BACKWARD:
        return with_slopes(variant, moves=False)
    return replace(variant, kind=kind, gradients=variant.gradients if kind.learns else ())


def has_kernels(kind: Kind, spec: AttentionSpec, head_dim: HeadDim, target: GpuTarget) -> bool:
    """Whether a target has kernels of a kind of call of a spec."""
    if kind is BY_BLOCKS:  # of all element types
        elements = () if objection_to_blocks(spec, head_dim) else spec.dtypes or ELEMENTS[:3]
        fits = [fits_blocks(kernel_variant(spec, head_dim, kind), each, target.block_bytes) for each in elements]
        return bool(fits) and all(fits)
    dense = kernel_variant(spec, head_dim)
    if kind is FORWARD_MODE:
        return has_jvp(dense)
    if kind is FORWARD_MODE_BACKWARD:
        return has_jvp_backward(dense)
    return kind is not EIGHT_BITS or (spec.takes_f8 and target.takes_f8(dense))


def launches_of(plan: GpuPlan, name: PassName, values: Mapping[str, float]) -> PassLaunches:
    """The launches of a pass for values of ``struct Arguments`` by name."""
    variant, calls = plan.recipe.variant, kind_of(name, values)
    return pass_launches(
        plan,
        name,
        dropped=bool(calls.dropped),
        deterministic=bool(calls.repeatable),
        captured=any(values[gradient_field(each.name)] for each in variant.gradients),
        turns=any(values.get(stored_field(each.name)) for each in summed_tensors(variant.spec)),
    )


def kind_of(name: PassName, values: Mapping[str, float]) -> CallKind:
    """Which kernels of a pass a call starts; those of the forward pass always repeat."""
    repeats = name == "backward" and bool(values["deterministic"])
    moving = "".join(each for each in "qkv" if values.get(f"t_{each}"))
    is_forward_mode = name == "forward" and "t_q" in values
    return CallKind(values["dropout_threshold"] > 0, repeats, moving if is_forward_mode else None)


def with_jvp(
    told: Explanation, spec: AttentionSpec, head_dim: HeadDim, target: GpuTarget, call: ExplainedCall
) -> Explanation:
    """The explanation of a call with the kernels of its tangents, if there are some."""
    found = {}
    for kind in (FORWARD_MODE, FORWARD_MODE_BACKWARD):
        if has_kernels(kind, spec, head_dim, target):
            variant = kernel_variant(spec, head_dim, kind)
            if call.element in compiled(variant, target).plan.by_element:
                found[kind] = explain_jvp(compiled(variant, target, part=Part(call.element)).plan, call)
    return replace(told, jvp=found.get(FORWARD_MODE), jvp_backward=found.get(FORWARD_MODE_BACKWARD))


def pins_of_call(kernel: CompiledKernel[GpuPlan, GpuBinary], element: ElementType, values: Mapping[str, float]) -> Pins:
    """The tiles of a call over a cache, by its rows."""
    rows = int(values["group_rows"])
    if has_list_for_each_query(kernel.variant.spec.tensors):  # no two queries read the same keys
        rows = int(values["heads"]) // max(int(values["kv_heads"]), 1)
    return pins_of_rows(kernel.plan, element, rows)


def kind_of_call(kind: Kind, values: Mapping[str, float]) -> Kind:
    """The kind of a call whose kernels are of a ``kind``: a call over a cache says if the cache is of 8 bits."""
    return F8_CACHED if kind is CACHED and values["key_element"] == F8_CODE else kind
