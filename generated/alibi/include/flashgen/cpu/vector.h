// Layer 1 of the CPU primitives: vectors of W 32-bit lanes.
//
// Contract: every function here takes scalars, vectors, or a mixture (the scalar is broadcast), so that an
// expression prints the same way at every level: scalar for values of b, h, j and sizes; vector where the value
// depends on i, of which a vector holds W neighbours.
//   VecF, VecI, VecU   GCC vector extensions: + - * / and & | ^ ~ work as they stand, also with a scalar of the
//                      same element type.
//   VecB               a mask. A type of its own, because a comparison of plain vectors yields a VecI of 0 and -1
//                      and to_int(mask) must be told from to_int(integers). Made by lt, le, gt, ge, eq, ne;
//                      combined by &&, || and !, also with a scalar bool.
// Needs GCC >= 9 or Clang >= 12. No intrinsics but in `any` and `any_above`.
#pragma once
#include <cstdint>
#include <cstring>

#define FG_INLINE inline __attribute__((always_inline))

// For loops over an array of vectors: GCC unrolls them by itself, but too late to keep the array in registers
// throughout.
#if defined(__clang__)
#define FG_UNROLL
#define FG_UNROLL_BY_2 _Pragma("unroll 2")
#else
#define FG_UNROLL _Pragma("GCC unroll 16")
#define FG_UNROLL_BY_2 _Pragma("GCC unroll 2")
#endif

