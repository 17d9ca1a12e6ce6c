// Where the elements of a warpgroup's operand lie in shared memory (PTX ISA, "Shared Memory Matrix Layout").
//
// With mn the index of a row of A or a column of B, k the inner one, and w = row_bytes / 2 elements in a row of memory,
// element (mn, k) lies, counted in bytes from the start,
//   along the rows    at mn % 8 * row_bytes + mn / 8 * stride_bytes + 2 k; leading_bytes is not used
//   across the rows   at mn % w * 2 + mn / w * leading_bytes + k % 8 * row_bytes + k / 8 * stride_bytes
// and then the address itself is permuted: bits 4 … are changed by bits 7 …, three of them in rows of 128 bytes, two in
// rows of 64, one in rows of 32. Chunks of 16 bytes stay together.
//
// Contract: addresses are relative to shared memory, which begins at a multiple of 1024.
#pragma once
#include "../formats.h"
#include "../interface.h"

namespace fg {
namespace emulator {

namespace warpgroup {

constexpr int rows = 64, depth = 16, most_columns = 256;
constexpr int chunk_bytes = 16, chunk = 8;  // elements

// Calls visit(mn, k, place) for each chunk of the first `extent` rows or columns; its elements follow each other in
// mn where the operand is read across, in k otherwise.
template <class Visit> void for_each_chunk(const SharedOperand& operand, int extent, Visit visit) {
  const uint64_t start = reinterpret_cast<uint64_t>(operand.start);
  const uint64_t mask = static_cast<uint64_t>(operand.row_bytes - chunk_bytes);  // of the bits that are changed
  const auto place = [&](int64_t bytes) {
    const uint64_t at = start + static_cast<uint64_t>(bytes);
    return reinterpret_cast<const char*>(at ^ (at >> 3 & mask));
  };
  const int64_t row = operand.row_bytes, leading = operand.leading_bytes, stride = operand.stride_bytes;
  if (operand.across) {
    const int w = operand.row_bytes / 2;
    for (int k = 0; k < depth; ++k)
      for (int mn = 0; mn < extent; mn += chunk)
        visit(mn, k, place(mn % w * 2 + mn / w * leading + k % 8 * row + k / 8 * stride));
  } else {
    for (int mn = 0; mn < extent; ++mn)
      for (int k = 0; k < depth; k += chunk) visit(mn, k, place(mn % 8 * row + mn / 8 * stride + 2 * k));
  }
}

inline void convert(float (&x)[chunk], const char* place, bool bfloat) {
  uint16_t bits[chunk];
  memcpy(bits, place, sizeof bits);
  if (bfloat) {
    for (int e = 0; e < chunk; ++e) x[e] = float_of_bfloat(bits[e]);
  } else {
    for (int e = 0; e < chunk; ++e) x[e] = float_of_half(bits[e]);
  }
}

}  // namespace warpgroup
}  // namespace emulator
}  // namespace fg
