"""Kernels that apply each operator of the table to arrays: the device functions of ``math.cuh`` and ``ranges.h``."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashgen.hosts.emulator.program import DeviceMemory, Program, compile_program
from flashgen.targets.gpu.primitives import primitives
from tests.ir.cases import CASES, Case

_RANGE = {"bool": "Bool", "int": "Int", "float": "Float"}
_VALUE = {"bool": "bool", "int": "int32_t", "float": "float"}
_SUPPORT = """
struct Arrays {
  const double* in;
  double* out;
  int64_t count;
};
FG_DEVICE double at(const Arrays& a, int64_t n) { return fg::global_load(a.in + n); }
FG_DEVICE void get(fg::ranges::Bool& r, const Arrays& a, int64_t n) { r = {at(a, 3 * n) != 0, at(a, 3 * n + 1) != 0}; }
FG_DEVICE void get(fg::ranges::Int& r, const Arrays& a, int64_t n) {
  r = {int64_t(at(a, 3 * n)), int64_t(at(a, 3 * n + 1))};
}
FG_DEVICE void get(fg::ranges::Float& r, const Arrays& a, int64_t n) {
  r = {at(a, 3 * n), at(a, 3 * n + 1), at(a, 3 * n + 2) != 0};
}
FG_DEVICE void put(const Arrays& a, int64_t n, double x, double y, double z) {
  fg::global_store(a.out + 3 * n, x), fg::global_store(a.out + 3 * n + 1, y), fg::global_store(a.out + 3 * n + 2, z);
}
FG_DEVICE void put(fg::ranges::Bool r, const Arrays& a, int64_t n) { put(a, n, r.may_be_false, r.may_be_true, 0); }
FG_DEVICE void put(fg::ranges::Int r, const Arrays& a, int64_t n) { put(a, n, double(r.lo), double(r.hi), 0); }
FG_DEVICE void put(fg::ranges::Float r, const Arrays& a, int64_t n) { put(a, n, r.lo, r.hi, r.nan); }
"""


def _code(case: Case) -> str:
    name, count, row = name_of(case), len(case.types), case.row
    values = [f"{_VALUE[t.value]}(at(a, {count} * n + {k}))" for k, t in enumerate(case.types)]
    if not row.is_infix:
        value = f"fg::{row.c}({', '.join(values)})"
    else:
        value = f"{row.c}{values[0]}" if count == 1 else f"{values[0]} {row.c} {values[1]}"
    ranges = [f"fg::ranges::{_RANGE[t.value]} r{k}; get(r{k}, a, {count} * n + {k});" for k, t in enumerate(case.types)]
    names = ", ".join(f"r{k}" for k in range(count))
    start = "const int64_t n = int64_t(fg::block_index()) * 128 + int(threadIdx.x); if (n >= a.count) return;"
    return f"""
extern "C" __global__ void value_{name}(const __grid_constant__ Arrays a) {{
  {start}
  fg::global_store(a.out + n, double({value}));
}}
extern "C" __global__ void range_{name}(const __grid_constant__ Arrays a) {{
  {start}
  {" ".join(ranges)}
  put(fg::ranges::{row.interval_c}({names}), a, n);
}}
"""


def name_of(case: Case) -> str:
    """The end of the names of its kernels."""
    return f"{case.row.name}_{case.types[-1]}"


@functools.cache
def source() -> str:
    """All of them in one file."""
    return "\n".join([primitives(), _SUPPORT, *map(_code, CASES)])


@functools.cache
def _program() -> Program:
    return compile_program(source(), name="operators")


def run(kernel: str, values: Any, outputs: int) -> Any:
    """``outputs`` numbers for each row of ``values``, by the emulator."""
    packed = np.ascontiguousarray(values, dtype=np.float64)
    count = packed.shape[0]
    memory = DeviceMemory()
    inputs, results = memory.put("in", packed.tobytes()), memory.allocate("out", 8 * count * outputs)
    arguments = struct.pack("@PPq", inputs, results, count)
    _program().launch(kernel, (-(-count // 128), 1, 1), (128, 1, 1), 0, arguments, memory.allocations)
    return np.frombuffer(memory.bytes_of("out")).reshape(count, outputs)


def columns(arguments: Sequence[Any]) -> Any:
    """Arrays of arguments, one row a point."""
    return np.stack([np.asarray(each, dtype=np.float64) for each in arguments], axis=-1)
