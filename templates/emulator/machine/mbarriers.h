// Barriers in shared memory (mbarrier), and the tensor copies that they count.
//
// A phase is complete when as many arrivals have come as its barrier was made for, and the copies under way bring as many
// bytes as were expected. One without copies completes with its last arrival. One with copies may complete from then on, and
// does so as late as it can: when the first wait for it returns. Then its boxes land, and the next phase begins.
//
// Contract: a barrier is made before it is used, published and ordered like any write, and is neither made again while it
// is one nor overwritten. Waits name the parity of the phase that is under way, or of the one before. Who waits is ordered
// after all that arrived in the phase, and sees what its copies brought. Copies read global memory when they are issued;
// what lies outside of the tensor becomes zero, and is not read. Nothing is under way when a barrier is invalidated, or
// when the block ends.
#pragma once
#include <vector>

#include "global_memory.h"
#include "operand.h"
#include "shared_memory.h"

namespace fg {
namespace emulator {

class Mbarriers {
 public:
  static constexpr unsigned bytes = 8;
  static constexpr int most_arrivals = (1 << 20) - 1, most_bytes = (1 << 20) - 1;  // of a phase
  static constexpr int most_blocks = 2, most = Clocks::most_signals / most_blocks;

  // Of the block of that number in its cluster.
  Mbarriers(SharedMemory& shared, GlobalMemory& global, Clocks& clocks, Faults& faults, int rank)
      : shared_(shared), global_(global), clocks_(clocks), faults_(faults), first_(rank * most) {}

  void reset() {
    for (Signal& signal : signals_) signal = {};
  }

  void init(Thread thread, const void* place, int arrivals, int line) {
    const size_t offset = shared_.place("makes an mbarrier of", place, bytes, line);
    if (arrivals < 1 || arrivals > most_arrivals)
      faults_.report(Fault::mbarrier, line, 0, "an mbarrier is made for %d arrivals: there are 1 to %d", arrivals,
                     most_arrivals);
    Signal* free = nullptr;
    for (Signal& signal : signals_) {
      if (signal.live && signal.offset == offset)
        faults_.report(Fault::mbarrier, line, signal.line, "the mbarrier at byte %zu is made again, and is still in use",
                       offset);
      if (!signal.live && !free) free = &signal;
    }
    if (!free)
      faults_.report(Fault::mbarrier, line, 0, "the emulator follows %d mbarriers, and this is one more",
                     most);
    shared_.write(thread, offset, bytes, line);
    const uint32_t step = free->step;  // clocks go on
    *free = {};
    free->live = true, free->offset = offset, free->line = line, free->step = step;
    free->arrivals = free->pending = arrivals;
    free->mark = shared_.writer(offset);
  }

  void invalidate(Thread thread, const void* place, int line) {
    Signal& signal = of(thread, place, line);
    if (!signal.copies.empty())
      faults_.report(Fault::mbarrier, line, signal.copies[0].line,
                     "the mbarrier at byte %zu is invalidated while a tensor copy is under way to it", signal.offset);
    shared_.write(thread, signal.offset, bytes, line);
    signal.live = false;
  }

  // One arrival of the thread, and bytes that copies have to bring.
  void expect(Thread thread, const void* place, int count, int line) {
    Signal& signal = of(thread, place, line);
    if (count < 0 || signal.expected + count > most_bytes)
      faults_.report(Fault::mbarrier, line, 0, "an mbarrier expects %d bytes: a phase counts up to %d",
                     signal.expected + count, most_bytes);
    clocks_.collect_lane(thread.warp, signal.coming);
    signal.expected += count;
    come(signal, 1, line);
  }
  // So many of the warp, after all that its lanes did.
  void arrive(int warp, const void* place, int arrivals, int line) {
    Signal& signal = of({warp, 0}, place, line);
    clocks_.collect(warp, signal.coming);
    clocks_.go_on(warp);
    come(signal, arrivals, line);
  }

