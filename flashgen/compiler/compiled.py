"""The one compiled thing: what a spec became for a head dimension, a target and tiles. One way for every target:

    compiled(variant, target, pins, part)   Variant ─plan─▶ Plan ─emit─▶ KernelSource, when it is asked for
    assembled(kernels, calls)               … ─compile─▶ Binary, planned again while kernels of it spill registers

``check``, ``plan``, ``build``, the plan and the sources that an op shows and the kernels that its calls run all ask
``compiled``, which remembers: what is shown is what runs. ``pins`` are the tiles that were tuned or that go with a
call's length (``choice.py``), none the planner's own. Spills are known to an assembler alone, so that ``assembled`` may
pass over tiles that ``compiled`` takes; where there is none (texts that ``build`` writes, the emulator) they are left
out of consideration.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from flashgen.analysis.variant import Variant
from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.plan.packed import Packed
from flashgen.plan.plan import ANY_CALLS, WHOLE, CallKind, Part, Spill
from flashgen.targets.protocol import AnyTarget, BinaryT, PlanT, Target

_MOST_REMEMBERED = 256


@dataclass(frozen=True)
class CompiledKernel(Generic[PlanT, BinaryT]):
    """One head dimension for one target, after every stage but the compiler of its source.

    ``variant`` is the spec's, before pins; ``spills`` are those of tiles that its plan passed over. ``part`` is what
    the source holds: of a GPU one pass of one element type, the only one of the plan; the text for CPUs depends on the
    spec alone, and macros carry the tiles of the device.
    """

    variant: Variant
    target: Target[PlanT, BinaryT]
    pins: Pins
    part: Part
    spills: tuple[Spill, ...]
    plan: PlanT

    @functools.cached_property
    def source(self) -> KernelSource:
        """The generated text."""
        return self.target.emit(self.variant, self.plan, self.part)

    def parts(self) -> tuple[CompiledKernel[PlanT, BinaryT], ...]:
        """One for each source that the target has of this plan."""
        return tuple(compiled(self.variant, self.target, self.pins, each) for each in self.target.parts(self.plan))

    def packed(self, binary: BinaryT | None = None) -> Packed:
        """What a generated package holds of it."""
        return self.target.packed(self.variant, self.source, self.plan, self.part, binary)


@dataclass(frozen=True)
class Assembled(Generic[PlanT, BinaryT]):
    """What a target's compiler made of a kernel's source, for the calls that were asked for."""

    kernel: CompiledKernel[PlanT, BinaryT]
    binary: BinaryT


def assembled(
    kernels: Sequence[CompiledKernel[PlanT, BinaryT]], calls: CallKind = ANY_CALLS
) -> tuple[Assembled[PlanT, BinaryT], ...]:
    """Compile kernels of one target side by side; those that spill again with other tiles, until none of them does.

    Raises ``SpecError``, ``CompilerMissing``, ``CompileFailed``.
    """
    if not kernels:
        return ()
    target = kernels[0].target
    binaries = target.compile([each.source for each in kernels], calls)
    made = [Assembled(kernel, binary) for kernel, binary in zip(kernels, binaries, strict=True)]
    again: dict[int, CompiledKernel[PlanT, BinaryT]] = {}
    for n, (kernel, binary) in enumerate(zip(kernels, binaries, strict=True)):
        spills = dict.fromkeys((*kernel.spills, *target.spills(kernel.plan, binary)))
        if len(spills) > len(kernel.spills):
            again[n] = compiled(kernel.variant, target, kernel.pins, kernel.part, tuple(spills))
    for n, each in zip(again, assembled(tuple(again.values()), calls), strict=True):
        made[n] = each
    return tuple(made)


def compiled(
    variant: Variant,
    target: Target[PlanT, BinaryT],
    pins: Pins = PLANNERS_OWN,
    part: Part = WHOLE,
    spills: Sequence[Spill] = (),
) -> CompiledKernel[PlanT, BinaryT]:
    """The compiled thing. Raises ``SpecError`` where no tile works on the target, or what is pinned does not."""
    spec = variant.spec
    written = (*(each.text for each in spec.sources), *(each.text for each in spec.statements))
    own = replace(pins, element=part.element or pins.element, reasons=())
    return _compiled(variant, written, target, own, part, tuple(spills))


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def _compiled(
    variant: Variant,
    written: tuple[str, ...],  # sources quote the spec, whose text two equal ones need not share
    target: AnyTarget,
    pins: Pins,
    part: Part,
    spills: tuple[Spill, ...],
) -> CompiledKernel[Any, Any]:
    if part == WHOLE:
        plan = target.plan(variant, pins, spills)
    else:  # the parts of an element type share its plan
        plan = _compiled(variant, written, target, pins, WHOLE, spills).plan
    return CompiledKernel(variant, target, pins, part, spills, plan)


def with_reasons(plan: PlanT, *pins: Pins) -> PlanT:
    """A plan with the reasons of its pins. Sources do without: theirs is the same text for all who pin so."""
    said = dict.fromkeys(reason for each in pins for reason in each.reasons)
    return replace(plan, reasons=(*plan.reasons, *said))
