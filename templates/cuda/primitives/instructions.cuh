// Layer 1 of the CUDA primitives: every instruction that touches memory, moves data between threads or multiplies
// matrices, one small function each. All other layers, and the kernels, are plain C++ over these.
//
// Contract: nothing above this file dereferences a pointer into global or shared memory, and nothing above it contains
// asm. So the emulator, which defines FLASHGEN_EMULATOR, supplies exactly these names (templates/emulator) and sees
// every byte that moves. Each call carries its line, for the emulator's reports; on a GPU the argument vanishes.
#pragma once

#ifdef FLASHGEN_EMULATOR
#include "flashgen_emulator.h"
#else

#include <stdint.h>

#define FG_DEVICE __device__ __forceinline__

namespace fg {

struct half_t;  // float16 and bfloat16 storage, 16 bits each; layer 2 converts
struct bfloat_t;

// ---- global memory -------------------------------------------------------------------------------------------------
template <class T> FG_DEVICE T global_load(const T* p);          // 1, 2, 4, 8 or 16 bytes, p aligned to sizeof(T)
template <class T> FG_DEVICE void global_store(T* p, T value);
FG_DEVICE void global_add(float* p, float value);               // atomic

// ---- shared memory -------------------------------------------------------------------------------------------------
FG_DEVICE char* shared_memory();                                // the block's dynamic shared memory, 128-byte aligned
template <class T> FG_DEVICE T shared_load(const T* p);
template <class T> FG_DEVICE void shared_store(T* p, T value);
FG_DEVICE void shared_add(float* p, float value);               // atomic

// ---- asynchronous copies, global to shared (cp.async) ----------------------------------------------------------------
FG_DEVICE void copy_async_16(void* shared, const void* global, bool valid);  // 16 bytes; zeros where not valid (global is not read)
FG_DEVICE void copy_async_commit();
template <int pending> FG_DEVICE void copy_async_wait();        // all but the newest `pending` groups of this thread have landed

// ---- matrices ------------------------------------------------------------------------------------------------------
// ldmatrix: lane l supplies the address of row l % 8 of matrix l / 8 (16 bytes each).
FG_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row);
FG_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row);
// mma.sync.m16n8k16, float32 accumulators: d += a b, for f16 and bf16 operands; m16n8k8 for tf32.
FG_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
FG_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
FG_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// ---- between threads -----------------------------------------------------------------------------------------------
FG_DEVICE void block_barrier();                                 // __syncthreads
FG_DEVICE void warp_barrier();                                  // __syncwarp
template <class T> FG_DEVICE T shuffle_xor(T value, int lane_mask);
template <class T> FG_DEVICE T shuffle(T value, int lane);

}  // namespace fg

#endif  // FLASHGEN_EMULATOR
