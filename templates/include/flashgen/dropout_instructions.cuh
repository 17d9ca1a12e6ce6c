// Layer 1 of the CUDA primitives, for dropout: comparisons of two halves at a time, and a number where a bit is set.
#pragma once
#include "flashgen/instructions.cuh"
#ifndef FLASHGEN_EMULATOR
namespace fg {

// All bits of the halves whose low 15 bits are at least those of `least`, which has none above 0x7c00: as numbers of 16 bits,
// without their signs; what is none is not below.
FG_DEVICE uint32_t halves_not_below(uint32_t x, uint32_t least) {
  uint32_t r;
  asm("{.reg .b32 size; abs.f16x2 size, %1; set.geu.u32.f16x2 %0, size, %2;}" : "=r"(r) : "r"(x), "r"(least));
  return r;
}
// x where `word` has the bit, else 0: by a predicate, where the compiler would shift the bit down first.
FG_DEVICE float where_bit(uint32_t word, uint32_t bit, float x) {
  float r;
  asm("{.reg .pred has; .reg .b32 own; and.b32 own, %1, %2; setp.ne.u32 has, own, 0; selp.f32 %0, %3, 0f00000000, has;}"
      : "=f"(r) : "r"(word), "r"(bit), "f"(x));
  return r;
}

}  // namespace fg
#endif  // FLASHGEN_EMULATOR
