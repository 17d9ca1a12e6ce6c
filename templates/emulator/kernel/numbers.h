// Conversions and the special function unit, lane by lane.
//
// Contract: conversions round as the GPU's do: pack_* to nearest even with NaN 0x7fff, round_tf32 to nearest with ties
// away from zero. exp2_approximate and reciprocal_approximate flush subnormal numbers as the GPU does, but their results
// are the host's: exact to one unit in the last place where hardware is to two.
#pragma once
#include "language.h"

namespace fg {

namespace emulator {
inline uint32_t half_of_float(float x) {
  const uint32_t word = __float_as_uint(x), magnitude = word & 0x7fffffff, sign = word >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= (127u + 16u) << 23) return sign | 0x7c00;
  // Below 2^-14 adding 1/2 leaves the rounded result in the low bits.
  if (magnitude < (127u - 14u) << 23) return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000);
  return sign | (magnitude - ((127u - 15u) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
}
inline float float_of_half(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16, rebase = (127u - 15u) << 23;
  if (magnitude >= 31u << 23) return __uint_as_float(sign | (magnitude + 2 * rebase));
  if (magnitude >= 1u << 23) return __uint_as_float(sign | (magnitude + rebase));
  // A subnormal gets an implicit 1, which is then subtracted.
  const float subnormal = __uint_as_float(magnitude + rebase + (1u << 23)) - 0x1p-14f;
  return sign ? -subnormal : subnormal;
}
inline uint32_t bfloat_of_float(float x) {
  const uint32_t word = __float_as_uint(x);
  return x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
}  // namespace emulator

FG_DEVICE uint32_t pack_f16(float low, float high) {
  return emulator::half_of_float(low) | emulator::half_of_float(high) << 16;
}
FG_DEVICE uint32_t pack_bf16(float low, float high) {
  return emulator::bfloat_of_float(low) | emulator::bfloat_of_float(high) << 16;
}
FG_DEVICE float unpack_f16(uint16_t half) { return emulator::float_of_half(half); }
FG_DEVICE uint32_t round_tf32(float x) {
  return x != x ? 0x7fffffff : (__float_as_uint(x) + 0x1000) & 0xffffe000;
}

FG_DEVICE float exp2_approximate(float x) { return emulator::flush(exp2f(emulator::flush(x))); }
FG_DEVICE float reciprocal_approximate(float x) { return emulator::flush(1.0f / emulator::flush(x)); }

}  // namespace fg