  // The place in this block's shared memory that `theirs` is in another's.
  const void* place(const void* theirs, SharedMemory& other) { return shared_.data() + (static_cast<const char*>(theirs) - other.data()); }

  // `counts`: what it reads is counted.
  void copy(Thread thread, GlobalShadow::Writer writer, const PanelCopy& wanted, bool counts, int line) {
    Signal& signal = of(thread, wanted.signal, line);
    shared_.require_published(thread, signal.offset, line);
    const MappedTensor& from = wanted.from;
    const unsigned element_bytes = from.element_bytes, rows = from.box[1];
    const unsigned row_bytes = from.box[0] * element_bytes, all = row_bytes * rows;
    const uint64_t mask = row_bytes - warpgroup::chunk_bytes;  // of the bits that are permuted: operand.h
    const size_t start = shared_.place("copies to", wanted.to, warpgroup::chunk_bytes, line);
    if (start % (8 * row_bytes) != 0)
      faults_.report(Fault::misaligned, line, 0,
                     "a box is copied to byte %zu of shared memory: rows of %u bytes are permuted from multiples of %u on",
                     start, row_bytes, 8 * row_bytes);
    if (wanted.slab < 0 || static_cast<uint64_t>(wanted.slab) >= from.extents[2])
      faults_.report(Fault::outside, line, 0, "copies a box of slab %d, and the tensor has %llu", wanted.slab,
                     static_cast<unsigned long long>(from.extents[2]));
    uint64_t begin = from.address + static_cast<uint64_t>(wanted.slab) * from.strides[1];  // of the slab, modulo 2^64
    for (int n = 0; n < 2; ++n) {
      if (wanted.more[n] < 0 || static_cast<uint64_t>(wanted.more[n]) >= from.extents[3 + n])
        faults_.report(Fault::outside, line, 0, "copies a box at place %d of dimension %d, which has %llu", wanted.more[n],
                       4 + n, static_cast<unsigned long long>(from.extents[3 + n]));
      begin += static_cast<uint64_t>(wanted.more[n]) * from.strides[2 + n];
    }
    bring(signal, "a tensor copy", all, line);
    Copy copy = {line, {}, {}};
    here(copy.asked);
    for (unsigned row = 0; row < rows; ++row)
      for (unsigned at = 0; at < row_bytes; at += warpgroup::chunk_bytes) {
        const uint64_t plain = start + row * row_bytes + at;
        Chunk chunk = {plain ^ (plain >> 3 & mask), {}};
        fetch(chunk, from, wanted.column + static_cast<int>(at / element_bytes), wanted.row + static_cast<int>(row),
              begin, writer, counts, line);
        shared_.place("copies to", shared_.data() + chunk.offset, warpgroup::chunk_bytes, line);
        shared_.begin_copy(thread, chunk.offset, warpgroup::chunk_bytes, line);
        copy.chunks.push_back(chunk);
      }
    signal.copies.push_back(copy);
  }

  // 16 bytes of a thread of another block. What it did before it sent them, who waits for them has behind it.
  void send(Thread thread, const void* to, const void* from, const void* place, int line) {
    Signal& signal = of(thread, place, line);
    const size_t offset = shared_.place("sends to", to, warpgroup::chunk_bytes, line);
    bring(signal, "what a thread sends", warpgroup::chunk_bytes, line);
    clocks_.collect_lane(thread.warp, signal.coming);
    Copy copy = {line, {}, {{offset, {}}}};
    here(copy.asked);
    memcpy(copy.chunks[0].data, from, warpgroup::chunk_bytes);
    shared_.begin_copy(thread, offset, warpgroup::chunk_bytes, line);
    signal.copies.push_back(copy);
  }

