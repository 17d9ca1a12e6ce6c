// How a matrix unit adds up: d = c + Σ_k a_k b_k for `terms` products at a time, without a rounding to nearest anywhere.
//
// Products are exact. They and c are aligned to the largest of their exponents; what is more than `extra_bits` below a
// float32's last place is cut off each of them; the sum is exact and then cut off to a float32. So every sum is too
// small in magnitude, and the errors of a long chain of them add up.
//
//   architecture   terms, 16-bit   terms, tf32   extra_bits
//   sm_80          8               4             1
//   sm_90          16              8             2
//   sm_90, 8-bit   32                          -10
//
// Sources: Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330,
// 2021; Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004, 2025, which found these
// numbers to agree with the devices bit by bit. Of 8 bits, whose sums keep 14 bits: DeepSeek-AI, "DeepSeek-V3 Technical
// Report", arXiv:2412.19437, 2024, section 3.3.2.
//
// Contract: products fit float32's significand, as those of tf32 and 16-bit operands do. What lies below 2^-126 is lost;
// infinities and NaN come out as sums of float32 give them.
#pragma once
#include <stdint.h>
#include <string.h>

namespace fg {
namespace emulator {

namespace tensor_core {

// mma.sync adds as sm_80 does, which loses more; only sm_90 has products of warpgroups.
constexpr int mma_extra_bits = 1, mma_terms_tf32 = 4, mma_terms_16bit = 8;
constexpr int warpgroup_extra_bits = 2, warpgroup_terms = 16;
constexpr int warpgroup_extra_bits_8bit = -10, warpgroup_terms_8bit = 32;

constexpr int width = 8;  // neighbouring columns
typedef float Floats __attribute__((vector_size(4 * width), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * width)));

inline Ints bits(Floats x) {
  Ints r;
  memcpy(&r, &x, sizeof r);
  return r;
}
inline Floats floats(Ints bits) {
  Floats r;
  memcpy(&r, &bits, sizeof r);
  return r;
}
inline Ints larger(Ints a, Ints b) {
  const Ints mask = a > b;
  return (a & mask) | (b & ~mask);
}
inline bool any(Ints mask) {
  uint64_t words[width / 2], all = 0;
  memcpy(words, &mask, sizeof words);
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

// c + Σ_k a[k] b[k][0 … 7]; neighbouring k of b are `stride` floats apart.
template <int terms, int extra_bits> Floats multiply_and_add(Floats c, const float* a, const float* b, int stride) {
  static_assert(int64_t(terms + 1) << (24 + extra_bits) < int64_t(1) << 31, "a sum of aligned terms is an int32_t");
  constexpr int magnitude = 0x7fffffff, significand = 23, bias = 127, not_finite = 255;
  Floats products[terms];
  Ints largest = bits(c) & magnitude;
  for (int k = 0; k < terms; ++k) {
    products[k] = a[k] * *reinterpret_cast<const Floats*>(b + k * stride);
    largest = larger(bits(products[k]) & magnitude, largest);
  }
  Ints exponent = largest >> significand;
  if (any(exponent == not_finite)) {
    Floats sum = c;
    for (int k = 0; k < terms; ++k) sum += products[k];
    return sum;
  }
  // In units of the last place that is kept: a normal number, and so is its reciprocal.
  constexpr int below = significand + extra_bits;
  exponent = larger(exponent, Ints{} + (below + 1));
  const Floats unit = floats((exponent - below) << significand);
  const Floats per_unit = floats((2 * bias + below - exponent) << significand);
  Ints sum = __builtin_convertvector(c * per_unit, Ints);  // towards zero
  for (int k = 0; k < terms; ++k) sum += __builtin_convertvector(products[k] * per_unit, Ints);
  const Floats nearest = __builtin_convertvector(sum, Floats);
  const Ints rounded = __builtin_convertvector(nearest, Ints);
  const Ints away = ((rounded > sum) & (sum > 0)) | ((rounded < sum) & (sum < 0));  // -1 where there is one less to take
  return floats(bits(nearest) + away) * unit;
}

}  // namespace tensor_core
}  // namespace emulator
}  // namespace fg
