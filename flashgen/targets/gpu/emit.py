"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``Variant`` and a ``GpuPlan``. Out: a ``KernelSource``. The context below is all that a template sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.base_2 import LOG2_E
from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.diagonals import by_distance
from flashgen.analysis.levels import Level
from flashgen.analysis.pieces import block_sizes
from flashgen.analysis.variant import CapturedGradient, Variant, linear_factor
from flashgen.emit.context import (
    AddHook,
    Declaration,
    Masks,
    Observed,
    WeightCode,
    by_score,
    declaration,
    derivative_hooks,
    formula,
    labels,
    masks_apart,
    masks_of,
    observed_load,
    template_hooks,
    template_values,
    tidy,
)
from flashgen.emit.distance import split_score
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import RangeCode, range_code
from flashgen.emit.spelling import c_literal
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.ir.expr import Expr, Literal, Load, index_set
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.arguments import fields_of_sequences, gradient_field, param_field, param_place_field
from flashgen.plan.operands import Elements, Width
from flashgen.targets.gpu.addressing import addressing_code, sequence_code
from flashgen.targets.gpu.diagonals import diagonal_indices
from flashgen.targets.gpu.launches import captured_elements, operands_of
from flashgen.targets.gpu.layout import Printed, joined, printed
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.model import (
    BINS,
    F8_TURNERS,
    MOST_COLUMNS,
    PLACE_OF_QUERIES,
    PRODUCER_TILES_OF_QUERIES,
    TILES_OF_KEYS,
    TILES_OF_QUERIES,
    WINDOW,
    backward_layout,
    columns_at_a_time,
    forward_layout,
    mergers,
    notes,
    padded,
    query_layout,
    row_words,
    spans_of_half,
    visit_list,
)
from flashgen.targets.gpu.primitives import C_TYPES, WarpgroupProducts, primitives
from flashgen.targets.gpu.recipe import Recipe, recipe_of
from flashgen.targets.gpu.tiles import BackwardTiles, ForwardTiles, GpuPlan, QueryTiles
from flashgen.targets.gpu.workspace import count_code, workspace_code
from flashgen.version import __version__

# Passes and kinds of calls whose kernels a compiler may be asked to leave out, beside element types. ADDITIONS are
# calls whose gradients are added up in any order.
_PARTS = ("FORWARD", "BACKWARD", "ADDITIONS", "REPEATABLE")
_DROPOUT = ("WITHOUT_DROPOUT", "WITH_DROPOUT")
_CACHES = ("WIDE_CACHES", "F8_CACHES")


@dataclass(frozen=True)
class _Typed:
    """A name and its type in C++."""

    name: str
    c_type: str


@dataclass(frozen=True)
class _Param(_Typed):
    """A param, and the field that says where it lies."""

    place: str


@dataclass(frozen=True)
class _Pass:
    """The constants of one pass, as a struct template over the element type."""

    name: str
    comment: str
    constants: Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class _RowFunction:
    """A function of one row, evaluated where a pass begins or ends."""

    name: str
    code: str
    comment: str


@dataclass(frozen=True)
class _Gradient:
    """A captured gradient as the backward template sees it."""

    label: str
    level: str
    number: int  # of the target
    target: str  # the member of Arguments that receives it
    value: str  # the variable that holds one pair's contribution
    sum: str  # the member of a block that holds a sum
    sum_index: str  # which of a lane's sums a pair belongs to
    pair_code: str | None  # one pair's contribution; None: it arrives through the sink alone
    sink_name: str | None  # the function ∂sink/∂read
    offset: str  # of the element
    offset_by_distance: str | None  # the same over a diagonal, where it follows from the distance
    comment: str

    @property
    def sink_only(self) -> bool:
        return self.pair_code is None


@dataclass(frozen=True)
class _Pieces:
    """The sizes of the blocks at which a tile is cut, as template arguments, by rows and by columns."""

    rows: str
    columns: str


@dataclass(frozen=True)
class _Lists:
    """Lists of visits: what of a call's heads has lists of its own, and whether the host keeps them.

    Where blocks take the ``longest_first``, ``mask_of_head`` is code for the number of lists of masks before that of a
    ``head`` counted through the batch, as the beginning of a sum.
    """

    masks: Masks
    kept: bool
    longest_first: bool
    mask_of_head: str


