// What is multiplied, and how it lies.
//
// Both passes are written once, over any kind of products:
//   VectorProducts          of float32, whatever the tensors hold. Numbers of the left operand are broadcast, so that
//                           it may lie either way.
//   PairProducts            in vectors, too, of bfloat16 tensors, with float32 sums: where a number would be, two
//                           neighbouring terms are.
//   MatrixProducts<parts>   in matrix registers, of bfloat16 with float32 sums: of bfloat16 tensors as they are; of
//                           others as sums of three, six products in the place of one.
// A kind says in what multiples it works; what it makes of rows of K and V (Keys), of rows of Q and dO (Queries) and of
// the scores of a tile (Scores), which are left and right operands; and multiplies: C (+)= left · right, C in float32,
// at once or as a Later product, step by step beside other work. Of a score tile keys are rows and query rows are
// lanes. It is computed a `strip` of vectors of rows at a time.
#pragma once
#include "flashgen/cpu/visits.h"

namespace {

// What stands in for rows past the last: copies of it, so that no lane computes on junk, or zeros, which add nothing.
enum class PastEnd { last_row, zeros };

// The weights of two neighbouring keys, as they are multiplied.
struct Multiplied {
  fg::VecF first, second;
};

// O of a query tile, unnormalised, as rows: rows of V are added to it, so that a product of 16 rows is as fast as a
// wide one.
template <int rows, int width> struct alignas(64) SumsInRows {
  static constexpr bool in_rows = true;
  static constexpr int ld = width;

  // W neighbours of the numbers that the rows of a vector have, which are W times `width`; what goes with each of
  // these, of a number of each row.
  float* of(int vector, int d = 0) { return at + vector * W * ld + d * W; }
  static fg::VecF beside(const fg::VecF& of_rows, int d) { return fg::broadcast(of_rows[d * W / ld]); }
  // Its rows, to be read; to be written, and then taken.
  const float* as_rows(int /*vectors*/) const { return at; }
  float* new_rows() { return at; }
  void take_rows(int /*rows*/) {}
  void store(void* to, int element, int64_t first, int64_t stride, int columns, int count) const {
    store_rows(to, element, first, stride, at, ld, columns, count);
  }

  float at[rows * ld];
};

// Sums that are transposed: products are as wide as there are rows.
template <int rows, int width> struct alignas(64) TransposedSums {
  static constexpr bool in_rows = false;
  static constexpr int ld = rows + W;

  float* of(int vector, int d = 0) { return at + d * ld + vector * W; }
  static fg::VecF beside(fg::VecF of_rows, int /*d*/) { return of_rows; }
  const float* as_rows(int vectors) {
    fg::transpose_to(turned, width, at, ld, width, vectors * W);
    return turned;
  }
  float* new_rows() { return turned; }
  void take_rows(int count) { fg::transpose_to(at, ld, turned, width, count, width); }
  void store(void* to, int element, int64_t first, int64_t stride, int columns, int count) {
    store_transposed(to, element, first, stride, at, ld, turned, width, columns, count);
  }

  float at[width * ld];
  float turned[rows * width];
};

// What both kinds in vectors have in common: Terms says what 32 bits of an operand hold.
template <class Terms> struct ProductsOfVectors {
  struct Thread {};  // what a thread holds while it multiplies
  // Of the plan's sizes, which are for numbers, pairs, bfloat16 and parts, the one that it works in.
  static constexpr int tile(const int (&sizes)[4]) { return sizes[Terms::terms > 1 ? 1 : 0]; }
  static constexpr int key_multiple = MR;                // keys of a tile are padded to
  static constexpr int trimmed_strip = W >= 16 ? 1 : 2;  // vectors of rows on the border of a mask, at once
  static constexpr int row_vectors = 1;                  // query rows are computed in groups of this many vectors
  static constexpr int fewest_rows = W;                  // of a query tile that is cut for threads to share
  static constexpr int depth(int n) { return int(round_up(n, Terms::terms)); }  // how many terms a sum of n takes

  // Strides are of 32 bits.
  struct Left {
    const float* at;
    int64_t row, column;
  };
  struct Right {
    const float* at;
    int64_t ld;
  };
  static void product(int M, int vectors, int K, Left a, Right b, float* c, int64_t ldc, fg::Begin begin,
                      fg::Ahead& ahead) {
    fg::tile_product<Terms>(M, vectors, K / Terms::terms, a.at, a.row, a.column, b.at, b.ld, c, ldc, begin, ahead);
  }
  static int key_rows(int count) { return int(round_up(count, key_multiple)); }
  // The units that multiply are those that do the other work: nothing is gained by steps.
  class Later {
   public:
    FG_INLINE Later(int M, int vectors, int K, Left a, Right b, float* c, int64_t ldc, fg::Begin begin,
                    fg::Ahead& ahead)
        : M_(M), vectors_(vectors), K_(K), a_(a), b_(b), c_(c), ldc_(ldc), begin_(begin), ahead_(ahead) {}
    int steps() const { return 0; }
    bool is_done() const { return true; }
    void step() {}
    void finish() { product(M_, vectors_, K_, a_, b_, c_, ldc_, begin_, ahead_); }

   private:
    int M_, vectors_, K_;
    Left a_;
    Right b_;
    float* c_;
    int64_t ldc_;
    fg::Begin begin_;
    fg::Ahead& ahead_;
  };

  template <int rows, int width> using Sums =
      std::conditional_t<W >= 16, SumsInRows<rows, width>, TransposedSums<rows, width>>;
};

// O += P V of a strip, later.
template <class Products, class Values, class Weights, class O>
FG_INLINE typename Products::Later values_of_strip(const Strip& of, Values& v, Weights& p, O& o, fg::Ahead& ahead) {
  using Later = typename Products::Later;
  const int vectors = of.end - of.first, key = of.kept.first, count = of.kept.end - key;
  const int depth = Products::depth(count);
  if constexpr (O::in_rows)
    return Later(count > 0 ? vectors * W : 0, O::ld / W, depth, p.by_row(of.first, key), v.of_features(key),
                 o.of(of.first), O::ld, fg::Begin::accumulate, ahead);
  else
    return Later(count > 0 && vectors > 0 ? DVP : 0, vectors, depth, v.by_feature(key), p.of_keys(of.first, key),
                 o.of(of.first), O::ld, fg::Begin::accumulate, ahead);
}

struct VectorProducts : ProductsOfVectors<fg::Numbers> {
  static constexpr bool have_few_rows = true;  // there is another way for these
  static constexpr bool round = false;         // weights are multiplied as they are

