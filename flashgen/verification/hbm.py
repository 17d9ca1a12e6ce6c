"""Bytes between the kernels and a GPU's memory: what the emulator counted, beside what the plan predicts.

In: an op on the emulator, the arguments of a call, what was counted. Out: ``HbmBytes`` by pass. Both leave out what is
read of captured tensors, element by element and mostly from caches, and of exponential weights ``lse_parts``: what is
read of them depends on the scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.analysis.selection import by_groups
from flashgen.analysis.variant import Variant
from flashgen.hosts.emulated import SIZE, Counted
from flashgen.ir.spec import AttentionSpec
from flashgen.op.op import AttentionOp
from flashgen.op.selected import lowered_tensors, numbers_of_queries
from flashgen.op.tensor_kinds import as_arrays
from flashgen.plan.arguments import param_field
from flashgen.targets.gpu.bytes import bytes_of_blocks, bytes_of_caches, bytes_of_call, bytes_of_sequences
from flashgen.targets.gpu.bytes import counted as counted_of
from flashgen.verification.inputs import Inputs


@dataclass(frozen=True)
class HbmBytes:
    """Loads, stores and additions of one pass."""

    predicted: int
    counted: int


def hbm_bytes(op: AttentionOp, inputs: Inputs, counted: Sequence[Counted]) -> Mapping[str, HbmBytes]:
    """The bytes of the first call of each pass; empty where nothing was counted."""
    found: dict[str, HbmBytes] = {}
    for each in counted:
        if each.name not in found:
            traffic = each.report.traffic
            moved = sum(traffic[name].total for name in counted_of(each.variant) if name in traffic)
            found[each.name] = HbmBytes(_predicted(op, inputs, each), moved)
    return found


def _predicted(op: AttentionOp, inputs: Inputs, each: Counted) -> int:
    """The predicted bytes of a pass, from the plan that it ran."""
    variant, plan, values = each.variant, each.ran.plan, each.values
    tiles = plan.own
    if variant.listed is not None:
        return sum(bytes_of_blocks(variant, tiles, values, _numbers(op, inputs, variant, values)).values())
    spec = _spec_of_rows(op.spec, variant.spec)
    captured = as_arrays(lowered_tensors(spec, inputs.captured, _sizes(variant, values)))
    if variant.kind.cached:
        return sum(bytes_of_caches(each.sequences, variant, tiles, values, captured).values())
    ran = (plan.recipe, tiles, plan.symbol, each.ran.launches, values, captured)
    moved = bytes_of_sequences(each.sequences, *ran) if each.sequences else bytes_of_call(*ran, SIZE.multiprocessors)
    return sum(moved.values())


def _spec_of_rows(spec: AttentionSpec, ran: AttentionSpec) -> AttentionSpec:
    """The spec of a pass with lists: the op's own, or the one whose rows are the heads of a group."""
    found = re.fullmatch(rf"{re.escape(spec.name)}_by_([0-9]+)", ran.name)
    return spec if found is None else by_groups(spec, int(found[1]), narrow=False)


def _numbers(op: AttentionOp, inputs: Inputs, variant: Variant, values: Mapping[str, float]) -> Any:
    """The lists of a call's queries."""
    params = {each.name: values[param_field(each.name)] for each in op.spec.params}
    whole = numbers_of_queries(op.spec, inputs.captured, _sizes(variant, values), params)
    group = int(values["heads"]) // int(values["kv_heads"])
    own = (("b_start", "batch", 1), ("h_start", "kv_heads", group), ("q_start", "q_len", 1))
    begins = [(int(values[start]) // each, int(values[count])) for start, count, each in own]
    return whole[tuple(slice(first, first + count) for first, count in begins)].long().numpy()


def _sizes(variant: Variant, values: Mapping[str, float]) -> dict[str, int]:
    """The sizes that captured tensors have in a call, by the fields of its arguments."""
    fields = {"B": ("b_total",), "H": ("h_total",), "Nq": ("q_most", "q_total"), "Nk": ("kv_most", "kv_total")}
    sizes = {name: int(next(values[each] for each in known if each in values)) for name, known in fields.items()}
    kv_heads = sizes["H"] // max(1, int(values["heads"]) // max(1, int(values["kv_heads"])))
    return sizes | {"Hkv": kv_heads, "D": variant.head_dim.qk, "Dv": variant.head_dim.v}
