"""HBM bytes of the CUDA kernels from counts of tiles: what ``cuda_traffic.py`` finds tile by tile, at any size.

In: a ``Variant``, the tiles of an element type, a shape. Out: bytes by buffer for each kernel of a pass, where every
gradient is summed by atomic additions and none is asked of the log-sum-exp. A test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.plan.cuda_launches import dq_sums, passes, rows_of_a_block
from flashgen.plan.cuda_model import FLOAT, padded
from flashgen.plan.cuda_plan import ElementPlan
from flashgen.plan.cuda_traffic import GROUP
from flashgen.plan.tile_counts import tile_counts

_THREADS = 128  # of the kernel of delta


def forward_traffic(variant: Variant, tiles: ElementPlan, shape: Shape) -> Mapping[str, Mapping[str, int]]:
    """Bytes by kernel and buffer."""
    D, Dv, element = variant.head_dim.qk, variant.head_dim.v, tiles.element.bytes
    rows = shape.batch * shape.heads * shape.q_len
    found = _keys_of(variant, shape, tiles.forward.Br, tiles.forward.Bc, element)
    found.update({"q": rows * D * element, "o": rows * Dv * element})
    if passes(variant).row_state:
        found["lse"] += rows * FLOAT
    return {"forward": found}


def backward_traffic(variant: Variant, tiles: ElementPlan, shape: Shape) -> Mapping[str, Mapping[str, int]]:
    """The same for the backward pass."""
    cut = passes(variant)
    found = {"rows": _rows(variant, tiles, shape)} if cut.row_state else {}
    if cut.one_pass:
        return {**found, "backward": _keys(variant, tiles, shape), "convert": _convert(variant, tiles, shape)}
    return {**found, "keys": _keys(variant, tiles, shape), "queries": _queries(variant, tiles, shape)}


def _keys_of(variant: Variant, shape: Shape, Br: int, Bc: int, element: int) -> Counter[str]:
    """K and V for each visited tile."""
    keys = tile_counts(variant, shape, Br, Bc).keys
    return Counter({"k": keys * variant.head_dim.qk * element, "v": keys * variant.head_dim.v * element})


def _rows(variant: Variant, tiles: ElementPlan, shape: Shape) -> Counter[str]:
    rows, each = shape.batch * shape.heads * shape.q_len, rows_of_a_block(variant.head_dim.v, tiles.element)
    blocks = -(-rows // each)
    width = blocks * each * variant.head_dim.v * tiles.element.bytes
    found = Counter({"o": width, "d_o": width, "workspace.delta": rows * FLOAT})
    cut = passes(variant)
    if cut.sink_gradients:
        found["lse"] = blocks * _THREADS * FLOAT
    if cut.one_pass:
        found["workspace.dq"] = _dq_sums(variant, shape)
    return found


def _keys(variant: Variant, tiles: ElementPlan, shape: Shape) -> Counter[str]:
    D, Dv, element, cut = variant.head_dim.qk, variant.head_dim.v, tiles.element.bytes, passes(variant)
    counts = tile_counts(variant, shape, tiles.backward.Br, tiles.backward.Bc)
    size = shape.batch * shape.kv_heads * shape.kv_len * element
    found = Counter({"k": size * D, "v": size * Dv, "dk": size * D, "dv": size * Dv})
    found.update({"q": counts.rows * D * element, "d_o": counts.rows * Dv * element})
    if cut.row_state:
        found.update({"lse": counts.rows * FLOAT, "workspace.delta": counts.rows * FLOAT})
    if cut.one_pass:
        found["workspace.dq"] += counts.groups * GROUP * padded(D) * FLOAT
    return found


def _queries(variant: Variant, tiles: ElementPlan, shape: Shape) -> Counter[str]:
    D, Dv, element = variant.head_dim.qk, variant.head_dim.v, tiles.element.bytes
    rows = shape.batch * shape.heads * shape.q_len
    found = _keys_of(variant, shape, tiles.queries.Br, tiles.queries.Bc, element)
    found.update({"q": rows * D * element, "d_o": rows * Dv * element, "dq": rows * D * element})
    if passes(variant).row_state:
        found.update({"lse": 4 * rows * FLOAT, "workspace.delta": 4 * rows * FLOAT})
    return found


def _convert(variant: Variant, tiles: ElementPlan, shape: Shape) -> Counter[str]:
    rows = shape.batch * shape.heads * shape.q_len
    written = rows * variant.head_dim.qk * tiles.element.bytes
    return Counter({"workspace.dq": _dq_sums(variant, shape), "dq": written})


def _dq_sums(variant: Variant, shape: Shape) -> int:
    return dq_sums(variant).value({"batch": shape.batch, "heads": shape.heads, "q_len": shape.q_len})
