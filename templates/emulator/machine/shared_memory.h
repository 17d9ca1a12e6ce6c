// Shared memory of a block, with a shadow of every two bytes: who wrote them and who reads them (accesses.h).
//
// Contract: a read finds bytes that were written (fresh memory is all ones, a NaN in every float format); two accesses
// to a byte by different threads, at least one of them a write, have a barrier between them (clocks.h); atomic
// additions do not race with each other; bytes of an asynchronous copy are not touched until a wait covers it. What a
// product of a warpgroup reads, or a tensor copy overwrites, was published by its writer (publications.h), and a barrier
// ordered that before the product or copy was issued; nobody has written there since. What tensor copies brought needs no
// publication.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "accesses.h"
#include "faults.h"

namespace fg {
namespace emulator {

class SharedMemory {
 public:
  static constexpr size_t alignment = 1024;

  SharedMemory(size_t bytes, const Clocks& clocks, const Publications& publications, Faults& faults)
      : bytes_(bytes), clocks_(clocks), publications_(publications), accesses_(clocks), faults_(faults) {
    const size_t whole = (bytes + alignment) / alignment * alignment;
    data_ = static_cast<char*>(aligned_alloc(alignment, whole));
    shadow_ = static_cast<Shadow*>(calloc(bytes / unit + 1, sizeof(Shadow)));
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
    memset(static_cast<void*>(shadow_), 0, (bytes_ / unit + 1) * sizeof(Shadow));
    accesses_.reset();
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
    for (size_t at = offset / unit; at <= last(offset, bytes); ++at)
      if (!shadow_[at].writer)
        faults_.report(Fault::uninitialized, line, 0, "adds to byte %zu of shared memory, which nothing has written",
                       at * unit);
  }

  void read(Thread thread, size_t offset, unsigned bytes, int line) {
    for_each(
        offset, bytes, [&](const Shadow& shadow, size_t at) { check_read(thread, shadow.writer, at, line); },
        [&](Shadow& shadow) { accesses_.remember_read(shadow, thread, line); });
  }

  // flags: Mark::atomic, Mark::in_flight.
  void write(Thread thread, size_t offset, unsigned bytes, int line, uint64_t flags = 0) {
    const Mark mark(clocks_.now(thread.warp), line, thread, flags, publications_.made(thread));
    for_each(
        offset, bytes, [&](const Shadow& shadow, size_t at) { check_write(thread, shadow, at, line, flags); },
        [&](Shadow& shadow) { shadow = {mark, {}}; });
  }

  // An asynchronous copy arrives: its bytes are now an ordinary write of the thread that waited.
  void land(Thread thread, size_t offset, const void* data, unsigned bytes, int line) {
    memcpy(data_ + offset, data, bytes);
    const Mark mark(clocks_.now(thread.warp), line, thread, 0, publications_.made(thread));
    for (size_t at = offset / unit; at <= last(offset, bytes); ++at) shadow_[at].writer = mark;
  }

  // A tensor copy of the thread is under way to these bytes; what it brings is there for who has seen `phase` of `signal`.
  void begin_copy(Thread thread, size_t offset, unsigned bytes, int line) {
    const Mark mark(clocks_.now(thread.warp), line, thread, Mark::in_flight | Mark::tensor);
    for_each(
        offset, bytes,
        [&](const Shadow& shadow, size_t at) {
          check_write(thread, shadow, at, line, 0);
          if (shadow.writer && !shadow.writer.has_landed())
            check_published(thread, shadow.writer, at, line, "overwritten by a tensor copy");
        },
        [&](Shadow& shadow) { shadow = {mark, {}}; });
  }
  void end_copy(int signal, uint32_t phase, size_t offset, const void* data, unsigned bytes, int line) {
    memcpy(data_ + offset, data, bytes);
    const Mark mark(phase, line, {signal / warp_lanes, signal % warp_lanes}, Mark::tensor);
    for (size_t at = offset / unit; at <= last(offset, bytes); ++at) shadow_[at].writer = mark;
  }
  Mark writer(size_t offset) const { return shadow_[offset / unit].writer; }
  void require_published(Thread thread, size_t offset, int line) {
    check_published(thread, writer(offset), offset, line, "an mbarrier, and counts a tensor copy");
  }

