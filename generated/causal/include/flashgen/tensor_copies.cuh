// Layer 1 of the CUDA primitives, Hopper's part: copies of boxes of a tensor by one thread, and the barriers in shared
// memory that count what they bring.
//
// Contract: a phase of an mbarrier is complete when as many have arrived as it was made for, and all bytes that were
// expected are there; then the next one begins, of the other parity. One thread makes it, publishes it
// (publish_shared), and a barrier orders that before all else. What a copy brings is there for who has waited, products
// included; what ordinary instructions wrote in its place before was published, too. All lanes of a warp call
// mbarrier_arrive, 32 arrivals, and mbarrier_wait.
#pragma once
#include "flashgen/shared_tile.cuh"
#include "flashgen/warpgroup_instructions.cuh"

namespace fg {
#ifndef FLASHGEN_EMULATOR

// A tensor of three dimensions (elements of a row, rows, slabs) and the box of it that one copy brings: 128 bytes as
// the driver encodes them. `batch_slabs` and `head_slabs` lie between one batch entry or head and the next.
struct alignas(64) TensorMap {
  uint64_t words[16];
  int32_t batch_slabs, head_slabs;
};

FG_DEVICE void mbarrier_init(uint64_t* signal, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(signal)), "r"(arrivals) : "memory");
}
// Before it is made again, when nobody uses it any more.
FG_DEVICE void mbarrier_invalidate(uint64_t* signal) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(signal)) : "memory");
}
// Arrives, by this thread alone, and expects as many bytes more in this phase.
FG_DEVICE void mbarrier_expect(uint64_t* signal, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(signal)), "r"(bytes) : "memory");
}
// An arrival of each lane of the warp, after all that it did.
FG_DEVICE void mbarrier_arrive(uint64_t* signal) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(signal)) : "memory");
}
// Until the phase of this parity, the present one or the one before, is complete.
FG_DEVICE void mbarrier_wait(uint64_t* signal, int parity) {
  asm volatile("{ .reg .pred there;"
               " again: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;"
               " @!there bra again; }" ::"r"(shared_address(signal)), "r"(parity) : "memory");
}

// Starts the copy of a box, its first element at (column, row, slab), to rows that are permuted as in a SharedTile;
// what lies outside of the tensor becomes zero, and counts among the bytes. `to` is a multiple of 8 rows of the box.
template <class T>
FG_DEVICE void copy_panel_async(T* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal) {
  static_assert(sizeof(T) == 2, "maps are of 2-byte elements");
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
               "l"(&map), "r"(column), "r"(row), "r"(slab), "r"(shared_address(signal))
               : "memory");
}
// The first copy by a map need not wait for it.
FG_DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

#endif  // FLASHGEN_EMULATOR

// The slab of a batch entry and head.
FG_DEVICE int slab_of(const TensorMap& map, int b, int h) { return b * map.batch_slabs + h * map.head_slabs; }

// Starts the copy of rows first … of a slab to a whole tile, Tile::bytes in all, by this thread. The map's box is one
// panel.
template <class Tile>
FG_DEVICE void copy_tile_async(Tile to, const TensorMap& map, int first, int slab, uint64_t* signal) {
  static_assert(
      Tile::rows <= 256 && Tile::rows % 8 == 0, "a panel is one box, which begins where the permutation does");
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel)
    copy_panel_async(to.base + panel * Tile::rows * Tile::width, map, panel * Tile::width, first, slab, signal);
}

// Of a ring of stages that one side fills and the other uses. What was numbered n is there: a signal for what copies
// bring, or threads store, and one more where they do both (tools that look for races do not follow threads through a
// signal that counts bytes). And everyone is done with it. Made anew before number 0, so that a phase follows from the
// number.
template <int stages, int fillings = 1> struct Signals {
  static constexpr int bytes = (fillings + 1) * stages * int(sizeof(uint64_t));
  uint64_t* base;

  FG_DEVICE uint64_t* full(int n, int filling = 0) const { return base + filling * stages + stage_of<stages>(n); }
  FG_DEVICE uint64_t* empty(int n) const { return base + fillings * stages + stage_of<stages>(n); }
  FG_DEVICE static constexpr int parity(int n) { return int(unsigned(n) / stages % 2); }

  // By one thread. So many threads arrive at each; `more` where there is a second one for what threads store.
  FG_DEVICE void make(bool again, int users, int fillers, int more = 0) const {
    static_assert(fillings <= 2, "copies, and what threads store");
#pragma unroll
    for (int n = 0; n < (fillings + 1) * stages; ++n) {
      if (again) mbarrier_invalidate(base + n);
      mbarrier_init(base + n, n < stages ? fillers : n < fillings * stages ? more : users);
    }
    publish_shared();
  }
  FG_DEVICE void await(int n, int filling = 0) const { mbarrier_wait(full(n, filling), parity(n)); }
  // For number n; there is room for as many as there are stages.
  FG_DEVICE void await_room(int n) const {
    if (n >= stages) mbarrier_wait(empty(n), parity(n - stages));
  }
  FG_DEVICE void release(int n) const { mbarrier_arrive(empty(n)); }
};

}  // namespace fg
