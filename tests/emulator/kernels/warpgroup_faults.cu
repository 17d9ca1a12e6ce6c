// One kernel for each mistake with products of warpgroups and asynchronous additions; marks as in faults.cu.
#include "flashgen_emulator.h"

struct Arguments {
  const float* x;
  float* y;
  int n;
};

// A is 64 x 16, B is 16 x 16, both along rows of 32 bytes.
constexpr int a_bytes = 64 * 32, floats = (64 + 16) * 32 / 4;

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE float* place() { return reinterpret_cast<float*>(fg::shared_memory()); }
FG_DEVICE fg::SharedMatrix a() { return fg::shared_matrix<32>(fg::shared_memory(), 0, 256); }
FG_DEVICE fg::SharedMatrix b() { return fg::shared_matrix<32>(fg::shared_memory() + a_bytes, 0, 256); }
FG_DEVICE void fill() {
  for (int k = thread(); k < floats; k += int(blockDim.x)) fg::shared_store(place() + k, 0.0f);  // OTHER
}
FG_DEVICE void ready() {
  fill();
  fg::publish_shared();
  fg::block_barrier();
}
#define MULTIPLY(d) fg::warpgroup_multiply<fg::half_t, false, false>(d, a(), b(), true)

// ---- products that nothing waits for -------------------------------------------------------------------------------

extern "C" __global__ void no_wait(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_commit();
}
extern "C" __global__ void no_commit(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
}
extern "C" __global__ void wait_before_commit(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_wait<0>();
  fg::block_barrier();
}
extern "C" __global__ void wait_too_weak(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  for (int k = 0; k < 2; ++k) {
    MULTIPLY(d);  // FAULT
    fg::warpgroup_commit();
  }
  fg::warpgroup_wait<1>();
}

// ---- registers -----------------------------------------------------------------------------------------------------

extern "C" __global__ void no_arrival(const Arguments p) {
  float d[2][4] = {};
  ready();
  MULTIPLY(d);  // FAULT
}
extern "C" __global__ void no_arrival_after_wait(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  for (int k = 0; k < 2; ++k) {
    MULTIPLY(d);  // FAULT
    fg::warpgroup_commit();
    fg::warpgroup_wait<0>();
    for (auto& tile : d) tile[0] *= 2.0f;
  }
}
extern "C" __global__ void accumulator_written_early(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_commit();
  if (thread() == 77) d[1][2] = 0.0f;
  fg::warpgroup_wait<0>();  // OTHER
}
extern "C" __global__ void accumulator_scaled_early(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_commit();
  for (auto& tile : d) tile[0] *= float(p.n);
  MULTIPLY(d);
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();  // OTHER
}
extern "C" __global__ void accumulator_of_two_widths(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // OTHER
  MULTIPLY(reinterpret_cast<float(&)[1][4]>(d));  // FAULT
}
extern "C" __global__ void operand_written_early(const Arguments p) {
  float d[2][4] = {};
  uint32_t registers[4] = {};
  ready();
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false>(d, registers, b(), true);  // FAULT
  fg::warpgroup_commit();
  registers[3] = uint32_t(p.n);
  fg::warpgroup_wait<0>();  // OTHER
}
// Not reported: what is read too early is NaN.
extern "C" __global__ void accumulator_read_early(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);
  fg::warpgroup_commit();
  fg::global_store(p.y + thread(), 2.0f * d[0][0]);
  fg::warpgroup_wait<0>();
  fg::global_store(p.y + 256 + thread(), 2.0f * d[0][0]);
}

// ---- shared memory that is not there for a product -----------------------------------------------------------------

template <class Publish> FG_DEVICE void start(float (&d)[2][4], Publish publish) {
  publish();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
}
extern "C" __global__ void not_published(const Arguments p) {
  float d[2][4] = {};
  fill();
  start(d, [] { fg::block_barrier(); });
}
extern "C" __global__ void published_before_the_write(const Arguments p) {
  float d[2][4] = {};
  fg::publish_shared();
  fill();
  start(d, [] { fg::block_barrier(); });
}
extern "C" __global__ void published_before_the_second_write(const Arguments p) {
  float d[2][4] = {};
  ready();
  fill();
  start(d, [] { fg::block_barrier(); });
}
extern "C" __global__ void published_after_the_barrier(const Arguments p) {
  float d[2][4] = {};
  fill();
  start(d, [] { fg::block_barrier(), fg::publish_shared(); });
}
extern "C" __global__ void published_by_another_thread(const Arguments p) {
  float d[2][4] = {};
  fill();
  if (thread() != 40) fg::publish_shared();
  start(d, [] { fg::block_barrier(); });
}
extern "C" __global__ void no_barrier_after_write(const Arguments p) {
  float d[2][4] = {};
  fill();
  start(d, [] { fg::publish_shared(); });
}
extern "C" __global__ void warp_barrier_after_write(const Arguments p) {
  float d[2][4] = {};
  fill();
  start(d, [] { fg::publish_shared(), fg::warp_barrier(); });
}
extern "C" __global__ void never_written(const Arguments p) {
  float d[2][4] = {};
  start(d, [] { fg::block_barrier(); });
}

