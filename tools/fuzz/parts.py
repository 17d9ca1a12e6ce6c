"""A call whose keys are worked on in parts, as ranks of a ring do, in one process.

In: an op, the arguments of a call. Out: what the op returns, with gradients: merged from parts of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.distributed.blocks import cuts
from flashgen.distributed.partial import Offsets, Partial
from flashgen.distributed.ring import Walk
from flashgen.distributed.rounds import Round, Rounds, Segment, Unit
from flashgen.ir.spec import AttentionSpec
from flashgen.op.op import AttentionOp

_OFFSETS = ("q_start", "kv_start", "b_start", "h_start")
_TOTALS = ("q_total", "kv_total", "b_total", "h_total")


def has_parts(spec: AttentionSpec) -> bool:
    """Whether parts are computed by the op itself: a sink would take another one, which nobody asked to compile."""
    return spec.weights.sink is None


def in_parts(op: AttentionOp, count: int, wide: bool, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """o, or o and lse, of ``count`` parts of the keys, written in float32 where they are to be ``wide``."""
    starts = [int(options.pop(name, 0)) for name in _OFFSETS]
    ends = [start + length for start, length in zip(starts, (q.shape[2], k.shape[2], *q.shape[:2]), strict=True)]
    totals = [int(options.pop(name, None) or end) for name, end in zip(_TOTALS, ends, strict=True)]
    returns_lse, repeatable = options.pop("return_lse", False), bool(options.pop("deterministic", False))
    chosen = {name: options.pop(name, None) for name in ("dropout_p", "seed")}
    tensors = op.operator_tensors(q, k, v, options, return_lse=returns_lse, **chosen)
    rows = (0, q.shape[2])
    spans = cuts(0, k.shape[2], count) if q.shape[2] and k.shape[2] else []
    units = tuple(
        Unit(0, rows, starts[0], span, starts[1] + span[0], (((0, span[1] - span[0]), span),)) for span in spans
    )
    plan = Rounds((Segment(rows, starts[0], is_whole=False),), (Round(k.shape[2], units),))
    walk = Walk(
        Partial(op, wide=wide), plan, None, Offsets(0, 0, starts[2], starts[3], *totals), repeatable, keeps=False
    )
    o, lse = walk.attend(tensors)
    if lse is not None and q.dtype is not torch.float64:
        lse = lse.float()
    return (o, lse) if returns_lse else o