namespace fg {

// What stands for instructions that a machine lacks (images.h) wants vectors of 16 lanes: where there are none, compilers
// make them of narrower ones.
#if defined(__AVX512F__) || FLASHGEN_MATRIX_PRODUCTS == 2 || FLASHGEN_PAIR_PRODUCTS == 2
#define FG_LANES 16
#elif defined(__AVX__)
#define FG_LANES 8
#else
#define FG_LANES 4
#endif
constexpr int W = FG_LANES;

typedef float VecF __attribute__((vector_size(4 * W)));
typedef int32_t VecI __attribute__((vector_size(4 * W)));
typedef uint32_t VecU __attribute__((vector_size(4 * W)));

// A mask: lanes are -1 (true) or 0 (false).
struct VecB {
  VecI lanes;
};

// ---- kinds -------------------------------------------------------------------------------------------------------

template <class T> constexpr bool is_vector = false;
template <> constexpr bool is_vector<VecF> = true;
template <> constexpr bool is_vector<VecI> = true;
template <> constexpr bool is_vector<VecU> = true;
template <> constexpr bool is_vector<VecB> = true;

// The vector type of an element type.
template <class T> struct VectorOf { using type = T; };
template <> struct VectorOf<float> { using type = VecF; };
template <> struct VectorOf<int32_t> { using type = VecI; };
template <> struct VectorOf<uint32_t> { using type = VecU; };
template <> struct VectorOf<bool> { using type = VecB; };

template <bool condition> struct EnableIf {};
template <> struct EnableIf<true> { using type = int; };

// broadcast(x): x in all lanes; a vector stays as it is.
FG_INLINE VecF broadcast(float x) { return x - VecF{}; }  // x - 0 keeps -0, 0 + x would not
FG_INLINE VecI broadcast(int32_t x) { return x + VecI{}; }
FG_INLINE VecU broadcast(uint32_t x) { return x + VecU{}; }
FG_INLINE VecB broadcast(bool x) { return {broadcast(x ? -1 : 0)}; }
FG_INLINE VecF broadcast(VecF x) { return x; }
FG_INLINE VecI broadcast(VecI x) { return x; }
FG_INLINE VecU broadcast(VecU x) { return x; }
FG_INLINE VecB broadcast(VecB x) { return x; }

// Defines name(vector, scalar) and name(scalar, vector) by broadcasting. Stands after name(vector, vector).
#define FG_MIXED(name)                                                                                      \
  template <class A, class B, typename fg::EnableIf<fg::is_vector<A> != fg::is_vector<B>>::type = 0>        \
  FG_INLINE auto name(A a, B b) {                                                                           \
    return name(fg::broadcast(a), fg::broadcast(b));                                                        \
  }

// ---- memory ------------------------------------------------------------------------------------------------------

typedef float UnalignedVecF __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t UnalignedVecI __attribute__((vector_size(4 * W), aligned(4), may_alias));

// W elements from memory without any alignment.
FG_INLINE VecF load(const float* p) { return *reinterpret_cast<const UnalignedVecF*>(p); }
FG_INLINE VecI load(const int32_t* p) { return *reinterpret_cast<const UnalignedVecI*>(p); }
FG_INLINE void store(float* p, VecF x) { *reinterpret_cast<UnalignedVecF*>(p) = x; }
FG_INLINE void store(int32_t* p, VecI x) { *reinterpret_cast<UnalignedVecI*>(p) = x; }

// base[index] per lane. Every index must be valid: clamp first.
template <class T> FG_INLINE typename VectorOf<T>::type gather(const T* base, VecI index) {
  static_assert(sizeof(T) == 4, "gather is for 32-bit elements; see convert.h for the others");
  typename VectorOf<T>::type x{};
  for (int l = 0; l < W; ++l) x[l] = base[index[l]];
  return x;
}
template <class T> FG_INLINE T gather(const T* base, int64_t index) { return base[index]; }

// {0, 1, ..., W - 1}
FG_INLINE VecI iota() {
  VecI x{};
  for (int l = 0; l < W; ++l) x[l] = l;
  return x;
}

// Reinterpretation of the bits.
FG_INLINE VecI bits(VecF x) { return reinterpret_cast<VecI>(x); }
FG_INLINE VecF from_bits(VecI x) { return reinterpret_cast<VecF>(x); }

// ---- comparisons and masks ---------------------------------------------------------------------------------------

#define FG_COMPARISON(name, op)                                                                              \
  FG_INLINE bool name(float a, float b) { return a op b; }                                                   \
  FG_INLINE bool name(int32_t a, int32_t b) { return a op b; }                                               \
  FG_INLINE bool name(uint32_t a, uint32_t b) { return a op b; }                                             \
  FG_INLINE VecB name(VecF a, VecF b) { return {a op b}; }                                                   \
  FG_INLINE VecB name(VecI a, VecI b) { return {a op b}; }                                                   \
  FG_INLINE VecB name(VecU a, VecU b) { return {a op b}; }                                                   \
  FG_MIXED(name)

FG_COMPARISON(lt, <)
FG_COMPARISON(le, <=)
FG_COMPARISON(gt, >)
FG_COMPARISON(ge, >=)

// eq and ne also compare booleans.
FG_INLINE bool eq(bool a, bool b) { return a == b; }
FG_INLINE bool ne(bool a, bool b) { return a != b; }
FG_INLINE VecB eq(VecB a, VecB b) { return {~(a.lanes ^ b.lanes)}; }
FG_INLINE VecB ne(VecB a, VecB b) { return {a.lanes ^ b.lanes}; }
FG_COMPARISON(eq, ==)
FG_COMPARISON(ne, !=)
#undef FG_COMPARISON

// Both sides are evaluated, unlike those of the scalar operators; expressions have no side effects.
FG_INLINE VecB operator&&(VecB a, VecB b) { return {a.lanes & b.lanes}; }
FG_INLINE VecB operator&&(VecB a, bool b) { return a && broadcast(b); }
FG_INLINE VecB operator&&(bool a, VecB b) { return broadcast(a) && b; }
FG_INLINE VecB operator||(VecB a, VecB b) { return {a.lanes | b.lanes}; }
FG_INLINE VecB operator||(VecB a, bool b) { return a || broadcast(b); }
FG_INLINE VecB operator||(bool a, VecB b) { return broadcast(a) || b; }
FG_INLINE VecB operator!(VecB a) { return {~a.lanes}; }

FG_INLINE VecF select_lanes(VecB c, VecF a, VecF b) { return c.lanes ? a : b; }
FG_INLINE VecI select_lanes(VecB c, VecI a, VecI b) { return c.lanes ? a : b; }
FG_INLINE VecU select_lanes(VecB c, VecU a, VecU b) { return c.lanes ? a : b; }
FG_INLINE VecB select_lanes(VecB c, VecB a, VecB b) { return {(c.lanes & a.lanes) | (~c.lanes & b.lanes)}; }

// select(c, a, b): a where c holds, else b. Each of the three may be a scalar; a and b have one element type.
template <class A, class B> FG_INLINE auto select(VecB c, A a, B b) {
  return select_lanes(c, broadcast(a), broadcast(b));
}

// What arrives at something, of which a score has this derivative: nothing where it has none, even of a gradient that
// is no number.
FG_INLINE VecF chained(VecF gradient, VecF derivative) {
  return select(eq(derivative, 0.0f), 0.0f, gradient * derivative);
}
template <class A> FG_INLINE A select(bool c, A a, A b) { return c ? a : b; }
template <class A, class B, typename EnableIf<is_vector<A> != is_vector<B>>::type = 0>
FG_INLINE auto select(bool c, A a, B b) {
  return c ? broadcast(a) : broadcast(b);
}

// ---- across lanes, in a fixed order ------------------------------------------------------------------------------

template <class T, int n> struct LanesOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
};

