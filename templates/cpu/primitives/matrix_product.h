// Layer 3 of the CPU primitives: the product of bfloat16 matrices, on CPUs that have matrix registers (Intel's AMX).
//
// Contract: C[m][n] (+)= sum_k A[m][k] B[k][n], sums in float32. A lies in rows of bfloat16. B lies in pairs: lane n of
// row k / 2 holds B[k][n] in its lower half and B[k + 1][n] in its upper one. K is a multiple of matrix_depth, M of
// matrix_rows; N is whole vectors.
// FLASHGEN_MATRIX_PRODUCTS says how: 1 in the registers, the default where the compiler finds them; 0 not at all; 2 in
// vectors, slowly, so that all that is built on this can be tested on any machine.
// There is no vector extension for matrix registers: their instructions stand here, once each, by name.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>
#include "convert.h"
#include "tile_product.h"

#ifndef FLASHGEN_MATRIX_PRODUCTS
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define FLASHGEN_MATRIX_PRODUCTS 1
#else
#define FLASHGEN_MATRIX_PRODUCTS 0
#endif
#endif

#if FLASHGEN_MATRIX_PRODUCTS

namespace fg {

constexpr int matrix_rows = 16;   // of a register
constexpr int matrix_depth = 32;  // bfloat16 in a row of it

// ---- rounding to pairs -------------------------------------------------------------------------------------------
// Weights are rounded to nearest, ties away from zero: in half the instructions of ties to even, of which one number in
// 65,536 is. A NaN stays one but where all bits of its payload are set.

FG_INLINE VecU rounded(VecF x) { return reinterpret_cast<VecU>(x) + 0x8000u; }
FG_INLINE VecI pair_of(VecU low, VecU high) { return reinterpret_cast<VecI>((low >> 16) | (high & 0xffff0000u)); }
FG_INLINE void store_upper_halves(bf16* p, VecU x) {
  const Words words = __builtin_convertvector(x >> 16, Words);
  std::memcpy(p, &words, sizeof(words));
}

// W elements of two rows, as pairs.
FG_INLINE VecI pairs_of_rows(const bf16* low, const bf16* high) {
  Words x, y;
  std::memcpy(&x, low, sizeof(x));
  std::memcpy(&y, high, sizeof(y));
  return __builtin_convertvector(x, VecI) | __builtin_convertvector(y, VecI) << 16;
}

// dst[c][r] = src[r][c] where rows and columns are multiples of 2 W. Two rows make pairs of their even columns and of their odd
// ones, without a shuffle; pairs are transposed as numbers of 32 bits are.
inline __attribute__((noinline)) void turn_to(bf16* dst, int64_t ldd, const bf16* src, int64_t lds, int rows, int cols) {
  for (int r = 0; r < rows; r += 2 * W)
    for (int c = 0; c < cols; c += 2 * W)
      FG_UNROLL for (int odd = 0; odd < 2; ++odd) {
        VecF x[W];
        FG_UNROLL for (int i = 0; i < W; ++i) {
          VecU low, high;
          std::memcpy(&low, src + (r + 2 * i) * lds + c, sizeof(low));
          std::memcpy(&high, src + (r + 2 * i + 1) * lds + c, sizeof(high));
          x[i] = from_bits(odd ? pair_of(low, high) : pair_of(low << 16, high << 16));
        }
        transpose_lanes(x);
        FG_UNROLL for (int i = 0; i < W; ++i) std::memcpy(dst + (c + 2 * i + odd) * ldd + r, &x[i], sizeof(VecF));
      }
}

// ---- the registers -----------------------------------------------------------------------------------------------

#if FLASHGEN_MATRIX_PRODUCTS == 1
// Whether the system lets this process use them; the first call asks.
inline bool has_matrix_registers() {
  constexpr long ask_for_state = 0x1023, matrix_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  static const bool granted = syscall(SYS_arch_prctl, ask_for_state, matrix_data) == 0;
  return granted;
}

// Makes the registers of one thread ready, 16 rows of 64 bytes each, for the life of one object.
class MatrixRegisters {
 public:
  MatrixRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~MatrixRegisters() { asm volatile("tilerelease"); }
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;
};
#else
inline bool has_matrix_registers() { return true; }
class MatrixRegisters {
 public:
  MatrixRegisters() {}
  ~MatrixRegisters() {}
};
#endif

// ---- the product -------------------------------------------------------------------------------------------------

// Strides in elements of what they belong to.
struct MatrixOperands {
  int K;
  const bf16* a;
  int64_t lda;
  const int32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  Begin begin;
};

// Sums of 16 rows by V <= 2 vectors stand in registers 2 turn and 2 turn + 1; A's are in 4, B's in 6 and 7. Turns alternate, and
// what one leaves is stored after the next has multiplied: stores wait for products, and would keep the next ones waiting.
// Measured, 32 x 32 of depth 64 take 132 clocks in this order (128 are the products), 178 as one block of 2 x 2 registers.
#if FLASHGEN_MATRIX_PRODUCTS == 1
static_assert(W == matrix_rows, "a register is as wide as a vector");
template <int n> FG_INLINE void clear_register() { asm volatile("tilezero %%tmm%c0" : : "i"(n)); }
template <int n> FG_INLINE void load_register(const void* at, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(row_bytes), "i"(n) : "memory");
}
template <int n> FG_INLINE void store_register(void* at, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(row_bytes), "i"(n) : "memory");
}
// c += a b
template <int c, int a, int b> FG_INLINE void multiply_registers() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

