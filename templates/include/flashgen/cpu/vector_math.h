// Layer 2 of the CPU primitives: every operator and function of the language, for scalars and vectors.
//
// Contract: names and meanings are those of LANGUAGE.md section 3; binary functions also take mixtures. What has no
// function here is a plain C++ operator: + - * and real /, unary -, bitwise & | ^ of integers. Integers wrap (build
// with -fwrapv). A float function of a scalar is lane 0 of the vector function, so that all levels agree, but for what
// the compiler fuses into multiply-adds.
// Accuracy in units in the last place, over the whole range: 1 for exp, exp2, log, log1p, pow; 1.6 for log2, erf, sin,
// cos, softplus; 1.8 for atan; 2.5 for tanh, sigmoid, exp2_bounded; 3 for silu; 5 for gelu. Subnormal results are right
// unless said.
// NaN propagates, infinities and signed zeros behave as in C. tests/cpu_primitives holds all of this.
// Needs -fno-math-errno -fno-trapping-math, must not be built with -ffast-math. On AVX-512 machines GCC needs
// -mprefer-vector-width=512 to keep what is a loop over lanes (floor, sqrt, sin, pow, division) in one piece.
#pragma once
#include "flashgen/cpu/vector.h"

namespace fg {

// name(float) as lane 0 of name(VecF).
#define FG_SCALAR_BY_VECTOR(name) \
  FG_INLINE float name(float x) { return name(broadcast(x))[0]; }
// name(float, float) as lane 0 of name(VecF, VecF), with the mixtures.
#define FG_SCALAR_BY_VECTOR_2(name)                                                               \
  FG_INLINE float name(float a, float b) { return name(broadcast(a), broadcast(b))[0]; }          \
  FG_MIXED(name)
// name of each lane by a scalar expression of x; -O3 turns the loop into one instruction.
#define FG_EACH_LANE(name, expression)                    \
  FG_INLINE float name(float x) { return expression; }    \
  FG_INLINE VecF name(VecF v) {                           \
    for (int l = 0; l < W; ++l) {                         \
      const float x = v[l];                               \
      v[l] = expression;                                  \
    }                                                     \
    return v;                                             \
  }

constexpr float infinity = __builtin_inff();
constexpr float not_a_number = __builtin_nanf("");

// ---- conversions -------------------------------------------------------------------------------------------------

FG_INLINE float to_float(float x) { return x; }
FG_INLINE float to_float(int32_t x) { return static_cast<float>(x); }
FG_INLINE float to_float(bool x) { return x ? 1.0f : 0.0f; }
FG_INLINE VecF to_float(VecF x) { return x; }
FG_INLINE VecF to_float(VecI x) { return __builtin_convertvector(x, VecF); }
FG_INLINE VecF to_float(VecB x) { return from_bits(x.lanes & 0x3f800000); }  // the bits of 1.0f

// Truncates toward zero; saturates; NaN gives 0.
FG_INLINE VecI to_int(VecF x) {
  const VecB too_large = ge(x, 0x1p31f), too_small = lt(x, -0x1p31f);
  const VecB bad = too_large || too_small || VecB{x != x};
  const VecI inside = __builtin_convertvector(select(bad, 0.0f, x), VecI);
  return select(too_large, INT32_MAX, select(too_small, INT32_MIN, inside));
}
FG_INLINE int32_t to_int(float x) {
  return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : x != x ? 0 : static_cast<int32_t>(x);
}
FG_INLINE int32_t to_int(int32_t x) { return x; }
FG_INLINE int32_t to_int(bool x) { return x; }
FG_INLINE VecI to_int(VecI x) { return x; }
FG_INLINE VecI to_int(VecB x) { return -x.lanes; }

FG_INLINE bool to_bool(bool x) { return x; }
FG_INLINE bool to_bool(int32_t x) { return x != 0; }
FG_INLINE bool to_bool(float x) { return x != 0; }
FG_INLINE VecB to_bool(VecB x) { return x; }
FG_INLINE VecB to_bool(VecI x) { return {x != 0}; }
FG_INLINE VecB to_bool(VecF x) { return {x != 0.0f}; }

// ---- building blocks ---------------------------------------------------------------------------------------------

// Horner's scheme: c0 + x (c1 + x (c2 + ...)).
FG_INLINE VecF polynomial(VecF, float c) { return broadcast(c); }
template <class... Rest> FG_INLINE VecF polynomial(VecF x, float c, Rest... rest) {
  return polynomial(x, rest...) * x + c;
}

// Adding this to |x| < 2^22 rounds x to the nearest integer n (half to even) and leaves n + 127 in the low bits:
// shifted up, these are the bits of 2^n.
constexpr float round_shift = 0x1.8p23f + 127;
// 2^n for n in [-126, 127] from n + round_shift.
FG_INLINE VecF power_of_two(VecF shifted) { return from_bits(bits(shifted) << 23); }
// p 2^n for n in [-252, 254] from n + round_shift, in two steps: right for subnormal results and overflow.
FG_INLINE VecF scale_by_power(VecF p, VecF shifted) {
  const VecI n = bits(shifted) - bits(broadcast(round_shift)), half = n >> 1;
  return p * from_bits((half + 127) << 23) * from_bits((n - half + 127) << 23);
}

FG_INLINE VecF copy_sign(VecF magnitude, VecF sign) {
  return from_bits((bits(magnitude) & INT32_MAX) | (bits(sign) & INT32_MIN));
}

// Doubles, where float is not enough: a vector of W floats or ints as two halves.
typedef double VecD __attribute__((vector_size(4 * W)));
typedef int64_t VecL __attribute__((vector_size(4 * W)));
struct TwoVecD {
  VecD half[2];
};
template <class Vec> FG_INLINE TwoVecD to_double(Vec x) {
  TwoVecD y;
  for (int l = 0; l < W; ++l) y.half[l / (W / 2)][l % (W / 2)] = x[l];
  return y;
}
FG_INLINE VecF to_float(TwoVecD x) {
  VecF y{};
  for (int l = 0; l < W; ++l) y[l] = static_cast<float>(x.half[l / (W / 2)][l % (W / 2)]);
  return y;
}
FG_INLINE VecI to_int(TwoVecD x) {  // each value must fit
  VecI y{};
  for (int l = 0; l < W; ++l) y[l] = static_cast<int32_t>(x.half[l / (W / 2)][l % (W / 2)]);
  return y;
}

// ---- integers ----------------------------------------------------------------------------------------------------

FG_INLINE int32_t floor_div(int32_t a, int32_t b) {
  if (b == 0) return 0;
  if (b == -1) return -a;  // INT_MIN / -1 wraps
  const int32_t q = a / b;
  return q - (a % b != 0 && (a ^ b) < 0);
}
FG_INLINE int32_t floor_mod(int32_t a, int32_t b) { return b == 0 ? 0 : a - floor_div(a, b) * b; }

// Rounds toward minus infinity; a divisor of 0 gives 0. The quotient of two int32 is never so near an integer that its
// double could be rounded onto it.
FG_INLINE VecI floor_div(VecI a, VecI b) {
  const VecB special = eq(b, 0) || eq(b, -1);
  const TwoVecD x = to_double(a), y = to_double(select(special, 1, b));
  TwoVecD q;
  for (int l = 0; l < W; ++l) {
    const int h = l / (W / 2), m = l % (W / 2);
    q.half[h][m] = __builtin_floor(x.half[h][m] / y.half[h][m]);
  }
  return select(special, a * b, to_int(q));  // a * 0 and a * -1 are what the special divisors ask for
}
// One divisor for all lanes: a shift where it is a known power of two, else by its reciprocal. Half a unit keeps exact
// multiples clear of the rounding of the product.
FG_INLINE VecI floor_div(VecI a, int32_t b) {
  if (__builtin_constant_p(b) && b > 0 && (b & (b - 1)) == 0) return a >> __builtin_ctz(b);
  if (b == 0 || b == -1) return a * b;
  const double reciprocal = 1.0 / b, nudge = b < 0 ? -0.5 : 0.5;
  VecI q{};
  for (int l = 0; l < W; ++l) q[l] = static_cast<int32_t>(__builtin_floor((a[l] + nudge) * reciprocal));
  return q;
}
FG_INLINE VecI floor_div(int32_t a, VecI b) { return floor_div(broadcast(a), b); }
FG_INLINE VecI floor_mod(VecI a, int32_t b) {
  if (__builtin_constant_p(b) && b > 0 && (b & (b - 1)) == 0) return a & (b - 1);
  return b == 0 ? VecI{} : a - floor_div(a, b) * b;
}
FG_INLINE VecI floor_mod(VecI a, VecI b) { return select(eq(b, 0), 0, a - floor_div(a, b) * b); }
FG_INLINE VecI floor_mod(int32_t a, VecI b) { return floor_mod(broadcast(a), b); }

// a / b rounded toward plus infinity.
template <class A, class B> FG_INLINE auto ceildiv(A a, B b) { return -floor_div(-a, b); }

// Counts outside 0..31 shift everything out.
FG_INLINE int32_t shift_left(int32_t a, int32_t n) { return n < 0 || n > 31 ? 0 : a << n; }
FG_INLINE int32_t shift_right(int32_t a, int32_t n) { return a >> (n < 0 || n > 31 ? 31 : n); }
FG_INLINE VecB is_shift(VecI n) { return {reinterpret_cast<VecU>(n) < 32u}; }
FG_INLINE VecI shift_left(VecI a, VecI n) { return select(is_shift(n), a << (n & 31), 0); }
FG_INLINE VecI shift_right(VecI a, VecI n) { return a >> select(is_shift(n), n, 31); }
FG_MIXED(shift_left)
FG_MIXED(shift_right)

// base ** exponent, wrapping; a negative exponent gives 0, except for the bases 1 and -1.
FG_INLINE int32_t ipow(int32_t base, int32_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
  int32_t result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}
FG_INLINE VecI ipow(VecI base, VecI exponent) {
  const VecB unit = eq(base, 1) || eq(base, -1), negative = lt(exponent, 0);
  VecI left = select(negative, exponent & 1, exponent), result = broadcast(1), power = base;
  while (any(ne(left, 0))) {
    result = select(ne(left & 1, 0), result * power, result);
    power *= power;
    left >>= 1;
  }
  return select(negative && !unit, 0, result);
}
FG_MIXED(ipow)

FG_INLINE int32_t popcount(int32_t x) { return __builtin_popcount(static_cast<uint32_t>(x)); }
FG_INLINE VecI popcount(VecI v) {
  VecU x = reinterpret_cast<VecU>(v);
  x = x - ((x >> 1) & 0x55555555u);
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return reinterpret_cast<VecI>((x * 0x01010101u) >> 24);
}

// The language's hash: the same constants stand in the Python mirror.
template <class U> FG_INLINE U hash_step(U h, U x) {
  h ^= x;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h;
}
FG_INLINE int32_t hash_rest(uint32_t h) { return static_cast<int32_t>(h & 0x7fffffffu); }
FG_INLINE VecI hash_rest(VecU h) { return reinterpret_cast<VecI>(h & 0x7fffffffu); }
template <class... Rest> FG_INLINE auto hash_rest(VecU h, int32_t x, Rest... rest);
template <class... Rest> FG_INLINE auto hash_rest(VecU h, VecI x, Rest... rest) {
  return hash_rest(hash_step(h, reinterpret_cast<VecU>(x)), rest...);
}
template <class... Rest> FG_INLINE auto hash_rest(VecU h, int32_t x, Rest... rest) {
  return hash_rest(hash_step(h, broadcast(static_cast<uint32_t>(x))), rest...);
}
template <class... Rest> FG_INLINE auto hash_rest(uint32_t h, VecI x, Rest... rest) {
  return hash_rest(broadcast(h), x, rest...);
}
template <class... Rest> FG_INLINE auto hash_rest(uint32_t h, int32_t x, Rest... rest) {
  return hash_rest(hash_step(h, static_cast<uint32_t>(x)), rest...);
}
// A non-negative int that depends on all arguments and their order; scalars first are the cheapest.
template <class... Ints> FG_INLINE auto hash(Ints... x) { return hash_rest(0x9E3779B9u, x...); }

// ---- order, sign, rounding ---------------------------------------------------------------------------------------

FG_INLINE int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
FG_INLINE int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }
FG_INLINE VecI min(VecI a, VecI b) { return a < b ? a : b; }
FG_INLINE VecI max(VecI a, VecI b) { return a > b ? a : b; }
// NaN in either argument propagates.
FG_INLINE float min(float a, float b) { return a < b || a != a ? a : b; }
FG_INLINE float max(float a, float b) { return a > b || a != a ? a : b; }
FG_INLINE VecF min(VecF a, VecF b) { return select(lt(a, b) || VecB{a != a}, a, b); }
FG_INLINE VecF max(VecF a, VecF b) { return select(gt(a, b) || VecB{a != a}, a, b); }
FG_MIXED(min)
FG_MIXED(max)
// The row maximum of the softmax, one operation less than max: NaN in x is ignored, and comes out through the row sum.
FG_INLINE VecF running_max(VecF kept, VecF x) { return select(gt(x, kept), x, kept); }

