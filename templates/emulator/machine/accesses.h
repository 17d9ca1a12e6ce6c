// What is remembered of the accesses to shared memory, and which of them are ordered.
//
// Of every two bytes, the smallest element: the last writer, and the readers since then that no later reader is ordered
// after. Whoever is ordered after all of these is ordered after everyone.
//
// Contract: of more than `Shadow::most` such readers some are forgotten, those first whose warpgroup has another one:
// a race with them alone goes unseen, and none is ever reported that is not there. A product reads for four warps at
// once, and is ordered before what all four of them have behind them.
#pragma once
#include <vector>

#include "clocks.h"
#include "publications.h"

namespace fg {
namespace emulator {

constexpr int warpgroup_warps = 4;

// Step, line, publications, flags and thread in 64 bits; zero is "nobody". A product has its number for a step, and the
// first of its warps; what a tensor copy brought has the phase of its signal for a step, and the signal for a thread.
class Mark {
 public:
  static constexpr uint64_t atomic = 1u << 10, in_flight = 1u << 11, tensor = 1u << 31;  // of writers
  static constexpr uint64_t product = 1u << 10, many = 1u << 11;      // of readers: several lanes of a warp
  static constexpr uint32_t never = UINT32_MAX;                       // the step of a read that is under way

  Mark() = default;
  Mark(uint32_t step, int line, Thread thread, uint64_t flags = 0, int published = 0)
      : bits_(uint64_t{step} << 32 | static_cast<uint64_t>(line & 0x7fff) << 16 |
              static_cast<uint64_t>(published & Publications::most) << 12 | flags |
              static_cast<uint64_t>(thread.warp << 5 | thread.lane)) {}

  explicit operator bool() const { return bits_ != 0; }
  bool operator==(Mark other) const { return bits_ == other.bits_; }
  bool has(uint64_t flag) const { return bits_ & flag; }
  uint32_t step() const { return static_cast<uint32_t>(bits_ >> 32); }
  int line() const { return static_cast<int>(bits_ >> 16 & 0x7fff); }
  int published() const { return static_cast<int>(bits_ >> 12 & Publications::most); }  // of writers: publications.h
  int warp() const { return static_cast<int>(bits_ >> 5 & 31); }
  int lane() const { return static_cast<int>(bits_ & 31); }
  bool has_landed() const { return has(tensor) && !has(in_flight); }  // a writer: a tensor copy that was waited for
  int clock() const { return has_landed() ? Clocks::of_signal(warp() * warp_lanes + lane()) : warp(); }  // that `step` is of

 private:
  uint64_t bits_ = 0;
};

struct Shadow {
  static constexpr int most = 4;
  Mark writer, reader[most];  // the latest first

  bool operator==(const Shadow& s) const {
    bool same = writer == s.writer;
    for (int k = 0; k < most; ++k) same &= reader[k] == s.reader[k];
    return same;
  }
};

class Accesses {
 public:
  explicit Accesses(const Clocks& clocks) : clocks_(clocks) {}

  void reset() { products_.clear(); }

  // Whether they may happen in either order.
  bool unordered(Thread thread, Mark writer) const {
    if (writer.has_landed()) return !clocks_.seen(thread.warp, writer.clock(), writer.step());
    return writer && unseen(thread, writer.warp(), writer.step(), writer.lane() != thread.lane);
  }
  // A reader that the thread is not ordered after, or nobody.
  Mark unordered_reader(Thread thread, const Shadow& shadow) const {
    for (const Mark reader : shadow.reader) {
      if (!reader) break;
      if (reader.has(Mark::product) ? unseen_product(thread, reader) : unseen_read(thread, reader)) return reader;
    }
    return {};
  }

  void remember_read(Shadow& shadow, Thread thread, int line) const {
    Mark mark(clocks_.now(thread.warp), line, thread);
    for (const Mark reader : shadow.reader)
      if (is_read_of(thread.warp, reader) && unseen_read(thread, reader))
        mark = {mark.step(), reader.line(), thread, Mark::many};
    remember(shadow, mark, [&](Mark reader) {
      if (reader.has(Mark::product)) return !unseen_product(thread, reader);
      return is_read_of(thread.warp, reader) || clocks_.seen(thread.warp, reader.clock(), reader.step());
    });
  }
  // A read that is under way, and is no read before it has ended: whoever writes is not ordered after it.
  static void begin_read(Shadow& shadow, Thread thread, int line) {
    remember(shadow, {Mark::never, line, thread, Mark::many}, [](Mark) { return false; });
  }
  void end_read(Shadow& shadow, Thread thread, int line) const {
    const Mark begun(Mark::never, line, thread, Mark::many);
    remember(shadow, {clocks_.now(thread.warp), line, thread}, [&](Mark reader) { return reader == begun; });
  }

