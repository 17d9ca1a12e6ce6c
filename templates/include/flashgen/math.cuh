// Layer 2 of the CUDA primitives: every operator and function of the language, for scalars.
//
// Contract: names and meanings are those of LANGUAGE.md section 3 and of cpu/vector_math.h. What
// has no function here is a plain operator: + - * and real /, unary -, bitwise & | ^ of integers, && || !. Where CUDA's
// own function is right and free of branches it is used; the others are written here, because a hook is unrolled over
// every pair of a tile and must not branch.
#pragma once
#include "flashgen/types.cuh"

#ifndef FLASHGEN_F32
#define FLASHGEN_F32 1  // where no kernels follow
#endif

namespace fg {

// x, rounded: a product in it does not become part of an addition that it goes into.
FG_DEVICE float settled(float x) { return __fadd_rn(x, -0.0f); }

// What arrives at something, of which a score has this derivative: nothing where it has none, even of a gradient that
// is no number.
FG_DEVICE float chained(float gradient, float derivative) { return derivative == 0.0f ? 0.0f : gradient * derivative; }

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f, MOST_FLOAT = 3.40282347e38f;

// A factor that overflows, of a row whose weights are tiny: 0 times it stays 0. NaN stays NaN.
FG_DEVICE float finite(float x) { return x > MOST_FLOAT ? MOST_FLOAT : x < -MOST_FLOAT ? -MOST_FLOAT : x; }

// Scores are extreme where the rounding of what a row's exponents are less, 2^-24 of it, would show in its weights:
// beyond these, in base 2 and of a log-sum-exp. Then they are counted from a maximum m. The forward pass leaves m, and
// the logarithm of the sum, in lse_parts.
constexpr float MOST_OFFSET = 128.0f, MOST_LSE = 88.0f;
FG_DEVICE bool is_extreme(float lse) { return fabsf(lse) > MOST_LSE && fabsf(lse) < INFINITY; }

// ---- conversions -------------------------------------------------------------------------------------------------

FG_DEVICE float to_float(int32_t x) { return static_cast<float>(x); }
FG_DEVICE float to_float(bool x) { return x ? 1.0f : 0.0f; }

// Truncates toward zero; saturates; NaN gives 0.
FG_DEVICE int32_t to_int(float x) {
#ifdef FLASHGEN_EMULATOR
  return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : x != x ? 0 : static_cast<int32_t>(x);
#else
  return __float2int_rz(x);  // the instruction saturates, and NaN gives 0
#endif
}
FG_DEVICE int32_t to_int(int32_t x) { return x; }
FG_DEVICE int32_t to_int(bool x) { return x; }
FG_DEVICE bool to_bool(bool x) { return x; }
FG_DEVICE bool to_bool(int32_t x) { return x != 0; }
FG_DEVICE bool to_bool(float x) { return x != 0; }

// ---- comparisons and selection -------------------------------------------------------------------------------------

#define FG_COMPARISON(name, op)                                      \
  FG_DEVICE bool name(float a, float b) { return a op b; }            \
  FG_DEVICE bool name(int32_t a, int32_t b) { return a op b; }
FG_COMPARISON(lt, <)
FG_COMPARISON(le, <=)
FG_COMPARISON(gt, >)
FG_COMPARISON(ge, >=)
FG_COMPARISON(eq, ==)
FG_COMPARISON(ne, !=)
#undef FG_COMPARISON
FG_DEVICE bool eq(bool a, bool b) { return a == b; }
FG_DEVICE bool ne(bool a, bool b) { return a != b; }
template <class T> FG_DEVICE T select(bool c, T a, T b) { return c ? a : b; }

// ---- integers ----------------------------------------------------------------------------------------------------

// Rounds toward minus infinity; a divisor of 0 gives 0.
FG_DEVICE int32_t floor_div(int32_t a, int32_t b) {
  if (b == 0) return 0;
  if (b == -1) return int32_t(0u - uint32_t(a));  // INT_MIN / -1 wraps
  const int32_t q = a / b;
  return q - (q * b != a && (a ^ b) < 0);
}
FG_DEVICE int32_t floor_mod(int32_t a, int32_t b) { return b == 0 ? 0 : a - floor_div(a, b) * b; }
FG_DEVICE int32_t ceildiv(int32_t a, int32_t b) { return -floor_div(-a, b); }

// Counts outside 0..31 shift everything out.
FG_DEVICE int32_t shift_left(int32_t a, int32_t n) { return n < 0 || n > 31 ? 0 : int32_t(uint32_t(a) << n); }
FG_DEVICE int32_t shift_right(int32_t a, int32_t n) { return a >> (n < 0 || n > 31 ? 31 : n); }

// base ** exponent, wrapping; a negative exponent gives 0, except for the bases 1 and -1.
FG_DEVICE int32_t ipow(int32_t base, int32_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
  uint32_t result = 1, power = uint32_t(base);
  for (; exponent != 0; exponent >>= 1, power *= power)
    if (exponent & 1) result *= power;
  return int32_t(result);
}
FG_DEVICE int32_t popcount(int32_t x) { return __popc(uint32_t(x)); }

FG_DEVICE uint32_t hash_step(uint32_t h, uint32_t x) {
  h = (h ^ x) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}
// A non-negative int that depends on all arguments and their order.
template <class... Ints> FG_DEVICE int32_t hash(Ints... x) {
  uint32_t h = 0x9E3779B9u;
  ((h = hash_step(h, uint32_t(x))), ...);
  return int32_t(h & 0x7fffffffu);
}

// ---- order, sign, rounding ---------------------------------------------------------------------------------------

FG_DEVICE int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
FG_DEVICE int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }
// NaN in either argument propagates.
FG_DEVICE float min(float a, float b) { return a < b || a != a ? a : b; }
FG_DEVICE float max(float a, float b) { return a > b || a != a ? a : b; }
template <class T> FG_DEVICE T clamp(T x, T low, T high) { return min(max(x, low), high); }
// The row maximum of the softmax in one instruction: NaN is ignored here, and comes out through the row sum.
FG_DEVICE float running_max(float kept, float x) { return fmaxf(kept, x); }

