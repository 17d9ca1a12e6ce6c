"""Stage 3, plan for GPUs: the launches of every pass, and what lies in the workspace.

In: a ``Variant``, a ``CudaPlan`` and the symbol of its source. Out: ``PassLaunches``. The kernels are those at the ends
of ``templates/cuda/forward.cuh.jinja`` and ``backward.cuh.jinja``, which take the places of the buffers from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.levels import Level, observed_loads
from flashgen.analysis.variant import CapturedGradient, Variant
from flashgen.ir.expr import Load
from flashgen.ir.spec import Pointwise
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import dimension_field, gradient_field
from flashgen.plan.cuda_diagonals import diagonal_buffers, diagonal_counts
from flashgen.plan.cuda_lists import lists_of_keys, lists_of_queries, made_in_workspace
from flashgen.plan.cuda_model import padded, panel_width
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.plan.launches import Box, Buffer, Count, Factor, Launch, PassLaunches, Sum, Turns

# Buffers: query tiles, and key tiles, that blocks which stay have taken, beyond one each.
TURNS, KEY_TURNS = "turns", "key_turns"
CLEARS = "_clear"  # the end of the name of a kernel that clears the sums of dQ as well
GRANULE = 16  # rows or columns of one range of what the mask reads
_HEADS = (Factor("batch"), Factor("heads"))
_KV_HEADS = (Factor("batch"), Factor("kv_heads"))


@dataclass(frozen=True)
class Passes:
    """How the backward pass of a variant is cut into kernels.

    ``one_pass``: the kernel of dK and dV can add up dQ as well, because nothing is summed over rows. ``captured`` are
    the fields of ``struct Arguments`` that receive gradients of captured values, in the order of their numbers.
    """

    one_pass: bool
    row_state: bool
    key_gradients: tuple[CapturedGradient, ...]
    query_gradients: tuple[CapturedGradient, ...]
    sink_gradients: tuple[CapturedGradient, ...]
    captured: tuple[str, ...]


def passes(variant: Variant) -> Passes:
    """Which kernel reduces which gradient."""
    of_pairs = [each for each in variant.gradients if each.from_score is not None or each.from_weight is not None]
    query = tuple(each for each in of_pairs if each.level is Level.ROW)
    return Passes(
        one_pass=not query and not variant.uses_sqdist,
        row_state=not isinstance(variant.weights, Pointwise),
        key_gradients=tuple(each for each in of_pairs if each.level is not Level.ROW),
        query_gradients=query,
        sink_gradients=tuple(each for each in variant.gradients if each.from_sink is not None),
        captured=tuple(dict.fromkeys(gradient_field(each.name) for each in variant.gradients)),
    )


def captured_elements(variant: Variant) -> dict[str, Count]:
    """The number of elements behind each captured gradient."""
    found: dict[str, Count] = {}
    for gradient in variant.gradients:
        rank = len(gradient.read.indices) if isinstance(gradient.read, Load) else 0
        factors = tuple(Factor(dimension_field(gradient.name, axis)) for axis in range(rank))
        found[gradient_field(gradient.name)] = Count(factors)
    return found


def observed_buffers(variant: Variant) -> tuple[Buffer, ...]:
    """Ranges of what the mask reads, and numbers of diagonals: at the start of every pass's workspace."""
    rows, columns = observed_loads(variant.keep)
    found = []
    if rows:
        found.append(Buffer("row_bounds", Count((*_HEADS, Factor("q_len", GRANULE)), 8 * len(rows))))
    if columns:
        found.append(Buffer("column_bounds", Count((*_HEADS, Factor("kv_len", GRANULE)), 8 * len(columns))))
    return (*found, *diagonal_buffers(variant))


def _observe(symbol: str, variant: Variant) -> list[Launch]:
    """It starts every pass: each has a workspace of its own."""
    found = zip(("q_len", "kv_len"), observed_loads(variant.keep), strict=True)
    ranges = (Count((*_HEADS, Factor(length, GRANULE)), divide=128) for length, loads in found if loads)
    counts = (*ranges, *diagonal_counts(variant, divide=128))
    return [Launch(f"{symbol}_observe", Sum(counts), 128, 0)] if counts else []


def forward_buffers(variant: Variant) -> tuple[Buffer, ...]:
    """The workspace of the forward pass whose blocks stay."""
    return (*observed_buffers(variant), Buffer(TURNS, Count((), 4), clear=True))


def atomic_buffers(variant: Variant, *, stays: bool) -> tuple[Buffer, ...]:
    """The workspace where atomic additions of floats are allowed; ``stays``: blocks take one key tile after another."""
    cut = passes(variant)
    if not cut.one_pass:
        return (*observed_buffers(variant), *_delta(cut))
    clear = not cut.row_state  # else the kernel of delta clears both
    dq, turns = Buffer("dq", dq_sums(variant), clear=clear), Buffer(KEY_TURNS, Count((), 4), clear=clear)
    return (*observed_buffers(variant), *_delta(cut), dq, *((turns,) if stays else ()))


def dq_sums(variant: Variant) -> Count:
    """Bytes of the sums of dQ, in whole groups of 16 rows."""
    return Count((*_HEADS, Factor("q_len", 16)), 16 * padded(variant.head_dim.qk) * 4)


def exact_buffers(variant: Variant) -> tuple[Buffer, ...]:
    """The workspace where results have to repeat."""
    cut = passes(variant)
    if not cut.captured:
        return (*observed_buffers(variant), *_delta(cut))
    elements = captured_elements(variant)
    sums = (Buffer(f"exact_{name}", Count(elements[name].factors, 8), clear=True) for name in cut.captured)
    largest = Buffer("largest", Count((), 4 * len(cut.captured)), clear=True)
    return (*observed_buffers(variant), *_delta(cut), largest, *sums)