  // Up to `most` rows of K or V: where they lie, if they are float32 and need no padding, else a copy.
  template <int most, int width, bool features_first> struct alignas(64) Keys {
    static constexpr int ld = int(round_up(round_up(width, W), MR));

    void load(const HeadRows& from, KeyRows rows) {
      at = rows_in_place(copy, ld, width, from, rows.first, rows.count, key_rows(rows.count));
    }
    // From a key on.
    Left by_key(int key = 0) const { return {at.at + key * at.ld, at.ld, 1}; }
    Left by_feature(int key = 0) const { return {at.at + key * at.ld, 1, at.ld}; }
    Right of_features(int key) const { return {at.at + key * at.ld, at.ld}; }

    float copy[round_up(most, MR) * ld];
    Rows at;
  };

  // Up to `most` rows of Q or dO.
  template <int most, int width, bool rows_first> struct alignas(64) Queries {
    static constexpr int ld = int(round_up(round_up(width, W), MR)), turned_ld = most + W;

    void load(const HeadRows& from, int64_t first, int count, int padded, PastEnd past) {
      at = rows_in_place(copy, ld, width, from, first, count, padded);
      if (past == PastEnd::zeros && count < padded) std::fill(copy + count * ld, copy + padded * ld, 0.0f);
      fg::transpose_to(turned, turned_ld, at.at, at.ld, padded, width);
    }
    Right by_feature(int vector) const { return {turned + vector * W, turned_ld}; }
    Right by_row(int vector) const { return {at.at + vector * W * at.ld, at.ld}; }

    float copy[most * ld];
    alignas(64) float turned[width * turned_ld];
    Rows at;
  };

