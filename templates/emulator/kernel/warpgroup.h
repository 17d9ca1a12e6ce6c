// Matrix products of a warpgroup: four warps, the first a multiple of four (wgmma of sm_90a).
//
// Contract: all 128 threads call together, from the same line. A product reads shared memory and writes d when a wait
// covers its group, not earlier; until then d holds signalling NaN. Operands in registers are read when it is issued.
// What ordinary instructions wrote to shared memory is there for a product after publish_shared() of the threads that
// wrote it and a barrier. Bank conflicts of products are not counted.
#pragma once
#include "types.h"

namespace fg {

struct f8e4m3;  // of 8 bits: eight_bits.cuh

struct SharedMatrix {
  const char* start;
  int leading_bytes, stride_bytes, row_bytes;
};
template <int row_bytes> FG_DEVICE SharedMatrix shared_matrix(const void* start, int leading_bytes, int stride_bytes) {
  static_assert(row_bytes == 32 || row_bytes == 64 || row_bytes == 128, "the permutations that there are");
  return {static_cast<const char*>(start), leading_bytes, stride_bytes, row_bytes};
}
FG_DEVICE SharedMatrix advance(SharedMatrix m, int bytes) {
  m.start += bytes;
  return m;
}

namespace emulator {

template <class T> struct FormatOf;
template <> struct FormatOf<half_t> {
  static constexpr Format value = Format::half;
};
template <> struct FormatOf<bfloat_t> {
  static constexpr Format value = Format::bfloat;
};
template <> struct FormatOf<f8e4m3> {
  static constexpr Format value = Format::e4m3;
};

inline SharedOperand operand(SharedMatrix m, bool across) {
  return {m.start, m.leading_bytes, m.stride_bytes, m.row_bytes, across};
}
template <class T, int n_tiles>
FG_PRIMITIVE void multiply(float (&d)[n_tiles][4], const uint32_t* a_registers, SharedOperand a, SharedOperand b,
                           bool add, int line) {
  static_assert(n_tiles >= 1 && n_tiles <= 32, "between 8 and 256 columns");
  const Product product = {a_registers, a, b, n_tiles, FormatOf<T>::value, add};
  registers.machine->together({Together::warpgroup_multiply, line, d, {&product, nullptr}, 0, 0});
}

}  // namespace emulator

template <class T, bool a_across, bool b_across, int n_tiles>
FG_PRIMITIVE void warpgroup_multiply(float (&d)[n_tiles][4], SharedMatrix a, SharedMatrix b, bool add,
                                     int line = __builtin_LINE()) {
  emulator::multiply<T>(d, nullptr, emulator::operand(a, a_across), emulator::operand(b, b_across), add, line);
}
template <class T, bool b_across, int n_tiles>
FG_PRIMITIVE void warpgroup_multiply(float (&d)[n_tiles][4], const uint32_t (&a)[4], SharedMatrix b, bool add,
                                     int line = __builtin_LINE()) {
  emulator::multiply<T>(d, a, {}, emulator::operand(b, b_across), add, line);
}
FG_PRIMITIVE void warpgroup_arrive(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::warpgroup_arrive, line, nullptr, {}, 0, 0});
}
FG_PRIMITIVE void warpgroup_commit(int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::warpgroup_commit, line, nullptr, {}, 0, 0});
}
template <int pending> FG_PRIMITIVE void warpgroup_wait(int line = __builtin_LINE()) {
  static_assert(pending >= 0, "a number of groups");
  emulator::registers.machine->together({emulator::Together::warpgroup_wait, line, nullptr, {}, pending, 0});
}
FG_PRIMITIVE void publish_shared(int = __builtin_LINE()) { emulator::registers.machine->publish_shared(); }

}  // namespace fg