template <class A, class B, class C> FG_INLINE auto clamp(A x, B low, C high) { return min(max(x, low), high); }

FG_INLINE float abs(float x) { return __builtin_fabsf(x); }
FG_INLINE int32_t abs(int32_t x) { return x < 0 ? -x : x; }
FG_INLINE VecF abs(VecF x) { return from_bits(bits(x) & INT32_MAX); }
FG_INLINE VecI abs(VecI x) { return x < 0 ? -x : x; }

// -1, 0 or 1; of NaN 0, as in PyTorch.
FG_INLINE float sign(float x) { return to_float(x > 0) - to_float(x < 0); }
FG_INLINE int32_t sign(int32_t x) { return (x > 0) - (x < 0); }
FG_INLINE VecF sign(VecF x) { return to_float(gt(x, 0.0f)) - to_float(lt(x, 0.0f)); }
FG_INLINE VecI sign(VecI x) { return (x < 0) - (x > 0); }

FG_EACH_LANE(floor, __builtin_floorf(x))
FG_EACH_LANE(ceil, __builtin_ceilf(x))
FG_EACH_LANE(round, __builtin_rintf(x))  // half to even
FG_EACH_LANE(sqrt, __builtin_sqrtf(x))
FG_INLINE float rsqrt(float x) { return 1.0f / sqrt(x); }
FG_INLINE VecF rsqrt(VecF x) { return 1.0f / sqrt(x); }

