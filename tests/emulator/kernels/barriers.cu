// Barriers with a number: what they order, and one kernel for each mistake. FAULT and OTHER mark lines as in faults.cu.
#include "flashgen_emulator.h"

struct Arguments {
  const float* x;
  float* y;
  int n;
};

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE int warp() { return thread() / 32; }
FG_DEVICE float* floats() { return reinterpret_cast<float*>(fg::shared_memory()); }

// ---- what is right -------------------------------------------------------------------------------------------------

// Warp 0 hands n rows of 32 numbers to warps 1 … 3 through a ring of two; each of them adds up all rows.
extern "C" __global__ void handed_over(const Arguments p) {
  const int lane = thread() % 32;
  constexpr int full = 1, free = 3, threads = 128;
  if (warp() == 0) {
    for (int row = 0; row < p.n; ++row) {
      if (row >= 2) fg::barrier_wait(free + row % 2, threads);
      fg::shared_store(floats() + row % 2 * 32 + lane, fg::global_load(p.x + 32 * row + lane));
      fg::barrier_arrive(full + row % 2, threads);
    }
  } else {
    float sum = 0.0f;
    for (int row = 0; row < p.n; ++row) {
      fg::barrier_wait(full + row % 2, threads);
      sum += fg::shared_load(floats() + row % 2 * 32 + (lane + warp()) % 32);
      if (row + 2 < p.n) fg::barrier_arrive(free + row % 2, threads);
    }
    fg::global_store(p.y + 32 * (warp() - 1) + lane, sum);
  }
}
// Two halves of a block wait for themselves alone, a different number of times.
extern "C" __global__ void halves(const Arguments p) {
  const int half = thread() / 64;
  for (int k = 0; k < 3 + half; ++k) {
    fg::shared_store(floats() + thread(), float(k));
    fg::barrier_wait(1 + half, 64);
    const float x = fg::shared_load(floats() + (thread() ^ 32));
    fg::barrier_wait(1 + half, 64);
    fg::global_store(p.y + thread(), x);
  }
}

// The same, but for where the halves wait for each other in the end.
extern "C" __global__ void from_two_places(const Arguments p) {
  const int half = thread() / 64;
  fg::shared_store(floats() + thread(), float(thread()));
  if (half == 0) fg::barrier_meet(3, 128);
  else fg::barrier_meet(3, 128);
  fg::global_store(p.y + thread(), fg::shared_load(floats() + (thread() ^ 64)));
}

// ---- what they do not order ----------------------------------------------------------------------------------------

