// Layer 3 of the CPU primitives: matrix products on CPUs that have matrix registers (Intel's AMX).
//
// Contract: C[m][n] (+)= sum_k A[m][k] B[k][n], sums in float32; of bfloat16, or of finer numbers as sums of bfloat16
// `parts`: part i of A is multiplied with those parts of B that follow fewer than `parts` - i others. What that leaves
// out is about 2^(-8 parts) of a term: three parts are as good as float32.
// There is no vector extension for matrix registers: their instructions stand here, once each, by name.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>
#include "flashgen/cpu/images.h"

#if FLASHGEN_MATRIX_PRODUCTS

namespace fg {

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
#else
inline bool has_matrix_registers() { return true; }

class MatrixRegisters {
 public:
  MatrixRegisters() {}
  ~MatrixRegisters() {}
};

struct alignas(64) MatrixRegister {
  VecF rows[matrix_rows];
};
inline MatrixRegister& matrix_register(int n) {
  static thread_local MatrixRegister registers[8];
  return registers[n];
}
// Calls, not inlined: products by registers stand in many places of a kernel, and take most of a compiler's time
// otherwise.
inline __attribute__((noinline)) void load_rows_of(MatrixRegister& to, const char* at, int64_t row_bytes) {
  for (int r = 0; r < matrix_rows; ++r) std::memcpy(&to.rows[r], at + r * row_bytes, sizeof(VecF));
}
inline __attribute__((noinline)) void store_rows_of(const MatrixRegister& from, char* at, int64_t row_bytes) {
  for (int r = 0; r < matrix_rows; ++r) std::memcpy(at + r * row_bytes, &from.rows[r], sizeof(VecF));
}
// As tdpbf16ps rounds: even terms and odd ones are added up by themselves, and what was there before comes last.
inline __attribute__((noinline)) void multiply_rows_of(
    MatrixRegister& c, const MatrixRegister& a, const MatrixRegister& b) {
  for (int m = 0; m < matrix_rows; ++m) {
    bf16 left[matrix_depth];
    std::memcpy(left, &a.rows[m], sizeof(left));
    VecF even = {}, odd = {};
    for (int k = 0; k < matrix_depth; k += 2) {
      const VecI pairs = reinterpret_cast<VecI>(b.rows[k / 2]);
      even += element(left, k) * from_bits(pairs << 16), odd += element(left, k + 1) * from_bits(pairs & ~0xffff);
    }
    c.rows[m] += even + odd;
  }
}
template <int n> inline void clear_register() { matrix_register(n) = {}; }
template <int n> inline void load_register(const void* at, int64_t row_bytes) {
  load_rows_of(matrix_register(n), static_cast<const char*>(at), row_bytes);
}
template <int n> inline void store_register(void* at, int64_t row_bytes) {
  store_rows_of(matrix_register(n), static_cast<char*>(at), row_bytes);
}
template <int c, int a, int b> inline void multiply_registers() {
  multiply_rows_of(matrix_register(c), matrix_register(a), matrix_register(b));
}
#endif

// ---- the product -------------------------------------------------------------------------------------------------

// The products of parts that make up one of matrix_depth terms: parts a of A and b of B. Two neighbours share one, so
// that it is loaded once, and the largest product comes last.
struct PartsOf {
  int a, b;
};
template <int parts> constexpr PartsOf products_of_parts[] = {{0, 0}};
template <> inline constexpr PartsOf products_of_parts<3>[] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};

