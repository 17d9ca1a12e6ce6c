"""The device that is measured: how to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def cuda_is_there() -> bool:
    """Whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


def waiting(device: torch.device) -> Callable[[], object] | None:
    """What waits for the work of a device, where calls return before it is done."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
