"""Stage 4, emit for CPUs: the templates of ``templates/cpu`` filled with what one variant contributes.

In: a ``Variant`` and a ``CpuPlan``. Out: a ``KernelSource``. The context below is all that a template sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.analysis.diagonals import diagonal_values, over_diagonals
from flashgen.analysis.factors import LOG2_E, in_base_2, needs_no_maximum
from flashgen.analysis.levels import Level, observed_loads
from flashgen.analysis.variant import CapturedGradient, Variant, constant_factor
from flashgen.emit.context import (
    WeightCode,
    by_score,
    derivative_hooks,
    formula,
    labels,
    masks_apart,
    observed_load,
    pair_terms,
    tidy,
)
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import range_code
from flashgen.emit.spelling import c_literal
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.ir.expr import Expr, Load, Symbol, index_set, walk
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
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
from flashgen.targets.cpu.plan import CpuPlan
from flashgen.targets.cpu.recipes import keeps_lists
from flashgen.version import __version__

# In base 2. A row's maximum is replaced where a score is more than this above it: rows are seldom scaled down then, and
# weights, at most 2^8, lose nothing (FlashAttention-4 does the same).
_MOST_GROWTH = 8.0
_OF_KEYS = ("score", "weight", "keep")  # hooks that few query rows ask for, too
_PASSES = ("few_query_rows.h", "backward.h")
_INPUTS = ", fg::VecF dot, fg::VecF sqdist"  # what functions of a pair take beside it
_MOVED = f"{_INPUTS}, fg::VecF t_dot, fg::VecF t_norms"
_PAIR = "a, u, x, r, c, d"


def emit_cpu(variant: Variant, plan: CpuPlan) -> KernelSource:
    """The C++ source of one head dimension; the plan's tiles are its defaults.

    Forward and backward, or of a variant with a tangent forward mode, or its backward pass.
    """
    variant = over_diagonals(variant)
    spec, head_dim = variant.spec, variant.head_dim
    form = "" if variant.tangent is not None else variant.kind.mark
    symbol = f"{spec.name}_d{str(head_dim).replace('/', '_')}{form}"
    context = _context(variant, plan, symbol)
    own = context["first_pass"] if context["forward"] else context["last_pass"]
    suffix = "" if variant.tangent is None else f"_{own}"
    code = tidy(environment().get_template("cpu/kernel.cpp.jinja").render(context))
    return KernelSource(
        file_name=f"{symbol}{suffix}_cpu.cpp",
        target="cpu",
        symbol=symbol,
        head_dim=head_dim,
        text=code,
        defines=plan.defines,
        headers=headers_of(code),
    )


def _context(variant: Variant, plan: CpuPlan, symbol: str) -> dict[str, object]:
    """Everything that ``kernel.cpp.jinja`` and what it includes may refer to."""
    spec, kind, tangent = variant.spec, variant.kind, variant.tangent is not None
    placement = Placement(variant.proofs)
    by_key = placement.with_lanes(Level.COLUMN)
    inputs: dict[str, str] = {}

    def hook(name: str, expr: Expr, declared: str = _INPUTS, comment: str = "") -> None:
        placement.function(name, expr, comment)
        if name in _OF_KEYS:
            by_key.function(name, expr, comment)
        inputs[name] = _MOVED if "t_dot" in declared else declared

    weights, linear = variant.weights, constant_factor(variant)
    factor = linear or 1.0
    exponent = in_base_2(variant.score) if weights.form.exponential else None
    bounded = exponent is not None and needs_no_maximum(exponent)
    if exponent is not None and bounded:
        hook("score", exponent, comment=f"The score in base 2: log2(e) · ({text(variant.score)})")
    elif linear is None:
        hook("score", variant.score, comment=f"The score: {text(variant.score)}")
    sink = None if weights.sink is None else placement.value("sink", weights.sink, Level.ROW)
    if weights.weight is not None:
        hook("weight", weights.weight, ", fg::VecF s")
        assert variant.weight_by_score is not None
        hook("weight_by_score", variant.weight_by_score, ", fg::VecF s", "∂weight/∂s")
    hook("keep", variant.keep_of_pairs, "", f"Kept pairs: {text(variant.keep_of_pairs)}")
    sink_tangent = derivative_hooks(variant, placement, hook, "fg::VecF", _INPUTS)
    captured = tuple(dict.fromkeys(gradient.name for gradient in variant.gradients))
    gradients = tuple(
        _gradient(
            each,
            label,
            captured.index(each.name),
            placement,
            pair_terms(variant, each, label, hook, "fg::VecF", _PAIR, _MOVED),
        )
        for each, label in zip(variant.gradients, labels(variant.gradients), strict=True)
    )
    observed = tuple(observed_load(load, placement) for loads in observed_loads(variant.keep) for load in loads)
    keep_range = range_code(variant.keep, placement, {load.load: f"{load.struct}.{load.name}" for load in observed})
    rows, columns = (tuple(each for each in observed if each.struct == name) for name in ("rows", "columns"))
    diagonals, lists = bool(diagonal_values(variant)), keeps_lists(variant)
    has_forward, has_backward = not kind.backward_only, not kind.forward_only
    is_slow = pair_work(variant, "forward", CPU_COSTS).specials > 1
    flags = {
        **{name: getattr(weights.form, name) for name in ("exponential", "normalised", "divided")},
        "sink": sink is not None,
        "linear": linear is not None and not bounded,
        "bounded_scores": bounded,
        "slow_scores": weights.form.exponential and not bounded and is_slow,
        "sqdist": variant.uses_sqdist,
        "diagonals": diagonals,
        "chains": "chained" in by_score(variant),
        "dropout": spec.dropout is not None,
        "keep_everything": variant.keep_everything,
        "keeps_lists": lists,
        "trimmed": not variant.keep_everything and not lists,
        "observed_rows": bool(rows),
        "observed_columns": bool(columns),
        "observed_by_head": any("h" in index_set(each.load) for each in columns),
        "heads_are_alike": not (tangent or diagonals or lists) and _heads_are_alike(spec),
        "tangent": tangent,
        "moves_weight": variant.tangent is not None and variant.tangent.weight is not None,
        "moves_sink": sink_tangent is not None,
        "writes_f32": kind.parts,
        "writes_f32_of_keys": kind.parts or kind.slices,
    }
    mode, headers = ("ForwardMode", ("forward_mode.h", "forward_mode_backward.h")) if tangent else ("", _PASSES)
    return {
        "name": spec.name,
        "symbol": symbol,
        "version": __version__,
        "digest": spec_digest(spec)[:16],
        "spec_lines": spec_lines(spec),
        "formula": formula(variant),
        # The formula of what the backward pass, or forward mode, computes.
        "results": weights.form.tangent if tangent else weights.form.gradient,
        "head_dim": variant.head_dim,
        "plan": plan,
        "parts": kind.parts or kind.slices,  # over some of the keys of rows, or some of the rows, and no ragged batches
        # What functions of the forward pass are called, which forward mode is one of.
        "first_pass": "jvp" if tangent else "forward",
        "last_pass": "jvp_backward" if tangent else "backward",  # the same of the backward pass
        # The struct that computes a tile, if there is such a pass.
        "forward": (mode or "Forward") + "Tile" if has_forward else None,
        "backward": f"{mode}BackwardTile" if has_backward else None,
        "passes": headers[not has_forward : 1 + has_backward],  # the headers that are included
        # Of tiles, as the plan's macros call them.
        "sizes": (*(("BR", "BC") if has_forward else ()), *(("BACKWARD_BR", "BACKWARD_BC") if has_backward else ())),
        "arguments": argument_fields(spec, kind),
        "hooks": placement.hooks(),
        "hooks_by_key": by_key.hooks(),  # those of the forward pass with neighbouring keys as lanes, for few query rows
        "function_inputs": inputs,
        "flags": tuple(name for name, holds in flags.items() if holds),  # of ``fg::AnySpec`` those that hold
        # Of exponents in base 2, in base e, and by how much a score may grow.
        "factors": (
            ("SCORE_FACTOR", c_literal(LOG2_E * factor)),
            ("SCALE", c_literal(factor)),
            ("MOST_GROWTH", c_literal(_MOST_GROWTH / (LOG2_E * factor))),
        )
        if weights.form.exponential
        else (),
        # Functions of the spec: declarations, and what they return.
        "rules": tuple(_rules(variant, captured, sink, sink_tangent).items()),
        "keep_range": keep_range,
        "observed_rows": rows,
        "observed_columns": columns,
        "tangent": tangent,  # forward mode: what tangents change, beside o and lse; or its backward pass
        "gradients": gradients,
        # Fields that sequences may have of their own: C types and names.
        "numbers": (
            *((("uint32_t", "dropout_threshold"), ("float", "dropout_scale")) if spec.dropout is not None else ()),
            *(("float" if p.type is ScalarType.FLOAT else "int32_t", param_field(p.name)) for p in spec.params),
        ),
    }


def _rules(variant: Variant, captured: Sequence[str], sink: str | None, sink_tangent: str | None) -> dict[str, str]:
    """Functions of the spec beside those of a pair, by their declarations: what each returns."""
    form, code, kind = variant.weights.form, WeightCode(variant.weights.form), variant.kind
    vector = "fg::VecF {}({})".format
    arriving = "fg::VecF p, fg::VecF d_p, fg::VecF delta, fg::VecF inverse"
    moving = f"{arriving}, fg::VecF moved, fg::VecF epsilon, fg::VecF t_p, fg::VecF d_t_weight"
    row = "const Arguments& a, const Launch& u, const Head& x, const Row& r"
    found = {"int64_t head_rows(const Arguments& a)": f"a.{HEAD_ROWS}" if kind.slices else "a.q_len"}
    if form.normalised:
        found |= {
            vector("term", "fg::VecF w"): code.term("w"),
            vector("denominator", "fg::VecF total"): code.denominator("total"),
        }
    found[vector("backward", arriving)] = code.backward("d_p")
    if variant.tangent is not None:
        found |= {
            vector("tangent_backward", moving): code.tangent_backward("d_p"),
            "constexpr int degree()": str(form.degree),
        }
        if form.normalised:
            found[vector("share", "fg::VecF p, fg::VecF t_p")] = code.share("p", "t_p")
    for name, at_row in (("sink_of", sink), ("sink_tangent_of", sink_tangent)):
        if at_row is not None:
            found[vector(name, row)] = f"fg::broadcast({at_row})"
    if not variant.keep_everything:
        masks = masks_apart(index_set(variant.keep))
        found |= {
            "int64_t masks_of(const Arguments& a)": masks.count,
            "int64_t mask_of(const Arguments& a, int64_t b, int64_t h)": masks.number,
            "int64_t batch_of_mask(const Arguments& a, int64_t mask)": masks.b,
            "int64_t head_of_mask(const Arguments& a, int64_t mask)": masks.h,
        }
    if keeps_lists(variant):
        parts = [f"double({each})" for each in _lists(variant.keep)]
        declared = f"std::array<double, {len(parts)}> question_of(const Arguments& a, int tile_rows, int tile_columns)"
        found[declared] = f"{{{{{', '.join(parts)}}}}}"
    if captured:
        values = [
            f"{{a.{gradient_field(name)}, {_elements(variant, name)}, {_owned(variant, name)}}}" for name in captured
        ]
        found[f"std::array<fg::Captured, {len(values)}> captured(const Arguments& a)"] = f"{{{{{', '.join(values)}}}}}"
    return found


def _heads_are_alike(spec: AttentionSpec) -> bool:
    """Whether nothing that a row is computed from depends on its head."""
    return not any(isinstance(node, Symbol) and node.name in ("h", "hkv", "Hkv") for node in walk(*spec.expressions))


def _lists(keep: Expr) -> tuple[str, ...]:
    """Over the arguments and the sizes of tiles, which come first."""
    fields = ("q_len", "kv_len", *mask_sizes(keep), *(param_field(each) for each in mask_params(keep)))
    return ("tile_rows", "tile_columns", *(f"a.{name}" for name in fields))


def _gradient(
    gradient: CapturedGradient, label: str, captured: int, placement: Placement, pair_code: str | None
) -> dict[str, object]:
    """The gradient of one read of a captured value, as a struct of the spec."""
    read = gradient.read
    sinks = []
    for arriving, name, part in (
        ("d_sink", f"sink_by_{label}", gradient.from_sink),
        ("d_t_sink", f"sink_tangent_by_{label}", gradient.from_sink_tangent),
    ):
        if part is not None:
            sinks.append(f"{arriving} * ({placement.value(name, part, Level.ROW)})")
    offset = placement.gradient_offset(read, gradient.level) if isinstance(read, Load) else "0"
    of_vectors = gradient.level in (Level.PAIR, Level.DIAGONAL, Level.ROW)
    code = (pair_code or "").replace("(INPUTS)", f"({_PAIR}, dot, sqdist)")
    code = code.replace("(MOVED)", f"({_PAIR}, dot, sqdist, t_dot, t_norms)")
    return {
        "name": f"Gradient_{label}",
        "level": gradient.level.value,
        "captured": captured,  # the number of the value
        "pair_code": code or None,  # one pair's contribution; None: it arrives through the sink alone
        "sink_code": " + ".join(sinks) or None,  # one row's contribution through the sink
        # What adds ``value`` to the gradient ``to``.
        "added": f"fg::add_rows(to, n, value, {offset})" if of_vectors else f"fg::add(to, {offset}, value)",
        "comment": f"∂L/∂{text(read)}",
    }


def _elements(variant: Variant, name: str) -> str:
    """The number of elements of a captured value with a gradient, as code."""
    read = next(gradient.read for gradient in variant.gradients if gradient.name == name)
    axes = range(len(read.indices)) if isinstance(read, Load) else ()
    return " * ".join(f"a.{dimension_field(name, axis)}" for axis in axes) or "1"


def _owned(variant: Variant, name: str) -> str:
    """Whether each element is read under one (b, key/value head) only: tasks of other heads never meet there."""
    reads = [gradient.read for gradient in variant.gradients if gradient.name == name]
    owned = all(
        isinstance(read, Load)
        and any(text(each) == "b" for each in read.indices)
        and any(text(each) in ("h", "hkv") for each in read.indices)
        for read in reads
    )
    return "true" if owned else "false"
