// Layer 1 of the CUDA primitives under the emulator: the names of instructions.cuh, one file an instruction family.
//
// Contract: compiled as C++17 by the host's compiler with FLASHGEN_EMULATOR defined, before any other primitive. Every
// name takes one argument more than on a GPU, the line it is called from, which no caller writes.
#pragma once
#include "kernel/language.h"
#include "kernel/types.h"
#include "kernel/memory.h"
#include "kernel/copy_async.h"
#include "kernel/matrix.h"
#include "kernel/warpgroup.h"
#include "kernel/bulk.h"
#include "kernel/tensor_copies.h"
#include "kernel/threads.h"
#include "kernel/numbers.h"
