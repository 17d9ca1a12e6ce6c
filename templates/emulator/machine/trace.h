// Where a fiber is: the calls that led to a fault, for the lines of the functions above the one that failed.
//
// Contract: on the stack that is looked at; addresses are relative to the kernel's library, the innermost first, each
// inside its call. Where the host cannot tell, the trace is empty, and a fault still has its own line.
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

// The number of frames.
inline int trace(const void* in_kernel, uint64_t (&frames)[most_frames]) {
  int count = 0;
#ifdef FG_HAS_BACKTRACE
  Dl_info kernel, each;
  void* found[64];
  if (!dladdr(const_cast<void*>(in_kernel), &kernel)) return 0;
  const int depth = backtrace(found, 64);
  for (int k = 0; k < depth && count < most_frames; ++k)
    if (dladdr(found[k], &each) && each.dli_fbase == kernel.dli_fbase)
      frames[count++] = reinterpret_cast<uint64_t>(found[k]) - reinterpret_cast<uint64_t>(kernel.dli_fbase) - 1;
#else
  (void)in_kernel, (void)frames;
#endif
  return count;
}

}  // namespace emulator
}  // namespace fg
