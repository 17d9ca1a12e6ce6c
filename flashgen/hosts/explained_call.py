"""A call that is to be explained, not run, as the op hands it to a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import Kind
from flashgen.plan.explanation import ExplainedPass, Explanation
from flashgen.reference.shard import Shard


@dataclass(frozen=True)
class ExplainedCall:
    """A call to explain.

    ``sizes`` are the numbers of the spec's sizes, ``shard`` says where the call lies in the whole problem, ``index`` is
    the number of its device, ``threads`` how many a CPU would run. ``values`` are the fields of ``struct Arguments`` by
    name, without addresses: pointers that kernels compare with null are 0 or 1. ``params`` are the params that the host
    knows.
    """

    kind: Kind
    head_dim: HeadDim
    element: ElementType
    shard: Shard
    sizes: Mapping[str, int]
    index: int
    threads: int
    values: Mapping[str, float]
    params: Mapping[str, float]

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        shard = self.shard
        return Shape(shard.batch, shard.heads, shard.kv_heads, shard.q_len, shard.kv_len)

    def explanation(
        self, name: str, backend: str, device: str, target: str, passes: Sequence[ExplainedPass], reasons: Sequence[str]
    ) -> Explanation:
        """What runs it, of an op of this name, and why."""
        head_dim, element = str(self.head_dim), str(self.element)
        return Explanation(name, backend, device, target, head_dim, element, self.shape, tuple(passes), tuple(reasons))
