// Layer 3 of the CPU primitives: bfloat16 operands of matrix products, and the instruction that multiplies pairs of them.
//
// Contract: two neighbouring terms of a sum lie side by side, 32 bits, the first in the lower half. Who multiplies them:
//   FLASHGEN_MATRIX_PRODUCTS  1: matrix registers (matrix_product.h), the default where the compiler finds them; 0: none;
//                             2: registers of arrays, slowly, so that all that is built on them can be tested anywhere.
//   FLASHGEN_PAIR_PRODUCTS    1: vectors, by one instruction a vector of pairs, the default where the compiler finds it
//                             and no matrix registers; 0: nobody; 2: the same in float32, slowly, for tests.
// Vector extensions have no such instruction: it stands here, once, by name.
#pragma once
#include "flashgen/cpu/convert.h"
#include "flashgen/cpu/tile_product.h"
#include "flashgen/cpu/vector_math.h"

#ifndef FLASHGEN_MATRIX_PRODUCTS
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__) && FLASHGEN_PRODUCTS != 1
#define FLASHGEN_MATRIX_PRODUCTS 1
#endif
#endif
#ifndef FLASHGEN_PAIR_PRODUCTS
#if defined(__AVX512BF16__) && defined(__AVX512F__) && !FLASHGEN_MATRIX_PRODUCTS && FLASHGEN_PRODUCTS != 1
#define FLASHGEN_PAIR_PRODUCTS 1
#endif
#endif

#if FLASHGEN_MATRIX_PRODUCTS || FLASHGEN_PAIR_PRODUCTS

