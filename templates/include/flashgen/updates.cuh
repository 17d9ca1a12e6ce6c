// Layer 1 of the CUDA primitives, more of it: loads of what the launch writes.
//
// Contract: as for the rest of layer 1, but the emulator does not see them. It sees the store of the same thread to the
// same place, which follows.
#pragma once
#include "flashgen/instructions.cuh"

namespace fg {

template <class T> FG_DEVICE T global_read(const T* p) { return *p; }

}  // namespace fg
