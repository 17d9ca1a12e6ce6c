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


def count_flops(signature: Signature, forward: Any, backward: Any) -> None:
    """Register the formulas of an op's two operators (``OpOverloadPacket``)."""
    # The backward operator's q, k and v stand behind d_o, d_lse, o, lse and its parts.
    first = 5 if signature.has_lse else 1

    def of_forward(*arguments: Any, **_: Any) -> int:
        q, _, v = arguments[:3]
        return _products(signature, arguments, q.shape[-1] + v.shape[-1])

    def of_backward(*arguments: Any, **_: Any) -> int:
        q, _, v = arguments[first : first + 3]
        # S again, dP and dV, dQ and dK
        return _products(signature, arguments[first:], 3 * q.shape[-1] + 2 * v.shape[-1])

    register: Any = register_flop_formula
    register(forward, get_raw=True)(of_forward)
    register(backward, get_raw=True)(of_backward)


def _products(signature: Signature, arguments: Sequence[Any], depth: int) -> int:
    """Those of all pairs. Lengths of sequences are read; on meta all are as long as the longest."""
    (q, k, _), kind = arguments[:3], signature.kind
    own = arguments[signature.tensor_arguments - len(kind.tensors) :]
    if kind is RAGGED:
        lens = (
            [longest or 0] * (len(x) - 1) if x.is_meta else x.diff().tolist()
            for x, longest in zip(own[:2], own[6:8], strict=True)
        )
        pairs = sum(i * j for i, j in zip(*lens, strict=True))
    elif kind is CACHED:
        pairs = q.shape[2] * (len(own[0]) * k.shape[2] if own[0].is_meta else int(own[0].sum()))
    else:
        pairs = q.shape[0] * q.shape[2] * k.shape[2]
    return int(2 * q.shape[1] * pairs * depth)
