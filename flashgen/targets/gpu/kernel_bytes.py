"""HBM bytes of one kernel: what it does with its operands, and what lists of visits add.

In: a ``Recipe``, the tiles of an element type, sizes by the fields of ``struct Arguments``, counts of the tiles that
are visited. Out: bytes by buffer, as in ``bytes.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import QUERIES, Elements, Operand, Width
from flashgen.plan.launches import TURNED_KEYS, VisitLists
from flashgen.plan.prediction import Access, by_tile, moved, once
from flashgen.plan.tile_counts import GROUP, TileCounts
from flashgen.targets.gpu.launches import TURNED_V, dq_sums, parts_of_last, rows_of_a_block, turned_v
from flashgen.targets.gpu.lists import CHUNK, COUNTS, LENGTH, NUMBER, OF_KEYS, OF_QUERIES, TILES_OF_CHUNK
from flashgen.targets.gpu.model import FLOAT, WINDOW, padded, panel_width
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.score import Distance
from flashgen.targets.gpu.tiles import ElementPlan

KERNELS = ("turn", "forward", "rows", "backward", "keys", "queries", "convert")
DELTA = Operand("workspace.delta", QUERIES, Width.ONE, elements=Elements.FLOAT32)
TURNED = f"workspace.{TURNED_V}"
LSE_PARTS = OPERANDS["lse_parts"]
# Of divided weights: 1 / Z of each row, which is all that backward passes read of it.
_INVERSE = replace(LSE_PARTS, width=Width.ONE)
_THREADS = 128  # of the kernel of delta
_WARP = 32
_LANES = 4  # that share a row, and read what it carries one by one


def _accesses(
    kernel: str, recipe: Recipe, operands: Mapping[str, Operand], tiles: ElementPlan, *, divided: bool, asks_lse: bool
) -> tuple[Access, ...]:
    """What a kernel does with whole rows of operands. Warps that share the rows of dQ all read what these carry, and so
    do the blocks of a cluster.
    """
    state, of_row = recipe.row_state, _INVERSE if divided else OPERANDS["lse"]
    match kernel:
        case "forward":
            written = (*(["lse"] if state else []), *([LSE_PARTS.name] if divided else []))
            read = ("k",) if recipe.variant.kind.f8 else ("k", "v")
            return (*once("q", "o", *written, of=operands), *by_tile(*read))
        case "turn":
            return once("v", of=operands)
        case "rows":
            return (Access(DELTA),)
        case "backward" | "keys":
            blocks = tiles.backward.cluster
            carried = tuple(Access(each, by_tile=True, times=blocks) for each in (of_row, DELTA)) if state else ()
            return (*once("k", "v", "dk", "dv"), *by_tile("q", "d_o"), *carried)
        case "queries":
            of_lse = asks_lse and isinstance(recipe.score, Distance) and recipe.score.by_lse
            rows = (of_row, DELTA, *((OPERANDS["d_lse"],) if of_lse else ()))
            carried = tuple(Access(each, times=_LANES * tiles.queries.split) for each in rows) if state else ()
            return (*once("q", "d_o", "dq"), *by_tile("k", "v"), *carried)
        case "convert":
            return once("dq")
    raise AssertionError(kernel)


@dataclass(frozen=True)
class KernelBytes:
    """A pass at a shape, or in a call: ``counts`` of its tiles of Br × Bc, ``lists`` of visits that it reads, by field.

    ``sizes`` are fields of ``struct Arguments``; ``asks_lse``: a gradient of the log-sum-exp comes in.
    """

    recipe: Recipe
    tiles: ElementPlan
    sizes: Mapping[str, int]
    counts: Callable[[int, int], TileCounts]
    lists: Mapping[str, VisitLists] = field(default_factory=dict)
    asks_lse: bool = False

    def of(self, kernel: str, *, clears_dq: bool) -> Mapping[str, int]:
        """Bytes of one kernel by buffer; ``clears_dq``: that of delta clears the sums of dQ as well."""
        tiles = self.tiles.of_kernel(kernel)
        counts = self.counts(tiles.Br, tiles.Bc) if tiles else None
        head_dim, element = self.recipe.variant.head_dim, self.tiles.element.bytes
        operands = self.recipe.variant.kind.operands
        divided = self.recipe.variant.weights.form.divided
        accesses = _accesses(kernel, self.recipe, operands, self.tiles, divided=divided, asks_lse=self.asks_lse)
        own = (
            replace(each, operand=replace(operands.get(each.operand.name, each.operand), width=each.operand.width))
            for each in accesses
        )
        found = moved(own, head_dim, element, self.sizes, counts)
        if kernel == "rows":
            found.update(self._rows())
        if kernel in ("backward", "keys"):
            assert counts is not None
            for name, width in (("q", head_dim.qk), ("d_o", head_dim.v)):
                found[name] += counts.rows * self._beyond(width) * element
        if kernel == "turn":
            found[TURNED] += turned_v(self.recipe.variant).value(self.sizes)
        if kernel == "forward" and self.recipe.variant.kind.f8:
            assert counts is not None
            found[TURNED] += self._turned(counts)
        if kernel == "backward":
            assert counts is not None
            found["workspace.dq"] += counts.groups * GROUP * padded(head_dim.qk) * FLOAT
            if self.tiles.backward.divides_keys:
                found["k"] += found["k"] // 2  # half of the columns for the other block
        if kernel == "convert" or (kernel == "rows" and clears_dq):
            found["workspace.dq"] += dq_sums(self.recipe.variant).value(self.sizes)
        found.update(self._reading_lists(kernel))
        return found

    def read_again(self, blocks: int) -> Mapping[str, int]:
        """K and V of the last key tiles, which several of so many ``blocks`` work on."""
        tiles, head_dim, kv_len = self.tiles.backward, self.recipe.variant.head_dim, self.sizes["kv_len"]
        count, of_a_head = self.sizes["batch"] * self.sizes["kv_heads"], -(-kv_len // tiles.Bc)
        rest, parts = parts_of_last(tiles, self.sizes, min(blocks, count * of_a_head))
        last = (number % of_a_head for number in range(count * of_a_head - rest, count * of_a_head))
        rows = (parts - 1) * sum(min(tiles.Bc, kv_len - n * tiles.Bc) for n in last)
        return {
            name: rows * width * self.tiles.element.bytes for name, width in (("k", head_dim.qk), ("v", head_dim.v))
        }

    def _beyond(self, width: int) -> int:
        """Columns that blocks of a cluster bring beside their own, as copies are of whole panels."""
        blocks = self.tiles.backward.column_parts
        own = width // blocks
        panel = panel_width(own, self.tiles.element)
        brought = (min(-(-own // panel) * panel, width - number * own) for number in range(blocks))
        return sum(brought) - width if blocks > 1 else 0

    def _turned(self, counts: TileCounts) -> int:
        """V as it is turned: a tile's panels are whole, and end with the last block of keys."""
        Bc, heads = self.tiles.forward.Bc, self.sizes["batch"] * self.sizes["heads"]
        keys = -(-self.sizes["kv_len"] // TURNED_KEYS) * TURNED_KEYS
        panel = panel_width(Bc, self.tiles.element)
        width = -(-Bc // panel) * panel
        read = sum(float(visits) * min(width, keys - n * Bc) for n, visits in enumerate(counts.column_tiles))
        return round(heads * read) * self.recipe.variant.head_dim.v

    def _rows(self) -> Mapping[str, int]:
        """O and dO of whole blocks: threads past the last row read the first again, and each reads what rows carry."""
        each, Dv = rows_of_a_block(self.recipe.variant, self.tiles.element), self.recipe.variant.head_dim.v
        blocks = -(-self.sizes["batch"] * self.sizes["heads"] * self.sizes["q_len"] // each)
        operands, by_thread = self.recipe.variant.kind.operands, blocks * _THREADS * FLOAT
        element = self.tiles.element.bytes
        found = {name: blocks * each * Dv * operands[name].element_bytes(element) for name in ("o", "d_o")}
        if self.asks_lse:
            found["d_lse"] = by_thread
        if self.recipe.sink_gradients:
            found["lse"] = by_thread
        if self.recipe.variant.weights.form.divided:
            found[LSE_PARTS.name] = by_thread
        return found

    # -- lists of visits ---------------------------------------------------------------------------------------

    def making(self) -> Mapping[str, int]:
        """The lists of the call: written, and where the longest come first read and written again.

        A warp that orders one looks at the lengths of all of its mask.
        """
        found: Counter[str] = Counter()
        for lists in self.lists.values():
            if lists.kept:
                continue
            count, size = lists.count.value(self.sizes), CHUNK * sum(self._chunks(lists))
            each = size
            if lists.order:
                tiles = -(-self.sizes["kv_len" if lists.field == OF_KEYS else "q_len"] // lists.tiles[0])
                each += LENGTH + LENGTH * (_WARP + tiles) + 2 * size
            found[_allocation(lists)] += count * each
        return found

    def _reading_lists(self, kernel: str) -> Mapping[str, int]:
        """What blocks read of lists: all that one has room for, but of its counts only what they need."""
        match kernel:
            case "forward":
                tiles = self.tiles.forward
                return self._reading(OF_QUERIES, tiles.finders(self.recipe.variant), copies=tiles.self_loading)
            case "backward" | "keys":
                copies = kernel == "backward" and self.tiles.backward.persistent
                group = self.sizes["heads"] // self.sizes["kv_heads"]
                return self._reading(OF_KEYS, self.tiles.backward.warps, heads=group, copies=copies)
            case "queries":
                return self._reading(OF_QUERIES, self.tiles.queries.warps)
        return {}

    def _reading(self, pointer: str, warps: int, *, heads: int = 1, copies: bool = False) -> Mapping[str, int]:
        """A block reads a list for so many ``heads``. Which tile it is of every thread of so many ``warps`` reads.

        Where a block ``copies`` the first window as a whole for the first head, that says it.
        """
        lists = self.lists.get(pointer)
        if lists is None:
            return {}
        windows, chunks = self._chunks(lists)
        each = heads * (COUNTS * windows + CHUNK * chunks)
        if lists.order:
            each += CHUNK - COUNTS if copies else NUMBER * _WARP * warps
        return {_allocation(lists): lists.readers.value(self.sizes) * each}

    def _chunks(self, lists: VisitLists) -> tuple[int, int]:
        """Of a list: the first ones of windows, and those of tiles."""
        length = self.sizes["q_len" if lists.field == OF_KEYS else "kv_len"]
        visited = -(-length // lists.tiles[1])
        return -(-visited // WINDOW), -(-visited // TILES_OF_CHUNK)


def _allocation(lists: VisitLists) -> str:
    return lists.field if lists.kept else f"workspace.{lists.field}"
