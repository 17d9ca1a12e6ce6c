// Asynchronous additions from shared to global memory (cp.reduce.async.bulk of sm_90).
//
// Contract: both addresses and the number of bytes are multiples of 16. What is added was published by its writers
// (warpgroup.h) and a barrier orders them before the thread that calls; it stays as it is until a wait of that thread
// covers its group, and a thread does not end before.
#pragma once
#include "language.h"

namespace fg {

FG_PRIMITIVE void bulk_add_async(float* to, const float* from, int bytes, int line = __builtin_LINE()) {
  emulator::registers.machine->bulk_add(to, from, bytes, line);
}
FG_PRIMITIVE void bulk_commit(int = __builtin_LINE()) { emulator::registers.machine->bulk_commit(); }
FG_PRIMITIVE void bulk_wait_read(int = __builtin_LINE()) { emulator::registers.machine->bulk_wait(); }

}  // namespace fg
