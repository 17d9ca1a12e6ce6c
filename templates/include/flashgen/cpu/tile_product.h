// Layer 3 of the CPU primitives: the one matrix product of the backend, and the transposing copy that packs for it.
//
// Contract: C[m][n] (+)= sum_k A(m, k) B[k][n] in float32, with A(m, k) = a[m * a_row + k * a_col] read as broadcast
// scalars, so that A may be transposed for nothing; of pairs of terms likewise (Terms). Rows of B and C are whole
// vectors; M is a multiple of row_multiple. Tiles are small (32..256 each way), in L1 or L2; there is no packing and no
// blocking for memory here.
// The accumulators of a block of 6 rows by block_vectors vectors stay in registers over all of k: with the vectors of
// B's row and one broadcast of A they just fit.
#pragma once
#include "flashgen/cpu/vector.h"

namespace fg {

// How C enters.
enum class Begin {
  zero,        // C = AB
  accumulate,  // C += AB
};

constexpr int row_multiple = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int block_vectors = 4;  // 6 * 4 accumulators + 4 + 1 of 32 registers
#else
constexpr int block_vectors = 2;  // 6 * 2 accumulators + 2 + 1 of 16 registers
#endif

constexpr int line_bytes = 64;

// What 32 bits of an operand hold: a number. (Or two neighbouring terms of a sum in bfloat16: Pairs of images.h.)
struct Numbers {
  static constexpr int terms = 1;
  static FG_INLINE VecF all(const float* at) { return broadcast(*at); }
  static FG_INLINE VecF multiply_add(VecF sum, VecF a, VecF b) { return sum + a * b; }
};

// Memory that a later product will read, asked for while this one is computed: `steps` lines, `step` bytes apart, then
// the lines next to these, `passes` times. One is asked for every ahead_interval steps of k: all at once they would
// take the buffers that the product's own loads wait in. Runs of neighbouring lines set off the hardware's own
// prefetching.
struct Ahead {
  const char* at = nullptr;
  int64_t step = 0;
  int64_t steps = 0;
  int passes = 0;
  int64_t done = 0;       // of the steps of this pass
  Ahead* then = nullptr;  // what is asked for when all of this has been

  // Asks for the next lines.
  FG_INLINE void ask(int lines) {
    for (; lines > 0 && passes > 0; --lines) {
      __builtin_prefetch(at + done * step, 0, 2);
      move_on(1);
    }
  }
  // This, or the first behind it of which something is left.
  FG_INLINE Ahead& current() {
    Ahead* x = this;
    while (x->passes <= 0 && x->then) x = x->then;
    return *x;
  }
  FG_INLINE void move_on(int64_t lines) {
    done += lines;
    if (done >= steps) done = 0, at += line_bytes, --passes;
  }
};
constexpr int ahead_interval = 4;

// The operands at one block, strides in 32 bits; `ahead` is asked for and moves on by ahead_step bytes.
struct ProductOperands {
  int K;
  const float* a;
  int64_t a_row, a_col;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  Begin begin;
  const char* ahead;
  int64_t ahead_step;
};

// One block of R rows by V vectors. C is read after the loop, where its loads hide behind the last products.
template <class Terms, int R, int V> inline __attribute__((noinline)) void product_block(const ProductOperands& p) {
  static_assert(R * V + V + 1 <= 32, "the accumulators must fit the registers");
  VecF sum[R][V] = {};
  const float *a = p.a, *b = p.b;
  const int64_t a_row = p.a_row, a_col = p.a_col, ldb = p.ldb;
  const char* ahead = p.ahead;
  const int64_t ahead_step = p.ahead_step;
  FG_UNROLL_BY_2 for (int k = p.K; k > 0; --k) {
    VecF row[V];
    FG_UNROLL for (int v = 0; v < V; ++v) row[v] = load(b + v * W);
    FG_UNROLL for (int m = 0; m < R; ++m) {
      const VecF factor = Terms::all(a + m * a_row);
      FG_UNROLL for (int v = 0; v < V; ++v) sum[m][v] = Terms::multiply_add(sum[m][v], factor, row[v]);
    }
    a += a_col;
    b += ldb;
    if (k % ahead_interval == 0) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += ahead_step;
    }
  }
  float* const c = p.c;
  const int64_t ldc = p.ldc;
  if (p.begin == Begin::zero) {
    FG_UNROLL for (int m = 0; m < R; ++m)
      FG_UNROLL for (int v = 0; v < V; ++v) store(c + m * ldc + v * W, sum[m][v]);
  } else {
    FG_UNROLL for (int m = 0; m < R; ++m)
      FG_UNROLL for (int v = 0; v < V; ++v) store(c + m * ldc + v * W, load(c + m * ldc + v * W) + sum[m][v]);
  }
}

