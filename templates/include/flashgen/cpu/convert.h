// Layer 2 of the CPU primitives: storage types to and from the float32 (or int32, bool) that is computed with.
//
// Contract: element types f32 (float), f16, bf16, f8e4m3 (read alone), i32 (int32_t), i64 (int64_t, narrowed modulo 2^32), bool. Conversions
// to f16 and bf16 round to nearest even; NaN, infinities and subnormals are right. Vectors of integer operations, no
// half-precision hardware and no denormal arithmetic; one intrinsic, in `widened`.
#pragma once
#include "flashgen/cpu/vector.h"

namespace fg {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct f8e4m3 {
  uint8_t bits;
};

// ---- 16-bit floats, in the low halves of the lanes ---------------------------------------------------------------

FG_INLINE VecF float_of(VecI lanes, bf16) { return from_bits(lanes << 16); }
FG_INLINE VecI lanes_of(VecF x, bf16) {
  const VecI u = bits(x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return select(VecB{x != x}, 0x7fc0, rounded);
}

constexpr int32_t rebase = (127 - 15) << 23;  // the difference of the exponents' biases
FG_INLINE VecF float_of(VecI lanes, f16) {
  const VecI magnitude = (lanes & 0x7fff) << 13, regular = magnitude + rebase;
  // A subnormal gets an implicit 1, which is then subtracted; infinity and NaN have the largest exponent in both.
  const VecI subnormal = bits(from_bits(regular + (1 << 23)) - 0x1p-14f);
  const VecI finite = select(lt(magnitude, 1 << 23), subnormal, regular);
  const VecI result = select(ge(magnitude, 31 << 23), regular + rebase, finite);
  return from_bits(result | (lanes & 0x8000) << 16);
}
FG_INLINE VecI lanes_of(VecF x, f16) {
  const VecI magnitude = bits(x) & INT32_MAX;
  // Below 2^-14 adding 1/2 leaves the rounded result in the low bits.
  const VecI subnormal = bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
  const VecI regular = (magnitude - rebase + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const VecI finite = select(lt(magnitude, (127 - 14) << 23), subnormal, regular);
  const VecI special = select(gt(magnitude, 0x7f800000), 0x7e00, 0x7c00);
  return select(ge(magnitude, (127 + 16) << 23), special, finite) | ((bits(x) >> 16) & 0x8000);
}

// ---- 8-bit floats: four bits of exponent, no infinities ----------------------------------------------------------

FG_INLINE VecF float_of(VecI lanes, f8e4m3) {
  const VecI magnitude = (lanes & 0x7f) << 20, regular = magnitude + ((127 - 7) << 23);
  const VecI subnormal = bits(from_bits(regular + (1 << 23)) - 0x1p-6f);
  const VecI finite = select(lt(magnitude, 1 << 23), subnormal, regular);
  return from_bits(select(ge(magnitude, 0x7f << 20), 0x7fc00000, finite) | (lanes & 0x80) << 24);
}

// ---- loads and stores of W elements ------------------------------------------------------------------------------

typedef uint16_t Words __attribute__((vector_size(2 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

// Words without a sign as lanes. GCC 12 does it by halves that it joins: four instructions, where AVX2 has one.
FG_INLINE VecI widened(Words x) {
#if FG_LANES == 8 && defined(__AVX2__) && !defined(__clang__)
  typedef short Signed __attribute__((vector_size(16)));
  return reinterpret_cast<VecI>(__builtin_ia32_pmovzxwd256(reinterpret_cast<Signed>(x)));
#else
  return __builtin_convertvector(x, VecI);
#endif
}

FG_INLINE VecF load_elements(const float* p) { return load(p); }
FG_INLINE VecI load_elements(const int32_t* p) { return load(p); }
FG_INLINE VecI load_elements(const int64_t* p) {
  VecI x{};
  for (int l = 0; l < W; ++l) x[l] = static_cast<int32_t>(p[l]);
  return x;
}
FG_INLINE VecB load_elements(const bool* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof(x));
  return ne(widened(__builtin_convertvector(x, Words)), 0);
}
FG_INLINE VecF load_elements(const f8e4m3* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof(x));
  return float_of(widened(__builtin_convertvector(x, Words)), f8e4m3());
}
template <class Half> FG_INLINE VecF load_elements(const Half* p) {
  Words x;
  std::memcpy(&x, p, sizeof(x));
  return float_of(widened(x), Half());
}
FG_INLINE void store_elements(float* p, VecF x) { store(p, x); }
template <class Half> FG_INLINE void store_elements(Half* p, VecF x) {
  const Words words = __builtin_convertvector(lanes_of(x, Half()), Words);
  std::memcpy(p, &words, sizeof(words));
}

// The first n < W elements; the other lanes are zero, and memory beyond is not touched.
template <class T> FG_INLINE auto load_elements(const T* p, int n) {
  T padded[W] = {};
  std::memcpy(padded, p, sizeof(T) * static_cast<size_t>(n));
  return load_elements(padded);
}
template <class T> FG_INLINE void store_elements(T* p, VecF x, int n) {
  T padded[W];
  store_elements(padded, x);
  std::memcpy(p, padded, sizeof(T) * static_cast<size_t>(n));
}

// ---- rows --------------------------------------------------------------------------------------------------------

// n elements to float32, and back.
template <class T> inline void to_float(float* dst, const T* src, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(dst + k, load_elements(src + k));
  if (k < n) store_elements(dst + k, load_elements(src + k, int(n - k)), int(n - k));
}
// n elements to float32, each times a factor.
template <class T> inline void to_float_times(float* dst, const T* src, int64_t n, float factor) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store(dst + k, load_elements(src + k) * factor);
  if (k < n) store_elements(dst + k, load_elements(src + k, int(n - k)) * factor, int(n - k));
}
template <class T> inline void from_float(T* dst, const float* src, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store_elements(dst + k, load(src + k));
  if (k < n) store_elements(dst + k, load_elements(src + k, int(n - k)), int(n - k));
}

// ---- elements of captured tensors --------------------------------------------------------------------------------

// tensor[index] for a scalar index.
FG_INLINE float element(const float* tensor, int64_t index) { return tensor[index]; }
FG_INLINE int32_t element(const int32_t* tensor, int64_t index) { return tensor[index]; }
FG_INLINE int32_t element(const int64_t* tensor, int64_t index) { return static_cast<int32_t>(tensor[index]); }
FG_INLINE bool element(const bool* tensor, int64_t index) { return tensor[index]; }
template <class Half> FG_INLINE float element(const Half* tensor, int64_t index) {
  return float_of(broadcast(int32_t{tensor[index].bits}), Half())[0];
}

// tensor[index * stride] per lane; the products are 64-bit. Every index must be valid: clamp first.
template <class T> FG_INLINE auto element(const T* tensor, VecI index, int64_t stride = 1) {
  T gathered[W];
  for (int l = 0; l < W; ++l) gathered[l] = tensor[index[l] * stride];
  return load_elements(gathered);
}
FG_INLINE VecF element(const float* tensor, VecI index) { return gather(tensor, index); }
FG_INLINE VecI element(const int32_t* tensor, VecI index) { return gather(tensor, index); }

// The W neighbours from tensor[index] on, of which only the first n exist.
template <class T> FG_INLINE auto elements(const T* tensor, int64_t index) { return load_elements(tensor + index); }
template <class T> FG_INLINE auto elements(const T* tensor, int64_t index, int n) {
  return n >= W ? load_elements(tensor + index) : load_elements(tensor + index, n);
}

}  // namespace fg
