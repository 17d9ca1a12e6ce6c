// Layer 3 of the CUDA primitives: elements of captured tensors, read and added to.
//
// Contract: addresses are in bounds; where the compiler could not prove it, the index went through clamp_index.
#pragma once
#include "math.cuh"

namespace fg {

// The nearest valid index of a dimension.
FG_DEVICE int32_t clamp_index(int32_t index, int64_t dimension) { return clamp(index, 0, int32_t(dimension - 1)); }

FG_DEVICE float element(const float* tensor, int64_t index) { return global_load(tensor + index); }
FG_DEVICE float element(const f16* tensor, int64_t index) { return to_float(global_load(tensor + index)); }
FG_DEVICE float element(const bf16* tensor, int64_t index) { return to_float(global_load(tensor + index)); }
FG_DEVICE int32_t element(const int32_t* tensor, int64_t index) { return global_load(tensor + index); }
FG_DEVICE int32_t element(const int64_t* tensor, int64_t index) { return int32_t(global_load(tensor + index)); }
FG_DEVICE bool element(const bool* tensor, int64_t index) {
  return global_load(reinterpret_cast<const uint8_t*>(tensor) + index) != 0;
}

}  // namespace fg
