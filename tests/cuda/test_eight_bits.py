"""Hopper's kernels for q, k and v of 8 bits: what they are made of, and that the emulator finds what is wrong."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.compiler.compiled import CompiledKernel, assembled, compiled
from flashgen.hosts.emulator.program import compile_program
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.types import ElementType
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op.op import AttentionOp, OpParts
from flashgen.op.signature import F8
from flashgen.plan.plan import CallKind, Part
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.model import KEYS_OF_SUMS
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import relative_error
from tests.cuda.helpers import planted_kernel
from tests.cuda.nvrtc import needs_nvrtc

TEXT = "attention planted_f8 { head_dim 64, 128, 256 }"
CUT = "attention planted_cut_f8 { head_dim 64, 128, 256  mask j <= i + 350 }"
TARGET = GPUS["sm_90a"]


@functools.cache
def emitted(head_dim: int = 64, text: str = TEXT) -> CompiledKernel[GpuPlan, GpuBinary]:
    spec = flashgen.loads(text, backend="reference").spec
    return compiled(
        kernel_variant(spec, next(each for each in spec.head_dims if each.qk == head_dim), EIGHT_BITS), TARGET
    )


def changed(name: str, *changes: tuple[str, str], head_dim: int = 64, text: str = TEXT) -> AttentionOp:
    """An op whose kernel for 8 bits is another one in a few places."""
    kernel = emitted(head_dim, text)
    source = kernel.source.whole
    for old, new in changes:
        source, count = re.subn(old, new, source)
        assert count == 1, (old, count)
    program = compile_program(source, name=kernel.source.name)
    f8 = planted_kernel(kernel.plan, lambda *_: program)
    dense = replace(f8, other=lambda _: f8)
    return AttentionOp(OpParts(replace(kernel.variant.spec, name=name), {"cpu": lambda *_: dense}, backend="emulator"))


def error_of(
    op: AttentionOp, head_dim: int = 64, rows: int = 70, keys: int = 2 * KEYS_OF_SUMS + 100, growth: float = 8
) -> float:
    """Of a call whose sums are kept more than once; maxima grow from tile to tile, V has a column that stands out, and
    keys that do.
    """
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(1, 2, n, head_dim, generator=generator) for n in (rows, keys, keys))
    k *= torch.linspace(0.5, 0.5 * growth, keys)[:, None]
    v[..., 5] += 4
    v[:, :, ::7] *= 3
    q, k, v = (x.clamp(-448, 448).to(F8) for x in (q, k, v))
    o, lse = op(q, k, v, q_descale=1.5, v_descale=0.5, return_lse=True)
    truth, lse_truth = op.reference(q, k, v, q_descale=1.5, v_descale=0.5, return_lse=True)
    return max(relative_error(o, truth), relative_error(lse, lse_truth))


@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_nothing_is_planted(head_dim: int) -> None:
    assert error_of(changed(f"planted_nothing_f8_{head_dim}", head_dim=head_dim), head_dim) < 0.03


def test_wide_heads_of_few_and_many_tiles() -> None:
    """Of 1 to 7 key tiles, of which the mask cuts some."""
    tile = emitted(256).plan.by_element[ElementType.F8E4M3].forward.Bc
    for text in (TEXT, CUT):
        op = changed(f"wide_{text.split()[1]}", head_dim=256, text=text)
        for tiles in range(1, 8):
            assert error_of(op, 256, 40, tiles * tile - 5) < 0.03
        for rows, keys in ((200, 250), (300, 700)):
            assert error_of(op, 256, rows, keys) < 0.03


FAULTS = {
    "panels": (
        r"panel < Tile::panels; \+\+panel\)(\s+copy_panel_async\(to.base \+ panel \* rows)",
        r"panel < 1; ++panel)\1",
    ),
    "unawaited": (r"(step\(Weights& p, int n, Ahead& ahead\) {\s+)await_part\(n\);", r"\1"),
    "unreleased": (r"}\s+release_part\(n\);(\s+if constexpr .*\s+round_into\(p, s\);)", r"}\1"),
    "past_the_end": (r"first \+ key \+ k < int\(a.kv_len\)\s+\?", "true ?"),
}
KINDS = {
    "panels": (FaultKind.DEADLOCK,),
    "unawaited": (FaultKind.UNINITIALIZED, FaultKind.RACE, FaultKind.NOT_AWAITED),
    "unreleased": (FaultKind.DEADLOCK,),
    "past_the_end": (FaultKind.OUTSIDE,),
}


@pytest.mark.parametrize(
    "name", ["unawaited", *(pytest.param(each, marks=pytest.mark.slow) for each in FAULTS if each != "unawaited")]
)
def test_what_waits_for_nothing_or_is_not_there_is_found(name: str) -> None:
    with pytest.raises(EmulatorError) as found:
        error_of(changed(f"planted_{name}_f8", FAULTS[name]))
    assert found.value.kind in KINDS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bytes", r"__byte_perm\(a, b, 0x5140\)", "__byte_perm(a, b, 0x5410)"),
        ("columns", r"fg::row_of_turned\(column \+ e\)", "(column + e)"),
        ("sums", r"add_kept_sums\(\);(\s+close_rows)", r"\1"),
        ("left_over", r"low -= low_of\(words\[k\]\), high -= high_of\(words\[k\]\);", ""),
        ("shrunk", r"kept\[r\] \*= shrink\[r\];", ""),
        ("factor", r"factors\[r\] \*= value_unit;", ""),
    ],
)
def test_what_is_computed_wrongly_shows(name: str, old: str, new: str) -> None:
    assert not error_of(changed(f"planted_{name}_f8", (old, new)), growth=1 if name == "sums" else 8) < 0.03


def error_below_zero(op: AttentionOp) -> float:
    """Of a call whose scores are all below 0 and grow from tile to tile: bits of floats order them the wrong way."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.rand(1, 2, n, 64, generator=generator).add(0.5) for n in (40, 900, 900))
    k *= -torch.linspace(6, 0.2, 900)[:, None]
    q, k, v = (x.to(F8) for x in (q, k, v))
    return relative_error(op(q, k, v), op.reference(q, k, v))