  // Bytes that are copied to another block's shared memory; they are read until they are there.
  void send_bytes(Thread thread, const void* to, SharedMemory& other, const void* from, int count, const void* place, int line) {
    constexpr int chunk = warpgroup::chunk_bytes;
    Signal& signal = of(thread, place, line);
    if (count <= 0 || count % chunk != 0)
      faults_.report(Fault::misaligned, line, 0, "sends %d bytes: no multiple of %d", count, chunk);
    bring(signal, "what a thread sends", static_cast<unsigned>(count), line);
    clocks_.collect_lane(thread.warp, signal.coming);
    Copy copy = {line, {}, {}, &other, thread};
    here(copy.asked);
    for (int at = 0; at < count; at += chunk) {
      const size_t offset = shared_.place("sends to", static_cast<const char*>(to) + at, chunk, line);
      const size_t source = other.place("reads", static_cast<const char*>(from) + at, chunk, line);
      other.begin_bulk_read(thread, source, chunk, line);
      shared_.begin_copy(thread, offset, chunk, line);
      Chunk own = {offset, {}, source};
      memcpy(own.data, other.data() + source, chunk);
      copy.chunks.push_back(own);
    }
    signal.copies.push_back(copy);
  }

  // A warp comes to wait: what it waits for.
  struct Wait {
    int signal = 0, parity = 0;
  };
  Wait wait(int warp, const void* place, int parity, int line) {
    Signal& signal = of({warp, 0}, place, line);
    if (parity != 0 && parity != 1)
      faults_.report(Fault::mbarrier, line, 0, "waits for a phase of parity %d", parity);
    return {static_cast<int>(&signal - signals_), parity};
  }
  bool may_pass(Wait wait) const {
    const Signal& signal = signals_[wait.signal];
    return signal.is_past(wait.parity) || signal.is_complete();
  }
  void pass(int warp, Wait wait) {
    Signal& signal = signals_[wait.signal];
    if (!signal.is_past(wait.parity)) complete(signal);
    clocks_.join(warp, signal.past);
  }
  [[noreturn]] void refuse(int warp, Wait wait, int line) const {
    const Signal& signal = signals_[wait.signal];
    if (!signal.live)
      faults_.report(Fault::deadlock, line, 0, "warp %d waits for the mbarrier at byte %zu, which was invalidated", warp,
                     signal.offset);
    if (signal.pending > 0)
      faults_.report(Fault::deadlock, line, signal.last_line,
                     "warp %d waits for a phase of the mbarrier at byte %zu, to which %d of %d arrivals have come, and no "
                     "warp goes on",
                     warp, signal.offset, signal.arrivals - signal.pending, signal.arrivals);
    faults_.report(Fault::deadlock, line, signal.copies.empty() ? signal.last_line : signal.copies[0].line,
                   "warp %d waits for a phase of the mbarrier at byte %zu, which expects %d bytes: tensor copies bring %d",
                   warp, signal.offset, signal.expected, signal.copied);
  }

  // All warps have ended.
  void require_idle() const {
    for (const Signal& signal : signals_)
      if (!signal.copies.empty()) {
        faults_.asked = &signal.copies[0].asked;
        faults_.report(Fault::not_awaited, signal.copies[0].line, 0,
                       "the block ends, but no wait has covered this tensor copy");
      }
  }

 private:

  struct Chunk {
    size_t offset;
    char data[warpgroup::chunk_bytes];
    size_t source = 0;
  };
  struct Copy {
    int line;
    Stack asked;
    std::vector<Chunk> chunks;
    SharedMemory* from = nullptr;  // of the block that sends, whose thread has begun to read it
    Thread reader = {};
  };
  struct Signal {
    bool live = false;
    size_t offset = 0;
    int line = 0, last_line = 0;       // where it was made; of the last arrival
    int arrivals = 0, pending = 0;     // of a phase; of this one, still to come
    int expected = 0, copied = 0;      // bytes of this phase
    bool odd = false;                  // the parity of this phase
    uint32_t step = 0;                 // phases so far, in the clocks
    Clocks::Seen coming = {}, past = {};  // by who arrived in this phase; in those before
    Mark mark;                         // of the thread that made it
    std::vector<Copy> copies;          // under way

