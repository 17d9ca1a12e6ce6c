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
    """The workspaces of an engine: a few small ones are kept between calls."""

    def __init__(self) -> None:
        self._spare: list[_Workspace] = []  # of no call; popping and appending are atomic

    def run(self, call: Call, prepared: Prepared, values: list[float]) -> None:
        """Run one pass with the values that vary. The first, the address of the workspace, is filled in here."""
        if prepared.by_values is not None:
            prepared = prepared.by_values(values)
        size = prepared.workspace_bytes
        if size == 0:
            prepared.run(values)
            return
        keeps = call.is_on_cpu  # on a GPU the memory belongs to the stream, and PyTorch keeps what is freed
        try:
            workspace = self._spare.pop() if keeps else None
        except IndexError:  # to look first would not do: another thread may take the last workspace
            workspace = None
        if workspace is None or workspace.bytes < size:
            memory = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=call.device)
            workspace = _Workspace(memory.data_ptr(), size, memory)
        values[0] = workspace.address
        prepared.run(values)
        if keeps and workspace.bytes <= _SPARE_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(workspace)