FG_INLINE float relu(float x) { return x <= 0 ? 0.0f : x; }
FG_INLINE VecF relu(VecF x) { return select(le(x, 0.0f), 0.0f, x); }

// Python's // and % of floats, by lanes: they are rare and need the exact remainder.
inline float floor_mod(float a, float b) {
  const float r = __builtin_fmodf(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
inline float floor_div(float a, float b) {
  if (b == 0) return a / b;
  const float r = __builtin_fmodf(a, b);
  float q = (a - r) / b;
  if (r != 0 && (r < 0) != (b < 0)) q -= 1;
  if (q == 0) return __builtin_copysignf(0.0f, a / b);
  const float whole = __builtin_floorf(q);
  return q - whole > 0.5f ? whole + 1 : whole;
}
inline VecF floor_mod(VecF a, VecF b) {
  for (int l = 0; l < W; ++l) a[l] = floor_mod(float(a[l]), float(b[l]));
  return a;
}
inline VecF floor_div(VecF a, VecF b) {
  for (int l = 0; l < W; ++l) a[l] = floor_div(float(a[l]), float(b[l]));
  return a;
}
FG_INLINE VecF floor_mod(VecF a, float b) { return floor_mod(a, broadcast(b)); }
FG_INLINE VecF floor_mod(float a, VecF b) { return floor_mod(broadcast(a), b); }
FG_INLINE VecF floor_div(VecF a, float b) { return floor_div(a, broadcast(b)); }
FG_INLINE VecF floor_div(float a, VecF b) { return floor_div(broadcast(a), b); }

// x, rounded: a product in it does not become part of a sum or difference that it goes into.
FG_INLINE VecF settled(VecF x) {
#if defined(__AVX512F__) || (defined(__AVX__) && FG_LANES <= 8) || (defined(__SSE__) && FG_LANES <= 4)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__) && FG_LANES <= 4
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));  // more than a register holds
#endif
  return x;
}

