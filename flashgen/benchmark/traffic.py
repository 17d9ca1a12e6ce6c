"""HBM bytes of a call, predicted: of the generated CUDA kernels, and of standard attention as the paper counts it.

In: an ``AttentionSpec`` and the arguments of a call. Out: bytes forward, and forward with backward. The kernels'
are those that the emulator counts (``plan/cuda_bytes.py``, and ``plan/cuda_traffic.py`` where a mask reads tensors),
standard attention's those of Algorithms 0 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import Variant, analyse
from flashgen.backends import launches_of
from flashgen.diagnostics import SpecError
from flashgen.ir.expr import Expr, Literal, Load, Symbol, SymbolKind, index_set, substitute, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import argument_fields, gradient_field, param_field
from flashgen.plan.cuda_bytes import backward_traffic, forward_traffic
from flashgen.plan.cuda_devices import TARGETS, Target
from flashgen.plan.cuda_plan import ElementPlan
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.cuda_traffic import traffic
from flashgen.plan.paper import Lengths, standard_backward, standard_forward
from flashgen.reference.dense import param_values
from flashgen.reference.shard import Shard
from flashgen.runtime.kernel import PassName
from flashgen.verification.inputs import Inputs

MODELLED = TARGETS["sm_80"]  # whose tiles are taken where there is no GPU
_MOST_TILES = 2**13  # that are classified one by one, in a second or two


@dataclass(frozen=True)
class PassBytes:
    """Forward, and forward with backward."""

    forward: int
    both: int

    def of(self, *, backward: bool) -> int:
        """One of them."""
        return self.both if backward else self.forward


def standard_bytes(shape: Shape, head_dim: HeadDim, element: ElementType) -> PassBytes:
    """Algorithms 0 and 3, which form S and P, or dP and dS, whatever the mask keeps."""
    heads = shape.batch * shape.heads
    lengths = Lengths(heads, shape.batch * shape.kv_heads, shape.q_len, shape.kv_len, head_dim.qk, head_dim.v)
    forward = element.bytes * standard_forward(lengths)
    return PassBytes(forward, forward + element.bytes * standard_backward(lengths))


def kernel_bytes(
    spec: AttentionSpec, inputs: Inputs, element: ElementType, target: Target = MODELLED
) -> PassBytes | None:
    """The CUDA kernels' on ``target``; None where its planner refuses, or there are too many tiles to look at."""
    variant = analyse(spec, HeadDim(inputs.q.shape[-1], inputs.v.shape[-1]))
    try:
        plan = plan_cuda(variant, target)
    except SpecError:
        return None
    if element not in plan.by_element:
        return None
    tiles = plan.by_element[element]
    values, times = _values(variant, inputs)
    known: dict[Expr, Expr] = {
        Symbol(param.type, name=param.name, kind=SymbolKind.PARAM): Literal(param.type, value=given[param.name])
        for given in [_params(variant, inputs)]
        for param in spec.params
    }
    keep = simplify(substitute(variant.keep, known))
    if not any(isinstance(node, Load) for node in walk(keep)):
        return _by_counts(replace(variant, keep=keep), tiles, shape_of(inputs))
    smallest = min(each.Br * each.Bc for each in (tiles.forward, tiles.backward, tiles.queries))
    count = int(values["batch"] * values["heads"] * values["q_len"] * values["kv_len"]) // smallest
    if count > _MOST_TILES:
        return None
    captured = {
        name: (value.float() if value.is_floating_point() else value).cpu().numpy()
        for name, value in inputs.captured.items()
    }

    def moved(name: PassName) -> int:
        launches = launches_of(variant, plan, "symbol", element)(name, values)
        return times * sum(traffic(variant, tiles, "symbol", launches, values, captured).values())

    forward = moved("forward")
    return PassBytes(forward, forward + moved("backward"))


def shape_of(inputs: Inputs) -> Shape:
    """The sizes of a call."""
    (batch, heads, q_len), (kv_heads, kv_len) = inputs.q.shape[:3], inputs.k.shape[1:3]
    return Shape(batch, heads, kv_heads, q_len, kv_len)


def _by_counts(variant: Variant, tiles: ElementPlan, shape: Shape) -> PassBytes:
    """For a mask of positions alone: from counts of tiles, at any length."""
    forward, backward = (
        sum(sum(kernel.values()) for kernel in moved(variant, tiles, shape).values())
        for moved in (forward_traffic, backward_traffic)
    )
    return PassBytes(forward, forward + backward)


def _values(variant: Variant, inputs: Inputs) -> tuple[Mapping[str, float], int]:
    """``struct Arguments`` by name, and how often that is moved: heads that are all alike are looked at once."""
    (batch, heads, q_len), (kv_heads, kv_len) = inputs.q.shape[:3], inputs.k.shape[1:3]
    spec = variant.spec
    values: dict[str, float] = {field.name: 0 for field in argument_fields(spec)}
    axes = index_set(variant.keep)
    batch_times, batch_own = (1, batch) if "b" in axes else (batch, 1)
    head_times, kv_heads_own = (1, kv_heads) if "h" in axes else (kv_heads, 1)
    values |= {"batch": batch_own, "heads": kv_heads_own * (heads // kv_heads), "kv_heads": kv_heads_own}
    values |= {"q_len": q_len, "kv_len": kv_len}
    values |= {"b_total": batch, "h_total": heads, "q_total": q_len, "kv_total": kv_len}
    values |= {param_field(name): value for name, value in _params(variant, inputs).items()}
    values |= {gradient_field(each.name): 1 for each in variant.gradients}
    return values, batch_times * head_times


def _params(variant: Variant, inputs: Inputs) -> Mapping[str, float]:
    """The value of every param in this call."""
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    given = {name: float(value) for name, value in inputs.params.items()}
    return param_values(variant.spec, given, shard.sizes(variant.head_dim.qk, variant.head_dim.v))
