"""The tensors of a drawn call: values, and how they lie in memory.

In: a spec, a ``CallDraw``. Out: ``Arguments``. Values are those of ``verification/inputs.py`` at the sizes of the whole
that the call is a shard of; extremes and views are added. A view holds the values that it shows: the reference gets
plain copies of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.eight_bits import DESCALES
from flashgen.op.eight_bits import from_8_bits, to_8_bits
from flashgen.op.ragged import of_sequence
from flashgen.op.signature import TORCH_DTYPES
from flashgen.reference.shard import Shard
from flashgen.verification.inputs import Inputs, random_inputs, tensor_shape
from tools.fuzz.draws import CallDraw

_CONVERTED = {torch.float32: torch.bfloat16, torch.int32: torch.int64}
_MOST_ELEMENTS = 2**24
_EXTREMES: Mapping[str, float] = {"-1e30": -1e30, "-1e9": -1e9, "-inf": -torch.inf, "inf": torch.inf}


class TooLargeError(ValueError):
    """A captured tensor of the call would take more memory than a case is worth."""


@dataclass(frozen=True)
class Held:
    """Where the rows of a cache lie: row n of sequence b in ``outer[b, n]``, its entry or page, at ``inner[n]``.

    ``cached`` are the rows of each sequence and those in front that are not its own, ``new`` those that a call writes.
    ``names`` are the arguments of a call that say so. ``factors`` are what keys and values of 8 bits are multiplied by.
    """

    outer: Tensor
    inner: Tensor
    cached: tuple[tuple[int, int], ...]
    new: int
    names: Mapping[str, Any]
    factors: tuple[Tensor, Tensor] | None = None

    def sequence(self, k: Tensor, v: Tensor, b: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values of rows of a sequence, [Hkv, rows, width], as numbers."""
        k, v = (self.rows(x, b, first, end) for x in (k, v))
        if self.factors is None:
            return k, v
        wide = torch.float64 if k.dtype is torch.float64 else torch.float32
        k, v = (x.to(wide) * factor[b, :, None, None] for x, factor in zip((k, v), self.factors, strict=True))
        return k, v

    def rows(self, x: Tensor, b: int, first: int, end: int) -> Tensor:
        """Rows of a sequence, [Hkv, rows, width]."""
        return x[self.outer[b, first:end], :, self.inner[first:end]].transpose(0, 1)

    def put(self, x: Tensor, rows: Sequence[Tensor | float], places: Sequence[tuple[int, int]]) -> None:
        """Write rows [Hkv, rows, width] of each sequence from ``first`` to ``end``."""
        for b, (first, end) in enumerate(places):
            own = rows[b]
            own = own.transpose(0, 1) if isinstance(own, Tensor) else torch.tensor(own, dtype=x.dtype)
            x[self.outer[b, first:end], :, self.inner[first:end]] = own

    @property
    def written(self) -> list[tuple[int, int]]:
        """The rows of each sequence that a call writes."""
        return [(length - self.new, length) for length, _ in self.cached]


