"""``op.explain`` on a GPU, real or emulated: what runs for one call, from the very kernels and schedules that it takes.

In: an ``ExplainedCall``, and the compiled kernels of both passes. Out: an ``Explanation``. The model predicts bytes and
times, for the mask at the call's offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.hosts.explained_call import ExplainedCall, with_mask_of_call, with_prediction
from flashgen.hosts.kernel import Step
from flashgen.hosts.machine import Machine
from flashgen.kinds.kind import PassName
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.launches import Splits
from flashgen.plan.plan import Rejection
from flashgen.targets.gpu.bytes import bytes_of_caches
from flashgen.targets.gpu.cost import pass_time
from flashgen.targets.gpu.launches import pass_launches
from flashgen.targets.gpu.schedules import Schedule
from flashgen.targets.gpu.tiles import TILES_OF, GpuPlan
from flashgen.toolchains.nvrtc import Resources

_UNPREDICTED = "of a deterministic backward pass bytes and time are not predicted: the model knows that of atomic sums"


@dataclass(frozen=True)
class GpuPass:
    """One pass on a GPU, real or emulated: its plan, its launches, what the assembler said of its kernels.

    ``reasons`` are those of its tiles; ``splits`` say in how many parts keys over a cache are.
    """

    plan: GpuPlan
    steps: Sequence[Step]
    resources: Mapping[str, Resources]
    reasons: tuple[str, ...] = ()
    splits: Splits | None = None


def explain_gpu(name: str, machine: Machine, call: ExplainedCall, passes: Mapping[PassName, GpuPass]) -> Explanation:
    """The call on a GPU, or on one that is emulated."""
    plan = next(iter(passes.values())).plan
    own, found = with_mask_of_call(plan.recipe.variant, call), []
    reasons: dict[str, None] = {}
    rejected: dict[Rejection, None] = {}
    for each_name, each in passes.items():
        tiles = each.plan.own
        made = _gpu_pass(each_name, tiles.forward if each_name == "forward" else tiles.backward, each)
        if each_name == "forward" or not call.values["deterministic"]:
            predicted = pass_time(each.plan.recipe.of(keep=own.keep), tiles, machine.gpu, call.shape, each_name)
            made = with_prediction(made, own, call, predicted)
        found.append(made)
        reasons |= dict.fromkeys((*each.plan.reasons_of((each_name,)), *each.reasons))
        rejected |= dict.fromkeys(lost for lost in each.plan.rejected if lost.pass_name in TILES_OF[each_name])
    if call.values["deterministic"]:
        reasons[_UNPREDICTED] = None
    told = call.explanation(name, machine.backend, machine.name, plan.target, found, tuple(reasons))
    return replace(told, rejected=tuple(rejected))


def explain_jvp(plan: GpuPlan, call: ExplainedCall) -> ExplainedPass:
    """The kernels of forward mode, were its tangents asked for, or those of its backward pass, which need not repeat.

    They are told by the planner's tiles for the type of the call: of persistent blocks no more run than there is room
    for.
    """
    (name,) = plan.recipe.variant.kind.passes
    known = {field: int(value) for field, value in call.values.items()}
    launches = pass_launches(plan, name, dropped=bool(call.values["dropout_threshold"]), deterministic=False)
    kernels = tuple(
        ExplainedKernel(each.kernel, each.threads, each.grid.value(known), each.shared_bytes)
        for each in launches.launches
    )
    title, tile = ("jvp", plan.own.forward) if name == "forward" else ("jvp_backward", plan.own.backward)
    return replace(_gpu_pass(title, tile, GpuPass(plan, (), {})), kernels=kernels)


def explain_cache(name: str, machine: Machine, call: ExplainedCall, forward: GpuPass) -> Explanation:
    """A call over a full cache, on a GPU or on one that is emulated: it takes at least as long as its bytes."""
    variant = forward.plan.recipe.variant
    assert forward.splits is not None, "keys over a cache may be split"
    known = {name: int(value) for name, value in call.values.items()}
    found = forward.splits.values(known, machine.size.multiprocessors)
    tiles, values = forward.plan.own, {**call.values, **found}
    q_len, room = int(values["q_len"]), int(values["kv_len"])
    own = {"batch": 1, "kv_start": 0, "q_start": max(room - q_len, 0), "q_total": max(room, q_len), "kv_total": room}
    sequences = [own | {"b_start": int(values["b_start"]) + n} for n in range(int(values["batch"]))]
    moved = sum(bytes_of_caches(sequences, variant, tiles, values, {}).values())
    made = replace(
        _gpu_pass("forward", tiles.forward, forward),
        hbm_bytes=moved,
        seconds=moved / machine.gpu.bandwidth,
        limited_by="memory, if nothing else holds it up; a sequence that does not fill the cache takes less",
        at_most=True,
    )
    who = "a second kernel" if found["merges_apart"] else "the last block of a tile to come to its end"
    several = f"the keys of a sequence in {found['splits']} parts, merged by {who}"
    parts = several if found["merges"] else "keys in one part"
    reasons = (
        *forward.plan.reasons,
        f"{int(values['group_rows'])} rows of queries for a key/value head",
        parts,
        *(
            f"{each.question}: {each.choice}: {each.reason}"
            for each in dict.fromkeys(forward.plan.decisions)
            if each.question != "tiles"
        ),
    )
    told = call.explanation(name, machine.backend, machine.name, forward.plan.target, (made,), reasons)
    return replace(told, rejected=forward.plan.rejected)


def _gpu_pass(name: str, tile: Schedule, each: GpuPass) -> ExplainedPass:
    kernels = []
    for step in each.steps:
        said = each.resources.get(step.kernel)
        registers, spilled = (None, None) if said is None else (said.registers, said.spill_bytes)
        kernels.append(ExplainedKernel(step.kernel, step.threads, step.grid, step.shared_bytes, registers, spilled))
    return ExplainedPass(
        name=name,
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=tile.multipliers,
        warps=tile.warps,
        stages=tile.stages,
        kernels=tuple(kernels),
    )
