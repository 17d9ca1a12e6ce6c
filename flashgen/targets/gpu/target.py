"""``GpuTarget``: what the families of GPUs share of a target; each adds its name and its recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import Schedule
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.plan.packed import Image, ManifestBinary, ManifestGpuKernel, ManifestGpuSource, Packed
from flashgen.plan.plan import ANY_CALLS, WHOLE, CallKind, Part, Spill
from flashgen.targets.gpu import limits
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.compile import GpuBinary, compile_calls, spills_of
from flashgen.targets.gpu.launches import started
from flashgen.targets.gpu.plan import plan_gpu
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.recipes import Recipes
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import compiler_name


@dataclass(frozen=True)
class GpuTarget(Architecture):
    """An architecture of GPUs; see ``Target`` for what each method is."""

    family: ClassVar[str]
    recipes: ClassVar[Recipes]
    ships_binaries: ClassVar[bool] = True
    device: ClassVar[None] = None  # an architecture is of many products

    def limits(self, variant: Variant) -> tuple[Diagnostic, ...]:
        return limits.limits(variant)

    def takes_f8(self, variant: Variant) -> bool:  # noqa: ARG002 - some families do
        """Whether there are kernels that multiply q, k and v of 8 bits; elsewhere these are widened first."""
        return False

    def leaves_out(self, variant: Variant) -> tuple[str, ...]:  # noqa: ARG002 - kernels have all that a schedule says
        return ()

    def plan(self, variant: Variant, pins: Pins = PLANNERS_OWN, spills: Sequence[Spill] = ()) -> GpuPlan:
        # What a schedule says is of tiles of many queries, of more than 8 bits.
        spec = pins.pinned(replace(variant.spec, schedule=Schedule()) if variant.kind.forward_only else variant.spec)
        if pins.element is not None:
            spec = replace(spec, dtypes=(pins.element,))
        recipe = decide(variant)
        return replace(plan_gpu(recipe.of(spec=spec), self, self.recipes, spills), recipe=recipe)

    def parts(self, plan: GpuPlan) -> tuple[Part, ...]:
        return tuple(Part(element, name) for element in plan.by_element for name in plan.recipe.variant.kind.passes)

    def emit(self, variant: Variant, plan: GpuPlan, part: Part = WHOLE) -> KernelSource:  # noqa: ARG002 - the plan knows it
        from flashgen.targets.gpu.emit import emit_cuda

        return emit_cuda(plan, part.pass_name)

    def compile(self, sources: Sequence[KernelSource], calls: CallKind = ANY_CALLS) -> tuple[GpuBinary, ...]:
        return compile_calls(sources, calls, self.name)

    def spills(self, plan: GpuPlan, binary: GpuBinary) -> tuple[Spill, ...]:
        return tuple(spills_of(plan, binary.kernels))

    def packed(
        self,
        variant: Variant,  # noqa: ARG002 - the plan knows it
        source: KernelSource,
        plan: GpuPlan,
        part: Part,
        binary: GpuBinary | None,
    ) -> Packed:
        assert part.pass_name is not None, "a source has one pass"
        described = ManifestGpuSource(
            file=source.file_name,
            target=source.target,
            symbol=source.symbol,
            head_dim=str(source.head_dim),
            pass_name=part.pass_name,
            sram_bytes=plan.sram_bytes,
            tiles=plan.own,
            rejected=plan.rejected,
        )
        if binary is None:
            return Packed(described=described)
        launches = started(plan, (part.pass_name,))
        kernels = tuple(
            ManifestGpuKernel(
                each.name,
                source.target,
                each.registers,
                each.shared_bytes + launches[each.name].shared_bytes,
                each.spill_bytes,
                each.stack_bytes,
                launches[each.name].threads,
            )
            for each in binary.kernels
        )
        binaries = tuple(
            Image(
                ManifestBinary(
                    file=f"{source.name}{'_deterministic' if calls.repeatable else ''}.cubin",
                    source=source.file_name,
                    compiler=compiler_name(),
                    deterministic=calls.repeatable,
                ),
                each.path.read_bytes(),
            )
            for calls, each in binary.parts.items()
        )
        return Packed(described=described, binaries=binaries, kernels=kernels)
