"""Sequences that are packed into one row, by where they end: the number of the sequence to which each position belongs.

All layers of a forward pass are given the same two tensors of ends: what follows from them is found once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.op.unchanged import UnchangedTensor

_DIFFERENT = (
    "'cu_seq_lens_q' and 'cu_seq_lens_k' say different lengths; a causal or sliding mask is supported where queries "
    "and keys are the same positions"
)


# What the last call found, of which ends.
_LAST: list[tuple[object, dict[str, Tensor]]] = []


def packed(q_ends: Tensor, k_ends: Tensor, lengths: tuple[int, int], *, is_ordered: bool) -> dict[str, Tensor]:
    """``packed_q`` [Nq] and ``packed_k`` [Nk], for ends int [S + 1]. ``is_ordered``: the mask has positions in it.

    Raises ``ValueError`` where it has, and queries and keys are not packed in the same way.
    """
    if not (_is_remembered(q_ends) and _is_remembered(k_ends)):
        return _packed(q_ends, k_ends, lengths, is_ordered)
    key = (UnchangedTensor(q_ends), UnchangedTensor(k_ends), lengths, is_ordered)
    for known, documents in _LAST:
        if known == key:
            return documents
    found = _packed(q_ends, k_ends, lengths, is_ordered)
    _LAST[:] = [(key, found)]
    return found


def _is_remembered(ends: Any) -> bool:
    """Whether later changes of the numbers can be noticed; graphs compute them each time."""
    if torch.compiler.is_compiling() or ends.is_inference():
        return False
    return not (ends.is_cuda and torch.cuda.is_current_stream_capturing())


def _packed(q_ends: Tensor, k_ends: Tensor, lengths: tuple[int, int], is_ordered: bool) -> dict[str, Tensor]:
    if is_ordered and q_ends is not k_ends:
        if q_ends.shape != k_ends.shape:
            raise ValueError(_DIFFERENT)
        torch._assert_async((q_ends == k_ends).all(), _DIFFERENT)
    return {"packed_q": _documents(q_ends, lengths[0]), "packed_k": _documents(k_ends, lengths[1])}


def _documents(ends: Tensor, length: int) -> Tensor:
    places = torch.arange(length, device=ends.device)
    return torch.searchsorted(ends.to(places.dtype), places, right=True, out_int32=True)
