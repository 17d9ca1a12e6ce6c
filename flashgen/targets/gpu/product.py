"""A product: what the model of time knows of a GPU beside its architecture. They stand in ``devices.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from flashgen.targets.gpu.target import GpuTarget


@dataclass(frozen=True)
class Gpu:
    """One product.

    ``reported``: what CUDA calls it. ``target``: its architecture, with the shared memory of this product. ``sms``
    multiprocessors at ``clock_hz`` (boost); ``l2_bytes`` shared by all of them, ``l2_bytes_per_clock`` where somebody
    has published it. Bandwidth in bytes a second, dense peaks in operations a second: ``tensor_16`` for 16-bit operands
    and float32 sums, ``tensor_tf32`` (None: there is none), ``fma`` of the float32 units. ``sources`` by figure.
    """

    name: str
    product: str
    reported: str
    target: GpuTarget
    sms: int
    clock_hz: float
    l2_bytes: int
    l2_bytes_per_clock: float | None
    bandwidth: float
    tensor_16: float
    tensor_tf32: float | None
    fma: float
    sources: Mapping[str, str] = field(compare=False)
    is_own: bool = False
    kind: ClassVar[str] = "gpu"
    tiles_by_element: ClassVar[bool] = True

    @property
    def remarks(self) -> tuple[str, ...]:
        """What has to be said with every plan for it."""
        if self.is_generated_for:
            return ()
        return (f"kernels are not generated for {self.target.name}: this is a plan for comparison only",)

    @property
    def is_generated_for(self) -> bool:
        """Whether kernels are generated for it."""
        return self.target.is_generated

    def with_sram(self, size: int) -> Self:
        """The same product with another limit to a block's shared memory."""
        return replace(self, target=self.target.with_sram(size))

    @property
    def source(self) -> str:
        """Every source, once."""
        return "; ".join(dict.fromkeys(self.sources.values()))

    def to_json(self) -> dict[str, object]:
        """The figures as plain data."""
        of_target = {"sram_bytes": self.target.block_bytes, "sm_bytes": self.target.sm_bytes}
        names = ("kind", "name", "product", "sms", "clock_hz", "l2_bytes", "l2_bytes_per_clock", "bandwidth")
        figures = {name: getattr(self, name) for name in (*names, "tensor_16", "tensor_tf32", "fma")}
        about = {"target": self.target.name, "generated": self.is_generated_for, "own": self.is_own}
        return figures | of_target | about | {"sources": dict(self.sources)}
