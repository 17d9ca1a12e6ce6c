"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``Variant`` and a ``CudaPlan``. Out: a ``KernelSource``. The context below is all that a template sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.base_2 import in_base_2
from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.diagonals import by_distance
from flashgen.analysis.levels import Level, observed_loads
from flashgen.analysis.pieces import block_sizes, is_cut
from flashgen.analysis.variant import DOT, CapturedGradient, Variant, constant_factor
from flashgen.emit.context import (
    AddHook,
    Declaration,
    Masks,
    Observed,
    declaration,
    formula,
    labels,
    masks_apart,
    masks_of,
    observed_load,
    template_hooks,
    template_values,
    tidy,
)
from flashgen.emit.cuda_primitives import C_TYPES, WarpgroupProducts, primitives
from flashgen.emit.cuda_workspace import count_code, workspace_code
from flashgen.emit.distance import split_score
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.placement import Placement
from flashgen.emit.ranges import RangeCode, range_code
from flashgen.emit.spelling import c_literal
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.ir.expr import Expr, Literal, Load, index_set, walk
from flashgen.ir.spec import Normalize, Pointwise, Softmax
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.arguments import gradient_field, param_field
from flashgen.plan.cuda_diagonals import diagonal_indices, diagonal_numbers, with_diagonals
from flashgen.plan.cuda_launches import Passes, captured_elements, passes
from flashgen.plan.cuda_lists import cuda_fields
from flashgen.plan.cuda_model import BINS, COPYING_REGISTERS, FINDING_REGISTERS, padded, registers
from flashgen.plan.cuda_plan import BackwardTiles, CudaPlan, ForwardTiles, QueryTiles
from flashgen.plan.mask_lists import has_lists, keeps_lists, takes_longest_first
from flashgen.version import __version__

# A row's maximum may lag behind by this much in base 2 before O is rescaled.
LAG = 8.0


@dataclass(frozen=True)
class _Typed:
    """A name and its type in C++."""

    name: str
    c_type: str


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
    warpgroups: bool
    mapped_forward: tuple[str, ...]  # element types whose forward kernels take maps for tensor copies
    mapped_backward: tuple[str, ...]  # the same of those for dK and dV
    alone_forward: bool  # whether some have no warps of their own to copy
    served_forward: bool  # whether some have
    stays_backward: bool  # whether some blocks that add up dK, dV and dQ take one key tile after another
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
    weights: str
    sqdist: bool
    distance: bool
    dropout: bool
    sink: str | None
    params: tuple[_Typed, ...]
    row_functions: tuple[_RowFunction, ...]
    split_score: bool
    padded_dims: tuple[int, int]
    score_factor: str | None
    lag: str
    lag_code: str
    dot_factor: str | None
    weights_first: bool
    one_pass: bool
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
    return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}"


def emit_cuda(variant: Variant, plan: CudaPlan) -> KernelSource:
    """The CUDA C++ source of one head dimension for one target."""
    symbol = cuda_symbol(variant)
    context = _context(variant, plan, symbol)
    rendered = environment().get_template("cuda/kernel.cu.jinja").render(template_values(context))
    return KernelSource(
        name=f"{symbol}_{plan.target}",
        target=plan.target,
        symbol=symbol,
        head_dim=variant.head_dim,
        text=tidy(rendered),
        defines=(),
    )