@dataclass(frozen=True)
class _Forward:
    """What kinds of blocks of the forward pass a source has, over its element types.

    ``mapped``: the types whose kernels take maps for tensor copies; ``self_loading``: some have no warps of their own
    to copy; ``has_producers``: some have them; ``begins_next``: some begin with the next query tile while they work on
    one;
    ``shows_columns``: what the mask reads by column comes with the tile; ``divided``: warps share rows; ``wide``: V has
    more columns than a product of warpgroups.
    """

    mapped: tuple[str, ...]
    self_loading: bool
    has_producers: bool
    begins_next: bool
    shows_columns: bool
    divided: bool
    wide: bool
    memory: Printed


@dataclass(frozen=True)
class _Backward:
    """The same of those for dK and dV.

    ``persistent``: the types where those that add up dQ take one key tile after another.

    ``shows_rows``: what the mask reads by row comes with what rows carry; ``divided``: warps share the rows of dQ, and
    of those that share keys some may weigh none; ``shares_keys``: two warpgroups share 64 keys; ``dq_in_halves``:
    they have half of the columns of dQ each.
    """

    mapped: tuple[str, ...]
    persistent: tuple[str, ...]
    begins_next: bool
    shows_rows: bool
    divided: bool
    shares_keys: bool
    dq_in_halves: bool
    memory: Printed


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
    plan: GpuPlan
    primitives: tuple[str, ...]
    recipe: Recipe
    warpgroups: bool
    forward: _Forward
    backward: _Backward
    queries_memory: Printed  # of the kernel of dQ
    window: int
    words_of_notes: int
    bytes_of_list: int
    notes: str
    ragged: bool
    cached: bool
    written: str  # the type of elements of o and of gradients: T, that of the call, or another
    f8_caches: bool  # which may be of 8 bits
    f8: bool  # q, k and v are of 8 bits
    scaled_weights: bool  # which have to be brought into the range of the elements
    mask_by_head: bool  # of caches: heads that share keys have masks of their own
    addressing: str
    sequence_code: tuple[str, ...]
    of_sequences: tuple[tuple[str, str], ...]  # fields, and those of their tables
    row_words: str
    arguments: tuple[Declaration, ...]
    hooks: object
    function_inputs: dict[str, str]
    keep_range: RangeCode
    pieces: _Pieces | None
    lists: _Lists | None
    observed_rows: tuple[Observed, ...]
    observed_columns: tuple[Observed, ...]
    diagonals: Masks | None  # whose numbers of diagonals a kernel reads, where there are some
    compiled_parts: tuple[str, ...]
    elements: tuple[_Typed, ...]
    passes: tuple[_Pass, ...]
    weights: WeightCode
    sqdist: bool
    distance: bool
    dropout: bool
    sink: str | None
    tangent: bool  # forward mode: what tangents change, beside o and lse
    weight_tangent: bool  # captured values change weights beside what scores change
    sink_tangent: str | None
    params: tuple[_Param, ...]
    row_functions: tuple[_RowFunction, ...]
    split_score: bool
    padded_dims: tuple[int, int]
    linear: bool  # scores are the dot product but for a constant factor, with which kernels go on
    score_factor: str  # of exponential weights: what makes its score, or the dot product, an exponent in base 2
    natural_factor: str  # the same for base e
    exponent_of_dot: str  # the same, before what numbers of 8 bits are multiplied by
    headroom: int
    lag: str
    lag_code: str
    dot_factor: str | None
    by_score: str  # a format: what comes through the score, from one of its derivatives
    workspace_code: str
    captured: tuple[str, ...]
    captured_elements: dict[str, str]
    key_gradients: tuple[_Gradient, ...]
    query_gradients: tuple[_Gradient, ...]
    pair_gradients: tuple[_Gradient, ...]
    bins: int
    sink_gradients: tuple[_Gradient, ...]


def cuda_symbol(variant: Variant) -> str:
    """What every kernel's name begins with."""
    return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}{_form(variant)}"


def _form(variant: Variant) -> str:
    kinds = {"_cached": variant.cached, "_parts": variant.parts, "_ragged": variant.ragged, "_f8": variant.f8}
    kinds["_jvp"] = variant.tangent is not None
    return next((kind for kind, holds in kinds.items() if holds), "")


