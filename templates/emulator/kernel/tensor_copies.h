// Barriers in shared memory (mbarrier), copies of boxes of a tensor (cp.async.bulk.tensor of sm_90a), and clusters of blocks.
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
FG_PRIMITIVE void mbarrier_arrive_at(uint64_t* signal, int rank, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::mbarrier_arrive_at, line, nullptr, {signal, nullptr}, rank, 0});
}
FG_PRIMITIVE void mbarrier_tell(uint64_t* signal, int rank, int line = __builtin_LINE()) {
  mbarrier_arrive_at(signal, rank, line);
}
FG_PRIMITIVE void shared_store_at(int* p, int value, int rank, int line = __builtin_LINE()) {
  memcpy(emulator::registers.machine->shared_store_at(p, sizeof *p, rank, line), &value, sizeof value);
}
FG_PRIMITIVE int cluster_rank() { return emulator::registers.machine->cluster_rank(); }
FG_PRIMITIVE void cluster_barrier(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::cluster_barrier, line, nullptr, {}, 0, 0});
}
FG_PRIMITIVE void mbarrier_wait(uint64_t* signal, int parity, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::mbarrier_wait, line, nullptr, {signal, nullptr}, parity, 0});
}
// To the same place of the blocks of a cluster whose bits are set, each of which counts it; 0: to this one.
template <class T>
FG_PRIMITIVE void copy_panel_to_all(T* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal, int blocks,
                                    int line = __builtin_LINE()) {
  emulator::PanelCopy copy = {to, {}, column, row, slab, {0, 0}, signal, blocks};
  memcpy(&copy.from, map.words, sizeof copy.from);
  if (copy.from.element_bytes != sizeof(T)) __builtin_trap();  // the host has described another tensor
  emulator::registers.machine->copy_panel(copy, line);
}
FG_PRIMITIVE void mbarrier_wait_for_cluster(uint64_t* signal, int parity, int line = __builtin_LINE()) {
  mbarrier_wait(signal, parity, line);
}
template <class T>
FG_PRIMITIVE void copy_panel_async(T* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal,
                                   int line = __builtin_LINE()) {
  copy_panel_to_all(to, map, column, row, slab, signal, 0, line);
}
// A panel of a tensor of five dimensions.
template <class T>
FG_PRIMITIVE void copy_panel_async(T* to, const TensorMap& map, int column, int row, int slab, int fourth, int fifth,
                                   uint64_t* signal, int line = __builtin_LINE()) {
  emulator::PanelCopy copy = {to, {}, column, row, slab, {fourth, fifth}, signal, 0};
  memcpy(&copy.from, map.words, sizeof copy.from);
  if (copy.from.element_bytes != sizeof(T)) __builtin_trap();  // the host has described another tensor
  emulator::registers.machine->copy_panel(copy, line);
}
FG_PRIMITIVE void prefetch_map(const TensorMap&) {}
// They land as boxes do.
template <int apart, int count>
FG_PRIMITIVE void send_async(float4* to, const float (&fours)[count][4], uint64_t* signal, int rank, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::warp_barrier, line, nullptr, {}, 0, 0});
  for (int n = 0; n < count; ++n) emulator::registers.machine->send_async(to + n * apart, fours[n], signal, rank, line);
}
// So do these, and are read until they have landed.
template <class T>
FG_PRIMITIVE void send_bytes_async(T* to, const T* from, int bytes, uint64_t* signal, int rank, int line = __builtin_LINE()) {
  emulator::registers.machine->send_bytes(to, from, bytes, signal, rank, line);
}

}  // namespace fg
