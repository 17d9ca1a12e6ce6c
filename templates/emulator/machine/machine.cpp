// A launch: the blocks of a grid, or its clusters, in random order over one or several host threads. The library's one function.
//
// Contract: with one host thread the result, the counts and the first fault depend on the seed alone. With several,
// atomic additions of different blocks come in any order, and of several faults any may be reported.
#include "fiber.h"  // first: it changes how <setjmp.h> is read

#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "block.h"

namespace fg {
namespace emulator {
namespace {

uint64_t volume(Index3 size) { return uint64_t{size.x} * size.y * size.z; }

class Grid {
 public:
  explicit Grid(const Launch& launch) : launch_(launch), shadow_(launch), order_(volume(launch.grid) / static_cast<uint64_t>(launch.cluster)) {
    std::iota(order_.begin(), order_.end(), uint64_t{0});
    Random random(launch.seed, UINT64_MAX - 1);
    for (size_t k = order_.size(); k > 1; --k) std::swap(order_[k - 1], order_[random.below(static_cast<unsigned>(k))]);
  }

  void run() {
    if (!shadow_.allocated()) {
      launch_.failure->fault = Fault::launch;
      snprintf(launch_.failure->message, sizeof launch_.failure->message, "no host memory to watch the allocations");
      return;
    }
    const size_t wanted = static_cast<size_t>(launch_.host_threads < 1 ? 1 : launch_.host_threads);
    std::vector<std::thread> others;
    for (size_t k = 1; k < std::min(wanted, order_.size()); ++k) others.emplace_back([this] { work(); });
    work();
    for (std::thread& each : others) each.join();
    report_places();
  }

 private:
  void work() {
    Block block(launch_, shadow_, *launch_.registers());
    for (;;) {
      const size_t next = next_++;
      if (next >= order_.size() || failed_) break;
      if (!block.run(order_[next] * static_cast<uint64_t>(launch_.cluster))) {
        fail(block.index(), block.faults.failure);
        break;
      }
    }
    add_counts(block);
  }

  void fail(Index3 index, const Failure& failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failed_ = true;
    *launch_.failure = failure;
    char* message = launch_.failure->message;
    const size_t used = strlen(message);
    if (failure.fault != Fault::launch)
      snprintf(message + used, sizeof failure.message - used, " (block %u, %u, %u)", index.x, index.y, index.z);
  }

  void add_counts(const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t k = 0; k < block.global.traffic.size(); ++k) {
      launch_.traffic[k].loaded += block.global.traffic[k].loaded;
      launch_.traffic[k].stored += block.global.traffic[k].stored;
      launch_.traffic[k].added += block.global.traffic[k].added;
    }
    for (const auto& [key, found] : block.banks.counts) {
      const void* place = reinterpret_cast<const void*>(found.place);
      SharedRequests& sum = shared_[{call_at(reinterpret_cast<const void*>(launch_.enter), place), found.line}];
      sum.requests += found.requests;
      sum.wavefronts += found.wavefronts;
      sum.least += found.least;
    }
  }

  void report_places() {
    int used = 0;
    for (const auto& [key, found] : shared_) {
      if (used == launch_.places) break;
      launch_.shared[used] = found;
      launch_.shared[used].place = key.first;
      launch_.shared[used++].line = key.second;
    }
    *launch_.places_used = used;
  }

  const Launch& launch_;
  GlobalShadow shadow_;
  std::vector<uint64_t> order_;
  std::map<std::pair<uint64_t, int>, SharedRequests> shared_;  // by place and line
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
};

const char* impossible(const Launch& launch) {
  const uint64_t threads = volume(launch.block);
  if (threads == 0 || threads > most_threads) return "a block has between 1 and 1024 threads";
  if (threads % warp_lanes != 0) return "the emulator runs whole warps: a block's threads must be a multiple of 32";
  if (volume(launch.grid) == 0) return "a grid has at least one block in each dimension";
  if (launch.grid.y > 65535 || launch.grid.z > 65535) return "a grid has at most 65535 blocks in dimensions y and z";
  if (launch.cluster < 1 || launch.cluster > Mbarriers::most_blocks) return "the emulator runs clusters of one block or two";
  if (launch.cluster > 1 && (launch.grid.x % static_cast<unsigned>(launch.cluster) != 0 || threads % (warp_lanes * Warpgroups::warps) != 0))
    return "a grid has whole clusters, the emulator those of whole warpgroups";
  if (static_cast<uint64_t>(launch.cluster) * threads > most_threads) return "the emulator runs clusters of at most 1024 threads";
  if (launch.grid.x > INT32_MAX) return "a grid has at most 2147483647 blocks in dimension x";
  return nullptr;
}

}  // namespace
}  // namespace emulator
}  // namespace fg

extern "C" void flashgen_emulator_run(const fg::emulator::Launch* launch) {
  using namespace fg::emulator;
  if (const char* reason = impossible(*launch)) {
    launch->failure->fault = Fault::launch;
    snprintf(launch->failure->message, sizeof launch->failure->message, "%s", reason);
    return;
  }
  Grid(*launch).run();
}
