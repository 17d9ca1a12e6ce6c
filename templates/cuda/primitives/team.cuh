// Layer 2 of the CUDA primitives: the threads that compute together.
#pragma once
#include "instructions.cuh"

namespace fg {

// The first threads of a block, which wait for each other; other warps of it, where there are any, only copy.
template <int threads_, bool whole_block> struct Team {
  static constexpr int threads = threads_;

  FG_DEVICE static void barrier() {
    if constexpr (whole_block) block_barrier();
    else barrier_wait(15, threads);
  }
};

}  // namespace fg
