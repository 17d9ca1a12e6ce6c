"""Kernels of GPUs that no spec shapes: a source of ``templates/cuda`` each, compiled when it is first launched.

In: the name of a source, which has one kernel, ``fg_<name>``; a struct of arguments. Out: its launch on PyTorch's
current stream.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.store.gallery import shipped
from flashgen.store.headers import Text, headers_of

ROWS = 8  # of a block, a warp each


@dataclass(frozen=True)
class Standalone:
    """A kernel of a GPU that no spec shapes, by the name of its source."""

    name: str

    @functools.cached_property
    def source(self) -> Text:
        """The source with its headers."""
        text = (shipped("templates") / "cuda" / f"{self.name}.cu").read_text(encoding="utf-8")
        return Text(self.name, text, headers_of(text))

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
