// Layer 2 of the CUDA primitives: storage types to and from the float32 (or int32, bool) that is computed with.
//
// Contract: element types of q, k, v, o: float, half_t, bfloat_t; of captured tensors also int32_t, int64_t (narrowed
// modulo 2^32) and bool. Conversions to 16 bits round to nearest even.
#pragma once
#include "flashgen/instructions.cuh"

namespace fg {

#define FG_CONSTEXPR __host__ __device__ constexpr

using f16 = half_t;  // as captured tensors are declared
using bf16 = bfloat_t;

FG_DEVICE float to_float(float x) { return x; }
FG_DEVICE float to_float(half_t x) { return unpack_f16(x.bits); }
FG_DEVICE float to_float(bfloat_t x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// How a type of q, k, v and o is stored and multiplied. `depth` is the inner dimension of one matrix instruction,
// `unroll` how many of them stand side by side in a loop over it: float32 takes three times the instructions. `Sum`: in
// which a few long sums are made that no matrix unit makes, so that they are as good as the elements.
template <class T> struct Element;
template <> struct Element<half_t> {
  using Sum = float;
  static constexpr int depth = 16, unroll = 16;
  static constexpr bool narrow = true;  // fewer exponents than float32 has
  FG_DEVICE static uint32_t pack(float low, float high) { return pack_f16(low, high); }
  FG_DEVICE static half_t round(float x) { return {uint16_t(pack_f16(x, 0.0f))}; }
};
template <> struct Element<bfloat_t> {
  using Sum = float;
  static constexpr int depth = 16, unroll = 16;
  static constexpr bool narrow = false;
  FG_DEVICE static uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  FG_DEVICE static bfloat_t round(float x) { return {uint16_t(pack_bf16(x, 0.0f))}; }
};
template <> struct Element<float> {
  using Sum = double;
  static constexpr int depth = 8, unroll = 1;
  static constexpr bool narrow = false;
  FG_DEVICE static float round(float x) { return x; }
};

// Values of up to 4 bytes as words, and back.
template <class T> FG_DEVICE uint32_t to_word(T value) {
  uint32_t word = 0;
  memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T> FG_DEVICE T from_word(uint32_t word) {
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}

// 16 bytes: what one copy moves.
template <class T> struct alignas(16) Chunk {
  static constexpr int size = 16 / sizeof(T);
  T element[size];
};

FG_CONSTEXPR int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FG_CONSTEXPR int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace fg