// ---- exponentials ------------------------------------------------------------------------------------------------

// 2^x for -126 <= x < 127.5 or NaN, in the fewest instructions (nine); 2^0 is exactly 1. x = n + r with |r| <= 1/2.
FG_INLINE VecF exp2_normal(VecF x) {
  const VecF shifted = x + round_shift;
  const VecF r = x - (shifted - round_shift);
  const VecF p = polynomial(r, 1.0f, 0x1.62e42ap-1f, 0x1.ebf9c2p-3f, 0x1.c6b6d8p-5f, 0x1.3ce8aep-7f, 0x1.5bda5cp-10f);
  return p * power_of_two(shifted);
}
// 2^x for x < 127.5 or NaN: the softmax's exponential. Results below the normal range, 2^-126, are 0.
FG_INLINE VecF exp2_bounded(VecF x) { return select(lt(x, -126.0f), 0.0f, exp2_normal(x)); }

// 2^x everywhere.
FG_INLINE VecF exp2(VecF x) {
  const VecF inside = select(gt(x, 129.0f), 129.0f, select(lt(x, -151.0f), -151.0f, x));
  const VecF shifted = inside + round_shift;
  const VecF r = inside - (shifted - round_shift);
  const VecF p = polynomial(r, 1.0f, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7cp-5f, 0x1.3b2de0p-7f, 0x1.5f0838p-10f,
                            0x1.416b80p-13f);
  return scale_by_power(p, shifted);
}