// Folds the upper half onto the lower one until four lanes are left, then (0, 2) and (1, 3), then those two.
template <class T, int n, class Vec, class Fold> FG_INLINE T fold_lanes(Vec x, Fold fold) {
  if constexpr (n == 4) {
    return fold(fold(x[0], x[2]), fold(x[1], x[3]));
  } else {
    typename LanesOf<T, n / 2>::type halves[2];
    static_assert(sizeof(halves) == sizeof(x), "two halves make a vector");
    std::memcpy(halves, &x, sizeof(x));
    return fold_lanes<T, n / 2>(fold(halves[0], halves[1]), fold);
  }
}
struct FoldSum {
  template <class T> FG_INLINE T operator()(T a, T b) const { return a + b; }
};
struct FoldMax {  // a != a: NaN propagates
  template <class T> FG_INLINE T operator()(T a, T b) const { return ((a > b) | (a != a)) ? a : b; }
};
struct FoldMin {
  template <class T> FG_INLINE T operator()(T a, T b) const { return ((a < b) | (a != a)) ? a : b; }
};
struct FoldOr {
  template <class T> FG_INLINE T operator()(T a, T b) const { return a | b; }
};
FG_INLINE float horizontal_sum(VecF x) { return fold_lanes<float, W>(x, FoldSum()); }
FG_INLINE float horizontal_max(VecF x) { return fold_lanes<float, W>(x, FoldMax()); }
FG_INLINE float horizontal_min(VecF x) { return fold_lanes<float, W>(x, FoldMin()); }
FG_INLINE int32_t horizontal_sum(VecI x) { return fold_lanes<int32_t, W>(x, FoldSum()); }
FG_INLINE int32_t horizontal_max(VecI x) { return fold_lanes<int32_t, W>(x, FoldMax()); }
FG_INLINE int32_t horizontal_min(VecI x) { return fold_lanes<int32_t, W>(x, FoldMin()); }
FG_INLINE bool any(VecB x) {
#if defined(__AVX__) && FG_LANES == 8
  return __builtin_ia32_movmskps256(reinterpret_cast<VecF>(x.lanes)) != 0;  // two instructions instead of ten
#elif defined(__AVX512F__) && FG_LANES == 16
  return __builtin_ia32_cmpd512_mask(x.lanes, VecI{}, 4, 0xffff) != 0;  // not equal; three instead of a dozen
#else
  return fold_lanes<int32_t, W>(x.lanes, FoldOr()) != 0;
#endif
}
FG_INLINE bool all(VecB x) { return !any(!x); }
FG_INLINE bool any(bool x) { return x; }
FG_INLINE bool all(bool x) { return x; }
// any(gt(x, limit)), where a loop asks for every vector: on AVX-512 GCC makes a vector of a VecB, and four instructions
// of two.
FG_INLINE bool any_above(VecF x, float limit) {
#if defined(__AVX512F__)
  return __builtin_ia32_cmpps512_mask(x, broadcast(limit), 30, 0xffff, 4) != 0;  // greater, quiet; as MXCSR rounds
#else
  return any(gt(x, limit));
#endif
}

// Lanes of a, then of b, by their numbers.
#if defined(__clang__) || __GNUC__ >= 12
#define FG_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FG_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VecI{__VA_ARGS__})
#endif

// One lane further: lane 0 is the last of `before`.
FG_INLINE VecF shifted_in(VecF x, VecF before) {
#if FG_LANES == 16
  return FG_SHUFFLE(before, x, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30);
#elif FG_LANES == 8
  return FG_SHUFFLE(before, x, 7, 8, 9, 10, 11, 12, 13, 14);
#else
  return FG_SHUFFLE(before, x, 3, 4, 5, 6);
#endif
}

}  // namespace fg