def emit_cuda(variant: Variant, plan: GpuPlan) -> KernelSource:
    """The CUDA C++ source of one head dimension for one target."""
    symbol = cuda_symbol(variant)
    context = _context(variant, plan, symbol)
    rendered = environment().get_template("cuda/kernel.cu.jinja").render(template_values(context))
    return KernelSource(
        file_name=f"{symbol}_{plan.target}.cu",
        target=plan.target,
        symbol=symbol,
        head_dim=variant.head_dim,
        text=tidy(rendered),
        defines=(),
    )


def _context(variant: Variant, plan: GpuPlan, symbol: str) -> _Context:
    recipe = recipe_of(variant)
    variant, spec = recipe.computed, variant.spec
    placement = Placement(variant.proofs, lanes=None)
    pair_inputs = ", float dot" + (", float sqdist" if variant.uses_sqdist else "")
    inputs: dict[str, str] = {}

    def hook(name: str, expr: Expr, declared: str = pair_inputs, comment: str = "") -> None:
        placement.function(name, expr, comment)
        inputs[name] = declared

    linear = linear_factor(variant)
    factor = LOG2_E * (linear or 1.0)
    row_functions: list[_RowFunction] = []
    weights = variant.weights
    if weights.form.exponential:
        split = split_score(variant.score)
        less = "" if split.rows is None else ", less what is the same for all keys of a query"
        hook("score", split.pairs, comment=f"The score: {text(variant.score)}{less}")
        if split.rows is not None:
            code = placement.row_code(split.rows)
            row_functions.append(_RowFunction("row_score", code, "What all scores of a row have in common"))
    else:
        hook("score", variant.score, comment=f"The score: {text(variant.score)}")
    sink_code = None if weights.sink is None else placement.value("sink", weights.sink, Level.ROW)
    if weights.weight is not None:
        hook("weight", weights.weight, ", float s")
        assert variant.weight_by_score is not None
        hook("weight_by_score", variant.weight_by_score, ", float s", "∂weight/∂s")
    hook("keep", variant.keep_of_pairs, "", f"Kept pairs: {text(variant.keep_of_pairs)}")
    sink_tangent = derivative_hooks(variant, placement, hook, "float", pair_inputs)
    if sink_tangent is not None:
        row_functions.append(_RowFunction("sink_tangent", sink_tangent, "What the sink changes by"))
    if sink_code is not None:
        row_functions.append(_RowFunction("sink_score", sink_code, "The sink"))
    chained = by_score(variant)
    gradients = {
        gradient.read: _gradient(gradient, label, recipe.captured, placement, hook, row_functions, chained)
        for gradient, label in zip(variant.gradients, labels(variant.gradients), strict=True)
    }
    has_sequences = variant.ragged or variant.cached
    has_dropout = spec.dropout is not None and not variant.cached  # over a cache nothing is dropped
    f8_caches = variant.cached and spec.takes_f8
    loads = (*recipe.observed_rows, *recipe.observed_columns)
    observed = tuple(observed_load(load, placement) for load in loads)
    keep_range = range_code(variant.keep, placement, {each.load: f"{each.struct}.{each.name}" for each in observed})
    assert len(placement.hooks().members[Level.DIAGONAL]) <= len(recipe.numbers), "the workspace has no room for all"
    elements = tuple(_Typed(str(each.element), C_TYPES[each.element]) for each in plan.elements)
    warpgroups, pieces = _warpgroups(variant, plan), _pieces(variant.keep) if recipe.cuts else None
    return _Context(
        name=spec.name,
        symbol=symbol,
        target=plan.target,
        version=__version__,
        digest=spec_digest(spec)[:16],
        spec_lines=spec_lines(spec),
        formula=formula(variant),
        head_dim=variant.head_dim,
        plan=plan,
        primitives=primitives(
            dropout=has_dropout,
            f8_caches=f8_caches,
            f8=variant.f8,
            parts=variant.parts,
            warpgroups=warpgroups,
            pieces=pieces is not None,
            sequence_copies=variant.ragged,
            tangent=variant.tangent is not None,
        ),
        recipe=recipe,
        warpgroups=warpgroups is not None,
        forward=_forward(variant, recipe, plan),
        backward=_backward(variant, recipe, plan),
        queries_memory=_queries_memory(variant, plan),
        window=WINDOW,
        words_of_notes=notes(variant),
        bytes_of_list=visit_list(variant),
        notes=_notes(variant),
        ragged=variant.ragged,
        cached=variant.cached,
        written=_written(variant),
        f8_caches=f8_caches,
        f8=variant.f8,
        scaled_weights=weights.form.divided or (variant.f8 and not weights.form.exponential),
        mask_by_head="h" in index_set(variant.keep),
        addressing=addressing_code(operands_of(variant), variant.head_dim),
        sequence_code=sequence_code(operands_of(variant), variant.head_dim) if has_sequences else (),
        of_sequences=tuple(fields_of_sequences(spec).items()) if has_sequences else (),
        row_words=row_words(variant).places("RowWords"),
        arguments=tuple(declaration(field) for field in cuda_fields(variant)),
        hooks=template_hooks(placement.hooks()),
        function_inputs=inputs,
        keep_range=keep_range,
        pieces=pieces,
        lists=_lists(variant, recipe),
        observed_rows=tuple(each for each in observed if each.struct == "rows"),
        observed_columns=tuple(each for each in observed if each.struct == "columns"),
        diagonals=masks_apart(diagonal_indices(variant)) if recipe.numbers else None,
        compiled_parts=(
            *_PARTS,
            *(_DROPOUT if has_dropout else ()),
            *(_CACHES if f8_caches else ()),
            *(each.name.upper() for each in elements),
        ),
        elements=elements,
        passes=_passes(variant, plan),
        weights=WeightCode(variant.weights.form),
        sqdist=variant.uses_sqdist,
        distance=placement.measures_distance,
        dropout=has_dropout,
        sink=sink_code,
        tangent=variant.tangent is not None,
        weight_tangent=variant.tangent is not None and variant.tangent.weight is not None,
        sink_tangent=sink_tangent,
        params=tuple(
            _Param(
                param_field(each.name),
                "float" if each.type is ScalarType.FLOAT else "int32_t",
                param_place_field(each.name),
            )
            for each in spec.params
        ),
        row_functions=tuple(row_functions),
        split_score=any(each.name == "row_score" for each in row_functions),
        padded_dims=(padded(variant.head_dim.qk), padded(variant.head_dim.v)),
        linear=linear is not None,
        score_factor="exponent_unit" if variant.f8 and linear is not None else c_literal(factor),
        natural_factor="exponent_unit * fg::LN_2" if variant.f8 and linear is not None else c_literal(linear or 1.0),
        exponent_of_dot=c_literal(factor),
        headroom=recipe.headroom,
        lag=str(recipe.lag),
        lag_code=c_literal(recipe.lag / factor),
        dot_factor=_constant(variant.score_by_dot),
        by_score=chained,
        workspace_code=workspace_code(variant, plan),
        captured=recipe.captured,
        captured_elements={name: count_code(count) for name, count in captured_elements(variant).items()},
        key_gradients=tuple(gradients[each.read] for each in recipe.key_gradients),
        pair_gradients=tuple(gradients[each.read] for each in recipe.key_gradients if each.level is Level.PAIR),
        bins=BINS,
        query_gradients=tuple(gradients[each.read] for each in recipe.query_gradients),
        sink_gradients=tuple(gradients[each.read] for each in recipe.sink_gradients),
    )


