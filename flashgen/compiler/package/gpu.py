"""What an opened package brings for a GPU.

In: the folder of a package, a ``GpuTarget``. Out: ``Packaged``. None of this needs a GPU, or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.compiler.package.manifest import Manifest, digest
from flashgen.compiler.package.sources import source_of
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.types import ElementType
from flashgen.plan.packed import ManifestGpuSource
from flashgen.plan.plan import ANY_CALLS, CallKind
from flashgen.store.cache import Cache
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.nvrtc import Resources


@dataclass(frozen=True)
class Packaged:
    """What a package brings for a GPU: a source as it stands in the folder, the plan that it was written with.

    ``images`` are the paths of the binaries that were made of this source, ``resources`` those of its kernels. A source
    of which a file was ``edited``, itself or a header, is what its user wants to run, whatever the shape.
    """

    source: KernelSource
    plan: GpuPlan
    edited: str
    images: Mapping[CallKind, Path]
    resources: tuple[Resources, ...]

    def image(self, calls: CallKind) -> Path | None:
        """The binary that has all kernels of such calls, if there is one."""
        return next((path for each, path in self.images.items() if each.covers(calls)), None)


def packaged(
    folder: Path, manifest: Manifest, usual: GpuPlan, target: GpuTarget
) -> Mapping[tuple[ElementType, str], Packaged]:
    """What a package brings for a GPU, by element type and pass, where the planner has the ``usual`` plan.

    Nothing where nothing of it runs there. Raises ``OSError``.
    """
    fitting = [each for each in manifest.gpu_sources if each.head_dim == usual.head_dim and _runs_on(each, target)]
    nearest = max((each.target for each in fitting), key=lambda each: (GPUS[each].capability, each), default="")
    own = [each for each in fitting if each.target == nearest]
    return {(each.tiles.element, each.pass_name): _packaged(folder, manifest, each, usual) for each in own}


def _packaged(folder: Path, manifest: Manifest, written: ManifestGpuSource, usual: GpuPlan) -> Packaged:
    source, edited = source_of(folder, manifest, written)
    images: dict[CallKind, Path] = {}
    for binary in manifest.binaries:
        if binary.source != written.file or edited or not (folder / binary.file).is_file():
            continue
        content = (folder / binary.file).read_bytes()
        if digest(content) == manifest.files.get(binary.file):
            images[replace(ANY_CALLS, repeatable=binary.deterministic)] = _stored(content)
    resources = tuple(
        Resources(each.name, each.registers, 0, each.spill_bytes, each.stack_bytes)
        for each in manifest.gpu_kernels
        if each.target == written.target
    )
    plan = replace(  # without its reasons, which stand in the source
        usual,
        sram_bytes=written.sram_bytes,
        target=written.target,
        elements=(written.tiles,),
        reasons=(),
        rejected=written.rejected,
        decisions=(),
    )
    return Packaged(source, plan, edited, images, resources if images else ())


def _runs_on(source: ManifestGpuSource, target: GpuTarget) -> bool:
    """What was written for an architecture runs on later ones of the same generation, where its tiles fit."""
    if source.target == target.name:
        return True
    made_for = GPUS.get(source.target)
    if made_for is None or source.target.endswith("a"):
        return False
    same_generation = made_for.capability // 10 == target.capability // 10
    return same_generation and made_for.capability <= target.capability and source.sram_bytes <= target.block_bytes


def _stored(image: bytes) -> Path:
    """A cubin in the cache, whose path says what it holds: CuPy remembers modules by their paths."""
    return Cache.default().fetch(digest(image), "kernels.cubin", lambda: {"kernels.cubin": image})
