// One kernel for each primitive, or few of them, whose result is known.
#include "flashgen_emulator.h"

struct Arguments {
  const void* x;
  void* y;
  int n;
};

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE int global_thread() { return int(blockIdx.x * blockDim.x + threadIdx.x); }
template <class T> FG_DEVICE const T* in(const Arguments& p) { return static_cast<const T*>(p.x); }
template <class T> FG_DEVICE T* out(const Arguments& p) { return static_cast<T*>(p.y); }

// ---- memory --------------------------------------------------------------------------------------------------------

// Through registers and through shared memory.
template <class T> FG_DEVICE void copy(const Arguments& p) {
  T* const mine = reinterpret_cast<T*>(fg::shared_memory()) + thread();
  for (int k = global_thread(); k < p.n; k += int(gridDim.x * blockDim.x)) {
    fg::shared_store(mine, fg::global_load(in<T>(p) + k));
    fg::global_store(out<T>(p) + k, fg::shared_load(mine));
  }
}
extern "C" __global__ void copy_2(const Arguments p) { copy<uint16_t>(p); }
extern "C" __global__ void copy_4(const Arguments p) { copy<float>(p); }
extern "C" __global__ void copy_8(const Arguments p) { copy<float2>(p); }
extern "C" __global__ void copy_16(const Arguments p) { copy<float4>(p); }

// Bytes to floats.
extern "C" __global__ void copy_1(const Arguments p) {
  const int k = global_thread();
  if (k < p.n) fg::global_store(out<float>(p) + k, float(fg::global_load(in<uint8_t>(p) + k)));
}

// Chunks of 16 bytes in reverse order inside a block; chunks from n on are zeros and are not read.
extern "C" __global__ void copy_async(const Arguments p) {
  const int last = int(blockDim.x) - 1, first = int(blockIdx.x * blockDim.x);
  float4* const shared = reinterpret_cast<float4*>(fg::shared_memory());
  fg::copy_async_16(shared + thread(), in<float4>(p) + first + thread(), first + thread() < p.n);
  fg::copy_async_commit();
  fg::copy_async_wait<0>();
  fg::block_barrier();
  fg::global_store(out<float4>(p) + first + thread(), fg::shared_load(shared + last - thread()));
}

// Histogram of n numbers below 8: atomic in shared memory, then in global memory.
extern "C" __global__ void histogram(const Arguments p) {
  float* const count = reinterpret_cast<float*>(fg::shared_memory());
  if (thread() < 8) fg::shared_store(count + thread(), 0.0f);
  fg::block_barrier();
  if (global_thread() < p.n) fg::shared_add(count + fg::global_load(in<int>(p) + global_thread()), 1.0f);
  fg::block_barrier();
  if (thread() < 8) fg::global_add(out<float>(p) + thread(), fg::shared_load(count + thread()));
}

// Sums of every n-th row of 128 numbers; each warp takes a row at a time to shared memory, and one thread sends it on.
extern "C" __global__ void bulk_add(const Arguments p) {
  const int lane = thread() % 32, warp = thread() / 32, warps = int(blockDim.x) / 32;
  float* const mine = reinterpret_cast<float*>(fg::shared_memory()) + 128 * warp;
  for (int row = warp; row < 6 * p.n; row += warps) {
    if (lane == 0) fg::bulk_wait_read();
    fg::warp_barrier();
    fg::shared_store(reinterpret_cast<float4*>(mine) + lane, fg::global_load(in<float4>(p) + 32 * row + lane));
    fg::publish_shared();
    fg::warp_barrier();
    if (lane == 0) fg::bulk_add_async(out<float>(p) + row % p.n * 128, mine, 512);
    fg::bulk_commit();
  }
  fg::bulk_wait_read();
}

// ---- threads -------------------------------------------------------------------------------------------------------

// What a thread knows of itself, in the order of blocks and threads.
extern "C" __global__ void indices(const Arguments p) {
  const int block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  const int inside = int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  const int threads = int(blockDim.x * blockDim.y * blockDim.z);
  const int digits[6] = {int(blockIdx.x),  int(blockIdx.y),  int(blockIdx.z),
                         int(threadIdx.x), int(threadIdx.y), int(threadIdx.z)};
  for (int k = 0; k < 6; ++k) fg::global_store(out<int>(p) + 6 * (block * threads + inside) + k, digits[k]);
}

// Sum of a block's numbers: over lanes by shuffles, over warps through shared memory.
extern "C" __global__ void block_sum(const Arguments p) {
  float* const of_warp = reinterpret_cast<float*>(fg::shared_memory());
  float x = fg::global_load(in<float>(p) + global_thread());
  for (int mask = 16; mask > 0; mask /= 2) x += fg::shuffle_xor(x, mask);
  if (thread() % 32 == 0) fg::shared_store(of_warp + thread() / 32, x);
  fg::block_barrier();
  if (thread() != 0) return;
  float sum = 0;
  for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) sum += fg::shared_load(of_warp + warp);
  fg::global_store(out<float>(p) + blockIdx.x, sum);
}

