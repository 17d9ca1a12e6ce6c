// Sums over the rows of a slab of [slabs, rows, 64] in float16, 16 rows at a time: one warp copies through a ring of two stages,
// four multiply by ones. Every window of boxes has fresh mbarriers.
#include "flashgen_emulator.h"

struct Arguments {
  float* y;
  int rows, slab;
};
struct Maps {
  fg::TensorMap x;
};

constexpr int stages = 2, window = 5, box_bytes = 16 * 128;

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE char* stage_of(int n) { return fg::shared_memory() + n % stages * box_bytes; }
FG_DEVICE uint64_t* signal(int number) { return reinterpret_cast<uint64_t*>(fg::shared_memory() + 8192) + number; }
FG_DEVICE uint64_t* full(int n) { return signal(n % stages); }
FG_DEVICE uint64_t* empty(int n) { return signal(stages + n % stages); }
FG_DEVICE int parity(int n) { return n / stages % 2; }

FG_DEVICE void make_signals(bool again) {
  if (thread() != 0) return;
  for (int n = 0; n < stages; ++n) {
    if (again) fg::mbarrier_invalidate(full(n)), fg::mbarrier_invalidate(empty(n));
    fg::mbarrier_init(full(n), 1);
    fg::mbarrier_init(empty(n), 128);  // an arrival of each thread
  }
  fg::publish_shared();
}

extern "C" __global__ void __launch_bounds__(160) sum_of_rows(const Arguments p, const Maps maps) {
  const int boxes = (p.rows + 15) / 16;
  float sum[8][4] = {};
  for (int first = 0; first < boxes; first += window) {
    const int count = boxes - first < window ? boxes - first : window;
    fg::block_barrier();  // nobody uses the signals of the window before
    make_signals(first > 0);
    fg::block_barrier();  // everyone knows the new ones
    if (thread() >= 128) {
      for (int n = 0; n < count; ++n) {
        if (n >= stages) fg::mbarrier_wait(empty(n), parity(n - stages));
        if (thread() == 128) {
          fg::mbarrier_expect(full(n), box_bytes);
          fg::copy_panel_async(reinterpret_cast<fg::half_t*>(stage_of(n)), maps.x, 0, (first + n) * 16, p.slab, full(n));
        }
      }
    } else {
      const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
      for (int n = 0; n < count; ++n) {
        fg::mbarrier_wait(full(n), parity(n));
        fg::warpgroup_arrive();
        fg::warpgroup_multiply<fg::half_t, true>(sum, ones, fg::shared_matrix<128>(stage_of(n), 0, 8 * 128), true);
        fg::warpgroup_commit();
        fg::warpgroup_wait<0>();
        if (n + stages < count) fg::mbarrier_arrive(empty(n));
      }
    }
  }
  if (thread() >= 4) return;
  for (int t = 0; t < 8; ++t)
    for (int e = 0; e < 2; ++e) fg::global_store(p.y + 8 * t + 2 * thread() + e, sum[t][e]);
}
