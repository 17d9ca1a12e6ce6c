// Where a fiber is: the calls that led to a fault, for the lines of the functions above the one that failed.
//
// Contract: `here` is called on the stack that is looked at; `trace` gives addresses relative to the kernel's library,
// the innermost first, each inside its call. Where the host cannot tell, the trace is empty, and a fault still has its
// own line.
#pragma once
#include <dlfcn.h>
#include <stdint.h>

#include "../interface.h"
#if __has_include(<execinfo.h>)
#include <execinfo.h>
#define FG_HAS_BACKTRACE 1
#endif

namespace fg {
namespace emulator {

// The address of a call, given where it returns to, in the library that `in_kernel` lies in; 0 if it is elsewhere.
inline uint64_t call_at(const void* in_kernel, const void* returns_to) {
  Dl_info kernel, found;
  if (!dladdr(const_cast<void*>(in_kernel), &kernel) || !dladdr(const_cast<void*>(returns_to), &found)) return 0;
  if (kernel.dli_fbase != found.dli_fbase) return 0;
  return reinterpret_cast<uint64_t>(returns_to) - reinterpret_cast<uint64_t>(kernel.dli_fbase) - 1;
}

// Where calls return to: cheap to remember, dear to look up.
struct Stack {
  int depth = 0;
  void* returns_to[64];
};
inline void here(Stack& stack) {
#ifdef FG_HAS_BACKTRACE
  stack.depth = backtrace(stack.returns_to, 64);
#else
  stack.depth = 0;
#endif
}

// The number of frames.
inline int trace(const void* in_kernel, const Stack& stack, uint64_t (&frames)[most_frames]) {
  int count = 0;
  for (int k = 0; k < stack.depth && count < most_frames; ++k)
    if (const uint64_t address = call_at(in_kernel, stack.returns_to[k])) frames[count++] = address;
  return count;
}

}  // namespace emulator
}  // namespace fg
