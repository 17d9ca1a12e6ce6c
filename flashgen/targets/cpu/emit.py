"""Stage 4, emit for CPUs: the templates of ``templates/cpu`` filled with what one variant contributes.

In: a ``Variant`` and a ``CpuPlan``. Out: a ``KernelSource``. The context below is all that a template sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.base_2 import LOG2_E, in_base_2, needs_no_maximum
from flashgen.analysis.diagonals import diagonal_values, over_diagonals
from flashgen.analysis.levels import Level, observed_loads
from flashgen.analysis.variant import CapturedGradient, Variant, constant_factor
from flashgen.emit.context import (
    Masks,
    Observed,
    WeightCode,
    by_score,
    derivative_hooks,
    formula,
    labels,
    masks_apart,
    moved_inputs,
    observed_load,
    pair_terms,
    template_values,
    tidy,
)
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.placement import Hooks, Placement
from flashgen.emit.ranges import RangeCode, range_code
from flashgen.emit.spelling import c_literal
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.ir.expr import Expr, Load, Symbol, index_set, walk
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.kinds.field import Field
from flashgen.kinds.operand import HEAD_ROWS
from flashgen.plan.arguments import (
    argument_fields,
    dimension_field,
    gradient_field,
    mask_params,
    mask_sizes,
    param_field,
)
from flashgen.plan.work import CPU_COSTS, pair_work
from flashgen.store.headers import headers_of
from flashgen.targets.cpu.recipes import keeps_lists
from flashgen.targets.cpu.tiles import CpuPlan
from flashgen.version import __version__

# In base 2. A row's maximum is replaced where a score is more than this above it: rows are seldom scaled down then, and
# weights, at most 2^8, lose nothing (FlashAttention-4 does the same).
_MOST_GROWTH = 8.0
_OF_KEYS = ("score", "weight", "keep")  # hooks that few query rows ask for, too
_PRIMITIVES = (
    "flush.h",
    "vector.h",
    "convert.h",
    "vector_math.h",
    "captured.h",
    "tile_product.h",
    "few_rows.h",
    "images.h",
    "matrix_product.h",
)


@dataclass(frozen=True)
class _Gradient:
    """A captured gradient as the backward template sees it."""

    level: str
    target: str  # the member of Arguments and of Task that receives it
    value: str  # the variable that holds one pair's contribution
    sum: str  # the member of Scratch that holds partial sums
    total: str  # the variable that holds a sum of short sums
    pair_code: str | None  # one pair's contribution; None: it arrives through the sink alone
    sink_code: str | None  # one row's contribution through the sink
    offset: str  # of the element, as arguments of fg::add or fg::add_rows
    comment: str

    @property
    def sink_only(self) -> bool:
        return self.pair_code is None


@dataclass(frozen=True)
class _Param:
    """A param as the templates of ragged batches see it: its member of Arguments, and the C type."""

    name: str
    element: str


@dataclass(frozen=True)
class _Context:
    """Everything that ``kernel.cpp.jinja`` and what it includes may refer to."""

    name: str
    symbol: str
    first_pass: str  # what functions of the forward pass are called, which forward mode is one of
    last_pass: str  # the same of the backward pass
    has_forward: bool
    has_backward: bool
    version: str
    digest: str
    spec_lines: tuple[str, ...]
    formula: str
    head_dim: object
    plan: CpuPlan
    primitives: tuple[str, ...]
    parts: bool  # over some of the keys of rows, or some of the rows, and no ragged batches
    written: str  # of what element o and dQ are, as code
    written_of_keys: str  # the same of dK and dV
    head_rows: str  # rows of lse from one head's first to the next one's, as code
    results: tuple[str, ...]  # whose rows have strides
    arguments: tuple[Field, ...]
    hooks: Hooks
    hooks_by_key: Hooks  # those of the forward pass with neighbouring keys as lanes, for few query rows
    function_inputs: dict[str, str]
    keep_everything: bool
    masks: Masks
    lists: tuple[str, ...]  # what lists of visits depend on, as code over the arguments; none where there are no lists
    trimmed: bool  # keys that ranges rule out for some rows of a tile are left out of their products
    keep_range: RangeCode
    observed_rows: tuple[Observed, ...]
    observed_columns: tuple[Observed, ...]
    observed_by_head: bool
    heads_are_alike: bool  # nothing depends on the head, nor on how many there are
    diagonals: bool  # whether anything is computed once a diagonal
    pair: str  # what functions of a pair take first
    weights: WeightCode
    linear: bool  # scores are the dot product but for a constant factor, with which kernels go on
    score_factor: str  # of exponential weights: what makes its score, or the dot product, an exponent in base 2
    natural_factor: str  # the same for base e
    growth: str  # by how much a score may grow, or the dot product, before O is rescaled
    bounded_scores: bool  # by the formula, so that exp2 needs no maximum
    by_score: str  # a format: what comes through the score, from one of its derivatives
    slow_scores: bool  # to score a pair takes longer than to weigh it
    sqdist: bool
    dropout: bool
    sink: str | None
    tangent: bool  # forward mode: what tangents change, beside o and lse; or its backward pass
    by_tangent: str  # as ``by_score``, of what comes through the score's tangent
    by_weight_tangent: str  # of what comes through the weight's
    weight_tangent: bool  # captured values change weights beside what scores change
    sink_tangent: str | None
    gradients: tuple[_Gradient, ...]
    row_gradients: tuple[_Gradient, ...]
    params: tuple[_Param, ...]
    captured: tuple[str, ...]
    captured_elements: dict[str, str]
    captured_owned: dict[str, bool]


def emit_cpu(variant: Variant, plan: CpuPlan) -> KernelSource:
    """The C++ source of one head dimension; the plan's tiles are its defaults.

    Forward and backward, or of a variant with a tangent forward mode, or its backward pass.
    """
    variant = over_diagonals(variant)
    spec, head_dim = variant.spec, variant.head_dim
    form = "" if variant.tangent is not None else variant.kind.mark
    symbol = f"{spec.name}_d{str(head_dim).replace('/', '_')}{form}"
    context = _context(variant, plan, symbol)
    own = context.last_pass if variant.kind.backward_only else context.first_pass
    suffix = "" if variant.tangent is None else f"_{own}"
    code = tidy(environment().get_template("cpu/kernel.cpp.jinja").render(template_values(context)))
    return KernelSource(
        file_name=f"{symbol}{suffix}_cpu.cpp",
        target="cpu",
        symbol=symbol,
        head_dim=head_dim,
        text=code,
        defines=plan.defines,
        headers=headers_of(code),
    )


def _context(variant: Variant, plan: CpuPlan, symbol: str) -> _Context:
    spec = variant.spec
    placement = Placement(variant.proofs)
    by_key = placement.with_lanes(Level.COLUMN)
    diagonals = bool(diagonal_values(variant))
    pair = "a, u, x, r, c, d" if diagonals else "a, u, x, r, c"
    pair_inputs = ", fg::VecF dot" + (", fg::VecF sqdist" if variant.uses_sqdist else "")
    moved = moved_inputs(variant, "fg::VecF", pair_inputs)
    inputs: dict[str, str] = {}
    linear = constant_factor(variant)

    def hook(name: str, expr: Expr, declared: str = pair_inputs, comment: str = "") -> None:
        placement.function(name, expr, comment)
        if name in _OF_KEYS:
            by_key.function(name, expr, comment)
        inputs[name] = (", const Diagonals& d" if diagonals and name != "keep" else "") + declared

    weights = variant.weights
    exponent = in_base_2(variant.score) if weights.form.exponential else None
    bounded = exponent is not None and needs_no_maximum(exponent)
    if exponent is not None and bounded:
        hook("score", exponent, comment=f"The score in base 2: log2(e) · ({text(variant.score)})")
    elif linear is None:
        hook("score", variant.score, comment=f"The score: {text(variant.score)}")
    sink_code = None if weights.sink is None else placement.value("sink", weights.sink, Level.ROW)
    if weights.weight is not None:
        hook("weight", weights.weight, ", fg::VecF s")
        assert variant.weight_by_score is not None
        hook("weight_by_score", variant.weight_by_score, ", fg::VecF s", "∂weight/∂s")
    hook("keep", variant.keep_of_pairs, "", f"Kept pairs: {text(variant.keep_of_pairs)}")
    sink_tangent = derivative_hooks(variant, placement, hook, "fg::VecF", pair_inputs)
    chained = by_score(variant)
    gradients = tuple(
        _gradient(each, label, placement, pair_terms(variant, each, label, hook, "fg::VecF", pair, moved))
        for each, label in zip(variant.gradients, labels(variant.gradients), strict=True)
    )
    observed = tuple(observed_load(load, placement) for loads in observed_loads(variant.keep) for load in loads)
    keep_range = range_code(variant.keep, placement, {load.load: f"{load.struct}.{load.name}" for load in observed})
    captured = tuple(dict.fromkeys(gradient.target for gradient in gradients))
    return _Context(
        name=spec.name,
        symbol=symbol,
        version=__version__,
        digest=spec_digest(spec)[:16],
        spec_lines=spec_lines(spec),
        formula=formula(variant),
        head_dim=variant.head_dim,
        plan=plan,
        primitives=(*(("philox.h",) if spec.dropout is not None else ()), *_PRIMITIVES),
        parts=variant.kind.parts or variant.kind.slices,
        written="F32" if variant.kind.parts else "a.element",
        written_of_keys="F32" if variant.kind.parts or variant.kind.slices else "a.element",
        head_rows=f"a.{HEAD_ROWS}" if variant.kind.slices else "a.q_len",
        results=tuple(name for name, each in variant.kind.operands.items() if each.by_row),
        first_pass="forward" if variant.tangent is None else "jvp",
        last_pass="backward" if variant.tangent is None else "jvp_backward",
        has_forward=not variant.kind.backward_only,
        has_backward=not variant.kind.forward_only,
        arguments=argument_fields(spec, variant.kind),
        hooks=placement.hooks(),
        hooks_by_key=by_key.hooks(),
        function_inputs=inputs,
        keep_everything=variant.keep_everything,
        masks=masks_apart(index_set(variant.keep)),
        lists=_lists(variant.keep) if keeps_lists(variant) else (),
        trimmed=not variant.keep_everything and not keeps_lists(variant),
        keep_range=keep_range,
        observed_rows=tuple(each for each in observed if each.struct == "rows"),
        observed_columns=tuple(each for each in observed if each.struct == "columns"),
        heads_are_alike=variant.tangent is None
        and not diagonals
        and not keeps_lists(variant)
        and _heads_are_alike(spec),
        diagonals=diagonals,
        pair=pair,
        observed_by_head=any("h" in index_set(each.load) for each in observed if each.struct == "columns"),
        weights=WeightCode(variant.weights.form),
        linear=linear is not None and not bounded,
        score_factor=c_literal(LOG2_E * (linear or 1.0)),
        natural_factor=c_literal(linear or 1.0),
        growth=c_literal(_MOST_GROWTH / (LOG2_E * (linear or 1.0))),
        bounded_scores=bounded,
        by_score=chained,
        slow_scores=weights.form.exponential and not bounded and pair_work(variant, "forward", CPU_COSTS).specials > 1,
        sqdist=variant.uses_sqdist,
        dropout=spec.dropout is not None,
        sink=sink_code,
        tangent=variant.tangent is not None,
        by_tangent=by_score(variant, "d_t_score"),
        by_weight_tangent=by_score(variant, "d_t_weight"),
        weight_tangent=variant.tangent is not None and variant.tangent.weight is not None,
        sink_tangent=sink_tangent,
        gradients=gradients,
        row_gradients=tuple(each for each in gradients if each.sink_code or each.level == "row"),
        params=tuple(
            _Param(param_field(each.name), "float" if each.type is ScalarType.FLOAT else "int32_t")
            for each in spec.params
        ),
        captured=captured,
        captured_elements={gradient_field(name): code for name, code in _elements(variant).items()},
        captured_owned={gradient_field(name): _owned_by_head(variant, name) for name in _elements(variant)},
    )


def _heads_are_alike(spec: AttentionSpec) -> bool:
    """Whether nothing that a row is computed from depends on its head."""
    names = ("h", "hkv", "Hkv")
    return not any(isinstance(node, Symbol) and node.name in names for node in walk(*spec.expressions))


def _lists(keep: Expr) -> tuple[str, ...]:
    """Over the arguments and the sizes of tiles, which come first."""
    fields = ("q_len", "kv_len", *mask_sizes(keep), *(param_field(each) for each in mask_params(keep)))
    return ("tile_rows", "tile_columns", *(f"a.{name}" for name in fields))


def _gradient(gradient: CapturedGradient, label: str, placement: Placement, pair_code: str | None) -> _Gradient:
    read = gradient.read
    sinks = []
    for arriving, name, part in (
        ("d_sink", f"sink_by_{label}", gradient.from_sink),
        ("d_t_sink", f"sink_tangent_by_{label}", gradient.from_sink_tangent),
    ):
        if part is not None:
            sinks.append(f"{arriving} * ({placement.value(name, part, Level.ROW)})")
    offset = placement.gradient_offset(read, gradient.level) if isinstance(read, Load) else "0"
    return _Gradient(
        level=gradient.level.value,
        target=gradient_field(gradient.name),
        value=f"loss_by_{label}",
        sum=f"sum_by_{label}",
        total=f"total_by_{label}",
        pair_code=pair_code,
        sink_code=" + ".join(sinks) or None,
        offset=offset,
        comment=f"∂L/∂{text(read)}",
    )


def _elements(variant: Variant) -> dict[str, str]:
    """The number of elements of each captured value with a gradient, as code."""
    found: dict[str, str] = {}
    for gradient in variant.gradients:
        if isinstance(gradient.read, Load):
            axes = range(len(gradient.read.indices))
            found[gradient.name] = " * ".join(f"a.{dimension_field(gradient.name, axis)}" for axis in axes) or "1"
        else:
            found[gradient.name] = "int64_t(1)"
    return found


def _owned_by_head(variant: Variant, name: str) -> bool:
    """Whether each element is read under one (b, key/value head) only: tasks of other heads never meet there."""
    reads = [gradient.read for gradient in variant.gradients if gradient.name == name]
    return all(
        isinstance(read, Load)
        and any(text(each) == "b" for each in read.indices)
        and any(text(each) in ("h", "hkv") for each in read.indices)
        for read in reads
    )
