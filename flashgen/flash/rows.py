"""Sequences of any lengths, one behind the other, and conversions to this form: of pages and cache entries, of
sequences that use some of their rows, of 8-bit rows.

In: tensors [T, H, D] and where sequences begin, as FlashAttention passes them. Out: ``Ragged``, for an op. Nothing here
waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.flash.options import CallSizes, Positional, plan_call, with_second_query
from flashgen.op.cached import cache_of
from flashgen.op.conversion import as_number, is_integral, require
from flashgen.op.eight_bits import factors_of, from_8_bits, wide_type
from flashgen.op.layer import LOWER_RIGHT, SQUARE
from flashgen.op.signature import F8

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # that every op here is built for
_SLOPES = 5  # among options by position
_PARTS = 3  # of a sequence that has unused rows


class Ragged(NamedTuple):
    """q, k and v; where each sequence begins among the rows of q and of k, [B + 1]; the longest that there may be."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_starts: Tensor
    k_starts: Tensor
    most: tuple[int | None, int | None] = (None, None)
    unused: Tensor | None = None  # of the rows of q [Tq], where some are

    def attend(self, given: Positional, by_name: Mapping[str, Any]) -> Any:
        """The result of a function for these rows and options."""
        rows, convert = self, None
        q, k, v = self.q, self.k, self.v
        if by_name or F8 in (q.dtype, k.dtype, v.dtype):
            rows = self._of_more_bits(by_name)
            q, k, v = rows.q, rows.k, rows.v
            convert = Tensor.bfloat16 if self.q.dtype is F8 else None
        if by_name and by_name.get("qv") is not None:
            q, k = with_second_query(q, k, v, by_name["qv"])
        batch, place = rows.q_starts.shape[0] - 1, SQUARE if rows.q_starts is rows.k_starts else LOWER_RIGHT
        asked = plan_call(CallSizes(batch, q.shape[1], q.shape[2], v.shape[2], place), given, by_name)
        found = asked.op.varlen(
            q, k, v, rows.q_starts, rows.k_starts, *rows.most,
            return_lse=asked.has_lse, **asked.training, **asked.captured,
        )  # fmt: skip
        if asked.has_lse and rows.unused is not None:
            found = found[0], found[1].masked_fill(rows.unused, 0.0)
        return asked.results(found, convert)

    def using(self, used: Mapping[str, Tensor | None], given: Positional) -> tuple[Ragged, Positional]:
        """Use only the first rows of each sequence: ``seqused_q`` of q and ``seqused_k`` of k. Returns the rows and
        their options.

        A sequence becomes three: the used rows; the unused queries, without keys; the unused keys. o, lse and gradients
        of unused rows are 0.
        """
        (q_begin, q_used), (k_begin, k_used) = (
            _used(name, starts, each)
            for (name, each), starts in zip(used.items(), (self.q_starts, self.k_starts), strict=True)
        )
        q_parts = (q_begin, q_begin + q_used, self.q_starts[1:])
        k_parts = (k_begin, k_begin + k_used, k_begin + k_used)
        q_starts, k_starts = (
            torch.cat((torch.stack(parts, 1).flatten(), starts[-1:]))
            for parts, starts in ((q_parts, self.q_starts), (k_parts, self.k_starts))
        )
        slopes = given[_SLOPES]
        if isinstance(slopes, Tensor) and slopes.dim() == 2:
            given = (*given[:_SLOPES], slopes.repeat_interleave(_PARTS, 0), *given[_SLOPES + 1 :])
        sequence, place = _sequences(self.q_starts, self.q.shape[0])
        own = self._replace(q_starts=q_starts, k_starts=k_starts, most=(None, None), unused=place >= q_used[sequence])
        return own, given

    def _of_more_bits(self, by_name: Mapping[str, Any]) -> Ragged:
        """The rows with 8-bit numbers multiplied by their factors, in a wider type."""
        batch, kv_heads = self.q_starts.shape[0] - 1, self.k.shape[1]
        names, device = ("q_descale", "k_descale", "v_descale"), self.q.device
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        if not any(by_name.get(name) is not None for name in names) and F8 not in [x.dtype for x in tensors.values()]:
            return self
        dtype = wide_type(TYPES, device) if self.q.dtype is F8 else self.q.dtype
        found: dict[str, Any] = {}
        for name, (owner, x) in zip(names, tensors.items(), strict=True):
            factors = factors_of(name, by_name.get(name), (owner, x), (batch, kv_heads), device)
            starts = self.q_starts if owner == "q" else self.k_starts
            own = factors[_sequences(starts, x.shape[0])[0]] if factors.numel() else None
            found[owner] = from_8_bits(x[:, :, None], own, dtype)[:, :, 0] if x.dtype is F8 else x
        return self._replace(**found)


