"""A list for each query, by blocks of keys: results, parts in a bounded workspace, bytes, planted mistakes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.analysis.by_blocks import objection_to_blocks
from flashgen.compiler.compiled import compiled
from flashgen.hosts.emulated import emulator_provider, recording
from flashgen.hosts.emulator.program import compile_program
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.slices import BY_BLOCKS
from flashgen.op.op import AttentionOp, OpParts
from flashgen.plan import by_blocks
from flashgen.plan.by_blocks import block_order, part_bytes
from flashgen.plan.plan import Part
from flashgen.targets.registry import GPUS
from flashgen.toolchains.nvrtc import compile_cuda
from flashgen.verification.verify import relative_error, verify_case
from tests.cuda.helpers import planted_kernel
from tests.cuda.nvrtc import has_products_that_wait, needs_nvrtc
from tests.numeric.helpers import failures

LIST = "tensor idx: i32[B, Hkv, Nq, 2]  select {block}: idx[b, hkv, i, :]"
# Beside the list: what else a spec has, the captured tensors of a call of B, H, Hkv, Nq, Nk.
BODIES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "causal": ("mask causal", {}),
    "plain": ("", {}),
    "bias": ("tensor bias: f32[H, Nq, Nk]  score s + bias[h, i, j]  mask causal", {"bias": (16, 140, 300)}),
    "sink": (
        """tensor slope: f32[H]  score s - slope[h] * abs(i - j) / 100  mask (h + Nq) % 5 != i % 5
        weights softmax(sink = slope[h])""",
        {"slope": (16,)},
    ),
    "softcap": ("score softcap(s, 3)  mask j <= i + 100", {}),
    "documents": ("tensor doc: f32[B, Nk]  mask doc[b, j] > -0.5", {"doc": (2, 300)}),
}
B, H, HKV, NQ, NK, D = 2, 16, 2, 140, 300, 32


@functools.cache
def emulated(
    body: str, target: str = "sm_90a", block: int = 16, head_dim: str = str(D), lists: str = LIST
) -> AttentionOp:
    text = f"attention by_blocks {{ head_dim {head_dim}  {lists.format(block=block)}  {body} }}"
    return flashgen.loads(text, backend="emulator", target=target)


def inputs(dtype: torch.dtype, block: int = 16, heads: int = H, queries: int = NQ, width: int = D) -> dict[str, Any]:
    """Lists with numbers that no block has, that occur twice, and none at all."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    idx = torch.randint(-2, -(-NK // block) + 2, (B, HKV, queries, 2), generator=generator).int()
    idx[:, :, 5] = -1
    idx[:, :, 7, 1] = idx[:, :, 7, 0]
    idx[:, :, 30:100, 0] = 0  # a block that many list
    return {
        "q": random(B, heads, queries, width),
        "k": random(B, HKV, NK, width),
        "v": random(B, HKV, NK, width),
        "idx": idx,
    }


def kernels_of(op: AttentionOp, given: dict[str, Any]) -> list[str]:
    with recording() as counted, torch.no_grad():
        op(**given)
    return [launch.kernel for each in counted for launch in each.launches.launches]


def goes_by_blocks(op: AttentionOp, given: dict[str, Any]) -> bool:
    return any("_by_blocks_" in each for each in kernels_of(op, given))


