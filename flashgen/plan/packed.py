"""What a generated package holds of one source, and what its manifest says of it: plain data, for every target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.plan.plan import Rejection, Tiles


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
    """A binary of one of the sources, and what compiled it.

    ``deterministic``: it has the kernels of calls whose gradients have to repeat, and not those of others; False: it
    has those of others; None: of both.
    Of libraries for CPUs: the kind of ``system``, the ``features`` that a CPU needs (None: it has to be the ``cpu`` of
    this digest), the tiles that are compiled in, and the memory that they live in. Other binaries have none of these.
    """

    file: str
    source: str
    compiler: str
    deterministic: bool | None = None
    system: str | None = None
    features: tuple[str, ...] | None = None
    cpu: str | None = None
    sram_bytes: int | None = None
    tiles: Mapping[str, Mapping[str, int]] | None = None


@dataclass(frozen=True)
class ManifestGpuSource:
    """A pass of one head dimension and element type for one GPU architecture: the source, the kernels' prefix, tiles.

    The tiles are the planner's own, for long sequences; short calls may take others, which are compiled from the spec.
    """

    file: str
    target: str
    symbol: str
    head_dim: str
    pass_name: str
    sram_bytes: int
    tiles: Any  # the family's, which say the element type: plain data, once they are written
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True)
class Image:
    """A binary as it goes into a package: what the manifest says of it, and its bytes."""

    described: ManifestBinary
    content: bytes


@dataclass(frozen=True)
class Packed:
    """One source: what the manifest says of it, and binaries where there are some.

    A source is ``described`` with all of its plan where its target has several plans, else ``kernel`` says its tiles.
    """

    kernel: ManifestKernel | None = None
    described: ManifestGpuSource | None = None
    binaries: tuple[Image, ...] = ()
    kernels: tuple[ManifestGpuKernel, ...] = ()
