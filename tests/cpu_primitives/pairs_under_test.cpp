// Products of pairs of bfloat16 behind a C interface, for the tests of this folder: by the machine's instruction or, with
// FLASHGEN_PAIR_PRODUCTS=2, by what stands for it.
#include <vector>
#include "flashgen/cpu/images.h"

using namespace fg;

extern "C" {

int width() { return W; }
// A [M, K] where its rows lie or, turned, [K, M], of which pairs of rows are made; B [K, N] or, by columns, [N, K]. The upper halves of
// numbers are multiplied. K is a multiple of 32, M of row_multiple, and where pairs of rows are made of A of W.
void product_of_pairs(int M, int vectors, int K, const float* a, bool turned, const float* b, bool by_columns, float* c, int64_t ldc,
                      int begin) {
  const auto halves = [](const float* from, int rows, int64_t cols) {
    std::vector<bf16> found(size_t(rows * cols));
    for (size_t n = 0; n < found.size(); ++n) std::memcpy(&found[n], reinterpret_cast<const char*>(from + n) + 2, sizeof(bf16));
    return found;
  };
  const auto rows_at = [](const bf16* at, int64_t ld) -> Images { return {at, W * ld, matrix_depth, 0, ld, true}; };
  const auto pairs_at = [](std::vector<float>& at, int64_t ld) -> NewImages {
    at.resize(at.size() + W);
    return {reinterpret_cast<bf16*>(at.data()), 2 * W, matrix_depth * ld, 0, 2 * ld, true};
  };
  const int N = vectors * W, lda = turned ? M : K, ldb = N + W;
  const std::vector<bf16> left = halves(a, turned ? K : M, lda), right = halves(b, by_columns ? N : K, by_columns ? K : N);
  std::vector<float> turned_a(size_t(turned ? K / 2 * M : 0)), made_b(size_t(K / 2 * ldb));
  if (turned) pair_rows<1>(pairs_at(turned_a, M), rows_at(left.data(), M), K, M);
  if (by_columns)
    pair_columns<1>(pairs_at(made_b, ldb), rows_at(right.data(), K), N, K);
  else
    pair_rows<1>(pairs_at(made_b, ldb), rows_at(right.data(), N), K, N);
  Ahead ahead = {reinterpret_cast<const char*>(b), line_bytes, 5, 2, 0};  // changes nothing but when memory comes
  const float* const at = turned ? turned_a.data() : reinterpret_cast<const float*>(left.data());
  tile_product<Pairs>(M, vectors, K / 2, at, turned ? 1 : K / 2, turned ? M : 1, made_b.data(), ldb, c, ldc, static_cast<Begin>(begin), ahead);
}

// What two vectors are rounded to: as pairs, and one behind the other.
void rounded_pairs(uint16_t* pairs, uint16_t* words, const float* x, const float* y) {
  const TwiceWords both = bfloat16_of(load(x), load(y)), paired = interleaved(both);
  const Words low = lower_words(both), high = upper_words(both);
  std::memcpy(pairs, &paired, sizeof(paired));
  std::memcpy(words, &low, sizeof(low));
  std::memcpy(words + W, &high, sizeof(high));
}

}  // extern "C"
