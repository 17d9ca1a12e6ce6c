// Layer 1 of the CUDA primitives, Hopper's part: blocks of a cluster, which run together and see each other's shared memory.
//
// Contract: a block arrives at mbarriers of another, and copies into its shared memory, once cluster_barrier has ordered
// that after these were made, and before a cluster_barrier that all come to at the end.
#pragma once
#include "flashgen/team.cuh"
#include "flashgen/tensor_copies.cuh"

namespace fg {
#ifndef FLASHGEN_EMULATOR

// This block's number in its cluster.
FG_DEVICE int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
// All threads of all blocks. What was written before is there after, mbarriers included.
FG_DEVICE void cluster_barrier() {
  __syncwarp();
  asm volatile("fence.mbarrier_init.release.cluster;"
               " barrier.cluster.arrive.release.aligned;"
               " barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// One arrival of the warp, after all that its lanes have read, at the mbarrier in this place of the block of that number. What they
// wrote there is another block's to see after mbarrier_tell alone, which waits for it.
FG_DEVICE void mbarrier_arrive_at(uint64_t* signal, int rank) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("{ .reg .b32 there;"
                 " mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(signal)), "r"(rank)
                 : "memory");
}
FG_DEVICE void mbarrier_tell(uint64_t* signal, int rank) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("{ .reg .b32 there;"
                 " mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(signal)), "r"(rank)
                 : "memory");
}
// To the same place of the block of that number, by this thread.
FG_DEVICE void shared_store_at(int* p, int value, int rank) {
  asm volatile("{ .reg .b32 there;"
               " mapa.shared::cluster.u32 there, %0, %1;"
               " st.shared::cluster.s32 [there], %2; }" ::"r"(shared_address(p)), "r"(rank), "r"(value)
               : "memory");
}
// As mbarrier_wait, for what threads of other blocks wrote.
FG_DEVICE void mbarrier_wait_for_cluster(uint64_t* signal, int parity) {
  asm volatile("{ .reg .pred there;"
               " again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [%0], %1;"
               " @!there bra again; }" ::"r"(shared_address(signal)), "r"(parity) : "memory");
}
// As copy_panel_async, to the same place of all blocks whose bits are set, each of which counts it at the signal in this place.
template <class T>
FG_DEVICE void copy_panel_to_all(T* to, const TensorMap& map, int column, int row, int slab, uint64_t* signal, int blocks) {
  static_assert(sizeof(T) == 2, "maps are of 2-byte elements");
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
               "l"(&map), "r"(column), "r"(row), "r"(slab), "r"(shared_address(signal)), "h"(uint16_t(blocks))
               : "memory");
}

// Starts the stores of each lane's fours to these places of the block of that number, `apart` fours from one to the next, whose bytes the
// signal in this place there counts. Who waits for them has them, and what the warp read before may be overwritten then.
template <int apart, int count>
FG_DEVICE void send_async(float4* to, const float (&fours)[count][4], uint64_t* signal, int rank) {
  __syncwarp();
  uint32_t place, counter;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(signal)), "r"(rank));
#pragma unroll
  for (int n = 0; n < count; ++n)
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                 " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place + n * apart * int(sizeof(float4))),
                 "f"(fours[n][0]), "f"(fours[n][1]), "f"(fours[n][2]), "f"(fours[n][3]), "r"(counter)
                 : "memory");
}

// Starts the copy of so many bytes of this block's shared memory to a place of the block of that number, by this thread; the signal in
// this place there counts them. They were published, a barrier orders that before, and they stay until who waits there has said so.
template <class T> FG_DEVICE void send_bytes_async(T* to, const T* from, int bytes, uint64_t* signal, int rank) {
  asm volatile("{ .reg .b32 place, counter;"
               " mapa.shared::cluster.u32 place, %0, %4;"
               " mapa.shared::cluster.u32 counter, %3, %4;"
               " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
               " [place], [%1], %2, [counter]; }" ::"r"(shared_address(to)),
               "r"(shared_address(from)), "r"(bytes), "r"(shared_address(signal)), "r"(rank)
               : "memory");
}

#endif  // FLASHGEN_EMULATOR

template <int blocks> struct Cluster {
  FG_DEVICE static int rank() { return cluster_rank(); }
  FG_DEVICE static void barrier() { cluster_barrier(); }
};

// Starts the copy of rows first … of a slab, from `column` on, to a whole tile, Tile::bytes in all, by this thread. The map's box is one
// panel.
template <class Tile>
FG_DEVICE void copy_columns_async(Tile to, const TensorMap& map, int column, int first, int slab, uint64_t* signal) {
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel)
    copy_panel_async(to.base + panel * Tile::rows * Tile::width, map, column + panel * Tile::width, first, slab, signal);
}
// As copy_tile_async, to all blocks of a cluster, this one's part of the panels; the others bring theirs.
template <int blocks, class Tile>
FG_DEVICE void copy_part_to_all(Tile to, const TensorMap& map, int first, int slab, uint64_t* signal) {
  for (int panel = cluster_rank(); panel < Tile::panels; panel += blocks)
    copy_panel_to_all(to.base + panel * Tile::rows * Tile::width, map, panel * Tile::width, first, slab, signal, (1 << blocks) - 1);
}

}  // namespace fg
