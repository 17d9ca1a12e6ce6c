// C = A B for A [M, K], B [K, N] of 16 bits, C [M, N] in float32, row-major; M a multiple of 128, N and K of 64.
// A block of two warpgroups makes a tile of 128 x 64, streaming tiles of A and B through a ring of three stages: one is
// loaded, one is multiplied, and the product of the one before may still run.
#include "flashgen_emulator.h"

struct Arguments {
  const uint16_t* a;
  const uint16_t* b;
  float* c;
  int M, N, K;
};

constexpr int rows = 128, columns = 64, depth = 64, stages = 3;
constexpr int a_bytes = 2 * rows * depth, stage_bytes = a_bytes + 2 * depth * columns;

// Both tiles have rows of 128 bytes, eight chunks, permuted by the row.
FG_DEVICE char* chunk(char* base, int row, int column) { return base + (row * 8 + (column / 8 ^ row % 8)) * 16; }
FG_DEVICE char* stage_of(int k0) { return fg::shared_memory() + k0 / depth % stages * stage_bytes; }

FG_DEVICE void load_stage(const Arguments& p, int k0) {
  if (k0 >= p.K) return;
  char *a = stage_of(k0), *b = a + a_bytes;
  const int row0 = int(blockIdx.y) * rows, column0 = int(blockIdx.x) * columns;
  for (int n = int(threadIdx.x); n < rows * 8; n += int(blockDim.x))
    fg::copy_async_16(chunk(a, n / 8, n % 8 * 8), p.a + (row0 + n / 8) * p.K + k0 + n % 8 * 8, true);  // A
  for (int n = int(threadIdx.x); n < depth * 8; n += int(blockDim.x))
    fg::copy_async_16(chunk(b, n / 8, n % 8 * 8), p.b + (k0 + n / 8) * p.N + column0 + n % 8 * 8, true);  // B
  fg::copy_async_commit();
}

template <class T> FG_DEVICE void matmul(const Arguments& p) {
  const int group = int(threadIdx.x) / 128, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float sum[columns / 8][4];
  load_stage(p, 0);
  for (int k0 = 0; k0 < p.K; k0 += depth) {
    fg::copy_async_wait<0>();
    fg::publish_shared();
    fg::block_barrier();  // the stage is there, and the product before the last one is done
    load_stage(p, k0 + depth);
    const auto a = fg::shared_matrix<128>(stage_of(k0) + group * 64 * 128, 0, 8 * 128);
    const auto b = fg::shared_matrix<128>(stage_of(k0) + a_bytes, 0, 8 * 128);
    fg::warpgroup_arrive();
    for (int k = 0; k < depth; k += 16)
      fg::warpgroup_multiply<T, false, true>(sum, fg::advance(a, 2 * k), fg::advance(b, k * 128), k0 + k > 0);
    fg::warpgroup_commit();
    fg::warpgroup_wait<1>();
  }
  fg::warpgroup_wait<0>();
  float* c = p.c + (int(blockIdx.y) * rows + 16 * warp + lane / 4) * p.N + int(blockIdx.x) * columns + lane % 4 * 2;
  for (int n = 0; n < columns / 8; ++n) {
    fg::global_store(reinterpret_cast<float2*>(c + 8 * n), make_float2(sum[n][0], sum[n][1]));
    fg::global_store(reinterpret_cast<float2*>(c + 8 * p.N + 8 * n), make_float2(sum[n][2], sum[n][3]));
  }
}

extern "C" __global__ void __launch_bounds__(256) matmul_f16(const Arguments p) { matmul<fg::half_t>(p); }
extern "C" __global__ void __launch_bounds__(256) matmul_bf16(const Arguments p) { matmul<fg::bfloat_t>(p); }
