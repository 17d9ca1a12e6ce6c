// Barriers, shuffles, and what a thread knows of itself.
//
// Contract: all threads of the block, or all lanes of the warp, call together, from the same line; warps come to a
// barrier with a number from different lines.
#pragma once
#include "language.h"

namespace fg {

namespace emulator {
template <class T> FG_PRIMITIVE T shuffle_from(T value, int lane, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move words");
  T result;
  registers.machine->together({Together::shuffle, line, &result, {&value, nullptr}, lane, sizeof(T)});
  return result;
}
FG_PRIMITIVE int lane() {
  const Index3 &t = registers.thread, &n = registers.block_size;
  return static_cast<int>((t.x + n.x * (t.y + n.y * t.z)) % warp_lanes);
}
}  // namespace emulator

FG_PRIMITIVE void block_barrier(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::block_barrier, line, nullptr, {}, 0, 0});
}
FG_PRIMITIVE void warp_barrier(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::warp_barrier, line, nullptr, {}, 0, 0});
}
// A barrier of `threads` threads, whole warps: some wait, all at the same line, others only say that they have been there.
FG_PRIMITIVE void barrier_wait(int number, int threads, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::barrier_wait, line, nullptr, {}, number, threads});
}
// A barrier at which all `threads` wait, from different lines.
FG_PRIMITIVE void barrier_meet(int number, int threads, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::barrier_meet, line, nullptr, {}, number, threads});
}
FG_PRIMITIVE void barrier_arrive(int number, int threads, int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::barrier_arrive, line, nullptr, {}, number, threads});
}
template <class T> FG_PRIMITIVE T shuffle_xor(T value, int lane_mask, int line = __builtin_LINE()) {
  return emulator::shuffle_from(value, emulator::lane() ^ lane_mask, line);
}
template <class T> FG_PRIMITIVE T shuffle(T value, int lane, int line = __builtin_LINE()) {
  return emulator::shuffle_from(value, lane, line);
}
// An 8 x 8 matrix of 16 bits of which lane l has columns 2 (l % 4) and the next one of row l / 4, transposed.
FG_PRIMITIVE uint32_t transposed(uint32_t word, int line = __builtin_LINE()) {
  const int lane = emulator::lane(), row = lane % 4 * 2, column = lane / 4;
  const uint32_t low = emulator::shuffle_from(word, row * 4 + column / 2, line);
  const uint32_t high = emulator::shuffle_from(word, row * 4 + 4 + column / 2, line);
  const int shift = column % 2 * 16;
  return (low >> shift & 0xffffu) | (high >> shift) << 16;
}
FG_PRIMITIVE uint32_t ballot(bool condition, int line = __builtin_LINE()) {
  uint32_t bits;
  emulator::registers.machine->together({emulator::Together::ballot, line, &bits, {}, condition, 0});
  return bits;
}

FG_PRIMITIVE int block_index() { return static_cast<int>(emulator::registers.block.x); }
FG_PRIMITIVE int grid_size() { return static_cast<int>(emulator::registers.grid_size.x); }
FG_PRIMITIVE int lane_index() { return static_cast<int>(emulator::registers.thread.x) % emulator::warp_lanes; }
// As on a GPU: from lane 0, so the warp must be together.
FG_PRIMITIVE int warp_index(int line = __builtin_LINE()) {
  return shuffle(static_cast<int>(emulator::registers.thread.x) / emulator::warp_lanes, 0, line);
}
FG_PRIMITIVE int again(int x) { return x; }

}  // namespace fg
