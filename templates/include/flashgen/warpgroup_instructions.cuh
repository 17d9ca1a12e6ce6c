// Layer 1 of the CUDA primitives, Hopper's part: matrix products of a warpgroup (four warps, the first a multiple of
// four), whose operands lie in shared memory, and which run while the warps go on.
//
// Contract: all 128 threads call together. A product reads its operands and writes d at any time between its start and
// the wait for its group; d belongs to it until then. Shared memory that ordinary instructions (or cp.async) wrote is
// there for a product after publish_shared() of the threads that wrote it and a barrier. A source prints the products that
// it starts behind its includes (templates/cuda/warpgroup_products.cuh.jinja), and defines FG_CLUSTERS before them where
// blocks have numbers in clusters.
#pragma once
#include "flashgen/instructions.cuh"

namespace fg {
#ifndef FLASHGEN_EMULATOR

// A matrix in shared memory: the matrix descriptor of the PTX ISA. The 16-byte chunks of its rows of `row_bytes` are
// permuted as in a SharedTile.
struct SharedMatrix {
  uint64_t bits;
};
template <int row_bytes> FG_DEVICE SharedMatrix shared_matrix(const void* start, int leading_bytes, int stride_bytes) {
  static_assert(row_bytes == 32 || row_bytes == 64 || row_bytes == 128, "the permutations that there are");
  constexpr uint64_t permutation = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
#ifdef FG_CLUSTERS
  const uint32_t place = shared_address(start) & 0x3ffff;  // above it stands the block's number in its cluster
#else
  const uint32_t place = shared_address(start);
#endif
  return {permutation << 62 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 | place >> 4};
}
FG_DEVICE SharedMatrix advance(SharedMatrix m, int bytes) { return {m.bits + uint64_t(bytes >> 4)}; }

// What is computed before stays before, what is read after is read after.
FG_DEVICE void touch(float& x) { asm volatile("" : "+f"(x)::"memory"); }
FG_DEVICE void touch(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

// Registers that were written before belong to the products that start after.
FG_DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FG_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the newest `pending` groups are done.
template <int pending>
FG_DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }
FG_DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// stmatrix: lane l supplies the address of row l % 8 of matrix l / 8 (16 bytes each).
FG_DEVICE void store_matrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// The registers of every thread of this warpgroup from here on. What some give others may take.
template <int count>
FG_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count>
FG_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }

// Starts the addition of neighbouring floats to as many in global memory, each atomic; `bytes` and both addresses are
// multiples of 16. The floats are there after publish_shared(), and stay until the thread that started it has waited.
FG_DEVICE void bulk_add_async(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes) : "memory");
}
// Adds to four neighbouring floats, the first at a multiple of 16 bytes; each addition is atomic.
FG_DEVICE void global_add(float* p, const float (&values)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], { %1, %2, %3, %4 };" ::"l"(p), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3]) : "memory");
}
FG_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
FG_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// wgmma.mma_async.m64nNk16 (k32 of 8 bits) for N = 8 n_tiles.
template <class T, int n_tiles> struct WarpgroupProduct;

// Starts d = or += a b: a is 64 x 16, in shared memory or each warp's 16 rows in its registers, b 16 x 8 n_tiles. An
// operand is `across` where its inner index runs from row to row of memory instead of along them.
template <class T, bool a_across, bool b_across, int n_tiles>
FG_DEVICE void warpgroup_multiply(float (&d)[n_tiles][4], SharedMatrix a, SharedMatrix b, bool add) {
  WarpgroupProduct<T, n_tiles>::template start<a_across, b_across>(d, a.bits, b.bits, add);
}
template <class T, bool b_across, int n_tiles>
FG_DEVICE void warpgroup_multiply(float (&d)[n_tiles][4], const uint32_t (&a)[4], SharedMatrix b, bool add) {
  WarpgroupProduct<T, n_tiles>::template start<b_across>(d, a, b.bits, add);
}

#else
FG_DEVICE void touch(float&) {}
FG_DEVICE void touch(uint32_t&) {}
template <int> FG_DEVICE void give_registers() {}
template <int> FG_DEVICE void take_registers() {}
#endif  // FLASHGEN_EMULATOR
}  // namespace fg
