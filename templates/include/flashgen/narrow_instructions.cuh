// Layer 1 of the CUDA primitives, for tiles of 8 bits: two matrices at a time, and numbers of 8 bits as float16.
#pragma once
#include "flashgen/eight_bits.cuh"
#ifndef FLASHGEN_EMULATOR
namespace fg {

// As load_matrix_x4, of the matrices whose rows' addresses the first 16 lanes supply.
FG_DEVICE void load_matrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}
FG_DEVICE void load_matrix_x2_transposed(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}

// Bytes 0 2 1 3 of a word.
FG_DEVICE uint32_t even_bytes_first(uint32_t word) { return __byte_perm(word, 0, 0x3120); }

// Two numbers of 8 bits, float8_e4m3fn, as two of float16, which has all of them.
FG_DEVICE uint32_t widen_e4m3(uint16_t pair) {
  uint32_t r;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
#else
  // Sign, exponent and mantissa where float16 has them; its exponents begin 2^8 lower.
  const uint32_t apart = __byte_perm(pair, 0, 0x1404), small = (apart & 0x80008000u) | (apart >> 1 & 0x3f803f80u);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(small), "r"(0x5c005c00u));
  if ((small & 0x7fffu) == 0x3f80u) r |= 0x7fffu;
  if ((small >> 16 & 0x7fffu) == 0x3f80u) r |= 0x7fff0000u;
#endif
  return r;
}

}  // namespace fg
#endif  // FLASHGEN_EMULATOR
