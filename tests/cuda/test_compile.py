"""Generated sources through NVRTC: for every architecture, without a GPU, and without spilling registers."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

from flashgen.analysis.variant import analyse
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.language import parse_file
from flashgen.plan.measured import Pins
from flashgen.store.headers import Text, headers_of
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.primitives import primitives
from flashgen.targets.gpu.tiles import HARMLESS_SPILL
from flashgen.targets.registry import GPUS
from flashgen.toolchains.nvrtc import CudaBinary, compile_cuda, created, find_nvrtc, resources
from tests.cuda.helpers import emitted, launched, of_type, planned, variant_of
from tests.cuda.nvrtc import check_registers, needs_nvrtc
from tests.slices import one_of

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120")
MOST_REGISTERS = 255

pytestmark = needs_nvrtc

PLAIN = "attention causal {{ head_dim {head_dim} dtype {dtype} mask causal }}"
RICH = """
attention rich {
    head_dim 40
    dtype    bf16
    param    gain: f32 = 1.0 grad
    tensor   gate: f32[B, H, Nk] grad
    tensor   table: f32[32, H] grad
    tensor   doc: i32[B, Nk]
    score    gain * s - 0.01 * sqdist + gate[b, h, j] + table[clamp(i - j, 0, 31), h]
    mask     causal and same_document(doc)
}
"""


def compiled(text: str, target: str, name: PassName | None = None) -> CudaBinary:
    return compile_cuda(emitted(text, target, name), target)


@pytest.mark.parametrize("target", one_of(2, TARGETS))
def test_every_architecture(target: str) -> None:
    text = PLAIN.format(head_dim=64, dtype="f16")
    binary = compiled(text, target, "forward")
    assert [each.name for each in binary.kernels] == ["causal_d64_forward_f16"]
    assert binary.path.read_bytes()[:4] == b"\x7fELF"
    # NVRTC 13.5 spills 52 bytes on sm_120; 13.0 spills 140 to 152, there, on sm_80 and on sm_86.
    assert all(each.registers <= MOST_REGISTERS and each.spill_bytes <= HARMLESS_SPILL for each in binary.kernels)


@pytest.mark.parametrize(("head_dim", "dtype"), one_of(2, [(64, "bf16"), (128, "f16")]))
def test_both_passes_stay_in_registers(head_dim: int, dtype: str) -> None:
    text = PLAIN.format(head_dim=head_dim, dtype=dtype)
    binary = compiled(text, "sm_80")
    _, plan = planned(text, "sm_80")
    assert {each.name for each in binary.kernels} == set(launched(plan))
    assert all(each.spill_bytes <= HARMLESS_SPILL for each in binary.kernels)


@pytest.mark.parametrize("target", one_of(2, ["sm_90a", "sm_80"]))
def test_rows_that_warps_share_stay_in_registers(target: str) -> None:
    name: PassName | None = "forward" if target == "sm_90a" else None
    binary = compiled(PLAIN.format(head_dim="576/512", dtype="bf16"), target, name)
    assert all(each.spill_bytes == 0 for each in binary.kernels)


@pytest.mark.parametrize("head_dim", one_of(2, [128, 64]))
def test_chunks_of_a_param_stay_in_registers_as_those_of_a_constant(head_dim: int) -> None:
    """Where ranges divided by it in 64 bits, on either side of 0, forward kernels spilled 400 bytes."""
    text = "attention chunks {{ head_dim {}  dtype bf16  {}  mask causal and chunked(c) }}"
    spilled = [
        {each.name: each.spill_bytes for each in compiled(text.format(head_dim, declared), "sm_90a").kernels}
        for declared in ("param c: i32", "const c = 1000")
    ]
    assert spilled[0] == spilled[1]


def branches(binary: CudaBinary) -> dict[str, int]:
    """By kernel, the places where lanes may part ways (BSSY). Of an instruction's 16 bytes 12 bits say what it does."""
    image = binary.path.read_bytes()
    at, size, count, names = struct.unpack_from("<Q", image, 40)[0], *struct.unpack_from("<3H", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, at + size * n) for n in range(count)]
    found = {}
    for name, _, _, _, offset, length in sections:
        begin = sections[names][4] + name
        text = image[begin : image.index(b"\0", begin)].decode()
        if text.startswith(".text."):
            code = [each & 0xFFF for each, _ in struct.iter_unpack("<QQ", image[offset : offset + length])]
            found[text.removeprefix(".text.")] = code.count(0x945)
    return found


@pytest.mark.parametrize("weights", one_of(2, ["sigmoid(s)", "silu(s) / Nk"]))
def test_weights_of_pairs_do_not_wait_for_one_another(weights: str) -> None:
    """A branch a pair would: each has a reciprocal, which takes as long as many of them that follow one another."""
    text = f"attention pointwise {{ head_dim 64 dtype bf16 mask causal weights {weights} }}"
    binary = compiled(text, "sm_90a")
    found = branches(binary)
    assert {each.name for each in binary.kernels} == set(found)
    assert max(found.values()) < 32, found  # of 64 pairs a lane and step


