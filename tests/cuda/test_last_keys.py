"""Blocks beside warps that copy take one key tile after another, and several share each of the last ones."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from flashgen.hosts.emulated import SIZE
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.targets.gpu.launches import LEAST_PART, parts_of_last, shares_last
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import planned
from tests.cuda.hopper import changed, hopper, random

PLAIN = "head_dim 64"
# Of 5 key tiles two blocks have two each, and half of the last one's queries.
SHAPE = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 2 * 128 * LEAST_PART - 5, "kv_len": 4 * 128 + 9}
PLANTED = {
    "a tile before the other is done": ("fg::barrier_meet(Base::TILE_KNOWN, P::threads);", ""),
    "one place for the next tile and this one": ("Memory::NEXT_TILES) + n % (moves ? 2 : 4)", "Memory::NEXT_TILES)"),
    "parts that are not all there": ("if (fg::shared_load(last) == 0) return false;", ""),
    "one place for all parts": ("int64_t(unit) * (CONSUMERS", "int64_t(group) * (CONSUMERS"),
    "queries of all parts": ("tiles() * (part + 1) / parts", "tiles()"),
}


def gradients(op: AttentionOp, *, exact: bool = False) -> list[Tensor]:
    """Of q, k and v; ``exact``: by the reference in float64."""
    rows = (("heads", "q_len"), ("kv_heads", "kv_len"), ("kv_heads", "kv_len"))
    q, k, v = (random(1, SHAPE[h], SHAPE[n], 64, seed=n_ + 1).requires_grad_() for n_, (h, n) in enumerate(rows))
    o = op.reference(q, k, v, dtype=torch.float64) if exact else op(q, k, v)
    d_o = random(*o.shape, seed=9).to(o.dtype)
    return [each.double() for each in torch.autograd.grad(o, (q, k, v), d_o)]


def is_right(op: AttentionOp) -> bool:
    try:
        found = gradients(op)
    except EmulatorError:
        return False
    pairs = zip(found, gradients(op, exact=True), strict=True)
    return all(bool((x - y).abs().max() <= 0.02 * y.abs().max() + 1e-3) for x, y in pairs)


def test_the_last_key_tile_is_shared() -> None:
    variant, plan = planned(f"attention plain {{ dtype bf16  {PLAIN} }}", "sm_90a")
    (element,) = plan.elements
    assert shares_last(variant, element.backward)
    assert parts_of_last(element.backward, SHAPE, SIZE.multiprocessors) == (1, 2)
    op = hopper(PLAIN)
    assert is_right(op)
    first, second = (gradients(op)[1:] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))  # parts are added up in one order


@pytest.mark.parametrize(
    "text", ["head_dim 128", f"{PLAIN}  mask causal", f"{PLAIN}  tensor t: f32[Nq] grad score s + t[i]"]
)
def test_others_keep_one_tile_a_block(text: str) -> None:
    """Wide rows, key tiles of unlike lengths, and where dQ has a kernel of its own."""
    variant, plan = planned(f"attention plain {{ dtype bf16  {text} }}", "sm_90a")
    assert not shares_last(variant, plan.elements[0].backward)


def test_bytes_are_those_predicted() -> None:
    """K and V of the last key tile are read by both blocks."""
    op = hopper(PLAIN)
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, Shape(1, 2, 1, SHAPE["q_len"], SHAPE["kv_len"]))
    assert case.ok
    assert all(each.predicted == each.counted > 0 for each in case.hbm_bytes.values())


@pytest.mark.parametrize(
    ("tiles", "parts"), [(2048, (68, 5)), (2046, (66, 2)), (1980, (0, 1)), (1024, (100, 5)), (4096, (4, 8))]
)
def test_parts(tiles: int, parts: tuple[int, int]) -> None:
    """On 132 multiprocessors: as many as end soonest."""
    (element,) = planned(f"attention plain {{ dtype bf16  {PLAIN} }}", "sm_90a")[1].elements
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 16384, "kv_len": 128 * tiles}
    assert parts_of_last(element.backward, sizes, 132) == parts


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_mistakes_show(name: str) -> None:
    old, new = PLANTED[name]
    assert not is_right(changed(f"last_{list(PLANTED).index(name)}", PLAIN, "backward", re.escape(old), new))
