"""Ragged batches over ranks: the rows of all sequences, one behind the other, are spread over ranks.

In: where sequences begin, and which rows each rank holds. Out: a ``SequencePiece`` for each sequence, and o and lse of
this rank's rows. A sequence that one rank holds alone needs no messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashgen.distributed.blocks import Held, mask_of, needs_of
from flashgen.distributed.exchange import Group
from flashgen.distributed.partial import Offsets, Partial, attend_whole
from flashgen.distributed.ring import Walk
from flashgen.distributed.rounds import rounds_of
from flashgen.distributed.ulysses import Attend
from flashgen.ir.expr import Symbol, SymbolKind, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.ragged import RAGGED
from flashgen.op.captured import check_defaults
from flashgen.op.checks import check_captured
from flashgen.op.lengths import check_starts
from flashgen.op.op import AttentionOp
from flashgen.op.values import type_of_sums


@dataclass(frozen=True)
class SequencePiece:
    """One sequence: its number, its length, its positions on each rank, and its rows among those of this rank."""

    number: int
    length: int
    held: Held
    rows: tuple[slice, ...]


def pieces_of(starts: Sequence[int], held: Held, rank: int) -> Iterator[SequencePiece]:
    """The sequences in order, without empty ones."""
    for number, (first, end) in enumerate(pairwise(starts)):
        if end > first:
            inside = tuple(
                tuple((max(x, first) - first, min(y, end) - first) for x, y in own if x < end and y > first)
                for own in held
            )
            yield SequencePiece(number, end - first, inside, tuple(_rows(first, end, held, rank)))


def _rows(first: int, end: int, held: Held, rank: int) -> Iterator[slice]:
    before = 0
    for x, y in held[rank]:
        if x < end and y > first:
            yield slice(before + max(x, first) - x, before + min(y, end) - x)
        before += y - x


def captured_of(spec: AttentionSpec, tensors: Sequence[Any], length: int) -> list[Any]:
    """The captured tensors as a sequence of this length sees them: dimensions Nq and Nk are cut to the length."""
    found = list(tensors)
    for n, declared in enumerate(spec.tensors):
        x: Tensor = found[n]
        for axis, extent in enumerate(declared.shape):
            if isinstance(extent, Symbol) and extent.kind is SymbolKind.SIZE and extent.name in ("Nq", "Nk"):
                x = x.narrow(axis, 0, length)
        found[n] = x
    return found


def refusal(spec: AttentionSpec) -> str:
    """Why sequences cannot be computed one by one; empty where they can."""
    for declared in spec.tensors:
        for extent in declared.shape:
            if not isinstance(extent, Symbol) and any(
                isinstance(node, Symbol) and node.name in ("Nq", "Nk") for node in walk(extent)
            ):
                return f"a dimension of tensor '{declared.name}' is computed from the lengths of a sequence"
    return ""


def starts_of(cu_seqlens: object) -> list[int]:
    """``cu_seqlens`` as a list. Raises ``TypeError`` and ``ValueError``."""
    held = check_starts("cu_seqlens", cu_seqlens)
    if held.is_meta:
        raise ValueError("'cu_seqlens' is on meta and has no numbers; ranks have to know where sequences begin")
    starts: list[int] = held.tolist()
    if starts[0] != 0 or any(end < first for first, end in pairwise(starts)):
        raise ValueError(f"'cu_seqlens' is {starts}; it begins with 0 and never falls")
    return starts


def attend_pieces(
    partial: Partial, tensors: Sequence[Any], pieces: Iterable[SequencePiece], batch: int, group: Group, *,
    rank: int, at_once: bool, repeatable: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o [1, H, n, Dv] and lse [1, H, n] of a rank's rows, sequence by sequence; ``tensors`` are the operator's.

    q, k and v are [1, heads, n, width]. Raises ``ValueError`` where a captured tensor is not of the longest sequence,
    or an index or a number of dropout is wrong in any: on every rank, whoever holds it, as the others would wait for
    one that has raised.
    """
    q, k, v = tensors[:3]
    spec, signature = partial.op.spec, partial.op.signature
    head_dim, heads, pieces = HeadDim(q.shape[3], v.shape[3]), q.shape[1], tuple(pieces)
    found: list[tuple[Tensor, Tensor | None]] = []

    def sizes_of(N: int) -> dict[str, int]:
        return {"B": batch, "H": heads, "Hkv": k.shape[1], "Nq": N, "Nk": N, "D": head_dim.qk, "Dv": head_dim.v}

    longest = sizes_of(max((each.length for each in pieces), default=0))
    for declared, x in zip(spec.tensors, tensors[3:], strict=False):
        check_captured(declared, x, longest, q.device)
    for each in {each.length: each for each in reversed(pieces) if each.length}.values():
        try:
            partial.op.engine.checker.indices.check(head_dim, sizes_of(each.length))
            check_defaults(spec, tensors[3 + len(spec.tensors) :], sizes_of(each.length))
        except ValueError as error:
            raise ValueError(f"sequence {each.number}, of {each.length} positions: {error}") from None
    for each in pieces:
        if not each.held[rank]:
            continue
        N, sizes = each.length, sizes_of(each.length)
        rest = captured_of(spec, tensors[3:], N)
        captured = {name: x for name, x in zip(signature.names, rest, strict=False) if x is not None}
        needs = needs_of(mask_of(spec, head_dim, sizes, captured, each.number), each.held)
        rounds = rounds_of(needs, each.held, rank, at_once=at_once, device=q.device)
        where = Offsets(0, 0, each.number, 0, N, N, batch, heads)
        own = (torch.cat([x[:, :, rows] for rows in each.rows], 2) for x in (q, k, v))
        keeps = at_once or needs.are_few(each.held)
        walk = Walk(partial, rounds, group, where, repeatable, keeps)
        found.append(walk.attend((*own, *rest)))
    if not found:
        # A graph that gives zero gradients: other ranks wait for those of captured values.
        learned = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
        o = q.new_zeros((*q.shape[:3], v.shape[3])) + sum(0 * x.sum().to(q.dtype) for x in learned)
        return o, q.new_zeros(q.shape[:3], dtype=type_of_sums(q.dtype)) if signature.has_lse else None
    sums = [lse for _, lse in found if lse is not None]
    return torch.cat([o for o, _ in found], 2), torch.cat(sums, 2) if sums else None


def attends_heads(op: AttentionOp, cu_seqlens: Tensor, heads: int, repeatable: bool) -> Attend:
    """A function that computes some heads of all rows by one ragged call, for method ``"ulysses"``."""

    def attend(part: tuple[Any, ...], first: int) -> tuple[Tensor, Tensor | None]:
        rows, starts = (x[0].transpose(0, 1) for x in part[:3]), cu_seqlens.to(part[0].device, torch.int32)
        offsets: Any = (0, first, None, heads, None, None)
        o, lse = attend_whole(op.engine_of(RAGGED), (*rows, *part[3:], starts, starts), (offsets, repeatable))
        return o.transpose(0, 1)[None], None if lse is None else lse[None]

    return attend
