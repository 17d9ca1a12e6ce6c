// Shared memory of a block, with a shadow of three marks a byte: its last writer and two readers.
//
// Contract: a read finds bytes that were written (fresh memory is all ones, a NaN in every float format); two accesses
// to a byte by different threads, at least one of them a write, have a barrier between them (clocks.h); atomic
// additions do not race with each other; bytes of an asynchronous copy are not touched until a wait covers it.
//
// Two readers suffice. The first mark is the latest reader, the second the latest one from any other warp; so a writer
// finds a reader of another warp if there was one. Readers of one warp and one step share a mark: it then says `many`.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "clocks.h"
#include "faults.h"

namespace fg {
namespace emulator {

// Step, line, flags and thread in 64 bits; zero is "nobody".
class Mark {
 public:
  // in_flight is of writers, many of readers.
  static constexpr uint64_t atomic = 1u << 10, in_flight = 1u << 11, many = 1u << 11;

  Mark() = default;
  Mark(uint32_t step, int line, Thread thread, uint64_t flags = 0)
      : bits_(uint64_t{step} << 32 | static_cast<uint64_t>(line & 0xfffff) << 12 | flags |
              static_cast<uint64_t>(thread.warp << 5 | thread.lane)) {}

  explicit operator bool() const { return bits_ != 0; }
  bool operator==(Mark other) const { return bits_ == other.bits_; }
  bool has(uint64_t flag) const { return bits_ & flag; }
  void set(uint64_t flag) { bits_ |= flag; }
  uint32_t step() const { return static_cast<uint32_t>(bits_ >> 32); }
  int line() const { return static_cast<int>(bits_ >> 12 & 0xfffff); }
  int warp() const { return static_cast<int>(bits_ >> 5 & 31); }
  int lane() const { return static_cast<int>(bits_ & 31); }

 private:
  uint64_t bits_ = 0;
};

class SharedMemory {
 public:
  static constexpr size_t alignment = 1024;

