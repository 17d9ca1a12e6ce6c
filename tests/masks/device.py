"""The classes of tiles as GPU kernels find them: the emitted CUDA of the masks, evaluated on the host.

What a kernel asks for each tile, ``keep_range`` over spans of queries and keys, and what other kernels store before,
the ranges of ``observe_rows`` and ``observe_columns``, are compiled against the emulator's words of CUDA, without its
machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.analysis.pieces import is_cut
from flashgen.analysis.variant import Variant
from flashgen.hosts.emulator.program import kernel_source
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import of_type
from tests.masks.measure import Masks, Problem, library_of, pointer

TILES = ((16, 16), (64, 64), (96, 32), (32, 128))  # rows by columns: multiples of 16, as GPUs have them
_WORKSPACE = 1 << 20  # bytes for what is observed of rows and columns; a problem here takes a few thousand

_MACHINE = """
#include <cstdlib>
// Memory as it is: nothing is checked or counted, and nobody is asked for anything else.
struct Memory final : fg::emulator::Machine {
  void global_access(fg::emulator::Access, const void*, unsigned, int) override {}
  void global_arrive(const void*, int) override { abort(); }
  void global_leave(uint32_t*, int) override { abort(); }
  void global_await(const uint32_t*, uint32_t, int) override { abort(); }
  void global_add(float*, const float*, unsigned, int) override { abort(); }
  int cluster_rank() override { abort(); }
  char* shared_memory() override { abort(); }
  void shared_access(fg::emulator::Access, const void*, unsigned, int) override { abort(); }
  void* shared_store_at(const void*, unsigned, int, int) override { abort(); }
  void copy_async(void*, const void*, unsigned, bool, int) override { abort(); }
  void copy_async_commit(int) override { abort(); }
  void copy_async_wait(int, int) override { abort(); }
  void publish_shared() override { abort(); }
  void bulk_add(float*, const float*, int, int) override { abort(); }
  void bulk_commit() override { abort(); }
  void bulk_wait() override { abort(); }
  void mbarrier_init(const void*, int, int) override { abort(); }
  void mbarrier_invalidate(const void*, int) override { abort(); }
  void mbarrier_expect(const void*, int, int) override { abort(); }
  void copy_panel(const fg::emulator::PanelCopy&, int) override { abort(); }
  void send_async(const void*, const void*, const void*, int, int) override { abort(); }
  void send_bytes(const void*, const void*, int, const void*, int, int) override { abort(); }
  void together(const fg::emulator::Call&) override { abort(); }
};
"""
_ENTRY = """
namespace mask_%(n)d {
template <int tile_rows, int tile_columns>
void classify(const Arguments& a, const Launch& u, const Head& x, int head, signed char* classes) {
  const int q_len = int(a.q_len), kv_len = int(a.kv_len);
  for (int i = 0; i < q_len; i += tile_rows) {
    for (int j = 0; j < kv_len; j += tile_columns) {
      const fg::Span rows = {i, fg::min(tile_rows, q_len - i)}, columns = {j, fg::min(tile_columns, kv_len - j)};
      const fg::ranges::Bool keep = keep_range<tile_rows, tile_columns>(a, u, x, head, rows, columns);
      *classes++ = !keep.may_be_true ? 0 : keep.may_be_false ? 1 : 2;
    }
  }
}
}  // namespace mask_%(n)d
extern "C" void device_tiles_%(n)d(const void* arguments, int tile_rows, int tile_columns, signed char* classes) {
  using namespace mask_%(n)d;
  Memory memory;
  fg::emulator::registers.machine = &memory;
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const Launch u = make_launch(a);
  const int b = int(a.batch) - 1, h = int(a.heads) - 1;
  const Head x = make_head(a, u, b, h);
%(observe)s
%(sizes)s
}
"""
_SIZE = "  if (tile_rows == {0} && tile_columns == {1}) classify<{0}, {1}>(a, u, x, b * int(a.heads) + h, classes);"
_OBSERVE = "  for (int n = 0; n < a.batch * a.heads * granules_of_{0}s(a); ++n) observe_{0}s(a, n);"


class DeviceMasks:
    """The masks of a catalogue as CUDA, emitted and compiled for the host."""

    def __init__(self, masks: Masks, folder: Path) -> None:
        self._masks = masks
        self._workspace = np.zeros(_WORKSPACE, dtype=np.int8)
        self._library = library_of(functools.partial(_text, masks.variants), len(masks.variants), folder)

    def classes(self, number: int, problem: Problem, rows: int, columns: int, tensors: Mapping[str, Any]) -> Any:
        """The classes 0, 1, 2 of all tiles of one mask, [rows of tiles, columns of tiles]."""
        shape = (-(-problem.q_len // rows), -(-problem.kv_len // columns))
        found = np.full(shape, -1, dtype=np.int8)
        packed = self._masks.arguments(number, problem, tensors, workspace=self._workspace.ctypes.data)
        getattr(self._library(number), f"device_tiles_{number}")(packed, rows, columns, pointer(found))
        return found


def _source(variant: Variant) -> str:
    return kernel_source(emit_cuda(of_type(GPUS["sm_80"].plan(variant))).whole, "mask").text


def _text(variants: Sequence[Variant], numbers: range) -> str:
    """One C++ file: the primitives once, what belongs to each mask in a namespace of its own."""
    fullest = _source(next(each for each in variants if is_cut(each.keep)))
    parts = [fullest[: fullest.index("// ---- What a caller passes")], _MACHINE]
    for n in numbers:
        text = _source(variants[n])
        own = text[text.index("// ---- What a caller passes") : text.index("struct Spec : fg::AnySpec")]
        observe = [_OBSERVE.format(each) for each in ("row", "column") if f"observe_{each}s(" in own]
        parts.append(f"namespace mask_{n} {{\n{own}\n}}  // namespace mask_{n}\n")
        sizes = [_SIZE.format(rows, columns) for rows, columns in TILES]
        parts.append(_ENTRY % {"n": n, "observe": "\n".join(observe), "sizes": "\n".join(sizes)})
    return "".join(parts)
