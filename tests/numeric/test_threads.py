"""Threads: no more than have something worth their while, and the same bits however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.runtime.kernel import LibraryKernel, PassName
from tests.numeric.helpers import normal, operator

SIZES = {"batch": 1, "heads": 1, "kv_heads": 1}


def workspace(name: PassName, threads: int, **sizes: int) -> int:
    """Bytes that a pass of the gallery's causal attention asks for; each thread has its own share."""
    op = operator("causal", "cpu")
    provider = op._parts.kernels["cpu"]
    assert provider is not None
    kernel = provider(op.spec.head_dims[0], 0)
    assert isinstance(kernel, LibraryKernel)
    values = kernel.layout.values({**SIZES, **sizes, "threads": threads})
    return kernel.prepare(name, values).workspace_bytes


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_small_calls_stay_on_one_thread(name: PassName) -> None:
    for length in (1, 16, 64):
        assert workspace(name, 16, q_len=length, kv_len=length) == workspace(name, 1, q_len=length, kv_len=length)
    assert workspace(name, 16, q_len=1, kv_len=100_000) == workspace(name, 1, q_len=1, kv_len=100_000), "one task"


def test_large_calls_use_them_all() -> None:
    two, four, many = (workspace("forward", threads, q_len=2048, kv_len=2048) for threads in (2, 4, 8))
    assert many - four == 2 * (four - two) > 0
    few = workspace("forward", 8, q_len=256, kv_len=256, heads=2)  # four tiles of at most 128 rows
    assert few < workspace("forward", 8, q_len=256, kv_len=256, heads=16)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("length", [16, 113])
def test_bits_of_small_calls(threads: Any, length: int) -> None:
    """One head of few queries is one task, whatever the number of threads."""
    op = operator("causal", "cpu")
    found = []
    for count in (1, 4):
        threads(count)
        leaves = [normal(1, 1, length, 64, seed=seed).requires_grad_() for seed in range(3)]
        o = op(*leaves)
        found.append([o.detach(), *torch.autograd.grad(o, leaves, normal(1, 1, length, 64, seed=9))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