// e^r for |r| <= ln(2)/2 and a bit.
FG_INLINE VecF exp_polynomial(VecF r) {
  return polynomial(r, 1.0f, 1.0f, 0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b0p-5f, 0x1.12398ep-7f, 0x1.6a4d60p-10f);
}
constexpr float log2_e = 0x1.715476p+0f;
// ln 2 in two parts, the first short enough that its product with the exponent of a float is exact.
constexpr float ln2_high = 0x1.62e400p-1f, ln2_low = 0x1.7f7d1cp-20f;

// e^x for x < 88 or NaN; results below the normal range are 0.
FG_INLINE VecF exp_bounded(VecF x) {
  const VecF shifted = x * log2_e + round_shift;
  const VecF n = shifted - round_shift;
  const VecF r = (x - n * ln2_high) - n * ln2_low;
  return select(lt(x, -0x1.5d589ep+6f), 0.0f, exp_polynomial(r) * power_of_two(shifted));
}
// e^x everywhere; exp_sum is e^(x + small), |small| < 0.1.
FG_INLINE VecF exp_sum(VecF x, VecF small) {
  const VecF inside = select(gt(x, 89.0f), 89.0f, select(lt(x, -105.0f), -105.0f, x));
  const VecF shifted = inside * log2_e + round_shift;
  const VecF n = shifted - round_shift;
  const VecF r = (inside - n * ln2_high) - n * ln2_low + small;
  return scale_by_power(exp_polynomial(r), shifted);
}
FG_INLINE VecF exp(VecF x) { return exp_sum(x, -VecF{}); }  // adding -0 costs nothing

// ---- logarithms --------------------------------------------------------------------------------------------------

// x = 2^exponent (1 + fraction) with 1 + fraction in [sqrt(1/2), sqrt(2)), for x > 0 and finite.
struct Logarithm {
  VecF exponent, fraction;
};
FG_INLINE Logarithm split_logarithm(VecF x) {
  const VecB subnormal = lt(x, 0x1p-126f);
  const VecI centre = broadcast(0x3f3504f3);  // the bits of sqrt(1/2)
  const VecI shifted = bits(select(subnormal, x * 0x1p23f, x)) - centre;
  const VecI exponent = (shifted >> 23) - select(subnormal, 23, 0);
  return {to_float(exponent), from_bits((shifted & 0x007fffff) + centre) - 1.0f};
}
// log(1 + f) - f for f = fraction.
FG_INLINE VecF log_remainder(VecF f) {
  const VecF p = polynomial(f, 0x1.555554p-2f, -0x1.000228p-2f, 0x1.99a028p-3f, -0x1.54720cp-3f, 0x1.22d792p-3f,
                            -0x1.0d854cp-3f, 0x1.056c24p-3f, -0x1.38dc48p-4f);
  const VecF square = f * f;
  return square * (f * p - 0.5f);
}
// The logarithm of 0, of negative numbers, of infinity and of NaN; `regular` otherwise.
FG_INLINE VecF log_special(VecF x, VecF regular) {
  const VecF outside = select(eq(x, 0.0f), -infinity, select(gt(x, 0.0f), infinity, not_a_number));
  return select(gt(x, 0.0f) && lt(x, infinity), regular, outside);
}

