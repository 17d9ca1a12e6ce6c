// Writes zeros to rows behind the last sequence of a ragged batch: a warp a row of a head, in turns.
// flashgen/op/ragged.py says what the fields are.
#include "flashgen/instructions.cuh"

struct Behind {
  void* at;
  const int32_t* end;  // the row behind the last sequence
  int64_t rows, heads, width, by_row, by_head, by_x, bytes;  // sizes; strides in elements; bytes of one, 2 or 4
};
struct Cleared {
  Behind of[3];
  int64_t count, warps;
};

namespace fg {

template <class Word> FG_DEVICE void clear_row(const Behind& of, int64_t from) {
  for (int64_t x = lane_index(); x < of.width; x += 32) global_store(static_cast<Word*>(of.at) + from + x * of.by_x, Word(0));
}

}  // namespace fg

extern "C" __global__ void __launch_bounds__(256) fg_clear_behind(const __grid_constant__ Cleared a) {
  const int64_t first = int64_t(fg::block_index()) * 8 + fg::warp_index();
  for (int64_t n = 0; n < a.count; ++n) {
    const Behind& of = a.of[n];
    const int64_t end = fg::global_load(of.end), begin = end > 0 ? end : 0;
    for (int64_t line = first; line < (of.rows - begin) * of.heads; line += a.warps) {
      const int64_t row = line / of.heads, from = (begin + row) * of.by_row + (line - row * of.heads) * of.by_head;
      if (of.bytes == 2) fg::clear_row<uint16_t>(of, from);
      else fg::clear_row<uint32_t>(of, from);
    }
  }
}