// C (+)= A B of `rows` rows, a multiple of matrix_rows, by V <= 2 blocks of columns, step by step, so that it can be
// computed beside other work: a step is up to three products of registers, of matrix_depth terms of 16 rows by 16
// columns. Sums stand in registers 2 turn and 2 turn + 1; A's first part is in 4 and another in 5, B's are in 6 and 7.
// Turns alternate, and what one leaves is stored after the next has multiplied: stores wait for products, and would
// keep the next ones waiting. Measured, 32 x 32 of depth 64 and one part take 132 clocks in this order (128 are the
// products), 178 as one block of 2 x 2 registers. With three parts two turns beside each other come to 17 clocks a
// product (16 are the least), where their images lie one after another. Steps are short because products wait for one
// another in the same queue as other work: beside 12 of them, 192 clocks, 240 vector instructions take 190 to 240
// clocks where up to four products come at a time, 335 where all twelve do (360: 290 to 340, 425).
template <int V, int parts> class MatrixProduct {
 public:
  MatrixProduct(int rows, int K, const Images& a, const Images& b, float* c, int64_t ldc, Begin begin, Ahead& ahead)
      : turns_(rows / matrix_rows), K_(K), a_(a), b_(b), c_(c), ldc_(ldc), begin_(begin), ahead_(ahead) {}

  int steps() const { return turns_ * (K_ / matrix_depth) * steps_of_depth; }  // in all
  bool is_done() const { return turn_ == turns_; }
  FG_INLINE void step() {
    if (turn_ % 2 == 0)
      step_of<0>();
    else
      step_of<1>();
  }
  FG_INLINE void finish() {
    while (!is_done()) step();
  }

 private:
  static_assert(parts == 1 || parts == 3, "their products are listed");
  // Products of registers: of every product of parts V.
  static constexpr int products = V * int(sizeof(products_of_parts<parts>) / sizeof(PartsOf));
  static constexpr int at_once = 3, steps_of_depth = (products + at_once - 1) / at_once;

  template <int turn> FG_INLINE void step_of() {
    constexpr int left = 2 * turn, right = left + 1;
    if (steps_of_depth == 1 || step_ == 0) {
      if (k_ == 0 && begin_ == Begin::zero) {
        clear_register<left>();
        if (V == 2) clear_register<right>();
      } else if (k_ == 0) {
        load_register<left>(c_, ldc_ * 4);
        if (V == 2) load_register<right>(c_ + W, ldc_ * 4);
      }
      if (parts > 1) ahead_.ask(4);  // of one part a step is too short
      multiply<turn, 0>();
    } else if (steps_of_depth == 2 || step_ == 1) {
      multiply<turn, 1>();
    } else if (step_ == 2) {
      multiply<turn, 2>();
    } else {
      multiply<turn, 3>();
    }
    if (steps_of_depth > 1 && ++step_ < steps_of_depth) return;
    step_ = 0;
    k_ += matrix_depth;
    if (k_ < K_) return;
    if (turn_ > 0) leave<1 - turn>(c_ - matrix_rows * ldc_);
    if (++turn_ == turns_) leave<turn>(c_);
    k_ = 0;
    a_.at += a_.block;
    c_ += matrix_rows * ldc_;
  }

  template <int turn, int step> FG_INLINE void multiply() {
    // Read once: what an instruction by name may have written would have to be read again.
    const int64_t a_row = 2 * a_.row, a_part = a_.part, b_part = b_.part, b_block = b_.block;
    const bf16 *const a = a_.at + k_ / matrix_depth * a_.depth, *const b = b_.at + k_ / matrix_depth * b_.depth;
    if (step == 0) load_register<4>(a, a_row);
    multiply_one<turn, step * at_once>(a, a_row, a_part, b, b_part, b_block);
    multiply_one<turn, step * at_once + 1>(a, a_row, a_part, b, b_part, b_block);
    multiply_one<turn, step * at_once + 2>(a, a_row, a_part, b, b_part, b_block);
  }
  template <int turn, int n>
  static FG_INLINE void multiply_one(
      const bf16* a, int64_t a_row, int64_t a_part, const bf16* b, int64_t b_part, int64_t b_block) {
    if constexpr (n < products) {
      constexpr PartsOf now = products_of_parts<parts>[n / V],
          before = n < V ? PartsOf{-1, -1} : products_of_parts<parts>[n / V - 1];
      constexpr int column = n % V, left = now.a == 0 ? 4 : 5, right = 6 + column;
      if (column == 0 && now.a != 0 && now.a != before.a) load_register<5>(a + now.a * a_part, a_row);
      if (now.b != before.b) load_register<right>(b + now.b * b_part + column * b_block, 64);
      multiply_registers<2 * turn + column, left, right>();
    }
  }
  template <int turn> FG_INLINE void leave(float* c) {
    store_register<2 * turn>(c, ldc_ * 4);
    if (V == 2) store_register<2 * turn + 1>(c + W, ldc_ * 4);
  }

  int turn_ = 0, turns_, k_ = 0, K_, step_ = 0;
  Images a_, b_;
  float* c_;
  int64_t ldc_;
  Begin begin_;
  Ahead& ahead_;
};

// The product in vectors, of sums of parts: an infinite number would meet zeros of the other operand's parts.
template <int parts>
inline __attribute__((noinline)) void product_of_sums(
    int M, int vectors, int K, const Images& a, const Images& b, float* c, int64_t ldc, Begin begin) {
  const auto with_first = [](auto first, auto rest) { return select(eq(first - first, 0.0f), first + rest, first); };
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < vectors; ++v) {
      VecF sum{};
      for (int k = 0; k < K; k += 2)
        for (int odd = 0; odd < 2; ++odd) {
          float left = 0.0f;
          VecF right{};
          for (int n = parts - 1; n >= 0; --n) {
            VecI pairs;
            std::memcpy(&pairs, b.right(v * W, k, n), sizeof(pairs));
            left = with_first(element(a.left(m, k, n), k % matrix_depth + odd), left);
            right = with_first(from_bits(odd ? pairs & ~0xffff : pairs << 16), right);
          }
          sum += left * right;
        }
      float* const to = c + m * ldc + v * W;
      store(to, begin == Begin::zero ? sum : load(to) + sum);
    }
}

template <int parts>
inline bool in_registers(const Images& a, const Images& b) { return parts == 1 || (a.finite && b.finite); }

// C (+)= A B of M rows by `vectors` vectors; of so many terms at a time that two blocks of B stay in the L1 cache.
template <int parts>
inline void matrix_product(
    int M, int vectors, int K, Images a, Images b, float* c, int64_t ldc, Begin begin, Ahead& ahead) {
  if (!in_registers<parts>(a, b)) return product_of_sums<parts>(M, vectors, K, a, b, c, ldc, begin);
  constexpr int most = 384 / parts;
  for (int k = 0; k < K; k += most) {
    const int terms = K - k < most ? K - k : most;
    for (int v = 0; v < vectors; v += 2) {
      Images right = b;
      right.at = b.right(v * W, k, 0);
      if (vectors - v >= 2)
        MatrixProduct<2, parts>(M, terms, a, right, c + v * W, ldc, begin, ahead).finish();
      else
        MatrixProduct<1, parts>(M, terms, a, right, c + v * W, ldc, begin, ahead).finish();
    }
    a.at += most / matrix_depth * a.depth;
    begin = Begin::accumulate;
  }
}

}  // namespace fg
#endif
