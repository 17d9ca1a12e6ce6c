"""A call that is to be explained, not run, as the op hands it to a host, and what explanations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import Variant
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, index, literal, size, substitute
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import Kind
from flashgen.plan.explanation import ExplainedPass, Explanation
from flashgen.plan.prediction import PassTime
from flashgen.plan.report import describe_bound
from flashgen.plan.tile_counts import tile_counts
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


def with_mask_of_call(variant: Variant, call: ExplainedCall) -> Variant:
    """The variant whose mask is over positions within the call: offsets, sizes and params are numbers in it."""
    shard = call.shard
    group = max(shard.group, 1)
    starts = {"b": shard.b_start, "h": shard.h_start, "hkv": shard.h_start // group}
    starts |= {"i": shard.q_start, "j": shard.kv_start}
    known: dict[Expr, Expr] = {
        index(name): apply("add", index(name), literal(start)) for name, start in starts.items() if start
    }
    known |= {size(name): literal(number) for name, number in call.sizes.items()}
    for param in variant.spec.params:
        if param.name in call.params:
            symbol = Symbol(param.type, name=param.name, kind=SymbolKind.PARAM)
            known[symbol] = Literal(param.type, value=call.params[param.name])
    return replace(variant, keep=simplify(substitute(variant.keep, known)))


def with_prediction(made: ExplainedPass, variant: Variant, call: ExplainedCall, predicted: PassTime) -> ExplainedPass:
    """The pass with what the model says of it, for the mask where the call puts it."""
    return replace(
        made,
        hbm_bytes=predicted.hbm_bytes,
        seconds=predicted.seconds,
        limited_by=describe_bound(predicted),
        at_most=bool(tile_counts(variant, call.shape, made.Br, made.Bc).unknown),
    )
