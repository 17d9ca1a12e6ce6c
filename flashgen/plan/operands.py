"""Operands: the tensors of rows that kernels read and write, each declared once.

Stage 3, plan. In: nothing. Out: ``OPERANDS``, and the same of ragged batches (``RAGGED``), of caches (``CACHED``), of
calls over some of the keys (``PARTS``) or some of the rows (``SLICES``) and of q, k and v of 8 bits (``F8``);
``TANGENTS``, what forward mode has beside them, and ``TANGENT_GRADIENTS``, what its backward pass has. An operand says
where its row [b, h, n] lies, of what type its elements are, and how many make a row. The fields of ``struct
Arguments``, the addressing in kernels for GPUs, tensor maps, the bytes that a kernel may touch and where a shard begins
all follow. Captured tensors have shapes of the spec's, and are declared by it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

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
        """The same by the values of fields."""
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
_F32 = Elements.FLOAT32
_PARTS = "what lse cannot hold of extreme rows, or 1 / Z where weights are divided; null or as lse"
# In the order of the fields.
_OPERANDS = (
    Operand("q", QUERIES, Width.QK, Rows.STRIDED),
    Operand("k", KEYS, Width.QK, Rows.STRIDED),
    Operand("v", KEYS, Width.V, Rows.STRIDED),
    Operand("o", QUERIES, Width.V, Rows.STRIDED, is_written=True, by_row=True),
    Operand("lse", QUERIES, Width.ONE, elements=_F32, is_written=True, says="contiguous; null for pointwise weights"),
    Operand("lse_parts", QUERIES, Width.TWO, elements=_F32, is_written=True, says=f"contiguous: {_PARTS}"),
    Operand("d_o", QUERIES, Width.V, Rows.STRIDED),
    Operand("d_lse", QUERIES, Width.ONE, elements=_F32, says="contiguous; null where lse was not used"),
    Operand("dq", QUERIES, Width.QK, Rows.STRIDED, is_written=True, by_row=True),
    Operand("dk", KEYS, Width.QK, Rows.STRIDED, is_written=True, by_row=True),
    Operand("dv", KEYS, Width.V, Rows.STRIDED, is_written=True, by_row=True),
)
OPERANDS: Mapping[str, Operand] = MappingProxyType({each.name: each for each in _OPERANDS})
# What kernels of forward mode read and write beside them; those that are read are null where nothing changes.
_TANGENTS = (
    Operand("t_q", QUERIES, Width.QK, Rows.STRIDED, says="the tangent of q; null: 0"),
    Operand("t_k", KEYS, Width.QK, Rows.STRIDED, says="of k; null: 0"),
    Operand("t_v", KEYS, Width.V, Rows.STRIDED, says="of v; null: 0"),
    Operand("t_o", QUERIES, Width.V, Rows.STRIDED, is_written=True, by_row=True),
    Operand(
        "t_lse", QUERIES, Width.ONE, elements=_F32, is_written=True, says="contiguous; null where it is not wanted"
    ),
)
TANGENTS: Mapping[str, Operand] = MappingProxyType({each.name: each for each in _TANGENTS})
# The same of the backward pass of forward mode, to which d_o and d_lse are what arrives at t_o and t_lse.
_WANTED = "null where no tangent's is wanted"
TANGENT_GRADIENTS: Mapping[str, Operand] = MappingProxyType(
    {each.name: replace(each, is_written=False, says=each.says.split(";")[0]) for each in _TANGENTS if each.is_written}
    | {each.name: each for each in _TANGENTS if not each.is_written}
    | {
        each.name: each
        for each in (
            Operand("d_t_q", QUERIES, Width.QK, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
            Operand("d_t_k", KEYS, Width.QK, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
            Operand("d_t_v", KEYS, Width.V, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
        )
    }
)
_PACKED = {Rows.STRIDED: Rows.PACKED_STRIDED, Rows.CONTIGUOUS: Rows.PACKED_HEADS}
# In ragged batches k and v of a sequence lie behind those of the one before, and so does all else; what is one number a
# row is by heads, as lse is given out.
RAGGED: Mapping[str, Operand] = MappingProxyType(
    {each.name: replace(each, rows=_PACKED[each.rows]) for each in _OPERANDS}
)
# Over caches k and v lie in entries or pages of many sequences; queries, and what is written of them, as ever.
CACHED: Mapping[str, Operand] = MappingProxyType(
    {
        each.name: replace(each, rows=Rows.CACHED, elements=Elements.OF_THE_CACHE) if each.name in ("k", "v") else each
        for each in _OPERANDS
    }
)
# Parts of rows are added up outside of kernels, and rounded once: all that is written is float32, whatever q, k and v
# are. Backward o is that of all keys.
PARTS: Mapping[str, Operand] = MappingProxyType(
    {each.name: replace(each, elements=_F32) if each.is_written else each for each in _OPERANDS}
)


def _of_slice(each: Operand) -> Operand:
    if each.rows is Rows.CONTIGUOUS:
        return replace(each, rows=Rows.SLICED, says=each.says.replace("contiguous", "rows of a head together"))
    return replace(each, elements=_F32) if each.is_written and not each.of_queries else each


# Some rows of a tensor with all of their keys, which other rows see, too. A number of each row (lse, delta) lies in the
# tensor of all rows; the gradients of k and v are float32, as those of the other rows are added to them.
SLICES: Mapping[str, Operand] = MappingProxyType({each.name: _of_slice(each) for each in _OPERANDS})
# Where q, k and v are of 8 bits, o is not, and what each is multiplied by is a number for each key/value head.
F8: Mapping[str, Operand] = MappingProxyType(
    {each.name: replace(each, elements=Elements.BFLOAT16) if each.name == "o" else each for each in _OPERANDS}
    | {
        name: Operand(name, KEYS, Width.ONE, Rows.PER_HEAD, _F32, says="null: 1")
        for name in ("q_factors", "k_factors", "v_factors")
    }
)
