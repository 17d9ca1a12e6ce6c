"""The same attention with the query heads of a key/value head as rows, by which lists for each query are computed.

Stage: analyse, first. In: an ``AttentionSpec`` and how many query heads share keys. Out: a spec of Hkv heads, whose row
i · group + n is query i of the n-th head of a group. Tensors and params keep their shapes. The rows of a tile then
belong to few queries, which together select few keys.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, index, literal, size, substitute
from flashgen.ir.spec import AttentionSpec, Schedule

# An H200's time for dK, dV and dQ, 32k causal, 16 blocks of 64 a query, 16 heads: 64 × 64 by a warpgroup 47.8 ms,
# 32 × 64 by four warps 38.6, 16 × 64 14.0: two queries that share a tile visit each other's keys, and mask them.
_TILES = Schedule(backward_Br=16, backward_Bc=64)
_WIDEST = 128  # head dimension for which that is known


@functools.lru_cache(maxsize=64)
def by_groups(spec: AttentionSpec, group: int, *, narrow: bool) -> AttentionSpec:
    """The spec of rows; ``narrow``: q, k and v have 16 bits. Raises ``ValueError`` for a layout, and for dropout."""
    if spec.layout is not None or spec.dropout is not None:
        raise ValueError(f"'{spec.name}' draws blocks, or drops pairs, by the positions of a head")
    count = literal(group)
    known: dict[Expr, Expr] = {
        index("i"): apply("floordiv", index("i"), count),
        index("h"): apply("add", apply("mul", index("hkv"), count), apply("mod", index("i"), count)),
        size("H"): apply("mul", size("H"), count),
        size("Nq"): apply("ceildiv", size("Nq"), count),
    }

    def of_rows(expr: Expr) -> Expr:
        return substitute(expr, known)

    weights, select = spec.weights, spec.select
    expression = None if weights.expression is None else of_rows(weights.expression)
    widest = max(max(each.qk, each.v) for each in spec.head_dims)
    is_known = narrow and widest <= _WIDEST and spec.schedule == Schedule()
    return replace(
        spec,
        name=f"{spec.name}_by_{group}",
        params=tuple(replace(x, default=None if x.default is None else of_rows(x.default)) for x in spec.params),
        tensors=tuple(replace(x, shape=tuple(map(of_rows, x.shape))) for x in spec.tensors),
        scale=of_rows(spec.scale),
        score=of_rows(spec.score),
        mask=of_rows(spec.mask),
        weights=weights.over(expression),
        schedule=_TILES if is_known else spec.schedule,
        select=None if select is None else replace(select, indices=tuple(map(of_rows, select.indices))),
    )
