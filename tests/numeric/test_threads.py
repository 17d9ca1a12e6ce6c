"""Threads: no more than have something worth their while, and the same bits however many there are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.hosts.cpu_backend import LibraryKernel
from flashgen.kinds.kind import PassName
from flashgen.op.call import Rest
from flashgen.store.cache import Cache
from flashgen.store.headers import Text
from flashgen.toolchains.cpp import compile_sources
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
    if name == "backward":
        assert workspace(name, 16, q_len=1, kv_len=100_000) == workspace(name, 1, q_len=1, kv_len=100_000), "one task"


def test_keys_of_one_query_are_shared() -> None:
    one, eight, many = (workspace("forward", threads, q_len=1, kv_len=100_000) for threads in (1, 8, 16))
    assert 7 * (many - eight) == 8 * (eight - one) > 0


def test_large_calls_use_them_all() -> None:
    two, four, many = (workspace("forward", threads, q_len=8192, kv_len=8192) for threads in (2, 4, 8))
    assert many - four == 2 * (four - two) > 0
    # A tile of 128 rows for each of two heads would leave six threads idle: there are eight of 32 instead.
    shared = workspace("forward", 8, q_len=128, kv_len=512, heads=2)
    assert shared == workspace("forward", 8, q_len=128, kv_len=512, heads=16)
    few = workspace("forward", 16, q_len=48, kv_len=4096, heads=2)  # six tiles of a vector of rows, the least there is
    assert few < workspace("forward", 16, q_len=48, kv_len=4096, heads=16)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_every_call_asks_how_many_threads_there_are(threads: Any) -> None:
    op = operator("causal", "cpu")
    inputs = [normal(1, 2, 300, 64, seed=seed) for seed in range(3)]
    find = op._registered.engine.checker.find
    rest: Rest = ((0, 0, 0, 0, None, None, None, None), False)
    for count in (1, 3, 1):
        threads(count)
        call = find(inputs, rest)
        kernel = call.kernel
        assert kernel is not None
        assert call.fixed[kernel.layout.slots["threads"] - kernel.layout.varying] == count


TEAM = """
extern "C" void in_team(void (*pass)(const void*), const void* const* arguments) {
#pragma omp parallel for schedule(static) num_threads(2)
  for (int n = 0; n < 2; ++n) pass(arguments[n]);
}
"""


def test_threads_of_somebody_elses_team(tmp_path: Path) -> None:
    """Each calls a pass of its own: none leaves its share to the others."""
    op = operator("causal", "cpu")
    (binary,) = compile_sources([Text("team", TEAM)], cache=Cache(tmp_path))
    in_team = ctypes.CDLL(str(binary.path))["in_team"]
    q, k, v = (normal(2, 3, 20, 64, seed=seed) for seed in range(3))
    expected = op(q, k, v)
    call = op._registered.engine.checker.find((q, k, v), ((0, 0, 0, 0, None, None, None, None), False))
    kernel = call.kernel
    assert isinstance(kernel, LibraryKernel)
    found = [torch.full_like(expected, torch.nan) for _ in range(2)]
    memory = [torch.empty(call.forward[False].workspace_bytes, dtype=torch.uint8) for _ in range(2)]
    packed = []
    for o, workspace in zip(found, memory, strict=True):
        pointers = [x.data_ptr() for x in (workspace, q, k, v, o)]
        packed.append(kernel.layout.pack(*pointers, *[0] * (kernel.layout.varying - 5), *call.fixed))
    in_team(
        kernel.find("forward", kernel.layout.named((*[0] * kernel.layout.varying, *call.fixed)))[0],
        (ctypes.c_char_p * 2)(*packed),
    )
    assert all(torch.equal(o, expected) for o in found)


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
