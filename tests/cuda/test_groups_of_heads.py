"""Where rows of tiles grow blocks with warps that copy take the longest ones of several heads before shorter ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.analysis.variant import Variant, analyse
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.kinds.cached import CACHED
from flashgen.kinds.ragged import RAGGED
from flashgen.language import parse_text
from flashgen.targets.gpu import model
from flashgen.targets.gpu.recipe import decide
from tests.cuda.hopper import changed, hopper, random

# Texts of their own: another rule makes another source of the same spec.
CAUSAL = "head_dim {}  score s * {}  mask causal"
SHARED = "head_dim 128  tensor bias: bf16[H, Nq, Nk] grad  score s * {} + bias[h, i, j]  mask causal"

SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ((1, 1), (4, 2))]


def variant(text: str) -> Variant:
    spec = parse_text(f"attention a {{ {text} }}").specs[0]
    return analyse(spec, spec.head_dims[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head_dim 64  mask causal", True),
        ("head_dim 64  mask causal  tensor m: f32[H]  score s - m[h] * (i - j)", True),
        ("head_dim 64", False),  # rows of one length
        ("head_dim 64  mask causal and window_left(100)", False),
        ("head_dim 64  tensor doc: i32[B, Nk]  mask causal and same_document(doc)", False),
        ("head_dim 64  tensor t: bf16[H, Nq, Nk]  score s + t[h, i, j]  mask causal", True),
        ("head_dim 64  tensor t: bf16[H, Nq, Nk]  score s + t[h, i, j]", False),
    ],
)
def test_where(text: str, expected: bool) -> None:
    """Long rows of several lengths."""
    of = variant(text)
    assert decide(of).in_groups is expected
    assert not decide(replace(of, kind=RAGGED)).in_groups
    assert not decide(replace(of, kind=CACHED)).in_groups


@pytest.mark.parametrize("heads", [*SLOW, (7, 7), (10, 5)])
@pytest.mark.parametrize("limit", [1, 1_700_000, 20_000_000])
def test_every_tile_once(limit: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one head, of three and four, and one of all; forward, and backward with nine key tiles."""
    monkeypatch.setattr(model, "CACHE_OF_GROUPS", limit)
    check(CAUSAL.format(128, 0.1 + 0.001 * len(str(limit))), heads)


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.slow), 2_300_000])
def test_every_tile_of_shared_pairs_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one head, and of two and three, each with its batch entries."""
    monkeypatch.setattr(model, "CACHE_OF_GROUPS", limit)
    check(SHARED.format(0.1 + 0.001 * len(str(limit))), (10, 5), bias=random(10, 300, 1100, seed=4))


def check(text: str, heads: tuple[int, int], **captured: torch.Tensor) -> None:
    op = hopper(text)
    tiles = next(iter(op.plan.values())).elements[0]
    assert tiles.forward.producers
    assert tiles.backward.producers
    many, few = heads
    q, d_o = random(2, many, 300, 128, seed=0), random(2, many, 300, 128, seed=3)
    k, v = random(2, few, 1100, 128, seed=1), random(2, few, 1100, 128, seed=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *captured.values())]
    exact = [x.double().requires_grad_() for x in (q, k, v, *captured.values())]
    named: dict[str, Any] = dict(zip(captured, leaves[3:], strict=True))
    wide: dict[str, Any] = dict(zip(captured, exact[3:], strict=True))
    o = op(leaves[0], leaves[1], leaves[2], **named)
    wanted = op.reference(exact[0], exact[1], exact[2], dtype=torch.float64, **wide)
    assert (o.double() - wanted).abs().max() < 0.02
    found = torch.autograd.grad(o, leaves, d_o)
    for x, y in zip(found, torch.autograd.grad(wanted, exact, d_o.double()), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize(
    ("text", "place"),
    [(CAUSAL.format(128, 0.2), r"first \+ \(own - tile \* heads\)"), (SHARED.format(0.2), r"b \* total \* sharers \+")],
)
def test_tiles_of_others(text: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks that take one tile, of another group or batch entry, are seen."""
    monkeypatch.setattr(model, "CACHE_OF_GROUPS", 400_000)
    new = "(own - tile * heads)" if "own" in place else ""
    op = changed(f"planted_groups_{len(place)}", text, "forward", place, new)
    q, k, v = random(2, 7, 300, 128, seed=0), random(2, 7, 410, 128, seed=1), random(2, 7, 410, 128, seed=2)
    captured: dict[str, Any] = {"bias": random(7, 300, 410, seed=4)} if "bias" in text else {}
    with pytest.raises(EmulatorError) as caught:
        op(q, k, v, **captured)
    assert caught.value.kind is FaultKind.GLOBAL_RACE