// All rows of a panel of V vectors: blocks of 6, then of 4; of one vector alone of 8, as sums wait for the last one. B's panel stays in L1.
template <class Terms, int V> inline void product_panel(int M, ProductOperands p, Ahead& of_call) {
  for (int left = M; left > 0;) {
    const int rows = V == 1 && left >= 8 ? 8 : left == 8 || left < 6 ? 4 : 6;
    Ahead& ahead = of_call.current();
    p.ahead = ahead.passes > 0 ? ahead.at + ahead.done * ahead.step : reinterpret_cast<const char*>(p.a);
    p.ahead_step = ahead.passes > 0 ? ahead.step : 0;
    ahead.move_on(p.K / ahead_interval);
    if (V == 1 && rows == 8)
      product_block<Terms, 8, 1>(p);
    else if (rows == 6)
      product_block<Terms, 6, V>(p);
    else
      product_block<Terms, 4, V>(p);
    p.a += rows * p.a_row;
    p.c += rows * p.ldc;
    left -= rows;
  }
}

// The product of M rows by `vectors` vectors; strides and leading dimensions in floats. Leading dimensions that are a
// large power of two crowd a few sets of the L1 cache: N + W is up to a tenth faster than N. Of `ahead` as much is
// asked for as there is time for.
template <class Terms>
inline void tile_product(int M, int vectors, int K, const float* a, int64_t a_row, int64_t a_col, const float* b,
                         int64_t ldb, float* c, int64_t ldc, Begin begin, Ahead& ahead) {
  for (int v = 0; v < vectors;) {
    const ProductOperands p = {K, a, a_row, a_col, b + v * W, ldb, c + v * W, ldc, begin, nullptr, 0};
    const int left = vectors - v;
    if (block_vectors == 4 && left >= 4) {
      product_panel<Terms, block_vectors>(M, p, ahead);
      v += 4;
    } else if (left >= 2) {
      product_panel<Terms, 2>(M, p, ahead);
      v += 2;
    } else {
      product_panel<Terms, 1>(M, p, ahead);
      v += 1;
    }
  }
}

// ---- transposing copy --------------------------------------------------------------------------------------------

#if FG_LANES != 8
// The lower (upper) halves of a and b, interleaved lane by lane.
FG_INLINE VecF interleave_low(VecF a, VecF b) {
#if FG_LANES == 16
  return FG_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return FG_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
FG_INLINE VecF interleave_high(VecF a, VecF b) {
#if FG_LANES == 16
  return FG_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return FG_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}
#endif

// Transposes the W x W matrix of x, in registers.
FG_INLINE void transpose_lanes(VecF x[W]) {
#if FG_LANES == 8
  // Within halves of 128 bits, then halves: 24 instructions instead of the 48 that lanes in order take.
  VecF y[8], z[8];
  FG_UNROLL for (int i = 0; i < 8; i += 2) {
    y[i] = FG_SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[i + 1] = FG_SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  FG_UNROLL for (int i = 0; i < 8; i += 4) {
    FG_UNROLL for (int n = 0; n < 2; ++n) {
      z[i + 2 * n] = FG_SHUFFLE(y[i + n], y[i + n + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      z[i + 2 * n + 1] = FG_SHUFFLE(y[i + n], y[i + n + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  FG_UNROLL for (int i = 0; i < 4; ++i) {
    x[i] = FG_SHUFFLE(z[i], z[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = FG_SHUFFLE(z[i], z[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  // log2(W) rounds, each interleaving row i with row i + W/2.
  FG_UNROLL for (int round = 1; round < W; round *= 2) {
    VecF y[W];
    FG_UNROLL for (int i = 0; i < W / 2; ++i) {
      y[2 * i] = interleave_low(x[i], x[i + W / 2]);
      y[2 * i + 1] = interleave_high(x[i], x[i + W / 2]);
    }
    FG_UNROLL for (int i = 0; i < W; ++i) x[i] = y[i];
  }
#endif
}

// dst[c][r] = src[r][c] for any rows and cols; leading dimensions in floats. Touches nothing else.
inline __attribute__((noinline)) void transpose_to(
    float* dst, int64_t ldd, const float* src, int64_t lds, int rows, int cols) {
  for (int r = 0; r < rows; r += W)
    for (int c = 0; c < cols; c += W) {
      const float* from = src + r * lds + c;
      float* to = dst + c * ldd + r;
      VecF x[W];
      if (r + W <= rows && c + W <= cols) {
        FG_UNROLL for (int i = 0; i < W; ++i) x[i] = load(from + i * lds);
        transpose_lanes(x);
        FG_UNROLL for (int i = 0; i < W; ++i) store(to + i * ldd, x[i]);
      } else {
        for (int i = 0; i < W && c + i < cols; ++i)
          for (int j = 0; j < W && r + j < rows; ++j) to[i * ldd + j] = from[j * lds + i];
      }
    }
}

}  // namespace fg
