"""The sources of an opened package, as they stand in its folder.

In: the folder and its manifest. Out: ``KernelSource``s with the headers beside them, and which file was edited.
"""

from __future__ import annotations

from pathlib import Path

from flashgen.compiler.package.manifest import INCLUDE, Manifest, digest
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import HeadDim
from flashgen.plan.packed import ManifestGpuSource, ManifestKernel
from flashgen.store.headers import headers_of, shipped_header


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
