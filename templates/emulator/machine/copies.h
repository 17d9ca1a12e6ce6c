// Asynchronous copies of a block: issued, committed in groups, landed by waits and by nothing else.
//
// Contract: a copy reads its source when issued. A wait lands every group of its thread but the newest `pending`
// ones; copies that were not committed stay in flight, as they do on a GPU.
#pragma once
#include <vector>

#include "shared_memory.h"

namespace fg {
namespace emulator {

class Copies final : public SharedMemory::Commitments {
 public:
  static constexpr unsigned copy_bytes = 16;

  Copies(SharedMemory& shared, int threads) : shared_(shared), of_thread_(static_cast<size_t>(threads)) {
    shared.commitments = this;
  }

  void reset() {
    for (Pending& pending : of_thread_) pending = {};
  }

  // source null: zeros.
  void issue(Thread thread, size_t offset, const void* source, int line) {
    shared_.write(thread, offset, copy_bytes, line, Mark::in_flight);
    Copy copy = {of(thread).groups, offset, line, {}};
    if (source) memcpy(copy.data, source, copy_bytes);
    of(thread).copies.push_back(copy);
  }
  void commit(Thread thread) { ++of(thread).groups; }
  void wait(Thread thread, int newest) {
    Pending& pending = of(thread);
    const int landing = pending.groups - newest;  // groups before this one
    size_t k = 0;
    for (; k < pending.copies.size() && pending.copies[k].group < landing; ++k)
      shared_.land(thread, pending.copies[k].offset, pending.copies[k].data, copy_bytes, pending.copies[k].line);
    pending.copies.erase(pending.copies.begin(), pending.copies.begin() + static_cast<ptrdiff_t>(k));
  }

  bool committed(Thread thread, size_t offset) const override {
    const Pending& pending = of_thread_[static_cast<size_t>(thread.warp * warp_lanes + thread.lane)];
    for (const Copy& copy : pending.copies)
      if (offset >= copy.offset && offset - copy.offset < copy_bytes) return copy.group < pending.groups;
    return true;
  }

 private:
  struct Copy {
    int group;
    size_t offset;
    int line;
    char data[copy_bytes];
  };
  struct Pending {
    int groups = 0;  // committed so far
    std::vector<Copy> copies;
  };
  Pending& of(Thread thread) { return of_thread_[static_cast<size_t>(thread.warp * warp_lanes + thread.lane)]; }

  SharedMemory& shared_;
  std::vector<Pending> of_thread_;
};

}  // namespace emulator
}  // namespace fg
