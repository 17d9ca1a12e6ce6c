// Barriers and shuffles.
//
// Contract: all threads of the block, or all lanes of the warp, call together, from the same line.
#pragma once
#include "language.h"

namespace fg {

namespace emulator {
template <class T> FG_DEVICE T shuffle_from(T value, int lane, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move words");
  T result;
  registers.machine->together({Together::shuffle, line, &result, {&value, nullptr}, lane, sizeof(T)});
  return result;
}
FG_DEVICE int lane() {
  const Index3 &t = registers.thread, &n = registers.block_size;
  return static_cast<int>((t.x + n.x * (t.y + n.y * t.z)) % warp_lanes);
}
}  // namespace emulator

FG_DEVICE void block_barrier(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::block_barrier, line, nullptr, {}, 0, 0});
}
FG_DEVICE void warp_barrier(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::warp_barrier, line, nullptr, {}, 0, 0});
}
template <class T> FG_DEVICE T shuffle_xor(T value, int lane_mask, int line = __builtin_LINE()) {
  return emulator::shuffle_from(value, emulator::lane() ^ lane_mask, line);
}
template <class T> FG_DEVICE T shuffle(T value, int lane, int line = __builtin_LINE()) {
  return emulator::shuffle_from(value, lane, line);
}
FG_DEVICE uint32_t ballot(bool condition, int line = __builtin_LINE()) {
  uint32_t bits;
  emulator::registers.machine->together({emulator::Together::ballot, line, &bits, {}, condition, 0});
  return bits;
}

}  // namespace fg
