"""What a generated package says of itself: written by ``flashgen build``, read at every import."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.ir.types import ElementType
from flashgen.plan.cuda_plan import BackwardTiles, CudaPlan, ElementPlan, ForwardTiles, QueryTiles
from flashgen.plan.plan import Rejection, Tiles
from flashgen.version import __version__

FILE_NAME = "manifest.json"
SPEC_FILE_NAME = "spec.json"  # the parsed spec, constants and imports resolved
# Counts up when the files of a package or the kernels' arguments change their meaning.
FORMAT = 3


@dataclass(frozen=True)
class ManifestKernel:
    """One generated source: its file, its functions' prefix, and the tiles that it has by default."""

    file: str
    target: str
    symbol: str
    head_dim: str
    forward: Tiles
    backward: Tiles


@dataclass(frozen=True)
class ManifestGpuKernel:
    """One kernel of a GPU binary, and what it takes of a multiprocessor: a thread's registers, a block's memory."""

    name: str
    target: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    threads: int


@dataclass(frozen=True)
class ManifestBinary:
    """One head dimension for one GPU architecture: the binary, the source, what compiled it, the tiles."""

    file: str
    sha256: str
    source: str
    source_sha256: str
    target: str
    symbol: str
    head_dim: str
    compiler: str
    sram_bytes: int
    elements: tuple[ElementPlan, ...]
    rejected: tuple[Rejection, ...]

    def plan(self, spec_name: str) -> CudaPlan:
        """The decisions, without their reasons: those stand in the source."""
        return CudaPlan(spec_name, self.head_dim, self.target, self.sram_bytes, self.elements, (), self.rejected)


@dataclass(frozen=True)
class Manifest:
    """A package: the operator's name, what identifies its spec, the generated sources, binaries and their kernels."""

    name: str
    sha256: str
    kernels: tuple[ManifestKernel, ...]
    gpu_kernels: tuple[ManifestGpuKernel, ...] = ()
    binaries: tuple[ManifestBinary, ...] = ()

    def to_json(self) -> str:
        """The text of the file; the same for the same manifest."""
        content = asdict(self)
        content["kernels"] += content.pop("gpu_kernels")
        if not self.binaries:
            del content["binaries"]
        return json.dumps({"format": FORMAT, "flashgen": __version__, **content}, indent=2, default=str) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a package; ``ImportError`` where it is damaged or another version's."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") == FORMAT:
                content.pop("flashgen")
                entries = content.pop("kernels")
                return cls(
                    kernels=tuple(_kernel(entry) for entry in entries if "registers" not in entry),
                    gpu_kernels=tuple(ManifestGpuKernel(**entry) for entry in entries if "registers" in entry),
                    binaries=tuple(_binary(entry) for entry in content.pop("binaries", ())),
                    **content,
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImportError(f"'{path}' cannot be read ({error}); {rebuild_hint(folder)}") from None
        writer = f"'{folder}' was written by flashgen {content.get('flashgen')}, this is {__version__}"
        raise ImportError(f"{writer}; {rebuild_hint(folder)}")


def rebuild_hint(folder: Path) -> str:
    """What to do about a package that does not work."""
    return f"run 'flashgen build' for its spec again to write '{folder.name}' anew"


def _kernel(entry: dict[str, Any]) -> ManifestKernel:
    tiles = {name: Tiles(**entry[name]) for name in ("forward", "backward")}
    return ManifestKernel(**{**entry, **tiles})


def _binary(entry: dict[str, Any]) -> ManifestBinary:
    elements = tuple(
        ElementPlan(
            ElementType(each["element"]),
            ForwardTiles(**each["forward"]),
            BackwardTiles(**each["backward"]),
            QueryTiles(**each["queries"]),
        )
        for each in entry["elements"]
    )
    rejected = tuple(Rejection(**each) for each in entry["rejected"])
    return ManifestBinary(**{**entry, "elements": elements, "rejected": rejected})
