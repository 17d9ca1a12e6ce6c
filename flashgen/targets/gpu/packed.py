"""What a package holds of a source for GPUs: its pass and plan, and binaries where it was compiled."""

from __future__ import annotations

from dataclasses import replace

from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.packed import Image, ManifestBinary, ManifestGpuKernel, ManifestGpuSource, Packed
from flashgen.plan.plan import Part
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.started import started
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import compiler_name


def packed(source: KernelSource, plan: GpuPlan, part: Part, binary: GpuBinary | None) -> Packed:
    """A source as ``flashgen build`` writes it."""
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


def plan_of(described: ManifestGpuSource, usual: GpuPlan) -> GpuPlan:
    """The decisions of a packed source, without their reasons, which stand in the source; ``usual``: the planner's."""
    return replace(
        usual,
        sram_bytes=described.sram_bytes,
        target=described.target,
        elements=(described.tiles,),
        reasons=(),
        rejected=described.rejected,
        decisions=(),
    )
