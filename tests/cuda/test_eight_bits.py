"""Hopper's kernels for q, k and v of 8 bits: what they are made of, and that the emulator finds what is wrong."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.backends import RowsOf, kernel_variant, launches_of
from flashgen.compiled import CompiledKernel, assembled, compiled
from flashgen.ir.types import ElementType
from flashgen.plan.plan import CallKind, Part
from flashgen.runtime.eight_bits import F8
from flashgen.runtime.emulated import EmulatedKernel
from flashgen.runtime.emulator import EmulatorError, FaultKind, compile_program
from flashgen.runtime.kernel import ArgumentLayout
from flashgen.runtime.nvrtc import NvrtcMissing, find_nvrtc
from flashgen.runtime.op import AttentionOp, OpParts
from flashgen.runtime.schedule import Compiled
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.model import columns_at_a_time
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import relative_error

TEXT = "attention planted_f8 { head_dim 64, 128, 256  mask j <= i + 350 }"
TARGET = GPUS["sm_90a"]

try:
    find_nvrtc()
    REASON = ""
except NvrtcMissing as error:
    REASON = str(error)


@functools.cache
def emitted(head_dim: int = 64) -> CompiledKernel[GpuPlan, GpuBinary]:
    spec = flashgen.loads(TEXT, backend="reference").spec
    return compiled(
        kernel_variant(spec, next(each for each in spec.head_dims if each.qk == head_dim), RowsOf.F8), TARGET
    )


def changed(name: str, *changes: tuple[str, str]) -> AttentionOp:
    """An op whose kernel for 8 bits is another one in a few places."""
    kernel = emitted()
    text = kernel.source.text
    for old, new in changes:
        text, count = re.subn(old, new, text)
        assert count == 1, (old, count)
    program = compile_program(text, name=kernel.source.name)
    own = Compiled(program, launches_of(kernel.variant, kernel.plan, kernel.source.symbol, ElementType.F8E4M3))
    variant = kernel.variant
    f8 = EmulatedKernel(ArgumentLayout(cuda_fields(variant)), variant.head_dim, lambda *_: own)
    dense = replace(f8, f8=lambda: f8)
    return AttentionOp(OpParts(replace(variant.spec, name=name), {"cpu": lambda *_: dense}, backend="emulator"))


def error_of(op: AttentionOp) -> float:
    """Of a call with several key tiles; V has a column that stands out, and keys that do."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (70, 400, 400))
    v[..., 5] += 4
    v[:, :, ::7] *= 3
    q, k, v = (x.clamp(-448, 448).to(F8) for x in (q, k, v))
    return relative_error(op(q, k, v, v_descale=0.5), op.reference(q, k, v, v_descale=0.5))


def test_nothing_is_planted() -> None:
    assert error_of(changed("planted_nothing_f8")) < 0.03


FAULTS = {
    "unpublished": (
        r"(transposed_tile\(n - 1\), v_tile\(n - 1\), Transposers::thread\(\)\);)\s+fg::publish_shared\(\);",
        r"\1",
    ),
    "unawaited": (r"(warpgroup_commit\(\);)\s+transposed_signals\(\)\.await\(parts_before \+ n\);", r"\1"),
    "early": (r"signals\(\)\.await\(parts_before \+ n\);(\s+if \(n > 0\) {\s+fg::transpose)", r"\1"),
    "too_few": (
        r"transposed_signals\(\)\.make\(false, threads, BESIDE\)",
        "transposed_signals().make(false, threads, 2 * BESIDE)",
    ),
    "columns": (r"row \+ 8, key", "row, key"),
}
KINDS = {
    "unpublished": (FaultKind.NOT_PUBLISHED,),
    "unawaited": (FaultKind.UNINITIALIZED, FaultKind.RACE),
    "early": (FaultKind.UNINITIALIZED, FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER),
    "too_few": (FaultKind.DEADLOCK,),
    "columns": (FaultKind.UNINITIALIZED,),
}


@pytest.mark.parametrize(
    "name", ["unpublished", *(pytest.param(each, marks=pytest.mark.slow) for each in FAULTS if each != "unpublished")]
)
def test_what_waits_for_nothing_or_is_not_there_is_found(name: str) -> None:
    with pytest.raises(EmulatorError) as found:
        error_of(changed(f"planted_{name}_f8", FAULTS[name]))
    assert found.value.kind in KINDS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bytes", "0x6420", "0x6240"),
        ("sums", r"take_in\(sums, 0\);", ""),
        ("factor", r"factors\[r\] \*= value_unit;", ""),
    ],
)
def test_what_is_computed_wrongly_shows(name: str, old: str, new: str) -> None:
    assert not error_of(changed(f"planted_{name}_f8", (old, new))) < 0.03


def test_sums_of_a_tile_are_apart_from_those_of_all() -> None:
    """O is never what a product of 8 bits adds to; a row of more than 128 columns is summed up in parts."""
    for head_dim, columns in ((64, 64), (128, 128), (256, 64)):
        kernel = emitted(head_dim)
        assert columns_at_a_time(kernel.variant) == columns
        assert f"columns_at_a_time = {columns}" in kernel.source.text
        assert not re.search(r"start_product\w*\(o, ", kernel.source.text.partition("namespace forward")[2])


def test_other_kernels_know_of_no_8_bits() -> None:
    spec = emitted().variant.spec
    for rows in (RowsOf.DENSE, RowsOf.RAGGED):
        text = compiled(kernel_variant(spec, spec.head_dims[0], rows), TARGET).source.text
        assert not any(word in text for word in ("e4m3", "Turned", "q_factors", "HEADROOM"))


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize("head_dim", [128, *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 256))])
def test_kernels_stay_in_registers(head_dim: int) -> None:
    part = Part(ElementType.F8E4M3, "forward", CallKind())
    made = assembled(emitted(head_dim).variant, TARGET, part=part)
    assert [each.spill_bytes for each in made.binary.kernels] == [0]
    assert made.kernel.plan == emitted(head_dim).plan
