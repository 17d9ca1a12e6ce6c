// Layer 3 of the CUDA primitives: ranges of what a mask reads, as they are stored between two kernels.
//
// Contract: 8 bytes a range, over GRANULE neighbouring rows or columns; what is unpacked holds what was packed.
#pragma once
#include "flashgen/standard.cuh"
#include "flashgen/ranges.h"

namespace fg {

constexpr int GRANULE = 16;  // divides every tile

FG_DEVICE int2 packed(ranges::Int x) { return make_int2(int(x.lo), int(x.hi)); }
FG_DEVICE int2 packed(ranges::Bool x) { return make_int2(x.may_be_false, x.may_be_true); }
FG_DEVICE int2 packed(ranges::Float x) {  // the upper end is NaN where NaN may occur
  return make_int2(__float_as_int(float(x.lo)), x.nan ? 0x7fc00000 : __float_as_int(float(x.hi)));
}
FG_DEVICE void unpack(ranges::Int& x, int2 word) { x = {word.x, word.y}; }
FG_DEVICE void unpack(ranges::Bool& x, int2 word) { x = {word.x != 0, word.y != 0}; }
FG_DEVICE void unpack(ranges::Float& x, int2 word) {
  const float lo = __int_as_float(word.x), hi = __int_as_float(word.y);
  x = hi != hi ? ranges::any_float() : ranges::Float{lo, hi, false};
}

}  // namespace fg
