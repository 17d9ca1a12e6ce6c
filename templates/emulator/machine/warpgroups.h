// Products of the warpgroups of a block: issued, committed in groups, carried out by waits and by nothing else.
//
// Contract: a product reads shared memory and writes its accumulators at the first wait that covers it, in the order of
// issue. Operands in registers, and what is added to, are read when it is issued; from then on the accumulators hold
// `poison`, and a thread that writes to either is found out at the wait. An arrival makes all registers ready for
// products and a wait takes that back; that a register is written after the arrival and before the product is not seen.
// What a product reads was published and ordered by a barrier before it was issued (shared_memory.h).
//
// Sums are made as tensor_core.h says.
#pragma once
#include <vector>

#include "operand.h"
#include "shared_memory.h"
#include "tensor_core.h"

namespace fg {
namespace emulator {

class Warpgroups {
 public:
  static constexpr int warps = warpgroup_warps, lanes = warps * warp_lanes;
  static constexpr uint32_t poison = 0x7fa0dead;  // a signalling NaN: arithmetic makes another number of it

  Warpgroups(SharedMemory& shared, const Clocks& clocks, Faults& faults, int threads)
      : shared_(shared),
        clocks_(clocks),
        faults_(faults),
        groups_(static_cast<size_t>((threads + lanes - 1) / lanes)) {}

  // Nothing is under way: require_idle.
  void reset() {
    for (Group& group : groups_) {
      group.arrived = group.waited = false;
      group.committed = 0;
    }
  }

  void arrive(int group) { of(group).arrived = true; }
  void commit(int group) { ++of(group).committed; }

  // To be filled by the first lane of a warpgroup that comes to a product.
  Stack& next_stack(int warp) { return of(warp / warps).next; }

  // `calls`: of all lanes.
  void multiply(int group, const Call* const (&calls)[lanes]) {
    Group& mine = of(group);
    const int line = calls[0]->line;
    const Product& product = operands(*calls[0]);
    for (int lane = 1; lane < lanes; ++lane) compare(group, lane, product, operands(*calls[lane]), line);
    if (!product.a_registers) require_encodable(product.a, line);
    require_encodable(product.b, line);
    if (!mine.arrived)
      faults_.report(Fault::not_arrived, line, 0,
                     "warps %d to %d multiply, but have not come to 'warpgroup_arrive' since %s", group * warps,
                     group * warps + warps - 1, mine.waited ? "their last wait" : "they started");
    mine.pending.emplace_back();
    Pending& pending = mine.pending.back();
    pending.product = product;
    pending.asked = mine.next;
    pending.group = mine.committed;
    pending.accumulator = accumulator(mine, calls, product);
    pending.issue.line = line;
    pending.issue.first_warp = group * warps;
    clocks_.seen_by_all(group * warps, warps, pending.issue.seen);
    if (!product.a_registers) return;
    for (int lane = 0; lane < lanes; ++lane) {
      pending.a_at[lane] = operands(*calls[lane]).a_registers;
      memcpy(pending.a[lane], pending.a_at[lane], sizeof pending.a[lane]);
    }
  }

  // `line`: of the wait.
  void wait(int group, int newest, int line) {
    Group& mine = of(group);
    mine.arrived = false;
    mine.waited = true;
    const int landing = mine.committed - newest;  // groups before this one
    size_t done = 0;
    for (; done < mine.pending.size() && mine.pending[done].group < landing; ++done)
      carry_out(mine, mine.pending[done], line);
    mine.pending.erase(mine.pending.begin(), mine.pending.begin() + static_cast<ptrdiff_t>(done));
  }

  // A warp has ended: nothing of its warpgroup may be under way.
  void require_idle(int warp) {
    const Group& mine = of(warp / warps);
    if (mine.pending.empty()) return;
    const Pending& first = mine.pending.front();
    faults_.asked = &first.asked;
    if (first.group == mine.committed)
      faults_.report(Fault::not_committed, first.issue.line, 0, "warp %d ends, but has not committed this product",
                     warp);
    faults_.report(Fault::not_awaited, first.issue.line, 0, "warp %d ends, but no wait has covered this product", warp);
  }

 private:
  struct Accumulator {
    int products = 0;  // under way
    int n_tiles = 0, line = 0;
    Stack asked;              // with `line`: the first product
    float* d[lanes];          // registers
    std::vector<float> sums;  // rows by columns

