// The primitives behind a C interface, for the tests of this folder. Array lengths are multiples of 16.
#include <initializer_list>
#include "flashgen/cpu/convert.h"
#include "flashgen/cpu/philox.h"
#include "flashgen/cpu/few_rows.h"
#include "flashgen/cpu/tile_product.h"
#include "flashgen/cpu/vector_math.h"

using namespace fg;

namespace {

// Scores of rows, with `weights` alone their products with V; both of `width` features, in two runs of keys.
template <int width, class T>
void products_of_few_rows(int rows, int keys, int cut, const T* kv, int64_t ld, float* q_or_o, float* s, int64_t lds, bool weights) {
  constexpr int padded = (width + W - 1) / W * W;
  float so_far[most_few_rows * padded];
  for (int first : {0, cut}) {
    const int count = first == 0 ? cut : keys - cut;
    if (count == 0) continue;
    const bool is_last = first + count == keys;
    rows_together(rows, [&](int row, auto together) {
      const RunOfKeys run = {so_far + row * padded, first == 0, is_last};
      if (weights)
        values_of_rows<together, width>(count, kv + first * ld, ld, s + row * lds + first, lds, q_or_o + row * padded, padded, run, kv);
      else
        scores_of_rows<together, width>(count, kv + first * ld, ld, q_or_o + row * padded, padded, s + row * lds + first, lds, kv);
    });
  }
}

// The compiler may contract differently at different levels: a few units in the last place.
bool same(float a, float b) {
  return a == b || (a != a && b != b) || abs(bits(broadcast(a))[0] - bits(broadcast(b))[0]) <= 2;
}
bool same(int32_t a, int32_t b) { return a == b; }
bool same(bool a, int32_t b) { return a == (b != 0) && (b == 0 || b == -1); }

VecF lanes(VecF x) { return x; }
VecI lanes(VecI x) { return x; }
VecI lanes(VecB x) { return x.lanes; }

VecF load_any(const float* p) { return load(p); }
VecI load_any(const int32_t* p) { return load(p); }

}  // namespace

extern "C" {

int few_rows(int width, int is_bf16, int rows, int keys, int cut, const void* kv, int64_t ld, float* q_or_o, float* s, int64_t lds, int weights) {
  const auto run = [&](auto of_width) {
    if (is_bf16)
      products_of_few_rows<of_width>(rows, keys, cut, static_cast<const bf16*>(kv), ld, q_or_o, s, lds, weights != 0);
    else
      products_of_few_rows<of_width>(rows, keys, cut, static_cast<const float*>(kv), ld, q_or_o, s, lds, weights != 0);
  };
  if (width == 20) run(std::integral_constant<int, 20>());
  if (width == 64) run(std::integral_constant<int, 64>());
  if (width == 144) run(std::integral_constant<int, 144>());
  return most_few_rows;
}
int width() { return W; }
int fused() {
#if defined(__FMA__) || defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}

// out = f(in) by vectors; returns in how many lanes the scalar f differs.
#define UNARY(f, In, Out)                                                       \
  int unary_##f##_##In(Out* out, const In* in, int64_t n) {                     \
    int different = 0;                                                          \
    for (int64_t k = 0; k < n; k += W) {                                        \
      const auto y = lanes(f(load_any(in + k)));                                \
      store(out + k, y);                                                        \
      for (int l = 0; l < W; l += 7) different += !same(f(in[k + l]), out[k + l]); \
    }                                                                           \
    return different;                                                           \
  }
#define FLOAT(f) UNARY(f, float, float)
FLOAT(exp) FLOAT(exp2) FLOAT(exp2_bounded) FLOAT(log) FLOAT(log2) FLOAT(log1p) FLOAT(sqrt) FLOAT(rsqrt)
FLOAT(tanh) FLOAT(sigmoid) FLOAT(silu) FLOAT(relu) FLOAT(gelu) FLOAT(erf) FLOAT(softplus) FLOAT(sin) FLOAT(cos) FLOAT(atan)
FLOAT(floor) FLOAT(ceil) FLOAT(round) FLOAT(sign) FLOAT(abs)
using int32 = int32_t;
UNARY(abs, int32, int32) UNARY(sign, int32, int32) UNARY(popcount, int32, int32)
UNARY(to_int, float, int32) UNARY(to_float, int32, float) UNARY(to_bool, float, int32) UNARY(to_bool, int32, int32)

// out = f(a, b) by vectors; returns in how many lanes the scalar f and the two mixtures differ.
#define BINARY(f, In, Out)                                                      \
  int binary_##f##_##In(Out* out, const In* a, const In* b, int64_t n) {        \
    int different = 0;                                                          \
    for (int64_t k = 0; k < n; k += W) {                                        \
      const auto x = load_any(a + k), y = load_any(b + k);                      \
      store(out + k, lanes(f(x, y)));                                           \
      const int l = static_cast<int>(k / W) % W;                                \
      different += !same(f(a[k + l], b[k + l]), out[k + l]);                    \
      different += !same(lanes(f(x, b[k + l]))[l], out[k + l]);                 \
      different += !same(lanes(f(a[k + l], y))[l], out[k + l]);                 \
    }                                                                           \
    return different;                                                           \
  }
