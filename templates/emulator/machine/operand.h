// Where the elements of a warpgroup's operand lie in shared memory (PTX ISA, "Shared Memory Matrix Layout").
//
// With mn the index of a row of A or a column of B, k the inner one, s bytes in an element and w = row_bytes / s elements in
// a row of memory, element (mn, k) lies, counted in bytes from the start,
//   along the rows    at mn % 8 * row_bytes + mn / 8 * stride_bytes + s k; leading_bytes is not used
//   across the rows   at mn % w * s + mn / w * leading_bytes + k % 8 * row_bytes + k / 8 * stride_bytes
// and then the address itself is permuted: bits 4 … are changed by bits 7 …, three of them in rows of 128 bytes, two in
// rows of 64, one in rows of 32. Chunks of 16 bytes stay together. Elements of 8 bits are read along the rows alone.
//
// Contract: addresses are relative to shared memory, which begins at a multiple of 1024.
#pragma once
#include "../formats.h"
#include "../interface.h"

namespace fg {
namespace emulator {

namespace warpgroup {

constexpr int rows = 64, most_columns = 256, tile = 8;  // columns of a tile of accumulators
constexpr int inner_bytes = 32, chunk_bytes = 16;       // of a row of an operand
constexpr int most_depth = inner_bytes, most_of_chunk = chunk_bytes;

constexpr int bytes_of(Format format) { return format == Format::e4m3 ? 1 : 2; }
constexpr int depth_of(Format format) { return inner_bytes / bytes_of(format); }

// Calls visit(mn, k, place) for each chunk of the first `extent` rows or columns; its elements follow each other in
// mn where the operand is read across, in k otherwise.
template <class Visit> void for_each_chunk(const SharedOperand& operand, Format format, int extent, Visit visit) {
  const int bytes = bytes_of(format), depth = depth_of(format), chunk = chunk_bytes / bytes;
  const uint64_t start = reinterpret_cast<uint64_t>(operand.start);
  const uint64_t mask = static_cast<uint64_t>(operand.row_bytes - chunk_bytes);  // of the bits that are changed
  const auto place = [&](int64_t offset) {
    const uint64_t at = start + static_cast<uint64_t>(offset);
    return reinterpret_cast<const char*>(at ^ (at >> 3 & mask));
  };
  const int64_t row = operand.row_bytes, leading = operand.leading_bytes, stride = operand.stride_bytes;
  if (operand.across) {
    const int w = operand.row_bytes / bytes;
    for (int k = 0; k < depth; ++k)
      for (int mn = 0; mn < extent; mn += chunk)
        visit(mn, k, place(mn % w * bytes + mn / w * leading + k % 8 * row + k / 8 * stride));
  } else {
    for (int mn = 0; mn < extent; ++mn)
      for (int k = 0; k < depth; k += chunk) visit(mn, k, place(mn % 8 * row + mn / 8 * stride + bytes * k));
  }
}

// The elements of a chunk; how many.
inline int convert(float (&x)[most_of_chunk], const char* place, Format format) {
  if (format == Format::e4m3) {
    uint8_t bits[chunk_bytes];
    memcpy(bits, place, sizeof bits);
    for (int e = 0; e < chunk_bytes; ++e) x[e] = float_of_e4m3(bits[e]);
    return chunk_bytes;
  }
  uint16_t bits[chunk_bytes / 2];
  memcpy(bits, place, sizeof bits);
  for (int e = 0; e < chunk_bytes / 2; ++e)
    x[e] = format == Format::bfloat ? float_of_bfloat(bits[e]) : float_of_half(bits[e]);
  return chunk_bytes / 2;
}

}  // namespace warpgroup
}  // namespace emulator
}  // namespace fg
