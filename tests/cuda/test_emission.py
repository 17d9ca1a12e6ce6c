"""The generated CUDA: what stands where, and that hosts and sources agree on kernels."""

from __future__ import annotations

import re

import pytest

from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.types import ElementType
from flashgen.kinds.slices import BY_BLOCKS
from flashgen.kinds.table import KINDS
from flashgen.language import parse_text
from flashgen.plan.launches import ALIGNMENT
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.launches import atomic_buffers, backward_launches, exact_buffers, forward_launches
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import emitted, kernels_in, launched, of_type, planned, variant_of

CAUSAL = "attention causal { head_dim 64 mask causal }"
EVERYTHING = """
attention everything {
    head_dim 40/24
    dropout  0.1
    param    gain: f32 = 1.0 grad
    tensor   slope: f32[H] grad
    tensor   gate: f32[B, H, Nk] grad
    tensor   rows: f32[B, Nq] grad
    tensor   table: f32[32, H] grad
    tensor   sink: f32[H] grad
    tensor   doc: i32[B, Nk]
    let      bias = gate[b, h, j] + rows[b, i] + table[clamp(i - j, 0, 31), h]
    score    gain * (s - 0.01 * sqdist) - slope[h] * abs(i - j) + bias
    mask     causal and doc[b, j] >= 0
    weights  softmax(sink = sink[h])
}
"""
CAPTURED = ("slope", "gate", "rows", "table", "sink")
SPECS = {
    "causal": CAUSAL,
    "everything": EVERYTHING,
    "pointwise": "attention p { head_dim 32 param bias: f32 = 0.0 grad score s + bias weights sigmoid(s) }",
    "normalized": "attention n { head_dim 32 dropout 0.2 weights normalize(relu(s)) }",
    "listed": "attention l { head_dim 32 layout block 64: popcount(I ^ J) == 1 }",
    "sink": "attention k { head_dim 32 tensor sink: f32[H] grad mask causal weights softmax(sink = sink[h]) }",
}


def section(source: str, opening: str) -> str:
    """The struct or function that begins with ``opening``."""
    start = source.index(opening)
    return source[start : source.index("\n}", start)]


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bytes_every_time(name: str) -> None:
    assert emitted(SPECS[name]) == emit_cuda(of_type(planned(SPECS[name])[1]))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", SPECS)
def test_every_launch_has_its_kernel_and_every_kernel_a_launch(name: str, target: str) -> None:
    """Whatever the rows lie in: a package says of each kernel that it holds what its launch says."""
    spec = parse_text(SPECS[name]).specs[0]
    for kind in KINDS.values():
        if kind is BY_BLOCKS:
            continue
        variant = kernel_variant(spec, spec.head_dims[0], kind)
        plan = GPUS[target].plan(variant)
        own = of_type(plan)
        assert set(launched(own)) == kernels_in(emit_cuda(own)), kind


@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_bounded_by_what_launches_start(name: str) -> None:
    _, plan = planned(SPECS[name])
    for each in launched(plan).values():
        assert each.threads % 32 == 0
        assert each.shared_bytes <= plan.sram_bytes


def test_only_the_first_layer_speaks_assembly_and_shared_memory() -> None:
    source = emitted(EVERYTHING)
    above = dict(source.headers)
    of_dropout = above.pop("flashgen/dropout_instructions.cuh")
    assert "halves_not_below" in of_dropout
    assert not re.search(r"\bstruct\b", of_dropout)
    assert "__shfl" in above.pop("flashgen/instructions.cuh")
    for name, text in (*above.items(), (source.file_name, source.text)):
        for word in ("asm", "__shared__", "__syncthreads", "__shfl", "atomicAdd"):
            assert not re.search(rf"\b{word}", text), (name, word)


def test_values_are_placed_at_their_level() -> None:
    text = emitted(EVERYTHING).whole
    assert "float of_slope;  // slope[h]" in section(text, "struct Head {")
    assert "float of_gate;  // gate[b, h, j]" in section(text, "struct Column {")
    assert "float of_rows;  // rows[b, i]" in section(text, "struct Row {")
    assert "fg::element(a.tensor_table" in section(text, "FG_DEVICE Diagonals make_diagonals(")
    assert "d.of_table" in section(text, "FG_DEVICE float score(")


