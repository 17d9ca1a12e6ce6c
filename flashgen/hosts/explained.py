"""What the explanations of all families share: the mask of a call, and the predicted time and bytes of a pass."""

from __future__ import annotations

from dataclasses import replace

from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import Variant
from flashgen.hosts.explained_call import ExplainedCall
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, index, literal, size, substitute
from flashgen.plan.explanation import ExplainedPass
from flashgen.plan.prediction import PassTime
from flashgen.plan.report import describe_bound
from flashgen.plan.tile_counts import tile_counts


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