def _context(variant: Variant, plan: CudaPlan, symbol: str) -> _Context:
    variant = with_diagonals(variant)
    spec = variant.spec
    placement = Placement(variant.proofs, vectors=False)
    pair_inputs = ", float dot" + (", float sqdist" if variant.uses_sqdist else "")
    inputs: dict[str, str] = {}

    def hook(name: str, expr: Expr, declared: str = pair_inputs, comment: str = "") -> None:
        placement.function(name, expr, comment)
        inputs[name] = declared

    factor = None
    row_functions: list[_RowFunction] = []
    match variant.weights:
        case Softmax(sink):
            kind = "softmax"
            score = in_base_2(variant.score)
            factor = constant_factor(score)
            split = split_score(score)
            less = "" if split.rows is None else ", less what is the same for all keys of a query"
            hook("score", split.pairs, comment=f"The score in base 2: log2(e) · ({text(variant.score)}){less}")
            if split.rows is not None:
                code = placement.row_code(split.rows)
                row_functions.append(_RowFunction("row_score", code, "What all scores of a row have in common"))
            sink_code = None if sink is None else placement.value("sink", in_base_2(sink), Level.ROW)
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
    cut = passes(variant)
    if sink_code is not None:
        row_functions.append(_RowFunction("sink_score", sink_code, "The sink in base 2"))
    gradients = {
        gradient.read: _gradient(gradient, label, cut.captured, placement, hook, row_functions)
        for gradient, label in zip(variant.gradients, labels(variant.gradients), strict=True)
    }
    observed = tuple(observed_load(load, placement) for loads in observed_loads(variant.keep) for load in loads)
    keep_range = range_code(variant.keep, placement, {each.load: f"{each.struct}.{each.name}" for each in observed})
    numbers = diagonal_numbers(variant)
    assert len(placement.hooks().members[Level.DIAGONAL]) <= len(numbers), "the workspace has no room for all"
    elements = tuple(_Typed(str(each.element), C_TYPES[each.element]) for each in plan.elements)
    weights_first = _weights_first(variant, cut)
    warpgroups, pieces = _warpgroups(variant, plan, weights_first=weights_first), _pieces(variant.keep)
    staying = [each.forward for each in plan.elements if each.forward.tensor_copies]
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
        primitives=primitives(dropout=spec.dropout is not None, warpgroups=warpgroups, pieces=pieces is not None),
        warpgroups=warpgroups is not None,
        mapped_forward=tuple(str(each.element) for each in plan.elements if each.forward.tensor_copies),
        mapped_backward=tuple(str(each.element) for each in plan.elements if each.backward.tensor_copies),
        alone_forward=any(not each.loaders for each in staying),
        served_forward=any(each.loaders for each in staying),
        stays_backward=cut.one_pass and any(each.backward.stays for each in plan.elements),
        arguments=tuple(declaration(field) for field in cuda_fields(variant)),
        hooks=template_hooks(placement.hooks()),
        function_inputs=inputs,
        keep_range=keep_range,
        pieces=pieces,
        lists=_lists(variant),
        observed_rows=tuple(each for each in observed if each.struct == "rows"),
        observed_columns=tuple(each for each in observed if each.struct == "columns"),
        diagonals=masks_apart(diagonal_indices(variant)) if numbers else None,
        compiled_parts=("FORWARD", "BACKWARD", *(each.name.upper() for each in elements)),
        elements=elements,
        passes=_passes(plan, weights_first=weights_first),
        weights=kind,
        sqdist=variant.uses_sqdist,
        distance=placement.measures_distance,
        dropout=spec.dropout is not None,
        sink=sink_code,
        params=tuple(
            _Typed(param_field(each.name), "float" if each.type is ScalarType.FLOAT else "int32_t")
            for each in spec.params
        ),
        row_functions=tuple(row_functions),
        split_score=any(each.name == "row_score" for each in row_functions),
        padded_dims=(padded(variant.head_dim.qk), padded(variant.head_dim.v)),
        score_factor=None if factor is None else c_literal(factor),
        lag=f"{LAG:g}",
        lag_code=c_literal(LAG if factor is None else LAG / factor),
        dot_factor=_constant(variant.score_by_dot),
        weights_first=weights_first,
        one_pass=cut.one_pass,
        workspace_code=workspace_code(variant, plan),
        captured=cut.captured,
        captured_elements={name: count_code(count) for name, count in captured_elements(variant).items()},
        key_gradients=tuple(gradients[each.read] for each in cut.key_gradients),
        pair_gradients=tuple(gradients[each.read] for each in cut.key_gradients if each.level is Level.PAIR),
        bins=BINS,
        query_gradients=tuple(gradients[each.read] for each in cut.query_gradients),
        sink_gradients=tuple(gradients[each.read] for each in cut.sink_gradients),
    )


def _lists(variant: Variant) -> _Lists | None:
    if not has_lists(variant):
        return None
    mask_of_head = "head / heads * tiles + " if "b" in index_set(variant.keep) else ""
    return _Lists(masks_of(variant.keep), keeps_lists(variant), takes_longest_first(variant), mask_of_head)


def _pieces(keep: Expr) -> _Pieces | None:
    if not is_cut(keep):
        return None
    rows, columns = (", ".join(str(size) for size in block_sizes(keep, axis)) for axis in (ROW, COLUMN))
    return _Pieces(rows, columns)


def _weights_first(variant: Variant, cut: Passes) -> bool:
    """Whether the dot products are needed no more once there are weights: what follows is linear in them."""
    if not isinstance(variant.weights, Softmax) or variant.spec.dropout is not None or variant.uses_sqdist:
        return False
    parts = [variant.score_by_dot, *(each.from_score for each in cut.key_gradients)]
    return all(part is None or DOT not in walk(part) for part in parts) and isinstance(variant.score_by_dot, Literal)