    float& sum(int row, int column) { return sums[static_cast<size_t>(row * warpgroup::tile * n_tiles + column)]; }
  };
  struct Pending {
    Product product;
    Stack asked;
    int group;
    size_t accumulator;
    SharedMemory::Issue issue;
    const uint32_t* a_at[lanes];  // where a lies in registers: there, and what it was
    uint32_t a[lanes][4];
  };
  struct Group {
    bool arrived = false, waited = false;
    int committed = 0;
    Stack next;  // of the product that is being issued
    std::vector<Pending> pending;
    std::vector<Accumulator> accumulators;
  };
  Group& of(int group) { return groups_[static_cast<size_t>(group)]; }

  static const Product& operands(const Call& call) { return *static_cast<const Product*>(call.in[0]); }

  // ---- checks ------------------------------------------------------------------------------------------------------

  static bool same(const SharedOperand& a, const SharedOperand& b) {
    return a.start == b.start && a.leading_bytes == b.leading_bytes && a.stride_bytes == b.stride_bytes &&
           a.row_bytes == b.row_bytes && a.across == b.across;
  }
  void compare(int group, int lane, const Product& first, const Product& other, int line) {
    const bool alike = !first.a_registers == !other.a_registers && first.n_tiles == other.n_tiles &&
                       first.format == other.format && first.add == other.add;
    if (alike && same(first.b, other.b) && (first.a_registers || same(first.a, other.a))) return;
    faults_.report(Fault::divergence, line, 0,
                   "warp %d lane 0 and warp %d lane %d of a warpgroup multiply different matrices, or only one adds",
                   group * warps, group * warps + lane / warp_lanes, lane % warp_lanes);
  }

  // A descriptor has 14 bits for each number, in chunks.
  void require_encodable(const SharedOperand& operand, int line) {
    for (const int bytes : {operand.leading_bytes, operand.stride_bytes})
      if (bytes < 0 || bytes >= warpgroup::chunk_bytes << 14 || bytes % warpgroup::chunk_bytes != 0)
        faults_.report(Fault::misaligned, line, 0,
                       "a matrix in shared memory has parts %d bytes apart: no multiple of 16 below 262144", bytes);
  }

  // ---- accumulators ------------------------------------------------------------------------------------------------

  // Element e of tile t of a lane: row 16 warp + lane / 4 + 8 (e / 2), column 8 t + 2 (lane % 4) + e % 2.
  template <class Visit> static void for_each_element(Accumulator& accumulator, Visit visit) {
    for (int lane = 0; lane < lanes; ++lane) {
      const int row = lane / warp_lanes * 16 + lane % warp_lanes / 4, column = 2 * (lane % 4);
      float* d = accumulator.d[lane];
      for (int t = 0; t < accumulator.n_tiles; ++t, d += 4)
        for (int e = 0; e < 4; ++e) visit(lane, d[e], accumulator.sum(row + e / 2 * 8, 8 * t + column + e % 2));
    }
  }

  // The accumulators that the product adds to, from now on poisoned.
  size_t accumulator(Group& mine, const Call* const (&calls)[lanes], const Product& product) {
    for (size_t k = 0; k < mine.accumulators.size(); ++k) {
      Accumulator& present = mine.accumulators[k];
      if (present.products == 0 || present.d[0] != calls[0]->out) continue;
      if (present.n_tiles != product.n_tiles)
        faults_.report(Fault::not_awaited, calls[0]->line, present.line,
                       "an accumulator of %d columns is multiplied into while it is one of %d columns",
                       8 * product.n_tiles, 8 * present.n_tiles);
      ++present.products;
      return k;
    }
    size_t free = 0;
    while (free < mine.accumulators.size() && mine.accumulators[free].products > 0) ++free;
    if (free == mine.accumulators.size()) mine.accumulators.emplace_back();
    Accumulator& fresh = mine.accumulators[free];
    fresh.products = 1;
    fresh.n_tiles = product.n_tiles;
    fresh.line = calls[0]->line;
    fresh.asked = mine.next;
    fresh.sums.resize(static_cast<size_t>(warpgroup::rows * warpgroup::tile * product.n_tiles));
    for (int lane = 0; lane < lanes; ++lane) fresh.d[lane] = static_cast<float*>(calls[lane]->out);
    const bool add = product.add;
    for_each_element(fresh, [add](int, float& d, float& sum) {
      if (add) sum = d;
      memcpy(&d, &poison, sizeof poison);
    });
    return free;
  }

  // ---- the product -------------------------------------------------------------------------------------------------

