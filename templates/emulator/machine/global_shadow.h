// Which parts of global memory a launch has loaded, stored and added to.
//
// Contract: loads go through the read-only path of a GPU, so nothing that a launch loads may be written in the same
// launch, not even by the thread that loads. But for what is loaded as left by other blocks: these have arrived since
// they stored it, and so has the block that loads. An element is stored by one thread; what one block stores, no other
// block adds to. Two bytes are the smallest element that is written, and the unit of the shadow.
#pragma once
#include <stdlib.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../interface.h"

namespace fg {
namespace emulator {

// The memory of the marks is shared by all host threads and reached by relaxed atomic operations.
class GlobalShadow {
 public:
  // The state of two bytes in 64 bits: what happened, who wrote (thread in the grid, 29 bits of it), the lines.
  struct Mark {
    enum : uint64_t { loaded = 1, stored = 2, added = 4, late = uint64_t{1} << 63 };  // late: its block had arrived before
    uint64_t bits;
    bool has(uint64_t flag) const { return bits & flag; }
    int load_line() const { return static_cast<int>(bits >> 3 & 0xffff); }
    int write_line() const { return static_cast<int>(bits >> 19 & 0xffff); }
    uint32_t block() const { return static_cast<uint32_t>(bits >> 45) & block_bits; }
    uint32_t thread() const { return static_cast<uint32_t>(bits >> 35 & 1023); }
  };
  static constexpr uint64_t block_bits = 0x3ffff;
  struct Writer {
    uint64_t block;
    uint32_t thread;
  };
  enum class Conflict { none, loaded_after_write, written_after_load, stored_twice, stored_and_added, not_left, not_handed };
  struct Finding {
    Conflict conflict;
    uint64_t offset;
    Mark mark;
  };

  explicit GlobalShadow(const Launch& launch)
      : marks_(static_cast<size_t>(launch.allocations)), arrived_(static_cast<uint8_t*>(calloc(block_bits + 1, 1))) {
    for (size_t k = 0; k < marks_.size(); ++k)
      marks_[k].reset(static_cast<uint64_t*>(calloc(launch.allocation[k].bytes / 2 + 1, sizeof(uint64_t))));
  }

  bool allocated() const {
    for (const Marks& each : marks_)
      if (!each) return false;
    return arrived_ != nullptr;
  }

  // What the block has stored others may load, and it what those stored that have arrived.
  void arrive(uint64_t block) { __atomic_store_n(&arrived_.get()[block & block_bits], 1, __ATOMIC_RELEASE); }

  // What the warp of this thread has handed others may load, once they have awaited as many at the counter as have left by now.
  void leave(Writer writer, const void* counter) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t number = ++left_[counter];
    for (Handed* each : pending_[{writer.block, writer.thread / warp_lanes}]) {
      if (!each->counter) each->counter = counter, each->stored = number;
      each->last = number, --each->pending;
    }
    pending_.erase({writer.block, writer.thread / warp_lanes});
  }
  void await(uint64_t block, const void* counter, uint32_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint32_t& most = awaited_[{block, counter}];
    if (count > most) most = count;
  }

  Finding access(size_t allocation, Access access, uint64_t offset, unsigned bytes, Writer writer, int line) {
    if (access == Access::hand || access == Access::load_handed || (access == Access::add && is_handed(allocation, offset)))
      return access_handed(allocation, access, offset, bytes, writer, line);
    uint64_t* marks = marks_[allocation].get();
    for (uint64_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
      const Mark mark = {__atomic_load_n(&marks[at], __ATOMIC_RELAXED)};
      const uint64_t next = access == Access::load || access == Access::load_left ? with_load(mark, line) : with_write(mark, access, writer, line);
      const Conflict conflict = judge(mark, access, writer);
      if (conflict != Conflict::none) return {conflict, at * 2, mark};
      if (next != mark.bits) __atomic_store_n(&marks[at], next, __ATOMIC_RELAXED);
    }
    return {Conflict::none, 0, {}};
  }