    bool is_past(int parity) const { return live && odd != (parity == 1); }
    bool is_complete() const { return live && pending == 0 && expected == copied; }
  };

  Signal& of(Thread thread, const void* place, int line) {
    const size_t offset = shared_.place("uses the mbarrier in", place, bytes, line);
    for (Signal& signal : signals_)
      if (signal.live && signal.offset == offset) {
        if (!(shared_.writer(offset) == signal.mark))
          faults_.report(Fault::mbarrier, line, shared_.writer(offset).line(), "the mbarrier at byte %zu was overwritten",
                         offset);
        shared_.read(thread, offset, bytes, line);
        return signal;
      }
    faults_.report(Fault::mbarrier, line, 0, "there is no mbarrier at byte %zu", offset);
  }

  void bring(Signal& signal, const char* what, unsigned count, int line) {
    signal.copied += static_cast<int>(count);
    if (signal.pending == 0 && signal.copied > signal.expected)
      faults_.report(Fault::mbarrier, line, signal.last_line,
                     "%s brings %u bytes to the mbarrier at byte %zu, whose phase has all its arrivals and expects %d more",
                     what, count, signal.offset, signal.expected - signal.copied + static_cast<int>(count));
  }

  void come(Signal& signal, int arrivals, int line) {
    if (signal.pending < arrivals)
      faults_.report(Fault::mbarrier, line, signal.last_line,
                     "more arrivals than the %d that the mbarrier at byte %zu was made for, in one phase", signal.arrivals,
                     signal.offset);
    signal.last_line = line;
    if ((signal.pending -= arrivals) == 0 && signal.copies.empty() && signal.expected == 0) complete(signal);
  }

  void complete(Signal& signal) {
    ++signal.step;
    const int number = first_ + static_cast<int>(&signal - signals_);
    for (const Copy& copy : signal.copies)
      for (const Chunk& chunk : copy.chunks) {
        shared_.end_copy(number, signal.step, chunk.offset, chunk.data, warpgroup::chunk_bytes, copy.line);
        if (copy.from) copy.from->end_sending(copy.reader, number, signal.step, chunk.source, warpgroup::chunk_bytes, copy.line);
      }
    signal.copies.clear();
    Clocks::merge(signal.coming, signal.past);
    signal.past[Clocks::of_signal(number)] = signal.step;
    memset(signal.coming, 0, sizeof signal.coming);
    signal.pending = signal.arrivals;
    signal.expected = signal.copied = 0;
    signal.odd = !signal.odd;
  }

  // 16 bytes, or as many of them as lie in the tensor.
  void fetch(Chunk& chunk, const MappedTensor& from, int column, int row, uint64_t begin, GlobalShadow::Writer writer,
             bool counts, int line) {
    if (row < 0 || column < 0 || static_cast<uint64_t>(row) >= from.extents[1]) return;
    const uint64_t first = static_cast<uint64_t>(column);
    if (first >= from.extents[0]) return;
    const unsigned element_bytes = from.element_bytes;
    const uint64_t left = from.extents[0] - first, whole = warpgroup::chunk_bytes / element_bytes;
    const unsigned count = static_cast<unsigned>(left < whole ? left : whole) * element_bytes;
    const unsigned step = left < whole ? element_bytes : count;
    const uint64_t address = begin + static_cast<uint64_t>(row) * from.strides[0] + first * element_bytes;
    const char* source = reinterpret_cast<const char*>(address);
    for (unsigned at = 0; counts && at < count; at += step) global_.access(Access::load, source + at, step, writer, line);
    memcpy(chunk.data, source, count);
  }

  SharedMemory& shared_;
  GlobalMemory& global_;
  Clocks& clocks_;
  Faults& faults_;
  int first_;  // of its signals, in the clocks
  Signal signals_[most];
};

}  // namespace emulator
}  // namespace fg
