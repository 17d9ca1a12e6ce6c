"""A GPU of this machine as a ``Machine``: kernels are compiled by NVRTC and started through CuPy."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashgen.compiler.compiled import CompiledKernel, assembled
from flashgen.hosts import cuda
from flashgen.hosts.cpu_backend import Package
from flashgen.hosts.gpu_kernel import Find
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.machine import Machine, Made
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.plan.plan import CallKind
from flashgen.targets.device_table import board_of
from flashgen.targets.registry import target_of


@dataclass(frozen=True, eq=False)
class CudaMachine(Machine):
    """One GPU, and its driver."""

    driver: cuda.Driver
    backend = "cuda"

    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Path]:
        (made,) = assembled([kernel], calls)
        (binary,) = made.binary.parts.values()
        return Made(made.kernel.plan, made.kernel.source, lambda _: binary.path, binary.kernels)

    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> cuda.CudaKernel:
        return cuda.CudaKernel(layout, head_dim, find, self.size, driver=self.driver)


def cuda_provider(spec: AttentionSpec, package: Package | None = None, kind: Kind = DENSE) -> GpuProvider:
    """The kernels of a spec for CUDA tensors."""
    at = functools.cache(_machine)
    return GpuProvider(
        spec, lambda index: at(cuda.current_device() if index is None else index), kind=kind, package=package
    )


def _machine(index: int) -> CudaMachine:
    driver = cuda.CupyDriver(index)
    name, *figures = cuda.describe_device(index)
    target, size = target_of(name, *figures), driver.size
    gpu = replace(board_of(target, name), product=name, sms=size.multiprocessors, l2_bytes=size.cache_bytes)
    return CudaMachine(name, target, gpu, size, driver)
