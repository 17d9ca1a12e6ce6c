// Matrix products behind a C interface, for the tests of this folder: in matrix registers or, with FLASHGEN_MATRIX_PRODUCTS=2, in
// registers of arrays.
#include <type_traits>
#include <vector>
#include "flashgen/cpu/matrix_product.h"

using namespace fg;

namespace {

// A left operand of at least rows by cols, zeros or the numbers of an array; or the room for one of either kind.
template <int parts> struct MatrixOperand {
  static int whole(int n) { return (n + matrix_depth - 1) / matrix_depth * matrix_depth; }

  MatrixOperand(int at_least, int width) : rows(whole(at_least)), cols(whole(width)), storage(size_t(parts) * rows * cols) {
    images = {storage.data(), int64_t(parts) * matrix_rows * cols, parts * image, image, image_row, true};
  }
  MatrixOperand(int at_least, int width, const float* from) : MatrixOperand(at_least, width) {
    VecF largest{};
    for (int row = 0; row < at_least; ++row) {
      std::vector<float> numbers(from + int64_t(row) * width, from + int64_t(row + 1) * width);
      numbers.resize(cols);
      std::vector<bf16> cut(numbers.size());
      for (int col = 0; col < cols; ++col) std::memcpy(&cut[col], reinterpret_cast<const char*>(&numbers[col]) + 2, sizeof(bf16));
      if (parts == 1)
        put_row(images, row, cut.data(), cols);
      else
        put_row<parts>(images, row, numbers.data(), cols, largest);
    }
    images.finite = !any(eq(largest, infinity));
  }

  int rows, cols;
  std::vector<bf16> storage;
  NewImages images;
};

}  // namespace

extern "C" {

int width() { return W; }
bool matrices() { return has_matrix_registers(); }
// A [M, K] or, turned, [K, M]; B [K, N] or, by columns, [N, K]: what the numbers are sums of is made here, by the ways that kernels
// take. Sizes are multiples of 32, but M and N of 16.
void product_of_matrices(int parts, int M, int vectors, int K, const float* a, bool turned, const float* b, bool by_columns, float* c,
                         int64_t ldc, int begin) {
  const MatrixRegisters registers;
  const auto multiply = [&](auto kind) {
    constexpr int n = decltype(kind)::value;
    const int N = vectors * W;
    const MatrixOperand<n> given_a(turned ? K : M, turned ? M : K, a), given_b(by_columns ? N : K, by_columns ? K : N, b);
    MatrixOperand<n> left(M, K), right(N, K);
    if (turned) turn_images<n>(left.images, given_a.images, given_a.rows, given_a.cols);
    if (by_columns)
      pair_columns<n>(right.images, given_b.images, given_b.rows, given_b.cols);
    else
      pair_rows<n>(right.images, given_b.images, given_b.rows, given_b.cols);
    left.images.finite = given_a.images.finite, right.images.finite = given_b.images.finite;
    Ahead ahead = {reinterpret_cast<const char*>(b), line_bytes, 5, 2, 0};  // changes nothing but when memory comes
    matrix_product<n>(M, vectors, K, turned ? left.images : given_a.images, right.images, c, ldc, static_cast<Begin>(begin), ahead);
  };
  if (parts == 1)
    multiply(std::integral_constant<int, 1>());
  else
    multiply(std::integral_constant<int, 3>());
}
// The parts of W numbers, as float32, one vector after another; and what two vectors are rounded to, as pairs.
void parts_of(float* out, const float* x) {
  VecU part[3];
  split(load(x), part);
  for (int n = 0; n < 3; ++n) store(out + n * W, upper_half(part[n]));
}
void pairs(int32_t* out, const float* x, const float* y) {
  store_pairs(reinterpret_cast<bf16*>(out), rounded(load(x)), rounded(load(y)));
}

}  // extern "C"