def rows_of_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    lengths: int | Tensor,
    places: Mapping[str, Any],
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values of ``batch`` sequences, one behind the other, and where each begins.

    ``k`` and ``v`` are entries or pages [entries, rows, Hkv, D], selected by ``places`` as in ``cache_of``. On a GPU as
    many rows are returned as there may be, ``most`` in a sequence; rows behind the last sequence belong to none. Raises
    what an op raises for a cache.
    """
    nothing = q.new_empty((batch, q.shape[1], 0, q.shape[2]))
    cache = cache_of(nothing, k.transpose(1, 2), v.transpose(1, 2), lengths, **places)
    is_known = k.is_cpu and not torch.compiler.is_compiling()
    if is_known:
        cache.check(k.transpose(1, 2), 0)
    given, size = cache.in_numbers(), k.shape[1]
    table = given.blocks if given.is_paged else given.entries[:, None]
    columns = table.shape[1]
    if most is not None and not cache.padding.numel():
        columns = min(columns, -(-most // max(size, 1)))
    starts = torch.nn.functional.pad((given.lengths - given.padding).cumsum(0), (1, 0)).int()
    count = int(starts[-1]) if is_known else batch * columns * size
    sequence, place = _sequences(starts, count)
    place = place + given.padding[sequence]
    page = table[sequence, (place // size).clamp(0, table.shape[1] - 1)].clamp(0, k.shape[0] - 1)
    return k[page, place % size], v[page, place % size], starts


def starts_argument(name: str, starts: object) -> Tensor:
    """Where sequences begin. Raises ``TypeError`` and ``ValueError``; numbers are checked by the op."""
    if not isinstance(starts, Tensor):
        raise TypeError(f"'{name}' must be a tensor of cumulative lengths, not {type(starts).__name__}")
    if starts.dim() != 1 or starts.numel() == 0:
        raise ValueError(f"'{name}' has shape {list(starts.shape)}; [B + 1] is expected")
    return starts


def longest_argument(name: str, given: object) -> Any:
    """The length of the longest sequence, where it is given: an int, or a 0-dim tensor of one."""
    if given is None or type(given) is int:
        return given
    if isinstance(given, Tensor) and given.dim() == 0 and is_integral(given.dtype):
        return given.item()
    number = as_number(given, whole=True)
    if number is None:
        what = f"a tensor {given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"'{name}' must be an int or a 0-dim tensor of one, not {what}")
    return number


def used_argument(name: str, used: object, batch: int, device: torch.device) -> Tensor:
    """The rows of each sequence that are used. Raises ``TypeError`` and ``ValueError``."""
    if not isinstance(used, Tensor) or not is_integral(used.dtype):
        what = used.dtype if isinstance(used, Tensor) else type(used).__name__
        raise TypeError(f"'{name}' is {what}; a tensor i32[B] is expected: the rows of each sequence that are used")
    if tuple(used.shape) != (batch,) or used.device != device:
        raise ValueError(
            f"'{name}' has shape {list(used.shape)}, on {used.device}; [B] = [{batch}] is expected, on {device}"
        )
    return used


def _used(name: str, starts: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each sequence begins, and how many of its rows are used; by default all."""
    begin, lengths = starts[:-1], starts[1:] - starts[:-1]
    if used is None:
        return begin, lengths
    own = used_argument(name, used, lengths.shape[0], starts.device)
    require(
        ((own >= 0) & (own <= lengths)).all(),
        f"'{name}' is below 0 or beyond the rows that '{name.replace('seqused', 'cu_seqlens')}' gives a sequence",
    )  # fmt: skip
    return begin, torch.minimum(own.to(starts.dtype).clamp(min=0), lengths)


def _sequences(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of ``count`` rows its sequence, and its place in it; rows behind the last sequence count to that one."""
    at = torch.arange(count, device=starts.device)
    sequence = torch.bucketize(at, starts[1:].contiguous(), right=True).clamp(max=max(starts.shape[0] - 2, 0))
    return sequence, at - starts[sequence]
