// Number formats of matrix operands, to and from float32; both sides of the emulator use them.
//
// Contract: conversions to 16 and 8 bits round to nearest even and make NaN 0x7fff or 0x7f; of 8 bits (e4m3: no infinities)
// what is beyond 448 becomes that. Conversions to float32 are exact; that of
// tf32 drops the 13 low bits, which hardware does not look at.
#pragma once
#include <stdint.h>
#include <string.h>

namespace fg {
namespace emulator {

inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

constexpr uint32_t half_rebase = (127u - 15u) << 23;  // the difference of the exponents' biases

inline float float_of_half(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
  // A subnormal gets an implicit 1, which is then subtracted; infinity and NaN have the largest exponent in both.
  const uint32_t subnormal = bits_of_float(float_of_bits(magnitude + half_rebase + (1u << 23)) - 0x1p-14f);
  const uint32_t finite = magnitude >= 1u << 23 ? magnitude + half_rebase : subnormal;
  return float_of_bits(sign | (magnitude >= 31u << 23 ? magnitude + 2 * half_rebase : finite));
}
inline uint32_t half_of_float(float x) {
  const uint32_t word = bits_of_float(x), magnitude = word & 0x7fffffff, sign = word >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= (127u + 16u) << 23) return sign | 0x7c00;
  // Below 2^-14 adding 1/2 leaves the rounded result in the low bits.
  if (magnitude < (127u - 14u) << 23) return sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000);
  return sign | (magnitude - half_rebase + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

inline float float_of_bfloat(uint32_t bfloat) { return float_of_bits(bfloat << 16); }
inline uint32_t bfloat_of_float(float x) {
  const uint32_t word = bits_of_float(x);
  return x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

inline float float_of_e4m3(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
  if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000);
  const float rebased = float_of_bits(magnitude << 20) * 0x1p120f;  // exponents begin at 2^-6, in place of 2^-126
  return float_of_bits(sign | bits_of_float(rebased));
}
inline uint32_t e4m3_of_float(float x) {
  const uint32_t word = bits_of_float(x), magnitude = word & 0x7fffffff, sign = word >> 24 & 0x80;
  if (magnitude > 0x7f800000) return 0x7f;
  if (float_of_bits(magnitude) >= 448.0f) return sign | 0x7e;
  // Below 2^-6 adding 2^14 leaves the rounded result, a multiple of 2^-9, in the low bits.
  if (magnitude < (127u - 6u) << 23)
    return sign | (bits_of_float(float_of_bits(magnitude) + 0x1p14f) - bits_of_float(0x1p14f));
  const uint32_t rounded = (magnitude - ((127u - 7u) << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  return sign | rounded;
}

inline float float_of_tf32(uint32_t tf32) { return float_of_bits(tf32 & 0xffffe000u); }

}  // namespace emulator
}  // namespace fg
