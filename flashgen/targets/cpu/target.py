"""``CpuTarget``: shared libraries for one CPU; see ``Target`` for what each method is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.recall import cpu_source
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.plan.packed import Image, ManifestBinary, ManifestKernel, Packed
from flashgen.plan.plan import ANY_CALLS, WHOLE, CallKind, Part, Spill
from flashgen.targets.cpu import limits
from flashgen.targets.cpu.device import GENERIC_CPU, Cpu, local_cpu
from flashgen.targets.cpu.plan import CpuPlan, plan_cpu
from flashgen.toolchains.cpp import Binary, compile_sources, cpu_identity, find_compiler, needed_features, system_kind


@dataclass(frozen=True)
class CpuTarget:
    """The CPU ``device``. Its text depends on the spec alone: macros carry the tiles of the device."""

    device: Cpu
    name: ClassVar[str] = "cpu"
    family: ClassVar[str] = "cpu"
    ships_binaries: ClassVar[bool] = True

    def limits(self, variant: Variant) -> tuple[Diagnostic, ...]:
        return limits.limits(variant)

    def leaves_out(self, variant: Variant) -> tuple[str, ...]:
        return limits.unused_pins(variant)

    def plan(self, variant: Variant, pins: Pins = PLANNERS_OWN, spills: Sequence[Spill] = ()) -> CpuPlan:  # noqa: ARG002 - the host's compiler says nothing of spills
        return plan_cpu(variant, self.device, pins)

    def parts(self, plan: CpuPlan) -> tuple[Part, ...]:  # noqa: ARG002 - macros choose what a library has
        return (WHOLE,)

    def emit(self, variant: Variant, plan: CpuPlan, part: Part = WHOLE) -> KernelSource:  # noqa: ARG002 - see above
        def emitted() -> KernelSource:
            from flashgen.targets.cpu.emit import emit_cpu

            return emit_cpu(variant, plan_cpu(variant, GENERIC_CPU))

        return replace(cpu_source(variant, emitted), defines=plan.defines)

    def compile(self, sources: Sequence[KernelSource], calls: CallKind = ANY_CALLS) -> tuple[Binary, ...]:  # noqa: ARG002 - they have all
        return compile_sources(sources)

    def spills(self, plan: CpuPlan, binary: Binary) -> tuple[Spill, ...]:  # noqa: ARG002 - a compiler says nothing of them
        return ()

    def packed(
        self,
        variant: Variant,
        source: KernelSource,
        plan: CpuPlan,
        part: Part,  # noqa: ARG002 - see above
        binary: Binary | None,
    ) -> Packed:
        own = plan_cpu(variant, GENERIC_CPU)
        head_dim = str(source.head_dim)
        kernel = ManifestKernel(source.file_name, self.name, source.symbol, head_dim, own.forward, own.backward)
        if binary is None:  # the same on every machine
            return Packed(kernel)
        compiler = find_compiler()
        described = ManifestBinary(
            file=f"{source.name}.so",
            source=source.file_name,
            compiler=(compiler.version.splitlines() or [compiler.name])[0],
            system=system_kind(),
            features=needed_features(compiler),
            cpu=hashlib.sha256(cpu_identity().encode()).hexdigest(),
            sram_bytes=plan.sram_bytes,
            tiles=plan.tiles_as_json(),
        )
        return Packed(kernel, binaries=(Image(described, binary.path.read_bytes()),))


def targets() -> Mapping[str, CpuTarget]:
    """The one that the machine at hand is."""
    return {CpuTarget.name: CpuTarget(local_cpu())}
