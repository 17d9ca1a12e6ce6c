"""Runs a call on the reference: its dense problems, one after another, by PyTorch's operators.

In: a ``Call`` and its tensors, by its kind. Out: fresh tensors. What a dense problem is, and what it sees of a tensor
of the call, derivatives of derivatives go by, too (``derives.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.kind import Kind
from flashgen.op.call import Attended, Call, Rows, Tensors
from flashgen.op.captured import Captured
from flashgen.op.layouts import laid
from flashgen.op.modes import autograd_inside, deterministic_algorithms
from flashgen.op.per_sequence import PerSequence
from flashgen.op.signature import Signature
from flashgen.op.taken import Taken, View
from flashgen.op.values import type_of_sums
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

_PLACES = (Place.QUERIES, Place.KEYS, Place.KEYS)  # of the gradients of q, k and v


@dataclass(frozen=True)
class Formula:
    """The reference of one spec and kind of call, in slices of ``pairs``; None: densely."""

    spec: AttentionSpec
    kind: Kind
    signature: Signature
    pairs: int | None

    def attend(self, call: Call, taken: Taken | None, tensors: Tensors, captured: Captured) -> Attended:
        """``o``, ``lse`` and its parts."""
        q, has_lse = tensors[0], self.signature.has_lse
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        parts = q.new_zeros(call.lse_parts[0], dtype=torch.float32) if has_lse else None
        problems = self.problems(call, taken, tensors, captured)
        if not self.kind.by_sequence:
            for problem, _ in problems:  # one at most
                o, lse = tiled.forward(problem)
                return laid(o, call.o), None if lse is None else lse.to(dtype), parts
        o = q.new_empty_strided(*call.o).zero_()
        lse = q.new_full(call.lse[0], -math.inf, dtype=dtype) if has_lse else None
        for problem, view in problems:
            own_o, own_lse = tiled.forward(problem)
            view(Place.QUERIES, o).copy_(own_o)
            if lse is not None and own_lse is not None:
                view(Place.SUMS, lse).copy_(own_lse)
        if taken is not None:
            taken.finish(o, lse)
        return o, lse, parts

    def gradients(
        self,
        call: Call,
        taken: Taken | None,
        d_o: Tensor,
        rows: Rows,
        tensors: Tensors,
        captured: Captured,
        needs: Sequence[bool],
        is_part: bool,
    ) -> list[Tensor]:
        """Those that are needed, in the order of the inputs. ``is_part``: as ``Engine.gradients`` says."""
        inputs = tensors[: self.signature.inputs]
        whole = (rows[1], rows[2]) if is_part and not self.kind.by_sequence else None
        sums: Sequence[Tensor | None] = []
        with deterministic_algorithms(call.deterministic), autograd_inside():
            for problem, view in self.problems(call, taken, tensors, captured):
                arriving = view(Place.QUERIES, d_o), view(Place.SUMS, rows[0])
                gradients = tiled.backward(problem, *arriving, needs, whole)
                if not self.kind.by_sequence:
                    sums = gradients
                    break
                sums = sums or _sums_like(inputs, needs, tensors[0])
                for n, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
                    if total is not None and gradient is not None:
                        part = view(_PLACES[n] if n < 3 else Place.WHOLE, total)
                        part.copy_(gradient) if n < 3 else part.add_(gradient)
        found = []
        for n, (total, like) in enumerate(zip(sums or _sums_like(inputs, needs, tensors[0]), inputs, strict=True)):
            if total is not None:
                own = total.to(like.device, type_of_sums(like.dtype) if n > 2 and is_part else like.dtype)
                found.append(laid(own, call.gradients[n]) if n < 3 else own)
        return found

    def problems(
        self, call: Call, taken: Taken | None, tensors: Tensors, captured: Captured
    ) -> Iterator[tuple[tiled.Problem, View]]:
        """The dense problems of a call that give anything, and what each of them sees of a tensor of the call."""
        if taken is None or not self.kind.by_sequence:
            if not tiled.gives_nothing(self.spec, call.shard):
                yield self.problem(call, call.shard, tensors, captured, captured.params, captured.drawn), _all_of
            return
        sequences = PerSequence(self.spec, call, taken.pairs, tensors, captured)
        for number, shard, rows, view in taken.problems(self.spec):
            params, dropout = sequences.params_of(number), sequences.dropout_of(number)
            yield self.problem(call, shard, rows, captured, params, dropout), view

    def problem(
        self,
        call: Call,
        shard: Shard,
        rows: Tensors,
        captured: Captured,
        params: Sequence[float],
        dropout: Dropout | None,
    ) -> tiled.Problem:
        """A dense problem of a call: ``rows`` begin with q, k and v; ``params`` and ``dropout`` are its own."""
        if call.threads != torch.get_num_threads():
            torch.set_num_threads(1)  # in a forked child, where PyTorch's own threads are missing just the same
        return tiled.Problem(
            spec=self.spec,
            q=rows[0],
            k=rows[1],
            v=rows[2],
            tensors={declared.name: x for declared, x in zip(self.spec.tensors, captured.tensors, strict=True)},
            params={
                param.name: value if x is None else x
                for param, value, x in zip(self.spec.params, params, captured.given, strict=True)
            },
            shard=shard,
            dropout=dropout,
            pairs=self.pairs,
        )


def _sums_like(inputs: Sequence[Any], needs: Sequence[bool], q: Tensor) -> list[Tensor | None]:
    """What gradients that are needed are added up in."""
    dtype = type_of_sums(q.dtype)
    each = zip(inputs, needs, strict=True)
    return [torch.zeros(x.shape, dtype=dtype, device=q.device) if need else None for x, need in each]


def _all_of(place: Place, x: Any) -> Any:  # noqa: ARG001
    return x
