// When each thread made its writes to shared memory visible to the products of warpgroups (fence.proxy.async).
//
// Contract: a write is identified by its thread, its step and how many publications of that thread the step had seen by
// then; more than `most` in one step are taken for `most`.
#pragma once
#include <algorithm>
#include <vector>

#include "clocks.h"

namespace fg {
namespace emulator {

class Publications {
 public:
  static constexpr int most = 15;

  Publications(const Clocks& clocks, int threads) : clocks_(clocks), steps_(static_cast<size_t>(threads)) {}

  void reset() {
    for (Steps& each : steps_) each.clear();
  }
  void publish(Thread thread) { of(thread).push_back(clocks_.now(thread.warp)); }

  // In the present step.
  int made(Thread thread) const {
    const Steps& steps = of(thread);
    const uint32_t now = clocks_.now(thread.warp);
    int count = 0;
    for (size_t k = steps.size(); k > 0 && steps[k - 1] == now && count < most; --k) ++count;
    return count;
  }
  // The step of the first publication after a write of `step` that followed `made` of them; UINT32_MAX: there is none.
  uint32_t after(Thread thread, uint32_t step, int made) const {
    const Steps& steps = of(thread);
    const auto first = std::lower_bound(steps.begin(), steps.end(), step);
    return steps.end() - first > made ? first[made] : UINT32_MAX;
  }

 private:
  using Steps = std::vector<uint32_t>;
  Steps& of(Thread thread) { return steps_[static_cast<size_t>(thread.warp * warp_lanes + thread.lane)]; }
  const Steps& of(Thread thread) const { return steps_[static_cast<size_t>(thread.warp * warp_lanes + thread.lane)]; }

  const Clocks& clocks_;
  std::vector<Steps> steps_;  // by thread, ascending
};

}  // namespace emulator
}  // namespace fg
