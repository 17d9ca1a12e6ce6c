"""What runs an op: for each type of device a provider, which gives the kernel of a head dimension.

In: an ``AttentionSpec``, a backend, a package. Out: providers of kernels, which also say what they run (``Shows`` in
``op/op_shown.py``). Whatever takes time (compiling, loading, asking for a GPU) is done when a kernel is first
needed. Kernels of the CPU are made at once where there is no GPU, so that the first call does not wait. Hosts that a
backend does not use are not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.diagnostics import quoted_list
from flashgen.hosts.cpu_backend import CPU_TANGENTS, Package, Texts, cpu_provider
from flashgen.hosts.kernel import Kernel, KernelProvider, of_spec
from flashgen.ir.spec import AttentionSpec, HeadDim

if TYPE_CHECKING:
    from flashgen.targets.gpu.target import GpuTarget

EMULATED = "sm_80"  # the target of the emulator by default

Providers = Mapping[str, KernelProvider | None]


def providers(
    spec: AttentionSpec,
    backend: str | None,
    package: Package | None = None,
    texts: Texts | None = None,
    target: str = EMULATED,
) -> Providers:
    """The providers of a backend, by type of device; ``target`` is what the emulator's kernels are made for."""
    match backend:
        case "reference":
            return {}
        case "emulator":
            from flashgen.hosts.emulated import emulator_provider
            from flashgen.targets.registry import GPUS

            return {"cpu": emulator_provider(spec, GPUS[target])}
        case "cpu":
            return {"cpu": cpu_provider(spec, texts, package)}
    from flashgen.hosts import cuda

    own: Providers = {"cuda": cuda.cuda_provider(spec, package)}
    if backend == "cuda":
        return own
    return {"cpu": cpu_provider(spec, texts, package, warns=not cuda.is_there()), **own}


def deferred(spec: AttentionSpec, backend: str | None, target: str = EMULATED) -> Providers:
    """The same providers, made when a kernel is first needed."""
    made = functools.cache(functools.partial(providers, spec, backend, None, None, target))
    devices = {"reference": (), "cuda": ("cuda",), None: ("cpu", "cuda")}.get(backend, ("cpu",))
    return {each: Deferred(made, each, backend) for each in devices}


@dataclass(frozen=True, eq=False)
class Deferred:
    """A provider that is made when a kernel is first needed."""

    made: Callable[[], Providers]
    device: str
    backend: str | None

    @property
    def takes_tangents(self) -> tuple[str, str]:
        """What kernels of forward mode take, and those of its backward pass."""
        if self.device == "cpu" and self.backend != "emulator":
            return CPU_TANGENTS
        from flashgen.hosts.gpu_calls import GPU_TANGENTS

        return GPU_TANGENTS

    def __call__(self, head_dim: HeadDim, index: int) -> Kernel | None:
        provider = self.made()[self.device]
        return None if provider is None else provider(head_dim, index)

    def of_spec(self, spec: AttentionSpec) -> KernelProvider | None:
        """The provider of another spec, if this one has kernels for GPUs."""
        return of_spec(self.made()[self.device], spec)


def emulated_target(backend: str | None, name: str | None) -> str:
    """The emulator's target by name. Raises ``ValueError`` for an unknown one, and for one with another backend."""
    if name is None:
        return EMULATED
    if backend != "emulator":
        asked = "the default backend" if backend is None else f"backend '{backend}'"
        raise ValueError(f"target '{name}' is for backend='emulator'; {asked} runs on the machine at hand")
    from flashgen.targets.registry import GPUS

    if name not in GPUS:
        raise ValueError(f"there is no target '{name}' to emulate; known are {quoted_list(GPUS, 'and')}")
    return name


def gpu_at_hand() -> GpuTarget:
    """The target of PyTorch's current GPU. Raises ``ValueError`` where the backend 'cuda' cannot work."""
    from flashgen.hosts import cuda
    from flashgen.targets.gpu.architecture import UnsupportedGpu
    from flashgen.targets.registry import target_of

    try:
        cuda.check()
        return target_of(*cuda.describe_device(cuda.current_device()))
    except (cuda.CudaMissing, UnsupportedGpu) as error:
        raise ValueError(f"backend 'cuda': {error}") from None