template <int turn, int V> FG_INLINE void multiply(const MatrixOperands& p) {
  constexpr int left = 2 * turn, right = left + 1;
  const int64_t a_bytes = p.lda * 2, b_bytes = p.ldb * 4, c_bytes = p.ldc * 4;
  if (p.begin == Begin::zero) {
    clear_register<left>();
    if (V == 2) clear_register<right>();
  } else {
    load_register<left>(p.c, c_bytes);
    if (V == 2) load_register<right>(p.c + W, c_bytes);
  }
  const bf16* a = p.a;
  const int32_t* b = p.b;
  for (int k = p.K; k > 0; k -= matrix_depth) {
    load_register<4>(a, a_bytes);
    load_register<6>(b, b_bytes);
    multiply_registers<left, 4, 6>();
    if (V == 2) {
      load_register<7>(b + W, b_bytes);
      multiply_registers<right, 4, 7>();
    }
    a += matrix_depth;
    b += matrix_depth / 2 * p.ldb;
  }
}
template <int turn, int V> FG_INLINE void leave(float* c, int64_t ldc) {
  store_register<2 * turn>(c, ldc * 4);
  if (V == 2) store_register<2 * turn + 1>(c + W, ldc * 4);
}

template <int V> inline void matrix_panel(int M, MatrixOperands p) {
  float* last = nullptr;  // of the turn before
  for (int turn = 0; turn < M / matrix_rows; ++turn) {
    if (turn % 2 == 0) {
      multiply<0, V>(p);
      if (last != nullptr) leave<1, V>(last, p.ldc);
    } else {
      multiply<1, V>(p);
      leave<0, V>(last, p.ldc);
    }
    last = p.c;
    p.a += matrix_rows * p.lda;
    p.c += matrix_rows * p.ldc;
  }
  if (M / matrix_rows % 2 == 1)
    leave<0, V>(last, p.ldc);
  else
    leave<1, V>(last, p.ldc);
}
#else
template <int V> inline void matrix_panel(int M, const MatrixOperands& p) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) {
      float* const c = p.c + m * p.ldc + v * W;
      VecF sum = p.begin == Begin::zero ? VecF{} : load(c);
      for (int k = 0; k < p.K; k += 2) {
        const VecI pairs = load(p.b + k / 2 * p.ldb + v * W);
        const bf16* const a = p.a + m * p.lda + k;
        sum += element(a, 0) * from_bits(pairs << 16) + element(a, 1) * from_bits(pairs & ~0xffff);
      }
      store(c, sum);
    }
}
#endif

// The product of M rows by `vectors` vectors.
inline void matrix_product(int M, int vectors, int K, const bf16* a, int64_t lda, const int32_t* b, int64_t ldb, float* c,
                           int64_t ldc, Begin begin) {
  for (int v = 0; v < vectors; v += 2) {
    const MatrixOperands p = {K, a, lda, b + v * W, ldb, c + v * W, ldc, begin};
    if (vectors - v >= 2)
      matrix_panel<2>(M, p);
    else
      matrix_panel<1>(M, p);
  }
}

}  // namespace fg
#endif
