// What ranges.h takes from the standard library, for device code.
#pragma once
#include "types.cuh"

#ifndef FLASHGEN_EMULATOR
#define __builtin_popcount(x) __popc(x)
#define __builtin_clz(x) __clz(int(x))
#endif

namespace fg::standard {

template <class T> FG_CONSTEXPR T min(T a, T b) { return b < a ? b : a; }
template <class T> FG_CONSTEXPR T max(T a, T b) { return a < b ? b : a; }
template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static FG_CONSTEXPR float infinity() { return INFINITY; }
};
template <> struct numeric_limits<double> {
  static FG_CONSTEXPR double infinity() { return INFINITY; }
};
FG_DEVICE bool isinf(double x) { return x == INFINITY || x == -INFINITY; }
FG_DEVICE float nextafter(float x, float to) { return nextafterf(x, to); }
FG_DEVICE double floor(double x) { return ::floor(x); }
FG_DEVICE double ceil(double x) { return ::ceil(x); }
FG_DEVICE double fabs(double x) { return ::fabs(x); }
FG_DEVICE double rint(double x) { return ::rint(x); }
FG_DEVICE double nearbyint(double x) { return ::rint(x); }
FG_DEVICE double pow(double x, double y) { return ::pow(x, y); }
FG_DEVICE double exp(double x) { return ::exp(x); }
FG_DEVICE double exp2(double x) { return ::exp2(x); }
FG_DEVICE double log(double x) { return ::log(x); }
FG_DEVICE double log2(double x) { return ::log2(x); }
FG_DEVICE double log1p(double x) { return ::log1p(x); }
FG_DEVICE double sqrt(double x) { return ::sqrt(x); }
FG_DEVICE double tanh(double x) { return ::tanh(x); }
FG_DEVICE double erf(double x) { return ::erf(x); }
FG_DEVICE double sin(double x) { return ::sin(x); }
FG_DEVICE double cos(double x) { return ::cos(x); }

}  // namespace fg::standard