// Rows of 8 words: the lane's own, xor 5, lane 3, the next lane, 8 bytes from the lane before, ballot, warp and lane.
extern "C" __global__ void shuffles(const Arguments p) {
  const uint32_t x = fg::global_load(in<uint32_t>(p) + thread());
  const uint64_t wide = uint64_t{x} << 32 | uint32_t(thread());
  const uint64_t before = fg::shuffle(wide, (thread() + 31) % 32);
  const uint32_t words[8] = {x, fg::shuffle_xor(x, 5), fg::shuffle(x, 3), fg::shuffle(x, thread() + 1),
                             uint32_t(before >> 32), uint32_t(before), fg::ballot(x % 3 == 0),
                             uint32_t(100 * fg::warp_index() + fg::lane_index())};
  for (int k = 0; k < 8; ++k) fg::global_store(out<uint32_t>(p) + 8 * thread() + k, words[k]);
}

// ---- matrices ------------------------------------------------------------------------------------------------------

// Four matrices of 8 x 8 words of 16 bits, as registers: 4 of load_matrix_x4, 4 of the transposed one.
extern "C" __global__ void load_matrices(const Arguments p) {
  float4* const rows = reinterpret_cast<float4*>(fg::shared_memory());
  fg::shared_store(rows + thread(), fg::global_load(in<float4>(p) + thread()));
  fg::warp_barrier();
  uint32_t plain[4], transposed[4];
  fg::load_matrix_x4(plain, rows + thread());
  fg::load_matrix_x4_transposed(transposed, rows + thread());
  for (int k = 0; k < 4; ++k) {
    fg::global_store(out<uint32_t>(p) + 8 * thread() + k, plain[k]);
    fg::global_store(out<uint32_t>(p) + 8 * thread() + 4 + k, transposed[k]);
  }
}

// The same matrices from the registers of lanes: matrix after matrix, each lane's pair of elements of each.
extern "C" __global__ void store_matrices(const Arguments p) {
  uint32_t r[4];
  for (int k = 0; k < 4; ++k) r[k] = fg::global_load(in<uint32_t>(p) + 32 * k + thread());
  float4* const rows = reinterpret_cast<float4*>(fg::shared_memory());
  fg::store_matrix_x4(rows + thread(), r);
  fg::warp_barrier();
  fg::global_store(out<float4>(p) + thread(), fg::shared_load(rows + thread()));
}

// D + A B for A 16 x 8, B 8 x 8, D 16 x 8 in float32, one after the other in x; the PTX ISA's fragments, spelled out.
extern "C" __global__ void mma_tf32(const Arguments p) {
  const uint32_t *A = in<uint32_t>(p), *B = A + 128;
  const float* D = reinterpret_cast<const float*>(B + 64);
  const int g = thread() / 4, t = thread() % 4;
  const uint32_t a[4] = {fg::global_load(A + 8 * g + t), fg::global_load(A + 8 * (g + 8) + t),
                         fg::global_load(A + 8 * g + t + 4), fg::global_load(A + 8 * (g + 8) + t + 4)};
  const uint32_t b[2] = {fg::global_load(B + 8 * t + g), fg::global_load(B + 8 * (t + 4) + g)};
  float d[4];
  for (int k = 0; k < 4; ++k) d[k] = fg::global_load(D + 8 * (g + k / 2 * 8) + 2 * t + k % 2);
  fg::mma_tf32(d, a, b);
  for (int k = 0; k < 4; ++k) fg::global_store(out<float>(p) + 8 * (g + k / 2 * 8) + 2 * t + k % 2, d[k]);
}

// ---- numbers -------------------------------------------------------------------------------------------------------

// Rows of 3 words: pack_f16(x, -x), pack_bf16(x, -x), unpack_f16 of the low half of the first.
extern "C" __global__ void conversions(const Arguments p) {
  const int k = global_thread();
  if (k >= p.n) return;
  const float x = fg::global_load(in<float>(p) + k);
  const uint32_t half = fg::pack_f16(x, -x);
  const float back = fg::unpack_f16(uint16_t(half));
  const uint32_t words[3] = {half, fg::pack_bf16(x, -x), __float_as_uint(back)};
  for (int n = 0; n < 3; ++n) fg::global_store(out<uint32_t>(p) + 3 * k + n, words[n]);
}

// Pairs: 2^x, 1 / x.
extern "C" __global__ void special_functions(const Arguments p) {
  const int k = global_thread();
  if (k >= p.n) return;
  const float x = fg::global_load(in<float>(p) + k);
  fg::global_store(out<float2>(p) + k, make_float2(fg::exp2_approximate(x), fg::reciprocal_approximate(x)));
}
