// Which parts of global memory a launch has loaded, stored and added to.
//
// Contract: loads go through the read-only path of a GPU, so nothing that a launch loads may be written in the same
// launch, not even by the thread that loads. An element is stored by one thread; what one block stores, no other block
// adds to. Two bytes are the smallest element that is written, and the unit of the shadow.
#pragma once
#include <stdlib.h>

#include <memory>
#include <vector>

#include "../interface.h"

namespace fg {
namespace emulator {

// The memory of the marks is shared by all host threads and reached by relaxed atomic operations.
class GlobalShadow {
 public:
  // The state of two bytes in 64 bits: what happened, who wrote (thread in the grid, 30 bits of it), the lines.
  struct Mark {
    enum : uint64_t { loaded = 1, stored = 2, added = 4 };
    uint64_t bits;
    bool has(uint64_t flag) const { return bits & flag; }
    int load_line() const { return static_cast<int>(bits >> 3 & 0xffff); }
    int write_line() const { return static_cast<int>(bits >> 19 & 0xffff); }
    uint32_t block() const { return static_cast<uint32_t>(bits >> 45); }
    uint32_t thread() const { return static_cast<uint32_t>(bits >> 35 & 1023); }
  };
  struct Writer {
    uint64_t block;
    uint32_t thread;
  };
  enum class Conflict { none, loaded_after_write, written_after_load, stored_twice, stored_and_added };
  struct Finding {
    Conflict conflict;
    uint64_t offset;
    Mark mark;
  };

  explicit GlobalShadow(const Launch& launch) : marks_(static_cast<size_t>(launch.allocations)) {
    for (size_t k = 0; k < marks_.size(); ++k)
      marks_[k].reset(static_cast<uint64_t*>(calloc(launch.allocation[k].bytes / 2 + 1, sizeof(uint64_t))));
  }

  bool allocated() const {
    for (const Marks& each : marks_)
      if (!each) return false;
    return true;
  }

  Finding access(size_t allocation, Access access, uint64_t offset, unsigned bytes, Writer writer, int line) {
    uint64_t* marks = marks_[allocation].get();
    for (uint64_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
      const Mark mark = {__atomic_load_n(&marks[at], __ATOMIC_RELAXED)};
      const uint64_t next = access == Access::load ? with_load(mark, line) : with_write(mark, access, writer, line);
      const Conflict conflict = judge(mark, access, writer);
      if (conflict != Conflict::none) return {conflict, at * 2, mark};
      if (next != mark.bits) __atomic_store_n(&marks[at], next, __ATOMIC_RELAXED);
    }
    return {Conflict::none, 0, {}};
  }

 private:
  static Conflict judge(Mark mark, Access access, Writer writer) {
    if (mark.bits == 0) return Conflict::none;
    if (access == Access::load)
      return mark.has(Mark::stored | Mark::added) ? Conflict::loaded_after_write : Conflict::none;
    if (mark.has(Mark::loaded)) return Conflict::written_after_load;
    const bool same_block = mark.block() == (writer.block & 0x7ffff);
    const bool same_thread = same_block && mark.thread() == writer.thread;
    if (access == Access::store && mark.has(Mark::stored) && !same_thread) return Conflict::stored_twice;
    const bool mixed = mark.has(access == Access::store ? Mark::added : Mark::stored);
    return mixed && !same_block ? Conflict::stored_and_added : Conflict::none;
  }
  static uint64_t with_load(Mark mark, int line) {
    return mark.has(Mark::loaded) ? mark.bits : mark.bits | Mark::loaded | static_cast<uint64_t>(line & 0xffff) << 3;
  }
  static uint64_t with_write(Mark mark, Access access, Writer writer, int line) {
    const uint64_t flags = (mark.bits & 7) | (access == Access::store ? Mark::stored : Mark::added);
    const uint64_t who = uint64_t{writer.thread & 1023} << 35 | (writer.block & 0x7ffff) << 45;
    return flags | static_cast<uint64_t>(line & 0xffff) << 19 | who;
  }

  struct Free {
    void operator()(uint64_t* p) const { free(p); }
  };
  using Marks = std::unique_ptr<uint64_t[], Free>;
  std::vector<Marks> marks_;
};

}  // namespace emulator
}  // namespace fg
