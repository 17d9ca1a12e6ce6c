"""The C++ spelling of every operator, and its range rule, compiled once."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.ir.interval import BoolRange, FloatRange, IntRange, Range
from flashgen.toolchains.cpp import REQUIRED_FLAGS
from tests.ir.cases import BOOL, CASES, INT, Case

_SUPPORT = """
#include "flashgen/cpu/vector_math.h"
#include "flashgen/cpu/standard.h"
#include "flashgen/ranges.h"
using namespace fg::ranges;
template <class T> T range_from(const double* p);
template <> Bool range_from<Bool>(const double* p) { return {p[0] != 0, p[1] != 0}; }
template <> Int range_from<Int>(const double* p) { return {int64_t(p[0]), int64_t(p[1])}; }
template <> Float range_from<Float>(const double* p) { return {p[0], p[1], p[2] != 0}; }
void put(double* p, Bool r) { p[0] = r.may_be_false, p[1] = r.may_be_true, p[2] = 0; }
void put(double* p, Int r) { p[0] = double(r.lo), p[1] = double(r.hi), p[2] = 0; }
void put(double* p, Float r) { p[0] = r.lo, p[1] = r.hi, p[2] = r.nan; }
"""
_RANGE = {"bool": "Bool", "int": "Int", "float": "Float"}
_VALUE = {"bool": "bool", "int": "int32_t", "float": "float"}


def _code(case: Case) -> str:
    name, n = _name(case), len(case.types)
    ranges = ", ".join(f"range_from<{_RANGE[t.value]}>(in + 3 * ({n} * k + {a}))" for a, t in enumerate(case.types))
    values = [f"static_cast<{_VALUE[t.value]}>(in[{n} * k + {a}])" for a, t in enumerate(case.types)]
    row = case.row
    if not row.is_infix:
        value = f"fg::{row.c}({', '.join(values)})"
    else:
        value = f"{row.c}{values[0]}" if n == 1 else f"{values[0]} {row.c} {values[1]}"
    return f"""
extern "C" void range_{name}(const double* in, double* out, int count) {{
  for (int k = 0; k < count; ++k) put(out + 3 * k, fg::ranges::{row.interval_c}({ranges}));
}}
extern "C" void value_{name}(const double* in, double* out, int count) {{
  for (int k = 0; k < count; ++k) out[k] = double({value});
}}
"""


def _name(case: Case) -> str:
    return f"{case.row.name}_{case.types[-1]}"


@dataclass(frozen=True)
class Compiled:
    """The table in C++."""

    library: ctypes.CDLL

    def ranges(self, case: Case, boxes: Sequence[tuple[Range, ...]]) -> list[Range]:
        """The range rule over many boxes."""
        flat = [_flat(r) for box in boxes for r in box]
        out = self._call(f"range_{_name(case)}", np.array(flat, dtype=np.float64), (len(boxes), 3))
        return [_range(case, row) for row in out]

    def values(self, case: Case, arguments: Sequence[Any]) -> Any:
        """The operator itself, in float32, over arrays of arguments."""
        packed = np.stack([np.asarray(a, dtype=np.float64) for a in arguments], axis=-1)
        return self._call(f"value_{_name(case)}", packed, (len(packed),))

    def _call(self, name: str, packed: Any, shape: tuple[int, ...]) -> Any:
        packed, out = np.ascontiguousarray(packed), np.empty(shape)
        pointer = ctypes.POINTER(ctypes.c_double)
        getattr(self.library, name)(packed.ctypes.data_as(pointer), out.ctypes.data_as(pointer), shape[0])
        return out


def _flat(r: Range) -> tuple[float, float, float]:
    if isinstance(r, BoolRange):
        return float(r.may_be_false), float(r.may_be_true), 0.0
    return float(r.lo), float(r.hi), float(isinstance(r, FloatRange) and r.may_be_nan)


def _range(case: Case, row: Any) -> Range:
    if case.result is BOOL:
        return BoolRange(bool(row[0]), bool(row[1]))
    if case.result is INT:
        return IntRange(int(row[0]), int(row[1]))
    return FloatRange(float(row[0]), float(row[1]), bool(row[2]))


@pytest.fixture(scope="session")
def compiled(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The shared library, kept between runs under a name that its sources determine."""
    headers = repository / "templates" / "include"
    source = _SUPPORT + "".join(map(_code, CASES))
    quoted = headers.rglob("*.h")
    text = source + "".join(path.read_text() for path in sorted(quoted))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = repository / ".pytest_cache" / "operators"
    library = folder / f"{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file = tmp_path_factory.mktemp("operators") / "operators.cpp"
        file.write_text(source)
        built = file.with_suffix(".so")
        flags = [flag for flag in REQUIRED_FLAGS if flag != "-O3"]
        command = [
            os.environ.get("CXX", "g++"),
            *flags,
            "-O1",
            "-march=native",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-psabi",
        ]
        subprocess.run([*command, f"-I{headers}", str(file), "-o", str(built)], check=True)
        temporary = library.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(built.read_bytes())
        temporary.replace(library)
    return Compiled(ctypes.CDLL(str(library)))
