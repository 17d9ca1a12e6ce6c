"""What plans for a device. Only the family of the device is imported: who uses a CPU needs no planner for GPUs."""

from __future__ import annotations

from typing import Any

from flashgen.targets.protocol import Device, Family


def family_of(device: Device) -> Family[Any, Any, Any]:
    """What plans for a device, and predicts its times."""
    if device.kind == "cpu":
        from flashgen.targets.cpu.family import CpuFamily

        return CpuFamily()
    from flashgen.targets.gpu.family import GpuFamily

    return GpuFamily()