def _written(variant: Variant) -> str:
    """The same for all that a pass writes."""
    operands = operands_of(variant).values()
    elements = {
        each.elements
        for each in operands
        if each.is_written and each.width in (Width.QK, Width.V) and (each.name == "o" or not variant.forward_only)
    }
    assert len(elements) == 1, "o and the gradients of q, k and v are of one type"
    return "float" if elements == {Elements.FLOAT32} else "T"


def _notes(variant: Variant) -> str:
    """What blocks keep beside a list of visits; in ragged batches also which sequence it is of."""
    base = "Sequence" if variant.ragged else ""
    return joined(
        (
            "// What blocks keep beside a list of visits: of query tiles (with producers, without), of key tiles.",
            PLACE_OF_QUERIES.struct("QueryPlace", base),
            "template <bool has_producers> struct QueryNotes;",
            "template <> " + TILES_OF_QUERIES.struct("QueryNotes<false>", "QueryPlace"),
            "template <> " + PRODUCER_TILES_OF_QUERIES.struct("QueryNotes<true>", "QueryPlace"),
            TILES_OF_KEYS.struct("KeyNotes", base),
        )
    )


def _queries_memory(variant: Variant, plan: GpuPlan) -> Printed:
    layouts = {C_TYPES[each.element]: query_layout(variant, each.element, each.queries) for each in plan.elements}
    return printed("QueryMemory", "Where the kernel of dQ has what, in bytes of shared memory.", "class T", layouts)


