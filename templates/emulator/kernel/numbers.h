// Conversions and the special function unit, lane by lane.
//
// Contract: conversions round as the GPU's do (formats.h). exp2_approximate and reciprocal_approximate flush subnormal
// numbers as the GPU does, but their results are the host's: right to one unit in the last place, hardware's to two.
#pragma once
#include "../formats.h"
#include "language.h"

namespace fg {

FG_DEVICE uint32_t pack_f16(float low, float high) {
  return emulator::half_of_float(low) | emulator::half_of_float(high) << 16;
}
FG_DEVICE uint32_t pack_bf16(float low, float high) {
  return emulator::bfloat_of_float(low) | emulator::bfloat_of_float(high) << 16;
}
FG_DEVICE float unpack_f16(uint16_t half) { return emulator::float_of_half(half); }

FG_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  return emulator::e4m3_of_float(a) | emulator::e4m3_of_float(b) << 8 | emulator::e4m3_of_float(c) << 16 |
         emulator::e4m3_of_float(d) << 24;
}

FG_DEVICE uint32_t widen_e4m3(uint16_t pair) {
  return pack_f16(emulator::float_of_e4m3(pair & 0xff), emulator::float_of_e4m3(pair >> 8));
}
FG_DEVICE int larger(int a, int b) { return a > b ? a : b; }
FG_DEVICE int largest(int a, int b, int c) { return larger(larger(a, b), c); }
FG_DEVICE uint32_t even_bytes_first(uint32_t word) { return __byte_perm(word, 0, 0x3120); }

namespace emulator {
inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
}  // namespace emulator

FG_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
FG_DEVICE uint32_t halves_not_below(uint32_t x, uint32_t least) {
  uint32_t r = 0;
  for (int at = 0; at < 32; at += 16) {
    const float size = emulator::float_of_half(x >> at & 0x7fff), limit = emulator::float_of_half(least >> at & 0xffff);
    if (!(size < limit)) r |= 0xffffu << at;
  }
  return r;
}
FG_DEVICE float where_bit(uint32_t word, uint32_t bit, float x) { return word & bit ? x : 0.0f; }
FG_DEVICE float exp2_approximate(float x) { return emulator::flush(exp2f(emulator::flush(x))); }
FG_DEVICE float reciprocal_approximate(float x) { return emulator::flush(1.0f / emulator::flush(x)); }

}  // namespace fg