def test_maxima_below_zero_are_found() -> None:
    assert error_below_zero(changed("planted_nothing_below_zero")) < 0.03
    blind = changed("planted_below_zero", (r"is_unsure = tops\[0\] < 0 && [^;]*;", "is_unsure = false;"))
    assert not error_below_zero(blind) < 0.03


def drift(op: AttentionOp, head_dim: int) -> float:
    """By how much O, a mean of ones and small numbers, is too small: what sums of 14 bits cut off adds up."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, n, head_dim, generator=generator).mul(0.5).to(F8) for n in (30, 5000))
    v = torch.rand(1, 1, 5000, head_dim, generator=generator).add(0.5).to(F8)
    o, truth = op(q, k, v), op.reference(q, k, v)
    return float(1 - (o.double() / truth).mean())


@pytest.mark.parametrize("head_dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_sums_of_products_are_added_up_in_float32(head_dim: int) -> None:
    """O takes in no more keys than lose little, and then is kept; that of all of them would lose much."""
    tiles = emitted(head_dim).plan.by_element[ElementType.F8E4M3].forward
    count = KEYS_OF_SUMS // tiles.Bc
    assert f"tiles_of_sums = {count}" in emitted(head_dim).source.whole
    own = drift(changed(f"sums_f8_{head_dim}", head_dim=head_dim), head_dim)
    never = (f"tiles_of_sums = {count}", "tiles_of_sums = 1 << 20")
    assert abs(own) < 5e-3 < drift(changed(f"no_sums_f8_{head_dim}", never, head_dim=head_dim), head_dim) / 4


def test_other_kernels_know_of_no_8_bits() -> None:
    spec = emitted().variant.spec
    for rows in (DENSE, RAGGED):
        for each in compiled(kernel_variant(spec, spec.head_dims[0], rows), TARGET).parts():
            assert not any(
                word in each.source.text for word in ("e4m3", "Turned", "EightBits", "q_factors", "HEADROOM")
            )


@needs_nvrtc
@pytest.mark.parametrize("head_dim", [128, *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 256))])
def test_kernels_stay_in_registers(head_dim: int) -> None:
    part = Part(ElementType.F8E4M3, "forward")
    (made,) = assembled([compiled(emitted(head_dim).variant, TARGET, part=part)], CallKind())
    spilled = {each.name.removesuffix("_f8e4m3").rpartition("_")[2]: each.spill_bytes for each in made.binary.kernels}
    assert spilled["turn"] == 0
    assert spilled["forward"] <= 0
    assert made.kernel.plan == emitted(head_dim).plan
