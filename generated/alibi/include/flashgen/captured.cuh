// Layer 3 of the CUDA primitives: elements of captured tensors, read and added to.
//
// Contract: addresses are in bounds; where the compiler could not prove it, the index went through clamp_index.
#pragma once
#include "flashgen/math.cuh"

namespace fg {

// The nearest valid index of a dimension. Where it has no entries -1: the tensor's strides are 0 then, and a zero is
// read.
FG_DEVICE int32_t clamp_index(int32_t index, int64_t dimension) { return clamp(index, 0, int32_t(dimension - 1)); }

FG_DEVICE float element(const float* tensor, int64_t index) { return global_load(tensor + index); }
FG_DEVICE float element(const f16* tensor, int64_t index) { return to_float(global_load(tensor + index)); }
FG_DEVICE float element(const bf16* tensor, int64_t index) { return to_float(global_load(tensor + index)); }
FG_DEVICE int32_t element(const int32_t* tensor, int64_t index) { return global_load(tensor + index); }
FG_DEVICE int32_t element(const int64_t* tensor, int64_t index) { return int32_t(global_load(tensor + index)); }
FG_DEVICE bool element(const bool* tensor, int64_t index) {
  return global_load(reinterpret_cast<const uint8_t*>(tensor) + index) != 0;
}

// ---- sums whose order does not matter ----

FG_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// `largest` are the bits of a float at least as large as any finite contribution's absolute value, less than 2^e: the unit
// is 2^(e - 32), so that 2^31 contributions fit into 64 bits.
FG_DEVICE bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }
FG_DEVICE int unit_exponent(uint32_t largest) { return int(largest >> 23) - 126 - 32; }
FG_DEVICE double power_of_two(int exponent) {
  const uint64_t bits = uint64_t(exponent + 1023) << 52;
  double r;
  memcpy(&r, &bits, sizeof(r));
  return r;
}
FG_DEVICE uint64_t fixed_point(float value, uint32_t largest) {
  return uint64_t(int64_t(rint(double(value) * power_of_two(-unit_exponent(largest)))));
}
FG_DEVICE float from_fixed_point(uint64_t sum, uint32_t largest) {
  return float(double(int64_t(sum)) * power_of_two(unit_exponent(largest)));
}

}  // namespace fg
