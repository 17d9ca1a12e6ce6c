"""What an opened package brings for CPUs: libraries, for machines without a compiler.

In: the folder of a package and its spec. Out: a ``Library`` for each head dimension, or why there is none. They are
taken only where nobody changed them or their sources, and where the CPU has every feature that they may use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashgen.compiler.package.manifest import Manifest, digest
from flashgen.compiler.package.sources import source_of
from flashgen.diagnostics import quoted_list
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.plan.packed import ManifestBinary
from flashgen.targets.cpu.plan import CpuPlan, tiles_from_json
from flashgen.toolchains.cpp import cpu_identity
from flashgen.toolchains.cpu_features import lacking, system


@dataclass(frozen=True)
class Library:
    """A library of a package: where it is, and the plan that it was compiled with."""

    path: Path
    plan: CpuPlan


class NoLibrary(Exception):  # noqa: N818 - reads as what happened
    """A package brings no library that runs here; the message says why."""


def libraries(folder: Path, manifest: Manifest, spec: AttentionSpec) -> dict[HeadDim, Library]:
    """One for each head dimension. Raises ``NoLibrary``, and ``OSError``."""
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
    if binary.system != system():
        raise NoLibrary(f"'{binary.file}' was compiled for {binary.system}, this is {system()}")
    if binary.features is None:
        if binary.cpu != digest(cpu_identity().encode()):
            raise NoLibrary(f"'{binary.file}' was compiled for another CPU")
        return
    absent = lacking(binary.features)
    if absent:
        raise NoLibrary(
            f"'{binary.file}' was compiled for a CPU with {quoted_list(absent, 'and')}, which this one lacks"
        )