@pytest.mark.parametrize(
    "name",
    ["causal", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt_oss", "gemma2_local", "t5"))],
)
def test_products_of_warpgroups_do_not_wait_for_one_another(name: str, specs: Path) -> None:
    """The assembler says where they do: registers do not suffice, or something else writes what they add to."""
    (spec,) = parse_file(specs / f"{name}.attn").specs
    variant = analyse(spec, spec.head_dims[0])
    source = emit_cuda(GPUS["sm_90a"].plan(variant, Pins(element=ElementType.BF16)))
    kernels = compile_cuda(source, "sm_90a").kernels
    assert any(each.name.endswith("backward_bf16") for each in kernels)
    assert [each.name for each in kernels if each.serialized] == []


def test_waiting_is_read_from_the_log() -> None:
    lines = [
        (
            "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
            "insufficient register resources for the function 'x_keys'"
        ),
        *(
            f"ptxas info    : Function properties for {name}\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes "
            "spill loads\nptxas info    : Used 168 registers, used 1 barriers"
            for name in ("x_forward", "x_keys")
        ),
    ]
    assert {each.name: each.serialized for each in resources("\n".join(lines))} == {"x_forward": False, "x_keys": True}


@pytest.mark.parametrize("head_dim", one_of(3, [128, 192, 256]))
def test_warps_that_compare_ranges_of_documents_stay_in_registers(head_dim: int) -> None:
    mask = "tensor doc: i32[B, Nk]  mask causal and same_document(doc)"
    check_registers(f"head_dim {head_dim}  {mask}", f"checked_d{head_dim}_forward", "forward")


def test_dropout_stays_in_registers() -> None:
    binary = compiled("attention drops { head_dim 64 dtype bf16 mask causal dropout 0.1 }", "sm_90a", "forward")
    assert {each.name: each.spill_bytes for each in binary.kernels if each.spill_bytes} == {}


@pytest.mark.parametrize("element", [ElementType.BF16, ElementType.F32])
def test_types_whose_warps_share_rows_beside_others(element: ElementType) -> None:
    _, plan = planned("attention mixed { head_dim 264  mask causal }", "sm_90a")
    assert {each.forward.split for each in plan.elements} == {1, 2}
    binary = compile_cuda(emit_cuda(of_type(plan, element), "forward"), "sm_90a")
    assert [each.name for each in binary.kernels] == [f"mixed_d264_forward_{element}"]


def test_kernels_that_share_lists() -> None:
    text = "attention listed { head_dim 64 dtype f16 layout block 64: popcount(I ^ J) == 1 }"
    binary = compiled(text, "sm_90a", "forward")
    assert [each.name for each in binary.kernels] == [
        *("listed_d64_forward_f16", "listed_d64_order_of_forward_f16", "listed_d64_visits_of_forward_f16")
    ]
    assert all(each.spill_bytes == 0 for each in binary.kernels)


@pytest.mark.slow
def test_everything_at_once() -> None:
    binary = compiled(RICH, "sm_90a")
    assert any("keys" in each.name for each in binary.kernels)


@pytest.mark.parametrize(("target", "name"), [("sm_80", "backward"), ("sm_90a", "forward")])
def test_ragged_batches(target: str, name: PassName) -> None:
    """The arguments of a sequence are taken apart: nothing of them lies in memory but what spills."""
    variant = dataclasses.replace(variant_of(PLAIN.format(head_dim=64, dtype="bf16")), kind=RAGGED)
    plan = GPUS[target].plan(variant)
    binary = compile_cuda(emit_cuda(plan, name), target)
    assert binary.kernels
    assert {each.name for each in binary.kernels} <= set(launched(plan))
    assert all(each.stack_bytes <= 64 and each.spill_bytes <= HARMLESS_SPILL for each in binary.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_ragged_batches_of_everything_at_once(target: str) -> None:
    variant = dataclasses.replace(variant_of(RICH.replace("bf16", "f16")), kind=RAGGED)
    binary = compile_cuda(emit_cuda(GPUS[target].plan(variant)), target)
    assert any("keys" in each.name for each in binary.kernels)


LOOP = """
struct Rows {
  const int* entries;
  FG_DEVICE int entry() const { return entries ? fg::global_load(entries) : 0; }
};
extern "C" __global__ void loop(Rows rows, const float* from, float* to, int count) {
  for (int n = 0; n < count; ++n) {
    __syncthreads();
    to[n] = n % 3 ? from[rows.entry() + n] : 1.0f;
  }
}
"""


def test_a_load_stays_behind_its_condition() -> None:
    """It is the same in each round of the loop: a compiler that moves it in front asks for what is at address 0."""
    nvrtc, _ = find_nvrtc()
    text = primitives() + LOOP
    program = created(nvrtc, Text("loop", text, headers_of(text)))
    nvrtc.compileProgram(program, ("-std=c++17", "-arch=compute_90"))
    lines = nvrtc.getPTX(program).decode().split(".entry loop", 1)[1].splitlines()
    load = next(n for n, line in enumerate(lines) if "ld.global.nc.u32" in line)
    assert any(" bra " in line for line in lines[load - 6 : load]), lines[load - 6 : load]


@pytest.mark.slow
def test_dropout_where_scores_need_the_product_again() -> None:
    """Above D 128 two warpgroups have half of the columns each: they draw while products run, too."""
    text = "attention capped { head_dim 256 dtype bf16 score softcap(s, 50.0) mask causal dropout 0.1 }"
    kernels = {each.name for each in compiled(text, "sm_90a", "backward").kernels}
    assert {"capped_d256_backward_bf16_dropout", "capped_d256_keys_bf16_dropout"} <= kernels
