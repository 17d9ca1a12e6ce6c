"""Which tiles kernels visit, against the fewest that hold a kept pair.

The emitted C++ of many masks goes into one library: the spec's functions, ``keep_range`` and ``find_visits`` as they
stand in the kernels, without the matrix products. Tiles are counted by running them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.analysis.tiles import Tile, TileClass
from flashgen.analysis.variant import Variant, analyse
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.ir.expr import Expr, Symbol, SymbolKind, index, size
from flashgen.ir.interval import IntRange
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.language import parse_text
from flashgen.plan.arguments import argument_fields, dimension_field, param_field, stride_field, tensor_field
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.toolchains.cpp import find_compiler
from tests.ir.values import evaluate
from tests.masks.catalogue import BATCH, HEADS, Mask, captured

_CLASSES = (TileClass.EMPTY, TileClass.PARTIAL, TileClass.FULL)

_ENTRY = """
extern "C" void tiles_%(n)d(const void* arguments, int tile_rows, int tile_columns, signed char* classes,
                            signed char* visits) {
  using namespace mask_%(n)d;
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const Launch u = make_launch(a);
  const int64_t b = a.batch - 1, h = a.heads - 1, columns = ceil_div(a.kv_len, tile_columns);
  const Head x = make_head(a, u, b, h);
  std::vector<Visit> found(size_t(columns) + 1);
  std::vector<ColumnBounds> tree(size_t(nodes_of_tree(a, tile_columns)));
  if (Spec::observed_columns) build_tree(a, u, Spec::observed_by_head ? b * a.heads + h : b, tile_columns, tree.data());
  for (int64_t row0 = 0; row0 < a.q_len; row0 += tile_rows, classes += columns, visits += columns) {
    const int rows = int(std::min<int64_t>(tile_rows, a.q_len - row0));
    const int64_t i0 = a.q_start + row0;
    const int count = find_visits(a, u, x, row0, rows, tile_columns, tree.data(), found.data());
    for (int n = 0; n < count; ++n) {
      const Visit& visit = found[size_t(n)];
      visits[visit.tile] = visit.masked || visit.last * W < rows || visit.first > 0 ? 1 : 2;
    }
    const RowBounds bounds = bounds_of_rows(a, u, x, i0, rows, 0, int(ceil_div(rows, W)));
    for (int64_t tile = 0; tile < columns; ++tile) {
      const int64_t first = tile * tile_columns, last = std::min(first + tile_columns, a.kv_len) - 1;
      const fg::ranges::Int i = {i0, i0 + rows - 1}, j = {a.kv_start + first, a.kv_start + last};
      const ColumnBounds& leaf = leaf_of(a, tree.data(), int32_t(tile), tile_columns);
      const fg::ranges::Bool keep = Spec::keep_range(a, u, x, i, j, bounds, leaf);
      classes[tile] = !keep.may_be_true ? 0 : keep.may_be_false ? 1 : 2;
    }
  }
}

// What a call takes to find all visits of one head.
extern "C" int64_t plan_%(n)d(const void* arguments, int tile_rows, int tile_columns) {
  using namespace mask_%(n)d;
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const Launch u = make_launch(a);
  const int64_t b = a.batch - 1, h = a.heads - 1, columns = ceil_div(a.kv_len, tile_columns);
  const Head x = make_head(a, u, b, h);
  std::vector<Visit> found(size_t(columns) + 1);
  std::vector<ColumnBounds> tree(size_t(nodes_of_tree(a, tile_columns)));
  if (Spec::observed_columns) build_tree(a, u, Spec::observed_by_head ? b * a.heads + h : b, tile_columns, tree.data());
  int64_t count = 0;
  for (int64_t row0 = 0; row0 < a.q_len; row0 += tile_rows) {
    const int rows = int(std::min<int64_t>(tile_rows, a.q_len - row0));
    count += find_visits(a, u, x, row0, rows, tile_columns, tree.data(), found.data());
  }
  return count;
}
"""
# Where the headers end that know of masks.
ENDS = '#line 1 "flashgen/cpu/products.h"'
# Beyond what the first mask includes: what lists of visits need.
_BEGINS = "namespace {\n\n// ---- What a caller passes"
_INCLUDES = "\n#include <atomic>\n#include <memory>\n#include <mutex>\n#include <vector>\n"
# How query tiles are ordered and cut by their work; the same for every mask.
_SCHEDULE = """
extern "C" void longest_first(int32_t* order, const int32_t* work, int64_t tiles) {
  mask_0::longest_first(order, work, tiles);
}
extern "C" void cut_evenly(int32_t* first, int64_t runs, const int32_t* work, int64_t tiles) {
  mask_0::cut_evenly(first, runs, work, tiles);
}
"""


@dataclass(frozen=True)
class Problem:
    """Lengths and offsets of a call: a shard of something longer."""

    q_len: int
    kv_len: int
    q_start: int = 0
    kv_start: int = 0

    @property
    def totals(self) -> tuple[int, int]:
        """Nq and Nk: a few positions follow the shard's."""
        return self.q_start + self.q_len + 3 * bool(self.q_start), self.kv_start + self.kv_len + 5 * bool(self.kv_start)

    def sizes(self) -> dict[str, int]:
        """The sizes that specs speak of."""
        return {"B": BATCH, "H": HEADS, "Hkv": HEADS, "Nq": self.totals[0], "Nk": self.totals[1]}


