"""HBM bytes and flops of a call, predicted: of the generated CUDA kernels, and of others as the paper counts them.

In: an ``AttentionSpec`` and the arguments of a call. Out: bytes forward, and forward with backward. The kernels'
are those that the emulator counts (``bytes.py`` of GPUs), standard attention's those of Algorithms 0 and 3, those of
chunks Rabe and Staats'; ``plan/paper.py`` has both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import SpecError
from flashgen.hosts.gpu_calls import launches_of
from flashgen.ir.expr import Expr, Literal, Load, Symbol, SymbolKind, index_set, substitute, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.op.tensor_kinds import as_arrays
from flashgen.plan.arguments import argument_fields, gradient_field, param_field
from flashgen.plan.measured import PASSES, Pins
from flashgen.plan.paper import (
    Lengths,
    flash_backward_flops,
    forward_flops,
    rabe_staats_backward,
    rabe_staats_blocks,
    rabe_staats_forward,
    standard_backward,
    standard_backward_flops,
    standard_forward,
)
from flashgen.reference.dense import param_values
from flashgen.reference.shard import Shard
from flashgen.targets.gpu.bytes import bytes_of_call, bytes_of_shape
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import ElementPlan
from flashgen.targets.registry import GPUS
from flashgen.verification.inputs import Inputs
from tools.benchmarks.peer import lowered_inputs
from tools.paper.forms import rabe_staats_backward_flops

MODELLED = GPUS["sm_80"]  # whose tiles are taken where there is no GPU
_MOST_TILES = 2**13  # that are classified one by one, in a second or two


@dataclass(frozen=True)
class PassBytes:
    """Forward, and forward with backward."""

    forward: int
    both: int

    def of(self, *, backward: bool) -> int:
        """One of them."""
        return self.both if backward else self.forward


@dataclass(frozen=True)
class PassFlops:
    """Forward, and forward with backward."""

    forward: float
    both: float

    def of(self, *, backward: bool) -> float:
        """One of them."""
        return self.both if backward else self.forward


def standard_bytes(shape: Shape, head_dim: HeadDim, element: ElementType) -> PassBytes:
    """Algorithms 0 and 3, which form S and P, or dP and dS, whatever the mask keeps."""
    lengths = Lengths.of(shape, head_dim)
    forward = element.bytes * standard_forward(lengths)
    return PassBytes(forward, forward + element.bytes * standard_backward(lengths))


def rabe_staats_bytes(shape: Shape, head_dim: HeadDim, element: ElementType) -> PassBytes:
    """Those of attention in chunks of √Nk keys, whatever the mask keeps."""
    lengths, blocks = Lengths.of(shape, head_dim), rabe_staats_blocks(shape.q_len, shape.kv_len)
    forward = element.bytes * rabe_staats_forward(lengths, blocks)
    return PassBytes(forward, forward + element.bytes * rabe_staats_backward(lengths, blocks))


def pass_flops(name: str, shape: Shape, head_dim: HeadDim, kept_share: float) -> PassFlops | None:
    """Of the matrix products of ``standard`` and ``rabe_staats``, which form every pair, and of ``flashgen``.

    For flashgen those of the pairs that the mask keeps; backward it forms S again, as Algorithm 4. None for others.
    """
    lengths = Lengths.of(shape, head_dim)
    backward = {
        "standard": standard_backward_flops,
        "rabe_staats": rabe_staats_backward_flops,
        "flashgen": flash_backward_flops,
    }.get(name)
    if backward is None:
        return None
    share = kept_share if name == "flashgen" else 1.0
    forward = share * forward_flops(lengths)
    return PassFlops(forward, forward + share * backward(lengths))


def kernel_bytes(
    spec: AttentionSpec, inputs: Inputs, element: ElementType, target: GpuTarget = MODELLED
) -> PassBytes | None:
    """The CUDA kernels' on ``target``; None where its planner refuses, or there are too many tiles to look at."""
    variant = analyse(spec, HeadDim(inputs.q.shape[-1], inputs.v.shape[-1]))
    try:
        plan = target.plan(variant, Pins(element=element))
    except SpecError:
        return None
    tiles = plan.own
    params = _params(variant, inputs)
    known: dict[Expr, Expr] = {
        Symbol(param.type, name=param.name, kind=SymbolKind.PARAM): Literal(param.type, value=params[param.name])
        for param in spec.params
    }
    keep = simplify(substitute(variant.keep, known))
    if not any(isinstance(node, Load) for node in walk(keep)):
        return _by_shape(plan.recipe.of(keep=keep), tiles, shape_of(inputs))
    shape = shape_of(inputs)
    masks = math.prod(count for axis, count in (("b", shape.batch), ("h", shape.heads)) if axis in index_set(keep))
    smallest = min(each.Br * each.Bc for each in (tiles.forward, tiles.backward, tiles.queries))
    if masks * shape.q_len * shape.kv_len // smallest > _MOST_TILES:
        return None
    captured = as_arrays(lowered_inputs(spec, inputs)[1].captured)
    values = _values(variant, shape, params)

    def moved(name: PassName) -> int:
        launches = launches_of(plan, name, values)
        own = {**values, "lse_parts": name == "backward"}  # which reads them, if anybody does
        return sum(bytes_of_call(plan.recipe, tiles, plan.symbol, launches, own, captured).values())

    forward = moved("forward")
    return PassBytes(forward, forward + moved("backward"))


def shape_of(inputs: Inputs) -> Shape:
    """The sizes of a call."""
    (batch, heads, q_len), (kv_heads, kv_len) = inputs.q.shape[:3], inputs.k.shape[1:3]
    return Shape(batch, heads, kv_heads, q_len, kv_len)


def _by_shape(recipe: Recipe, tiles: ElementPlan, shape: Shape) -> PassBytes:
    """For a mask of positions alone, at any length."""
    forward, backward = (
        sum(sum(kernel.values()) for kernel in bytes_of_shape(recipe, tiles, shape, name).values()) for name in PASSES
    )
    return PassBytes(forward, forward + backward)


def _values(variant: Variant, shape: Shape, params: Mapping[str, float]) -> Mapping[str, float]:
    """``struct Arguments`` by name."""
    values: dict[str, float] = {field.name: 0 for field in argument_fields(variant.spec)}
    values |= asdict(shape)
    values |= {"b_total": shape.batch, "h_total": shape.heads, "q_total": shape.q_len, "kv_total": shape.kv_len}
    values |= {param_field(name): value for name, value in params.items()}
    return values | {gradient_field(each.name): 1 for each in variant.gradients}


def _params(variant: Variant, inputs: Inputs) -> Mapping[str, float]:
    """The value of every param in this call."""
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    given = {name: float(value) for name, value in inputs.params.items()}
    return param_values(variant.spec, given, shard.sizes(variant.head_dim.qk, variant.head_dim.v))
