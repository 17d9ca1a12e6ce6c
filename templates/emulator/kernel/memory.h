// Plain accesses to global and shared memory, of 1 (global only), 2, 4, 8 or 16 bytes.
//
// Contract: the pointer is aligned to the size of its type. The machine checks and counts; what it does not refuse
// is then an access to host memory.
#pragma once
#include "language.h"

namespace fg {

namespace emulator {
template <class T> constexpr void assert_accessible() {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                "no instruction moves this many bytes");
}
template <class T> constexpr void assert_watched() {
  assert_accessible<T>();
  static_assert(sizeof(T) > 1, "shared memory is watched by two bytes");
}
template <class T> inline T read(const T* p) {
  T value;
  memcpy(static_cast<void*>(&value), p, sizeof(T));
  return value;
}
}  // namespace emulator

template <class T> FG_PRIMITIVE T global_load(const T* p, int line = __builtin_LINE()) {
  emulator::assert_accessible<T>();
  emulator::registers.machine->global_access(emulator::Access::load, p, sizeof(T), line);
  return emulator::read(p);
}
template <class T> FG_PRIMITIVE void global_store(T* p, T value, int line = __builtin_LINE()) {
  emulator::assert_accessible<T>();
  emulator::registers.machine->global_access(emulator::Access::store, p, sizeof(T), line);
  memcpy(static_cast<void*>(p), &value, sizeof(T));
}
FG_PRIMITIVE void global_prefetch(const void*) {}
FG_PRIMITIVE void global_stream(uint4* p, uint4 value, int line = __builtin_LINE()) { global_store(p, value, line); }
FG_PRIMITIVE void global_add(float* p, float value, int line = __builtin_LINE()) {
  emulator::registers.machine->global_add(p, &value, 1, line);
}
FG_PRIMITIVE void global_add(float* p, const float (&values)[4], int line = __builtin_LINE()) {
  emulator::registers.machine->global_add(p, values, 4, line);
}
FG_PRIMITIVE void global_add(uint64_t* p, uint64_t value, int line = __builtin_LINE()) {
  emulator::registers.machine->global_access(emulator::Access::add, p, sizeof *p, line);
  __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
FG_PRIMITIVE void global_max(uint32_t* p, uint32_t value, int line = __builtin_LINE()) {
  emulator::registers.machine->global_access(emulator::Access::add, p, sizeof *p, line);
  uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(p, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
FG_PRIMITIVE uint32_t global_next(uint32_t* p, int line = __builtin_LINE()) {
  emulator::registers.machine->global_access(emulator::Access::add, p, sizeof *p, line);
  return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED);
}

FG_PRIMITIVE bool global_arrive(uint32_t* p, uint32_t count, int line = __builtin_LINE()) {
  emulator::registers.machine->global_arrive(p, line);
  uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, old >= count - 1 ? 0 : old + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return old == count - 1;
}
template <class T> FG_PRIMITIVE T global_load_left(const T* p, int line = __builtin_LINE()) {
  emulator::assert_accessible<T>();
  emulator::registers.machine->global_access(emulator::Access::load_left, p, sizeof(T), line);
  return emulator::read(p);
}
FG_PRIMITIVE void global_hand(float4* p, float4 value, int line = __builtin_LINE()) {
  emulator::registers.machine->global_access(emulator::Access::hand, p, sizeof(float4), line);
  memcpy(static_cast<void*>(p), &value, sizeof(float4));
}
FG_PRIMITIVE float4 global_load_handed(const float4* p, int line = __builtin_LINE()) {
  emulator::registers.machine->global_access(emulator::Access::load_handed, p, sizeof(float4), line);
  return emulator::read(p);
}
FG_PRIMITIVE void global_leave(uint32_t* p, int line = __builtin_LINE()) { emulator::registers.machine->global_leave(p, line); }
FG_PRIMITIVE void global_await(const uint32_t* p, uint32_t count, int line = __builtin_LINE()) {
  emulator::registers.machine->global_await(p, count, line);
}

FG_PRIMITIVE char* shared_memory() { return emulator::registers.machine->shared_memory(); }
template <class T> FG_PRIMITIVE T shared_load(const T* p, int line = __builtin_LINE()) {
  emulator::assert_watched<T>();
  emulator::registers.machine->shared_access(emulator::Access::load, p, sizeof(T), line);
  return emulator::read(p);
}
template <class T> FG_PRIMITIVE void shared_store(T* p, T value, int line = __builtin_LINE()) {
  emulator::assert_watched<T>();
  emulator::registers.machine->shared_access(emulator::Access::store, p, sizeof(T), line);
  memcpy(static_cast<void*>(p), &value, sizeof(T));
}
FG_PRIMITIVE void shared_add(float* p, float value, int line = __builtin_LINE()) {
  emulator::registers.machine->shared_access(emulator::Access::add, p, sizeof(float), line);
  *p += value;  // threads of a block run on one host thread
}

}  // namespace fg
