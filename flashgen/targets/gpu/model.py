"""Sizes that planner and CUDA templates share: of tiles, lists, words and registers; ``layouts.py`` puts them together.

In: a variant, an element type, a tile. Out: numbers, and the words of structs that are printed into sources. Memory is
declared once: parts one behind the other, from which sizes are counted and C++ is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.by_blocks import MOST_BLOCKS
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.rules import LAST_BLOCK_MERGES, LONG_TILES
from flashgen.targets.gpu.score import Extremes


@dataclass(frozen=True)
class Part:
    """``size`` bytes under a ``name`` in C++ and a ``title`` for people; what ``holds`` there, as code for its bytes.

    The code is over what a block in ``templates/cuda`` has, and the same for every block that has the part at all.
    """

    name: str
    title: str
    size: int
    holds: str
    align: int = 1


@dataclass(frozen=True)
class Layout:
    """Parts in their order, those without bytes left out of nothing; ``last`` takes the place of all at the end."""

    parts: tuple[Part, ...]
    last: Part | None = None

    @property
    def all(self) -> tuple[Part, ...]:
        """The parts, and what comes last."""
        return self.parts if self.last is None else (*self.parts, self.last)

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each part begins, in bytes."""
        at, found = 0, {} if self.last is None else {self.last.name: 0}
        for each in self.parts:
            at += -at % each.align if each.size else 0
            found[each.name] = at
            at += each.size
        return found

    @property
    def bytes(self) -> int:
        """Of all."""
        begins = self.offsets
        end = max((begins[each.name] + each.size for each in self.parts), default=0)
        return end if self.last is None else max(end, self.last.size)

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes by title, with what goes before a part that is aligned; parts without bytes are left out."""
        found: dict[str, int] = {}
        begins, at = self.offsets, 0
        for each in self.parts:
            end = begins[each.name] + each.size
            found[each.title] = found.get(each.title, 0) + end - at
            at = end
        return {title: size for title, size in found.items() if size}


@dataclass(frozen=True)
class Printed:
    """Layouts as C++: structs of constants, one for each kind of block, and assertions for a block that has one."""

    structs: str
    assertions: str


def printed(name: str, comment: str, parameters: str, layouts: Mapping[str, Layout]) -> Printed:
    """The structs ``name<…>``, by their template arguments. What no layout has is not printed."""
    parts = {each.name: each for layout in layouts.values() for each in layout.all if each.size}
    lines = [f"// {comment}", f"template <{parameters}> struct {name};"]
    same: dict[Layout, str] = {}
    for arguments, layout in layouts.items():
        first = same.setdefault(layout, arguments)
        if first != arguments:
            lines.append(f"template <> struct {name}<{arguments}> : {name}<{first}> {{}};")
            continue
        lines.append(f"template <> struct {name}<{arguments}> {{")
        sizes, places = {each.name: each.size for each in layout.all}, layout.offsets
        lines += [
            f"  static constexpr int {each.name} = {places.get(each.name, 0)}, "
            f"{each.name}_bytes = {sizes.get(each.name, 0)};  // {each.title}"
            for each in parts.values()
        ]
        lines += [f"  static constexpr int bytes = {layout.bytes};", "};"]
    checks = [
        f'  static_assert(Memory::{each.name}_bytes == {each.holds}, "{each.title}: what the plan counts");'
        for each in parts.values()
    ]
    return Printed("\n".join(lines), "\n".join(checks).strip())


@dataclass(frozen=True)
class Words:
    """Words of 4 bytes that lie together, by name and what they are."""

    names: tuple[tuple[str, str], ...]

    def struct(self, name: str, base: str = "") -> str:
        """A struct of ints."""
        fields = "\n".join(f"  int {word};  // {what}" for word, what in self.names)
        return f"struct {name}{f' : {base}' if base else ''} {{\n{fields}\n}};"

    def places(self, name: str) -> str:
        """A struct of their numbers."""
        numbers = "\n".join(
            f"  static constexpr int {word} = {number};  // {what}" for number, (word, what) in enumerate(self.names)
        )
        return f"struct {name} {{\n{numbers}\n  static constexpr int count = {len(self.names)};\n}};"


def joined(parts: Iterable[str]) -> str:
    """Declarations one behind the other."""
    return "\n".join(each for each in parts if each)


FLOAT = WORD = 4
TURN = 128  # rows and columns of a tile that batch entries take turns at, at most: smaller ones divide it
WINDOW = 1024  # tiles that one list of visits covers
# What a block keeps beside a list of visits, in words: which rows its list is of, and what comes next.
PLACE_OF_QUERIES = Words(
    (
        ("k", "where K of the head begins: in elements, or its slab of a map"),
        ("v", "where V does"),
        ("head", "counted through the batch"),
        ("row0", "the first query of the tile"),
    )
)
TILES_OF_QUERIES = Words(
    (
        ("edges", "what the list begins and ends"),
        ("ordinal", "how many query tiles the block had before"),
        ("number", "of the query tile"),
        ("next", "the number of the one after it"),
    )
)
OPENED_TILE = Words(  # what a block that copies for itself knows of the next query tile, beside its place
    (
        ("q", "the slab of its queries"),
        ("number", "of the query tile"),
        ("partial", "the key tiles that it visits, a bit each: of these some pairs are kept"),
        ("full", "and of these all"),
    )
)
PRODUCER_TILES_OF_QUERIES = Words((*TILES_OF_QUERIES.names[:2], ("parts_before", "of the lists before this one")))
TILES_OF_KEYS = Words(
    (
        ("q", "where Q of the head begins: in elements, or its slab of a map"),
        ("d_o", "where dO does"),
        ("head", "the query head, counted through the batch"),
        ("column0", "the first key of the tile"),
        ("number", "of the key tile"),
        ("next", "the number of the one after it"),
    )
)
NOTES = 8  # words for any of these
VISIT_LIST = WORD * (3 + NOTES) + 2 * WINDOW // 8 + 2 * WINDOW
SEQUENCE = 5  # words of struct Sequence, beside these in ragged batches: templates/cuda/sequences.cuh.jinja
COPIED_LIST = 16 + 2 * WINDOW
MOST_COLUMNS = 256  # of a product of warpgroups
BINS = 256  # of a warp's histogram of contributions to a captured gradient
SIGNAL = 8  # an mbarrier
OPERAND = 1024  # where an operand of warpgroups begins: 8 rows of 128 bytes
KEYS_OF_SUMS = 448  # whose products of 8 bits are summed up before they go to sums of many tiles
MEASURERS = 2  # warps that take norms of keys, where others copy

COPYING_REGISTERS = 24  # of a thread that only copies
FINDING_REGISTERS = 32  # at least, of one that finds visits
FINDING_IN_RANGES = 72  # the same where it compares ranges of what the mask reads by row with those by column
BESIDE_SUMS = 56  # of a thread that multiplies: with so many kernels for documents spill none, with 32 they do
_REGISTERS = 65536  # of a multiprocessor
_MOST_REGISTERS = 240
WORDS_OF_TILE = 6  # what a block knows of a key tile that warps which copy have found
FEW_QUERIES = 4  # of a tile over a cache, whose selected keys are asked for one by one
MERGED_WEIGHTS = 2048  # of parts, by rows, that those who merge have at a time
MOST_MERGED_ALONE = LAST_BLOCK_MERGES.limit  # bytes that parts leave of a tile, for its last block to merge them
CACHE_OF_GROUPS = LONG_TILES.limit  # bytes that blocks of a group of heads read
MERGING_WARPS = 4  # by blocks of keys: of a block of threads that merges, 16 rows each
LISTERS = 256  # threads of a block that turns lists
LIST_STARTS_BYTES = 4 * (MOST_BLOCKS + 2 * LISTERS // 32)  # where each block of keys begins, sums of warps
MERGING_THREADS = 512  # of a block that merges and does nothing else, so that a thread has 128 registers


def registers(warps: int, producers: int, least: int) -> tuple[int, int]:
    """Registers of a thread that multiplies, where producers keep no more than ``least``, and what these then have.

    A block begins with equal shares, of a multiple of 8, and they can be dealt out again; to ask for more would wait
    for ever.
    """
    whole = _REGISTERS // (32 * (warps + producers)) // 8 * 8 * (warps + producers)
    multiplying = min((whole - least * producers) // warps // 8 * 8, _MOST_REGISTERS)
    return multiplying, (whole - multiplying * warps) // producers // 8 * 8


def padded(head_dim: int) -> int:
    """A head dimension in whole matrix instructions; a large one is divided among two warps, a larger among four."""
    multiple = 16 if head_dim <= 128 else 32 if head_dim <= 256 else 64
    return -(-head_dim // multiple) * multiple


def panel_width(columns: int, element: ElementType) -> int:
    """Columns of one panel of a ``SharedTile``: 2, 4 or 8 chunks of 16 bytes."""
    chunks = columns * element.bytes // 16
    return (8 if chunks >= 5 else 4 if chunks >= 3 else 2) * 16 // element.bytes


def tile_bytes(rows: int, columns: int, element: ElementType) -> int:
    """A ``SharedTile``: whole panels."""
    width = panel_width(columns, element)
    return -(-columns // width) * width * element.bytes * rows


def element_of_keys(variant: Variant, element: ElementType) -> ElementType:
    """In which K and V lie in shared memory, where q is of ``element``."""
    return ElementType.F8E4M3 if variant.kind.f8_cached else element


def spans_of_half(columns: int, element: ElementType) -> tuple[int, ...]:
    """The columns of products of a warpgroup that has half of a tile's: of whole panels, of what is left of each."""
    width = panel_width(columns, element)
    panels, rest = divmod(columns, width)
    return tuple(each for each in (panels // 2 * width, panels % 2 * width // 2, rest // 2) if each)


def dq_column_groups(head_dim: int, Br: int, warps: int, element: ElementType) -> int:
    """How many warpgroups share 64 rows of dQ, each with columns that end where a panel does, or all within one."""
    row_groups = max(n for n in range(1, warps // 4 + 1) if Br // 64 % n == 0)
    panel = panel_width(head_dim, element)

    def works(count: int) -> bool:
        width = head_dim // count
        return count == 1 or (head_dim % (8 * count) == 0 and (width % panel == 0 or panel % width == 0))

    return max(n for n in range(1, warps // 4 // row_groups + 1) if works(n))


def notes(variant: Variant) -> int:
    """Words of what a block keeps beside a list of visits."""
    return NOTES + SEQUENCE * variant.kind.ragged


def visit_list(variant: Variant) -> int:
    """Bytes of a list of visits."""
    return VISIT_LIST + WORD * SEQUENCE * variant.kind.ragged


def merging_bytes(Br: int, Dv: int) -> int:
    """Over caches: rows, what each part's count for, and sums, four to a thread or all of a tile; O needs no more."""
    return 12 * Br + FLOAT * MERGED_WEIGHTS + max(4 * FLOAT * MERGING_THREADS, FLOAT * Br * Dv)


def row_words(recipe: Recipe) -> Words:
    """What a row carries for dK and dV, in words of 4 bytes."""
    variant, seen = recipe.variant, recipe.observed_rows
    names = [("lse", "as exponents need it, or 1 / Z"), ("delta", "rowsum(dO ∘ O) - d(lse)")]
    names += [("top", "what scores are counted from")] if recipe.extremes is Extremes.TOPS else []
    names += [("qq", "|q|²")] if variant.uses_sqdist else []
    if variant.kind.backward_only:
        names += [("moved", "t(lse)"), ("epsilon", "rowsum(d(tO) ∘ tO)")]
    names += [(f"seen{number or ''}", "what the mask reads") for number in range(len(seen))]
    return Words(tuple(names))