  // A product: its warps, and what all of them had a barrier behind when they issued it (Clocks::seen_by_all).
  struct Issue {
    int first_warp, line;
    Clocks::Seen seen;
  };
  // It is carried out now: its mark as a reader.
  Mark begin_product(const Issue& issue) { return accesses_.product(issue.first_warp, issue.line); }
  void read_by_product(const Issue& issue, Mark mark, size_t offset, unsigned bytes) {
    for_each(
        offset, bytes, [&](const Shadow& shadow, size_t at) { check_product(issue, shadow.writer, at); },
        [&](Shadow& shadow) { accesses_.remember_product(shadow, mark); });
  }

  // An asynchronous addition of a thread reads from here, until it has ended.
  void begin_bulk_read(Thread thread, size_t offset, unsigned bytes, int line) {
    for_each(
        offset, bytes, [&](const Shadow& shadow, size_t at) { check_bulk_read(thread, shadow.writer, at, line); },
        [&](Shadow& shadow) { accesses_.begin_read(shadow, thread, line); });
  }
  void end_bulk_read(Thread thread, size_t offset, unsigned bytes, int line) {
    for_each(
        offset, bytes, [](const Shadow&, size_t) {}, [&](Shadow& shadow) { accesses_.end_read(shadow, thread, line); });
  }