@dataclass(frozen=True)
class Arguments:
    """What a call gets. ``options`` are its keyword arguments but for what is captured.

    ``starts``: where the sequences of a ragged batch begin, of queries and of keys, whose rows the inputs then are.
    ``held``: where the sequences of a cache lie, which k and v then are, with NaN where nobody may read. ``factors``:
    what q, k and v of 8 bits are multiplied by, [B, Hkv]; ``phase``: the formula in PyTorch rounds weights to 8 bits as
    well, multiplied by this before; 0: it does not.
    """

    inputs: Inputs
    shard: Shard
    options: Mapping[str, Any]
    starts: tuple[Tensor, Tensor] | None = None
    held: Held | None = None
    factors: tuple[Tensor, Tensor, Tensor] | None = None
    phase: float = 0.0

    def rows(self, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a dense call as numbers."""
        q, k, v = given.q, given.k, given.v
        if self.factors is None:
            return q, k, v
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        q, k, v = (from_8_bits(x, factor, wide) for x, factor in zip((q, k, v), self.factors, strict=True))
        return q, k, v

    def sequences(self) -> Iterator[tuple[Shard, slice, slice]]:
        """Each sequence of a ragged batch, its rows of q, and those of k and v."""
        assert self.starts is not None
        places = [[slice(*each) for each in itertools.pairwise(x.tolist())] for x in self.starts]
        for number, (q_rows, k_rows) in enumerate(zip(*places, strict=True)):
            yield of_sequence(self.shard, number, q_rows, k_rows), q_rows, k_rows

    def of_cache(self) -> Iterator[tuple[int, Shard]]:
        """Each sequence of a cache, as a part of a dense call: its last rows, and those that are its own."""
        assert self.held is not None
        b_total, h_total, _, _ = self.shard.totals()
        for number, (length, padding) in enumerate(self.held.cached):
            yield (
                number,
                replace(
                    self.shard,
                    batch=1,
                    kv_len=length - padding,
                    b_start=self.shard.b_start + number,
                    q_start=length - self.shard.q_len,
                    kv_start=padding,
                    b_total=b_total,
                    h_total=h_total,
                    q_total=length,
                    kv_total=length,
                ),
            )

    def learned(self, spec: AttentionSpec, wants: str) -> dict[str, Tensor]:
        """The tensors that take gradients, by name; none of a cache, none of 8 bits."""
        if self.held is not None or self.factors is not None:
            return {}
        found = self.inputs.differentiable(spec)
        captured = {name: tensor for name, tensor in found.items() if name not in ("q", "k", "v")}
        of_kind = {"q": {"q": found["q"]}, "captured": captured, "qkv": {n: found[n] for n in ("q", "k", "v")}}
        return of_kind.get(wants, found) or found


def head_dim_of(spec: AttentionSpec, call: CallDraw) -> HeadDim:
    """The head dimension of a call."""
    return spec.head_dims[call.head_dim % len(spec.head_dims)]


def arguments(spec: AttentionSpec, call: CallDraw, device: str = "cpu") -> Arguments:
    """The same values for the same spec and call; raises ``TooLargeError``."""
    batch, heads, kv_heads, q_len, kv_len = call.shape
    b, h, q, kv = call.starts
    ends = [
        start + length + more
        for start, length, more in zip(call.starts, (batch, heads, q_len, kv_len), call.more, strict=True)
    ]
    names = ("b_total", "h_total", "q_total", "kv_total")
    totals = dict(zip(names, ends, strict=True)) if call.totals else {}
    if call.lengths or call.cached:  # whole sequences
        totals = {name: total for name, total in totals.items() if name in ("b_total", "h_total")}
    starts = {"b_start": b, "h_start": h, "q_start": q, "kv_start": kv}
    shard = Shard(batch, heads, kv_heads, q_len, kv_len, **starts, **totals)
    if call.cached:
        shard = replace(shard, q_total=kv_len, kv_total=kv_len)
    group = shard.group
    whole = shard.totals()
    of_whole = Shape(whole[0], whole[1], max(whole[1] // group, 1), whole[2], whole[3])
    head_dim, dtype = head_dim_of(spec, call), TORCH_DTYPES[ElementType(call.dtype)]
    check_size(spec, of_whole, head_dim)
    values = random_inputs(spec, of_whole, head_dim, dtype, seed=call.seed)
    captured = {
        name: _extreme(tensor, dict(call.extremes).get(name), call.seed) for name, tensor in values.captured.items()
    }
    local = (slice(batch), slice(heads), slice(q_len)), (slice(batch), slice(kv_heads), slice(kv_len))
    if call.converted:
        captured = {name: tensor.to(_CONVERTED.get(tensor.dtype, tensor.dtype)) for name, tensor in captured.items()}
    local_inputs = Inputs(
        q=values.q[local[0]] * call.spread,
        k=values.k[local[1]] * call.spread,
        v=values.v[local[1]].clone(),
        captured=captured,
        params=values.params,
        d_o=values.d_o[local[0]].clone(),
        d_lse=values.d_lse[local[0]].clone(),
    )
    held, factors = None, None
    if call.cached:
        local_inputs, held = _in_cache(local_inputs, call)
    elif call.eight_bits:
        local_inputs, factors = _of_8_bits(local_inputs, call)
    views = _possible_views(call)
    own = (_rows(local_inputs, call.lengths) if call.lengths else local_inputs).to(device)
    inputs = Inputs(
        q=shown(own.q, views.get("q")),
        k=shown(own.k, views.get("k")),
        v=shown(own.v, views.get("v")),
        captured={name: shown(tensor, views.get("captured")) for name, tensor in own.captured.items()},
        params=own.params,
        d_o=shown(own.d_o, views.get("d_o")),
        d_lse=shown(own.d_lse, views.get("d_lse")),
    )
    options: dict[str, Any] = {name: value for name, value in {**starts, **totals}.items() if value}
    if held is not None:
        return Arguments(inputs, shard, {**options, **held.names}, held=held)
    options |= {"deterministic": call.deterministic}
    if spec.dropout is not None:
        options |= {"seed": call.dropout_seed}
        if call.dropout_p is not None:
            options |= {"dropout_p": call.dropout_p}
    if factors is not None:
        descales = {name: factor.to(device) for name, factor in zip(DESCALES, factors, strict=True)}
        return Arguments(inputs, shard, options | descales, factors=factors)
    if not call.lengths:
        return Arguments(inputs, shard, options)
    cumulative = [torch.tensor([0, *each]).cumsum(0) for each in zip(*call.lengths, strict=True)]
    q_starts, k_starts = (each.to(device, torch.int32) for each in cumulative)
    options |= {"max_seqlen_q": q_len, "max_seqlen_k": kv_len}
    return Arguments(inputs, shard, options, (q_starts, k_starts))


def _possible_views(call: CallDraw) -> dict[str, str]:
    """How tensors lie, but for what cannot be: none negates 8 bits, none has rows at one place that are written."""
    views = dict(call.views)
    rows = ("k", "v") if call.cached else ("q", "k", "v")
    if call.eight_bits:
        views = {name: view for name, view in views.items() if name not in rows}
    if call.new:
        views = {name: view for name, view in views.items() if name not in rows or "expanded" not in view}
    return views


def _of_8_bits(inputs: Inputs, call: CallDraw) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
    """q, k and v as numbers of 8 bits, and their factors."""
    generator = torch.Generator().manual_seed(call.seed + 3)
    batch, heads, kv_heads = call.shape[:3]
    # Of few bits, so that a float32 product with a number of 8 bits is exact.
    q, k, v = ((torch.rand((batch, kv_heads), generator=generator) + 0.1).bfloat16().float() for _ in range(3))
    of_heads = q.repeat_interleave(heads // max(kv_heads, 1), 1)
    q8, k8, v8 = to_8_bits(inputs.q, of_heads), to_8_bits(inputs.k, k), to_8_bits(inputs.v, v)
    return replace(inputs, q=q8, k=k8, v=v8), (q, k, v)


def _rows(inputs: Inputs, lengths: Sequence[tuple[int, int]]) -> Inputs:
    """The first rows of each batch entry, one behind the other."""

    def rows(x: Tensor, of_keys: bool) -> Tensor:
        return torch.cat([x[b, :, : each[of_keys]].transpose(0, 1) for b, each in enumerate(lengths)])

    return replace(
        inputs,
        q=rows(inputs.q, False),
        k=rows(inputs.k, True),
        v=rows(inputs.v, True),
        d_o=rows(inputs.d_o, False),
        d_lse=torch.cat([inputs.d_lse[b, :, :q] for b, (q, _) in enumerate(lengths)], 1),
    )


def _in_cache(inputs: Inputs, call: CallDraw) -> tuple[Inputs, Held]:
    """The same rows in a cache, in entries or pages of any order."""
    room, batch = call.shape[4], len(call.cached)
    generator = torch.Generator().manual_seed(call.seed + 2)
    page = call.page or max(1, room)
    pages = -(-room // page)
    order = torch.randperm(batch * pages + call.spare, generator=generator)[: batch * pages].view(batch, pages)
    lengths, padding = (torch.tensor(each, dtype=torch.int32) for each in zip(*call.cached, strict=True))
    names: dict[str, Any] = {"cache_seqlens": lengths - call.new, "num_splits": call.splits}
    if any(before for _, before in call.cached):
        names |= {"leftpad": padding}
    if call.page:
        names |= {"block_table": order.int()}
    elif call.spare or call.seed % 2:
        names |= {"cache_batch_idx": order[:, 0].int()}
    else:
        order = torch.arange(batch)[:, None]
    n = torch.arange(room)
    held = Held(order[:, n // page], n % page, call.cached, call.new, names)

    factors = None
    if call.eight_bits:
        # Of few bits, so that a float32 product with a number of 8 bits is exact.
        drawn = torch.rand((2, batch, call.shape[2]), generator=generator) + 0.1
        factors = (drawn[0].bfloat16().float(), drawn[1].bfloat16().float())
        names |= {"k_descale": factors[0], "v_descale": factors[1]}
        inputs = replace(inputs, k=to_8_bits(inputs.k[:batch], factors[0]), v=to_8_bits(inputs.v[:batch], factors[1]))
        held = replace(held, factors=factors)

    def cache(x: Tensor) -> Tensor:
        found = x.new_full((batch * pages + call.spare, x.shape[1], page if call.page else room, x.shape[3]), torch.nan)
        places = [(before, length) for length, before in call.cached]
        held.put(found, [x[b, :, first:end] for b, (first, end) in enumerate(places)], places)
        return found

    return replace(inputs, k=cache(inputs.k), v=cache(inputs.v)), held


def check_size(spec: AttentionSpec, shape: Shape, head_dim: HeadDim) -> None:
    """Raises ``TooLargeError`` for a table that would not fit a machine: a dimension of the lengths for each index."""
    for tensor in spec.tensors:
        extents = tensor_shape(tensor, shape, head_dim)
        if math.prod(extents) > _MOST_ELEMENTS:
            raise TooLargeError(f"tensor '{tensor.name}' would have {math.prod(extents)} elements")


def plain(inputs: Inputs) -> Inputs:
    """The same values, each tensor by itself."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().resolve_neg().resolve_conj().contiguous().clone()

    return Inputs(
        copied(inputs.q),
        copied(inputs.k),
        copied(inputs.v),
        {name: copied(tensor) for name, tensor in inputs.captured.items()},
        inputs.params,
        copied(inputs.d_o),
        copied(inputs.d_lse),
    )


def _extreme(tensor: Tensor, word: str | None, seed: int) -> Tensor:
    """Some rows of a bias at an extreme number, the most negative mostly, as masks are written, and some entries."""
    if word is None or not tensor.is_floating_point() or not tensor.numel():
        return tensor
    value = torch.finfo(tensor.dtype).min if word == "lowest" else _EXTREMES[word]
    generator = torch.Generator().manual_seed(seed + 1)
    chosen = torch.rand(tensor.shape, generator=generator) < 0.3
    rows = torch.rand((*tensor.shape[:-1], 1), generator=generator) < 0.3
    return tensor.masked_fill(chosen | rows, value)


def shown(tensor: Tensor, view: str | None) -> Tensor:
    """A tensor of the same shape that lies in memory as the view says; expanded ones repeat their first entry."""
    x = tensor
    match view:
        case "strided" if x.ndim:
            wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
            wide[..., ::2] = x
            return wide[..., ::2]
        case "transposed" if x.ndim > 2:
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        case "offset" if x.ndim:
            return torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape)
        case "padded" if x.ndim:
            wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 1))
            wide[..., :-1] = x
            return wide[..., :-1]
        case "expanded" if x.ndim and x.shape[0]:
            return x[:1].clone().expand(x.shape)
        case "expanded heads" if x.ndim > 1 and x.shape[1]:
            return x[:, :1].clone().expand(x.shape)
        case "negated" if x.is_floating_point():
            return torch._neg_view(-x)
        case "conjugated" if x.dtype in (torch.float32, torch.float64):
            return torch.complex(torch.zeros_like(x), -x).conj().imag
    return x