def _forward(variant: Variant, recipe: Recipe, plan: GpuPlan) -> _Forward:
    persistent = [each for each in plan.elements if each.forward.tensor_copies]
    layouts = {C_TYPES[each.element]: forward_layout(variant, each.element, each.forward) for each in plan.elements}
    return _Forward(
        mapped=tuple(str(each.element) for each in persistent),
        self_loading=any(not each.forward.producers for each in persistent),
        has_producers=any(each.forward.producers for each in persistent),
        begins_next=any(each.forward.begins_next for each in persistent),
        shows_columns=bool(persistent and recipe.observed_columns),
        divided=any(each.forward.split > 1 for each in plan.elements),
        wide=padded(variant.head_dim.v) > MOST_COLUMNS,
        memory=printed("ForwardMemory", "Where blocks of the forward pass have what, in bytes.", "class T", layouts),
    )


def _backward(variant: Variant, recipe: Recipe, plan: GpuPlan) -> _Backward:
    persistent = [each for each in plan.elements if recipe.one_pass and each.backward.persistent]
    layouts = {
        f"{C_TYPES[each.element]}, {str(atomic).lower()}": backward_layout(
            variant, each.element, each.backward, with_dq=atomic
        )
        for each in plan.elements
        for atomic in ((True, False) if recipe.one_pass else (False,))
    }
    return _Backward(
        mapped=tuple(str(each.element) for each in plan.elements if each.backward.tensor_copies),
        persistent=tuple(str(each.element) for each in persistent),
        begins_next=any(each.backward.begins_next for each in persistent),
        shows_rows=bool(recipe.row_state and recipe.observed_rows),
        divided=any(each.queries.split > 1 for each in plan.elements),
        shares_keys=any(each.backward.shares_keys for each in plan.elements),
        dq_in_halves=_has_dq_in_halves(plan),
        memory=printed("BackwardMemory", "The same for dK and dV.", "class T, bool atomic", layouts),
    )


def _has_dq_in_halves(plan: GpuPlan) -> bool:
    return any(each.backward.dq_in_halves for each in plan.elements)


def _lists(variant: Variant, recipe: Recipe) -> _Lists | None:
    if not recipe.has_lists:
        return None
    mask_of_head = "head / heads * tiles + " if "b" in index_set(variant.keep) else ""
    return _Lists(masks_of(variant.keep), recipe.keeps_lists, recipe.longest_first, mask_of_head)


def _pieces(keep: Expr) -> _Pieces:
    rows, columns = (", ".join(str(size) for size in block_sizes(keep, axis)) for axis in (ROW, COLUMN))
    return _Pieces(rows, columns)


def _constant(expr: Expr) -> str | None:
    return c_literal(expr.value) if isinstance(expr, Literal) else None


def _gradient(
    gradient: CapturedGradient,
    label: str,
    captured: tuple[str, ...],
    placement: Placement,
    hook: AddHook,
    row_functions: list[_RowFunction],
    chained: str,
) -> _Gradient:
    parts = []
    if gradient.from_score is not None:
        hook(f"score_by_{label}", gradient.from_score, comment=f"∂score/∂{text(gradient.read)}")
        parts.append(chained % f"score_by_{label}(INPUTS)")
    if gradient.from_weight is not None:
        hook(f"weight_by_{label}", gradient.from_weight, ", float s", f"∂weight/∂{text(gradient.read)}")
        parts.append(f"d_weight * weight_by_{label}(a, u, x, r, c, safe)")
    sink_name = None
    if gradient.from_sink is not None:
        sink_name = f"sink_by_{label}"
        code = placement.value(sink_name, gradient.from_sink, Level.ROW)
        row_functions.append(_RowFunction(sink_name, code, f"∂sink/∂{text(gradient.read)}"))
    read, target = gradient.read, gradient_field(gradient.name)
    offset = placement.gradient_offset(read, gradient.level) if isinstance(read, Load) else "0"
    on_diagonal = by_distance(read)
    return _Gradient(
        label=label,
        level=gradient.level.value,
        number=captured.index(target),
        target=target,
        value=f"loss_by_{label}",
        sum=f"sum_by_{label}",
        sum_index={Level.COLUMN: "[k]", Level.ROW: "[n]"}.get(gradient.level, ""),
        pair_code=" + ".join(parts) or None,
        sink_name=sink_name,
        offset=offset,
        offset_by_distance=None if on_diagonal is None else placement.gradient_offset(on_diagonal, Level.DIAGONAL),
        comment=f"∂L/∂{text(gradient.read)}",
    )