  // What a thread sends has been read for who has seen `phase` of the signal that counts it.
  void end_sending(Thread thread, int signal, uint32_t phase, size_t offset, unsigned bytes, int line) {
    for_each(
        offset, bytes, [](const Shadow&, size_t) {},
        [&](Shadow& shadow) { accesses_.end_sending(shadow, thread, signal, phase, line); });
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
  static constexpr size_t unit = 2;  // bytes of a shadow
  static size_t last(size_t offset, unsigned bytes) { return (offset + bytes - 1) / unit; }

  // Checks and changes the shadows of an access; neighbours that are alike only once.
  template <class Check, class Change> void for_each(size_t offset, unsigned bytes, Check check, Change change) {
    Shadow before = {}, after = {};
    for (size_t at = offset / unit; at <= last(offset, bytes); ++at) {
      Shadow& shadow = shadow_[at];
      if (at == offset / unit || !(shadow == before)) {
        before = after = shadow;
        check(before, at * unit);
        change(after);
      }
      shadow = after;
    }
  }

  void check_read(Thread thread, Mark writer, size_t at, int line) {
    if (!writer)
      faults_.report(Fault::uninitialized, line, 0, "reads byte %zu of shared memory, which nothing has written", at);
    if (writer.has(Mark::in_flight)) in_flight("reads", thread, writer, at, line);
    if (accesses_.unordered(thread, writer)) race("read", "written", thread, writer, at, line);
  }

  void check_write(Thread thread, const Shadow& shadow, size_t at, int line, uint64_t flags) {
    const Mark writer = shadow.writer;
    if (writer.has(Mark::in_flight)) in_flight("writes", thread, writer, at, line);
    const bool both_atomic = (flags & Mark::atomic) && writer.has(Mark::atomic);
    if (!both_atomic && accesses_.unordered(thread, writer)) race("written", "written", thread, writer, at, line);
    const Mark reader = accesses_.unordered_reader(thread, shadow);
    if (!reader) return;
    if (reader.has(Mark::product)) race_with_product(thread, reader, at, line);
    if (reader.step() == Mark::never)
      faults_.report(Fault::race, line, reader.line(),
                     "byte %zu of shared memory is written by warp %d lane %d while an asynchronous addition or copy of "
                     "warp %d lane %d may still read it",
                     at, thread.warp, thread.lane, reader.warp(), reader.lane());
    if (reader.has_landed())
      faults_.report(Fault::race, line, reader.line(),
                     "byte %zu of shared memory is written by warp %d lane %d, which does not know that what was sent from "
                     "there has come",
                     at, thread.warp, thread.lane);
    race("written", "read", thread, reader, at, line);
  }

  void check_bulk_read(Thread thread, Mark writer, size_t at, int line) {
    check_read(thread, writer, at, line);
    if (!writer.has_landed()) check_published(thread, writer, at, line, "read by an asynchronous addition");
  }
  void check_published(Thread thread, Mark writer, size_t at, int line, const char* what) {
    const Thread other = {writer.warp(), writer.lane()};
    if (accesses_.unseen(thread, other, publications_.after(other, writer.step(), writer.published())))
      faults_.report(Fault::not_published, line, writer.line(),
                     "byte %zu of shared memory is %s of warp %d lane %d, but warp %d lane %d, which wrote it, did not "
                     "come to 'publish_shared' between the write and the barrier after it",
                     at, what, thread.warp, thread.lane, other.warp, other.lane);
  }

  void check_product(const Issue& issue, Mark writer, size_t at) {
    const int first = issue.first_warp, line = issue.line;
    if (!writer)
      faults_.report(Fault::uninitialized, line, 0, "reads byte %zu of shared memory, which nothing has written", at);
    const Thread thread = {writer.warp(), writer.lane()};
    if (writer.has(Mark::in_flight)) in_flight("reads", {first, 0}, writer, at, line);
    const uint32_t seen = issue.seen[writer.clock()];
    if (writer.has_landed()) {
      if (writer.step() > seen)
        faults_.report(Fault::race, line, writer.line(),
                       "byte %zu of shared memory is read by a product of warps %d to %d, which have not all waited for "
                       "the tensor copy that wrote it before the start of the product",
                       at, first, first + 3);
      return;
    }
    if (writer.step() > seen)
      faults_.report(Fault::race, line, writer.line(),
                     "byte %zu of shared memory is read by a product of warps %d to %d and was written by warp %d "
                     "lane %d, with no barrier between that write and the start of the product",
                     at, first, first + 3, thread.warp, thread.lane);
    if (publications_.after(thread, writer.step(), writer.published()) > seen)
      faults_.report(Fault::not_published, line, writer.line(),
                     "byte %zu of shared memory is read by a product of warps %d to %d, but warp %d lane %d, which "
                     "wrote it, did not come to 'publish_shared' between the write and the barrier after it",
                     at, first, first + 3, thread.warp, thread.lane);
  }

  [[noreturn]] void in_flight(const char* verb, Thread thread, Mark writer, size_t at, int line) {
    const Thread copier = {writer.warp(), writer.lane()};
    if (writer.has(Mark::tensor))
      faults_.report(Fault::not_awaited, line, writer.line(),
                     "warp %d lane %d %s byte %zu of shared memory, the target of a tensor copy of warp %d lane %d that no "
                     "wait for its mbarrier has covered",
                     thread.warp, thread.lane, verb, at, copier.warp, copier.lane);
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

  [[noreturn]] void race(const char* now, const char* before, Thread thread, Mark mark, size_t at, int line) {
    if (mark.has_landed())
      faults_.report(Fault::race, line, mark.line(),
                     "byte %zu of shared memory is %s by warp %d lane %d, which has not waited for the tensor copy that "
                     "wrote it, nor come after a warp that has",
                     at, now, thread.warp, thread.lane);
    const bool same_warp = mark.warp() == thread.warp;
    char who[48];
    snprintf(who, sizeof who, mark.has(Mark::many) ? "several lanes of warp %d" : "warp %d lane %d", mark.warp(),
             mark.lane());
    faults_.report(Fault::race, line, mark.line(),
                   "byte %zu of shared memory is %s by warp %d lane %d and was %s by %s, with no %s between", at, now,
                   thread.warp, thread.lane, before, who, same_warp ? "warp barrier" : "barrier");
  }
  [[noreturn]] void race_with_product(Thread thread, Mark mark, size_t at, int line) {
    faults_.report(Fault::race, line, mark.line(),
                   "byte %zu of shared memory is written by warp %d lane %d and was read by a product of warps %d to "
                   "%d, with no barrier between their waits and the write",
                   at, thread.warp, thread.lane, mark.warp(), mark.warp() + warpgroup_warps - 1);
  }

  size_t bytes_;
  char* data_;
  Shadow* shadow_;
  const Clocks& clocks_;
  const Publications& publications_;
  Accesses accesses_;
  Faults& faults_;
};

}  // namespace emulator
}  // namespace fg
