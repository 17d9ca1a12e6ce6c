// Matrix fragments: ldmatrix, stmatrix and mma.sync.
//
// Contract: all 32 lanes of a warp call together. Layouts of the fragments: the PTX ISA; machine/matrix.h.
#pragma once
#include "language.h"

namespace fg {

namespace emulator {
template <int count> FG_PRIMITIVE void load_matrix(Together what, uint32_t (&r)[count], const void* row, int line) {
  registers.machine->together({what, line, r, {row, nullptr}, count, 0});
}
FG_PRIMITIVE void mma(Together what, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line) {
  registers.machine->together({what, line, d, {a, b}, 0, 0});
}
}  // namespace emulator

FG_PRIMITIVE void load_matrix_x4(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  emulator::load_matrix(emulator::Together::load_matrix, r, row, line);
}
FG_PRIMITIVE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  emulator::load_matrix(emulator::Together::load_matrix_transposed, r, row, line);
}
FG_PRIMITIVE void load_matrix_x2(uint32_t (&r)[2], const void* row, int line = __builtin_LINE()) {
  emulator::load_matrix(emulator::Together::load_matrix, r, row, line);
}
FG_PRIMITIVE void load_matrix_x2_transposed(uint32_t (&r)[2], const void* row, int line = __builtin_LINE()) {
  emulator::load_matrix(emulator::Together::load_matrix_transposed, r, row, line);
}
FG_PRIMITIVE void store_matrix_x4(void* row, const uint32_t (&r)[4], int line = __builtin_LINE()) {
  emulator::registers.machine->together({emulator::Together::store_matrix, line, row, {r, nullptr}, 4, 0});
}
FG_PRIMITIVE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line = __builtin_LINE()) {
  emulator::mma(emulator::Together::mma_f16, d, a, b, line);
}
FG_PRIMITIVE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line = __builtin_LINE()) {
  emulator::mma(emulator::Together::mma_bf16, d, a, b, line);
}
FG_PRIMITIVE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line = __builtin_LINE()) {
  emulator::mma(emulator::Together::mma_tf32, d, a, b, line);
}

}  // namespace fg
