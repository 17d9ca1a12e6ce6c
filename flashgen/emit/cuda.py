"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``Variant`` and a ``CudaPlan``. Out: a ``KernelSource``. The context below is all that a template sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.levels import Level
from flashgen.analysis.variant import DOT, Variant
from flashgen.emit.cpu import (
    _base_2,
    _by_name,
    _declaration,
    _Declaration,
    _formula,
    _shallow,
    _tidy,
)
from flashgen.emit.cuda_primitives import primitives
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import RangeCode, range_code
from flashgen.emit.spelling import c_literal
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.ir.expr import Apply, Expr, Literal
from flashgen.ir.spec import Normalize, Pointwise, Softmax
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import argument_fields
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.version import __version__

# A row's maximum may lag behind by this much in base 2 before O is rescaled.
LAG = 8.0
C_TYPES: Mapping[ElementType, str] = {
    ElementType.F16: "fg::half_t",
    ElementType.BF16: "fg::bfloat_t",
    ElementType.F32: "float",
}


@dataclass(frozen=True)
class _Element:
    name: str
    c_type: str


@dataclass(frozen=True)
class _Pass:
    """The constants of one pass, as a struct template over the element type."""

    name: str
    comment: str
    constants: Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class _Context:
    """Everything that ``kernel.cu.jinja`` and what it includes may refer to."""

    name: str
    symbol: str
    target: str
    version: str
    digest: str
    spec_lines: tuple[str, ...]
    formula: str
    head_dim: object
    plan: CudaPlan
    primitives: tuple[str, ...]
    arguments: tuple[_Declaration, ...]
    hooks: object
    function_inputs: dict[str, str]
    keep_range: RangeCode
    elements: tuple[_Element, ...]
    passes: tuple[_Pass, ...]
    weights: str
    sqdist: bool
    dropout: bool
    sink: str | None
    score_factor: str | None
    lag: str
    lag_code: str
    backward: bool


def cuda_symbol(variant: Variant) -> str:
    """What every kernel's name begins with."""
    return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}"


def emit_cuda(variant: Variant, plan: CudaPlan) -> KernelSource:
    """The CUDA C++ source of one head dimension for one target."""
    symbol = cuda_symbol(variant)
    context = _context(variant, plan, symbol)
    rendered = environment().get_template("cuda/kernel.cu.jinja").render(_shallow(context))  # type: ignore[arg-type]
    return KernelSource(
        name=f"{symbol}_{plan.target}",
        target=plan.target,
        symbol=symbol,
        head_dim=variant.head_dim,
        text=_tidy(rendered),
        defines=(),
    )


def _context(variant: Variant, plan: CudaPlan, symbol: str) -> _Context:
    spec = variant.spec
    placement = Placement(variant.proofs, vectors=False)
    pair_inputs = ", float dot" + (", float sqdist" if variant.uses_sqdist else "")
    inputs: dict[str, str] = {}

    def hook(name: str, expr: Expr, declared: str = pair_inputs, comment: str = "") -> None:
        placement.function(name, expr, comment)
        inputs[name] = declared

    factor = None
    match variant.weights:
        case Softmax(sink):
            kind = "softmax"
            score = _base_2(variant.score)
            factor = _factor(score)
            hook("score", score, comment=f"The score in base 2: log2(e) · ({text(variant.score)})")
            sink_code = None if sink is None else placement.value("sink", _base_2(sink), Level.ROW)
        case Pointwise(weight) | Normalize(weight):
            kind = "pointwise" if isinstance(variant.weights, Pointwise) else "normalize"
            sink_code = None
            hook("score", variant.score, comment=f"The score: {text(variant.score)}")
            hook("weight", weight, ", float s")
            assert variant.weight_by_score is not None
            hook("weight_by_score", variant.weight_by_score, ", float s", "∂weight/∂s")
    hook("keep", variant.keep, "", f"Kept pairs: {text(variant.keep)}")
    hook("score_by_dot", variant.score_by_dot, comment="∂score/∂(q·k)")
    if variant.score_by_sqdist is not None:
        hook("score_by_sqdist", variant.score_by_sqdist, comment="∂score/∂|q|² = ∂score/∂|k|²")
    keep_range = range_code(variant.keep, placement)
    elements = tuple(_Element(str(each.element), C_TYPES[each.element]) for each in plan.elements)
    return _Context(
        name=spec.name,
        symbol=symbol,
        target=plan.target,
        version=__version__,
        digest=spec_digest(spec)[:16],
        spec_lines=spec_lines(spec),
        formula=_formula(variant),
        head_dim=variant.head_dim,
        plan=plan,
        primitives=primitives(dropout=spec.dropout is not None),
        arguments=tuple(_declaration(field) for field in argument_fields(spec)),
        hooks=_by_name(placement.hooks()),
        function_inputs=inputs,
        keep_range=keep_range,
        elements=elements,
        passes=_passes(plan),
        weights=kind,
        sqdist=variant.uses_sqdist,
        dropout=spec.dropout is not None,
        sink=sink_code,
        score_factor=None if factor is None else c_literal(factor),
        lag=f"{LAG:g}",
        lag_code=c_literal(LAG if factor is None else LAG / factor),
        backward=False,
    )


def _factor(score: Expr) -> float | None:
    """c where the score is c · dot with a positive constant: then maxima are taken of dot itself."""
    match score:
        case Apply(op="mul", args=(Literal(value=float() as value), other)) if other == DOT and value > 0:
            return value
        case Apply(op="mul", args=(other, Literal(value=float() as value))) if other == DOT and value > 0:
            return value
    return 1.0 if score == DOT else None


def _passes(plan: CudaPlan) -> tuple[_Pass, ...]:
    forward = {}
    for each in plan.elements:
        tiles = each.forward
        forward[str(each.element)] = (
            ("BR", str(tiles.Br)),
            ("BC", str(tiles.Bc)),
            ("warps", str(tiles.warps)),
            ("stages", str(tiles.stages)),
            ("q_in_registers", str(int(tiles.q_in_registers))),
        )
    return (_Pass("ForwardPlan", "The plan of the forward pass.", forward),)
