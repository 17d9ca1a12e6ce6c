"""Sequences over ranks: every method and every gradient against one process, with gloo."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.distributed.parallel import _no_heads
from tests.distributed.cases import Case, all_errors
from tests.distributed.ranks import run

CAUSAL = "attention causal { head_dim 16 mask causal }"
SPECS = {
    "causal": CAUSAL,
    "window": "attention near { head_dim 16 mask window(20) }",
    "alibi": "attention slopes { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * abs(i - j) mask causal }",
    "documents": "attention packed { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal }",
    "pairs": "attention pairs { head_dim 16 tensor t: f32[H, Nq, Nk] grad param w: f32 grad score s * w + t[h, i, j] }",
    "sinks": "attention sinks { head_dim 16 tensor z: f32[H] grad weights softmax(sink = z[h]) mask window_left(30) }",
    "sigmoid": "attention sigmoid { head_dim 16 weights sigmoid(s) mask causal }",
    "dropped": "attention dropped { head_dim 16 mask causal dropout 0.3 }",
    "strided": "attention strided { head_dim 16 mask causal and (i - j) % 5 == 0 weights normalize(exp(s)) }",
    "selected": "attention lists { head_dim 16 tensor idx: i32[B, Hkv, Nq, H] select 16: idx[b,hkv,i,:] mask causal }",
    "uneven": "attention uneven { head_dim 16/24 score s - 0.01 * sqdist mask i // 30 == j // 30 or j < 3 }",
}


def check(world: int, cases: list[Case], tolerance: float = 2e-5) -> None:
    for of_rank in run(all_errors, world, cases):
        for case, (errors, sent, predicted) in zip(cases, of_rank, strict=True):
            assert max(errors.values()) <= tolerance, (case, errors)
            assert sent == predicted, (case, sent, predicted)


def options(name: str) -> dict[str, int]:
    return {"seed": 5} if name == "dropped" else {}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_keys_that_the_mask_keeps(world: int) -> None:
    check(world, [Case(text, options=options(name)) for name, text in SPECS.items()])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_change_places(world: int) -> None:
    specs = {name: text for name, text in SPECS.items() if world == 2 or "hkv" not in text}
    check(world, [Case(text, "ulysses", options=options(name)) for name, text in specs.items()])


def test_heads_stay_where_a_spec_tells_copies_of_key_heads_apart() -> None:
    spec = flashgen.loads(SPECS["selected"], backend="reference").spec
    assert _no_heads(spec, 4, 2, 2) == ""
    assert _no_heads(spec, 4, 2, 4) == "'lists' reads hkv, and 4 ranks share 2 key/value heads"


def test_any_partition_lengths_types_and_what_sends_less() -> None:
    check(
        3,
        [
            Case(CAUSAL, dealt="head_tail"),
            Case(CAUSAL, dealt="contiguous", sizes=(1, 3, 3, 2)),
            Case(CAUSAL, dealt=None, sizes=(1, 2, 1, 100)),
            Case(SPECS["window"], "auto", sizes=(1, 3, 3, 301)),
            Case(CAUSAL, "auto", sizes=(1, 6, 6, 300)),
            Case(CAUSAL, sizes=(1, 2, 2, 0)),
        ],
    )
    check(2, [Case(SPECS["alibi"], dtype=torch.bfloat16), Case(CAUSAL, "ulysses", dtype=torch.float16)], tolerance=8e-3)
