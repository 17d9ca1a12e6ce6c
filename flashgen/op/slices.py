"""Runs an op over some of the rows of tensors, where others see the same keys: o, lse and dq are written where they
belong, and gradients of k and v, which those of others are added to, in float32 whatever the tensors hold.

In: the arguments of ``Engine.attend_into`` and ``gradients_into``. Out: what is given there, filled. ``has_kernel``
says where there are such kernels: the reference and the libraries of packages write tensors of their own.
"""

from __future__ import annotations

from torch import Tensor

from flashgen.ir.spec import HeadDim
from flashgen.kinds.kind import Kind
from flashgen.kinds.slices import SLICES
from flashgen.op.engine import Engine


class SlicesEngine(Engine):
    """Forward and backward of one spec over rows of larger tensors: [B, H, n, …] of contiguous [B, H, N, …].

    Gradients of k and v are contiguous, in float32.
    """

    kind: Kind = SLICES


def has_kernel(engine: Engine, q: Tensor, v: Tensor) -> bool:
    """Whether kernels of slices run for tensors like these."""
    provider, head_dim = engine.kernels.get(q.device.type), HeadDim(q.shape[-1], v.shape[-1])
    if provider is None or head_dim not in engine.spec.head_dims:
        return False
    kernel = provider(head_dim, q.device.index or 0)
    return kernel is not None and kernel.of(SLICES) is not None
