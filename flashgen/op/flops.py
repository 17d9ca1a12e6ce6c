"""What ``torch.utils.flop_counter`` counts for an op: dense products, as PyTorch counts its own attention.

Masks are left out on purpose: figures then compare with those of ``scaled_dot_product_attention``, causal or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from flashgen.kinds.cached import CACHED
from flashgen.kinds.ragged import RAGGED
from flashgen.op.signature import Signature

Sizes = Sequence[int]


def count_flops(signature: Signature, forward: Any, backward: Any) -> None:
    """Register the formulas of an op's two operators (``OpOverloadPacket``)."""
    first = (
        5 if signature.has_lse else 1
    )  # the backward operator's q, k and v stand behind d_o, d_lse, o, lse and its parts
    if signature.kind is CACHED:
        lengths = signature.tensor_arguments - 4

        def of_cache(q: Any, k: Any, v: Any, *others: Any, **_: Any) -> int:
            rows = others[lengths - 3]
            keys = len(rows) * k.shape[2] if rows.is_meta else int(rows.sum())
            return 2 * int(q.shape[1]) * int(q.shape[2]) * keys * int(q.shape[3] + v.shape[3])

        register_raw: Any = register_flop_formula
        register_raw(forward, get_raw=True)(of_cache)
        return
    if signature.kind is RAGGED:
        _count_ragged(signature, first, forward, backward)
        return

    def of_forward(q: Sizes, k: Sizes, v: Sizes, *_: Any, **__: Any) -> int:
        return _products(q, k, q[3] + v[3])

    def of_backward(*shapes: Any, **_: Any) -> int:
        q, k, v = shapes[first : first + 3]
        return _products(q, k, 3 * q[3] + 2 * v[3])  # S again, dP and dV, dQ and dK

    register: Any = register_flop_formula
    register(forward)(of_forward)
    register(backward)(of_backward)


def _count_ragged(signature: Signature, first: int, forward: Any, backward: Any) -> None:
    """The same of sequences, whose lengths are read; on meta all are as long as the longest."""
    starts = signature.tensor_arguments - 2

    def products(arguments: Sequence[Any], is_forward: bool) -> int:
        q, v = arguments[0], arguments[2]
        depth = q.shape[2] + v.shape[2] if is_forward else 3 * q.shape[2] + 2 * v.shape[2]
        q_starts, k_starts = arguments[starts : starts + 2]
        most = arguments[starts + 6 : starts + 8]
        q_lens, k_lens = (
            [longest or 0] * (len(x) - 1) if x.is_meta else x.diff().tolist()
            for x, longest in zip((q_starts, k_starts), most, strict=True)
        )
        pairs: int = sum(i * j for i, j in zip(q_lens, k_lens, strict=True))
        return 2 * int(q.shape[1]) * pairs * int(depth)

    register: Any = register_flop_formula
    register(forward, get_raw=True)(lambda *arguments, **_: products(arguments, True))
    register(backward, get_raw=True)(lambda *arguments, **_: products(arguments[first:], False))


def _products(q: Sizes, k: Sizes, depth: int) -> int:
    batch, heads, q_len, _ = q
    return 2 * batch * heads * q_len * k[2] * depth
