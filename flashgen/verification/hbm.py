"""Bytes between the kernels and a GPU's memory: what the emulator counted, beside what the plan predicts.

In: an op on the emulator, the arguments of a call, what was counted. Out: ``HbmBytes`` by pass. Both leave out what is
read of captured tensors, element by element and mostly from caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.analysis.variant import analyse
from flashgen.backends import ELEMENTS, launches_of
from flashgen.ir.spec import HeadDim
from flashgen.plan.cuda_traffic import COUNTED, traffic
from flashgen.runtime.emulated import Counted
from flashgen.runtime.op import AttentionOp
from flashgen.verification.inputs import Inputs


@dataclass(frozen=True)
class HbmBytes:
    """Loads, stores and additions of one pass."""

    predicted: int
    counted: int


def hbm_bytes(op: AttentionOp, head_dim: HeadDim, inputs: Inputs, counted: Sequence[Counted]) -> Mapping[str, HbmBytes]:
    """The first call of each pass; nothing where nothing was counted, or no plan is known."""
    if not counted or op.plan is None:
        return {}
    variant, plan = analyse(op.spec, head_dim), op.plan[head_dim]
    symbol = next(source.symbol for source in op.sources if source.head_dim == head_dim)
    captured = {
        name: (value.float() if value.is_floating_point() else value).numpy() for name, value in inputs.captured.items()
    }
    found: dict[str, HbmBytes] = {}
    for each in counted:
        if each.name not in found:
            element = ELEMENTS[int(each.values["element"])]
            launches = launches_of(variant, plan, symbol, element)(each.name, each.values)
            predicted = traffic(variant, plan.by_element[element], symbol, launches, each.values, captured)
            moved = (each.report.traffic[name].total for name in COUNTED if name in each.report.traffic)
            found[each.name] = HbmBytes(sum(predicted.values()), sum(moved))
    return found