def _warpgroups(variant: Variant, plan: GpuPlan) -> WarpgroupProducts | None:
    """The products of warpgroups that the passes of a plan contain; None where it has none."""
    widths: set[int] = set()
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    for each in plan.elements:
        if each.forward.warpgroups:
            of_o = (columns_at_a_time(variant),) if variant.f8 else _widths_of_o(Dv, each.element, each.forward)
            widths |= {each.forward.weighed or each.forward.Bc, *of_o}
        if each.backward.dq_in_halves:
            of_dq = spans_of_half(D, each.element)
            of_keys = (*of_dq, *spans_of_half(Dv, each.element)) if each.backward.shares_keys else (D, Dv)
            pieces = (min(64, span) for span in of_dq)  # where registers are few
            widths |= {each.backward.weighed, *of_dq, *of_keys, *pieces}
        elif each.backward.warpgroups:
            widths |= {each.backward.weighed, D, Dv, D // each.backward.dq_column_groups}
        if each.queries.warpgroups:
            widths |= {each.queries.Bc, D}
    elements = tuple(each.element for each in plan.elements if each.element is not ElementType.F32)
    if not widths:
        return None
    spans = _has_dq_in_halves(plan) or any(
        tiles.warpgroups and (tiles.split > 1 or Dv > MOST_COLUMNS)
        for tiles in (each.forward for each in plan.elements)
    )
    return WarpgroupProducts(tuple(sorted(width // 8 for width in widths)), elements, spans)


def _widths_of_o(Dv: int, element: ElementType, tiles: ForwardTiles) -> tuple[int, ...]:
    """The columns of products with V."""
    if tiles.split > 1:
        return spans_of_half(Dv, element)
    return tuple(min(MOST_COLUMNS, Dv - first) for first in range(0, Dv, MOST_COLUMNS))


def _role_constants(tiles: ForwardTiles | BackwardTiles) -> dict[str, int]:
    """Who copies, and how, how many blocks share the registers, and how many those who copy have and the others get."""
    roles = {"producers": tiles.producers, "blocks": tiles.blocks}
    if tiles.producers:
        roles |= {"producer_registers": tiles.producer_registers, "registers": tiles.registers}
    return roles | {"tensor_copies": int(tiles.tensor_copies)}


def _passes(variant: Variant, plan: GpuPlan) -> tuple[_Pass, ...]:
    with_warpgroups = any(
        tiles.warpgroups for each in plan.elements for tiles in (each.forward, each.backward, each.queries)
    )

    def constants(tiles: ForwardTiles | BackwardTiles | QueryTiles, **more: int) -> tuple[tuple[str, str], ...]:
        shared = {"BR": tiles.Br, "BC": tiles.Bc, "warps": tiles.warps, "stages": tiles.stages}
        shared |= more
        shared |= {"warpgroups": int(tiles.warpgroups)} if with_warpgroups else {}
        if tiles.split > 1:
            shared |= {"split": tiles.split, "weighed": tiles.weighed}
        return tuple((name, str(value)) for name, value in shared.items())

    forward, backward, queries = {}, {}, {}
    for each in plan.elements:
        name = str(each.element)
        roles = _role_constants(each.forward) if with_warpgroups else {}
        roles |= {"mergers": mergers(variant, each.forward)} if variant.cached else {}
        roles |= {"turners": F8_TURNERS, "columns_at_a_time": columns_at_a_time(variant)} if variant.f8 else {}
        forward[name] = constants(each.forward, q_in_registers=int(each.forward.q_in_registers), **roles)
        shared = {"dq_column_groups": each.backward.dq_column_groups, "persistent": int(each.backward.persistent)}
        groups = _role_constants(each.backward) | shared
        groups = groups if with_warpgroups else {}
        own = {"split": each.backward.split, "weighed": each.backward.weighed}
        own |= {"dq_sent": each.backward.dq_sent or 0} if _has_dq_in_halves(plan) else {}
        backward[name] = constants(each.backward, **own, **groups)
        queries[name] = constants(each.queries)
    return (
        _Pass("ForwardPlan", "The plan of the forward pass.", forward),
        _Pass("BackwardPlan", "The plan of dK and dV.", backward),
        _Pass("QueryPlan", "The plan of dQ, where it has a kernel of its own.", queries),
    )
