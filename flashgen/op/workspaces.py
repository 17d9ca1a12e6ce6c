"""Memory that kernels need for the time of one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.hosts.kernel import Prepared
from flashgen.op.call import Call

# Workspaces up to this size are kept for the next call: fresh pages cost more than a small kernel.
_SPARE_BYTES = 1 << 22
_MOST_SPARE = 4


class _Workspace(NamedTuple):
    """Memory for one call at a time."""

    address: int
    bytes: int
    memory: Tensor


class Workspaces:
    """Those of an engine: a few small ones are kept between calls."""

    def __init__(self) -> None:
        self._spare: list[_Workspace] = []  # those that no call is using; popping and appending are atomic

    def clear(self) -> None:
        """Forget those that are kept."""
        self._spare.clear()

    def run(self, call: Call, prepared: Prepared, values: list[float]) -> None:
        """One pass with the values that vary; the first is still missing, where the workspace lies."""
        if prepared.by_values is not None:
            prepared = prepared.by_values(values)
        size = prepared.workspace_bytes
        if size == 0:
            prepared.run(values)
            return
        keeps = call.is_on_cpu  # on a GPU the memory belongs to the stream, and PyTorch keeps what is freed
        try:
            workspace = self._spare.pop() if keeps else None
        except IndexError:  # not asked for before: another thread may take the last one
            workspace = None
        if workspace is None or workspace.bytes < size:
            memory = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=call.device)
            workspace = _Workspace(memory.data_ptr(), size, memory)
        values[0] = workspace.address
        prepared.run(values)
        if keeps and workspace.bytes <= _SPARE_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(workspace)
