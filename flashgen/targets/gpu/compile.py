"""Stage 5, compile for GPUs: NVRTC on a source, and which tiles turned out to spill registers.

In: a ``KernelSource`` and its plan. Out: a ``GpuBinary``; ``Spill``s, of which the planner is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.plan import CallKind, Spill
from flashgen.targets.gpu.tiles import OF_KERNEL, GpuPlan, harmless_spill
from flashgen.toolchains.nvrtc import CudaBinary, Resources, compile_cuda_parts

# A source in which this stands has kernels that only calls with deterministic=True start.
_REPEATABLE = re.compile(r"^#if .*\bFLASHGEN_REPEATABLE\b", re.MULTILINE)


@dataclass(frozen=True)
class GpuBinary:
    """What NVRTC made of a source: a binary for each kind of calls that starts kernels of its own."""

    parts: Mapping[CallKind, CudaBinary]

    @property
    def kernels(self) -> tuple[Resources, ...]:
        """Of all parts, by their names; some share kernels."""
        found = {each.name: each for binary in self.parts.values() for each in binary.kernels}
        return tuple(found[name] for name in sorted(found))


def compile_calls(sources: Sequence[KernelSource], calls: CallKind, target: str) -> tuple[GpuBinary, ...]:
    """The kernels that such calls start, of each source. Raises ``NvrtcMissing``, ``CompileFailed``."""
    parts = [(n, each) for n, source in enumerate(sources) for each in _programs(source, calls)]
    # Backward passes take longest and come first, so that no core waits for them at the end.
    parts.sort(key=lambda part: part[1].repeatable is None)
    made = compile_cuda_parts([(each.words, left_out(sources[n], each)) for n, each in parts], target)
    found: list[dict[CallKind, CudaBinary]] = [{} for _ in sources]
    for (n, each), binary in zip(parts, made, strict=True):
        found[n][each] = binary
    return tuple(map(GpuBinary, found))


def _programs(source: KernelSource, asked: CallKind) -> tuple[CallKind, ...]:
    """A program each: calls that repeat have one of their own where they start other kernels."""
    if not _REPEATABLE.search(source.text):
        return (replace(asked, repeatable=None),)
    return (asked,) if asked.repeatable is not None else tuple(replace(asked, repeatable=x) for x in (False, True))


def left_out(source: KernelSource, calls: CallKind) -> KernelSource:
    """The same text, told to leave out the kernels of other calls."""
    options = (
        (calls.dropped, "WITHOUT_DROPOUT", "WITH_DROPOUT"),
        (calls.repeatable, "ADDITIONS", "REPEATABLE"),
    )
    defines = [(f"FLASHGEN_{if_so if holds else if_not}", "0") for holds, if_so, if_not in options if holds is not None]
    moving = calls.moving
    if moving is not None and "FLASHGEN_MOVING" in source.text:
        defines.append(("FLASHGEN_MOVING", str(sum(("q" in moving, 2 * ("k" in moving), 4 * ("v" in moving))))))
    return replace(source, defines=tuple(defines))


def spills_of(plan: GpuPlan, kernels: tuple[Resources, ...]) -> Iterator[Spill]:
    """The tiles whose kernels spill more registers than is harmless."""
    for kernel in kernels:
        name = kernel.name.removeprefix(f"{plan.symbol}_").partition("_")[0]
        tiles = plan.own.of_kernel(name)
        if tiles is not None and kernel.spill_bytes > harmless_spill(tiles):
            yield Spill(plan.own.element, OF_KERNEL[name], tiles, kernel.spill_bytes)
