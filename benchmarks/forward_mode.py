"""Forward mode: o, lse and their tangents by one kernel, beside the forward pass, the tiled path and SDPA's MATH path.

    python -m benchmarks.forward_mode [--device cpu|cuda] [--seconds 60]

Causal attention, all of q, k and v moving; ratios are taken within a round. Other paths of SDPA have no tangents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from benchmarks.report import publish
from flashgen.benchmark.timing import paired_times
from flashgen.runtime.op import AttentionOp, OpParts

MOST_PAIRS = 1 << 28  # of all heads, that the other paths are asked for
GOALS = "goals: 2.2 times the forward pass at most; a fifth of MATH's time at 2,048"


@dataclass(frozen=True)
class Case:
    """One call."""

    dtype: torch.dtype
    head_dim: int
    heads: int
    length: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{str(self.dtype).removeprefix('torch.')}, D {self.head_dim}, {self.heads} × {self.length:,}"


def cases(device: str) -> Iterator[Case]:
    """What is measured on a device."""
    dtype, heads, lengths = (torch.bfloat16, 16, (2048, 8192)) if device == "cuda" else (torch.float32, 4, (512, 2048))
    for head_dim in (64, 128):
        for length in lengths:
            yield Case(dtype, head_dim, heads, length)


def candidates(case: Case, device: str) -> dict[str, Callable[[], object]]:
    """Functions to time, the forward pass first."""
    text = f"attention causal {{ head_dim {case.head_dim}  mask causal }}"
    own = flashgen.loads(text, backend=device)
    tiled = AttentionOp(OpParts(own.spec, {device: None}, label="tiled"))
    shape = (1, case.heads, case.length, case.head_dim)
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(shape, generator=generator).to(device, case.dtype) for _ in range(6)]
    inputs, tangents = tuple(numbers[:3]), tuple(numbers[3:])

    def moved(attend: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.func.jvp(attend, inputs, tangents)

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    found: dict[str, Callable[[], object]] = {"forward": lambda: own(*inputs), "o and its tangent": moved(own)}
    if case.heads * case.length**2 <= MOST_PAIRS:
        found |= {"tiled path": moved(tiled), "SDPA, MATH": moved(math)}
    return found


NAMES = ("forward", "o and its tangent", "tiled path", "SDPA, MATH")
COLUMNS = ("", *(f"{name}, ms" for name in NAMES), "tangent / forward", "MATH / tangent")


def rows(device: str, seconds: float) -> Iterator[tuple[str, ...]]:
    """The cells of the table, line by line."""
    wait = torch.cuda.synchronize if device == "cuda" else None
    all_cases = tuple(cases(device))
    for case in all_cases:
        found = paired_times(candidates(case, device), budget=seconds / len(all_cases), wait=wait)
        times = {each.name: each for each in found}
        median = {name: each.seconds.median for name, each in times.items()}
        of_math = f"{median[NAMES[3]] / median[NAMES[1]]:.2f}" if NAMES[3] in median else ""
        each = (f"{1e3 * median[name]:.3g}" if name in median else "" for name in NAMES)
        yield case.name, *each, f"{times[NAMES[1]].ratio.median:.2f}", of_math


def main() -> None:
    """Publish the table of a CPU, print that of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        found = list(rows("cpu", arguments.seconds))
        publish("forward-mode", "python -m benchmarks.forward_mode", COLUMNS, found, GOALS)
        return
    for cells in (COLUMNS, *rows("cuda", arguments.seconds), (GOALS,)):
        print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