  // Scores of up to `keys` by `rows`; then, in their place, what they weigh.
  template <int keys, int rows, bool left, bool right> struct alignas(64) Scores {
    static constexpr int strip = rows / W;
    static constexpr int ld = rows + W;

    float* of(int vector, int key = 0) { return scores + key * ld + vector * W; }
    Multiplied put(int64_t key, int vector, fg::VecF x, fg::VecF y) {
      fg::store(of(vector) + key * ld, x);
      fg::store(of(vector) + (key + 1) * ld, y);
      return {x, y};
    }
    void clear(int first, int end) { std::fill(scores + first * ld, scores + std::max(first, end) * ld, 0.0f); }
    Left by_key(int vector) const { return {scores + vector * W, ld, 1}; }
    Left by_row(int vector, int key) const { return {scores + key * ld + vector * W, 1, ld}; }
    Right of_keys(int vector, int key = 0) const { return {scores + key * ld + vector * W, ld}; }

    float scores[round_up(keys, MR) * ld];
  };
};

#if FLASHGEN_MATRIX_PRODUCTS || FLASHGEN_PAIR_PRODUCTS
// Rows of a head as left operand, their features being the terms. Returns whether no number is infinite.
template <int parts, int width>
FG_INLINE bool put_rows(const fg::NewImages& to, const HeadRows& from, int64_t first, int count, int padded,
                        PastEnd past) {
  constexpr int width_of_image = int(round_up(width, fg::matrix_depth));
  fg::VecF largest{};
  for (int row = 0; row < padded; ++row) {
    const int64_t source = first + std::min(row, count - 1);
    if (row >= count && past == PastEnd::zeros) {
      fg::clear_row<parts>(to, row, width_of_image);
    } else if (parts == 1 && from.element == BF16) {
      fg::put_row(to, row, static_cast<const fg::bf16*>(from.at) + from.offset(source), width);
    } else if (from.element == F32 && width % fg::matrix_depth == 0) {
      fg::put_row<parts>(to, row, static_cast<const float*>(from.at) + from.offset(source), width, largest);
    } else {
      alignas(64) float features[width_of_image];
      load_rows(features, width_of_image, width, from, source, 1, 1);
      fg::put_row<parts>(to, row, features, width_of_image, largest);
    }
  }
  return !fg::any(fg::eq(largest, fg::infinity));
}
// bfloat16 rows from `first` on, where they lie.
inline fg::Images images_in_place(const HeadRows& from, int64_t first) {
  const auto* const at = static_cast<const fg::bf16*>(from.at) + from.offset(first);
  return {at, W * from.stride, fg::matrix_depth, 0, from.stride, true};
}
#endif

#if FLASHGEN_PAIR_PRODUCTS
// Images without gaps are rows, or rows of pairs.
struct PairProducts : ProductsOfVectors<fg::Pairs> {
  static constexpr bool have_few_rows = false;
  static constexpr bool round = true;

  static constexpr int padded(int n) { return int(round_up(n, fg::matrix_depth)); }
  // Rows of `ld` bfloat16; and of pairs, `ld` pairs apart.
  static fg::NewImages rows_at(fg::bf16* at, int64_t ld) { return {at, W * ld, fg::matrix_depth, 0, ld, true}; }
  static fg::NewImages pairs_at(float* at, int64_t ld) {
    return {reinterpret_cast<fg::bf16*>(at), 2 * W, fg::matrix_depth * ld, 0, 2 * ld, true};
  }
  static const float* as_pairs(const fg::bf16* at) { return reinterpret_cast<const float*>(at); }

  // Up to `most` rows of K or V; bfloat16 is multiplied where it lies, if pairs do.
  template <int most, int width, bool features_first> struct alignas(64) Keys {
    static constexpr int copy_ld = padded(width) + 2 * W, ld = int(round_up(round_up(width, W), MR));

    void load(const HeadRows& from, KeyRows keys) {
      const int count = key_rows(keys.count);
      const fg::Images own = images_in_place(from, keys.first);
      const bool is_whole =
          width % (features_first ? W : 2) == 0 && keys.count == count && from.is_run(keys.first, count);
      if (from.element == BF16 && is_whole && reinterpret_cast<uintptr_t>(own.at) % 4 == 0 && from.stride % 2 == 0) {
        rows = own;
      } else {
        rows = rows_at(copy, copy_ld);
        put_rows<1, width>(rows_at(copy, copy_ld), from, keys.first, keys.count, count, PastEnd::zeros);
      }
      if (features_first) fg::pair_rows<1>(pairs_at(features, ld), rows, count, int(round_up(width, W)));
    }
    // From a key on.
    Left by_key(int key = 0) const { return {as_pairs(rows.at + key * rows.row), rows.row / 2, 1}; }
    Left by_feature(int key = 0) const { return {features + key / 2 * ld, 1, ld}; }
    Right of_features(int key) const { return {features + key / 2 * ld, ld}; }

    fg::Images rows;
    alignas(64) fg::bf16 copy[round_up(most, MR) * copy_ld];
    alignas(64) float features[features_first ? round_up(most, MR) / 2 * ld : 1];
  };