namespace fg {

constexpr int matrix_rows = 16;   // of a register
constexpr int matrix_depth = 32;  // bfloat16 in a row of it
static_assert(W == matrix_rows, "a register is as wide as a vector");

// ---- parts -------------------------------------------------------------------------------------------------------
// They are made in the upper halves of lanes. Rounding is to nearest, ties away from zero: in half the instructions of
// ties to even, of which one number in 65,536 is. A NaN stays one but where all bits of its payload are set.

FG_INLINE VecU rounded(VecF x) { return reinterpret_cast<VecU>(x) + 0x8000u; }
FG_INLINE VecF upper_half(VecU x) { return from_bits(reinterpret_cast<VecI>(x & 0xffff0000u)); }

// x as a sum, the largest part first. Of several the first is cut off, so that none becomes infinite where x is not,
// and the others are nearest to what is left: three hold a float32, but for what is below 2^-126. Those after an
// infinite one are NaN.
template <int parts> FG_INLINE void split(VecF x, VecU (&part)[parts]) {
  static_assert(parts <= 3, "three hold a float32");
  part[0] = parts == 1 ? rounded(x) : reinterpret_cast<VecU>(x);
  VecF rest = x;
  FG_UNROLL for (int n = 1; n < parts; ++n) {
    rest -= upper_half(part[n - 1]);
    part[n] = n == 2 ? reinterpret_cast<VecU>(rest) : rounded(rest);  // 24 bits less 16 fit as they are
  }
}

// The upper halves of two vectors, interleaved; and those of one.
FG_INLINE VecU pairs_of(VecU low, VecU high) { return (low >> 16) | (high & 0xffff0000u); }
FG_INLINE void store_pairs(bf16* p, VecU low, VecU high) {
  const VecU pairs = pairs_of(low, high);
  std::memcpy(p, &pairs, sizeof(pairs));
}
FG_INLINE void store_upper_halves(bf16* p, VecU x) {
  const Words words = __builtin_convertvector(x >> 16, Words);
  std::memcpy(p, &words, sizeof(words));
}

// ---- how operands lie --------------------------------------------------------------------------------------------
// As images of registers, 16 rows of 64 bytes: of a left operand 16 rows of matrix_depth terms, A[m][k]; of a right one
// 16 columns and the same number of terms, in pairs, B[k / 2][n][k % 2].

constexpr int image_row = matrix_depth, image = matrix_rows * image_row;  // elements

template <class Element> struct ImagesOf {
  Element* at;
  int64_t block, depth, part;  // strides in elements: of 16 rows or columns, of matrix_depth terms, of parts;
  int64_t row;                 // of rows within an image: image_row, unless a tensor's rows are multiplied in place
  bool finite;                 // no number is infinite; what is none at all is so in every part

  // Of a left operand the 64 bytes that begin with term k of row m.
  Element* left(int m, int k, int of_part) const {
    return at + m / matrix_rows * block + k / matrix_depth * depth + of_part * part + m % matrix_rows * row;
  }
  // Of a right one those that begin with terms k and k + 1 of column n.
  Element* right(int n, int k, int of_part) const {
    return at + n / matrix_rows * block + k / matrix_depth * depth + of_part * part + k % matrix_depth / 2 * row;
  }
  operator ImagesOf<const Element>() const { return {at, block, depth, part, row, finite}; }
};
using Images = ImagesOf<const bf16>;
using NewImages = ImagesOf<bf16>;  // to be filled

// Row m of a left operand of one part; zeros up to a multiple of matrix_depth.
FG_INLINE void put_row(const NewImages& to, int m, const bf16* from, int width) {
  for (int k = 0; k < width; k += matrix_depth) {
    const int here = width - k < matrix_depth ? width - k : matrix_depth;
    bf16* const at = to.left(m, k, 0);
    std::memcpy(at, from + k, sizeof(bf16) * size_t(here));
    if (here < matrix_depth) std::memset(at + here, 0, sizeof(bf16) * size_t(matrix_depth - here));
  }
}

// Puts a row as a sum of `parts`; `width` is a multiple of matrix_depth. `largest` is what no number's size is beyond,
// in its lane.
template <int parts> FG_INLINE void put_row(const NewImages& to, int m, const float* from, int width, VecF& largest) {
  for (int k = 0; k < width; k += W) {
    const VecF x = load(from + k);
    largest = running_max(largest, abs(x));
    VecU part[parts];
    split(x, part);
    FG_UNROLL for (int n = 0; n < parts; ++n) store_upper_halves(to.left(m, k, n) + k % matrix_depth, part[n]);
  }
}

template <int parts> FG_INLINE void clear_row(const NewImages& to, int m, int width) {
  for (int n = 0; n < parts; ++n)
    for (int k = 0; k < width; k += matrix_depth) std::memset(to.left(m, k, n), 0, sizeof(bf16) * image_row);
}

// A left operand of rows by cols, both multiples of matrix_depth, made
//   another left one, transposed. Two rows make pairs of their even columns and of their odd ones, without a shuffle;
//   pairs are transposed as numbers of 32 bits are;
template <int parts>
inline __attribute__((noinline)) void turn_images(const NewImages& to, const Images& from, int rows, int cols) {
  for (int r = 0; r < rows; r += matrix_depth)
    for (int c = 0; c < cols; c += matrix_depth)
      for (int part = 0; part < parts; ++part) FG_UNROLL for (int odd = 0; odd < 2; ++odd) {
          VecF x[W];
          FG_UNROLL for (int i = 0; i < W; ++i) {
            VecU low, high;
            std::memcpy(&low, from.left(r + 2 * i, c, part), sizeof(low));
            std::memcpy(&high, from.left(r + 2 * i + 1, c, part), sizeof(high));
            x[i] = from_bits(reinterpret_cast<VecI>(odd ? pairs_of(low, high) : pairs_of(low << 16, high << 16)));
          }
          transpose_lanes(x);
          FG_UNROLL for (int i = 0; i < W; ++i) std::memcpy(to.left(c + 2 * i + odd, r, part), &x[i], sizeof(VecF));
        }
}

//   a right one of its rows as columns: two neighbours in a row are a pair already;
template <int parts>
inline __attribute__((noinline)) void pair_columns(const NewImages& to, const Images& from, int rows, int cols) {
  for (int r = 0; r < rows; r += W)
    for (int c = 0; c < cols; c += matrix_depth)
      for (int part = 0; part < parts; ++part) {
        VecF x[W];
        FG_UNROLL for (int i = 0; i < W; ++i) std::memcpy(&x[i], from.left(r + i, c, part), sizeof(VecF));
        transpose_lanes(x);
        FG_UNROLL for (int i = 0; i < W; ++i) std::memcpy(to.right(r, c + 2 * i, part), &x[i], sizeof(VecF));
      }
}

//   a right one of its rows as terms.
template <int parts>
inline __attribute__((noinline)) void pair_rows(const NewImages& to, const Images& from, int rows, int cols) {
  for (int c = 0; c < cols; c += W)
    for (int r = 0; r < rows; r += 2)
      for (int part = 0; part < parts; ++part) {
        Words low, high;
        std::memcpy(&low, from.left(r, c, part) + c % matrix_depth, sizeof(low));
        std::memcpy(&high, from.left(r + 1, c, part) + c % matrix_depth, sizeof(high));
        const VecI pairs = __builtin_convertvector(low, VecI) | __builtin_convertvector(high, VecI) << 16;
        std::memcpy(to.right(c, r, part), &pairs, sizeof(pairs));
      }
}

// ---- products in vectors -----------------------------------------------------------------------------------------

// Of 32 bits of either operand: two terms, which are added to a float32.
struct Pairs {
  static constexpr int terms = 2;
  static FG_INLINE VecF all(const float* at) {
    int32_t pair;  // of integers: a float may lose bits on its way
    std::memcpy(&pair, at, sizeof(pair));
    return from_bits(broadcast(pair));
  }
  static FG_INLINE VecF multiply_add(VecF sum, VecF a, VecF b) {
#if FLASHGEN_PAIR_PRODUCTS == 1
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    const VecI x = bits(a), y = bits(b);
    return sum + (from_bits(x & ~0xffff) * from_bits(y & ~0xffff) + from_bits(x << 16) * from_bits(y << 16));
#endif
  }
};

// Two vectors as bfloat16, to nearest even, the first below the second; and interleaved, which makes pairs.
typedef uint16_t TwiceWords __attribute__((vector_size(4 * W)));
FG_INLINE TwiceWords bfloat16_of(VecF low, VecF high) {
#if FLASHGEN_PAIR_PRODUCTS == 1
  TwiceWords both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
  return both;
#else
  const Words halves[2] = {__builtin_convertvector(lanes_of(low, bf16()), Words),
                           __builtin_convertvector(lanes_of(high, bf16()), Words)};
  TwiceWords both;
  std::memcpy(&both, halves, sizeof(both));
  return both;
#endif
}
#if defined(__clang__) || __GNUC__ >= 12
FG_INLINE TwiceWords interleaved(TwiceWords x) {
  return __builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
FG_INLINE Words lower_words(TwiceWords x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
FG_INLINE Words upper_words(TwiceWords x) {
  return __builtin_shufflevector(x, x, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}
#else
FG_INLINE TwiceWords interleaved(TwiceWords x) {
  return __builtin_shuffle(x, TwiceWords{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
FG_INLINE Words half_of(TwiceWords x, int n) {
  Words halves[2];
  std::memcpy(halves, &x, sizeof(x));
  return halves[n];
}
FG_INLINE Words lower_words(TwiceWords x) { return half_of(x, 0); }
FG_INLINE Words upper_words(TwiceWords x) { return half_of(x, 1); }
#endif
// The numbers of pairs: the lower ones, and the upper ones.
FG_INLINE VecF low_of_pairs(TwiceWords x) { return from_bits(reinterpret_cast<VecI>(x) << 16); }
FG_INLINE VecF high_of_pairs(TwiceWords x) { return from_bits(reinterpret_cast<VecI>(x) & ~0xffff); }

}  // namespace fg
#endif
