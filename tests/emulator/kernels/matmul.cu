// C = A B for A [M, K], B [K, N] of 16 bits, C [M, N] in float32, row-major; M, N multiples of 64, K of 32.
// A block of four warps makes a tile of 64 x 64, streaming tiles of A and B through a ring of two stages.
#include "flashgen_emulator.h"

struct Arguments {
  const uint16_t* a;
  const uint16_t* b;
  float* c;
  int M, N, K;
};

constexpr int tile = 64, depth = 32;
constexpr int stage_bytes = 2 * 2 * tile * depth;

// Rows of `columns` elements in 16-byte chunks; the chunk is permuted so that eight rows fall into different banks.
template <int columns> FG_DEVICE char* chunk(char* base, int row, int column) {
  constexpr int chunks = columns / 8;
  const int swizzle = chunks >= 8 ? row % 8 : row / 2 % 4;
  return base + (row * chunks + (column / 8 ^ swizzle)) * 16;
}

FG_DEVICE void load_stage(const Arguments& p, char* stage, int k0) {
  char *a = stage, *b = stage + 2 * tile * depth;
  const int row0 = int(blockIdx.y) * tile, column0 = int(blockIdx.x) * tile;
  for (int k = int(threadIdx.x); k < tile * depth / 8; k += int(blockDim.x)) {
    const int row = k / (depth / 8), column = k % (depth / 8) * 8;
    fg::copy_async_16(chunk<depth>(a, row, column), p.a + (row0 + row) * p.K + k0 + column, true);  // copy of A
  }
  for (int k = int(threadIdx.x); k < tile * depth / 8; k += int(blockDim.x)) {
    const int row = k / (tile / 8), column = k % (tile / 8) * 8;
    fg::copy_async_16(chunk<tile>(b, row, column), p.b + (k0 + row) * p.N + column0 + column, true);  // copy of B
  }
}

template <bool bfloat> FG_DEVICE void matmul(const Arguments& p) {
  char* shared = fg::shared_memory();
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float sum[8][4] = {};
  load_stage(p, shared, 0);
  fg::copy_async_commit();  // first commit
  for (int k0 = 0; k0 < p.K; k0 += depth) {
    char* stage = shared + (k0 / depth % 2) * stage_bytes;
    if (k0 + depth < p.K) load_stage(p, shared + ((k0 / depth + 1) % 2) * stage_bytes, k0 + depth);
    fg::copy_async_commit();
    fg::copy_async_wait<1>();
    fg::block_barrier();  // the stage is there
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[4], b[4];
      fg::load_matrix_x4(a, chunk<depth>(stage, 16 * warp + lane % 16, k + lane / 16 * 8));  // rows of A
      for (int n = 0; n < tile; n += 16) {
        char* const rows = stage + 2 * tile * depth;
        fg::load_matrix_x4_transposed(b, chunk<tile>(rows, k + lane % 16, n + lane / 16 * 8));  // rows of B
        for (int half = 0; half < 2; ++half) {
          const uint32_t operand[2] = {b[2 * half], b[2 * half + 1]};
          if (bfloat)
            fg::mma_bf16(sum[n / 8 + half], a, operand);
          else
            fg::mma_f16(sum[n / 8 + half], a, operand);
        }
      }
    }
    fg::block_barrier();  // the stage is free
  }
  float* c = p.c + (int(blockIdx.y) * tile + 16 * warp + lane / 4) * p.N + int(blockIdx.x) * tile + lane % 4 * 2;
  for (int n = 0; n < 8; ++n) {
    fg::global_store(reinterpret_cast<float2*>(c + 8 * n), make_float2(sum[n][0], sum[n][1]));
    fg::global_store(reinterpret_cast<float2*>(c + 8 * p.N + 8 * n), make_float2(sum[n][2], sum[n][3]));
  }
}

extern "C" __global__ void __launch_bounds__(128) matmul_f16(const Arguments p) { matmul<false>(p); }
extern "C" __global__ void __launch_bounds__(128, (1 + 1)) matmul_bf16(const Arguments p) { matmul<true>(p); }
