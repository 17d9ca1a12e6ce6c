"""Shape: the run-time sizes of one call, for planning, verifying and timing; read from and written as text."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Batch, query heads, key/value heads, query length, key length."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``B,H,Hkv,Nq,Nk``; a ``ValueError`` says what is wrong."""
        try:
            numbers = [int(part.encode("ascii")) for part in text.split(",")]
        except ValueError:  # digits of other scripts, too
            raise ValueError(f"'{text}' is not five integers B,H,Hkv,Nq,Nk") from None
        if len(numbers) != 5:
            raise ValueError(f"'{text}' has {len(numbers)} numbers; five are expected: B,H,Hkv,Nq,Nk")
        if min(numbers) < 0 or min(numbers[1:3]) < 1:
            raise ValueError(f"'{text}' has a size that is too small: heads start at 1, the others at 0")
        if max(numbers) >= 2**31:
            raise ValueError(f"'{text}' has a size that is too large: positions are 32-bit integers")
        shape = cls(*numbers)
        if shape.heads % shape.kv_heads:
            raise ValueError(f"H = {shape.heads} is not a multiple of Hkv = {shape.kv_heads}")
        return shape

    def __str__(self) -> str:
        return f"{self.batch},{self.heads},{self.kv_heads},{self.q_len},{self.kv_len}"

    def mean_sequences(self) -> Shape:
        """That of a ragged batch, whose lengths count the rows of all sequences: as if all were equally long."""
        count = max(self.batch, 1)
        return replace(self, q_len=-(-self.q_len // count), kv_len=-(-self.kv_len // count))
