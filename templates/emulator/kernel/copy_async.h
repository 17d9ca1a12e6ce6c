// Asynchronous copies from global to shared memory (cp.async).
//
// Contract: the bytes are read when the copy is issued and appear in shared memory when a wait of the same thread
// covers its group, not earlier; other threads see them after a barrier.
#pragma once
#include "language.h"

namespace fg {

FG_PRIMITIVE void copy_async_16(void* shared, const void* global, bool valid, int line = __builtin_LINE()) {
  emulator::registers.machine->copy_async(shared, global, 16, valid, line);
}
FG_PRIMITIVE void copy_async_commit(int line = __builtin_LINE()) {
  emulator::registers.machine->copy_async_commit(line);
}
template <int pending> FG_PRIMITIVE void copy_async_wait(int line = __builtin_LINE()) {
  static_assert(pending >= 0, "a number of groups");
  emulator::registers.machine->copy_async_wait(pending, line);
}

}  // namespace fg
