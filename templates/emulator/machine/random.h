// Random choices that depend on a seed and on what is chosen, not on the host (SplitMix64; Steele et al., 2014).
#pragma once
#include <stdint.h>

namespace fg {
namespace emulator {

class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9E3779B97F4A7C15u ^ (stream + 1) * 0xD1B54A32D192ED03u) {}

  unsigned below(unsigned limit) { return static_cast<unsigned>((next() >> 32) * limit >> 32); }

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

}  // namespace emulator
}  // namespace fg