FG_INLINE VecF log(VecF x) {
  const Logarithm l = split_logarithm(x);
  return log_special(x, (log_remainder(l.fraction) + l.exponent * ln2_low) + l.fraction + l.exponent * ln2_high);
}
FG_INLINE VecF log2(VecF x) {
  const Logarithm l = split_logarithm(x);
  const VecF rest = log_remainder(l.fraction);
  // log2(e) = 1 + 0.4427: the two exact parts last.
  constexpr float log2_e_less_1 = 0x1.c551d9p-2f;
  return log_special(x, (rest * log2_e_less_1 + l.fraction * log2_e_less_1 + rest) + l.fraction + l.exponent);
}
// log(u + lost) where u is a sum that rounding made `lost` smaller, u > 0 and finite.
FG_INLINE VecF log1p_inside(VecF u, VecF lost) {
  const Logarithm l = split_logarithm(u);
  return (log_remainder(l.fraction) + (l.exponent * ln2_low + lost / u)) + l.fraction + l.exponent * ln2_high;
}
FG_INLINE VecF log1p(VecF x) {
  const VecF u = 1.0f + x;
  const VecF lost = select(lt(x, 1.0f), x - (u - 1.0f), 1.0f - (u - x));
  return select(lt(abs(x), 0x1p-12f), x - 0.5f * x * x, log_special(u, log1p_inside(u, lost)));
}

// ---- sigmoids ----------------------------------------------------------------------------------------------------

// 1 / (1 + e^-x), by e^-|x| so that nothing overflows; below the normal range 0, and with it silu there.
FG_INLINE VecF sigmoid(VecF x) {
  const VecF e = exp_bounded(-abs(x));
  return select(lt(x, 0.0f), e, 1.0f) / (1.0f + e);
}
FG_INLINE VecF silu(VecF x) { return x * sigmoid(x); }

// h / (h + 1) with h = (e^(2|x|) - 1) / 2, which keeps its relative accuracy near 0, so that one form serves
// everywhere: |x| = n ln(2)/2 + y, and h is 2^n times (e^(2y) - 1) / 2, a polynomial of y, plus (2^n - 1) / 2. Beyond
// 10 it is 1. A `const` function of its own, so that compilers see that tanh of one x, in a score and in its
// derivative, is one value.
__attribute__((noinline, const)) inline VecF tanh_everywhere(VecF x) {
  const VecF a = select(gt(abs(x), 10.0f), 10.0f, abs(x));
  const VecF shifted = a * (2 * log2_e) + round_shift, n = shifted - round_shift;
  const VecF y = a - n * 0x1.62e430p-2f;
  const VecF inner = y + y * y * polynomial(y, 1.0f, 0x1.5554a2p-1f, 0x1.55561ep-2f, 0x1.123016p-3f, 0x1.6bdb08p-5f);
  const VecF power = power_of_two(shifted);
  const VecF h = power * inner + (0.5f * power - 0.5f);
  return from_bits(bits(h / (h + 1.0f)) | (bits(x) & INT32_MIN));
}
// Caps are far above most scores: for |x| <= 1 in all lanes a polynomial does, with a third of the instructions.
FG_INLINE VecF tanh(VecF x) {
  const VecF square = x * x;
  VecF y = x * polynomial(square, 1.0f, -0x1.55546cp-2f, 0x1.10ecbcp-3f, -0x1.b64256p-5f, 0x1.4d906ep-6f,
                          -0x1.9a2bf0p-8f, 0x1.155bb0p-10f);
  if (__builtin_expect(any_above(square, 1.0f), false)) y = tanh_everywhere(x);
  return y;
}

// log(1 + e^x), with e = e^-|x|
FG_INLINE VecF softplus(VecF x) {
  const VecF e = exp(-abs(x)), u = 1.0f + e;
  return relu(x) + log1p_inside(u, e - (u - 1.0f));
}

// ---- the normal distribution -------------------------------------------------------------------------------------

FG_INLINE VecF erf(VecF x) {
  const VecF a = abs(x), z = x * x;
  const VecF near = x + x * polynomial(z, 0x1.06eba8p-3f, -0x1.81273ep-2f, 0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
                                       0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fcp-14f);
  const VecF b = select(gt(a, 4.0f), 4.0f, a);
  const VecF exponent = b * polynomial(b, 0x1.a0d7fap+0f, 0x1.d5292ep-1f, 0x1.39e426p-3f, -0x1.18d4f0p-5f,
                                       0x1.586218p-8f, -0x1.e84e60p-12f, 0x1.0fce0ap-16f);
  return select(lt(a, 0.96f), near, copy_sign(1.0f - exp2_bounded(-exponent), x));
}