extern "C" __global__ void read_after_arriving(const Arguments p) {  // an arrival announces, it learns nothing
  if (warp() == 0) {
    fg::shared_store(floats() + thread(), 1.0f);  // OTHER
    fg::barrier_wait(1, 64);
  } else if (warp() == 1) {
    fg::barrier_arrive(1, 64);
    for (int k = 0; k < 3; ++k) fg::warp_barrier();
    fg::shared_load(floats() + thread() - 32);  // FAULT
  }
}
extern "C" __global__ void written_after_arriving(const Arguments p) {
  if (warp() == 0) {
    fg::barrier_arrive(1, 64);
    fg::shared_store(floats() + thread(), 1.0f);  // OTHER
  } else if (warp() == 1) {
    fg::barrier_wait(1, 64);
    for (int k = 0; k < 3; ++k) fg::warp_barrier();
    fg::shared_load(floats() + thread() - 32);  // FAULT
  }
}
extern "C" __global__ void released_too_early(const Arguments p) {  // the reader has not read when it arrives
  if (warp() == 0) fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  if (warp() == 0) {
    fg::barrier_wait(1, 64);
    fg::shared_store(floats() + thread(), 1.0f);  // FAULT
  } else if (warp() == 1) {
    fg::barrier_arrive(1, 64);
    fg::shared_load(floats() + thread() - 32);  // OTHER
  }
}
// All other warps read; the one that writes waits for them, but not for number n.
extern "C" __global__ void one_reader_left_out(const Arguments p) {
  if (warp() == 0) fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  const int warps = int(blockDim.x) / 32;
  if (warp() == 0) {
    fg::barrier_wait(1, 32 * (warps - 1));
    fg::shared_store(floats() + thread(), 1.0f);  // FAULT
  } else {
    fg::shared_load(floats() + thread() % 32);  // OTHER
    if (warp() != p.n) fg::barrier_arrive(1, 32 * (warps - 1));
  }
}
extern "C" __global__ void one_warpgroup_left_out(const Arguments p) {  // of those that read
  if (warp() == 0) fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  const int readers = int(blockDim.x) / 128 - 1, threads = 32 + 128 * (readers - 1);
  if (warp() == 0) {
    fg::barrier_wait(1, threads);
    fg::shared_store(floats() + thread(), 1.0f);  // FAULT
  } else if (warp() >= 4) {
    fg::shared_load(floats() + thread() % 32);  // OTHER
    if (warp() / 4 != p.n) fg::barrier_arrive(1, threads);
  }
}
extern "C" __global__ void lanes_that_arrive(const Arguments p) {  // do not wait for each other
  fg::shared_store(floats() + thread(), 1.0f);  // OTHER
  fg::barrier_arrive(1, 32 * 2);
  if (thread() == 1) fg::shared_load(floats());  // FAULT
  fg::barrier_wait(2, int(blockDim.x));
}
extern "C" __global__ void another_barrier(const Arguments p) {
  if (warp() == 0) {
    fg::shared_store(floats() + thread(), 1.0f);  // OTHER
    fg::barrier_wait(1, 32);
  } else if (warp() == 1) {
    fg::barrier_wait(2, 32);
    fg::shared_load(floats() + thread() - 32);  // FAULT
  }
}

// ---- barriers that are not complete --------------------------------------------------------------------------------

extern "C" __global__ void too_few(const Arguments p) {
  if (warp() < 2) fg::barrier_wait(3, 96);  // FAULT
}
extern "C" __global__ void two_counts(const Arguments p) {
  if (warp() == 0) fg::barrier_wait(3, 64);  // FAULT OTHER
  else fg::barrier_wait(3, 96);  // FAULT OTHER
}
extern "C" __global__ void twice(const Arguments p) {
  if (warp() == 0)
    for (int k = 0; k < 2; ++k) fg::barrier_arrive(3, 64);  // FAULT OTHER
}
extern "C" __global__ void left_behind(const Arguments p) {
  if (warp() == 0) fg::barrier_arrive(3, 64);  // FAULT
}
extern "C" __global__ void no_such_barrier(const Arguments p) {
  fg::barrier_wait(16, 64);  // FAULT
}
extern "C" __global__ void the_block_barrier(const Arguments p) {
  fg::barrier_wait(0, 64);  // FAULT
}
extern "C" __global__ void half_a_warp(const Arguments p) {
  fg::barrier_wait(1, 48);  // FAULT
}
extern "C" __global__ void lanes_at_two_barriers(const Arguments p) {
  fg::barrier_wait(1 + thread() % 2, 64);  // FAULT
}
extern "C" __global__ void waits_at_two_places(const Arguments p) {
  if (warp() == 0) fg::barrier_wait(1, 64);  // FAULT OTHER
  else fg::barrier_wait(1, 64);  // FAULT OTHER
}
extern "C" __global__ void crossed(const Arguments p) {  // each waits for the other
  if (warp() == 0) {
    fg::barrier_wait(1, 64);  // FAULT
    fg::barrier_wait(2, 64);
  } else if (warp() == 1) {
    fg::barrier_wait(2, 64);
    fg::barrier_wait(1, 64);
  }
}
extern "C" __global__ void one_at_the_block_barrier(const Arguments p) {
  if (warp() == 0) fg::barrier_wait(1, 64);  // OTHER
  fg::block_barrier();  // FAULT
}
