// Layer 1 of the CUDA primitives: every instruction that touches memory, moves data between threads or multiplies
// matrices, one small function each. All other layers, and the kernels, are plain C++ over these.
//
// Contract: nothing above this file dereferences a pointer into global or shared memory, and nothing above it contains
// asm. So the emulator, which defines FLASHGEN_EMULATOR, supplies exactly these names (templates/emulator) and sees
// every byte that moves. Each call carries its line, for the emulator's reports; on a GPU there is no such argument.
// sm_75 has no cp.async, no bfloat16 and no tf32: there copies are plain and those products go through shuffles.
#pragma once

#ifdef FLASHGEN_EMULATOR
#include "flashgen_emulator.h"
#else

#ifdef __CUDACC_RTC__  // NVRTC has no headers, and needs none here
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define INT64_MIN (-9223372036854775807ll - 1)
#define INT64_MAX 9223372036854775807ll
#else
#include <stdint.h>
#endif
#ifndef INFINITY
#define INFINITY __builtin_bit_cast(float, 0x7f800000u)
#endif

#define FG_DEVICE __device__ __forceinline__

namespace fg {

struct half_t {  // float16 and bfloat16 as they are stored; layer 2 converts
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

// ---- global memory -------------------------------------------------------------------------------------------------

// Loads through the read-only path, by size. No asm: compilers move that out of loops, away from the condition under which an
// address is one.
namespace bits {
FG_DEVICE void load(uint8_t& r, const void* p) { r = __ldg(static_cast<const unsigned char*>(p)); }
FG_DEVICE void load(uint16_t& r, const void* p) { r = __ldg(static_cast<const unsigned short*>(p)); }
FG_DEVICE void load(uint32_t& r, const void* p) { r = __ldg(static_cast<const unsigned int*>(p)); }
FG_DEVICE void load(uint64_t& r, const void* p) { r = __ldg(static_cast<const unsigned long long*>(p)); }
FG_DEVICE void load(uint4& r, const void* p) { r = __ldg(static_cast<const uint4*>(p)); }
template <int bytes> struct Word;
template <> struct Word<1> { using type = uint8_t; };
template <> struct Word<2> { using type = uint16_t; };
template <> struct Word<4> { using type = uint32_t; };
template <> struct Word<8> { using type = uint64_t; };
template <> struct Word<16> { using type = uint4; };
}  // namespace bits

// 1, 2, 4, 8 or 16 bytes, p aligned to as many. No thread of the launch writes there.
template <class T> FG_DEVICE T global_load(const T* p) {
  typename bits::Word<sizeof(T)>::type word;
  static_assert(sizeof(word) == sizeof(T), "no instruction moves this many bytes");
  bits::load(word, p);
  T value;
  memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T> FG_DEVICE void global_store(T* p, T value) { *p = value; }
// The last cache holds the line of p before it is read.
FG_DEVICE void global_prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// A store of what nobody reads soon: the last cache keeps other things instead.
FG_DEVICE void global_stream(uint4* p, uint4 value) { __stcs(p, value); }
// Atomic, all four. The last one adds 1 and gives what was there before.
FG_DEVICE void global_add(float* p, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(value) : "memory");
}
FG_DEVICE void global_add(uint64_t* p, uint64_t value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
FG_DEVICE void global_max(uint32_t* p, uint32_t value) {
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
FG_DEVICE uint32_t global_next(uint32_t* p) { return atomicAdd(p, 1u); }
// One more of `count` blocks is here, by one of its threads after a barrier: whether it is the last. It sees what all of them stored
// before, its other threads do after the next barrier. The counter is 0 again then.
FG_DEVICE bool global_arrive(uint32_t* p, uint32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(count - 1) : "memory");
  return before == count - 1;
}
// What blocks of this launch stored before they arrived, by those of the last one: from the last cache.
namespace bits {
FG_DEVICE void load_left(float2& r, const float2* p) { r = __ldcg(p); }
FG_DEVICE void load_left(float4& r, const float4* p) { r = __ldcg(p); }
}  // namespace bits
template <class T> FG_DEVICE T global_load_left(const T* p) {
  T value;
  bits::load_left(value, p);
  return value;
}
// What threads hand on to another block's while both run: they store, and one of theirs leaves after a barrier of the warp; another thread
// awaits so many that have left, and what it lets others of its block know they may load: from the last cache.
FG_DEVICE void global_hand(float4* p, float4 value) { __stcg(p, value); }
FG_DEVICE float4 global_load_handed(const float4* p) { return __ldcg(p); }
FG_DEVICE void global_leave(uint32_t* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
FG_DEVICE void global_await(const uint32_t* p, uint32_t count) {
  uint32_t found = 0;
  while (true) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(p) : "memory");
    if (found >= count) return;
    __nanosleep(64);
  }
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// The block's dynamic shared memory, aligned as the permutation of matrices needs it.
FG_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
template <class T> FG_DEVICE T shared_load(const T* p) { return *p; }
template <class T> FG_DEVICE void shared_store(T* p, T value) { *p = value; }
// Atomic.
FG_DEVICE void shared_add(float* p, float value) { atomicAdd(p, value); }

FG_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- asynchronous copies, global to shared -------------------------------------------------------------------------

// 16 bytes; zeros where not valid (global is not read then).
FG_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0) : "memory");
#else
  uint4 chunk = make_uint4(0, 0, 0, 0);
  if (valid) bits::load(chunk, global);
  *static_cast<uint4*>(shared) = chunk;
#endif
}
FG_DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the newest `pending` groups of this thread have landed.
template <int pending> FG_DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- between threads -----------------------------------------------------------------------------------------------