// x Phi(x). The tail Phi(-a) = exp(-a^2/2) M(a), with (a + 4) M(a) a polynomial of (a - 4) / (a + 4), keeps its
// relative accuracy; the square is split so that the exponential sees it exactly. Near 0, Phi is 1/2 and a polynomial.
FG_INLINE VecF gelu(VecF x) {
  const VecF a = select(gt(abs(x), 14.5f), 14.5f, abs(x));
  const VecF high = from_bits(bits(a) & ~0xfff);
  const VecF e = exp_sum(-0.5f * high * high, -0.5f * (a - high) * (a + high));
  const VecF u = 1.0f / (a + 4.0f);
  const VecF m = u * polynomial((a - 4.0f) * u, 0x1.82b4bcp-1f, -0x1.373e3cp-1f, 0x1.8c6d84p-2f, -0x1.7dfed8p-3f,
                                0x1.eedacep-5f, -0x1.edddfap-8f, -0x1.ce2a88p-9f, 0x1.9ed742p-10f, 0x1.a4afaep-13f,
                                -0x1.073846p-13f);
  const VecF tail = copy_sign(a * m * e, x);  // a m first: e alone may be subnormal
  const VecF centre = polynomial(x * x, 0x1.988452p-2f, -0x1.10573cp-4f, 0x1.466432p-7f, -0x1.25efc6p-10f);
  const VecF near = x * (0.5f + x * centre);
  return select(lt(a, 0.5f), near, select(lt(x, 0.0f), tail, x - tail));
}

// ---- the arc tangent ---------------------------------------------------------------------------------------------

// An angle of 0, pi/4 or pi/2 and atan(t), |t| <= tan(pi/8): beside pi/4 t = (|x| - 1) / (|x| + 1), beside pi/2 -1 /
// |x|.
FG_INLINE VecF atan(VecF x) {
  const VecF a = abs(x);
  const VecB far = gt(a, 0x1.3504f3p+1f), middle = gt(a, 0x1.a8279ap-2f);
  const VecF t = select(far, -1.0f, select(middle, a - 1.0f, a)) / select(far, a, select(middle, a + 1.0f, 1.0f));
  const VecF eighths = select(far, 2.0f, select(middle, 1.0f, 0.0f)), z = t * t;  // of a turn, pi/4 in two parts
  const VecF p = polynomial(z, -0x1.55554ap-2f, 0x1.9991aep-3f, -0x1.23b6bcp-3f, 0x1.b20238p-4f, -0x1.f25666p-5f);
  return copy_sign(eighths * 0x1.921fb6p-1f + (t + (t * z * p - eighths * 0x1.777a5cp-26f)), x);
}

FG_SCALAR_BY_VECTOR(atan)
FG_SCALAR_BY_VECTOR(exp2_bounded)
FG_SCALAR_BY_VECTOR(exp2)
FG_SCALAR_BY_VECTOR(exp)
FG_SCALAR_BY_VECTOR(log)
FG_SCALAR_BY_VECTOR(log2)
FG_SCALAR_BY_VECTOR(log1p)
FG_SCALAR_BY_VECTOR(sigmoid)
FG_SCALAR_BY_VECTOR(silu)
FG_SCALAR_BY_VECTOR(tanh)
FG_SCALAR_BY_VECTOR(softplus)
FG_SCALAR_BY_VECTOR(erf)
FG_SCALAR_BY_VECTOR(gelu)

// ---- sine, cosine, power: through doubles ------------------------------------------------------------------------