  SharedMemory(size_t bytes, const Clocks& clocks, Faults& faults) : bytes_(bytes), clocks_(clocks), faults_(faults) {
    const size_t whole = (bytes + alignment) / alignment * alignment;
    data_ = static_cast<char*>(aligned_alloc(alignment, whole));
    shadow_ = static_cast<Shadow*>(calloc(bytes + 1, sizeof(Shadow)));
  }
  ~SharedMemory() {
    free(data_);
    free(shadow_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  bool allocated() const { return data_ && shadow_; }
  char* data() { return data_; }
  void reset() {
    memset(data_, 0xff, bytes_);
    memset(static_cast<void*>(shadow_), 0, bytes_ * sizeof(Shadow));
  }

  // Where the access begins, after the checks of its place.
  size_t place(const char* verb, const void* p, unsigned bytes, int line) {
    const uint64_t offset = reinterpret_cast<uint64_t>(p) - reinterpret_cast<uint64_t>(data_);
    if (offset >= bytes_ || bytes_ - offset < bytes)
      faults_.report(Fault::shared_outside, line, 0, "%s %u bytes of shared memory at byte %lld; the launch has %zu",
                     verb, bytes, static_cast<long long>(offset), bytes_);
    if (offset % bytes != 0)
      faults_.report(Fault::misaligned, line, 0,
                     "%s %u bytes at byte %zu of shared memory: the address is no multiple of %u", verb, bytes,
                     static_cast<size_t>(offset), bytes);
    return offset;
  }

  void require_written(size_t offset, unsigned bytes, int line) {
    for (size_t at = offset; at < offset + bytes; ++at)
      if (!shadow_[at].writer)
        faults_.report(Fault::uninitialized, line, 0,
                       "adds to byte %zu of shared memory, which nothing has written", at);
  }

  void read(Thread thread, size_t offset, unsigned bytes, int line) {
    const Mark mark(clocks_.now(thread.warp), line, thread);
    Shadow before = {}, after = {};
    for (size_t at = offset; at < offset + bytes; ++at) {
      Shadow& shadow = shadow_[at];
      if (at == offset || !(shadow == before)) {
        before = after = shadow;
        check_read(thread, shadow, at, line);
        remember_reader(after, mark);
      }
      shadow = after;
    }
  }

  // flags: Mark::atomic, Mark::in_flight.
  void write(Thread thread, size_t offset, unsigned bytes, int line, uint64_t flags = 0) {
    const Mark mark(clocks_.now(thread.warp), line, thread, flags);
    Shadow before = {};
    for (size_t at = offset; at < offset + bytes; ++at) {
      Shadow& shadow = shadow_[at];
      if (at == offset || !(shadow == before)) {
        before = shadow;
        check_write(thread, shadow, at, line, flags);
      }
      shadow.writer = mark;
    }
  }

  // An asynchronous copy arrives: its bytes are now an ordinary write of the thread that waited.
  void land(Thread thread, size_t offset, const void* data, unsigned bytes, int line) {
    memcpy(data_ + offset, data, bytes);
    const Mark mark(clocks_.now(thread.warp), line, thread);
    for (size_t at = offset; at < offset + bytes; ++at) shadow_[at].writer = mark;
  }

  // Of a copy in flight: whether its thread has committed it.
  class Commitments {
   public:
    virtual bool committed(Thread thread, size_t offset) const = 0;

   protected:
    ~Commitments() = default;
  };
  const Commitments* commitments = nullptr;

 private:
  struct Shadow {
    Mark writer, reader, other_reader;
    bool operator==(const Shadow& s) const {
      return writer == s.writer && reader == s.reader && other_reader == s.other_reader;
    }
  };

  // Whether the thread has not seen the access: they may happen in either order.
  bool unordered(Thread thread, Mark mark, bool many) const {
    if (!mark) return false;
    if (mark.warp() != thread.warp) return !clocks_.seen(thread.warp, mark.warp(), mark.step());
    return mark.step() == clocks_.now(thread.warp) && (many || mark.lane() != thread.lane);
  }

  static void remember_reader(Shadow& shadow, Mark mark) {
    const Mark last = shadow.reader;
    if (last && last.warp() == mark.warp()) {
      const bool same_step = last.step() == mark.step();
      if (same_step && (last.has(Mark::many) || last.lane() != mark.lane())) {
        shadow.reader.set(Mark::many);  // keeps the line of the earlier one
        return;
      }
    } else {
      shadow.other_reader = last;
    }
    shadow.reader = mark;
  }

  void check_read(Thread thread, const Shadow& shadow, size_t at, int line) {
    const Mark writer = shadow.writer;
    if (!writer)
      faults_.report(Fault::uninitialized, line, 0, "reads byte %zu of shared memory, which nothing has written", at);
    if (writer.has(Mark::in_flight)) in_flight("reads", thread, writer, at, line);
    if (unordered(thread, writer, false)) race("read", "written", thread, writer, false, at, line);
  }

  void check_write(Thread thread, const Shadow& shadow, size_t at, int line, uint64_t flags) {
    const Mark writer = shadow.writer;
    if (writer.has(Mark::in_flight)) in_flight("writes", thread, writer, at, line);
    const bool both_atomic = (flags & Mark::atomic) && writer.has(Mark::atomic);
    if (!both_atomic && unordered(thread, writer, false)) race("written", "written", thread, writer, false, at, line);
    for (const Mark reader : {shadow.reader, shadow.other_reader}) {
      const bool many = reader.has(Mark::many);
      if (unordered(thread, reader, many)) race("written", "read", thread, reader, many, at, line);
    }
  }

  [[noreturn]] void in_flight(const char* verb, Thread thread, Mark writer, size_t at, int line) {
    const Thread copier = {writer.warp(), writer.lane()};
    if (commitments && !commitments->committed(copier, at))
      faults_.report(Fault::not_committed, line, writer.line(),
                     "warp %d lane %d %s byte %zu of shared memory, the target of an asynchronous copy that warp %d "
                     "lane %d has not committed",
                     thread.warp, thread.lane, verb, at, copier.warp, copier.lane);
    faults_.report(Fault::not_awaited, line, writer.line(),
                   "warp %d lane %d %s byte %zu of shared memory, the target of an asynchronous copy that no wait of "
                   "warp %d lane %d has covered",
                   thread.warp, thread.lane, verb, at, copier.warp, copier.lane);
  }

  [[noreturn]] void race(const char* now, const char* before, Thread thread, Mark mark, bool many, size_t at,
                         int line) {
    const bool same_warp = mark.warp() == thread.warp;
    char who[48];
    snprintf(who, sizeof who, many ? "several lanes of warp %d" : "warp %d lane %d", mark.warp(), mark.lane());
    faults_.report(Fault::race, line, mark.line(),
                   "byte %zu of shared memory is %s by warp %d lane %d and was %s by %s, with no %s between", at, now,
                   thread.warp, thread.lane, before, who, same_warp ? "warp barrier" : "block barrier");
  }

  size_t bytes_;
  char* data_;
  Shadow* shadow_;
  const Clocks& clocks_;
  Faults& faults_;
};

}  // namespace emulator
}  // namespace fg
