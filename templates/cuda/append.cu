// Appends new rows of keys and values to caches: a warp a row. flashgen/op/appending.py says what the fields are.
// The rows of sequence b begin behind those that it has, in its entry of a cache, or in pages that a table names. Rows whose place does
// not lie within the cache are written nowhere.
#include "flashgen/types.cuh"

struct Appended {
  const void* from;
  void* to;
  const float* factors;  // of 8 bits, by sequence and head; null: there are none
  int64_t from_b, from_h, from_n, from_x, to_entry, to_h, to_n, to_x;  // strides, in units or, of what is rounded, in elements
  int width, unit, element, padding;  // of a row; bytes that are stored at once; 0: rows are as the cache has them, else of what is rounded to 8 bits
};
struct Append {
  Appended of[2];  // keys, values
  const int32_t *lengths, *entries, *pages;  // entries null: sequence b has entry b; pages null: rows lie in entries
  int32_t* filled;                           // the rows of each, with the new ones
  int64_t batch, heads, fresh;
  int rows, columns, count, padding;  // of an entry or page; pages that a sequence may have; entries or pages that there are
};

namespace fg {

// As float8_e4m3fn, to nearest even. What is further out than 448 becomes that.
FG_DEVICE uint32_t rounded_to_f8(float x) {
  const uint32_t word = __float_as_uint(x), sign = word >> 24 & 0x80u, size = word & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7fu;
  if (size >= 0x43e00000u) return sign | 0x7eu;
  // Below 2^-6 numbers are multiples of 2^-9: a float32 of 2^14 and more has no finer ones.
  if (size < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) & 0xfu);
  const uint32_t nearest = size + 0x7ffffu + (size >> 20 & 1u);
  return sign | ((nearest >> 20) - (120u << 3));
}

template <class Unit> FG_DEVICE void copy_row(const Appended& a, int64_t from, int64_t to) {
  for (int n = lane_index(); n < a.width; n += 32)
    global_store(static_cast<Unit*>(a.to) + to + n * a.to_x, global_load(static_cast<const Unit*>(a.from) + from + n * a.from_x));
}
template <class T> FG_DEVICE void round_row(const Appended& a, int64_t from, int64_t to, float factor) {
  uint8_t* const row = static_cast<uint8_t*>(a.to) + to;
  for (int first = 4 * lane_index(); first < a.width; first += 128) {
    uint32_t word = 0;
    for (int e = 0; e < 4 && first + e < a.width; ++e) {
      const float x = to_float(global_load(static_cast<const T*>(a.from) + from + (first + e) * a.from_x));
      const uint32_t byte = rounded_to_f8(a.factors ? x / factor : x);
      if (a.unit == 1) global_store(row + (first + e) * a.to_x, uint8_t(byte));
      word |= byte << 8 * e;
    }
    if (a.unit == 4) global_store(reinterpret_cast<uint32_t*>(row + first), word);
  }
}

}  // namespace fg

extern "C" __global__ void __launch_bounds__(256) fg_append(const __grid_constant__ Append a) {
  const int64_t row = int64_t(fg::block_index()) * 8 + fg::warp_index(), all = a.batch * a.heads * a.fresh;
  if (row >= 2 * all) return;
  const bool is_value = row >= all;
  const Appended& of = a.of[is_value];
  const int64_t own = is_value ? row - all : row, head = own / a.fresh, n = own - head * a.fresh, b = head / a.heads, h = head - b * a.heads;
  const int64_t length = fg::global_load(a.lengths + b);
  if (own == b * a.heads * a.fresh && !is_value && fg::lane_index() == 0) {
    const int64_t filled = length + a.fresh;
    fg::global_store(a.filled + b, int32_t(filled < INT32_MAX ? filled : INT32_MAX));
  }
  int64_t place = length + n, entry = b;
  if (place < 0) return;
  if (a.pages) {
    const int64_t column = place / a.rows;
    if (column >= a.columns) return;
    entry = fg::global_load(a.pages + b * a.columns + column), place -= column * a.rows;
  } else if (a.entries) {
    entry = fg::global_load(a.entries + b);
  }
  if (place >= a.rows || entry < 0 || entry >= a.count) return;
  const int64_t from = b * of.from_b + h * of.from_h + n * of.from_n, to = entry * of.to_entry + h * of.to_h + place * of.to_n;
  if (of.element) {
    const float factor = of.factors ? fg::global_load(of.factors + b * a.heads + h) : 1.0f;
    if (of.element == 1) fg::round_row<float>(of, from, to, factor);
    else if (of.element == 2) fg::round_row<fg::bfloat_t>(of, from, to, factor);
    else fg::round_row<fg::half_t>(of, from, to, factor);
  } else if (of.unit == 16) {
    fg::copy_row<uint4>(of, from, to);
  } else if (of.unit == 8) {
    fg::copy_row<uint64_t>(of, from, to);
  } else if (of.unit == 4) {
    fg::copy_row<uint32_t>(of, from, to);
  } else if (of.unit == 2) {
    fg::copy_row<uint16_t>(of, from, to);
  } else {
    fg::copy_row<uint8_t>(of, from, to);
  }
}