// sin(x + quarters pi/2). Reduction by pi/2 in two parts of which n times the first is exact; beyond a million by libm.
inline VecF sine(VecF x, int quarters) {
  constexpr double pi_half_high = 0x1.921fb544p+0, pi_half_low = 0x1.0b4611a626331p-34, shift = 0x1.8p52;
  const TwoVecD wide = to_double(x);
  TwoVecD n, r;
  for (int h = 0; h < 2; ++h) {
    n.half[h] = (wide.half[h] * 0x1.45f306dc9c883p-1 + shift) - shift;
    r.half[h] = (wide.half[h] - n.half[h] * pi_half_high) - n.half[h] * pi_half_low;
  }
  const VecB huge = gt(abs(x), 1e6f);
  const VecI quadrant = to_int(to_float(n)) + quarters;
  const VecF f = to_float(r), z = f * f;
  const VecF sine_part = f + f * z * polynomial(z, -0x1.555546p-3f, 0x1.110776p-7f, -0x1.9953p-13f);
  const VecF cosine_part = polynomial(z, 1.0f, -0.5f, 0x1.55554ap-5f, -0x1.6c0c2ap-10f, 0x1.99e904p-16f);
  const VecF magnitude = select(ne(quadrant & 1, 0), cosine_part, sine_part);
  VecF y = from_bits(bits(magnitude) ^ ((quadrant & 2) << 30));
  if (any(huge))
    for (int l = 0; l < W; ++l)
      if (huge.lanes[l]) y[l] = quarters ? __builtin_cosf(x[l]) : __builtin_sinf(x[l]);
  return y;
}
inline VecF sin(VecF x) { return select(eq(x, 0.0f), x, sine(x, 0)); }
inline VecF cos(VecF x) { return sine(x, 1); }
FG_SCALAR_BY_VECTOR(sin)
FG_SCALAR_BY_VECTOR(cos)

// log2 of positive doubles that came from floats.
FG_INLINE VecD log2_double(VecD x) {
  const VecL centre = VecL{} + 0x3fe6a09e667f3bcd;  // the bits of sqrt(1/2)
  const VecL shifted = reinterpret_cast<VecL>(x) - centre;
  const VecD m = reinterpret_cast<VecD>((shifted & 0x000fffffffffffff) + centre);
  // The exponent, as a double, without a conversion from 64-bit integers.
  const VecL biased = ((shifted >> 52) + 2048) | 0x4330000000000000;
  const VecD exponent = reinterpret_cast<VecD>(biased) - (0x1p52 + 2048);
  const VecD z = (m - 1.0) / (m + 1.0), w = z * z;
  // 2/ln(2) atanh(z)
  constexpr double series[] = {0x1.c68f568d31760p-3, 0x1.0c9a84994022dp-2, 0x1.484b13d7c02a9p-2,
                               0x1.a61762a7aded9p-2, 0x1.2776c50ef9bfep-1, 0x1.ec709dc3a03fdp-1, 0x1.71547652b82fep+1};
  VecD sum = VecD{} + 0x1.89f3b1694cffep-3;
  for (const double coefficient : series) sum = sum * w + coefficient;
  return exponent + z * sum;
}

// C's powf.
inline VecF pow(VecF x, VecF y) {
  const VecF a = abs(x);
  const TwoVecD wide_a = to_double(a), wide_y = to_double(y);
  TwoVecD n, r;
  for (int h = 0; h < 2; ++h) {
    VecD l = log2_double(wide_a.half[h]);
    l = wide_a.half[h] == 0.0 ? VecD{} - __builtin_inf() : l;
    l = wide_a.half[h] == __builtin_inf() ? VecD{} + __builtin_inf() : l;
    VecD t = wide_y.half[h] * l;
    t = t > 200.0 ? VecD{} + 200.0 : t;
    t = t < -200.0 ? VecD{} - 200.0 : t;
    n.half[h] = (t + 0x1.8p52) - 0x1.8p52;
    r.half[h] = t - n.half[h];
  }
  const VecF p = polynomial(to_float(r), 1.0f, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7cp-5f, 0x1.3b2de0p-7f,
                            0x1.5f0838p-10f, 0x1.416b80p-13f);
  const VecF magnitude = scale_by_power(p, to_float(n) + round_shift);
  // A negative base: the sign of an odd exponent, NaN for one with a fraction.
  const VecF half = 0.5f * y;
  const VecB integral = eq(floor(y), y), odd = integral && ne(floor(half), half) && lt(abs(y), 0x1p24f);
  const VecB negative = {bits(x) < 0};
  VecF result = select(negative && odd, -magnitude, magnitude);
  result = select(lt(x, 0.0f) && gt(x, -infinity) && !integral, not_a_number, result);
  result = select(VecB{x != x} || VecB{y != y}, not_a_number, result);
  const VecB one = eq(x, 1.0f) || eq(y, 0.0f) || (eq(x, -1.0f) && eq(abs(y), infinity));
  return select(one, 1.0f, result);
}
FG_SCALAR_BY_VECTOR_2(pow)

#undef FG_SCALAR_BY_VECTOR
#undef FG_SCALAR_BY_VECTOR_2
#undef FG_EACH_LANE

}  // namespace fg