@pytest.mark.parametrize(
    ("body", "target", "dtype"),
    [
        ("causal", "sm_90a", torch.bfloat16),
        ("causal", "sm_80", torch.float32),
        ("bias", "sm_90a", torch.float16),
        ("sink", "sm_90a", torch.bfloat16),
        ("sink", "sm_80", torch.float32),
        pytest.param("plain", "sm_80", torch.float16, marks=pytest.mark.slow),
        pytest.param("softcap", "sm_90a", torch.float32, marks=pytest.mark.slow),
        pytest.param("documents", "sm_90a", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_results(body: str, target: str, dtype: torch.dtype) -> None:
    own, captured = BODIES[body]
    op, given = emulated(own, target), inputs(dtype)
    generator = torch.Generator().manual_seed(1)
    given |= {name: torch.randn(*shape, generator=generator) for name, shape in captured.items()}
    assert goes_by_blocks(op, given)
    with torch.no_grad():
        o, lse = op(**given, return_lse=True)
    exact, exact_lse = op.reference(**given, return_lse=True)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    tolerance = 1e-5 if dtype is torch.float32 else 0.005
    assert relative_error(o, exact) < tolerance
    assert relative_error(lse.nan_to_num(neginf=-9), exact_lse.nan_to_num(neginf=-9)) < 1e-5
    assert not o[:, :, 5].any()


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("head_dim", ["64", "24/40", "16/48"])
def test_blocks_and_head_dimensions(block: int, head_dim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values wider than keys, whose tile is smaller than what operands are aligned to; heads that fill no tile."""
    monkeypatch.setattr(by_blocks, "KEPT", 1)
    op = emulated("mask causal", block=block, head_dim=head_dim)
    qk, v = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    given = inputs(torch.bfloat16, block, heads=48, width=qk)
    given["v"] = torch.randn(B, HKV, NK, v, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert goes_by_blocks(op, given)
    with torch.no_grad():
        assert relative_error(op(**given), op.reference(**given)) < 0.005


@pytest.mark.parametrize(
    ("lists", "shape"),
    [
        ("tensor idx: i64[B, Nq, 2]  select {block}: idx[b, i, :]", (B, NQ, 2)),
        ("tensor idx: i32[Hkv, Nq, 2]  select {block}: idx[hkv, Nq - 1 - i, :]", (HKV, NQ, 2)),
        ("tensor idx: i64[Nq, 2]  select {block}: idx[i, :]", (NQ, 2)),
    ],
)
def test_lists_that_heads_or_batch_entries_share(lists: str, shape: tuple[int, ...]) -> None:
    op, given = emulated("mask causal", lists=lists), inputs(torch.bfloat16)
    numbers = torch.randint(-1, 19, shape, generator=torch.Generator().manual_seed(3))
    if "i64" in lists:
        numbers[..., 3, 0] = 2**32 + 1  # no block, whatever its last bits
    given["idx"] = numbers.to(torch.int64 if "i64" in lists else torch.int32)
    assert goes_by_blocks(op, given)
    with torch.no_grad():
        assert relative_error(op(**given), op.reference(**given)) < 0.005


def test_gradients() -> None:
    op, given = emulated("mask causal"), inputs(torch.bfloat16)
    leaves = [given[name].requires_grad_() for name in "qkv"]
    o, lse = op(**given, return_lse=True)
    exact, exact_lse = op.reference(**given, return_lse=True)
    generator = torch.Generator().manual_seed(4)
    d_o, d_lse = torch.randn(o.shape, generator=generator).bfloat16(), torch.randn(lse.shape, generator=generator)
    own = torch.autograd.grad((o, lse), leaves, (d_o, d_lse))
    truth = torch.autograd.grad((exact, exact_lse), leaves, (d_o.double(), d_lse.double()))
    assert all(relative_error(x, y) < 0.02 for x, y in zip(own, truth, strict=True))


@pytest.mark.parametrize(("target", "element"), [("sm_90a", ElementType.BF16), ("sm_80", ElementType.F32)])
def test_bytes(target: str, element: ElementType) -> None:
    op = emulated("mask causal", target)
    case = verify_case(op, op.spec.head_dims[0], element, Shape(1, 24, 1, 150, 300), seed=2)
    assert case.ok, failures(case)
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def test_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls as parts take room; results are the same to the last bit."""
    op, given = emulated("mask causal"), inputs(torch.bfloat16)
    with torch.no_grad():
        whole = op(**given, return_lse=True)
        monkeypatch.setattr(by_blocks, "MOST_PART_BYTES", 50 * B * H // 8 * 2 * part_bytes(HeadDim(D, D), 2))
        apart = op(**given, return_lse=True)
    assert kernels_of(op, given).count("by_blocks_d32_by_blocks_merge_bf16") == 3
    assert all(torch.equal(x, y) for x, y in zip(whole, apart, strict=True))


def test_queries_of_several_spans() -> None:
    """Lists of 2048 queries are turned together; of one more a second block of threads has them."""
    op, given = emulated("", head_dim="16"), inputs(torch.bfloat16, heads=16, queries=2049, width=16)
    given = {name: x[:1, ..., :16] if name in "qkv" else x[:1] for name, x in given.items()}
    with torch.no_grad():
        assert relative_error(op(**given), op.reference(**given)) < 0.005
    assert goes_by_blocks(op, given)


def test_the_workspace_is_bounded() -> None:
    long = Shape(1, 32, 2, 32768, 32768)
    order = block_order(long, 16, 64, HeadDim(128, 128), 2)
    assert order is not None
    assert order.queries % by_blocks.QUERIES == 0
    bytes_of_parts = order.queries * 4 * 16 * part_bytes(HeadDim(128, 128), 2)
    assert by_blocks.MOST_PART_BYTES // 2 < bytes_of_parts <= by_blocks.MOST_PART_BYTES
    assert part_bytes(HeadDim(128, 128), 2) == 8 * 128 * 2


def test_calls_that_go_the_other_way() -> None:
    """Few queries, few heads, most of the keys, long lists; and it is said of the others."""
    head_dim = HeadDim(128, 128)
    assert block_order(Shape(1, 32, 2, 127, 32768), 16, 64, head_dim, 2) is None
    assert block_order(Shape(1, 32, 8, 32768, 32768), 16, 64, head_dim, 2) is None
    assert block_order(Shape(1, 32, 2, 4096, 4096), 16, 64, head_dim, 2) is None
    assert block_order(Shape(1, 32, 2, 32768, 32768), 33, 64, head_dim, 2) is None
    op, given = emulated("mask causal"), inputs(torch.bfloat16)
    assert "by blocks of keys" in str(op.explain(**given))
    few = {**given, "q": given["q"][:, :4]}
    assert "by blocks of keys" not in str(op.explain(**few))
    assert not goes_by_blocks(op, few)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tensor idx: i32[B, H, Nq, 2]  select 16: idx[b, h, i, :]", "lists of their own"),
        ("tensor idx: i32[B, ceildiv(Nq, 16), 2]  select 16: idx[b, i // 16, :]", "no list for each query"),
        ("tensor idx: i32[B, Nq, 2]  select 100: idx[b, i, :]", "100 keys"),
        ("tensor idx: i32[B, Nq, 2]  select 16: idx[b, i, :]  dropout 0.1", "pairs dropped"),
        ("tensor idx: i32[B, Nq, 2]  select 16: idx[b, i, :]  layout block 16: I >= J", "blocks are drawn"),
        ("tensor idx: i32[B, Nq, 2]  select 16: idx[b, i, :]  weights sigmoid(s)", "no exponentials"),
        ("tensor idx: i32[B, Nq, 2]  select 16: idx[b, i, :]  score -sqdist", "|q - k|²"),
        ("tensor idx: i32[B, Nq, 2]  select 16: idx[b, i, :]  mask causal", ""),
    ],
)
def test_specs_that_have_no_such_kernels(text: str, why: str) -> None:
    spec = flashgen.loads(f"attention named {{ head_dim 32  {text} }}", backend="reference").spec
    found = objection_to_blocks(spec, spec.head_dims[0])
    assert why in found
    assert bool(found) == bool(why)


RACES = {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED}
MISTAKES = {
    "Q is not waited for": (
        "      fg::copy_async_wait<0>();\n      if constexpr (P::warpgroups) fg::publish_shared();\n      barrier();",
        "      barrier();",
    ),
    "Q is copied over that of the tile before": ("      barrier();", "      fg::warp_barrier();"),
    "K and V are not waited for": ("    fg::block_barrier();  // K and V are there\n", ""),
    "what is known of units is read too early": ("    fg::block_barrier();  // everyone knows the queries\n", ""),
    "where blocks begin is read too early": (
        "  fg::block_barrier();\n\n  const int count = fg::min(BROUGHT",
        "\n  const int count = fg::min(BROUGHT",
    ),
    "sums of warps are read too early": ("  fg::block_barrier();\n  int at = ", "  int at = "),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 3 else ()) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_in_a_kernel_that_was_right(name: str) -> None:
    old, new = MISTAKES[name]
    spec = emulated("mask causal").spec
    target, head_dim = GPUS["sm_90a"], spec.head_dims[0]
    variant = kernel_variant(spec, head_dim, BY_BLOCKS)
    kernel = compiled(variant, target, part=Part(ElementType.BF16, "forward"))
    assert kernel.source.whole.count(old) == 1
    program = compile_program(kernel.source.whole.replace(old, new), name=kernel.source.name)
    planted = planted_kernel(kernel.plan, lambda *_: program)
    provider: Any = emulator_provider(spec, target)
    named = replace(spec, name=f"by_blocks_planted_{list(MISTAKES).index(name)}")
    found = replace(provider(head_dim, 0), other={BY_BLOCKS: planted}.get)
    op = AttentionOp(OpParts(named, {"cpu": lambda *_: found}, backend="emulator"))
    with pytest.raises(EmulatorError) as caught, torch.no_grad():
        op(**inputs(torch.bfloat16))
    assert caught.value.kind in RACES, str(caught.value)


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_it_stays_in_registers_and_no_product_waits(target: str) -> None:
    lists = "tensor idx: i32[B, Hkv, Nq, 16]  select 64: idx[b, hkv, i, :]"
    text = f"attention native {{ head_dim 128  dtype bf16, f32  {lists}  mask causal }}"
    spec = flashgen.loads(text, backend="reference").spec
    kernel = compiled(kernel_variant(spec, spec.head_dims[0], BY_BLOCKS), GPUS[target])
    for part in kernel.parts():
        binary = compile_cuda(part.source, target)
        assert [each.spill_bytes for each in binary.kernels] == [0] * 4
        assert not has_products_that_wait(binary)