FG_DEVICE void copy(const Arguments& p) {
  for (int k = thread(); k < floats / 4; k += int(blockDim.x)) fg::copy_async_16(place() + 4 * k, p.x, true);  // OTHER
  fg::copy_async_commit();
}
extern "C" __global__ void copy_not_awaited(const Arguments p) {
  float d[2][4] = {};
  copy(p);
  start(d, [] { fg::publish_shared(), fg::block_barrier(); });
}
extern "C" __global__ void copy_published_before_it_landed(const Arguments p) {
  float d[2][4] = {};
  copy(p);
  start(d, [] { fg::publish_shared(), fg::copy_async_wait<0>(), fg::block_barrier(); });
}
extern "C" __global__ void copy_awaited_under_the_product(const Arguments p) {
  float d[2][4] = {};
  copy(p);
  fg::publish_shared();
  fg::block_barrier();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // FAULT
  fg::warpgroup_commit();
  fg::copy_async_wait<0>();
  fg::publish_shared();
  fg::block_barrier();
  fg::warpgroup_wait<0>();
}

// ---- matrices that are elsewhere -----------------------------------------------------------------------------------

FG_DEVICE void multiply_by(fg::SharedMatrix b) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::bfloat_t, false, false>(d, a(), b, false);  // FAULT
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
}
extern "C" __global__ void stride_too_long(const Arguments p) {
  multiply_by(fg::shared_matrix<32>(fg::shared_memory() + a_bytes, 0, 512));
}
extern "C" __global__ void stride_far_too_long(const Arguments p) {
  multiply_by(fg::shared_matrix<32>(fg::shared_memory() + a_bytes, 0, 16384));
}
extern "C" __global__ void stride_of_half_a_chunk(const Arguments p) {
  multiply_by(fg::shared_matrix<32>(fg::shared_memory() + a_bytes, 0, 264));
}
extern "C" __global__ void stride_backwards(const Arguments p) {
  multiply_by(fg::shared_matrix<32>(fg::shared_memory() + a_bytes, 0, -256));
}
extern "C" __global__ void start_inside_a_chunk(const Arguments p) {
  multiply_by(fg::advance(b(), 2));
}

// ---- shared memory that is overwritten under a product -------------------------------------------------------------

template <class Then> FG_DEVICE void overwritten(bool mine, Then then) {
  float d[2][4] = {};
  ready();
  if (mine) fg::warpgroup_arrive();
  if (mine) MULTIPLY(d);  // FAULT
  if (mine) fg::warpgroup_commit();
  then();
  if (mine) fg::warpgroup_wait<0>();
}
extern "C" __global__ void overwritten_by_itself(const Arguments p) {
  overwritten(true, [] {
    if (thread() == 5) fg::shared_store(place() + 9, 1.0f);  // OTHER
  });
}
extern "C" __global__ void overwritten_by_another_warp_of_its(const Arguments p) {
  overwritten(true, [] {
    fg::block_barrier();
    if (thread() == 100) fg::shared_store(place() + 9, 1.0f);  // OTHER
    fg::publish_shared();
    fg::block_barrier();
  });
}
extern "C" __global__ void overwritten_behind_barriers(const Arguments p) {  // by the second warpgroup
  overwritten(thread() < 128, [] {
    fg::block_barrier();
    if (thread() == 200) fg::shared_store(place() + 9, 1.0f);  // OTHER
    fg::publish_shared();
    fg::block_barrier();
  });
}
extern "C" __global__ void copied_over(const Arguments p) {
  overwritten(thread() < 128, [&] {
    fg::block_barrier();
    if (thread() == 200) fg::copy_async_16(place() + 8, p.x, true);  // OTHER
    fg::copy_async_commit();
  });
}
extern "C" __global__ void overwritten_after_the_wait(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // OTHER
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
  if (thread() == p.n) fg::shared_store(place() + 9, 1.0f);  // FAULT
}
extern "C" __global__ void overwritten_after_a_warp_barrier(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  MULTIPLY(d);  // OTHER
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
  fg::warp_barrier();
  if (thread() == p.n) fg::shared_store(place() + 9, 1.0f);  // FAULT
}
extern "C" __global__ void overwritten_by_another_warpgroup(const Arguments p) {
  float d[2][4] = {};
  ready();
  for (int k = 0; k < (thread() < 128 ? 0 : 5); ++k) fg::warp_barrier();  // so that either may come first
  if (thread() == 200) fg::shared_store(place() + 9, 1.0f);  // STORE
  if (thread() >= 128) return;
  fg::warpgroup_arrive();
  MULTIPLY(d);  // PRODUCT
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
}

