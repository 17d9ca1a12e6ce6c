// The words of CUDA C++ that generated kernels use, for a host compiler.
//
// Contract: only what kernels use stands here. There is no __shared__ and no __constant__: shared memory comes from
// fg::shared_memory() alone, so that the emulator sees every byte of it.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>

#include "../interface.h"

#define __CUDA_ARCH__ 800  // what kernels may ask for: the sm_80 family
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define FG_DEVICE inline
#define FG_PRIMITIVE inline __attribute__((always_inline))  // calls of the machine return to the line that asked

namespace fg {
namespace emulator {
static thread_local Registers registers;
}
}  // namespace fg

#define threadIdx (fg::emulator::registers.thread)
#define blockIdx (fg::emulator::registers.block)
#define blockDim (fg::emulator::registers.block_size)
#define gridDim (fg::emulator::registers.grid_size)

// ---- vectors -------------------------------------------------------------------------------------------------------

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- bits ----------------------------------------------------------------------------------------------------------

inline int __float_as_int(float x) { int y; memcpy(&y, &x, sizeof y); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, sizeof y); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, sizeof y); return y; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((int64_t{a} * b) >> 32); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned found = 0;
  for (unsigned n = 0; n < 4; ++n) found |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
  return found;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// ---- mathematics beyond <math.h> -----------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline long min(long a, long b) { return b < a ? b : a; }
inline long max(long a, long b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return b < a ? b : a; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline unsigned long min(unsigned long a, unsigned long b) { return b < a ? b : a; }
inline unsigned long max(unsigned long a, unsigned long b) { return a < b ? b : a; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return b < a ? b : a; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- starting a kernel ---------------------------------------------------------------------------------------------

namespace fg {
namespace emulator {

// How a host thread runs one thread of `kernel`: what CUDA would pass by value lies at `arguments`, a second parameter
// behind the first, at a multiple of its alignment.
template <class Arguments> void enter(void (*kernel)(Arguments), const void* arguments) {
  kernel(*static_cast<const Arguments*>(arguments));
}
template <class Arguments> constexpr size_t argument_bytes(void (*)(Arguments)) { return sizeof(Arguments); }

template <class Arguments, class More> constexpr size_t place_of_more() {
  return (sizeof(Arguments) + alignof(More) - 1) / alignof(More) * alignof(More);
}
template <class Arguments, class More> void enter(void (*kernel)(Arguments, More), const void* arguments) {
  More more;  // a host knows no such alignment
  memcpy(static_cast<void*>(&more), static_cast<const char*>(arguments) + place_of_more<Arguments, More>(), sizeof more);
  kernel(*static_cast<const Arguments*>(arguments), more);
}
template <class Arguments, class More> constexpr size_t argument_bytes(void (*)(Arguments, More)) {
  return place_of_more<Arguments, More>() + sizeof(More);
}

}  // namespace emulator
}  // namespace fg
