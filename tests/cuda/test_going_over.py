"""Blocks with producer warps go over from one query tile into the next: its first product beside O of this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.types import ElementType
from tests.cuda.helpers import planned
from tests.cuda.hopper import changed, emitted_for, hopper, random
from tests.slices import one_of

SERVED = "schedule { Br = 128  Bc = 64  warps = 8 }"
BLOCKS = "layout block 64: hash(I, J, 5) % 7 == 0"
# Whether Q has two places, the spec, queries and keys.
CASES: dict[str, tuple[int, str, int, int]] = {
    "nothing masked": (2, f"head_dim 64  {SERVED}", 700, 300),
    "causal": (2, f"head_dim 64  mask causal  {SERVED}", 700, 500),
    "one key tile": (2, f"head_dim 64  {SERVED}", 700, 40),
    "few visits, or none": (2, f"head_dim 64  {BLOCKS}  {SERVED}", 1500, 700),
    "tiles that visit none between others": (2, f"head_dim 64  mask causal and i // 128 % 3 != 1  {SERVED}", 900, 500),
    "documents": (2, "head_dim 128  tensor doc: i32[B, Nk]  mask causal and same_document(doc)", 600, 600),
    "sink": (2, f"head_dim 64  tensor sink: f32[H]  weights softmax(sink = sink[h])  mask causal  {SERVED}", 600, 300),
    "distance": (2, f"head_dim 64  tensor m: f32[H]  score s - m[h] * (i - j)  mask causal  {SERVED}", 500, 400),
    "soft-cap": (2, f"head_dim 64  score 3 * tanh(s / 3)  mask causal  {SERVED}", 500, 300),
    "normalize": (2, f"head_dim 64  weights normalize(relu(s) ** 2 + 0.01)  mask causal  {SERVED}", 500, 300),
    "pointwise": (2, f"head_dim 64  weights relu(s) / Nk  mask causal  {SERVED}", 500, 300),
    "dropout": (2, f"head_dim 64  dropout 0.2  mask causal  {SERVED}", 500, 300),
    "three warpgroups": (2, "head_dim 64", 900, 300),
    "wide keys": (1, "head_dim 128", 500, 400),
    "wide heads": (1, "head_dim 256", 500, 200),
    "192/128": (1, "head_dim 192/128", 500, 300),
}
QUICK = ("nothing masked", "tiles that visit none between others", "wide heads")
JOINS = r"(?<=if \()visits\.count\(\) <= 0"


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_going_over(name: str) -> None:
    """Bit by bit what comes of tiles one after another."""
    places, text, q_len, kv_len = CASES[name]
    op = hopper(text)
    assert places_of_q(text) == places
    width = op.spec.head_dims[0]
    q = random(2, 4, q_len, width.qk, seed=0)
    k, v = random(2, 2, kv_len, width.qk, seed=1), random(2, 2, kv_len, width.v, seed=2)
    of_heads = torch.linspace(-0.3, 1.2, 4)
    documents = (torch.arange(2 * kv_len).reshape(2, kv_len) // 150 % 4).int()
    known = {"doc": documents, "m": of_heads, "sink": of_heads}
    arguments: dict[str, Any] = {each: known[each] for each in known if f"tensor {each}:" in text}
    arguments |= {"seed": 3} if name == "dropout" else {}
    apart = changed(f"apart_{list(CASES).index(name)}", text, "forward", JOINS, "true")
    has_lse = name != "pointwise"
    found, others = (
        each(q, k, v, **arguments, return_lse=True) if has_lse else (each(q, k, v, **arguments),)
        for each in (op, apart)
    )
    exact = op.reference(q, k, v, **arguments, dtype=torch.float64)
    assert (found[0].double() - exact).abs().max() < 0.02
    assert all(torch.equal(x, y) for x, y in zip(found, others, strict=True))


def test_other_types_in_one_source() -> None:
    """float32, which has no warps that copy, and no ring of V."""
    op = hopper("head_dim 16", "f32, f16, bf16")
    q, k, v = (random(1, 2, 200, 16, seed=seed).float() for seed in range(3))
    assert (op(q, k, v).double() - op.reference(q, k, v, dtype=torch.float64)).abs().max() < 1e-4


def places_of_q(text: str) -> int:
    tiles = emitted_for(text).plan.by_element[ElementType.BF16].forward
    assert tiles.producers
    assert tiles.overlaps_next
    return tiles.q_places


def test_who_goes_over() -> None:
    """Not where others look at K first or pairs read values, not in clusters; f32 has no warps that copy."""
    for text, expected in (
        ("head_dim 128  mask causal", True),
        ("head_dim 128  score -sqdist", False),
        ("head_dim 128  tensor t: f32[Nq, Nk]  score s + t[i, j]", False),
        ("head_dim 512", False),
        ("head_dim 256", True),
        ("head_dim 256  mask causal", False),  # short rows would wait for the one place of Q
    ):
        _, plan = planned(f"attention a {{ {text} }}", "sm_90a")
        for element, tiles in plan.by_element.items():
            assert tiles.forward.overlaps_next is (expected and element is not ElementType.F32)


PADDING = "padding"
TEXTS = {
    1: "head_dim 256",
    2: f"head_dim 64  mask causal and i // 128 % 3 != 1  {SERVED}",
    PADDING: f"head_dim 64  tensor kept: bool[B, Nk]  mask kept[b, j]  {SERVED}",
}
# In which text, by places of Q: what was planted, what the emulator may call it; nothing where results are wrong.
MISTAKES: dict[str, tuple[int | str, str, str, set[FaultKind]]] = {
    "Q of the next tile into the place of this one": (
        2,
        r"q_place = stage_of<q_places>\(ordinal\);\n( +q_signals\(\)\.await_room)",
        r"\1",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "Q of the next tile where this one's is still multiplied": (
        1,
        r"if \(n \+ 1 == visits\.count\(\)\) release_q",
        "if (fg::max(n, 1) + 1 == fg::max(visits.count(), 2) - (n + 1 < visits.count())) release_q",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER},
    ),
    "no wait for Q of the next tile": (
        2,
        r"    this->q_signals\(\)\.await\(ordinal\);\n(    if constexpr)",
        r"\1",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "no wait for the next list": (
        2,
        r"    this->list_signals\(\)\.await\(list \+ 1\);\n",
        "",
        {FaultKind.RACE, FaultKind.UNINITIALIZED},
    ),
    "a list that is given back while it is read": (
        2,
        (
            r"(?s)(    const Place before = this->place\(\);\n    const VTile.*?)"
            r"    this->list_signals\(\)\.release\(list\+\+\);\n"
        ),
        r"    this->list_signals().release(list);\n\1    ++list;\n",
        {FaultKind.RACE, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "K is given back before its scores are there": (
        2,
        r"    wait_products<pending>\(s\);\n((?:.*\n){2}      if constexpr .*release_k\(n\);\n    }\n)",
        r"\1    wait_products<pending>(s);\n",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "what the mask reads is given back with K": (
        PADDING,
        (
            r"(?s)(      release_q_of_last\(n\);\n)"
            r"((?-s:.*\n){1,9}    if constexpr \(P::maxima_by_sums\).{1,700}?    }\n)"
            r"    if constexpr \([^\n]*\) release_k\(n\);\n"
        ),
        r"\1      release_k(n);\n\2",
        {FaultKind.RACE},
    ),
    "V is given back while it is multiplied": (
        2,
        r"    wait_products<1>\(o, p\);\n    release_part\(0\);\n",
        r"    release_part(0);\n    wait_products<1>(o, p);\n",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "no wait for V": (
        2,
        r"      await_v\(n - 1\);\n      warpgroup_arrive",
        "      warpgroup_arrive",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "no wait for the last V": (
        2,
        r"    await_v\(-1\);\n",
        "",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "V signals that K is there": (
        2,
        r"uint64_t\* const there = v_signals\(\)\.full",
        "uint64_t* const there = signals().full",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "tiles that are counted twice": (
        2,
        r"parts_before \+= count;",
        "parts_before += count + 1;",
        {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.MBARRIER, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
    "no wait for the last product": (
        2,
        r"    wait_products<1>\(o, p\);\n(    release_part\(0\);\n    this->write)",
        r"\1",
        {FaultKind.NOT_AWAITED},
    ),
    "the place of this tile is read when it is the next one's": (
        2,
        r"(    release_part\(0\);\n)    this->write\(before, factors\);",
        r"\1    this->write(this->place(), factors);",
        set[FaultKind](),
    ),
    "no turn for the next warpgroup": (
        2,
        r"mbarrier_arrive\(this->start_signals\(group\(\)\)\.full\(list\)\)",
        "again(0)",
        {FaultKind.DEADLOCK},
    ),
    "the same turn for every other list": (
        2,
        r"start_signals\(group\(\) - 1\)\.await\(list\)",
        "start_signals(group() - 1).await(list % 2)",
        {FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "no turn after a list without visits": (
        2,
        r"if constexpr \(overlaps_next\) let_next_start\(list\);",
        "",
        {FaultKind.MBARRIER, FaultKind.DEADLOCK},
    ),
    "O is not cleared": (2, r"    clear_by_moves\(\);\n(    if constexpr .*\n      if)", r"\1", set[FaultKind]()),
    "no wait for the room of Q": (
        1,
        r"    q_signals\(\)\.await_room\(ordinal\);\n",
        "",
        {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "a list that is given back before its last visit is known": (
        2,
        (
            r"(      const bool done = this->ends\(\);\n      if constexpr .*\n)"
            r"(      this->list_signals\(\)\.release\(list\);\n)"
        ),
        r"\2\1",
        {FaultKind.RACE},
    ),
}


def go_over(name: str, which: int | str, old: str, new: str) -> tuple[Tensor, Tensor]:
    """What is found over blocks with one change in the source, and what is right."""
    op = changed(name, TEXTS[which], "forward", old, new)
    assert places_of_q(TEXTS[which]) == (1 if which == 1 else 2)
    width = op.spec.head_dims[0].qk
    q = random(2, 4, 700, width, seed=0)
    k, v = (random(2, 2, 500, width, seed=seed) for seed in (1, 2))
    arguments: dict[str, Any] = {"kept": torch.arange(1000).reshape(2, 500) % 7 > 0} if which == PADDING else {}
    return op(q, k, v, **arguments), op.reference(q, k, v, **arguments, dtype=torch.float64)


@pytest.mark.parametrize("name", one_of(4, MISTAKES))
def test_mistakes_of_going_over(name: str) -> None:
    which, old, new, kinds = MISTAKES[name]
    planted = f"planted_going_over_{list(MISTAKES).index(name)}"
    if kinds:
        with pytest.raises(EmulatorError) as caught:
            go_over(planted, which, old, new)
        assert caught.value.kind in kinds, str(caught.value)
    else:
        found, exact = go_over(planted, which, old, new)
        assert not (found.double() - exact).abs().max() < 0.02
