"""Runs an op over some of the keys of rows, for callers that add up parts: sums stay float32 whatever the tensors hold.

In: the arguments of ``Engine``'s methods. Out: o and gradients in float32 at least, rounded nowhere else than inside of
kernels. q, k and v of 16 bits go to kernels that write float32. Where there are none (the reference, a library of a
package) they are widened first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel, KernelProvider
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.kind import Kind
from flashgen.kinds.parts import PARTS
from flashgen.op.call import CallChecker, Rest
from flashgen.op.engine import Attended, Engine, Rows, Tensors
from flashgen.op.layouts import Layout, packed_layout
from flashgen.op.values import type_of_sums


class PartsChecker(CallChecker):
    """Turns calls of parts into ``Call``s. float32 is always taken: 16 bits may have been widened to it."""

    def __init__(
        self, spec: AttentionSpec, kernels: Mapping[str, KernelProvider | None], kind: Kind, *, is_reference: bool
    ) -> None:
        super().__init__(spec, kernels, kind, is_reference=is_reference)
        self._accepted = tuple(dict.fromkeys((*self._accepted, torch.float32)))

    def written(self, dtype: torch.dtype) -> torch.dtype:
        """As ``type_of_sums`` has it."""
        return type_of_sums(dtype)

    def layout(self, x: Tensor, shape: Sequence[int]) -> Layout:  # noqa: ARG002 - a CallChecker's
        """Contiguous: so kernels take parts that they add up."""
        return packed_layout(*shape)

    def _of_kind(self, dense: Kernel, q: Tensor) -> Kernel | None:
        """The kernel that writes the type of sums; dense ones write it where it is that of q."""
        return dense if self.written(q.dtype) is q.dtype else dense.of(PARTS) or dense


class PartsEngine(Engine):
    """Forward and backward of one spec over some of the keys.

    d_o has the type of q; the o that a backward pass reads, of all keys, that of sums.
    """

    kind: Kind = PARTS
    checks: ClassVar[type[CallChecker]] = PartsChecker

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True) -> Attended:
        """``o``, ``lse`` and its parts, all of these keys alone."""
        return super().attend(self._taken(tensors), rest, keeps_lse)

    def _gradients(
        self,
        d_o: Tensor,
        rows: Rows,
        tensors: Tensors,
        rest: Rest,
        needs: Sequence[bool],
        *,
        is_part: bool,
        into: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        own = self._taken(tensors)
        return super()._gradients(d_o.to(own[0].dtype), rows, own, rest, needs, is_part=is_part, into=into)

    def _taken(self, tensors: Tensors) -> Tensors:
        """The tensors as what runs takes them."""
        q, v = tensors[0], tensors[2]
        wide = type_of_sums(q.dtype)
        if q.dtype is wide or self._writes_sums(q, v):
            return tensors
        return (*(x.to(wide) for x in tensors[:3]), *tensors[3:])

    def _writes_sums(self, q: Tensor, v: Tensor) -> bool:
        provider, head_dim = self.kernels.get(q.device.type), HeadDim(q.shape[-1], v.shape[-1])
        if provider is None or head_dim not in self.spec.head_dims:
            return False
        kernel = provider(head_dim, q.device.index or 0)
        return kernel is not None and kernel.of(PARTS) is not None
