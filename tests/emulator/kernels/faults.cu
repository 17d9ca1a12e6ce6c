// One kernel for each mistake; the line at fault carries the mark FAULT, a second one OTHER.
#include "flashgen_emulator.h"

struct Arguments {
  const float* x;
  float* y;
  int n;
};

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE float* floats() { return reinterpret_cast<float*>(fg::shared_memory()); }

// ---- global memory -------------------------------------------------------------------------------------------------

extern "C" __global__ void load_past_the_end(const Arguments p) {
  const int k = int(blockIdx.x * blockDim.x) + thread();
  fg::global_store(p.y, fg::global_load(p.x + k + p.n));  // FAULT
}
extern "C" __global__ void load_before_the_start(const Arguments p) {
  fg::global_load(p.x - 1 - thread());  // FAULT
}
extern "C" __global__ void load_across_the_end(const Arguments p) {
  fg::global_load(reinterpret_cast<const float4*>(p.x + p.n - 4));  // FAULT
}
extern "C" __global__ void store_outside(const Arguments p) {
  fg::global_store(p.y + p.n + thread(), 1.0f);  // FAULT
}
extern "C" __global__ void add_outside(const Arguments p) {
  fg::global_add(p.y + p.n, 1.0f);  // FAULT
}
extern "C" __global__ void copy_outside(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread() + p.n, true);  // FAULT
}
extern "C" __global__ void null_pointer(const Arguments p) {
  const float* nothing = nullptr;
  fg::global_load(nothing + thread());  // FAULT
}
extern "C" __global__ void misaligned_load(const Arguments p) {
  fg::global_load(reinterpret_cast<const float4*>(p.x + 1));  // FAULT
}
extern "C" __global__ void misaligned_copy(const Arguments p) {
  fg::copy_async_16(fg::shared_memory(), p.x + 2, true);  // FAULT
}
extern "C" __global__ void misaligned_shared_store(const Arguments p) {
  fg::shared_store(reinterpret_cast<float2*>(floats() + 1), make_float2(1, 2));  // FAULT
}
extern "C" __global__ void load_of_what_is_written(const Arguments p) {
  fg::global_store(p.y + thread(), 1.0f);  // OTHER
  fg::warp_barrier();
  fg::global_load(p.y + thread());  // FAULT
}
extern "C" __global__ void store_to_what_was_loaded(const Arguments p) {
  fg::global_load(p.y + thread());  // OTHER
  fg::global_store(p.y + thread(), 1.0f);  // FAULT
}
extern "C" __global__ void stored_twice(const Arguments p) {
  fg::global_store(p.y + thread() / 2, 1.0f);  // FAULT OTHER
}
extern "C" __global__ void stored_by_two_blocks(const Arguments p) {
  fg::global_store(p.y + thread(), 1.0f);  // FAULT OTHER
}
extern "C" __global__ void stored_and_added(const Arguments p) {
  if (blockIdx.x == 0)
    fg::global_store(p.y + thread(), 1.0f);  // STORED
  else
    fg::global_add(p.y + thread(), 1.0f);  // ADDED
}

// ---- shared memory -------------------------------------------------------------------------------------------------

extern "C" __global__ void shared_overflow(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);  // FAULT
}
extern "C" __global__ void shared_underflow(const Arguments p) {
  fg::shared_store(floats() - 1, 1.0f);  // FAULT
}
extern "C" __global__ void never_written(const Arguments p) {
  if (thread() % 2 == 0) fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  fg::shared_load(floats() + thread());  // FAULT
}
extern "C" __global__ void partly_written(const Arguments p) {
  fg::shared_store(reinterpret_cast<uint16_t*>(floats() + thread()), uint16_t{1});
  fg::warp_barrier();
  fg::shared_load(floats() + thread());  // FAULT
}
extern "C" __global__ void added_to_nothing(const Arguments p) {
  fg::shared_add(floats(), 1.0f);  // FAULT
}
extern "C" __global__ void matrix_never_written(const Arguments p) {
  uint32_t r[4];
  fg::load_matrix_x4(r, fg::shared_memory() + 16 * thread());  // FAULT
}

// ---- races ---------------------------------------------------------------------------------------------------------

