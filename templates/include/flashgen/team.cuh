// Layer 2 of the CUDA primitives: the threads that compute together.
#pragma once
#include "flashgen/instructions.cuh"

namespace fg {

// Threads of a block that wait for each other, whole warps from number `first` on: by the barrier of this number, which
// is 0 where they are all of the block's.
template <int threads_, int number, int first = 0> struct Team {
  static constexpr int threads = threads_;
  static_assert(threads % 32 == 0 && first % 32 == 0 && (number > 0 || first == 0), "whole warps");

  FG_DEVICE static int thread() { return int(threadIdx.x) - first; }
  FG_DEVICE static int warp() { return warp_index() - first / 32; }
  FG_DEVICE static void barrier() {
    if constexpr (number == 0) block_barrier();
    else barrier_wait(number, threads);
  }
};

// Blocks of a cluster, of which a kernel without clusters has one; of more flashgen/clusters.cuh says the same.
template <int blocks> struct Cluster;
template <> struct Cluster<1> {
  FG_DEVICE static int rank() { return 0; }
};

}  // namespace fg