def _delta(cut: Passes) -> tuple[Buffer, ...]:
    return (Buffer("delta", Count((*_HEADS, Factor("q_len")), 4)),) if cut.row_state else ()


def forward_launches(
    symbol: str, variant: Variant, plan: CudaPlan, element: ElementType, *, dropped: bool
) -> PassLaunches:
    """The forward pass."""
    tiles = plan.by_element[element].forward
    name = f"{symbol}_forward_{element}{'_dropout' if dropped else ''}"
    grid = Count((*_HEADS, Factor("q_len", tiles.Br)))
    boxes: tuple[Box, ...] = ()
    if tiles.tensor_copies:
        boxes = (*_boxes(("q",), tiles.Br, variant, element), *_boxes(("k", "v"), tiles.Bc, variant, element))
    turns = Turns(TURNS, tiles.blocks) if tiles.tensor_copies else None
    launch = Launch(name, grid, 32 * (tiles.warps + tiles.loaders), tiles.sram_bytes, boxes, turns)
    lists = lists_of_queries(symbol, f"forward_{element}", variant, element, tiles, launch)
    launches = (*_observe(symbol, variant), *made_in_workspace(lists), launch)
    return PassLaunches(forward_buffers(variant) if turns else observed_buffers(variant), launches, lists)


def _boxes(tensors: tuple[str, ...], rows: int, variant: Variant, element: ElementType) -> tuple[Box, ...]:
    """One panel each of a tile of these tensors."""
    widths = {"q": variant.head_dim.qk, "k": variant.head_dim.qk, "v": variant.head_dim.v, "d_o": variant.head_dim.v}
    return tuple(Box(tensor, rows, panel_width(padded(widths[tensor]), element)) for tensor in tensors)


def backward_launches(
    symbol: str,
    variant: Variant,
    plan: CudaPlan,
    element: ElementType,
    *,
    dropped: bool,
    deterministic: bool,
    captured: bool = True,
) -> PassLaunches:
    """The backward pass. ``deterministic``: every gradient is bitwise repeatable; ``captured``: one is wanted."""
    cut = passes(variant)
    tiles = plan.by_element[element]
    suffix = f"{element}{'_dropout' if dropped else ''}"
    key_grid = Count((*_KV_HEADS, Factor("kv_len", tiles.backward.Bc)))
    query_grid = Count((*_HEADS, Factor("q_len", tiles.queries.Br)))
    boxes = _boxes(("q", "d_o"), tiles.backward.Br, variant, element) if tiles.backward.tensor_copies else ()

    def rows(how: str = "", *, clears: bool = False) -> list[Launch]:
        if not cut.row_state:
            return []
        name = f"{symbol}_rows_{element}{how if cut.sink_gradients else ''}{CLEARS if clears else ''}"
        grid = Count((*_HEADS, Factor("q_len")), divide=rows_of_a_block(variant.head_dim.v, element))
        return [Launch(name, grid, 128, 0)]

    def keys(kernel: str, how: str = "") -> Launch:
        shared = tiles.backward.sram_bytes if kernel == "backward" else tiles.backward.keys_sram_bytes
        threads = 32 * (tiles.backward.warps + tiles.backward.loaders)
        turns = Turns(KEY_TURNS, tiles.backward.blocks) if kernel == "backward" and tiles.backward.stays else None
        return Launch(f"{symbol}_{kernel}_{suffix}{how}", key_grid, threads, shared, boxes, turns)

    def queries(how: str = "") -> Launch:
        name = f"{symbol}_queries_{suffix}{how}"
        return Launch(name, query_grid, 32 * tiles.queries.warps, tiles.queries.sram_bytes)

    observe = _observe(symbol, variant)
    lists = lists_of_keys(symbol, f"keys_{element}", variant, element, tiles.backward, keys("keys"))
    if not deterministic and cut.one_pass:
        convert = Count((*_HEADS, Factor("q_len", 16)), divide=4)
        convert_launch = Launch(f"{symbol}_convert_{element}", convert, 128, 0)
        kernels = (*rows(clears=True), keys("backward"), convert_launch)
        buffers = atomic_buffers(variant, stays=tiles.backward.stays)
        return PassLaunches(buffers, (*observe, *made_in_workspace(lists), *kernels), lists)
    lists += lists_of_queries(symbol, f"queries_{element}", variant, element, tiles.queries, queries())
    launches: list[Launch] = [*observe, *made_in_workspace(lists)]
    if not deterministic or not cut.captured:
        buffers = exact_buffers(variant) if deterministic else atomic_buffers(variant, stays=False)
        return PassLaunches(buffers, (*launches, *rows(), keys("keys"), queries()), lists)
    if captured:
        launches += rows("_measure")
        launches += [keys("keys", "_measure")] if cut.key_gradients else []
        launches += [queries("_measure")] if cut.query_gradients else []
    launches += [*rows("_exact"), keys("keys", "_exact"), queries("_exact" if cut.query_gradients else "")]
    if captured:
        for name, elements in captured_elements(variant).items():
            grid = Count(elements.factors, divide=256)
            launches.append(Launch(f"{symbol}_settle_{name}", grid, 256, 0))
    return PassLaunches(exact_buffers(variant), tuple(launches), lists)


def rows_of_a_block(head_dim: int, element: ElementType) -> int:
    """Rows of O that a block of the first kernel of the backward pass takes."""
    chunk = 16 // element.bytes
    chunks = head_dim // chunk if head_dim % chunk == 0 else head_dim
    lanes = 1
    while lanes < 32 and 2 * lanes <= chunks:
        lanes *= 2
    return 128 // lanes