  // Up to `most` rows of Q or dO.
  template <int most, int width, bool rows_first> struct alignas(64) Queries {
    static constexpr int copy_ld = padded(width) + 2 * W, ld = int(round_up(round_up(width, W), MR)),
                         turned_ld = most + W;

    void load(const HeadRows& from, int64_t first, int count, int rows_of_tile, PastEnd past) {
      put_rows<1, width>(rows_at(copy, copy_ld), from, first, count, rows_of_tile, past);
      fg::pair_columns<1>(pairs_at(turned, turned_ld), rows_at(copy, copy_ld), rows_of_tile, padded(width));
      if (rows_first)
        fg::pair_rows<1>(pairs_at(rows, ld), rows_at(copy, copy_ld), rows_of_tile, int(round_up(width, W)));
    }
    Right by_feature(int vector) const { return {turned + vector * W, turned_ld}; }
    Right by_row(int vector) const { return {rows + vector * W / 2 * ld, ld}; }

    alignas(64) fg::bf16 copy[most * copy_ld];
    alignas(64) float turned[padded(width) / 2 * turned_ld];
    alignas(64) float rows[rows_first ? most / 2 * ld : 1];
  };

  // Scores of up to `keys` by `rows`; then weights: as right operand pairs in place of scores, as left one rows.
  template <int keys, int rows, bool left, bool right> struct alignas(64) Scores {
    static constexpr int strip = rows / W;
    static constexpr int ld = rows + W, weights_ld = rows + 2 * W;

    float* of(int vector, int key = 0) { return scores + key * ld + vector * W; }
    Multiplied put(int64_t key, int vector, fg::VecF x, fg::VecF y) {
      const fg::TwiceWords both = fg::bfloat16_of(x, y), pairs = fg::interleaved(both);
      const Multiplied multiplied = {fg::low_of_pairs(pairs), fg::high_of_pairs(pairs)};
      if (right) std::memcpy(of(vector) + key * ld, &pairs, sizeof(pairs));
      if (!left) return multiplied;
      const fg::Words low = fg::lower_words(both), high = fg::upper_words(both);
      std::memcpy(weights + key * weights_ld + vector * W, &low, sizeof(low));
      std::memcpy(weights + (key + 1) * weights_ld + vector * W, &high, sizeof(high));
      return multiplied;
    }
    void clear(int first, int end) {
      if (left && first < end) std::fill_n(weights + first * weights_ld, (end - first) * weights_ld, fg::bf16{0});
    }
    Left by_key(int vector) const { return {as_pairs(weights + vector * W), weights_ld / 2, 1}; }
    Left by_row(int vector, int key) const { return {scores + key * ld + vector * W, 1, 2 * ld}; }
    Right of_keys(int vector, int key = 0) const { return {scores + key * ld + vector * W, 2 * ld}; }

    float scores[round_up(keys, MR) * ld];
    alignas(64) fg::bf16 weights[left ? round_up(keys, MR) * weights_ld : 1];
  };
};
#endif

#if FLASHGEN_MATRIX_PRODUCTS
template <int parts> struct MatrixProducts {
  using Thread = fg::MatrixRegisters;
  static constexpr int tile(const int (&sizes)[4]) { return sizes[parts == 1 ? 2 : 3]; }
  static constexpr int key_multiple = fg::matrix_depth;
  static constexpr bool have_few_rows = false;
  static constexpr bool round = parts == 1;
  static constexpr int trimmed_strip = 0;  // whole tiles are laid out
  static constexpr int row_vectors = fg::matrix_depth / W;
  static constexpr int fewest_rows = parts == 1 ? fg::matrix_depth : 64;  // K and V are laid out for each
  static constexpr int depth(int n) { return int(round_up(n, fg::matrix_depth)); }
  static int key_rows(int count) { return int(round_up(count, key_multiple)); }

  using Left = fg::Images;
  using Right = fg::Images;
  static void product(int M, int vectors, int K, Left a, Right b, float* c, int64_t ldc, fg::Begin begin,
                      fg::Ahead& ahead) {
    fg::matrix_product<parts>(M, vectors, K, a, b, c, ldc, begin, ahead);
  }
  // Of one strip.
  class Later {
   public:
    Later(int M, int /*vectors*/, int K, Left a, Right b, float* c, int64_t ldc, fg::Begin begin, fg::Ahead& ahead)
        : product_(fg::in_registers<parts>(a, b) ? M : 0, K, a, b, c, ldc, begin, ahead) {
      if (!fg::in_registers<parts>(a, b)) product(M, row_vectors, K, a, b, c, ldc, begin, ahead);
    }
    int steps() const { return product_.steps(); }
    bool is_done() const { return product_.is_done(); }
    FG_INLINE void step() {
      if (!is_done()) product_.step();
    }
    void finish() { product_.finish(); }

   private:
    fg::MatrixProduct<row_vectors, parts> product_;
  };

  template <int rows, int width> using Sums = TransposedSums<rows, width>;

  // Images in the order that products read them: of a block those of `terms`, of these the parts.
  static fg::NewImages in_order(fg::bf16* at, int terms, bool finite = true) {
    return {at, parts * W * depth(terms), parts * fg::image, fg::image, fg::image_row, finite};
  }

  // Up to `most` rows of K or V; bfloat16 that needs no padding is multiplied where it lies.
  template <int most, int width, bool features_first> struct alignas(64) Keys {
    static constexpr int size = depth(most) * depth(width);

    void load(const HeadRows& from, KeyRows rows) {
      const int padded = depth(rows.count);
      if (parts == 1 && from.element == BF16 && width == depth(width) && rows.count == padded &&
          from.is_run(rows.first, rows.count)) {
        keys = images_in_place(from, rows.first);
      } else {
        fg::NewImages own = in_order(copy, width);
        own.finite = put_rows<parts, width>(own, from, rows.first, rows.count, padded, PastEnd::zeros);
        keys = own;
      }
      if (features_first) fg::turn_images<parts>(in_order(features, most), keys, padded, depth(width));
    }
    Left by_key(int /*first*/ = 0) const { return keys; }
    Left by_feature(int /*first*/ = 0) { return in_order(features, most, keys.finite); }

    fg::Images keys;
    alignas(64) fg::bf16 copy[parts * size];
    alignas(64) fg::bf16 features[features_first ? parts * size : 1];
  };

  // Up to `most` rows of Q or dO.
  template <int most, int width, bool rows_first> struct alignas(64) Queries {
    static constexpr int size = depth(most) * depth(width);

    void load(const HeadRows& from, int64_t first, int count, int padded, PastEnd past) {
      const fg::NewImages left = in_order(copy, width);
      finite = put_rows<parts, width>(left, from, first, count, padded, past);
      fg::pair_columns<parts>(in_order(features, width), left, padded, depth(width));
      if (rows_first) fg::pair_rows<parts>(in_order(rows, most), left, padded, depth(width));
    }
    Right by_feature(int vector) { return in_order(features + parts * vector * W * depth(width), width, finite); }
    Right by_row(int vector) { return in_order(rows + parts * vector * W * W, most, finite); }

    fg::bf16 copy[parts * size];
    alignas(64) fg::bf16 features[parts * size];
    alignas(64) fg::bf16 rows[rows_first ? parts * size : 1];
    bool finite;
  };

  // Scores of two strips: one is multiplied while the other is weighed. As left operand there are all weights.
  template <int keys, int rows, bool left, bool right> struct alignas(64) Scores {
    static constexpr int strip = row_vectors, ld = strip * W, size = depth(keys) * depth(rows),
                         strip_size = depth(keys) * ld;

    float* of(int vector, int /*first_key*/ = 0) {
      return scores + vector / strip % 2 * strip_size + vector % strip * W;
    }
    Multiplied put(int64_t key, int vector, fg::VecF x, fg::VecF y) {
      fg::VecU low[parts], high[parts];
      fg::split(x, low);
      fg::split(y, high);
      fg::bf16* const pair = pairs_of(vector) + key * W;
      fg::bf16* const weight = weights + vector / strip * strip_size + key * ld + vector % strip * W;
      FG_UNROLL for (int part = 0; part < parts; ++part) {
        if (right) fg::store_pairs(pair + part * strip_size, low[part], high[part]);
        if (!left) continue;
        fg::store_upper_halves(weight + part * size, low[part]);
        fg::store_upper_halves(weight + part * size + ld, high[part]);
      }
      return {fg::upper_half(low[0]), fg::upper_half(high[0])};  // where one part is all
    }
    // Keys that share a pair with one before `first` have been put.
    void clear(int first, int end) {
      const int pair = int(round_up(first, 2));
      for (int part = 0; part < parts; ++part) {
        for (int vector = 0; right && pair < end && vector < 2 * strip; ++vector)
          std::fill_n(pairs_of(vector) + part * strip_size + pair * W, (end - pair) * W, fg::bf16{0});
        for (int panel = 0; left && first < end && panel < depth(rows) / ld; ++panel)
          std::fill_n(weights + part * size + panel * strip_size + first * ld, (end - first) * ld, fg::bf16{0});
      }
    }
    // Both lie so that keys follow one another.
    Left by_key(int vector) {
      return {weights + vector / strip * strip_size, fg::image, strip_size, size, fg::image_row, true};
    }
    Right of_keys(int vector, int /*first_key*/ = 0) {
      return {pairs_of(vector), depth(keys) * W, fg::image, strip_size, fg::image_row, true};
    }
    fg::bf16* pairs_of(int vector) {
      return pairs + vector / strip % 2 * (parts * strip_size) + vector % strip * (depth(keys) * W);
    }

    float scores[2 * strip_size];
    alignas(64) fg::bf16 pairs[right ? 2 * parts * strip_size : 1];
    alignas(64) fg::bf16 weights[left ? parts * size : 1];
  };
};
#endif

// `count` later products, one after the other.
template <class Later, int count> struct InTurn {
  int steps() const {
    int sum = 0;
    for (const Later& product : products) sum += product.steps();
    return sum;
  }
  // Of the first that is not done. Branches say which: an index would be waited for.
  template <int first = 0> FG_INLINE void step() {
    if constexpr (first + 1 < count) {
      if (products[first].is_done()) return step<first + 1>();
    }
    products[first].step();
  }
  void finish() {
    for (Later& product : products) product.finish();
  }

  Later products[count];
};

// Spreads the steps of a later product evenly over other work, of which `done` is done from one call to the next.
template <class Later> class Spread {
 public:
  Spread(Later& later, int work) : later_(later), steps_(later.steps()), work_(work) {}
  FG_INLINE void pass(int done) {
    for (due_ += steps_ * done; steps_ > 0 && due_ >= work_; due_ -= work_) later_.step();
  }

 private:
  Later& later_;
  const int steps_, work_;
  int due_ = 0;
};

// The kind of products that a call of so many query rows goes with, the same in both passes: scores agree to the
// bit. K and V are laid out in parts for each tile, which neither a short call repays nor, but in forward mode, low
// tiles (measured: from 160 rows of a call and 128 of a tile on). Threads have no say: they change no bit.
#ifndef FLASHGEN_FEWEST_ROWS
#define FLASHGEN_FEWEST_ROWS 160
#endif
enum { VECTORS, PAIRS, BFLOAT16, PARTS, KINDS_OF_PRODUCTS };
inline int products_of(const Arguments& a, int64_t queries) {
  const bool rounded = !Spec::tangent && a.element == BF16;
  [[maybe_unused]] constexpr bool high =
      Spec::tangent || 5 * Plan::lowest_split_rows >= 4 * FLASHGEN_FEWEST_ROWS;
  if (rounded && are_few(a, queries)) return VECTORS;
#if FLASHGEN_MATRIX_PRODUCTS
  if (fg::has_matrix_registers()) return rounded ? BFLOAT16 : high && queries >= FLASHGEN_FEWEST_ROWS ? PARTS : VECTORS;
#elif FLASHGEN_PAIR_PRODUCTS
  if (rounded) return PAIRS;
#endif
  return VECTORS;
}

// pass(products) with this kind. A library that is for some calls alone lacks kinds of the others.
template <class Pass> inline auto with_products(const Arguments& a, const Pass& pass) {
  [[maybe_unused]] const int kind = products_of(a, a.q_len);
#if FLASHGEN_MATRIX_PRODUCTS
  if constexpr (FLASHGEN_PRODUCTS != 3 && !Spec::tangent)
    if (kind == BFLOAT16) return pass(MatrixProducts<1>());
  if constexpr (FLASHGEN_PRODUCTS != 2)
    if (kind == PARTS) return pass(MatrixProducts<3>());
#elif FLASHGEN_PAIR_PRODUCTS
  if constexpr (!Spec::tangent)
    if (kind == PAIRS) return pass(PairProducts());
#endif
  return pass(VectorProducts());
}

}  // namespace
