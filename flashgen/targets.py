"""GPU targets: one head dimension of a spec, compiled for one architecture.

    Variant ─plan_cuda─▶ CudaPlan ─emit_cuda─▶ KernelSource ─compile_cuda─▶ CudaBinary

In: a ``Variant`` and a ``Target``. Out: a ``GpuKernel``. A plan whose kernels spill registers goes back to the planner,
which passes over those tiles. None of this needs a GPU, or torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flashgen.analysis.variant import Variant, analyse
from flashgen.cache import Cache
from flashgen.emit.cuda import emit_cuda
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.package import GpuFiles
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.plan.cuda_devices import TARGETS, Target
from flashgen.plan.cuda_launches import backward_launches, forward_launches
from flashgen.plan.cuda_plan import BackwardTiles, CudaPlan, ForwardTiles, QueryTiles
from flashgen.plan.cuda_planner import HARMLESS_SPILL, HARMLESS_WARPGROUP_SPILL, Choice, Spill, plan_cuda
from flashgen.plan.cuda_tables import BackwardChoice, ForwardChoice, QueryChoice
from flashgen.plan.launches import Launch
from flashgen.plan.manifest import Manifest, ManifestBinary, ManifestGpuKernel
from flashgen.runtime.nvrtc import CudaBinary, Resources, compile_cuda, compiler_name

# Which pass of a plan a kernel belongs to, by what follows its symbol; the others have no tiles.
_PASSES = {"forward": "forward", "backward": "backward", "keys": "backward", "queries": "queries"}


@dataclass(frozen=True)
class GpuKernel:
    """One head dimension on one architecture, after every stage."""

    variant: Variant
    plan: CudaPlan
    source: KernelSource
    binary: CudaBinary


class UnsupportedGpu(RuntimeError):  # noqa: N818 - reads as what it says
    """Nothing can be generated for a GPU; the message says why."""


def source_for(variant: Variant, target: Target, element: ElementType | None = None) -> tuple[CudaPlan, KernelSource]:
    """The plan and the source, of all element types or of one. Registers are left out of consideration."""
    return _emit(variant, target, element, ())


def compile_variant(variant: Variant, target: Target, element: ElementType | None = None) -> GpuKernel:
    """Plan, emit and compile, again until no kernel spills or the planner has nothing else.

    Raises ``SpecError``, ``NvrtcMissing``, ``CompileFailed``.
    """
    spills: list[Spill] = []
    while True:
        plan, source = _emit(variant, target, element, spills)
        binary = compile_cuda(source, target.name)
        found = [each for each in spills_of(plan, source.symbol, binary.kernels) if each not in spills]
        if not found:
            return GpuKernel(variant, plan, source, binary)
        spills += found


def spills_of(plan: CudaPlan, symbol: str, kernels: tuple[Resources, ...]) -> Iterator[Spill]:
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
        if kernel.spill_bytes > (HARMLESS_WARPGROUP_SPILL if tile.warpgroups else HARMLESS_SPILL):
            yield Spill(element.element, _PASSES[name], tile, kernel.spill_bytes)


def _choice(kind: type[Choice], tiles: ForwardTiles | BackwardTiles | QueryTiles) -> Choice:
    """The row of the planner's tables that tiles were made of."""
    return kind(**{each.name: getattr(tiles, each.name) for each in fields(kind)})


def _emit(
    variant: Variant, target: Target, element: ElementType | None, spills: Collection[Spill]
) -> tuple[CudaPlan, KernelSource]:
    plan = plan_cuda(variant, target, spills)
    if element is not None:
        plan = replace(plan, elements=tuple(each for each in plan.elements if each.element is element))
        if not plan.elements:
            raise UnsupportedGpu(
                f"'{variant.spec.name}' at head dimension {variant.head_dim} is not generated in {element} for "
                f"{target.name}: no tile fits its shared memory"
            )
    return plan, emit_cuda(variant, plan)


