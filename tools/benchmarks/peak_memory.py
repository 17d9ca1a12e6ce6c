"""How much memory a call takes at its peak, beyond what is there before it.

On a GPU: what PyTorch's allocator says. On Linux: the peak of the resident set, which the kernel forgets on request.
Elsewhere: not known.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

_CLEAR_PEAK = "5"  # proc(5), clear_refs
_SELF = Path("/proc/self")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The peak while ``call`` runs, its result included; None where that cannot be known."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    _give_back_free_memory()
    try:
        (_SELF / "clear_refs").write_text(_CLEAR_PEAK)
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, LookupError):
        call()
        return None


def available_bytes(device: torch.device) -> int | None:
    """What a call may take without another one suffering; None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return 1024 * int(_number("MemAvailable", Path("/proc/meminfo").read_text()))
    except (OSError, LookupError):
        return None


def _resident(name: str) -> int:
    return 1024 * _number(name, (_SELF / "status").read_text())


def _number(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", text, re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1])


def _give_back_free_memory() -> None:
    """Memory that the allocator kept would be used again, and not be seen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