// ---- warps that do not come together -------------------------------------------------------------------------------

extern "C" __global__ void lanes_apart(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  if (thread() % 32 < 9)
    MULTIPLY(d);  // FAULT
  else
    MULTIPLY(d);  // OTHER
}
extern "C" __global__ void warps_apart(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  if (thread() < 96)
    MULTIPLY(d);  // HERE
  else
    MULTIPLY(d);  // THERE
}
extern "C" __global__ void warp_at_a_barrier(const Arguments p) {
  if (thread() < 32) fg::block_barrier();  // OTHER
  fg::warpgroup_arrive();  // FAULT
}
extern "C" __global__ void warp_left(const Arguments p) {
  if (thread() / 32 == 2) return;
  fg::warpgroup_arrive();  // FAULT
}
extern "C" __global__ void three_warps(const Arguments p) {
  if (thread() < 96) fg::warpgroup_commit();  // FAULT
}
extern "C" __global__ void two_matrices(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false, false>(d, a(), fg::advance(b(), thread() / 96 * 256), true);  // FAULT
}
extern "C" __global__ void one_lane_adds(const Arguments p) {
  float d[2][4] = {};
  ready();
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false, false>(d, a(), b(), thread() == 127);  // FAULT
}

// ---- asynchronous additions to global memory -----------------------------------------------------------------------

// Warp 0 writes 128 numbers and adds them to y.
template <class Ready, class Then> FG_DEVICE void add_all(const Arguments& p, Ready ready, Then then) {
  if (thread() >= 32) return;
  fg::shared_store(reinterpret_cast<float4*>(place()) + thread(), float4{});  // OTHER
  ready();
  if (thread() == 0) fg::bulk_add_async(p.y, place(), 512);  // FAULT OTHER
  fg::bulk_commit();
  then();
}
FG_DEVICE void published() {
  fg::publish_shared();
  fg::warp_barrier();
}
extern "C" __global__ void addition_not_published(const Arguments p) {
  add_all(p, [] { fg::warp_barrier(); }, [] { fg::bulk_wait_read(); });
}
extern "C" __global__ void addition_published_by_one_thread(const Arguments p) {
  add_all(p, [] { fg::warp_barrier(); if (thread() == 0) fg::publish_shared(); }, [] { fg::bulk_wait_read(); });
}
extern "C" __global__ void addition_without_barrier(const Arguments p) {
  add_all(p, [] { fg::publish_shared(), fg::ballot(true); }, [] { fg::bulk_wait_read(); });
}
extern "C" __global__ void addition_not_awaited(const Arguments p) {
  add_all(p, published, [] {});
}
extern "C" __global__ void addition_not_committed(const Arguments p) {
  if (thread() >= 32) return;
  fg::shared_store(reinterpret_cast<float4*>(place()) + thread(), float4{});
  published();
  if (thread() == 0) fg::bulk_add_async(p.y, place(), 512);  // FAULT
  fg::bulk_wait_read();
}
extern "C" __global__ void addition_overwritten(const Arguments p) {
  add_all(p, published, [] {
    fg::warp_barrier();
    if (thread() == 3) fg::shared_store(place() + 12, 1.0f);  // FAULT
    fg::warp_barrier();
    fg::bulk_wait_read();
  });
}
extern "C" __global__ void addition_overwritten_by_its_thread(const Arguments p) {
  add_all(p, published, [] {
    fg::shared_load(place() + 12);
    if (thread() == 0) fg::shared_store(place() + 12, 1.0f);  // FAULT
  });
}
extern "C" __global__ void addition_overwritten_after_the_wait(const Arguments p) {  // of another lane
  add_all(p, published, [] {
    fg::bulk_wait_read();
    if (thread() == 3) fg::shared_store(place() + 12, 1.0f);  // FAULT
  });
}
extern "C" __global__ void addition_of_half_a_chunk(const Arguments p) {
  fg::bulk_add_async(p.y, place(), 24);  // FAULT
}
extern "C" __global__ void addition_misaligned(const Arguments p) {
  ready();
  if (thread() == 0) fg::bulk_add_async(p.y + 2, place(), 32);  // FAULT
}
extern "C" __global__ void addition_outside(const Arguments p) {
  ready();
  if (thread() == 0) fg::bulk_add_async(p.y + 508, place(), 32);  // FAULT
}
