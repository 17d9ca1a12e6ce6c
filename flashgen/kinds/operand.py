"""Operands: the tensors of rows that kernels read and write. Each kind of call declares its own.

An operand says where its row [b, h, n] lies, of what type its elements are, and how many make a row. The fields of
``struct Arguments``, the addressing in kernels for GPUs, tensor maps, the bytes that a kernel may touch and where a
shard begins all follow. Captured tensors have shapes of the spec's, and are declared by it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal as OneOf

from flashgen.ir.spec import HeadDim

AXES = ("b", "h", "n")
FLOAT_BYTES = 4
# By the codes of element types in ``struct Arguments``: float32, bfloat16, float16, float8_e4m3fn.
ELEMENT_BYTES = (4, 2, 2, 1)
F8_CODE = 3
HEAD_ROWS = "head_rows"  # the field of how many rows sliced heads are apart


class Rows(Enum):
    """Where the rows of an operand lie."""

    STRIDED = "strides of b, h and n, in elements, are arguments"
    CONTIGUOUS = "one behind the other, in the order of b, h and n"
    SLICED = "those of a head one behind the other; from head to head 'head_rows' of them, an argument"
    # Those of ragged batches: n counts through the sequences, of which each begins where cumulative lengths say.
    PACKED_STRIDED = "strides of h and n, in elements, are arguments; that of b is none"
    PACKED_HEADS = "one behind the other, in the order of h and n"
    # Those of caches: b counts its entries, or its pages, of which numbers in memory name those of a sequence.
    CACHED = "strides of an entry or page, h and n, in elements, are arguments"
    PER_HEAD = "one for all n of a head, one behind the other, in the order of b and h"

    @property
    def has_strides(self) -> bool:
        """Whether strides are arguments."""
        return self in (Rows.STRIDED, Rows.PACKED_STRIDED, Rows.CACHED)

    @property
    def is_packed(self) -> bool:
        """Whether they are of sequences one behind the other."""
        return self in (Rows.PACKED_STRIDED, Rows.PACKED_HEADS)


class Elements(Enum):
    """Of what type the elements are."""

    OF_THE_CALL = "the type of q, k, v and o, which the argument 'element' names"
    OF_THE_CACHE = "the type of keys and values in a cache, which the argument 'key_element' names"
    FLOAT32 = "float"
    BFLOAT16 = "bfloat16, whatever q is"


class Width(Enum):
    """How many elements a row has."""

    QK = "D"
    V = "Dv"
    ONE = "1"
    TWO = "2"


@dataclass(frozen=True)
class Operand:
    """Rows under the ``name`` of their field; ``of_queries``: one for each query head and query, else for keys.

    ``by_row``: kernels ask for each row by b, h and n, in 64 bits; of other strided rows they count in 32 bits from a
    head's first. ``says`` completes the comment of the field.
    """

    name: str
    of_queries: bool
    width: Width
    rows: Rows = Rows.CONTIGUOUS
    elements: Elements = Elements.OF_THE_CALL
    is_written: bool = False
    by_row: bool = False
    says: str = ""

    @property
    def counts(self) -> tuple[str, str, str]:
        """The integer fields that say how many b, h and n there are."""
        if self.rows is Rows.CACHED:
            return ("cache_entries", "kv_heads", "cache_rows")
        return ("batch", "heads", "q_len") if self.of_queries else ("batch", "kv_heads", "kv_len")

    @property
    def stride_fields(self) -> tuple[str, ...]:
        """The fields of its strides, where there are some."""
        return tuple(stride_of(self.name, axis) for axis in AXES) if self.rows.has_strides else ()

    @property
    def c_type(self) -> str:
        """What the pointer points to, in C++."""
        return "float" if self.elements is Elements.FLOAT32 else "void"

    @property
    def shape(self) -> str:
        """For people."""
        if self.rows is Rows.PER_HEAD:
            return "[B, Hkv]"
        axes = "B, H, Nq" if self.of_queries else "B, Hkv, Nk"
        if self.rows.is_packed:
            rows, heads = ("Tq", "H") if self.of_queries else ("Tk", "Hkv")
            axes = f"{heads}, {rows}" if self.rows is Rows.PACKED_HEADS else f"{rows}, {heads}"
        if self.rows is Rows.CACHED:
            axes = "entries or pages, Hkv, rows"
        return f"[{axes}]" if self.width is Width.ONE else f"[{axes}, {self.width.value}]"

    @property
    def in_32_bits(self) -> bool:
        """Whether kernels count its elements, or rows, in 32 bits from a launch's first, however far apart they lie."""
        return self.rows is Rows.SLICED or (self.rows.has_strides and not self.by_row)

    def columns(self, head_dim: HeadDim) -> int:
        """Elements of a row."""
        return {Width.QK: head_dim.qk, Width.V: head_dim.v, Width.ONE: 1, Width.TWO: 2}[self.width]

    def lengths(self, known: Mapping[str, int]) -> tuple[int, int, int]:
        """How many b, h and n there are, by the values of fields."""
        batch, heads, rows = (known[name] for name in self.counts)
        return 1 if self.rows.is_packed else batch, heads, 1 if self.rows is Rows.PER_HEAD else rows

    def strides(self, head_dim: HeadDim, known: Mapping[str, int]) -> tuple[int, int, int]:
        """From one b, h and n to the next, in elements."""
        if self.rows.has_strides:
            by_batch, by_head, by_row = (known[name] for name in self.stride_fields)
            return by_batch, by_head, by_row
        _, heads, rows = self.lengths(known)
        columns = self.columns(head_dim)
        if self.rows is Rows.SLICED:
            rows = known[HEAD_ROWS]
        return heads * rows * columns, rows * columns, columns

    def element_bytes(self, of_the_call: int, of_the_cache: int = 0) -> int:
        """Bytes of an element, where those of q have so many, and those of keys in a cache."""
        sizes = {
            Elements.OF_THE_CALL: of_the_call,
            Elements.OF_THE_CACHE: of_the_cache,
            Elements.FLOAT32: FLOAT_BYTES,
            Elements.BFLOAT16: 2,
        }
        return sizes[self.elements]

    def known_bytes(self, known: Mapping[str, int]) -> int:
        """Bytes of an element, by the values of fields."""
        codes = (known.get(name, 0) for name in ("element", "key_element"))
        return self.element_bytes(*(ELEMENT_BYTES[code] for code in codes))

    def runs(self, head_dim: HeadDim, known: Mapping[str, int], size: int) -> list[tuple[int, int]]:
        """Of ``size`` bytes, as many as ``reach``, those that are its rows: where runs of them begin, and how long."""
        lengths, columns = self.lengths(known), self.columns(head_dim)
        if math.prod(lengths) * columns == self.reach(head_dim, known):
            return [(0, size)]
        strides = [each * self.known_bytes(known) for each in self.strides(head_dim, known)]
        row = columns * self.known_bytes(known)
        places = itertools.product(*(range(length) for length in lengths))
        return [(sum(n * stride for n, stride in zip(place, strides, strict=True)), row) for place in places]

    def reach(self, head_dim: HeadDim, known: Mapping[str, int]) -> int:
        """Elements from the first to behind the last."""
        lengths = self.lengths(known)
        if min(lengths) < 1:
            return 0
        if not self.rows.has_strides and self.rows is not Rows.SLICED:
            return math.prod(lengths) * self.columns(head_dim)
        return span(lengths, self.strides(head_dim, known), self.columns(head_dim))


