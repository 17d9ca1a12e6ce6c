"""Which rows of a rank one call computes, what travels for it, and how often a key's gradient is added."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashgen
from flashgen.distributed.blocks import Held, NeededKeys, Span, joined, mask_of, needs_of
from flashgen.distributed.key_rows import GradientSum, steps_of
from flashgen.distributed.partition import partition
from flashgen.distributed.rounds import Pace, Rounds, overlaps, rounds_of

SPECS = {
    "causal": "mask causal",
    "window": "mask window_left(40)",
    "documents": "mask i // 37 == j // 37 and causal",
    "strided": "mask (i - j) % 64 < 3 and causal",
    "all": "",
}
SLOW = Pace(pair=1e-9, travel=1.0, copy=0.0, merge=0.0, call=0.0)
FAST = Pace(pair=1e-9, travel=0.0, copy=0.0, merge=1.0, call=1.0)
COPIES = Pace(pair=0.0, travel=0.0, copy=1.0, merge=1.0, call=1.0)


def _needs(name: str, world: int, method: str, length: int = 203) -> tuple[NeededKeys, Held]:
    op = flashgen.loads(f"attention rounds_{name} {{ head_dim 16 {SPECS[name]} }}", backend="reference")
    sizes = {"B": 1, "H": 1, "Hkv": 1, "Nq": length, "Nk": length}
    held = partition(op, length, world, method=method).spans
    return needs_of(mask_of(op.spec, op.spec.head_dims[0], sizes, {}), held), held


def _positions(spans: Any) -> list[int]:
    return [n for span in spans for n in range(*span)]


@pytest.mark.parametrize("pace", [None, SLOW, FAST])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("method", ["head_tail", "contiguous"])
@pytest.mark.parametrize("name", SPECS)
def test_each_row_sees_each_key_that_it_needs_once(name: str, method: str, at_once: bool, pace: Pace | None) -> None:
    for world in (1, 2, 3):
        needs, held = _needs(name, world, method)
        for rank in range(world):
            plan = rounds_of(needs, held, rank, at_once=at_once, pace=pace)
            rows = _positions(held[rank])
            assert _positions(of.rows for of in plan.segments) == list(range(len(rows)))
            seen: dict[int, list[int]] = {row: [] for row in range(len(rows))}
            for unit in itertools.chain.from_iterable(each.units for each in plan.rounds):
                assert rows[unit.rows[0] : unit.rows[1]] == list(
                    range(unit.q_start, unit.q_start + unit.rows[1] - unit.rows[0])
                )
                keys = range(unit.kv_start, unit.kv_start + unit.keys[1] - unit.keys[0])
                for row in range(*unit.rows):
                    seen[row] += keys
                # Its own keys are where it says, and each key has one gradient.
                parts = sorted(part for part, _ in (*unit.own, *unit.foreign))
                assert _positions(parts) == list(range(len(keys)))
                for part, at in unit.own:
                    assert [keys[n] for n in range(*part)] == rows[at[0] : at[1]]
            for span, query_runs in zip(held[rank], needs.query_runs[rank], strict=True):
                for query_run in query_runs:
                    for position in range(*query_run.queries):
                        row = rows.index(position)
                        assert len(seen[row]) == len(set(seen[row]))
                        assert set(_positions(query_run.keys)) <= set(seen[row]), (span, position)


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_one_call_computes_rows_that_wait_for_one_round(name: str) -> None:
    needs, held = _needs(name, 2, "contiguous" if name == "window" else "head_tail")
    plans = [rounds_of(needs, held, rank, at_once=True, pace=FAST) for rank in range(2)]
    assert all(of.is_whole for plan in plans for of in plan.segments)
    assert [len(plan.segments) for plan in plans] == [len(own) for own in held]


def test_own_keys_go_first_where_travel_would_be_waited_for() -> None:
    needs, held = _needs("causal", 2, "head_tail")
    plan = rounds_of(needs, held, 0, at_once=True, pace=SLOW)
    assert [of.is_whole for of in plan.segments] == [True, False]
    assert len(plan.rounds[0].units) == 3
    window, own = _needs("window", 2, "contiguous")
    split = rounds_of(window, own, 1, at_once=True, pace=SLOW)
    assert [unit.rows for unit in split.rounds[0].units][-1][1] == split.segments[-1].rows[1]
    assert len(split.segments) == 2


def test_rows_go_alone_where_that_leaves_fewer_own_keys_to_copy() -> None:
    needs, held = _needs("documents", 2, "contiguous")
    copied = []
    for pace in (FAST, COPIES):
        plan = rounds_of(needs, held, 1, at_once=True, pace=pace)
        assert all(of.is_whole for of in plan.segments)
        copied.append(sum(there[1] - there[0] for _, there in plan.rounds[1].own))
    assert copied[1] < 20
    assert copied[0] > 100


def test_rows_that_need_no_other_rank_are_told_apart() -> None:
    """A window of 512 on a rank of 8,192: hardly more rows wait for keys of others than see some."""
    op = flashgen.loads("attention near { head_dim 16 mask causal and window_left(512) }", backend="reference")
    sizes = {"B": 1, "H": 1, "Hkv": 1, "Nq": 16384, "Nk": 16384}
    held = partition(op, 16384, 2, method="contiguous").spans
    needs = needs_of(mask_of(op.spec, op.spec.head_dims[0], sizes, {}), held)
    plan = rounds_of(needs, held, 1, at_once=True, pace=COPIES)
    assert [len(each.units) for each in plan.rounds] == [1, 1]
    (unit,) = plan.rounds[1].units
    assert 511 <= unit.rows[1] - unit.rows[0] <= 768
    assert needs.are_few(held)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_sent_is_what_is_received(name: str) -> None:
    needs, held = _needs(name, 3, "head_tail", 2003)
    for at_once in (True, False):
        plans: list[Rounds] = [rounds_of(needs, held, rank, at_once=at_once) for rank in range(3)]
        for number in range(1, len(plans[0].rounds)):
            sent = [
                (rank, each.rank, _count(each.keys)) for rank in range(3) for each in plans[rank].rounds[number].sent
            ]
            taken = [(each.rank, rank, each.count) for rank in range(3) for each in plans[rank].rounds[number].received]
            assert sorted(sent) == sorted(taken)


def _count(which: Any) -> int:
    return len(which) if isinstance(which, torch.Tensor) else which[1] - which[0]


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_gradient_are_added_where_they_belong(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total, wanted = GradientSum(17), torch.zeros(2, 1, 2, 17, 3)
    for _ in range(int(torch.randint(0, 6, (), generator=generator))):
        first, last = sorted(torch.randint(0, 18, (2,), generator=generator).tolist())
        part = torch.randint(-8, 8, (2, 1, 2, last - first, 3), generator=generator).float()
        wanted[..., first:last, :] += part
        # Of some parts rows are named by number; those of k and v may be apart.
        at = torch.arange(first, last) if seed % 3 == 0 else (first, last)
        total.add(at, (part,) if seed % 2 else (part[0], part[1]))
    found = torch.full(wanted.shape, 7.0, dtype=torch.bfloat16)
    total.put((found,) if seed % 2 else (found[0], found[1]))
    assert torch.equal(found.float(), wanted)


def test_parts_are_added_in_one_order_wherever_they_lie() -> None:
    """The longest first, whichever came first; each run of rows is written once."""
    assert steps_of(((4, 8), (0, 10)), 12) == (((0, 4), (1,)), ((4, 8), (1, 0)), ((8, 10), (1,)), ((10, 12), ()))
    assert steps_of(((0, 10), (4, 9), (5, 7)), 10) == (
        ((0, 4), (0,)), ((4, 5), (0, 1)), ((5, 7), (0, 1, 2)), ((7, 9), (0, 1)), ((9, 10), (0,)),
    )  # fmt: skip


def test_overlaps_of_spans() -> None:
    spans: list[Span] = [(0, 4), (6, 9), (12, 20)]
    assert overlaps(spans, [(2, 7), (8, 13), (19, 30)]) == [(2, 4), (6, 7), (8, 9), (12, 13), (19, 20)]
    assert joined([(3, 5), (0, 4), (7, 7), (5, 6), (8, 9)]) == ((0, 6), (8, 9))