PROBLEMS = (
    Problem(324, 324),
    Problem(301, 333),
    Problem(257, 251, 40, 0),
    Problem(200, 311, 130, 17),
)
TILES = ((16, 16), (64, 64), (96, 32), (32, 128), (17, 13))  # rows by columns, as forward and backward choose them


def problems_of(mask: Mask) -> tuple[Problem, ...]:
    """The problems that a mask can be asked."""
    return tuple(each for each in PROBLEMS if not mask.is_self_attention or each.totals[0] <= each.totals[1])


@dataclass(frozen=True)
class Counts:
    """Tiles of one mask, problem and size of tiles, as arrays [rows of tiles, columns of tiles] of classes 0, 1, 2.

    ``ranges`` are the classes that ``keep_range`` finds, ``visits`` what ``find_visits`` lists (0: nothing),
    ``exact`` those of brute force.
    """

    ranges: Any
    visits: Any
    exact: Any


class Masks:
    """The masks of a catalogue, emitted and compiled."""

    def __init__(self, masks: Sequence[Mask], folder: Path, optimisation: str = "-O0") -> None:
        self.masks = tuple(masks)
        self.variants = tuple(variant_of(mask) for mask in masks)
        self.layouts = tuple(ArgumentLayout(argument_fields(variant.spec)) for variant in self.variants)
        text_of = functools.partial(_text, self.variants)
        self._library = library_of(text_of, len(self.variants), folder, optimisation)

    def count(self, number: int, problem: Problem, rows: int, columns: int, tensors: Mapping[str, Any]) -> Counts:
        """The tiles of one mask."""
        shape = (-(-problem.q_len // rows), -(-problem.kv_len // columns))
        classes, visits = (np.zeros(shape, dtype=np.int8) for _ in range(2))
        function = getattr(self._library(number), f"tiles_{number}")
        function(self.arguments(number, problem, tensors), rows, columns, pointer(classes), pointer(visits))
        return Counts(classes, visits, exact(self.keep(number, problem, tensors), rows, columns))

    def longest_first(self, work: Any) -> Any:
        """The order of query tiles with this work."""
        work, order = np.ascontiguousarray(work, np.int32), np.empty(len(work), np.int32)
        self._library(0).longest_first(pointer(order), pointer(work), ctypes.c_int64(len(work)))
        return order

    def cut_evenly(self, work: Any, runs: int) -> Any:
        """Where runs of query tiles begin, and where the last one ends."""
        work, first = np.ascontiguousarray(work, np.int32), np.full(runs + 1, -1, np.int32)
        self._library(0).cut_evenly(pointer(first), ctypes.c_int64(runs), pointer(work), ctypes.c_int64(len(work)))
        return first

    def seconds_to_plan(
        self, number: int, problem: Problem, rows: int, columns: int, tensors: Mapping[str, Any]
    ) -> float:
        """The time in which one thread finds the visits of one head."""
        function = getattr(self._library(number), f"plan_{number}")
        packed = self.arguments(number, problem, tensors)
        start = time.process_time()
        function(packed, rows, columns)
        return time.process_time() - start

    def arguments(self, number: int, problem: Problem, tensors: Mapping[str, Any], *, workspace: int = 0) -> bytes:
        """``struct Arguments`` of a call, with nothing in it but what a mask may read."""
        q_total, kv_total = problem.totals
        known: dict[str, float] = {
            "batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "q_len": problem.q_len, "kv_len": problem.kv_len,
            "q_start": problem.q_start, "kv_start": problem.kv_start, "b_total": BATCH, "h_total": HEADS,
            "q_total": q_total, "kv_total": kv_total, "workspace": workspace,
        }  # fmt: skip
        for name in self.masks[number].tensors:
            array = tensors[name]
            known[tensor_field(name)] = array.ctypes.data
            for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
                known[stride_field(name, axis)] = stride // array.itemsize
                known[dimension_field(name, axis)] = length
        known |= {param_field(name): value for name, value in self.masks[number].params.items()}
        layout = self.layouts[number]
        return layout.pack(*layout.values(known))

    def keep(self, number: int, problem: Problem, tensors: Mapping[str, Any]) -> Any:
        """The pairs that are kept, as a dense array."""
        values: dict[Expr, Any] = {size(name): np.array(value) for name, value in problem.sizes().items()}
        values |= {index("b"): np.array(BATCH - 1), index("h"): np.array(HEADS - 1), index("hkv"): np.array(HEADS - 1)}
        for name, value in self.masks[number].params.items():
            values[Symbol(ScalarType.INT, name=name, kind=SymbolKind.PARAM)] = np.array(value)
        i, j = (np.arange(start, start + length) for start, length in _spans(problem))
        values |= {index("i"): i[:, None], index("j"): j[None, :]}
        kept = evaluate(self.variants[number].keep, values, tensors=tensors)
        return np.broadcast_to(kept, (len(i), len(j)))

    def tiles(self, number: int, problem: Problem, rows: int, columns: int) -> Iterator[tuple[tuple[int, int], Tile]]:
        """Every tile of one mask, as the analysis takes it."""
        b, h = IntRange(BATCH - 1, BATCH - 1), IntRange(HEADS - 1, HEADS - 1)
        for row, i in enumerate(_cut(problem.q_start, problem.q_len, rows)):
            for column, j in enumerate(_cut(problem.kv_start, problem.kv_len, columns)):
                yield (row, column), Tile(b, h, i, j, problem.sizes(), self.masks[number].params)


def tensors_of(problem: Problem, rng: np.random.Generator) -> Mapping[str, Any]:
    """Captured tensors of the whole that a problem is a shard of."""
    return captured(*problem.totals, rng)


def exact(keep: Any, rows: int, columns: int) -> Any:
    """The classes of all tiles from every pair."""
    starts = np.arange(0, keep.shape[0], rows), np.arange(0, keep.shape[1], columns)
    some = np.logical_or.reduceat(np.logical_or.reduceat(keep, starts[0], axis=0), starts[1], axis=1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(keep, starts[0], axis=0), starts[1], axis=1)
    return some.astype(np.int8) + every.astype(np.int8)


def intervals(keep: Any) -> int:
    """The most intervals of keys that a row keeps."""
    padded = np.pad(keep, ((0, 0), (1, 0)))
    return int((~padded[:, :-1] & padded[:, 1:]).sum(1).max())


def pointer(array: Any) -> ctypes.c_void_p:
    """Where its elements lie."""
    return ctypes.c_void_p(array.ctypes.data)


def _spans(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    return (problem.q_start, problem.q_len), (problem.kv_start, problem.kv_len)


def _cut(start: int, length: int, size: int) -> list[IntRange]:
    ends = range(0, length, size)
    return [IntRange(start + first, start + min(first + size, length) - 1) for first in ends]


def variant_of(mask: Mask | AttentionSpec) -> Variant:
    """The first head dimension of a mask's spec, or of any."""
    spec = mask if isinstance(mask, AttentionSpec) else parse_text(mask.spec).specs[0]
    return analyse(spec, spec.head_dims[0])


def _source(variant: Variant) -> str:
    return emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole


def _text(variants: Sequence[Variant], numbers: range) -> str:
    """One C++ file: the primitives once, what belongs to each mask in a namespace of its own."""
    first = _source(variants[0])
    parts = [first[: first.index(_BEGINS)] + _INCLUDES]
    for n in numbers:
        text = _source(variants[n])
        parts.append(
            f"namespace mask_{n} {{\n{text[text.index(_BEGINS) : text.index(ENDS)]}\n}}  // namespace mask_{n}\n"
        )
        parts.append(_ENTRY % {"n": n})
    return "".join((*parts, _SCHEDULE) if 0 in numbers else parts)


def library_of(
    text_of: Callable[[range], str], count: int, folder: Path, optimisation: str = "-O0"
) -> Callable[[int], ctypes.CDLL]:
    """The library that has the mask of a number. Of many every ninth is in one, made when it is asked for: `make test`
    asks for a third of all.
    """
    apart = 9 if count > 27 else 1

    @functools.cache
    def library(group: int) -> ctypes.CDLL:
        return ctypes.CDLL(str(compiled(text_of(range(group, count, apart)), folder, optimisation)))

    return lambda number: library(number % apart)


def compiled(text: str, folder: Path, optimisation: str) -> Path:
    """The library, kept under a name that its text determines."""
    digest = hashlib.sha256(f"{optimisation}\n{text}".encode()).hexdigest()[:16]
    library = folder / f"masks_{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = library.with_suffix(f".{os.getpid()}")
        source = library.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(text)
        flags = ["-std=c++17", optimisation, "-fwrapv", "-march=native", "-fPIC", "-shared", "-w"]
        subprocess.run([*find_compiler().command, *flags, str(source), "-o", str(temporary)], check=True)
        temporary.replace(library)
        source.unlink()
    return library