def test_the_scale_folds_into_one_multiplication_and_addition() -> None:
    causal, everything = emitted(CAUSAL), emitted(EVERYTHING)
    assert "exp2_approximate(value * factor() - shift[2 * m + e / 2])" in causal.whole
    assert re.search(r"float factor\(.*\) { return 0\.18033688f; }", causal.text)
    assert re.search(r"float factor\(.*\) { return 1\.44269504f; }", everything.text)


def test_masks_are_read_in_the_loop_over_partial_tiles_alone() -> None:
    headers = dict(emitted(CAUSAL).headers)
    weights = headers["flashgen/forward/exponentials.cuh"]
    forward = [each for name, each in headers.items() if "/backward/" not in name]
    assert len(re.findall(r"\bkeep\(", "".join(forward))) == 1
    assert len(re.findall(r"if constexpr \(masked && !Spec::keys_of_row\)\n +if \(!Base::is_kept\(", weights)) == 1
    assert "else if constexpr (masked) {\n      if (column0 + BC <= kv_len) return;" in weights
    assert "step<true>(n)" in headers["flashgen/forward/mainloop.cuh"]
    assert "step<false>(n)" in headers["flashgen/forward/mainloop.cuh"]


def test_nothing_is_written_that_a_spec_does_not_use() -> None:
    """What kernels do of it is over what the spec says, and left out by the compiler."""
    plain = emitted("attention plain { head_dim 64 }").text
    words = ("draws_squares", "observe_", "sink_score", "sqdist = true", "captured = true", "struct Gradient_")
    for word in words:
        assert word not in plain
        assert word in emitted(EVERYTHING).whole


def test_the_header_shows_the_spec_and_the_plan() -> None:
    text = emitted(EVERYTHING).whole
    assert "//     mask     causal and doc[b, j] >= 0" in text or "//     mask causal and doc[b, j] >= 0" in text
    assert "// Plan, for 163 KiB of shared memory a block:" in text
    assert not re.search(r"/(home|usr|tmp|work)/", text)


def test_dq_has_its_own_kernel_where_rows_are_summed_or_results_repeat() -> None:
    (_, causal), (_, everything) = planned(CAUSAL), planned(EVERYTHING)

    def kernels(plan: GpuPlan, *, deterministic: bool) -> list[str]:
        found = backward_launches(of_type(plan, ElementType.F16), dropped=False, deterministic=deterministic)
        return [each.kernel.replace(plan.symbol, "k") for each in found.launches]

    assert kernels(causal, deterministic=False) == ["k_rows_f16_clear", "k_backward_f16", "k_convert_f16"]
    assert kernels(causal, deterministic=True) == ["k_rows_f16", "k_keys_f16", "k_queries_f16"]
    assert "k_queries_f16" in kernels(everything, deterministic=False)
    repeatable = kernels(everything, deterministic=True)
    assert repeatable.index("k_keys_f16_measure") < repeatable.index("k_keys_f16_exact")
    assert repeatable[-1].startswith("k_settle_grad_")


def test_buffers_follow_one_another_aligned() -> None:
    _, plan = planned(EVERYTHING)
    sizes = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 77, "kv_len": 101}
    sizes |= {f"dim{axis}_{name}": 5 for name in CAPTURED for axis in range(3)}
    for deterministic in (False, True):
        launches = backward_launches(of_type(plan, ElementType.F16), dropped=False, deterministic=deterministic)
        end = 0
        for at, length in launches.offsets(sizes).values():
            assert at % ALIGNMENT == 0
            assert at >= end
            end = at + length
    forward = forward_launches(of_type(plan, ElementType.F16), dropped=True)
    assert forward.launches[-1].kernel == f"{plan.symbol}_forward_f16_dropout"


def test_memory_grows_with_lengths_not_with_pairs() -> None:
    recipe = decide(variant_of(EVERYTHING))
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 1024, "kv_len": 1024}
    sizes |= {f"dim{axis}_{name}": 1 for name in CAPTURED for axis in range(3)}
    for buffers in (atomic_buffers(recipe, persistent=True), exact_buffers(recipe)):
        small = sum(each.bytes.value(sizes) for each in buffers)
        large = sum(each.bytes.value(sizes | {"q_len": 2048, "kv_len": 2048}) for each in buffers)
        assert large <= 2 * small