BINARY(pow, float, float) BINARY(min, float, float) BINARY(max, float, float)
BINARY(floor_div, float, float) BINARY(floor_mod, float, float)
BINARY(floor_div, int32, int32) BINARY(floor_mod, int32, int32) BINARY(ceildiv, int32, int32)
BINARY(min, int32, int32) BINARY(max, int32, int32) BINARY(ipow, int32, int32)
BINARY(shift_left, int32, int32) BINARY(shift_right, int32, int32) BINARY(hash, int32, int32)
BINARY(lt, float, int32) BINARY(le, float, int32) BINARY(gt, float, int32) BINARY(ge, float, int32)
BINARY(eq, float, int32) BINARY(ne, float, int32)
BINARY(lt, int32, int32) BINARY(le, int32, int32) BINARY(gt, int32, int32) BINARY(ge, int32, int32)
BINARY(eq, int32, int32) BINARY(ne, int32, int32)

// Division by divisors that are known when compiling.
void divide_by_constants(int32_t* out, const int32_t* a, int64_t n) {
  for (int64_t k = 0; k < n; k += W) {
    const VecI x = load(a + k);
    store(out + k, floor_div(x, 64));
    store(out + n + k, floor_mod(x, 64));
    store(out + 2 * n + k, floor_div(x, 7));
    store(out + 3 * n + k, floor_mod(x, -7));
    store(out + 4 * n + k, floor_div(x, 0) + floor_mod(x, 0));
    store(out + 5 * n + k, floor_div(x, -1));
    store(out + 6 * n + k, floor_div(x, INT32_MIN));
  }
}

int hash_three(int32_t* out, int32_t a, const int32_t* b, int32_t c, int64_t n) {
  int different = 0;
  for (int64_t k = 0; k < n; k += W) {
    store(out + k, hash(a, load(b + k), c));
    different += hash(a, b[k], c) != out[k];
  }
  return different;
}

// Every mixture of scalars and vectors in select and the logical operators; returns the number of wrong lanes.
int check_select() {
  int wrong = 0;
  const float a[2] = {1.5f, -2.0f};
  VecF vector_a{}, vector_b{};
  for (int l = 0; l < W; ++l) vector_a[l] = static_cast<float>(l), vector_b[l] = -static_cast<float>(l) - 1;
  for (int shift = 0; shift < W; ++shift) {
    const VecB mask = lt(iota(), shift);
    const VecF vv = select(mask, vector_a, vector_b), vs = select(mask, vector_a, a[1]);
    const VecF sv = select(mask, a[0], vector_b), ss = select(mask, a[0], a[1]);
    const VecI ii = select(mask, iota(), -1), si = select(mask, 3, 4);
    const VecB bb = select(mask, true, ge(iota(), 5)), mixed = select(mask, false, true);
    for (int l = 0; l < W; ++l) {
      const bool c = l < shift;
      wrong += vv[l] != (c ? vector_a[l] : vector_b[l]);
      wrong += vs[l] != (c ? vector_a[l] : a[1]);
      wrong += sv[l] != (c ? a[0] : vector_b[l]);
      wrong += ss[l] != (c ? a[0] : a[1]);
      wrong += ii[l] != (c ? l : -1);
      wrong += si[l] != (c ? 3 : 4);
      wrong += (bb.lanes[l] != 0) != (c || l >= 5);
      wrong += (mixed.lanes[l] != 0) != !c;
    }
    for (int f = 0; f < 2; ++f) {
      const bool flag = f;
      const VecF x = select(flag, vector_a, a[1]), y = select(flag, a[0], vector_b);
      const VecB both = mask && flag, either = flag || mask, same_truth = eq(mask, flag), differ = ne(flag, mask);
      for (int l = 0; l < W; ++l) {
        const bool c = l < shift;
        wrong += x[l] != (flag ? vector_a[l] : a[1]) || y[l] != (flag ? a[0] : vector_b[l]);
        wrong += (both.lanes[l] != 0) != (c && flag) || (either.lanes[l] != 0) != (c || flag);
        wrong += (same_truth.lanes[l] != 0) != (c == flag) || (differ.lanes[l] != 0) != (c != flag);
        wrong += ((!mask).lanes[l] != 0) == c || to_int(mask)[l] != c || to_float(mask)[l] != c;
      }
    }
    wrong += select(true, 1.0f, 2.0f) != 1.0f || select(false, 1, 2) != 2;
    wrong += any(mask) != (shift > 0) || all(mask) || !all(mask || true);
  }
  return wrong;
}

