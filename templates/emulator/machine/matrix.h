// The matrix units: where each lane's registers lie in a fragment (PTX ISA, "Matrix fragments"), and the products.
//
// With g = lane / 4 and t = lane % 4, and pairs of 16-bit elements in a register, the lower column in the low half:
//   m16n8k16   a: rows g, g + 8 and columns 2t, 2t + 8 in the order (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8)
//              b: rows (k) 2t and 2t + 8, column g
//   m16n8k8    a: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4); b: rows t and t + 4, column g
//   both       d: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
//
// Contract: sums are made as tensor_core.h says.
#pragma once
#include <string.h>

#include "../formats.h"
#include "../interface.h"
#include "tensor_core.h"

namespace fg {
namespace emulator {

namespace matrix {

constexpr int M = 16, N = 8;

// `terms`: of one sum.
template <int terms, int K>
void product(const Call (&calls)[warp_lanes], const float (&a)[M][K], const float (&b)[K][N]) {
  static_assert(N == tensor_core::width && K % terms == 0, "a row of d is one vector, K is whole sums");
  float d[M][N];
  for (int lane = 0; lane < warp_lanes; ++lane) {
    const float* c = static_cast<const float*>(calls[lane].out);
    for (int k = 0; k < 4; ++k) d[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2] = c[k];
  }
  for (int m = 0; m < M; ++m) {
    tensor_core::Floats& row = reinterpret_cast<tensor_core::Floats&>(d[m][0]);
    for (int k = 0; k < K; k += terms)
      row = tensor_core::multiply_and_add<terms, tensor_core::mma_extra_bits>(row, a[m] + k, b[k], N);
  }
  for (int lane = 0; lane < warp_lanes; ++lane) {
    float* c = static_cast<float*>(calls[lane].out);
    for (int k = 0; k < 4; ++k) c[k] = d[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2];
  }
}

inline const uint32_t* operand(const Call& call, int which) { return static_cast<const uint32_t*>(call.in[which]); }

template <float (*convert)(uint32_t)> void mma_16bit(const Call (&calls)[warp_lanes]) {
  float a[M][16], b[16][N];
  for (int lane = 0; lane < warp_lanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r)
      for (int half = 0; half < 2; ++half)
        a[g + r % 2 * 8][2 * t + r / 2 * 8 + half] = convert(operand(calls[lane], 0)[r] >> 16 * half & 0xffff);
    for (int r = 0; r < 2; ++r)
      for (int half = 0; half < 2; ++half)
        b[2 * t + 8 * r + half][g] = convert(operand(calls[lane], 1)[r] >> 16 * half & 0xffff);
  }
  product<tensor_core::mma_terms_16bit>(calls, a, b);
}

inline void mma_tf32(const Call (&calls)[warp_lanes]) {
  float a[M][8], b[8][N];
  for (int lane = 0; lane < warp_lanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][t + r / 2 * 4] = float_of_tf32(operand(calls[lane], 0)[r]);
    for (int r = 0; r < 2; ++r) b[t + 4 * r][g] = float_of_tf32(operand(calls[lane], 1)[r]);
  }
  product<tensor_core::mma_terms_tf32>(calls, a, b);
}

// ldmatrix: lane 8 m + r supplies row r of matrix m; every lane receives two neighbours of row lane / 4, or,
// transposed, of column lane / 4, of each matrix. The rows have been checked.
inline void load(const Call (&calls)[warp_lanes], bool transposed) {
  const int count = calls[0].number;  // of matrices, each with the addresses of eight lanes
  uint16_t matrix[4][8][8];
  for (int lane = 0; lane < 8 * count; ++lane) memcpy(matrix[lane / 8][lane % 8], calls[lane].in[0], 16);
  for (int lane = 0; lane < warp_lanes; ++lane) {
    uint32_t* r = static_cast<uint32_t*>(calls[lane].out);
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int m = 0; m < count; ++m) {
      const uint32_t low = transposed ? matrix[m][t][g] : matrix[m][g][t];
      const uint32_t high = transposed ? matrix[m][t + 1][g] : matrix[m][g][t + 1];
      r[m] = low | high << 16;
    }
  }
}

// stmatrix, the other way round.
inline void store(const Call (&calls)[warp_lanes]) {
  for (int lane = 0; lane < 8 * calls[0].number; ++lane)
    for (int t = 0; t < 4; ++t)
      memcpy(static_cast<char*>(calls[lane].out) + 4 * t, operand(calls[lane % 8 * 4 + t], 0) + lane / 8, 4);
}

}  // namespace matrix
}  // namespace emulator
}  // namespace fg
