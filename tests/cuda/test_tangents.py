"""Forward mode by warpgroups: what its plan decides, and what the assembler makes of its products."""

from __future__ import annotations

import pytest

from flashgen.analysis.tangent import with_tangent
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.plan import CallKind
from flashgen.targets.gpu.compile import left_out
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.nvrtc import compile_cuda
from tests.cuda.helpers import of_type, variant_of
from tests.cuda.nvrtc import has_products_that_wait, needs_nvrtc

CAUSAL = "head_dim {}  mask causal"
ALIBI = "head_dim {}  tensor m: f32[H] grad  score s - m[h] * abs(i - j)  mask causal"
CAPPED = "head_dim {}  score softcap(s, 30)  mask causal"


def moving(text: str, head_dim: int) -> tuple[Variant, GpuPlan]:
    variant = with_tangent(variant_of(f"attention a {{ dtype bf16  {text.format(head_dim)} }}"))
    return variant, GPUS["sm_90a"].plan(variant)


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "head_dim", "which"),
    [
        (CAUSAL, 64, "qkv"),
        (CAUSAL, 128, "qkv"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (CAUSAL, 64, "q"),
                (CAUSAL, 128, "kv"),
                (ALIBI, 128, "qkv"),
                (CAPPED, 64, "qkv"),
                (ALIBI, 64, ""),
            )
        ),
    ],
)
def test_no_product_waits_for_another(text: str, head_dim: int, which: str) -> None:
    """Kernels for one kind of call know which tangents there are: a branch between products kept all of them apart."""
    _, plan = moving(text, head_dim)
    part = left_out(emit_cuda(plan, "forward"), CallKind(moving=which))
    binary = compile_cuda(part, "sm_90a")
    (kernel,) = binary.kernels
    assert kernel.spill_bytes <= 16
    assert not has_products_that_wait(binary)


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 112), (128, 64)])
def test_what_is_decided(head_dim: int, keys: int) -> None:
    variant, plan = moving(CAUSAL, head_dim)
    tiles = plan.by_element[ElementType.BF16].forward
    assert (tiles.Br, tiles.Bc, tiles.warps, tiles.producers, tiles.tensor_copies) == (128, keys, 8, 4, True)
    assert tiles.accumulators(variant, ElementType.BF16) == head_dim + keys  # twice, of 64 rows by 128 threads
    decided = {each.question: each.choice for each in plan.decisions if each.about == "forward, bf16"}
    assert decided["overlap"] == "exponentials beside tS, O beside S"
    assert decided["tile order"] == "persistent"


def test_scores_whose_tangents_ask_for_products() -> None:
    _, plan = moving(CAPPED, 64)
    assert "O beside S" in {each.choice for each in plan.decisions}
    assert plan.by_element[ElementType.BF16].forward.tensor_copies


def test_rows_that_tensor_copies_do_not_bring() -> None:
    _, plan = moving(CAUSAL, 20)
    tiles = plan.by_element[ElementType.BF16].forward
    assert (tiles.warpgroups, tiles.tensor_copies, tiles.producers) == (True, False, 0)


def test_kinds_of_calls() -> None:
    variant, plan = moving(CAUSAL, 64)
    source = emit_cuda(of_type(plan, ElementType.BF16))
    kinds = {each: CallKind(moving=each) for each in ("", "q", "kv", "qkv")}
    bits = {each: dict(left_out(source, kind).defines) for each, kind in kinds.items()}
    assert [each.get("FLASHGEN_MOVING") for each in bits.values()] == ["0", "1", "6", "7"]
    assert kinds["kv"].words == "tangents of k and v"
    assert kinds[""].words == "tangents of captured values"
    elsewhere = GPUS["sm_80"].plan(variant)
    left = left_out(emit_cuda(of_type(elsewhere, ElementType.BF16)), kinds["q"])
    assert "FLASHGEN_MOVING" not in dict(left.defines)
