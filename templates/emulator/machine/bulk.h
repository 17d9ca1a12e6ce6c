// Asynchronous additions of a block, from shared to global memory: issued, committed in groups, ended by waits.
//
// Contract: they add at once, since nothing that a launch adds to is read in it; but what they read counts as being
// read until a wait of their thread covers their group.
#pragma once
#include <vector>

#include "shared_memory.h"

namespace fg {
namespace emulator {

class BulkAdditions {
 public:
  static constexpr int chunk_bytes = 16;

  BulkAdditions(SharedMemory& shared, Faults& faults, int threads)
      : shared_(shared), faults_(faults), of_thread_(static_cast<size_t>(threads)) {}

  void reset() {
    for (Pending& pending : of_thread_) pending = {};
  }

  // The chunk at `offset` of shared memory is read from now on.
  void issue(Thread thread, size_t offset, int line) {
    shared_.begin_bulk_read(thread, offset, chunk_bytes, line);
    of(thread).chunks.push_back({of(thread).groups, offset, line});
  }
  void commit(Thread thread) { ++of(thread).groups; }
  void wait(Thread thread) {
    Pending& pending = of(thread);
    size_t k = 0;
    for (; k < pending.chunks.size() && pending.chunks[k].group < pending.groups; ++k)
      shared_.end_bulk_read(thread, pending.chunks[k].offset, chunk_bytes, pending.chunks[k].line);
    pending.chunks.erase(pending.chunks.begin(), pending.chunks.begin() + static_cast<ptrdiff_t>(k));
  }

  // A thread ends: nothing of its may be under way.
  void require_idle(Thread thread) {
    const Pending& pending = of(thread);
    if (pending.chunks.empty()) return;
    const bool committed = pending.chunks[0].group < pending.groups;
    faults_.report(committed ? Fault::not_awaited : Fault::not_committed, pending.chunks[0].line, 0,
                   "warp %d lane %d ends, but %s this asynchronous addition", thread.warp, thread.lane,
                   committed ? "no wait has covered" : "has not committed");
  }

 private:
  struct Chunk {
    int group;
    size_t offset;
    int line;
  };
  struct Pending {
    int groups = 0;  // committed so far
    std::vector<Chunk> chunks;
  };
  Pending& of(Thread thread) { return of_thread_[static_cast<size_t>(thread.warp * warp_lanes + thread.lane)]; }

  SharedMemory& shared_;
  Faults& faults_;
  std::vector<Pending> of_thread_;
};

}  // namespace emulator
}  // namespace fg