def _constant(expr: Expr) -> str | None:
    return c_literal(expr.value) if isinstance(expr, Literal) else None


def _gradient(
    gradient: CapturedGradient,
    label: str,
    captured: tuple[str, ...],
    placement: Placement,
    hook: AddHook,
    row_functions: list[_RowFunction],
) -> _Gradient:
    parts = []
    if gradient.from_score is not None:
        hook(f"score_by_{label}", gradient.from_score, comment=f"∂score/∂{text(gradient.read)}")
        parts.append(f"d_score * score_by_{label}(INPUTS)")
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
        value=f"d_{label}",
        sum=f"sum_{label}",
        sum_index={Level.COLUMN: "[k]", Level.ROW: "[n]"}.get(gradient.level, ""),
        pair_code=" + ".join(parts) or None,
        sink_name=sink_name,
        offset=offset,
        offset_by_distance=None if on_diagonal is None else placement.gradient_offset(on_diagonal, Level.DIAGONAL),
        comment=f"∂L/∂{text(gradient.read)}",
    )


def _warpgroups(variant: Variant, plan: CudaPlan, *, weights_first: bool) -> WarpgroupProducts | None:
    """The products of warpgroups that the passes of a plan contain; None where it has none."""
    widths: set[int] = set()
    D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
    for each in plan.elements:
        if each.forward.warpgroups:
            widths |= {each.forward.Bc, Dv}
        if each.backward.warpgroups:
            widths |= {_weighed(each.backward, weights_first), D, Dv, D // each.backward.dq_column_groups}
        if each.queries.warpgroups:
            widths |= {each.queries.Bc, D}
    elements = tuple(each.element for each in plan.elements if each.element is not ElementType.F32)
    return WarpgroupProducts(tuple(sorted(width // 8 for width in widths)), elements) if widths else None


def _role_constants(tiles: ForwardTiles | BackwardTiles) -> dict[str, int]:
    """Who copies, and how, how many blocks share the registers, and how many those who copy have and the others get."""
    roles = {"loaders": tiles.loaders, "blocks": tiles.blocks}
    if tiles.loaders:
        least = FINDING_REGISTERS if isinstance(tiles, ForwardTiles) else COPYING_REGISTERS
        multiplying, copying = registers(tiles.warps, tiles.loaders, least)
        roles |= {"loader_registers": copying, "registers": multiplying}
    return roles | {"tensor_copies": int(tiles.tensor_copies)}


def _weighed(tiles: BackwardTiles, weights_first: bool) -> int:
    """Queries whose scores a warp has in registers at a time."""
    if not tiles.warpgroups:
        return tiles.Br // tiles.split
    return 32 if weights_first and tiles.blocks > 2 else min(tiles.Br, 64)


def _passes(plan: CudaPlan, *, weights_first: bool) -> tuple[_Pass, ...]:
    with_warpgroups = any(
        tiles.warpgroups for each in plan.elements for tiles in (each.forward, each.backward, each.queries)
    )

    def constants(tiles: ForwardTiles | BackwardTiles | QueryTiles, **more: int) -> tuple[tuple[str, str], ...]:
        shared = {"BR": tiles.Br, "BC": tiles.Bc, "warps": tiles.warps, "stages": tiles.stages}
        shared |= {"shared_bytes": tiles.sram_bytes, **more}
        shared |= {"warpgroups": int(tiles.warpgroups)} if with_warpgroups else {}
        return tuple((name, str(value)) for name, value in shared.items())

    forward, backward, queries = {}, {}, {}
    for each in plan.elements:
        name = str(each.element)
        loaders = _role_constants(each.forward) if with_warpgroups else {}
        forward[name] = constants(each.forward, q_in_registers=int(each.forward.q_in_registers), **loaders)
        keys_bytes = each.backward.keys_sram_bytes
        shared = {"dq_column_groups": each.backward.dq_column_groups, "stays": int(each.backward.stays)}
        groups = _role_constants(each.backward) | shared
        groups = groups if with_warpgroups else {}
        weighed = _weighed(each.backward, weights_first)
        backward[name] = constants(
            each.backward, split=each.backward.split, weighed=weighed, keys_shared_bytes=keys_bytes, **groups
        )
        queries[name] = constants(each.queries)
    return (
        _Pass("ForwardPlan", "The plan of the forward pass.", forward),
        _Pass("BackwardPlan", "The plan of dK and dV.", backward),
        _Pass("QueryPlan", "The plan of dQ, where it has a kernel of its own.", queries),
    )