def stride_of(name: str, axis: str) -> str:
    """The field of an operand's stride."""
    return f"{name}_stride_{axis}"


def span(counts: tuple[int, ...], strides: tuple[int, ...], width: int) -> int:
    """Elements from the first to behind the last of rows of ``width`` elements."""
    if min(counts, default=1) < 1:
        return 0
    return sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True)) + width


QUERIES, KEYS = True, False
F32 = Elements.FLOAT32

FieldKind = OneOf["const pointer", "pointer", "i32", "i64", "u32", "u64", "f32"]
_C_TYPES = {"i32": "int32_t", "i64": "int64_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float"}


@dataclass(frozen=True)
class Field:
    """One member of ``struct Arguments``; ``element`` is the C type behind a pointer.

    ``varies``: calls of the same shapes, strides and types may differ in it.
    """

    name: str
    kind: FieldKind
    comment: str = ""
    element: str = "void"
    varies: bool = False

    @property
    def declaration(self) -> str:
        """In C++."""
        if self.kind in _C_TYPES:
            return f"{_C_TYPES[self.kind]} {self.name}"
        return f"{self.kind.removesuffix('pointer')}{self.element}* {self.name}"


def operand_field(each: Operand) -> Field:
    """The pointer to the rows of an operand."""
    comment = f"{each.shape}, {each.says}" if each.says else each.shape
    return Field(each.name, "pointer" if each.is_written else "const pointer", comment, each.c_type, varies=True)
