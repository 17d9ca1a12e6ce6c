"""Blocks of one warpgroup, whose lists come while they work on another query tile, go over into the next one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.schedule import ListCache
from tests.cuda.hopper import changed, hopper, random

BLOCKS = "layout block 64: I == J or hash(I, J, 3) % 4 == 0"
PASSING: dict[str, tuple[str, tuple[int, ...]]] = {  # batch, heads, heads of keys, queries, keys
    "blocks": (BLOCKS, (1, 6, 3, 500, 640)),
    "few visits, or none": ("layout block 64: hash(I, J, 5) % 7 == 0", (2, 4, 2, 700, 640)),
    "partial and full tiles": ("mask hash(i // 100, j // 130, 7) % 3 == 0 and i % 97 != 5", (1, 4, 4, 600, 700)),
    "documents": ("tensor doc: i32[B, Nk]  mask causal and same_document(doc)", (2, 4, 2, 600, 600)),
    "a head's bias": (f"tensor tau: f32[H]  score s * tau[h]  {BLOCKS}", (1, 6, 3, 500, 640)),
    "distance": (f"tensor slope: f32[H]  score s - slope[h] * (i - j)  {BLOCKS}", (1, 6, 3, 500, 640)),
    "sink": (f"tensor sink: f32[H]  weights softmax(sink = sink[h])  {BLOCKS}", (1, 6, 3, 500, 640)),
    "normalize": (f"weights normalize(relu(s) ** 2 + 0.01)  {BLOCKS}", (1, 6, 3, 500, 640)),
    "pointwise": (f"weights relu(s) / Nk  {BLOCKS}", (1, 6, 3, 500, 640)),
    "dropout": (f"dropout 0.2  {BLOCKS}", (1, 6, 3, 500, 640)),
}


EACH = [*((name, "64", "bf16") for name in PASSING), ("blocks", "64/32", "bf16"), ("normalize", "128", "f16")]


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [pytest.param(*each, marks=pytest.mark.slow if n % 2 else ()) for n, each in enumerate(EACH)],
)
def test_from_tile_to_tile(name: str, head_dim: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's first products beside the last ones of another; bit by bit what comes of tiles one after another."""
    text, (batch, heads, kv_heads, q_len, kv_len) = PASSING[name]
    op = hopper(f"head_dim {head_dim}  {text}", dtype)
    width, v_width = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    element = torch.float16 if dtype == "f16" else torch.bfloat16
    q = random(batch, heads, q_len, width, seed=0).to(element)
    k = random(batch, kv_heads, kv_len, width, seed=1).to(element)
    v = random(batch, kv_heads, kv_len, v_width, seed=2).to(element)
    of_heads = torch.linspace(-0.3, 1.2, heads)
    documents = torch.arange(batch * kv_len).reshape(batch, kv_len) // 150 % 4
    known = {"doc": documents.int(), "tau": of_heads, "slope": of_heads, "sink": of_heads}
    arguments: dict[str, Any] = {each: known[each] for each in known if f"tensor {each}" in text}
    arguments |= {"seed": 3} if name == "dropout" else {}

    def outputs() -> tuple[Tensor, ...]:
        return (op(q, k, v, **arguments),) if name == "pointwise" else op(q, k, v, **arguments, return_lse=True)

    own = outputs()
    exact = op.reference(q, k, v, **arguments, dtype=torch.float64)
    assert (own[0].double() - exact).abs().max() < 0.02
    monkeypatch.setattr(ListCache, "find", lambda *_: None)
    assert all(torch.equal(x, y) for x, y in zip(own, outputs(), strict=True))


@pytest.mark.slow
def test_tiles_of_several_windows_do_not_pass_on() -> None:
    op = hopper("head_dim 16  mask hash(i // 64, j // 64, 3) % 150 == 0")
    q, k, v = random(1, 1, 640, 16, seed=0), random(1, 1, 66000, 16, seed=1), random(1, 1, 66000, 16, seed=2)
    exact = op.reference(q, k, v, dtype=torch.float32)
    assert (op(q, k, v) - exact).abs().max() < 0.02


# What was planted, what the emulator may call it.
PASSING_MISTAKES = {
    "Q of the next tile into the place of this one": (
        "copy_q(q_tile(1 - q_place),",
        "copy_q(q_tile(q_place),",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "bytes of Q are not counted": (
        "mbarrier_expect(there, QTile::bytes + KTile::bytes);",
        "mbarrier_expect(there, KTile::bytes);",
        {FaultKind.MBARRIER},
    ),
    "the next tile before its list is there": (
        "    copy_async_wait<0>();  // what this thread reads of it\n",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "no wait for Q of the next tile": (
        "    this->q_signals().await(ordinal);\n    q_place = 1 - q_place;",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "K of the next tile into a place that is not free": (
        "if (n + 1 == visits.count() && knows_next()) this->begin_next(n + 1);",
        "if (n + 1 == visits.count() && knows_next()) this->begin_next(n);",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "the next list before everyone sees it": (
        "number + visits_of(counts));\n  Team::barrier();",
        "number + visits_of(counts));",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "a list that only its copiers have waited for": (
        "    copy_async_wait<0>();\n    await_part(n);",
        "    await_part(n);",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "the place of this tile is read when it is the next one's": (
        "    wait_products<0>(o, p);\n    this->write(before, factors);",
        "    wait_products<0>(o, p);\n    this->write(this->place(), factors);",
        set[FaultKind](),
    ),
    "no wait for the last product": (
        "    wait_products<0>(o, p);\n    this->write(before, factors);",
        "    this->write(before, factors);",
        {FaultKind.NOT_AWAITED},
    ),
    "stages that begin anew": (
        "n = int(stage_of<Base::NUMBERS>(n));",
        "n = 0;",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
    "phases that begin anew": (
        "n = int(stage_of<Base::NUMBERS>(n));",
        "n = int(stage_of<Base::stages>(n));",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
}


def pass_on(name: str, old: str, new: str) -> tuple[Tensor, Tensor]:
    """What is found over blocks with one change in the source, and what is right."""
    text, (batch, heads, kv_heads, q_len, kv_len) = PASSING["blocks"]
    op = changed(name, f"head_dim 64  {text}", "forward", re.escape(old), new)
    q = random(batch, heads, q_len, 64, seed=0)
    k, v = (random(batch, kv_heads, kv_len, 64, seed=seed) for seed in (1, 2))
    return op(q, k, v), op.reference(q, k, v, dtype=torch.float64)


@pytest.mark.parametrize("name", PASSING_MISTAKES)
def test_mistakes_from_tile_to_tile(name: str) -> None:
    old, new, kinds = PASSING_MISTAKES[name]
    planted = f"planted_passing_{list(PASSING_MISTAKES).index(name)}"
    if kinds:
        with pytest.raises(EmulatorError) as caught:
            pass_on(planted, old, new)
        assert caught.value.kind in kinds, str(caught.value)
    else:
        found, exact = pass_on(planted, old, new)
        assert not (found.double() - exact).abs().max() < 0.02