  // One that ended with a phase of that signal.
  static void end_sending(Shadow& shadow, Thread thread, int signal, uint32_t phase, int line) {
    const Mark begun(Mark::never, line, thread, Mark::many);
    remember(shadow, {phase, line, {signal / warp_lanes, signal % warp_lanes}, Mark::tensor},
             [&](Mark reader) { return reader == begun; });
  }

  // Whether the thread has not seen what happened at `step`.
  bool unseen(Thread thread, Thread other, uint32_t step) const {
    return step == Mark::never || unseen(thread, other.warp, step, other.lane != thread.lane);
  }

  // A product that is carried out now, to be remembered where it reads.
  Mark product(int first_warp, int line) {
    products_.emplace_back();
    for (int k = 0; k < warpgroup_warps; ++k) products_.back().step[k] = clocks_.now(first_warp + k);
    return {static_cast<uint32_t>(products_.size() - 1), line, {first_warp, 0}, Mark::product};
  }
  void remember_product(Shadow& shadow, Mark mark) const {
    const int first = mark.warp();
    remember(shadow, mark, [&](Mark reader) {
      const bool sent = reader.has_landed();
      if (!sent && reader.step() != Mark::never && reader.warp() / warpgroup_warps == first / warpgroup_warps) return true;
      for (int w = first; w < first + warpgroup_warps; ++w)
        if (reader.has(Mark::product) ? !unseen_product({w, 0}, reader)
                                      : clocks_.seen(w, reader.clock(), reader.step()))
          return true;
      return false;
    });
  }

 private:
  struct Product {
    uint32_t step[warpgroup_warps];
  };

  static bool is_read_of(int warp, Mark reader) {
    const bool ended = !reader.has(Mark::product) && !reader.has_landed() && reader.step() != Mark::never;
    return reader && ended && reader.warp() == warp;
  }
  bool unseen(Thread thread, int warp, uint32_t step, bool other_lane) const {
    if (warp != thread.warp) return !clocks_.seen(thread.warp, warp, step);
    return other_lane && step >= clocks_.together_since(warp);
  }
  bool unseen_read(Thread thread, Mark reader) const {
    if (reader.has_landed()) return !clocks_.seen(thread.warp, reader.clock(), reader.step());
    return unseen(thread, reader.warp(), reader.step(), reader.has(Mark::many) || reader.lane() != thread.lane);
  }
  bool unseen_product(Thread thread, Mark reader) const {
    for (int k = 0; k < warpgroup_warps; ++k)
      if (unseen(thread, reader.warp() + k, products_[reader.step()].step[k], true)) return true;
    return false;
  }

  // In front of the readers that are not `ordered` before it.
  template <class Ordered> static void remember(Shadow& shadow, Mark mark, Ordered ordered) {
    Mark kept[Shadow::most + 1] = {mark};
    int count = 1;
    for (const Mark reader : shadow.reader)
      if (reader && !ordered(reader)) kept[count++] = reader;
    if (count > Shadow::most) forget_one(kept);
    for (int k = 0; k < Shadow::most; ++k) shadow.reader[k] = kept[k];
  }
  static void forget_one(Mark (&kept)[Shadow::most + 1]) {
    const auto is_alone = [&](int k) {  // in its warpgroup, but for earlier readers
      for (int later = 0; later < k; ++later)
        if (kept[later].warp() / warpgroup_warps == kept[k].warp() / warpgroup_warps) return false;
      return true;
    };
    int victim = Shadow::most;
    while (victim > 0 && is_alone(victim)) --victim;
    for (int k = victim > 0 ? victim : Shadow::most; k < Shadow::most; ++k) kept[k] = kept[k + 1];
  }

  const Clocks& clocks_;
  std::vector<Product> products_;
};

}  // namespace emulator
}  // namespace fg
