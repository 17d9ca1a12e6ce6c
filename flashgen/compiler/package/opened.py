"""What an opened package brings: sources as they stand in its folder, binaries for a GPU, libraries for CPUs.

In: the folder of a package and its manifest, a ``GpuTarget`` or a spec. Out: ``KernelSource``s with the headers beside
them, ``Packaged``, ``Library``. None of this needs a GPU, or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flashgen.compiler.package.manifest import INCLUDE, Manifest, digest
from flashgen.diagnostics import quoted_list
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.plan.packed import ManifestBinary, ManifestGpuSource, ManifestKernel
from flashgen.plan.plan import ANY_CALLS, CallKind
from flashgen.store.cache import Cache
from flashgen.store.headers import headers_of, shipped_header
from flashgen.targets.cpu.plan import CpuPlan, tiles_from_json
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import cpu_identity, lacking_features, system_kind
from flashgen.toolchains.nvrtc import Resources


def source_of(
    folder: Path, manifest: Manifest, written: ManifestKernel | ManifestGpuSource
) -> tuple[KernelSource, str]:
    """A source with its headers, and which of these files was edited, if any. Raises ``OSError``."""
    text = (folder / written.file).read_text(encoding="utf-8")
    headers = headers_of(text, lambda name: _header(folder, manifest, name))
    texts = {written.file: text, **{f"{INCLUDE}/{name}": header for name, header in headers}}
    edited = (name for name, each in texts.items() if digest(each.encode()) != manifest.files.get(name))
    head_dim = HeadDim(*map(int, (written.head_dim.split("/") * 2)[:2]))
    return KernelSource(written.file, written.target, written.symbol, head_dim, text, (), headers), next(edited, "")


def _header(folder: Path, manifest: Manifest, name: str) -> str:
    """A header of a package; of one without its own, that which comes with flashgen, where it still is the same."""
    try:
        return (folder / INCLUDE / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        found = shipped_header(name)
        if digest(found.encode()) != manifest.files.get(f"{INCLUDE}/{name}"):
            raise
        return found


def edited_sources(folder: Path, manifest: Manifest) -> tuple[KernelSource, ...]:
    """The sources of a package that do not say any more what was written. Raises ``OSError``."""
    written: tuple[ManifestKernel | ManifestGpuSource, ...] = (*manifest.kernels, *manifest.gpu_sources)
    found = [source_of(folder, manifest, each) for each in written]
    return tuple(source for source, edited in found if edited)


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


@dataclass(frozen=True)
class Library:
    """A library of a package: where it is, and the plan that it was compiled with."""

    path: Path
    plan: CpuPlan


class NoLibrary(Exception):  # noqa: N818 - reads as what happened
    """A package brings no library that runs here; the message says why."""


def libraries(folder: Path, manifest: Manifest, spec: AttentionSpec) -> dict[HeadDim, Library]:
    """One for each head dimension, for machines without a compiler. Raises ``NoLibrary``, and ``OSError``.

    They are taken only where nobody changed them or their sources, and where the CPU has every feature that they may
    use.
    """
    found: dict[HeadDim, Library] = {}
    by_source = {each.source: each for each in manifest.binaries}
    for kernel, head_dim in zip(manifest.kernels, spec.head_dims, strict=True):
        binary = by_source.get(kernel.file)
        if binary is None:
            raise NoLibrary("the package holds none for CPUs; `flashgen build --target cpu` makes it")
        library, (_, edited) = folder / binary.file, source_of(folder, manifest, kernel)
        if edited or not library.is_file() or digest(library.read_bytes()) != manifest.files.get(binary.file):
            raise NoLibrary(f"'{edited or binary.file}' of the package is missing or was edited")
        _check_fits(binary)
        why = f"compiled when the package was built, by {binary.compiler}"
        tiles = tiles_from_json(binary.tiles or {})
        plan = CpuPlan(manifest.name, kernel.head_dim, binary.sram_bytes or 0, (why,), (), "local", tiles)
        found[head_dim] = Library(library, plan)
    return found


def _check_fits(binary: ManifestBinary) -> None:
    if binary.system != system_kind():
        raise NoLibrary(f"'{binary.file}' was compiled for {binary.system}, this is {system_kind()}")
    if binary.features is None:
        if binary.cpu != digest(cpu_identity().encode()):
            raise NoLibrary(f"'{binary.file}' was compiled for another CPU")
        return
    absent = lacking_features(binary.features)
    if absent:
        raise NoLibrary(
            f"'{binary.file}' was compiled for a CPU with {quoted_list(absent, 'and')}, which this one lacks"
        )
