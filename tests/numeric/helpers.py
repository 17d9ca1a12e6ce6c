"""Operators of the gallery, loaded once a process, and comparisons that say what differs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

import flashgen
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.toolchains import cpp as compiler
from flashgen.verification import Case
from flashgen.verification.verify import relative_error

SPECS = Path(__file__).resolve().parents[2] / "specs"
GALLERY = tuple(sorted(file.stem for file in SPECS.glob("*.attn")))

# Constants that make room for small shapes.
SMALL_CONSTANTS: Mapping[str, Mapping[str, int]] = MappingProxyType({"evoformer": {"rows": 2}})


def operator(name: str, backend: str | None = None) -> AttentionOp:
    """The operator of a gallery spec."""
    return _loaded(name, backend, compiler.find_compiler)


@functools.cache
def _loaded(name: str, backend: str | None, _compiler: Callable[[], compiler.Compiler]) -> AttentionOp:
    """Of each compiler its own: modules have kernels as the product has them, or quick ones."""
    return flashgen.load(SPECS / f"{name}.attn", const=SMALL_CONSTANTS.get(name, {}), backend=backend)


def dtypes(spec: AttentionSpec) -> tuple[ElementType, ...]:
    """The element types that a spec is generated for on a CPU."""
    return spec.dtypes or (ElementType.F32, ElementType.BF16, ElementType.F16)


def failures(case: Case) -> str:
    """The rows beyond tolerance, to be shown when an assertion fails; empty if there is none."""
    lines = [
        f"{row.tensor}: error {row.error:.2e}, PyTorch {row.baseline:.2e}, tolerance {row.tolerance:.2e}"
        for row in case.rows
        if not row.ok
    ]
    return "\n".join([f"{case.dtype}, head_dim {case.head_dim}, shape {case.shape}", *lines]) if lines else ""


def assert_close(value: Tensor, truth: Tensor, tolerance: float = 2e-5, what: str = "") -> None:
    """Relative Frobenius distance within tolerance."""
    error = relative_error(value, truth)
    assert error <= tolerance, f"{what} is off by {error:.2e}, {tolerance:.0e} is allowed"


def normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)
