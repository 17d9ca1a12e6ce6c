// Ranges of values over a tile: what a mask can be, from the ranges of the coordinates alone.
//
// Contract: each function takes ranges of the arguments of the operator of the same name, and returns a range that
// holds every value that the operator can give, as float32 kernels compute it. Never wrong; where nothing is known,
// wide. Int: lo ... hi, inside 32 bits; what may wrap is everything. Float: lo ... hi and, where `nan`, NaN besides;
// the ends are float32 numbers. Bool: which truth values occur; a comparison with NaN is false, ne is true.
// flashgen/ir/interval.py and interval_float.py have these rules by the same names; a test compares the two.
//
// One text for CPUs and GPUs: what it is included after says what a function is there (FG_FUNCTION) and has the part of
// the standard library that compilers for GPUs lack (fg::standard): cpu/standard.h, standard.cuh.
// Functions of doubles are those of C. C++17.
#pragma once

namespace fg::ranges {

struct Int {
  int64_t lo, hi;
};
struct Float {
  double lo, hi;
  bool nan;
};
struct Bool {
  bool may_be_false, may_be_true;
};

constexpr int64_t int_min = INT32_MIN, int_max = INT32_MAX;
constexpr double inf = standard::numeric_limits<double>::infinity();
FG_FUNCTION Int any_int() { return {int_min, int_max}; }
FG_FUNCTION Float any_float() { return {-inf, inf, true}; }
FG_FUNCTION Bool any_bool() { return {true, true}; }

// ---- rounding outward --------------------------------------------------------------------------------------------

// The greatest float32 <= x and the smallest >= x, counting subnormals as zero: kernels may flush them.
FG_FUNCTION double down(double x) {
  constexpr double tiny = 0x1p-126;
  if (x > -tiny && x < tiny) return x >= 0 ? 0.0 : -tiny;
  const float f = static_cast<float>(x);
  return f > x ? standard::nextafter(f, -standard::numeric_limits<float>::infinity()) : f;
}
FG_FUNCTION double up(double x) { return -down(-x); }
FG_FUNCTION Float outward(double lo, double hi, bool nan) {
  if (lo != lo || hi != hi) return any_float();
  return {down(lo), up(hi), nan};
}

// A function that is off by a few units in the last place and never falls below `least`.
constexpr double relative_error = 0x1p-18, absolute_error = 0x1p-20, pow_error = 0x1p-13;
FG_FUNCTION double above(double x, double relative) {
  return standard::isinf(x) ? x : x + ::fabs(x) * relative + absolute_error;
}
FG_FUNCTION Float approximate(double lo, double hi, bool nan, double least = -inf, double relative = relative_error) {
  if (lo != lo || hi != hi) return any_float();
  return outward(standard::max(-above(-lo, relative), least), above(hi, relative), nan);
}

// ---- single values and unions ------------------------------------------------------------------------------------

FG_FUNCTION Bool point(bool x) { return {!x, x}; }
FG_FUNCTION Int point(int32_t x) { return {x, x}; }
FG_FUNCTION Int point(int64_t x) { return {x, x}; }
FG_FUNCTION Float point(double x) { return x != x ? any_float() : outward(x, x, false); }
FG_FUNCTION Float point(float x) { return point(static_cast<double>(x)); }

FG_FUNCTION Bool hull(Bool x, Bool y) { return {x.may_be_false || y.may_be_false, x.may_be_true || y.may_be_true}; }
FG_FUNCTION Int hull(Int x, Int y) { return {standard::min(x.lo, y.lo), standard::max(x.hi, y.hi)}; }
FG_FUNCTION Float hull(Float x, Float y) {
  return {standard::min(x.lo, y.lo), standard::max(x.hi, y.hi), x.nan || y.nan};
}
FG_FUNCTION Int fitting(int64_t lo, int64_t hi) { return lo < int_min || hi > int_max ? any_int() : Int{lo, hi}; }
FG_FUNCTION bool is_point(Int x) { return x.lo == x.hi; }
FG_FUNCTION bool has_zero(Float x) { return x.lo <= 0 && x.hi >= 0; }
FG_FUNCTION bool has_inf(Float x) { return x.lo == -inf || x.hi == inf; }

// From the least to the greatest of four corners.
FG_FUNCTION Int corners(int64_t a, int64_t b, int64_t c, int64_t d) {
  return fitting(
      standard::min(standard::min(a, b), standard::min(c, d)), standard::max(standard::max(a, b), standard::max(c, d)));
}
FG_FUNCTION Float corners(double a, double b, double c, double d, bool nan) {
  return outward(standard::min(standard::min(a, b), standard::min(c, d)),
                 standard::max(standard::max(a, b), standard::max(c, d)), nan);
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

FG_FUNCTION Int neg(Int x) { return fitting(-x.hi, -x.lo); }
FG_FUNCTION Float neg(Float x) { return {-x.hi, -x.lo, x.nan}; }
FG_FUNCTION Int add(Int x, Int y) { return fitting(x.lo + y.lo, x.hi + y.hi); }
FG_FUNCTION Float add(Float x, Float y) {
  const bool opposite = (x.hi == inf && y.lo == -inf) || (x.lo == -inf && y.hi == inf);
  return outward(x.lo + y.lo, x.hi + y.hi, x.nan || y.nan || opposite);
}
FG_FUNCTION Int sub(Int x, Int y) { return fitting(x.lo - y.hi, x.hi - y.lo); }
FG_FUNCTION Float sub(Float x, Float y) { return add(x, neg(y)); }

FG_FUNCTION Int mul(Int x, Int y) { return corners(x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi); }
FG_FUNCTION double product(double a, double b) { return a == 0 || b == 0 ? 0.0 : a * b; }
FG_FUNCTION Float mul(Float x, Float y) {
  const bool nan = (has_zero(x) && has_inf(y)) || (has_zero(y) && has_inf(x));
  return corners(product(x.lo, y.lo), product(x.lo, y.hi), product(x.hi, y.lo), product(x.hi, y.hi),
                 nan || x.nan || y.nan);
}
FG_FUNCTION Float div(Float x, Float y) {
  if (has_zero(y) || (has_inf(x) && has_inf(y))) return any_float();
  return corners(x.lo / y.lo, x.lo / y.hi, x.hi / y.lo, x.hi / y.hi, x.nan || y.nan);
}

// In 32 bits, as the ends are: a GPU has 64-bit divisions as functions, which take registers from those that call them.
FG_FUNCTION int64_t floor_quotient(int64_t end, int64_t divisor) {
  const int32_t a = int32_t(end), b = int32_t(divisor);
  if (b == 0) return 0;
  if (b == -1) return -int64_t{a};
  const int32_t q = a / b;
  return int64_t{q} - (q * b != a && (a ^ b) < 0);
}
FG_FUNCTION Float floor(Float x) { return {::floor(x.lo), ::floor(x.hi), x.nan}; }

// Divisors of each sign apart; 0 where the divisor may be 0.
FG_FUNCTION Int floordiv(Int x, Int y) {
  if (is_point(y)) {  // known while it compiles, mostly
    const int64_t first = floor_quotient(x.lo, y.lo), last = floor_quotient(x.hi, y.lo);
    return y.lo < 0 ? fitting(last, first) : Int{first, last};
  }
  if (y.lo > 0) {  // nearly always
    return {floor_quotient(x.lo, x.lo < 0 ? y.lo : y.hi), floor_quotient(x.hi, x.hi < 0 ? y.hi : y.lo)};
  }
  int64_t lo = y.hi >= 0 ? 0 : INT64_MAX, hi = y.hi >= 0 ? 0 : INT64_MIN;
  for (const int64_t divisor : {y.lo, standard::min<int64_t>(y.hi, -1), standard::max<int64_t>(y.lo, 1), y.hi}) {
    if (divisor == 0 || divisor < y.lo || divisor > y.hi) continue;
    for (const int64_t a : {x.lo, x.hi}) {
      lo = standard::min(lo, floor_quotient(a, divisor));
      hi = standard::max(hi, floor_quotient(a, divisor));
    }
  }
  return fitting(lo, hi);
}
FG_FUNCTION Float floordiv(Float x, Float y) {
  const Float r = floor(div(x, y));
  return {has_inf(y) ? standard::min(r.lo, -1.0) : r.lo, r.hi, r.nan || has_inf(x)};
}

// Exact within one period of a fixed divisor; otherwise between 0 and the divisor.
FG_FUNCTION Int mod(Int x, Int y) {
  if (is_point(y) && y.lo != 0) {
    const int64_t period = floor_quotient(x.lo, y.lo);
    if (period == floor_quotient(x.hi, y.lo)) return {x.lo - period * y.lo, x.hi - period * y.lo};
  }
  if (x.lo >= 0 && y.lo > x.hi) return x;
  const int64_t hi = standard::max<int64_t>(y.hi - 1, 0);
  return {standard::min<int64_t>(y.lo + 1, 0), x.lo >= 0 && y.lo >= 0 ? standard::min(hi, x.hi) : hi};
}
FG_FUNCTION Float mod(Float x, Float y) {
  if (x.lo >= 0 && y.lo > x.hi) return {x.lo, x.hi, x.nan || y.nan};
  return {standard::min(y.lo, 0.0), standard::max(y.hi, 0.0), x.nan || y.nan || has_zero(y) || has_inf(x)};
}
FG_FUNCTION Int ceildiv(Int x, Int y) { return neg(floordiv(neg(x), y)); }

// Ends beyond 32 bits need not be exact, only beyond.
FG_FUNCTION int64_t saturating_power(int64_t base, int64_t n) {
  int64_t result = 1;
  for (int64_t k = 0; k < n && -(int64_t{1} << 32) < result && result < (int64_t{1} << 32); ++k) result *= base;
  return result;
}
FG_FUNCTION int64_t wrapped_power(int64_t base, int64_t n) {
  if (n < 0) return base == 1 || (base == -1 && n % 2 == 0) ? 1 : base == -1 ? -1 : 0;
  uint32_t result = 1, power = uint32_t(base);
  for (; n != 0; n >>= 1, power *= power)
    if (n & 1) result *= power;
  return int32_t(result);
}
FG_FUNCTION Int ipow(Int x, Int y) {
  if (is_point(x) && is_point(y)) {
    const int64_t power = wrapped_power(x.lo, y.lo);
    return {power, power};
  }
  if (x.lo >= -1 && x.hi <= 1) return {standard::min<int64_t>(x.lo, 0), 1};
  if (y.lo < 0 || y.hi > 31) return any_int();
  int64_t lo = INT64_MAX, hi = INT64_MIN;
  for (const int64_t base : {x.lo, x.hi, int64_t{0}, int64_t{-1}}) {
    if (base < x.lo || base > x.hi) continue;
    for (const int64_t n : {y.lo, y.lo + 1, y.hi - 1, y.hi}) {
      if (n < y.lo || n > y.hi) continue;
      const int64_t power = saturating_power(base, n);
      lo = standard::min(lo, power), hi = standard::max(hi, power);
    }
  }
  return fitting(lo, hi);
}
FG_FUNCTION Float pow(Float x, Float y) {
  if (x.lo <= 0) return any_float();
  const double a = ::pow(x.lo, y.lo), b = ::pow(x.lo, y.hi), c = ::pow(x.hi, y.lo),
      d = ::pow(x.hi, y.hi);
  double lo = standard::min(standard::min(a, b), standard::min(c, d)),
      hi = standard::max(standard::max(a, b), standard::max(c, d));
  const bool nan = x.nan || y.nan;
  // nan ** 0 = 1 ** nan = 1
  if (nan || has_inf(x) || has_inf(y)) lo = standard::min(lo, 1.0), hi = standard::max(hi, 1.0);
  return approximate(lo, hi, nan, 0.0, pow_error);
}

// ---- order -------------------------------------------------------------------------------------------------------

FG_FUNCTION Int abs(Int x) {
  const int64_t a = x.lo < 0 ? -x.lo : x.lo, b = x.hi < 0 ? -x.hi : x.hi;
  return fitting(x.lo <= 0 && x.hi >= 0 ? 0 : standard::min(a, b), standard::max(a, b));
}
FG_FUNCTION Float abs(Float x) {
  const double a = ::fabs(x.lo), b = ::fabs(x.hi);
  return {has_zero(x) ? 0.0 : standard::min(a, b), standard::max(a, b), x.nan};
}
template <class T> FG_FUNCTION int sign_of(T x) { return (x > 0) - (x < 0); }
FG_FUNCTION Int sign(Int x) { return {sign_of(x.lo), sign_of(x.hi)}; }
FG_FUNCTION Float sign(Float x) {  // of NaN 0
  const double lo = sign_of(x.lo), hi = sign_of(x.hi);
  return {x.nan ? standard::min(lo, 0.0) : lo, x.nan ? standard::max(hi, 0.0) : hi, false};
}
FG_FUNCTION Int min(Int x, Int y) { return {standard::min(x.lo, y.lo), standard::min(x.hi, y.hi)}; }
FG_FUNCTION Int max(Int x, Int y) { return {standard::max(x.lo, y.lo), standard::max(x.hi, y.hi)}; }
FG_FUNCTION Float min(Float x, Float y) {
  return {standard::min(x.lo, y.lo), standard::min(x.hi, y.hi), x.nan || y.nan};
}
FG_FUNCTION Float max(Float x, Float y) {
  return {standard::max(x.lo, y.lo), standard::max(x.hi, y.hi), x.nan || y.nan};
}
template <class T> FG_FUNCTION T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }

// ---- comparisons and logic ---------------------------------------------------------------------------------------

FG_FUNCTION Bool lt(Int x, Int y) { return {x.hi >= y.lo, x.lo < y.hi}; }
FG_FUNCTION Bool le(Int x, Int y) { return {x.hi > y.lo, x.lo <= y.hi}; }
FG_FUNCTION Bool eq(Int x, Int y) {
  return {!(is_point(x) && is_point(y) && x.lo == y.lo), x.lo <= y.hi && y.lo <= x.hi};
}
FG_FUNCTION Bool lt(Float x, Float y) { return {x.hi >= y.lo || x.nan || y.nan, x.lo < y.hi}; }
FG_FUNCTION Bool le(Float x, Float y) { return {x.hi > y.lo || x.nan || y.nan, x.lo <= y.hi}; }
FG_FUNCTION Bool eq(Float x, Float y) {
  const bool same = x.lo == x.hi && y.lo == y.hi && x.lo == y.lo;
  return {!same || x.nan || y.nan, x.lo <= y.hi && y.lo <= x.hi};
}
FG_FUNCTION Bool not_(Bool x) { return {x.may_be_true, x.may_be_false}; }
FG_FUNCTION Bool and_(Bool x, Bool y) { return {x.may_be_false || y.may_be_false, x.may_be_true && y.may_be_true}; }
FG_FUNCTION Bool or_(Bool x, Bool y) { return {x.may_be_false && y.may_be_false, x.may_be_true || y.may_be_true}; }
FG_FUNCTION Bool eq(Bool x, Bool y) {
  return {(x.may_be_true && y.may_be_false) || (x.may_be_false && y.may_be_true),
          (x.may_be_true && y.may_be_true) || (x.may_be_false && y.may_be_false)};
}
template <class T> FG_FUNCTION Bool gt(T x, T y) { return lt(y, x); }
template <class T> FG_FUNCTION Bool ge(T x, T y) { return le(y, x); }
template <class T> FG_FUNCTION Bool ne(T x, T y) { return not_(eq(x, y)); }
template <class T>
FG_FUNCTION T where(Bool c, T x, T y) { return !c.may_be_false ? x : !c.may_be_true ? y : hull(x, y); }

// ---- bits --------------------------------------------------------------------------------------------------------

// Above the highest bit in which the ends differ all values agree.
struct Bits {
  uint32_t certain, possible;
};
FG_FUNCTION Bits bits(Int x) {
  const uint32_t lo = static_cast<uint32_t>(x.lo), difference = lo ^ static_cast<uint32_t>(x.hi);
  const uint32_t unknown = difference == 0 ? 0u : 0xffffffffu >> __builtin_clz(difference);
  return {lo & ~unknown, lo | unknown};
}
FG_FUNCTION Int from_bits(Bits x) {
  const uint32_t sign = (x.certain ^ x.possible) & 0x80000000u;
  return {static_cast<int32_t>(x.certain | sign), static_cast<int32_t>(x.possible & ~sign)};
}
FG_FUNCTION Int under(Int x, Int operand) {
  return operand.lo < 0 ? x : Int{standard::max<int64_t>(x.lo, 0), standard::min(x.hi, operand.hi)};
}
FG_FUNCTION Int bitand_(Int x, Int y) {
  const Bits a = bits(x), b = bits(y);
  return under(under(from_bits({a.certain & b.certain, a.possible & b.possible}), x), y);
}
FG_FUNCTION Int bitor_(Int x, Int y) {
  const Bits a = bits(x), b = bits(y);
  return from_bits({a.certain | b.certain, a.possible | b.possible});
}
FG_FUNCTION Int bitxor_(Int x, Int y) {
  const Bits a = bits(x), b = bits(y);
  const uint32_t unknown = (a.certain ^ a.possible) | (b.certain ^ b.possible),
      known = (a.certain ^ b.certain) & ~unknown;
  return from_bits({known, known | unknown});
}
FG_FUNCTION Bool bitand_(Bool x, Bool y) { return and_(x, y); }
FG_FUNCTION Bool bitor_(Bool x, Bool y) { return or_(x, y); }
FG_FUNCTION Bool bitxor_(Bool x, Bool y) { return ne(x, y); }

// Counts outside 0 ... 31 give 0 to the left, the sign to the right.
FG_FUNCTION Int shl(Int x, Int n) {
  const bool outside = n.lo < 0 || n.hi > 31;
  const int64_t lo = standard::max<int64_t>(n.lo, 0), hi = standard::min<int64_t>(n.hi, 31);
  if (lo > hi) return {0, 0};
  const Int inside = corners(x.lo * (int64_t{1} << lo), x.lo * (int64_t{1} << hi), x.hi * (int64_t{1} << lo),
                             x.hi * (int64_t{1} << hi));
  return outside ? hull(inside, {0, 0}) : inside;
}
FG_FUNCTION Int shr(Int x, Int n) {
  const bool outside = n.lo < 0 || n.hi > 31, all = n.hi < 0 || n.lo > 31;
  const int64_t lo = all ? 31 : standard::max<int64_t>(n.lo, 0), hi = outside ? 31 : n.hi;
  return corners(x.lo >> lo, x.lo >> hi, x.hi >> lo, x.hi >> hi);
}
FG_FUNCTION Int popcount(Int x) {
  const Bits b = bits(x);
  return {__builtin_popcount(b.certain), __builtin_popcount(b.possible)};
}
template <class... Ints> FG_FUNCTION Int hash(Ints... x) {
  if (!(is_point(x) && ...)) return {0, int_max};
  uint32_t h = 0x9E3779B9u;
  for (const int64_t value : {x.lo...}) {
    h = (h ^ static_cast<uint32_t>(value)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    h ^= h >> 16;
  }
  return point(static_cast<int32_t>(h & 0x7fffffffu));
}

// ---- conversions -------------------------------------------------------------------------------------------------

FG_FUNCTION Float to_float(Bool x) { return {x.may_be_false ? 0.0 : 1.0, x.may_be_true ? 1.0 : 0.0, false}; }
FG_FUNCTION Float to_float(Int x) { return outward(static_cast<double>(x.lo), static_cast<double>(x.hi), false); }
FG_FUNCTION Float to_float(Float x) { return x; }
FG_FUNCTION Int to_int(Bool x) { return {x.may_be_false ? 0 : 1, x.may_be_true ? 1 : 0}; }
FG_FUNCTION Int to_int(Int x) { return x; }
FG_FUNCTION int64_t saturated(double x) {
  return x <= double(int_min) ? int_min : x >= double(int_max) ? int_max : static_cast<int64_t>(x);
}
FG_FUNCTION Int to_int(Float x) {  // NaN gives 0
  const int64_t lo = saturated(x.lo), hi = saturated(x.hi);
  return {x.nan ? standard::min<int64_t>(lo, 0) : lo, x.nan ? standard::max<int64_t>(hi, 0) : hi};
}

// ---- sums over the integers: what bounds of a mask compare ----------------------------------------------------------

// Of 32-bit ranges with factors up to 2^20; nothing wraps. Ends beyond `far` stand for no limit.
constexpr int64_t far = int64_t(1) << 62;
FG_FUNCTION Int sum(Int x, Int y) { return {x.lo + y.lo, x.hi + y.hi}; }
FG_FUNCTION Int difference(Int x, Int y) { return {x.lo - y.hi, x.hi - y.lo}; }
FG_FUNCTION Int scaled(Int x, int64_t c) { return c < 0 ? Int{c * x.hi, c * x.lo} : Int{c * x.lo, c * x.hi}; }
FG_FUNCTION Int shifted(Int x, int64_t c) { return {x.lo + c, x.hi + c}; }
FG_FUNCTION Int at_least(Int x, int64_t lo) { return {standard::max(x.lo, lo), x.hi}; }
FG_FUNCTION Int at_most(Int x, int64_t hi) { return {x.lo, standard::min(x.hi, hi)}; }
FG_FUNCTION Int meet(Int x, Int y) { return {standard::max(x.lo, y.lo), standard::min(x.hi, y.hi)}; }
FG_FUNCTION bool some(Int x) { return x.lo <= x.hi; }
FG_FUNCTION bool fits(Int x) { return x.lo >= int_min && x.hi <= int_max; }
FG_FUNCTION bool is_point(Int x, int64_t value) { return x.lo == value && x.hi == value; }

// Of x = p // size, p, whatever the size: a call may give any. Without a branch: backward kernels of 128 numbers spilled.
FG_FUNCTION Int of_blocks(Int x, int64_t size) {
  const int64_t lo = standard::min(standard::max(x.lo, int_min), int_max),
      hi = standard::min(standard::max(x.hi, int_min), int_max);
  const int64_t any = size == 0 && lo <= 0 && hi >= 0 ? far : 0;  // p // 0 = 0
  return {(size < 0 ? hi * size + size + 1 : lo * size) - any, (size < 0 ? lo * size : hi * size + size - 1) + any};
}

// ---- elements that a pair reads -----------------------------------------------------------------------------------

FG_FUNCTION Bool anything(Bool) { return any_bool(); }
FG_FUNCTION Int anything(Int) { return any_int(); }
FG_FUNCTION Float anything(Float) { return any_float(); }

// The range of read(n) over the indices x of a dimension, clamped as kernels clamp them. Where these are many nothing
// is read but the first: a tile reads few elements where they belong to blocks.
constexpr int64_t most_elements = 4;
template <class Read> FG_FUNCTION auto over(Int x, int64_t dimension, Read read) {
  const int64_t end = dimension - 1;
  const int64_t first = standard::max(standard::min(x.lo, end), int64_t(0)),
      last = standard::max(standard::min(x.hi, end), int64_t(0));
  auto found = read(first);
  if (last - first >= most_elements) return anything(found);
  for (int64_t n = first + 1; n <= last; ++n) found = hull(found, read(n));
  return found;
}

// ---- functions of floats -----------------------------------------------------------------------------------------

FG_FUNCTION Float ceil(Float x) { return {::ceil(x.lo), ::ceil(x.hi), x.nan}; }
FG_FUNCTION Float round(Float x) { return {::nearbyint(x.lo), ::nearbyint(x.hi), x.nan}; }
FG_FUNCTION Float exp(Float x) { return approximate(::exp(x.lo), ::exp(x.hi), x.nan, 0.0); }
FG_FUNCTION Float exp2(Float x) { return approximate(::exp2(x.lo), ::exp2(x.hi), x.nan, 0.0); }

// Monotone; -inf at the pole, NaN below.
template <class F> FG_FUNCTION Float logarithm(F log, Float x, double pole) {
  if (x.hi < pole) return any_float();
  return approximate(x.lo > pole ? log(x.lo) : -inf, x.hi > pole ? log(x.hi) : -inf, x.nan || x.lo < pole);
}
FG_FUNCTION Float log(Float x) { return logarithm([](double t) { return ::log(t); }, x, 0.0); }
FG_FUNCTION Float log2(Float x) { return logarithm([](double t) { return ::log2(t); }, x, 0.0); }
FG_FUNCTION Float log1p(Float x) { return logarithm([](double t) { return ::log1p(t); }, x, -1.0); }
FG_FUNCTION Float sqrt(Float x) {
  if (x.hi < 0) return any_float();
  return approximate(::sqrt(standard::max(x.lo, 0.0)), ::sqrt(x.hi), x.nan || x.lo < 0, 0.0);
}
FG_FUNCTION Float rsqrt(Float x) {
  if (x.lo <= 0) return any_float();  // 1 / sqrt(-0) is -inf
  return approximate(1 / ::sqrt(x.hi), 1 / ::sqrt(x.lo), x.nan, 0.0);
}
FG_FUNCTION Float tanh(Float x) { return approximate(::tanh(x.lo), ::tanh(x.hi), x.nan); }
FG_FUNCTION Float erf(Float x) { return approximate(::erf(x.lo), ::erf(x.hi), x.nan); }
FG_FUNCTION Float atan(Float x) { return approximate(::atan(x.lo), ::atan(x.hi), x.nan); }
FG_FUNCTION double logistic(double x) {
  return x >= 0 ? 1 / (1 + ::exp(-x)) : ::exp(x) / (1 + ::exp(x));
}
FG_FUNCTION Float sigmoid(Float x) { return approximate(logistic(x.lo), logistic(x.hi), x.nan, 0.0); }
FG_FUNCTION double log_1_exp(double x) {
  return standard::max(x, 0.0) + ::log1p(::exp(-::fabs(x)));
}
FG_FUNCTION Float softplus(Float x) { return approximate(log_1_exp(x.lo), log_1_exp(x.hi), x.nan, 0.0); }
FG_FUNCTION Float relu(Float x) { return {standard::max(x.lo, 0.0), standard::max(x.hi, 0.0), x.nan}; }

// Falls from 0 at -inf to `least` at `bottom`, then rises; at -inf itself NaN.
template <class F> FG_FUNCTION Float valley(F value, double bottom, double least, Float x) {
  const double a = x.lo == -inf ? 0.0 : value(x.lo), b = x.hi == -inf ? 0.0 : value(x.hi);
  const double lo = x.lo <= bottom && bottom <= x.hi ? least : standard::min(a, b), slack = 0x1p-16;
  return approximate(lo - slack, standard::max(a, b) + slack, x.nan || x.lo == -inf);
}
FG_FUNCTION Float silu(Float x) {
  return valley([](double t) { return t * logistic(t); }, -1.2784645427610738, -0.27846454276107380, x);
}
FG_FUNCTION Float gelu(Float x) {
  return valley([](double t) { return 0.5 * t * (1 + ::erf(t * ::sqrt(0.5))); }, -0.75179152981410563,
                -0.16997120747990369, x);
}

// The ends, and +-1 where a crest lies between them.
FG_FUNCTION Float sin(Float x) {
  constexpr double pi = 3.14159265358979323846;
  if (has_inf(x) || x.hi - x.lo > 6.25 || ::fabs(x.lo) > 1e4 || ::fabs(x.hi) > 1e4) {
    return {-1 - absolute_error, 1 + absolute_error, x.nan || has_inf(x)};
  }
  double lo = standard::min(::sin(x.lo), ::sin(x.hi)),
      hi = standard::max(::sin(x.lo), ::sin(x.hi));
  const double first = ::floor((x.lo - 0.001) / pi - 0.5), slack = 0x1p-16;
  for (int k = 0; k < 4; ++k) {
    const double crest = (first + k + 0.5) * pi;
    if (crest < x.lo - 0.001 || crest > x.hi + 0.001) continue;
    lo = standard::min(lo, ::sin(crest)), hi = standard::max(hi, ::sin(crest));
  }
  return approximate(lo - slack, hi + slack, x.nan);
}
FG_FUNCTION Float cos(Float x) {
  constexpr double quarter = 3.14159265358979323846 / 2;
  return sin({x.lo + quarter, x.hi + quarter, x.nan});
}

}  // namespace fg::ranges
