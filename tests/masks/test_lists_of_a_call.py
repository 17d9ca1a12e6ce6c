"""Lists of visits that a call makes of its captured tensors: the same results, the bytes foreseen, longest first."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.hosts.backends import EMULATED
from flashgen.hosts.emulated import Counted, EmulatedKernel, emulator_provider, recording
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.schedule import Compiled, ListCache
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp, OpParts
from flashgen.plan.launches import Count
from flashgen.targets.gpu.lists import OF_KEYS, OF_QUERIES
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.registry import GPUS
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import assert_close, failures, normal

# By what of a call's heads has a mask of its own.
MASKS = {
    "all": "tensor row: i32[Nq]  tensor column: i32[Nk]  mask row[i] == column[j]",
    "batch": "tensor row: i32[B, Nq]  tensor column: i32[B, Nk]  mask row[b, i] == column[b, j]",
    "heads": "tensor row: i32[H, Nq]  tensor column: i32[H, Nk]  mask row[h, i] == column[h, j]",
    "both": "tensor row: i32[B, Nq]  tensor column: i32[H, Nk]  mask row[b, i] == column[h, j]",
}
CAUSAL = "tensor doc: i32[B, Nk]  mask causal and same_document(doc)"
VALID = "tensor valid: bool[B, Nk]  mask valid[b, j]"
LEARNT = f"{CAUSAL}  tensor bias: f32[H, Nq] grad  score s + bias[h, i]"


SMALL = "schedule { Br = 32  Bc = 32  warps = 2  backward_Br = 32  backward_Bc = 32  backward_warps = 2 }"


def text_of(name: str, statements: str, head_dim: int = 16) -> str:
    return f"attention {name} {{ head_dim {head_dim}  dtype bf16  {statements} }}"


def listed(masks: str) -> AttentionOp:
    """With small tiles, so that short lengths have several."""
    return flashgen.loads(text_of(f"own_{masks}", f"{MASKS[masks]}  {SMALL}"), backend="emulator")


@functools.cache
def kernel_of(spec: AttentionSpec) -> EmulatedKernel:
    kernel = emulator_provider(spec, GPUS[EMULATED])(spec.head_dims[0], 0)
    assert isinstance(kernel, EmulatedKernel)
    return kernel


def op_of(op: AttentionOp, kernel: EmulatedKernel, name: str) -> AttentionOp:
    """The op of a kernel that was changed, under a name of its own."""
    spec = replace(op.spec, name=f"{op.spec.name}_{name}")
    return AttentionOp(OpParts(spec, {"cpu": Changed(op.spec, GPUS[EMULATED], kernel)}, op.sources, backend="emulator"))


class Changed(GpuProvider):
    """Another kernel under the plan and the sources of a spec."""

    def __init__(self, spec: AttentionSpec, target: GpuTarget, kernel: EmulatedKernel) -> None:
        super().__init__(spec, emulator_provider(spec, target).machines)
        self.changed = kernel

    def __call__(self, head_dim: HeadDim, index: int) -> EmulatedKernel:
        return self.changed


def documents(lengths: Sequence[int], size: int, rest: int, first: int = 0) -> Tensor:
    """Their numbers; ``rest`` behind the last."""
    numbers = np.full(size, rest, np.int32)
    at = 0
    for number, length in enumerate(lengths, first):
        numbers[at : at + length] = number
        at += length
    return torch.from_numpy(numbers)


@dataclass(frozen=True)
class Call:
    """Two batch entries, four query heads that share two of keys, their documents; some rows and keys have none."""

    q: Tensor
    k: Tensor
    v: Tensor
    row: Tensor
    column: Tensor

    @property
    def named(self) -> dict[str, Any]:
        return {"row": self.row, "column": self.column}

    @property
    def shape(self) -> Shape:
        (batch, heads, q_len, _), (kv_heads, kv_len) = self.q.shape, self.k.shape[1:3]
        return Shape(batch, heads, kv_heads, q_len, kv_len)


def call_of(masks: str, q_len: int = 150, kv_len: int = 171) -> Call:
    """Short documents next to longer ones; a mask that is shared has the first of them."""
    q, k, v = (normal(2, h, n, 16, seed=n + h).bfloat16() for h, n in ((4, q_len), (2, kv_len), (2, kv_len + 1)))
    rows = torch.stack([documents(x, q_len, -2) for x in ((20, 85, 10, 30), (50, 15), (0, 75, 75), (6, 45, 3))])
    lengths = ((35, 95, 41), (5, 150), (20,), (kv_len,))
    columns = torch.stack([documents(x, kv_len, -1, n) for x, n in zip(lengths, (0, 0, 7, 1), strict=True)])
    own: dict[str, tuple[Any, Any]] = {
        "all": (0, 0),
        "batch": (slice(2), slice(2)),
        "heads": (slice(4), slice(4)),
        "both": (slice(2), slice(4)),
    }
    of_rows, of_columns = own[masks]
    return Call(q, k, v[:, :, 1:], rows[of_rows].contiguous(), columns[of_columns].contiguous())


def results(op: AttentionOp, call: Call, **options: Any) -> list[Tensor]:
    """o and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    o: Tensor = op(*leaves, **(call.named | options))
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o_of(o))]