// Two warps: which comes first, and so which line is the later one, is up to the scheduler.
extern "C" __global__ void no_barrier_after_write(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  fg::shared_store(floats() + thread(), 2.0f);  // OTHER
  fg::warp_barrier();
  fg::shared_load(floats() + (thread() + 32) % 64);  // FAULT
}
extern "C" __global__ void no_barrier_before_write(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  fg::shared_load(floats() + (thread() + 32) % 64);  // OTHER
  fg::shared_store(floats() + thread(), 2.0f);  // FAULT
}
extern "C" __global__ void two_warps_write(const Arguments p) {
  fg::shared_store(floats() + thread() % 32, 1.0f);  // FAULT OTHER
}
extern "C" __global__ void two_lanes_write(const Arguments p) {
  fg::shared_store(floats() + thread() / 2, 1.0f);  // FAULT OTHER
}
extern "C" __global__ void no_warp_barrier_after_write(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);  // OTHER
  if (thread() == 9) fg::shared_load(floats() + 8);  // FAULT
}
extern "C" __global__ void no_warp_barrier_before_write(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);
  fg::warp_barrier();
  fg::shared_load(floats() + thread() / 2);  // OTHER
  fg::shuffle(1.0f, 0);  // orders nothing
  fg::shared_store(floats() + thread(), 1.0f);  // FAULT
}
extern "C" __global__ void many_readers(const Arguments p) {  // the writer has read too: other lanes' reads must not be forgotten
  fg::shared_store(floats() + thread(), 1.0f);
  fg::warp_barrier();
  fg::shared_load(floats());  // OTHER
  fg::shuffle(1.0f, 0);
  if (thread() == 31) fg::shared_store(floats(), 2.0f);  // FAULT
}
extern "C" __global__ void readers_of_two_warps(const Arguments p) {  // the writer's warp read last
  if (thread() == 0) fg::shared_store(floats(), 1.0f);
  fg::block_barrier();
  if (thread() / 32 == 1) fg::shared_load(floats());  // OTHER
  fg::warp_barrier();
  if (thread() / 32 == 0) fg::shared_load(floats());
  fg::warp_barrier();
  if (thread() == 0) fg::shared_store(floats(), 2.0f);  // FAULT
}
extern "C" __global__ void atomic_and_plain(const Arguments p) {
  fg::shared_store(floats() + thread(), 0.0f);
  fg::warp_barrier();
  fg::shared_add(floats() + thread(), 1.0f);  // OTHER
  if (thread() == 5) fg::shared_load(floats() + 4);  // FAULT
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

FG_DEVICE const float4* mine() { return reinterpret_cast<const float4*>(fg::shared_memory() + 16 * thread()); }

extern "C" __global__ void wait_too_weak(const Arguments p) {
  for (int k = 0; k < 2; ++k) {
    const int chunk = thread() + 32 * k;
    fg::copy_async_16(fg::shared_memory() + 16 * chunk, p.x + 4 * chunk, true);  // OTHER
    fg::copy_async_commit();
  }
  fg::copy_async_wait<1>();
  fg::shared_load(mine());
  fg::shared_load(mine() + 32);  // FAULT
}
extern "C" __global__ void no_wait(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread(), true);  // OTHER
  fg::copy_async_commit();
  fg::block_barrier();
  fg::shared_load(mine());  // FAULT
}
extern "C" __global__ void no_commit(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread(), true);  // OTHER
  fg::copy_async_wait<0>();
  fg::shared_load(mine());  // FAULT
}
extern "C" __global__ void no_barrier_after_wait(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread(), true);  // OTHER
  fg::copy_async_commit();
  fg::copy_async_wait<0>();
  if (thread() == 31) fg::shared_load(floats());  // FAULT
}
extern "C" __global__ void barrier_before_wait(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread(), true);  // OTHER
  fg::copy_async_commit();
  fg::block_barrier();
  fg::copy_async_wait<0>();
  if (thread() == 31) fg::shared_load(floats());  // FAULT
}
extern "C" __global__ void store_under_a_copy(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + 16 * thread(), p.x + 4 * thread(), true);  // OTHER
  fg::copy_async_commit();
  fg::shared_store(floats() + 4 * thread(), 1.0f);  // FAULT
}
extern "C" __global__ void copy_over_what_is_read(const Arguments p) {
  fg::shared_store(floats() + thread(), 1.0f);
  fg::block_barrier();
  if (thread() < 32)
    fg::shared_load(floats() + thread());  // OTHER
  else if (thread() < 40)
    fg::copy_async_16(fg::shared_memory() + 16 * (thread() - 32), p.x, true);  // FAULT
  fg::copy_async_commit();
}

// ---- threads that do not come together -----------------------------------------------------------------------------

extern "C" __global__ void divergent_barrier(const Arguments p) {
  if (thread() % 32 < 16)
    fg::block_barrier();  // FAULT
  else
    fg::block_barrier();  // OTHER
}
extern "C" __global__ void divergent_shuffle(const Arguments p) {
  float x = 1.0f;
  if (thread() % 32 < 16)
    x = fg::shuffle_xor(x, 1);  // FAULT
  else
    x = fg::shuffle_xor(x, 2);  // OTHER
}
extern "C" __global__ void shuffle_of_half_a_warp(const Arguments p) {
  if (thread() % 32 < 16) fg::shuffle_xor(1.0f, 1);  // FAULT
}
extern "C" __global__ void barrier_of_half_a_warp(const Arguments p) {
  if (thread() % 32 < 16) return;
  fg::block_barrier();  // FAULT
}
extern "C" __global__ void one_round_too_many(const Arguments p) {
  for (int k = 0; k < 1 + thread() / 16 % 2; ++k) fg::shuffle_xor(1.0f, 1);  // FAULT
}
extern "C" __global__ void warp_left(const Arguments p) {
  if (thread() >= 32) return;
  fg::block_barrier();  // FAULT
}
extern "C" __global__ void two_barriers(const Arguments p) {
  if (thread() < 32)
    fg::block_barrier();  // FAULT
  else
    fg::block_barrier();  // OTHER
}
extern "C" __global__ void two_matrices(const Arguments p) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  if (thread() % 32 == 7)
    fg::mma_f16(d, a, b);  // OTHER
  else
    fg::mma_f16(d, a, b);  // FAULT
}