FG_DEVICE void block_barrier() { __syncthreads(); }
FG_DEVICE void warp_barrier() { __syncwarp(); }
// A barrier of `threads` threads, whole warps: some wait, all at the same place of the program, others only say that
// they have been there. Numbers 1 … 15.
FG_DEVICE void barrier_wait(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
FG_DEVICE void barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// A barrier at which all threads wait, and to which they come from different places of the program.
FG_DEVICE void barrier_meet(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
template <class T>
FG_DEVICE T shuffle_xor(T value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
template <class T> FG_DEVICE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// Bit l: the condition in lane l.
FG_DEVICE uint32_t ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }

// Never kept in a register: what is needed before and after a long loop is computed from it twice.
FG_DEVICE int block_index() {
  int r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return r;
}
FG_DEVICE int grid_size() { return int(gridDim.x); }
FG_DEVICE int lane_index() { return int(threadIdx.x % 32); }
// All 64 bits of a product, by one instruction: of 64-bit numbers the compiler adds up three.
FG_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
  uint64_t r;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
  return r;
}
// x, but the compiler does not know it: what follows from it is computed again each time, instead of kept in registers.
FG_DEVICE int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The warp's number, of which the compiler knows that all lanes have the same.
FG_DEVICE int warp_index() { return shuffle(int(threadIdx.x) / 32, 0); }

// ---- matrices ------------------------------------------------------------------------------------------------------

// ldmatrix: lane l supplies the address of row l % 8 of matrix l / 8 (16 bytes each).
FG_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
FG_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// An 8 x 8 matrix of 16 bits of which lane l has columns 2 (l % 4) and the next one of row l / 4, transposed.
FG_DEVICE uint32_t transposed(uint32_t word) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(word));
  return r;
}

#if __CUDA_ARCH__ < 800
// d + a product of 16 x (4 slots) and (4 slots) x 8 operands, whose slots `multiply(a, b)` turns into a number, by
// shuffles. It is called: of hundreds of copies of it the assembler makes no kernel in five minutes.
template <class Multiply>
__device__ __noinline__ float4 product_by_shuffles(float4 d, uint4 a, uint2 b, Multiply multiply) {
  const int row = threadIdx.x & 28, column = (threadIdx.x & 3) * 8;  // first lanes of the row's and the column's quads
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
      const uint32_t of_a[2] = {half ? a.z : a.x, half ? a.w : a.y}, of_b = half ? b.y : b.x;
      const uint32_t upper = shuffle(of_a[0], row + slot), lower = shuffle(of_a[1], row + slot);
      const uint32_t left = shuffle(of_b, column + slot), right = shuffle(of_b, column + 4 + slot);
      d.x += multiply(upper, left), d.y += multiply(upper, right);
      d.z += multiply(lower, left), d.w += multiply(lower, right);
    }
  return d;
}
template <class Multiply>
FG_DEVICE void mma_by_shuffles(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Multiply multiply) {
  const float4 sums = product_by_shuffles(
      make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b[0], b[1]), multiply);
  d[0] = sums.x, d[1] = sums.y, d[2] = sums.z, d[3] = sums.w;
}
#endif

// mma.sync.m16n8k16, float32 accumulators: d += a b, for f16 and bf16 operands; m16n8k8 for tf32.
FG_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  for (int half = 0; half < 2; ++half)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}
FG_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  mma_by_shuffles(d, a, b, [](uint32_t x, uint32_t y) {
    const float low = __uint_as_float(x << 16) * __uint_as_float(y << 16);
    return low + __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
  });
#endif
}
FG_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  mma_by_shuffles(d, a, b, [](uint32_t x, uint32_t y) { return __uint_as_float(x) * __uint_as_float(y); });
#endif
}

// ---- conversions ---------------------------------------------------------------------------------------------------

// Two floats, rounded to nearest even, in the low and the high half of a register.
FG_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t r;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
      : "=r"(r)
      : "f"(low), "f"(high));
#endif
  return r;
}
FG_DEVICE uint32_t pack_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  const auto round = [](float x) {
    const uint32_t word = __float_as_uint(x);
    return x != x ? 0x7fffu : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  };
  return round(low) | (round(high) << 16);
#endif
}
FG_DEVICE float unpack_f16(uint16_t half) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(half));
  return r;
}

// ---- the special function unit -------------------------------------------------------------------------------------

// 2^x and 1 / x with an error of two units in the last place; subnormal numbers are zero.
FG_DEVICE float exp2_approximate(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
FG_DEVICE float reciprocal_approximate(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace fg

#endif  // FLASHGEN_EMULATOR
