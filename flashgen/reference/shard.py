"""The offsets of a call in the whole problem, and the sizes that follow.

In: the local shapes and the op's offsets. Out: ``Shard``, which maps local indices to the global ones of a spec. By
default the call is the whole problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Positions are 32-bit integers in a kernel, and their sums and differences must be so too.
MOST_POSITIONS = 2**30


@dataclass(frozen=True)
class Shard:
    """One part of a problem: local lengths, where it starts, lengths of the whole (None: start + local)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    b_start: int = 0
    h_start: int = 0
    q_start: int = 0
    kv_start: int = 0
    b_total: int | None = None
    h_total: int | None = None
    q_total: int | None = None
    kv_total: int | None = None

    @classmethod
    def whole(cls, q: Sequence[int], k: Sequence[int]) -> Shard:
        """The whole problem, from the shapes of q and k."""
        return cls(batch=q[0], heads=q[1], kv_heads=k[1], q_len=q[2], kv_len=k[2])

    @property
    def is_whole(self) -> bool:
        return not any(self._starts) and self.totals() == self._lengths

    @property
    def _starts(self) -> tuple[int, int, int, int]:
        return self.b_start, self.h_start, self.q_start, self.kv_start

    @property
    def _lengths(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return max(1, self.heads // self.kv_heads) if self.kv_heads else 1

    @property
    def is_empty(self) -> bool:
        return 0 in self._lengths

    def totals(self) -> tuple[int, int, int, int]:
        """The values of B, H, Nq and Nk."""
        return (
            self.b_start + self.batch if self.b_total is None else self.b_total,
            self.h_start + self.heads if self.h_total is None else self.h_total,
            self.q_start + self.q_len if self.q_total is None else self.q_total,
            self.kv_start + self.kv_len if self.kv_total is None else self.kv_total,
        )

    def sizes(self, qk: int, v: int) -> dict[str, int]:
        """The values of the sizes ``B H Hkv Nq Nk D Dv``."""
        b, h, q, kv = self.totals()
        return {"B": b, "H": h, "Hkv": h // self.group, "Nq": q, "Nk": kv, "D": qk, "Dv": v}

    def part(self, batch: range, kv_heads: range, rows: range) -> Shard:
        """A part of this shard: local ranges of batch, key/value heads and query rows; every key."""
        b, h, q, kv = self.totals()
        return replace(
            self,
            batch=len(batch),
            heads=len(kv_heads) * self.group,
            kv_heads=len(kv_heads),
            q_len=len(rows),
            b_start=self.b_start + batch.start,
            h_start=self.h_start + kv_heads.start * self.group,
            q_start=self.q_start + rows.start,
            b_total=b,
            h_total=h,
            q_total=q,
            kv_total=kv,
        )

    def of_keys(self, keys: range) -> Shard:
        """A part of this shard: a local range of its keys."""
        return replace(self, kv_len=len(keys), kv_start=self.kv_start + keys.start, kv_total=self.totals()[3])

    def check(self) -> None:
        """Raise ``ValueError`` where an offset is negative, a total too small, or a size beyond 32 bits."""
        axes = zip(("b", "h", "q", "kv"), self._starts, self._lengths, self.totals(), strict=True)
        for name, start, length, total in axes:
            if start < 0:
                raise ValueError(f"'{name}_start' is {start}; it must not be negative")
            if total < start + length:
                raise ValueError(
                    f"'{name}_total' is {total}, but this call reaches to {start + length} "
                    f"({name}_start = {start}, local length {length})"
                )
            if total >= MOST_POSITIONS:
                raise ValueError(
                    f"'{name}_total' is {total}; it must be less than {MOST_POSITIONS} (2**30) "
                    f"({name}_start = {start}, local length {length})"
                )

    def check_groups(self) -> None:
        """Raise ``ValueError`` where heads that share a key/value head in this call do not in the whole."""
        for name, number in (("h_start", self.h_start), ("h_total", self.totals()[1])):
            if number % self.group:
                raise ValueError(
                    f"'{name}' is {number}, but the spec reads hkv or Hkv: it must be a multiple of {self.group}, the "
                    f"query heads that share a key/value head of this call (q has {self.heads}, k {self.kv_heads})"
                )
