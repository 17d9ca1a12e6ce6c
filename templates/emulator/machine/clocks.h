// Who has seen what: one vector clock a warp.
//
// Contract: a barrier of the block, or of a warp, ends a step of each warp that takes part. An access carries the step
// of its warp; another warp has seen it if their barriers say so, and another lane of the same warp if the warp has
// gone on to a later step. Nothing but a barrier orders accesses to memory: not a shuffle, not an mma.
#pragma once
#include "../interface.h"

namespace fg {
namespace emulator {

struct Thread {
  int warp, lane;
};

class Clocks {
 public:
  static constexpr int most_warps = most_threads / warp_lanes;

  void reset(int warps) {
    warps_ = warps;
    for (int w = 0; w < warps; ++w)
      for (int other = 0; other < warps; ++other) seen_[w][other] = w == other ? 1 : 0;
  }
  uint32_t now(int warp) const { return seen_[warp][warp]; }
  bool seen(int warp, int other, uint32_t step) const { return seen_[warp][other] >= step; }

  void warp_barrier(int warp) { ++seen_[warp][warp]; }
  void block_barrier() {
    uint32_t latest[most_warps] = {};
    for (int w = 0; w < warps_; ++w)
      for (int other = 0; other < warps_; ++other)
        if (seen_[w][other] > latest[other]) latest[other] = seen_[w][other];
    for (int w = 0; w < warps_; ++w) {
      for (int other = 0; other < warps_; ++other) seen_[w][other] = latest[other];
      ++seen_[w][w];
    }
  }

 private:
  int warps_ = 0;
  uint32_t seen_[most_warps][most_warps];
};

}  // namespace emulator
}  // namespace fg
