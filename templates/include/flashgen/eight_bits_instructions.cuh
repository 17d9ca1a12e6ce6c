// Layer 1 of the CUDA primitives, Hopper's part: float8_e4m3fn. Products of warpgroups are with those of other types.
#pragma once
#include "flashgen/eight_bits.cuh"
#include "flashgen/math.cuh"
#include "flashgen/tensor_copies.cuh"
#ifndef FLASHGEN_EMULATOR
namespace fg {

// Four floats in a register, the first lowest: rounded to nearest even, what is beyond 448 becomes that.
FG_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{ .reg .b16 low, high;"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

FG_DEVICE int larger(int a, int b) { return max(a, b); }
FG_DEVICE int largest(int a, int b, int c) { return __vimax3_s32(a, b, c); }

// As of wider elements: maps are of bytes.
FG_DEVICE void copy_panel_async(f8e4m3* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(slab), "r"(shared_address(signal))
      : "memory");
}

}  // namespace fg
#endif  // FLASHGEN_EMULATOR
