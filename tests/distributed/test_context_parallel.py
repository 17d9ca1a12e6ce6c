"""Sequences over ranks: every method and every gradient against one process, with gloo; bytes sent and predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import Case, all_errors, of_random_specs
from tests.distributed.ranks import run

CAUSAL = "attention causal { head_dim 16 mask causal }"
SPECS = {
    "causal": CAUSAL,
    "window": "attention near { head_dim 16 mask window(20) }",
    "alibi": "attention slopes { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * abs(i - j) mask causal }",
    "documents": "attention packed { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal }",
    "pairs": "attention pairs { head_dim 16 tensor t: f32[H, Nq, Nk] grad param w: f32 grad score s * w + t[h, i, j] }",
    "sinks": "attention sinks { head_dim 16 tensor z: f32[H] grad weights softmax(sink = z[h]) "
    "mask window_left(30) and i % 9 > 0 }",  # some rows have no key
    "sigmoid": "attention sigmoid { head_dim 16 weights sigmoid(s) mask causal }",
    "dropped": "attention dropped { head_dim 16 mask causal dropout 0.3 }",
    "strided": "attention strided { head_dim 16 mask causal and (i - j) % 5 == 0 weights normalize(exp(s)) }",
    "selected": "attention lists { head_dim 16 tensor idx: i32[B, Hkv, Nq, H] select 16: idx[b,hkv,i,:] mask causal }",
    "squares": "attention squares { head_dim 16 weights normalize2(s) mask window(40) }",
    "uneven": "attention uneven { head_dim 16/24 score s - 0.01 * sqdist mask i // 30 == j // 30 or j < 3 }",
    "grouped": "attention grouped { head_dim 16 tensor t: f32[Hkv] grad score s * t[hkv] mask causal }",
}
KEYS = ("ring", "all_gather")
COMPILED = ("causal", "alibi", "sinks")


def check(world: int, cases: list[Case], tolerance: float = 1e-10) -> None:
    """In float64 on the reference errors are those of the method alone."""
    for of_rank in run(all_errors, world, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert max(found.errors.values()) <= tolerance, (case, found)
            assert found.sent == found.predicted, (case, found)


def exact(name: str, method: Any, **others: Any) -> Case:
    """A case in float64."""
    options = {"seed": 5} if name == "dropped" else {}
    return Case(SPECS[name], method, dtype=torch.float64, options=options, backend="reference", **others)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", KEYS)
def test_keys_that_the_mask_keeps(world: int, method: str) -> None:
    # Two ranks have all specs, more of them those that the other method has not.
    names = list(SPECS) if world == 2 and method == "ring" else list(SPECS)[(world + KEYS.index(method)) % 3 :: 3]
    check(world, [exact(name, method, sizes=(2, 4, 2, 103)) for name in names])


@pytest.mark.parametrize(("world", "heads"), [(2, (4, 2)), (4, (4, 2)), (3, (8, 4)), (3, (4, 1)), (2, (6, 3))])
def test_heads_change_places(world: int, heads: tuple[int, int]) -> None:
    """Also more ranks than key/value heads, and heads that ranks do not divide."""
    names = ["alibi", "dropped", "uneven", *(["grouped"] if heads[1] % world == 0 else [])]
    check(world, [exact(name, "ulysses", sizes=(2, *heads, 59)) for name in names])


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
def test_two_dimensions(mesh: tuple[int, int]) -> None:
    methods: list[Any] = [("ring", "ulysses"), ("ulysses", "all_gather")]
    names = ["documents", "pairs", "sinks", "dropped"][0 if mesh == (2, 2) else 2 :]
    check(4, [exact(name, method, mesh=mesh, sizes=(1, 4, 2, 83)) for name in names for method in methods])


def test_any_partition_and_lengths() -> None:
    check(
        3,
        [
            exact("causal", method, dealt=dealt, sizes=sizes)
            for method in KEYS
            for dealt, sizes in (
                ("head_tail", (2, 4, 2, 103)),
                ("contiguous", (1, 3, 3, 2)),
                ("documents", (1, 3, 3, 90)),
                (None, (1, 2, 1, 100)),
                ("balanced", (1, 2, 2, 0)),
                (None, (0, 2, 2, 9)),
            )
        ],
    )


def test_a_ring_keeps_few_keys() -> None:
    """They are not sent again backward, nor are gradients late: as of ``all_gather``."""
    found = {}
    for name, dealt in (("window", "contiguous"), ("causal", "balanced")):
        cases = [exact(name, method, dealt=dealt, sizes=(1, 4, 2, 403)) for method in KEYS]
        check(3, cases)
        found[name] = [each.predicted[1] for each in run(all_errors, 3, cases)[1]]
    assert found["window"][0] == found["window"][1] > 0
    assert found["causal"][0] > 1.2 * found["causal"][1]


def test_what_is_expected_to_take_least_time() -> None:
    cases = [exact("window", "auto", sizes=(1, 3, 3, 301)), exact("causal", "auto", sizes=(1, 6, 6, 300))]
    check(3, cases)


@pytest.mark.parametrize("world", [2, 3])
def test_random_specs(world: int) -> None:
    methods: list[Any] = ["ring", "all_gather", "ulysses"]
    found = run(of_random_specs, world, list(range(1, 7)), methods)
    for of_rank in zip(*found, strict=True):
        for seed, method, worst, error, as_predicted in of_rank:
            assert error <= 1e-9, (seed, method, worst, error)
            assert as_predicted, (seed, method)
    assert sum("refused" not in worst for _, _, worst, _, _ in found[0]) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_random_specs(world: int) -> None:
    methods: list[Any] = ["ring", "all_gather", "ulysses"]
    for each in range(100 * world, 100 * world + 30):
        for of_rank in run(of_random_specs, world, [each], methods):
            for seed, method, worst, error, as_predicted in of_rank:
                assert error <= 1e-9, (seed, method, worst, error)
                assert as_predicted, (seed, method)


def test_kernels() -> None:
    """Float32, half precision, and scores so large that lse alone does not hold them."""
    cases = [Case(SPECS[name], method) for name in COMPILED for method in KEYS]
    check(2, cases, 2e-5)
    check(2, [Case(SPECS["causal"], "ring", spread=40.0), Case(SPECS["sinks"], "ring", spread=25.0)], 1e-4)
    half = [Case(SPECS["alibi"], "ring", dtype=torch.bfloat16), Case(CAUSAL, "ulysses", dtype=torch.float16)]
    check(2, half, 8e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_kernels_of_all(world: int) -> None:
    check(
        world,
        [
            Case(text, method, options={"seed": 5} if name == "dropped" else {}, sizes=(2, 8, 4, 203))
            for name, text in SPECS.items()
            for method in (*KEYS, "ulysses")
        ],
        2e-5,
    )
