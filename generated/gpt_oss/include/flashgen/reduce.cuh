// Layer 3 of the CUDA primitives: sums and maxima over the threads that share a row, a column, or a tile.
//
// Contract: every order of additions is fixed, so results repeat bit for bit.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/math.cuh"
#include "flashgen/team.cuh"

namespace fg {

// Over the 4 lanes that hold one row of a fragment.
FG_DEVICE float row_max(float x) {
  x = running_max(x, shuffle_xor(x, 1));
  return running_max(x, shuffle_xor(x, 2));
}
FG_DEVICE float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
FG_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
// Over a team, by way of one float a warp in shared memory; the sum arrives in thread 0.
template <class Team> FG_DEVICE float team_sum(float x, float* shared) {
  const int warp = warp_index();
  x = warp_sum(x);
  Team::barrier();
  if (lane_index() == 0) shared_store(shared + warp, x);
  Team::barrier();
  float sum = 0.0f;
  if (threadIdx.x == 0)
    for (int each = 0; each < Team::threads / 32; ++each) sum += shared_load(shared + each);
  return sum;
}

}  // namespace fg
