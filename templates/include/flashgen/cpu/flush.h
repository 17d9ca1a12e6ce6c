// Layer 1 of the CPU primitives: flushing of subnormal numbers, for one thread and the life of one object.
//
// Weights far from the maximum are subnormal (a steep ALiBi slope makes millions of them), and on x86 each one that
// enters a product costs a microcode assist: measured, a backward pass ran 6 times slower. They are zero to any
// tolerance, so a kernel treats them as zero.
#pragma once

namespace fg {

class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : old_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(old_ | 0x8040); }  // FTZ, DAZ
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(old_); }

 private:
  unsigned old_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_));
    asm volatile("msr fpcr, %0" : : "r"(old_ | (1ul << 24)));  // FZ
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(old_)); }

 private:
  unsigned long old_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

}  // namespace fg
