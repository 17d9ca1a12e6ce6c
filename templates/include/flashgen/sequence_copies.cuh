// Layer 2 of the CUDA primitives, Hopper's part: tensor copies from one sequence of a ragged batch.
//
// Contract: rows of all sequences lie one behind the other, and a map (flashgen/hosts/tensor_maps.py) has two dimensions
// more than others, by which a copy sees one of them as if it were all there is. Rows behind its last become zero, whatever
// lies there, as they do behind a tensor's last row.
#pragma once
#include "flashgen/tensor_copies.cuh"

namespace fg {
#ifndef FLASHGEN_EMULATOR

// A panel of a tensor of five dimensions.
template <class T>
FG_DEVICE void copy_panel_async(
    T* to, const TensorMap& map, int column, int row, int slab, int fourth, int fifth, uint64_t* signal) {
  static_assert(sizeof(T) == 2, "maps are of 2-byte elements");
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
               "l"(&map), "r"(column), "r"(row), "r"(slab), "r"(fourth), "r"(fifth), "r"(shared_address(signal))
               : "memory");
}

#endif  // FLASHGEN_EMULATOR

// Of a sequence: its first row among all, and how many it has.
struct SequenceRows {
  int begin, count;
};
// Where the dimension of rows ends, and with it every sequence.
constexpr int SEQUENCE_END = 1 << 30;

// Starts the copy of a panel's columns from `column` on, of rows row … of a sequence and a slab.
template <class T>
FG_DEVICE void copy_panel_async(
    T* to, const TensorMap& map, const SequenceRows& rows, int column, int row, int slab, uint64_t* signal) {
  copy_panel_async(
      to, map, column, SEQUENCE_END - rows.count + row, slab, rows.begin + rows.count, SEQUENCE_END, signal);
}
// Starts the copy of rows first … of a sequence and a slab to a whole tile, Tile::bytes in all, by this thread.
template <class Tile>
FG_DEVICE void copy_tile_async(
    Tile to, const TensorMap& map, const SequenceRows& rows, int first, int slab, uint64_t* signal) {
  static_assert(
      Tile::rows <= 256 && Tile::rows % 8 == 0, "a panel is one box, which begins where the permutation does");
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel)
    copy_panel_async(
        to.base + panel * Tile::rows * Tile::width, map, rows, panel * Tile::width, first, slab, signal);
}

}  // namespace fg
