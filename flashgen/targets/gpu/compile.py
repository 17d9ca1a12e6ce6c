"""Stage 5, compile for GPUs: NVRTC on the parts of a source, and which tiles turned out to spill registers.

In: a ``KernelSource`` and its plan. Out: a ``GpuBinary``; ``Spill``s, of which the planner is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.plan import ANY_CALLS, DETERMINISTIC_CALLS, USUAL_CALLS, CallKind, Part, Spill
from flashgen.targets.gpu.recipes import Choice
from flashgen.targets.gpu.registers import harmless_spill
from flashgen.targets.gpu.tables import BackwardChoice, ForwardChoice, QueryChoice
from flashgen.targets.gpu.tiles import BackwardTiles, ForwardTiles, GpuPlan, QueryTiles
from flashgen.toolchains.nvrtc import CudaBinary, Resources
from flashgen.toolchains.nvrtc_processes import compile_cuda_parts

# Which pass of a plan a kernel belongs to, by what follows its symbol; the others have no tiles.
_PASSES = {"forward": "forward", "backward": "backward", "keys": "backward", "queries": "queries"}
# A source in which this stands has kernels that only calls with deterministic=True start.
_REPEATABLE = re.compile(r"^#if .*\bFLASHGEN_REPEATABLE\b", re.MULTILINE)


@dataclass(frozen=True)
class GpuBinary:
    """What NVRTC made of a source: a binary for each element type and pass. Each is compiled beside the others."""

    parts: Mapping[Part, CudaBinary]

    @property
    def kernels(self) -> tuple[Resources, ...]:
        """Of all parts, by their names; passes share some."""
        found = {each.name: each for binary in self.parts.values() for each in binary.kernels}
        return tuple(found[name] for name in sorted(found))


def compile_parts(source: KernelSource, plan: GpuPlan, part: Part, target: str) -> GpuBinary:
    """The kernels of one element type and pass, or of all. Raises ``NvrtcMissing``, ``CompileFailed``."""
    parts = [
        Part(element, name, calls)
        for name in ("backward", "forward")  # what takes longest first, so that no core waits for it at the end
        for calls in (
            (part.calls,) if part.pass_name else _kinds_of_calls(source, part.calls, backward=name == "backward")
        )
        for element in plan.by_element
        if part.element in (None, element) and part.pass_name in (None, name)
    ]
    made = compile_cuda_parts({each.words: part_of(source, plan, each) for each in parts}, target)
    return GpuBinary(dict(zip(parts, made, strict=True)))


def _kinds_of_calls(source: KernelSource, asked: CallKind, *, backward: bool) -> tuple[CallKind, ...]:
    """Which kinds a pass is compiled for, a program each: one where all calls start the same kernels."""
    if not backward or not _REPEATABLE.search(source.text):
        return (ANY_CALLS,)
    return (USUAL_CALLS, DETERMINISTIC_CALLS) if asked == ANY_CALLS else (asked,)


def part_of(source: KernelSource, plan: GpuPlan, part: Part) -> KernelSource:
    """The same text, told to leave out the kernels of other element types, of the other pass, of other calls."""
    left_out = [str(each) for each in plan.by_element if part.element not in (None, each)]
    left_out += [each for each in ("forward", "backward") if part.pass_name not in (None, each)]
    for holds, if_so, if_not in (
        (part.calls.dropped, "without_dropout", "with_dropout"),
        (part.calls.repeatable, "additions", "repeatable"),
    ):
        if holds is not None:
            left_out.append(if_so if holds else if_not)
    defines = [(f"FLASHGEN_{each.upper()}", "0") for each in left_out]
    moving = part.calls.moving
    if moving is not None and any(each.forward.tensor_copies for each in plan.elements):
        defines.append(("FLASHGEN_MOVING", str(sum(("q" in moving, 2 * ("k" in moving), 4 * ("v" in moving))))))
    return replace(source, defines=tuple(defines))


def spills_of(plan: GpuPlan, symbol: str, kernels: tuple[Resources, ...]) -> Iterator[Spill]:
    """The tiles whose kernels spill more registers than is harmless."""
    for kernel in kernels:
        name, _, rest = kernel.name.removeprefix(f"{symbol}_").partition("_")
        if name not in _PASSES:
            continue
        element = next(each for each in plan.elements if rest.partition("_")[0] == str(each.element))
        tile: ForwardChoice | BackwardChoice | QueryChoice
        match _PASSES[name]:
            case "forward":
                tile = _choice(ForwardChoice, element.forward)
            case "backward":
                tile = _choice(BackwardChoice, element.backward)
            case _:
                tile = _choice(QueryChoice, element.queries)
        if kernel.spill_bytes > harmless_spill(tile):
            yield Spill(element.element, _PASSES[name], tile, kernel.spill_bytes)


def _choice(kind: type[Choice], tiles: ForwardTiles | BackwardTiles | QueryTiles) -> Choice:
    """The row of the planner's tables that tiles were made of."""
    return kind(**{each.name: getattr(tiles, each.name) for each in fields(kind)})
