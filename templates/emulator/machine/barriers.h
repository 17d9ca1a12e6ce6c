// Barriers with a number, for some of a block's warps: bar.sync, whose warps wait at one instruction, barrier.sync, whose
// warps wait wherever they are, and bar.arrive, whose warps go on.
//
// Contract: a barrier is complete when as many threads have come as were announced, the same number by everyone; then
// those that wait are ordered after all that came, and the next round begins. No warp comes twice in one round.
#pragma once
#include "clocks.h"
#include "faults.h"

namespace fg {
namespace emulator {

class Barriers {
 public:
  static constexpr int most = 16;

  Barriers(Clocks& clocks, Faults& faults) : clocks_(clocks), faults_(faults) {}

  void reset() {
    for (Barrier& barrier : barriers_) barrier = {};
  }

  // The warps that may go on after this one came: bits. One that waits may be among them.
  uint32_t come(int warp, const Call& call, const char* name) {
    const int number = call.number, threads = call.bytes, line = call.line;
    const bool waits = call.what != Together::barrier_arrive, aligned = call.what == Together::barrier_wait;
    if (number < 1 || number >= most)
      faults_.report(Fault::deadlock, line, 0, "warp %d comes to '%s' of barrier %d: there are 1 to %d", warp, name,
                     number, most - 1);
    Barrier& barrier = barriers_[number];
    if (threads < warp_lanes || threads > most_threads || threads % warp_lanes != 0)
      faults_.report(Fault::deadlock, line, 0, "warp %d comes to '%s' of barrier %d for %d threads: no whole warps",
                     warp, name, number, threads);
    if (barrier.warps && barrier.threads != threads)
      faults_.report(Fault::deadlock, line, barrier.line,
                     "warp %d comes to '%s' of barrier %d for %d threads, but warp %d came for %d", warp, name, number,
                     threads, __builtin_ctz(barrier.warps), barrier.threads);
    if (barrier.warps >> warp & 1)
      faults_.report(Fault::deadlock, line, barrier.line,
                     "warp %d comes to '%s' of barrier %d again before the %d threads of it have all come once", warp,
                     name, number, threads);
    // bar.sync is barrier.sync.aligned: all threads that wait execute the same instruction.
    if (waits && barrier.waiting && (aligned || barrier.aligned) && barrier.waiting_line != line)
      faults_.report(Fault::divergence, line, barrier.waiting_line,
                     "warp %d waits for barrier %d here, but warp %d at another place", warp, number,
                     __builtin_ctz(barrier.waiting));
    barrier.threads = threads;
    barrier.line = line;
    if (waits) barrier.waiting_line = line, barrier.aligned = aligned;
    barrier.warps |= 1u << warp;
    if (waits) barrier.waiting |= 1u << warp;
    clocks_.collect(warp, barrier.seen);
    if (!waits) clocks_.go_on(warp);
    if (__builtin_popcount(barrier.warps) * warp_lanes < threads) return waits ? 0 : 1u << warp;
    const uint32_t released = barrier.waiting;
    for (uint32_t rest = released; rest; rest &= rest - 1) clocks_.join(__builtin_ctz(rest), barrier.seen);
    barrier = {};
    return released | 1u << warp;
  }

  // Threads that have come to a barrier so far.
  int came(int number) const { return __builtin_popcount(barriers_[number].warps) * warp_lanes; }

  // All warps have ended: no barrier is left half complete.
  void require_complete() const {
    for (int number = 0; number < most; ++number)
      if (const Barrier& barrier = barriers_[number]; barrier.warps)
        faults_.report(Fault::deadlock, barrier.line, 0,
                       "warp %d came to barrier %d, and all have ended, but only %d threads came, not %d",
                       __builtin_ctz(barrier.warps), number, came(number), barrier.threads);
  }

 private:
  struct Barrier {
    int threads = 0, line = 0, waiting_line = 0;
    bool aligned = false;
    uint32_t warps = 0, waiting = 0;  // that came in this round
    Clocks::Seen seen = {};
  };

  Clocks& clocks_;
  Faults& faults_;
  Barrier barriers_[most];
};

}  // namespace emulator
}  // namespace fg