FG_DEVICE float abs(float x) { return fabsf(x); }
FG_DEVICE int32_t abs(int32_t x) { return x < 0 ? int32_t(0u - uint32_t(x)) : x; }
// -1, 0 or 1; of NaN 0.
FG_DEVICE float sign(float x) { return to_float(x > 0) - to_float(x < 0); }
FG_DEVICE int32_t sign(int32_t x) { return (x > 0) - (x < 0); }
FG_DEVICE float floor(float x) { return floorf(x); }
FG_DEVICE float ceil(float x) { return ceilf(x); }
FG_DEVICE float round(float x) { return rintf(x); }  // half to even
FG_DEVICE float sqrt(float x) { return sqrtf(x); }
FG_DEVICE float rsqrt(float x) { return 1.0f / sqrtf(x); }
FG_DEVICE float relu(float x) { return x <= 0 ? 0.0f : x; }
FG_DEVICE float copy_sign(float magnitude, float sign) { return copysignf(magnitude, sign); }
// The factor of scores from what makes exponents in base 2 of products, which is never 0: a tiny one stands for a factor of 0.
FG_DEVICE float factor_of_scores(float exponent) { return fabsf(exponent) > 0x1p-125f ? exponent * LN_2 : 0.0f; }

// Python's // and % of floats: rare, and they need the exact remainder.
static __device__ __noinline__ float floor_mod(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static __device__ __noinline__ float floor_div(float a, float b) {
  if (b == 0) return a / b;
  const float r = fmodf(a, b);
  float q = (a - r) / b;
  if (r != 0 && (r < 0) != (b < 0)) q -= 1;
  if (q == 0) return copysignf(0.0f, a / b);
  const float whole = floorf(q);
  return q - whole > 0.5f ? whole + 1 : whole;
}

// ---- exponentials and logarithms -----------------------------------------------------------------------------------

FG_DEVICE float exp2(float x) { return exp2f(x); }
FG_DEVICE float exp(float x) { return expf(x); }
FG_DEVICE float log(float x) { return logf(x); }
FG_DEVICE float log2(float x) { return log2f(x); }
FG_DEVICE float log1p(float x) { return log1pf(x); }

// c0 + x (c1 + x (c2 + ...))
FG_DEVICE float polynomial(float, float c) { return c; }
template <class... Rest>
FG_DEVICE float polynomial(float x, float c, Rest... rest) { return polynomial(x, rest...) * x + c; }

// ---- sigmoids ----------------------------------------------------------------------------------------------------

// 1 / (1 + e^-x), by e^-|x| so that nothing overflows. Kernels of 16 bits alone let it: the reciprocal of infinity is 0, and what
// rounding x log2(e) costs, |x| 2^-23 of the result, is less than they round.
FG_DEVICE float sigmoid(float x) {
  if constexpr (FLASHGEN_F32) {
    const float e = expf(-fabsf(x));
    return (x < 0 ? e : 1.0f) * reciprocal_approximate(1.0f + e);
  } else {
    return reciprocal_approximate(1.0f + exp2_approximate(x * -LOG2_E));
  }
}
FG_DEVICE float silu(float x) { return x * sigmoid(x); }

// Near 0 an odd polynomial; elsewhere (1 - e) / (1 + e) with e = e^(-2|x|).
FG_DEVICE float tanh(float x) {
  const float a = fabsf(x), z = x * x;
  const float near =
      x + x * z * polynomial(z, -0x1.55554ap-2f, 0x1.110cf0p-3f, -0x1.b91f20p-5f, 0x1.58ec78p-6f, -0x1.99565ep-8f);
  const float e = exp2_approximate(a * (-2 * LOG2_E));
  const float far = copysignf((1.0f - e) * reciprocal_approximate(1.0f + e), x);
  return a < 0.55f ? near : far;
}
// tanh where it is part of an exponent, of which the absolute error counts. In kernels of 16 bits alone it is right to
// 2^-23, a score to 6e-6 where its cap is 50, while its weight is rounded to 2^-9 or 2^-12.
FG_DEVICE float tanh_of_exponent(float x) {
  if constexpr (FLASHGEN_F32) return tanh(x);
  else return __fmaf_rn(-2.0f, reciprocal_approximate(1.0f + exp2_approximate(x * (2 * LOG2_E))), 1.0f);
}

// log(1 + e^x)
FG_DEVICE float softplus(float x) { return relu(x) + log1pf(expf(-fabsf(x))); }

// ---- the normal distribution -------------------------------------------------------------------------------------

FG_DEVICE float erf(float x) { return erff(x); }
// x Phi(x); erfc keeps the relative accuracy of the tail.
FG_DEVICE float gelu(float x) { return x < -40.0f ? 0.0f : 0.5f * x * erfcf(-0.707106781f * x); }  // 0 of -inf, too

// ---- sine, cosine, arc tangent, power -------------------------------------------------------------------------------

FG_DEVICE float sin(float x) { return sinf(x); }
FG_DEVICE float cos(float x) { return cosf(x); }
FG_DEVICE float atan(float x) { return atanf(x); }
FG_DEVICE float pow(float x, float y) { return powf(x, y); }

}  // namespace fg
