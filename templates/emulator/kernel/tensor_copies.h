// Barriers in shared memory (mbarrier) and copies of boxes of a tensor (cp.async.bulk.tensor of sm_90a).
//
// Contract: a barrier is made by one thread, which publishes it (warpgroup.h) before another barrier orders that before
// all else. All lanes of a warp arrive together, each for itself, and wait together. A box lands when the first wait for its
// phase returns, not earlier; who waits for that phase sees it, and nobody else does.
#pragma once
#include "language.h"

namespace fg {

struct alignas(64) TensorMap {
  uint64_t words[16];
  int32_t batch_slabs, head_slabs;
};

FG_PRIMITIVE void mbarrier_init(uint64_t* signal, int arrivals, int line = __builtin_LINE()) {
  emulator::registers.machine->mbarrier_init(signal, arrivals, line);
}
FG_PRIMITIVE void mbarrier_invalidate(uint64_t* signal, int line = __builtin_LINE()) {
  emulator::registers.machine->mbarrier_invalidate(signal, line);
}
FG_PRIMITIVE void mbarrier_expect(uint64_t* signal, int bytes, int line = __builtin_LINE()) {
  emulator::registers.machine->mbarrier_expect(signal, bytes, line);
}
FG_PRIMITIVE void mbarrier_arrive(uint64_t* signal, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::mbarrier_arrive, line, nullptr, {signal, nullptr}, 0, 0});
}
FG_PRIMITIVE void mbarrier_wait(uint64_t* signal, int parity, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::mbarrier_wait, line, nullptr, {signal, nullptr}, parity, 0});
}
template <class T>
FG_PRIMITIVE void copy_panel_async(T* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal,
                                   int line = __builtin_LINE()) {
  emulator::PanelCopy copy = {to, {}, column, row, slab, {0, 0}, signal};
  memcpy(&copy.from, map.words, sizeof copy.from);
  if (copy.from.element_bytes != sizeof(T)) __builtin_trap();  // the host has described another tensor
  emulator::registers.machine->copy_panel(copy, line);
}
// The same of a tensor of five dimensions.
template <class T>
FG_PRIMITIVE void copy_panel_async(T* to, const TensorMap& map, int column, int row, int slab, int fourth, int fifth,
                                   uint64_t* signal, int line = __builtin_LINE()) {
  emulator::PanelCopy copy = {to, {}, column, row, slab, {fourth, fifth}, signal};
  memcpy(&copy.from, map.words, sizeof copy.from);
  if (copy.from.element_bytes != sizeof(T)) __builtin_trap();  // the host has described another tensor
  emulator::registers.machine->copy_panel(copy, line);
}
FG_PRIMITIVE void prefetch_map(const TensorMap&) {}

}  // namespace fg
