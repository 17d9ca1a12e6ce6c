"""The device that is measured: its name for captions, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flashgen.targets.cpu.machine import cpu_name
from flashgen.version import __version__


def cuda_is_there() -> bool:
    """Whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


def waiting(device: torch.device) -> Callable[[], object] | None:
    """What waits for the work of a device, where calls return before it is done."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def device_name(device: str) -> str:
    """The processor, its threads, and the versions that matter."""
    versions = f"torch {torch.__version__}, flashgen {__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}; {versions}"
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}; {versions}"
