"""Kernels of GPUs that no spec shapes: a source of ``templates/cuda`` each, compiled when it is first launched.

In: the name of a source, which has one kernel, ``fg_<name>``, over some of the primitives; a struct of arguments. Out:
its launch on PyTorch's current stream.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.store.shipped import shipped

ROWS = 8  # of a block, a warp each


@dataclass(frozen=True)
class Text:
    """The source, on its own."""

    name: str
    text: str
    defines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Standalone:
    """One of them, and the ``primitives`` that stand before it, without what they include."""

    name: str
    primitives: tuple[str, ...]

    @functools.cached_property
    def source(self) -> Text:
        """With the primitives that it takes."""
        folder = shipped("templates") / "cuda"
        files = (*(folder / "primitives" / each for each in self.primitives), folder / f"{self.name}.cu")
        text = "\n".join(each.read_text(encoding="utf-8") for each in files)
        lines = (line for line in text.splitlines() if not line.startswith(("#pragma once", '#include "')))
        return Text(self.name, "\n".join(lines) + "\n")

    def launch(self, index: int, arguments: ctypes.Structure, rows: int) -> None:
        """Start a warp for each of so many rows on a device. Raises ``CudaMissing`` where nothing can be launched."""
        driver, function = _loaded(self, index)
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        with driver.enter():
            driver.launch(function, grid(rows), 32 * ROWS, 0, driver.stream(), ctypes.addressof(pointer))


def grid(rows: int) -> int:
    """The blocks of so many rows."""
    return -(-rows // ROWS)


@functools.cache
def _loaded(kernel: Standalone, index: int) -> tuple[Any, int]:
    from flashgen.hosts import cuda
    from flashgen.toolchains.nvrtc import compile_cuda

    major, minor = torch.cuda.get_device_capability(index)
    binary = compile_cuda(kernel.source, f"sm_{major}{minor}")
    driver = cuda.CupyDriver(index)
    return driver, driver.function(binary.path, f"fg_{kernel.name}", 0)
