// The storage types of 16 bits.
//
// Contract: layer 2 converts; nothing here computes.
#pragma once
#include "language.h"

namespace fg {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

}  // namespace fg
