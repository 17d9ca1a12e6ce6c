// Who has seen what: one vector clock a warp, over the steps of all warps and the phases of all signals (mbarriers.h), of
// all blocks of a cluster.
//
// Contract: a barrier ends a step of each warp that comes to it; those that wait there have seen what the others had
// seen when they came. An access carries the step of its warp; another warp has seen it if their barriers say so, and
// another lane of the same warp if the warp has waited at a barrier since. What a tensor copy brought carries the phase of
// its signal: a warp has seen it that waited for that phase, or came after one that did. Nothing but a barrier orders
// accesses to memory: not a shuffle, not an mma.
#pragma once
#include "../interface.h"

namespace fg {
namespace emulator {

struct Thread {
  int warp, lane;
};

class Clocks {
 public:
  static constexpr int most_warps = most_threads / warp_lanes, most_signals = 64;
  static constexpr int most = most_warps + most_signals;
  using Seen = uint32_t[most];
  static constexpr int of_signal(int signal) { return most_warps + signal; }

  void reset(int warps) {
    for (int w = 0; w < warps; ++w) {
      for (int other = 0; other < most; ++other) seen_[w][other] = w == other ? 1 : 0;
      since_[w] = 1;
    }
  }
  uint32_t now(int warp) const { return seen_[warp][warp]; }
  bool seen(int warp, int other, uint32_t step) const { return seen_[warp][other] >= step; }

  // Of each warp and signal: the last step that all lanes of `count` warps from `first` on have a barrier behind.
  void seen_by_all(int first, int count, Seen& steps) const {
    for (int other = 0; other < most; ++other) {
      steps[other] = UINT32_MAX;
      for (int w = first; w < first + count; ++w) {
        const uint32_t step = w == other ? since_[w] - 1 : seen_[w][other];
        if (step < steps[other]) steps[other] = step;
      }
    }
  }

  // The first step of a warp after the last time that its lanes waited for each other.
  uint32_t together_since(int warp) const { return since_[warp]; }

  void warp_barrier(int warp) { since_[warp] = ++seen_[warp][warp]; }
  // Of `count` warps from `first` on.
  void barrier(int first, int count) {
    Seen seen = {};
    for (int w = first; w < first + count; ++w) collect(w, seen);
    for (int w = first; w < first + count; ++w) join(w, seen);
  }

  // A barrier in parts: what each that comes has seen, its next step if it does not wait, what it learns if it does.
  void collect(int warp, Seen& seen) const { merge(seen_[warp], seen); }
  // What a single lane that comes has seen: not what its warp did since its lanes waited for each other.
  void collect_lane(int warp, Seen& seen) const {
    const uint32_t before = seen[warp];
    merge(seen_[warp], seen);
    seen[warp] = before > since_[warp] - 1 ? before : since_[warp] - 1;
  }
  static void merge(const Seen& from, Seen& into) {
    for (int other = 0; other < most; ++other)
      if (from[other] > into[other]) into[other] = from[other];
  }
  void go_on(int warp) { ++seen_[warp][warp]; }
  void join(int warp, const Seen& seen) {
    merge(seen, seen_[warp]);
    since_[warp] = ++seen_[warp][warp];
  }

 private:
  Seen seen_[most_warps];
  uint32_t since_[most_warps];
};

}  // namespace emulator
}  // namespace fg