  void carry_out(Group& mine, const Pending& pending, int line) {
    using namespace warpgroup;
    using namespace tensor_core;
    const Product& product = pending.product;
    faults_.asked = &pending.asked;
    const Mark mark = shared_.begin_product(pending.issue);
    float a[rows][most_depth], b[most_depth][most_columns];
    if (product.a_registers) unpack(pending, a, line);
    else read(pending, mark, product.a, rows, [&](int m, int k) -> float& { return a[m][k]; });
    read(pending, mark, product.b, tile * product.n_tiles, [&](int n, int k) -> float& { return b[k][n]; });
    Accumulator& into = mine.accumulators[pending.accumulator];
    if (product.format == Format::e4m3) add<warpgroup_terms_8bit, warpgroup_extra_bits_8bit>(into, a, b, product.add);
    else add<warpgroup_terms, warpgroup_extra_bits>(into, a, b, product.add);
    if (--into.products == 0) hand_over(into, pending.issue.first_warp, line);
    faults_.asked = nullptr;
  }

  template <class Element>
  void read(const Pending& pending, Mark mark, const SharedOperand& operand, int extent, Element element) {
    using namespace warpgroup;
    const Format format = pending.product.format;
    const int line = pending.issue.line;
    for_each_chunk(operand, format, extent, [&](int mn, int k, const char* place) {
      const size_t offset = shared_.place("reads", place, chunk_bytes, line);
      shared_.read_by_product(pending.issue, mark, offset, chunk_bytes);
      float x[most_of_chunk];
      const int count = convert(x, place, format);
      for (int e = 0; e < count; ++e) (operand.across ? element(mn + e, k) : element(mn, k + e)) = x[e];
    });
  }

  // As the a of m16n8k16, each warp's 16 rows (matrix.h); of 8 bits as that of m16n8k32, where a register has four columns
  // in the place of two. `line`: of the wait.
  void unpack(const Pending& pending, float (&a)[warpgroup::rows][warpgroup::most_depth], int line) {
    const Format format = pending.product.format;
    const int in_register = 4 / warpgroup::bytes_of(format), width = 32 / in_register;
    for (int lane = 0; lane < lanes; ++lane) {
      if (memcmp(pending.a[lane], pending.a_at[lane], sizeof pending.a[lane]) != 0)
        faults_.report(Fault::not_awaited, pending.issue.line, line,
                       "warp %d lane %d has written to an operand of this product in registers, or left its scope, "
                       "before a wait covered the product",
                       pending.issue.first_warp + lane / warp_lanes, lane % warp_lanes);
      const int row = lane / warp_lanes * 16 + lane % warp_lanes / 4, column = in_register * (lane % 4);
      for (int r = 0; r < 4; ++r)
        for (int e = 0; e < in_register; ++e) {
          const uint32_t bits = pending.a[lane][r] >> width * e & (1ull << width) - 1;
          a[row + r % 2 * 8][column + r / 2 * 4 * in_register + e] = value(bits, format);
        }
    }
  }

  static float value(uint32_t bits, Format format) {
    if (format == Format::e4m3) return float_of_e4m3(bits);
    return format == Format::bfloat ? float_of_bfloat(bits) : float_of_half(bits);
  }

  // A product is one sum of so many terms.
  template <int terms, int extra_bits>
  static void add(Accumulator& into, const float (&a)[warpgroup::rows][warpgroup::most_depth],
                  const float (&b)[warpgroup::most_depth][warpgroup::most_columns], bool add) {
    using namespace tensor_core;
    static_assert(width == warpgroup::tile, "neighbouring columns");
    for (int m = 0; m < warpgroup::rows; ++m)
      for (int n = 0; n < width * into.n_tiles; n += width) {
        Floats& d = reinterpret_cast<Floats&>(into.sum(m, n));
        d = multiply_and_add<terms, extra_bits>(add ? d : Floats{}, a[m], &b[0][n],
                                                                   warpgroup::most_columns);
      }
  }

  // The last product of an accumulator is done. `line`: of the wait.
  void hand_over(Accumulator& from, int first_warp, int line) {
    faults_.asked = &from.asked;
    for_each_element(from, [&](int lane, float& d, float& sum) {
      uint32_t bits;
      memcpy(&bits, &d, sizeof bits);
      if (bits != poison)
        faults_.report(Fault::not_awaited, from.line, line,
                       "warp %d lane %d has written to an accumulator of this product, or left its scope, before a "
                       "wait covered the product",
                       first_warp + lane / warp_lanes, lane % warp_lanes);
      d = sum;
    });
  }

  SharedMemory& shared_;
  const Clocks& clocks_;
  Faults& faults_;
  std::vector<Group> groups_;
};

}  // namespace emulator
}  // namespace fg