 private:
  // Two bytes that were handed on: at which counter, null as long as who stored them has not left there; as which number that one left,
  // and the last of those who added to them since; how many of these have not.
  struct Handed {
    const void* counter;
    uint32_t stored, last, pending;
  };
  // Marks say that they are loaded, stored and added to, which no others are.
  static constexpr uint64_t handed = Mark::loaded | Mark::stored | Mark::added;
  bool is_handed(size_t allocation, uint64_t offset) const {
    return (__atomic_load_n(&marks_[allocation].get()[offset / 2], __ATOMIC_RELAXED) & handed) == handed;
  }
  Finding access_handed(size_t allocation, Access access, uint64_t offset, unsigned bytes, Writer writer, int line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t* marks = marks_[allocation].get();
    for (uint64_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
      const Mark mark = {__atomic_load_n(&marks[at], __ATOMIC_RELAXED)};
      const auto found = handed_.find({allocation, at});
      const bool is_first = found == handed_.end();
      if (access == Access::hand ? mark.bits != 0 : is_first || !may_reach(found->second, access, writer))
        return {Conflict::not_handed, at * 2, mark};
      if (access == Access::load_handed) continue;
      Handed& own = handed_[{allocation, at}];  // all zeros where it is the first
      ++own.pending;
      pending_[{writer.block, writer.thread / warp_lanes}].push_back(&own);
      __atomic_store_n(&marks[at], handed | static_cast<uint64_t>(line & 0xffff) << 19, __ATOMIC_RELAXED);
    }
    return {Conflict::none, 0, {}};
  }
  // Who adds has awaited who stored, who loads all.
  bool may_reach(const Handed& handed, Access access, Writer writer) const {
    const auto found = awaited_.find({writer.block, handed.counter});
    if (!handed.counter || found == awaited_.end()) return false;
    return access == Access::add ? found->second >= handed.stored : handed.pending == 0 && found->second >= handed.last;
  }
  Conflict judge(Mark mark, Access access, Writer writer) {
    if (mark.bits == 0) return Conflict::none;
    if (access == Access::load_left) {
      if (!mark.has(Mark::stored | Mark::added) || mark.block() == (writer.block & block_bits)) return Conflict::none;
      const bool left = has_arrived(mark.block()) && has_arrived(writer.block) && !mark.has(Mark::late | Mark::added);
      return left ? Conflict::none : Conflict::not_left;
    }
    if (access == Access::load)
      return mark.has(Mark::stored | Mark::added) ? Conflict::loaded_after_write : Conflict::none;
    if (mark.has(Mark::loaded)) return Conflict::written_after_load;
    const bool same_block = mark.block() == (writer.block & block_bits);
    const bool same_thread = same_block && mark.thread() == writer.thread;
    if (access == Access::store && mark.has(Mark::stored) && !same_thread) return Conflict::stored_twice;
    const bool mixed = mark.has(access == Access::store ? Mark::added : Mark::stored);
    return mixed && !same_block ? Conflict::stored_and_added : Conflict::none;
  }
  static uint64_t with_load(Mark mark, int line) {
    return mark.has(Mark::loaded) ? mark.bits : mark.bits | Mark::loaded | static_cast<uint64_t>(line & 0xffff) << 3;
  }
  bool has_arrived(uint64_t block) const { return __atomic_load_n(&arrived_.get()[block & block_bits], __ATOMIC_ACQUIRE); }
  uint64_t with_write(Mark mark, Access access, Writer writer, int line) {
    const uint64_t flags = (mark.bits & 7) | (access == Access::store ? Mark::stored : Mark::added);
    const uint64_t who = uint64_t{writer.thread & 1023} << 35 | (writer.block & block_bits) << 45;
    return flags | (has_arrived(writer.block) ? uint64_t{Mark::late} : 0) | static_cast<uint64_t>(line & 0xffff) << 19 | who;
  }

  struct Free {
    void operator()(void* p) const { free(p); }
  };
  using Marks = std::unique_ptr<uint64_t[], Free>;
  std::vector<Marks> marks_;
  std::unique_ptr<uint8_t[], Free> arrived_;  // by the number of a block
  std::mutex mutex_;  // of what follows
  std::map<std::pair<size_t, uint64_t>, Handed> handed_;  // by allocation and place
  std::map<std::pair<uint64_t, uint32_t>, std::vector<Handed*>> pending_;  // of warps that have not left
  std::map<const void*, uint32_t> left_;                               // how many have, by counter
  std::map<std::pair<uint64_t, const void*>, uint32_t> awaited_;       // the most that a block has, by counter
};

}  // namespace emulator
}  // namespace fg