def target_of(device: str, capability: int, block_bytes: int) -> Target:
    """What to compile for a GPU: its own architecture; one that is not known yet gets the tiles of the last before."""
    known = [target for target in TARGETS.values() if target.capability <= capability]
    if not known:
        oldest = min(TARGETS.values(), key=lambda target: target.capability)
        raise UnsupportedGpu(
            f"'{device}' has compute capability {capability / 10}; the oldest that kernels are generated for is "
            f"{oldest.capability / 10}. backend='reference' runs on any GPU"
        )
    last = max(known, key=lambda target: (target.capability, target.name))
    if last.capability == capability:
        return last
    return Target(f"sm_{capability}", capability, min(last.block_bytes, block_bytes), last.sm_bytes)


# -- in packages -------------------------------------------------------------------------------------------------------


def files_of(kernel: GpuKernel) -> GpuFiles:
    """A compiled kernel as ``flashgen build`` writes it."""
    source, image, plan = kernel.source, kernel.binary.path.read_bytes(), kernel.plan
    launches = _launches(kernel.variant, plan, source.symbol)
    binary = ManifestBinary(
        file=f"{source.name}.cubin",
        sha256=_digest(image),
        source=source.file_name,
        source_sha256=_digest(source.text.encode()),
        target=source.target,
        symbol=source.symbol,
        head_dim=str(source.head_dim),
        compiler=compiler_name(),
        sram_bytes=plan.sram_bytes,
        elements=plan.elements,
        rejected=plan.rejected,
    )
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
        for each in kernel.binary.kernels
    )
    return GpuFiles(source, image, binary, kernels)


def packaged_kernel(
    folder: Path, manifest: Manifest, spec: AttentionSpec, head_dim: HeadDim, target: Target
) -> GpuKernel | None:
    """What a package brings for a GPU; None where nothing of it runs there.

    A source that was edited since, or whose binary is damaged, is compiled as it stands.
    """
    fitting = [each for each in manifest.binaries if each.head_dim == str(head_dim) and _runs_on(each, target)]
    if not fitting:
        return None
    found = max(fitting, key=lambda each: (TARGETS[each.target].capability, each.target))
    variant, plan = analyse(spec, head_dim), found.plan(spec.name)
    text = (folder / found.source).read_text(encoding="utf-8")
    source = KernelSource(Path(found.source).stem, found.target, found.symbol, head_dim, text, ())
    image = folder / found.file
    content = image.read_bytes() if image.is_file() else b""
    if _digest(text.encode()) == found.source_sha256 and _digest(content) == found.sha256:
        binary = CudaBinary(source.name, found.target, _stored(content), (), 0.0, cached=True)
    else:
        binary = compile_cuda(source, found.target)
    return GpuKernel(variant, plan, source, binary)


def _runs_on(binary: ManifestBinary, target: Target) -> bool:
    """A binary runs on its architecture and on later ones of the same generation, where its tiles fit their memory."""
    if binary.target == target.name:
        return True
    made_for = TARGETS.get(binary.target)
    if made_for is None or binary.target.endswith("a"):
        return False
    same_generation = made_for.capability // 10 == target.capability // 10
    return same_generation and made_for.capability <= target.capability and binary.sram_bytes <= target.block_bytes


def _stored(image: bytes) -> Path:
    """A cubin in the cache, whose path says what it holds: CuPy remembers modules by their paths."""
    return Cache.default().fetch(_digest(image), "kernels.cubin", lambda: {"kernels.cubin": image})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _launches(variant: Variant, plan: CudaPlan, symbol: str) -> dict[str, Launch]:
    """Every launch of every pass, by its kernel."""
    found: dict[str, Launch] = {}
    for element in plan.by_element:
        for dropped in (False, True):
            passes = [forward_launches(symbol, variant, plan, element, dropped=dropped)]
            passes += [
                backward_launches(
                    symbol, variant, plan, element, dropped=dropped, deterministic=deterministic, captured=captured
                )
                for deterministic, captured in ((False, True), (True, True), (True, False))
            ]
            for each in passes:
                found |= each.kernels
    return found