def truth_of(op: AttentionOp, call: Call) -> list[Tensor]:
    """The same in float64."""
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    o = op.reference(*leaves, **call.named, dtype=torch.float64)
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o_of(o))]


def d_o_of(o: Tensor) -> Tensor:
    return torch.cos(torch.arange(o.numel()).view(o.shape)).bfloat16().to(o)


def bytes_agree(op: AttentionOp, call: Call, counted: Sequence[Counted]) -> bool:
    """Predicted and counted, of both passes."""
    inputs = Inputs(call.q, call.k, call.v, call.named, {}, call.q, call.q)
    found = hbm_bytes(op, inputs, counted)
    assert set(found) == {"forward", "backward"}
    return all(each.predicted == each.counted > 0 for each in found.values())


def moved(counted: Sequence[Counted], field: str) -> list[int]:
    """Bytes of a call's own lists that each pass moved."""
    found = (each.report.traffic.get(f"workspace.{field}") for each in counted)
    return [0 if each is None else each.total for each in found]


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", MASKS)
def test_results_and_bytes(masks: str) -> None:
    """With lists as without, bit by bit; both as the float64 reference says; no byte that is not foreseen."""
    op = listed(masks)
    call, kernel = call_of(masks), kernel_of(op.spec)
    bare = op_of(op, replace(kernel, list_cache=ListCache()), "bare")
    with recording() as counted:
        own = results(op, call, deterministic=True)
    with recording() as without:
        expected = results(bare, call, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    for value, truth in zip(own, truth_of(op, call), strict=True):
        assert_close(value.double(), truth, 1e-2)
    assert [moved(counted, field)[n] > 0 for field in (OF_QUERIES, OF_KEYS) for n in (0, 1)] == [
        True,
        True,
        False,
        True,
    ]
    assert moved(without, OF_QUERIES) == moved(without, OF_KEYS) == [0, 0]
    assert bytes_agree(op, call, counted)
    assert bytes_agree(op, call, without)
    with recording() as atomic:
        results(op, call)
    assert bytes_agree(op, call, atomic)
    assert moved(atomic, OF_QUERIES)[1] == 0, "dQ is added up by the blocks of keys"


@pytest.mark.parametrize(("target", "mask"), [("sm_90a", CAUSAL), ("sm_90a", VALID), ("sm_80", LEARNT)])
def test_other_kernels(target: str, mask: str) -> None:
    """Warpgroups, with warps that copy and without; dQ by a kernel of its own, gradients that are measured first."""
    own = flashgen.loads(text_of(f"other_{target}", mask, head_dim=64), backend="reference").spec
    op = load_spec(own, "emulator", target)
    case = verify_case(op, own.head_dims[0], ElementType.BF16, Shape(2, 2, 1, 149, 149))
    assert case.ok, failures(case)
    assert case.hbm_bytes
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


@pytest.mark.parametrize("masks", ["all", "heads", "both"])
def test_a_call_that_is_divided(masks: str) -> None:
    """Each part makes the lists of its shard, one after another in one workspace."""
    op = listed(masks)
    call, kernel = call_of(masks), kernel_of(op.spec)
    expected = results(op, call, deterministic=True)
    for most in (4 * 150 * 16, 2 * 171 * 16, 2 * 150 * 16):
        divided = op_of(op, replace(kernel, most=most), f"divided_{most}")
        with recording() as counted:
            found = results(divided, call, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert moved(counted, OF_QUERIES)[0] > 0


def test_lists_of_several_windows() -> None:
    """More than 1024 tiles of keys, few of which are visited."""
    op = listed("all")
    q, k, v = (normal(1, 1, n, 16, seed=s).bfloat16() for s, n in enumerate((70, 66_100, 66_100)))
    row, column = documents((30, 20, 20), 70, -2), documents((100, 65_000, 900), 66_100, -1)
    row[30:50] = 5
    call = Call(q, k, v, row, column)
    with recording() as counted:
        o = op(q, k, v, **call.named)
    assert_close(o.double(), op.reference(q, k, v, **call.named, dtype=torch.float64), 1e-2)
    assert moved(counted, OF_QUERIES) > [0]


# Order ----------------------------------------------------------------------------------------------------------------


def started(kernel: EmulatedKernel, name: str, blocks: int) -> EmulatedKernel:
    """Only the first blocks of the kernels whose names begin so."""

    def find(of_pass: Any, values: Any) -> Compiled[Any]:
        found = kernel.find(of_pass, values)
        own = found.launches
        symbol = own.launches[-1].kernel.split("_d16_")[0] + f"_d16_{name}"
        few = (
            replace(each, grid=Count((), blocks)) if each.kernel.startswith(symbol) else each for each in own.launches
        )
        return replace(found, launches=replace(own, launches=tuple(few)))

    return replace(kernel, find=find)


@pytest.mark.parametrize("masks", ["all", "batch"])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_blocks_take_the_longest_lists_first(masks: str, group: int) -> None:
    """Those of a group of heads one list of their mask after another: the first blocks write what keeps most tiles.

    A group has as many heads as the cache holds what they read, of those that share a mask.
    """
    op = listed(masks)
    row, column = documents((130, 20), 150, -2), documents((151, 20), 171, -1)
    call, kernel = call_of(masks), kernel_of(op.spec)
    for numbers, first in ((call.row, row), (call.column, 1 - column)):
        numbers.reshape(-1, len(first))[0] = first
    plan = GPUS["sm_80"].plan(analyse(op.spec, op.spec.head_dims[0])).by_element[ElementType.BF16]
    rows, columns = call.row.reshape(-1, 150), call.column.reshape(-1, 171)
    keys_and_values, queries = 171 * (16 + 16) * 2, 150 * ((16 + 16) * 2 + 16 * 4)
    sides = (
        ("forward", 0, rows, plan.forward.Br, columns, plan.forward.Bc, 4, keys_and_values),
        ("keys", 2, columns, plan.backward.Bc, rows, plan.backward.Br, 2, queries),
        ("queries", 1, rows, plan.queries.Br, columns, plan.queries.Bc, 4, keys_and_values),
    )
    for name, result, of_own, own, of_visited, visited, heads, read in sides:
        lengths = visits_of(of_own, own, of_visited, visited)
        tiles, sharing = len(lengths) // len(rows), heads * 2 // len(rows)
        together = min(group, sharing)
        turns = [
            (first + n, tile)
            for first in range(0, 2 * heads, together)
            for mask in [first // sharing * tiles]
            for tile in sorted(range(tiles), key=lambda n: (-lengths[mask + n], n))
            for n in range(together)
        ]
        assert [tile for head, tile in turns if head == 0] != list(range(tiles))
        sized = replace(kernel, size=replace(kernel.size, cache_bytes=2 * group * read))
        for blocks in sorted({1, together + 1, min(tiles * together + 1, len(turns))}):
            few = op_of(op, started(sized, name, blocks), f"few_{name}_{group}_{blocks}")
            written = ~results(few, call, deterministic=True)[result].isnan().any(-1)
            expected = torch.zeros_like(written).reshape(2 * heads, -1)
            for head, tile in turns[:blocks]:
                expected[head, tile * own : (tile + 1) * own] = True
            assert torch.equal(written.reshape(expected.shape), expected), (name, blocks)


def visits_of(of_own: Tensor, own: int, of_visited: Tensor, visited: int) -> list[int]:
    """How many tiles each one visits, mask by mask: those whose ranges of documents meet its own."""
    return [
        sum(low <= high_of_own and low_of_own <= high for low, high in ranges(theirs, visited))
        for ours, theirs in zip(of_own, of_visited, strict=True)
        for low_of_own, high_of_own in ranges(ours, own)
    ]


def ranges(numbers: Tensor, tile: int) -> list[tuple[int, int]]:
    """Of every tile."""
    return [(int(each.min()), int(each.max())) for each in torch.split(numbers, tile)]
