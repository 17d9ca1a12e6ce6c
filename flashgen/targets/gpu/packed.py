"""What a package holds of a source for GPUs: the source with all of its plan, and binaries where it was compiled."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.packed import Image, ManifestBinary, ManifestGpuKernel, ManifestGpuSource, Packed
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.started import started
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import compiler_name


def packed(source: KernelSource, plan: GpuPlan, binary: GpuBinary | None) -> Packed:
    """A kernel as ``flashgen build`` writes it."""
    described = ManifestGpuSource(
        file=source.file_name,
        target=source.target,
        symbol=source.symbol,
        head_dim=str(source.head_dim),
        sram_bytes=plan.sram_bytes,
        elements=plan.elements,
        rejected=plan.rejected,
    )
    if binary is None:
        return Packed(described=described)
    launches = started(source.symbol, plan)
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
                file="_".join((source.name, *part.words.split(", "))) + ".cubin",
                source=source.file_name,
                compiler=compiler_name(),
                element=str(part.element),
                pass_name=part.pass_name,
                deterministic=part.calls.repeatable,
            ),
            each.path.read_bytes(),
        )
        for part, each in binary.parts.items()
    )
    return Packed(described=described, binaries=binaries, kernels=kernels)


def plan_of(described: ManifestGpuSource, variant: Variant) -> GpuPlan:
    """The decisions of a packed source, without their reasons: those stand in the source."""
    return GpuPlan(
        spec_name=variant.spec.name,
        head_dim=described.head_dim,
        target=described.target,
        sram_bytes=described.sram_bytes,
        recipe=decide(variant),
        elements=tuple(described.elements),
        reasons=(),
        rejected=described.rejected,
    )