void across_lanes(float* out, const float* x) {
  out[0] = horizontal_sum(load(x));
  out[1] = horizontal_max(load(x));
  out[2] = horizontal_min(load(x));
}
void first_lanes(float* out, const float* in, int n) { store(out, load_elements(in, n)); }
void first_lanes_stored(float* out, const float* in, int n) { store_elements(out, load(in), n); }

// Conversions of rows, and single elements through every way of reading them; the number of disagreements returns.
#define STORAGE(Type, Out)                                                              \
  int read_##Type(Out* out, const void* in, const int32_t* index, int64_t n) {          \
    const Type* tensor = static_cast<const Type*>(in);                                  \
    int different = 0;                                                                  \
    for (int64_t k = 0; k < n; k += W) {                                                \
      store(out + k, lanes(elements(tensor, k)));                                       \
      const auto gathered = lanes(element(tensor, load(index + k)));                    \
      const auto strided = lanes(element(tensor, load(index + k) / 2, 2));              \
      const auto part = lanes(elements(tensor, k, 3));                                  \
      for (int l = 0; l < W; ++l) {                                                     \
        const auto want = element(tensor, int64_t{index[k + l]});                       \
        different += !same(want, gathered[l]);                                          \
        different += !same(element(tensor, int64_t{index[k + l]} / 2 * 2), strided[l]); \
        different += l < 3 ? !same(part[l], out[k + l]) : part[l] != 0;                 \
        different += !same(element(tensor, k + l), out[k + l]);                         \
      }                                                                                 \
    }                                                                                   \
    return different;                                                                   \
  }
STORAGE(float, float) STORAGE(f16, float) STORAGE(bf16, float)
STORAGE(int32, int32) STORAGE(int64_t, int32) STORAGE(bool, int32)

void f16_to_float(float* out, const f16* in, int64_t n) { to_float(out, in, n); }
void bf16_to_float(float* out, const bf16* in, int64_t n) { to_float(out, in, n); }
void f8e4m3_to_float_times(float* out, const f8e4m3* in, int64_t n, float factor) { to_float_times(out, in, n, factor); }
void f16_from_float(f16* out, const float* in, int64_t n) { from_float(out, in, n); }
void bf16_from_float(bf16* out, const float* in, int64_t n) { from_float(out, in, n); }

void philox_block(uint32_t* out, const uint32_t* counter, uint64_t seed) {
  const auto words = philox<7>(uint64_t{counter[0]}, uint64_t{counter[1]}, uint64_t{counter[2]}, uint64_t{counter[3]},
                               philox_key(seed));
  for (int w = 0; w < 4; ++w) out[w] = static_cast<uint32_t>(words.word[w]);
}
// Whether the pairs i = first_i + lane, j = 32 block + n are kept, as out[n][lane].
void dropout_lanes(uint8_t* out, uint64_t seed, int b, int h, int first_i, int block, uint32_t threshold) {
  const VecU kept = dropout_keeps(seed, b, h, first_i + iota(), block, threshold);
  for (int n = 0; n < dropout_columns; ++n)
    for (int l = 0; l < W; ++l) out[n * W + l] = (kept[l] & dropout_bit(dropout_columns * block + n)) != 0;
}

void product(int M, int vectors, int K, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb,
             float* c, int64_t ldc, int begin) {
  Ahead then = {reinterpret_cast<const char*>(a), line_bytes, 3, 1, 0};
  Ahead ahead = {reinterpret_cast<const char*>(b), line_bytes, 5, 2, 0, &then};  // changes nothing but when memory comes
  tile_product<Numbers>(M, vectors, K, a, a_row, a_col, b, ldb, c, ldc, static_cast<Begin>(begin), ahead);
}
void transpose(float* dst, int64_t ldd, const float* src, int64_t lds, int rows, int cols) {
  transpose_to(dst, ldd, src, lds, rows, cols);
}

}  // extern "C"
