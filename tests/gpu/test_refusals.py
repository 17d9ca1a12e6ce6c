"""What cannot be done on a GPU is said, and leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from flashgen.ir.shape import Shape
from tests.gpu.helpers import arguments, operator


def test_tensors_in_two_places() -> None:
    op = operator("causal")
    q = torch.randn(1, 2, 8, 64, device="cuda")
    with pytest.raises(ValueError, match="'k' is on cpu, but 'q' is on cuda:0"):
        op(q, q.cpu(), q)
    alibi = operator("alibi")
    with pytest.raises(ValueError, match="tensor 'slope' is on cpu, but 'q' is on cuda:0"):
        alibi(q, q, q, slope=torch.ones(2))
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="'v' is on cuda:1, but 'q' is on cuda:0"):
            op(q, q, q.to("cuda:1"))


def test_cpu_tensors_on_this_backend() -> None:
    q = torch.randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match="q, k and v are on cpu; this build of 'causal' runs on CUDA tensors"):
        operator("causal")(q, q, q)


def test_out_of_memory_in_backward() -> None:
    """The error is PyTorch's own; when it is gone, so is everything that the pass had allocated."""
    op = operator("causal")
    inputs = arguments(op, Shape(4, 16, 16, 4096, 4096))
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o = op(*leaves)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    _, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / whole)
    try:
        taken = all_that_is_left(most=torch.cuda.memory_reserved() + 2**25)
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(o, leaves, inputs.d_o, retain_graph=True)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o, leaves, inputs.d_o))


def all_that_is_left(most: int) -> list[torch.Tensor]:
    """Memory that PyTorch still gives, by halves down to 1 MiB; other tests leave it pools that no limit covers.

    ``most``: bytes that the limit allows, by which this has to end.
    """
    taken: list[torch.Tensor] = []
    size = 2**30
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
        assert sum(map(len, taken)) <= most, f"a limit of {most} bytes is not kept"
    return taken
