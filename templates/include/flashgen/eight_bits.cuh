// Layer 2 of the CUDA primitives: numbers of 8 bits, float8_e4m3fn, as they are stored.
#pragma once
#include "flashgen/types.cuh"

namespace fg {

struct f8e4m3 {  // sign, four bits of exponent, three of mantissa; all of both set: no number
  uint8_t bits;
};

}  // namespace fg
