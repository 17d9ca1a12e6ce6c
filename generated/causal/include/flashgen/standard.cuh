// What ranges.h is written over, for GPUs: what it takes from the standard library, as device functions.
#pragma once
#include "flashgen/types.cuh"

#ifndef FLASHGEN_EMULATOR
#define __builtin_popcount(x) __popc(x)
#define __builtin_clz(x) __clz(int(x))
#endif

#define FG_FUNCTION FG_DEVICE

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

}  // namespace fg::standard
