// Blocks that do the work of many, and in which order tiles are worked on.
#pragma once
#include "flashgen/team.cuh"

namespace fg {

// ---- Groups of heads ----
// A block that has a multiprocessor to itself takes the longest tiles of several heads before shorter ones, as few long ones at the
// end would keep most of them waiting. A group of heads is about as large as a cache holds what its blocks read, and has
// all `sharers` of each of the `total` heads of keys. Groups of several are even in number: where each has about a tile
// for a multiprocessor, the longest tiles of one come where the shortest of the one before were; of one batch entry after another
// if these are inside: they share what pairs read or add to, which comes from memory once.
struct TileOfGroup {
  unsigned head, tile;  // the head counted through the batch
};
constexpr int ALONE = 1 << 30;  // bytes of a row: more than a cache holds, so that a group has one head
template <class Spec>
FG_DEVICE TileOfGroup tile_of_group(unsigned number, unsigned tiles, unsigned total, unsigned sharers, [[maybe_unused]] unsigned batch, int bytes_of_row, int rows) {
  const unsigned most = max(1, Spec::cache_of_groups / bytes_of_row / max(1, rows)), some = max(1, int(total / most));
  const unsigned groups = most > 1 && some > 1 ? some / 2 * 2 : some;
  const unsigned group = ((number / (Spec::batch_inside ? tiles * sharers * batch : tiles * sharers) + 1) * groups - 1) / total;  // of equal size, as nearly as may be
  const unsigned first = group * total / groups * sharers, heads = (group + 1) * total / groups * sharers - first;
  if constexpr (Spec::batch_inside) {
    const unsigned own = number - first * tiles * batch, tile = own / (heads * batch), place = own - tile * (heads * batch), b = place / heads;
    return {unsigned(again(int(b * total * sharers + first + (place - b * heads)))), unsigned(again(int(tile)))};
  } else {
    const unsigned own = number - first * tiles, tile = own / heads;
    return {unsigned(again(int(first + (own - tile * heads)))), unsigned(again(int(tile)))};
  }
}

// ---- Persistent blocks ----
// As many blocks as there is room for do the work of many: the first by its own number, then the next one that nobody has taken.

// One more of so many numbers, by one thread, for the blocks of a cluster; `numbers` or above where none is left.
template <int cluster = 1> FG_DEVICE int fetch_work_tile(uint32_t* counter, int work_tiles) {
  const int blocks = grid_size() / cluster;
  return work_tiles <= blocks ? work_tiles : blocks + int(global_next(counter));
}
// Of a ragged batch, by a warp: one more for which there is a tile, as its number in the sequence that it is of, which `find` says;
// below 0 where none is left. The `first` is the block's own.
template <class Sequence, class Find> FG_DEVICE int fetch_tile(uint32_t* counter, int numbers, bool first, Sequence& sequence, const Find& find) {
  for (int number = block_index();; first = false) {
    if (!first) number = shuffle(lane_index() == 0 ? fetch_work_tile(counter, numbers) : 0, 0);
    if (number >= numbers) return -1;
    int own;
    sequence = find(number, own);
    if (own >= 0) return own;
  }
}
// Where those who multiply do all, warps start parts in turn, and one has all that is of what comes next, its first lane the number.
using NextTeam = Team<32, 1, 32>;
FG_DEVICE bool knows_next() { return NextTeam::thread() == 0; }

}  // namespace fg
