"""Bytes between the kernels and a GPU's memory: what the emulator counted, beside what the plan predicts.

In: an op on the emulator, the arguments of a call, what was counted. Out: ``HbmBytes`` by pass. Both leave out what is
read of captured tensors, element by element and mostly from caches, and of exponential weights ``lse_parts``: what is
read of them depends on the scores.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashgen.analysis.grouped import by_groups
from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import compiled
from flashgen.hosts.emulated import SIZE, Counted
from flashgen.hosts.emulator_backend import block_kernel, cached_kernel, dense_kernel, f8_kernel, ragged_kernel
from flashgen.hosts.gpu_calls import is_by_blocks, is_cached, is_f8, kernel_variant, launches_of
from flashgen.hosts.kernel import ELEMENTS
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.parts import PARTS
from flashgen.kinds.slices import SLICES
from flashgen.op.op import AttentionOp
from flashgen.op.plain import as_arrays
from flashgen.op.selected import lowered_tensors, numbers_of_queries
from flashgen.plan.arguments import param_field
from flashgen.targets.gpu.block_bytes import bytes_of_blocks
from flashgen.targets.gpu.bytes import bytes_of_call, bytes_of_sequences
from flashgen.targets.gpu.bytes import counted as counted_of
from flashgen.targets.gpu.cache_bytes import bytes_of_caches
from flashgen.targets.registry import GPUS
from flashgen.verification.inputs import Inputs


@dataclass(frozen=True)
class HbmBytes:
    """Loads, stores and additions of one pass."""

    predicted: int
    counted: int


def hbm_bytes(op: AttentionOp, head_dim: HeadDim, inputs: Inputs, counted: Sequence[Counted]) -> Mapping[str, HbmBytes]:
    """The first call of each pass; nothing where nothing was counted, or no plan is known."""
    plans = op.plan if counted else {}
    if head_dim not in plans:
        return {}
    source = next(source for source in op.sources if source.head_dim == head_dim)
    found: dict[str, HbmBytes] = {}
    for each in counted:
        if each.name not in found:
            variant, plan, symbol = kernel_variant(op.spec, head_dim), plans[head_dim], source.symbol
            spec, element = _spec_of_rows(op.spec, each), ELEMENTS[int(each.values["element"])]
            if spec is not op.spec:
                kernel = dense_kernel(spec, head_dim, plan.target)
                variant, plan, symbol = kernel.variant, kernel.plan, kernel.source.symbol
            tensors = lowered_tensors(spec, inputs.captured, _sizes(each.values))
            captured = as_arrays(tensors)
            if is_cached(each.values):
                kernel = cached_kernel(op.spec, head_dim, plan.target, each.values)
                own = kernel.plan.by_element[element]
                predicted = bytes_of_caches(each.sequences, kernel.variant, own, each.values, captured)
                found[each.name] = HbmBytes(sum(predicted.values()), _counted(each, variant))
                continue
            if is_by_blocks(each.launches):
                kernel = block_kernel(op.spec, head_dim, plan.target)
                predicted = bytes_of_blocks(
                    kernel.variant, kernel.plan.by_element[element], each.values, _numbers(op, inputs, each.values)
                )
                found[each.name] = HbmBytes(sum(predicted.values()), _counted(each, kernel.variant))
                continue
            if is_f8(each.values):
                kernel = f8_kernel(op.spec, head_dim, plan.target)
                variant, plan, symbol = kernel.variant, kernel.plan, kernel.source.symbol
            if each.sequences:
                kernel = ragged_kernel(op.spec, head_dim, plan.target)
                variant, plan, symbol = kernel.variant, kernel.plan, kernel.source.symbol
            rows = next((kind for kind in (PARTS, SLICES) if kind.operands is each.launches.operands), None)
            if rows is not None:
                variant = kernel_variant(op.spec, head_dim, rows)
                plan = replace(plan, recipe=compiled(variant, GPUS[plan.target]).plan.recipe)
            launches = launches_of(variant, plan, symbol, element)(each.name, each.values)
            predict = (
                functools.partial(bytes_of_sequences, each.sequences)
                if each.sequences
                else functools.partial(bytes_of_call, multiprocessors=SIZE.multiprocessors)
            )
            predicted = predict(plan.recipe, plan.by_element[element], symbol, launches, each.values, captured)
            found[each.name] = HbmBytes(sum(predicted.values()), _counted(each, variant))
    return found


def _spec_of_rows(spec: AttentionSpec, counted: Counted) -> AttentionSpec:
    """That of a pass: the op's own, or the one whose rows are the heads of a group."""
    kernel = counted.launches.launches[0].kernel
    found = re.match(rf"{re.escape(spec.name)}_by_([0-9]+)_d", kernel)
    narrow = ELEMENTS[int(counted.values["element"])].bytes == 2
    return spec if found is None else by_groups(spec, int(found[1]), narrow=narrow)


def _numbers(op: AttentionOp, inputs: Inputs, values: Mapping[str, float]) -> Any:
    """The lists of the queries of a call."""
    params = {each.name: values[param_field(each.name)] for each in op.spec.params}
    whole = numbers_of_queries(op.spec, inputs.captured, _sizes(values), params)
    group = int(values["heads"]) // int(values["kv_heads"])
    own = (("b_start", "batch", 1), ("h_start", "kv_heads", group), ("q_start", "q_len", 1))
    begins = [(int(values[start]) // each, int(values[count])) for start, count, each in own]
    return whole[tuple(slice(first, first + count) for first, count in begins)].long().numpy()


def _counted(each: Counted, variant: Variant) -> int:
    return sum(each.report.traffic[name].total for name in counted_of(variant) if name in each.report.traffic)


def _sizes(values: Mapping[str, float]) -> dict[str, int]:
    """The sizes that captured tensors have in a call, by the fields of its arguments."""
    fields = {"B": ("b_total",), "H": ("h_total",), "Nq": ("q_most", "q_total"), "Nk": ("kv_most", "kv_total")}
    sizes = {name: int(next(values[each] for each in known if each in values)) for name, known in fields.items()}
    return sizes | {"Hkv": sizes["H"] // max(1, int(values["heads"]) // max(1, int(values["kv_heads"])))}
