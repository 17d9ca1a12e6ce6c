// Layer 3 of the CUDA primitives: a tile cut into pieces, until the range of the mask over each says all or none.
//
// Contract: the class of a tile is that of its pieces together. Cut at the blocks of the mask, then at multiples of
// powers of two; at most MOST_PIECES are asked about, and what is open then may be anything.
// flashgen/analysis/pieces.py says the same.
#pragma once
#include "flashgen/standard.cuh"
#include "flashgen/ranges.h"

namespace fg {

constexpr int MOST_PIECES = 64;      // of a tile, with those that were cut
constexpr int MOST_POSITIONS = 256;  // of a tile, each way: what is larger are many tiles

struct Positions {
  int lo, hi;
};
// The first position of the second part; the size of the blocks that it lies between, 1 where none does, 0 for a single
// position.
struct Cut {
  int at, block;
};
template <int... sizes> struct Blocks {};  // of the mask, the largest first

FG_DEVICE Cut cut(Positions x, Blocks<>) {
  if (x.lo == x.hi) return {x.lo, 0};
  const int bit = 31 - __builtin_clz(uint32_t(x.lo ^ x.hi));
  return {x.hi >> bit << bit, 1};
}
template <int size, int... smaller> FG_DEVICE Cut cut(Positions x, Blocks<size, smaller...>) {
  const int middle = x.lo + (x.hi - x.lo + 1) / 2;
  const int at = int(uint32_t(middle + size / 2) / uint32_t(size)) * size;
  return x.lo < at && at <= x.hi ? Cut{at, size} : cut(x, Blocks<smaller...>());
}

// The range of keep(i, j) over a tile. A piece is found anew from the cuts that lead to it: a stack would be local
// memory.
template <class Keep, class Rows, class Columns>
FG_DEVICE ranges::Bool by_pieces(Positions i, Positions j, const Keep& keep, Rows rows, Columns columns) {
  const int most = i.hi - i.lo < MOST_POSITIONS && j.hi - j.lo < MOST_POSITIONS ? MOST_PIECES : 1;
  ranges::Bool found = {false, false};
  uint32_t path = 0;  // the parts that lead to a piece, one bit a cut, the last cut lowest
  int depth = 0;
#pragma unroll 1
  for (int n = 0; n < most; ++n) {
    Positions some_i = i, some_j = j;
    bool is_single;
#pragma unroll 1
    for (int level = depth;; --level) {
      const Cut of_i = cut(some_i, rows), of_j = cut(some_j, columns);
      is_single = of_i.block + of_j.block == 0;
      if (level == 0) break;
      const bool second = path >> (level - 1) & 1;
      if (of_i.block > of_j.block || (of_i.block == of_j.block && some_i.hi - some_i.lo >= some_j.hi - some_j.lo)) {
        second ? some_i.lo = of_i.at : some_i.hi = of_i.at - 1;
      } else {
        second ? some_j.lo = of_j.at : some_j.hi = of_j.at - 1;
      }
    }
    const ranges::Bool part = keep(some_i, some_j);
    if (part.may_be_false && part.may_be_true && !is_single && depth < 31) {
      path <<= 1, ++depth;
      continue;
    }
    found = ranges::hull(found, part);
    if (found.may_be_false && found.may_be_true) return found;
    while (path & 1) path >>= 1, --depth;  // both parts of a cut are done
    if (depth == 0) return found;
    path |= 1;
  }
  return {true, true};
}

}  // namespace fg
