"""What `make demo` shows: import a generated operator, run it forward and backward, measure its errors and its speed.

The package `generated` is what `flashgen build` wrote. Everything below is ordinary PyTorch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from generated.causal import causal

BATCH, HEADS, LENGTH, HEAD_DIM = 1, 8, 2048, 64
NAMES = ("o", "dq", "dk", "dv")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print two tables: errors, then times."""
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM) for _ in range(4))
    print(f"\ncausal attention, float32, B {BATCH}, H {HEADS}, N {LENGTH}, D {HEAD_DIM}, {os.cpu_count()} CPU cores\n")

    truth = forward_and_backward(reference, q.double(), k.double(), v.double(), d_o.double())
    ours = forward_and_backward(causal, q, k, v, d_o)
    theirs = forward_and_backward(sdpa, q, k, v, d_o)
    print("relative error (Frobenius norm) against the float64 formula")
    print(f"  {'':4}  {'flashgen':>10}  {'SDPA':>10}")
    for name, exact, own, their in zip(NAMES, truth, ours, theirs, strict=True):
        print(f"  {name:4}  {error(own, exact):10.1e}  {error(their, exact):10.1e}")

    print("\nmilliseconds a call, median of paired runs")
    print(f"  {'':17}  {'flashgen':>10}  {'SDPA':>10}  {'SDPA/flashgen':>13}")
    for title, run in (("forward", forward), ("forward+backward", forward_and_backward)):
        own_time, their_time, ratio = paired(partial(run, causal, q, k, v, d_o), partial(run, sdpa, q, k, v, d_o))
        print(f"  {title:17}  {own_time * 1e3:10.1f}  {their_time * 1e3:10.1f}  {ratio:13.2f}")
    print()


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention straight from the spec."""
    o: Tensor = causal.reference(q, k, v, dtype=torch.float64)
    return o


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, _d_o: Tensor) -> Tensor:
    """The output alone."""
    with torch.no_grad():
        return attention(q, k, v)


def forward_and_backward(attention: Attention, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v for the gradient that arrives."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    o = attention(q, k, v)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), tensors[3]))


def error(value: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference over that of the exact value."""
    return float((value.double() - exact).norm() / exact.norm())


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = 11) -> tuple[float, float, float]:
    """Median seconds of both, and the median of their ratios, taken in turns so that both meet the same machine."""
    ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    median = statistics.median
    return median(own for own, _ in times), median(their for _, their in times), median(b / a for a, b in times)


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
