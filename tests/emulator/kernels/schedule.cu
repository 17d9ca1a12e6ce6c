// A kernel whose result depends on the order of warps and blocks.
#include "flashgen_emulator.h"

struct Arguments {
  float* sum;  // of numbers that round differently in every order
  int n;
};

extern "C" __global__ void sum_in_any_order(const Arguments p) {
  const int k = int(blockIdx.x * blockDim.x + threadIdx.x);
  for (int n = 0; n < p.n; ++n) {
    fg::warp_barrier();
    fg::global_add(p.sum, 1.0f / float(1 + k + 977 * n));
  }
}
