// Accesses to shared memory whose bank conflicts are counted by hand; the line that is looked at carries the mark HERE.
#include "flashgen_emulator.h"

struct Arguments {
  int stride;
};

FG_DEVICE int thread() { return int(threadIdx.x); }
template <class T> FG_DEVICE T* shared() { return reinterpret_cast<T*>(fg::shared_memory()); }

FG_DEVICE void clear(int words) {
  for (int k = thread(); k < words; k += 32) fg::shared_store(shared<float>() + k, 0.0f);
  fg::block_barrier();
}

extern "C" __global__ void load_4(const Arguments p) {
  clear(32 * 32);
  fg::shared_load(shared<float>() + thread() * p.stride);  // HERE
}
extern "C" __global__ void load_2(const Arguments p) {
  clear(32 * 32);
  fg::shared_load(shared<uint16_t>() + thread() * p.stride);  // HERE
}
extern "C" __global__ void load_8(const Arguments p) {
  clear(2 * 32 * 32);
  fg::shared_load(shared<float2>() + thread() * p.stride);  // HERE
}
extern "C" __global__ void load_16(const Arguments p) {
  clear(4 * 32 * 32);
  fg::shared_load(shared<float4>() + thread() * p.stride);  // HERE
}
extern "C" __global__ void store_4(const Arguments p) {
  fg::shared_store(shared<float>() + thread() * p.stride, 1.0f);  // HERE
}
extern "C" __global__ void half_a_warp(const Arguments p) {
  if (thread() % 2) fg::shared_store(shared<float>() + thread() * p.stride, 1.0f);  // HERE
}
// 8 rows of 16 bytes from each of 4 places, the rows `stride` bytes apart.
extern "C" __global__ void load_matrix(const Arguments p) {
  clear(8 * p.stride / 4 + 16);
  uint32_t r[4];
  fg::load_matrix_x4(r, fg::shared_memory() + thread() % 8 * p.stride + thread() / 8 * 16);  // HERE
}
// The same in rows of 128 bytes, the chunks of a row permuted by the row.
extern "C" __global__ void load_swizzled_matrix(const Arguments) {
  clear(8 * 32);
  uint32_t r[4];
  fg::load_matrix_x4(r, fg::shared_memory() + thread() % 8 * 128 + (thread() / 8 ^ thread() % 8) * 16);  // HERE
}
// Two iterations, of which the second has conflicts: they are two requests, although lanes run one after the other.
extern "C" __global__ void two_rounds(const Arguments p) {
  clear(32 * 32);
  for (int k = 0; k < 2; ++k) fg::shared_load(shared<float>() + thread() * (k ? p.stride : 1));  // HERE
}
// Conflicts in a function that two lines call, of which one has none.
FG_DEVICE float column(int stride) { return fg::shared_load(shared<float>() + thread() * stride); }  // INNER

extern "C" __global__ void two_callers(const Arguments p) {
  clear(32 * 32);
  column(1);
  column(p.stride);  // OUTER
}
extern "C" __global__ void copies(const Arguments p) {
  fg::copy_async_16(fg::shared_memory() + thread() * p.stride, nullptr, false);  // HERE
}
