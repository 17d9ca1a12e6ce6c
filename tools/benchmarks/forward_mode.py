"""Derivatives beside first passes: tangents, and gradients of gradients.

    python -m tools.benchmarks.forward_mode [--device cpu|cuda] [--seconds 60] [--only tangents|second|memory]
                                      [--memory]

Causal attention. Tangents: o, lse and what they change by as all of q, k and v move, beside the forward pass, the tiled
path and SDPA's MATH path. Second: the backward pass of a backward pass, by all of q, k, v and d_o, beside the forward
with the backward pass, the tiled path and MATH's. Ratios are taken within a round. Other paths of SDPA have neither.
``--memory``: the bytes that PyTorch allocates for either at 65,536 positions of a GPU; on CPUs what calls over a window
of 1,024 keys add to the resident set, float32, one head of 16.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.op.op import AttentionOp, OpParts
from flashgen.tuning.tune import paired_times
from tools.benchmarks.peak_memory import peak_bytes
from tools.benchmarks.report import publish

MOST_PAIRS = 1 << 28  # of all heads, that the other paths are asked for
GOALS = "goals: 2.2 times the forward pass at most; a fifth of MATH's time at 2,048"
GOALS_OF_SECOND = "goal: 4 times forward with backward at most"


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


@dataclass(frozen=True)
class Candidates:
    """What computes attention: our op, the same without kernels of derivatives, and SDPA's MATH path if it fits."""

    own: AttentionOp
    tiled: AttentionOp
    math: Callable[..., Tensor] | None


def functions(case: Case, device: str) -> Candidates:
    """Of one call."""
    text = f"attention causal {{ head_dim {case.head_dim}  mask causal }}"
    own = flashgen.loads(text, backend=device)
    tiled = AttentionOp(OpParts(own.spec, {device: None}, label="tiled"))

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return Candidates(own, tiled, math if case.heads * case.length**2 <= MOST_PAIRS else None)


def numbers(case: Case, device: str, count: int) -> tuple[Tensor, ...]:
    """Tensors of the shape of q."""
    shape = (1, case.heads, case.length, case.head_dim)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device, case.dtype) for _ in range(count))


def tangents(case: Case, device: str) -> dict[str, Callable[[], object]]:
    """Functions to time, the forward pass first."""
    inputs, moves = numbers(case, device, 3), numbers(case, device, 6)[3:]

    def moved(attend: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.func.jvp(attend, inputs, moves)

    each = functions(case, device)
    found: dict[str, Callable[[], object]] = {
        "forward": lambda: each.own(*inputs),
        "o and its tangent": moved(each.own),
    }
    if each.math is not None:
        found |= {"tiled path": moved(each.tiled), "SDPA, MATH": moved(each.math)}
    return found


def second(case: Case, device: str) -> dict[str, Callable[[], object]]:
    """The same of gradients of gradients, forward with backward first."""
    *given, d_o = numbers(case, device, 4)
    moves = numbers(case, device, 7)[4:]

    def leaves() -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (*given, d_o)]

    def first(attend: Callable[..., Tensor]) -> Callable[[], object]:
        q, k, v, _ = leaves()
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), d_o)

    def again(attend: Callable[..., Tensor]) -> Callable[[], object]:
        """The second backward pass alone: the first gradients are there."""
        q, k, v, arriving = leaves()
        gradients = torch.autograd.grad(attend(q, k, v), (q, k, v), arriving, create_graph=True)
        return lambda: torch.autograd.grad(gradients, (q, k, v, arriving), moves, retain_graph=True)

    each = functions(case, device)
    found = {"forward and backward": first(each.own), "second backward": again(each.own)}
    if each.math is not None:
        found |= {"tiled path": again(each.tiled), "SDPA, MATH": again(each.math)}
    return found


@dataclass(frozen=True)
class Table:
    """One of both: what is timed, and the columns behind the name of a case."""

    candidates: Callable[[Case, str], dict[str, Callable[[], object]]]
    names: tuple[str, str, str, str]
    ratios: tuple[str, str]
    goals: str
    section: str

    @property
    def columns(self) -> tuple[str, ...]:
        return ("", *(f"{name}, ms" for name in self.names), *self.ratios)

    def rows(self, device: str, seconds: float) -> Iterator[tuple[str, ...]]:
        """The cells of the table, line by line."""
        wait = torch.cuda.synchronize if device == "cuda" else None
        all_cases = tuple(cases(device))
        for case in all_cases:
            found = paired_times(self.candidates(case, device), budget=seconds / len(all_cases), wait=wait)
            times = {each.name: each for each in found}
            median = {name: each.seconds.median for name, each in times.items()}
            of_math = f"{median[self.names[3]] / median[self.names[1]]:.2f}" if self.names[3] in median else ""
            each = (f"{1e3 * median[name]:.3g}" if name in median else "" for name in self.names)
            yield case.name, *each, f"{times[self.names[1]].ratio.median:.2f}", of_math


TABLES = {
    "tangents": Table(
        tangents,
        ("forward", "o and its tangent", "tiled path", "SDPA, MATH"),
        ("tangent / forward", "MATH / tangent"),
        GOALS,
        "forward-mode",
    ),
    "second": Table(
        second,
        ("forward and backward", "second backward", "tiled path", "SDPA, MATH"),
        ("second / first", "MATH / second"),
        GOALS_OF_SECOND,
        "second-order",
    ),
}


def memory_of_cpu() -> Iterator[tuple[str, ...]]:
    """What a call adds to the resident set at its peak, its results included, in MiB, by the number of positions."""
    windowed = flashgen.loads("attention windowed { head_dim 16  mask causal and i - j < 1024 }", backend="cpu")
    for length in (1 << 13, 1 << 14, 1 << 15, 1 << 16):
        case = Case(torch.float32, 16, 1, length)
        q, k, v, d_o, *moves = (x.requires_grad_() for x in numbers(case, "cpu", 7))

        def gradients(q: Tensor = q, k: Tensor = k, v: Tensor = v, d_o: Tensor = d_o) -> object:
            return torch.autograd.grad(windowed(q, k, v), (q, k, v), d_o)

        def tangent(inputs: tuple[Tensor, ...] = (q, k, v), moves: tuple[Tensor, ...] = tuple(moves)) -> object:
            own, tangents = (tuple(x.detach() for x in each) for each in (inputs, moves))
            return torch.func.jvp(windowed, own, tangents)

        def twice(inputs: tuple[Tensor, ...] = (q, k, v), d_o: Tensor = d_o, moves: list[Tensor] = moves) -> object:
            first = torch.autograd.grad(windowed(*inputs), inputs, d_o, create_graph=True)
            return torch.autograd.grad(first, (*inputs, d_o), moves)

        peaks = []
        for run in (gradients, tangent, twice):
            run()
            peaks.append(peak_bytes(run, torch.device("cpu")))
        yield f"{length:,}", *("" if each is None else f"{each / (1 << 20):.1f}" for each in peaks)


def memory_of_gpu() -> Iterator[tuple[str, ...]]:
    """Bytes beyond the inputs that CUDA tensors take at most, in MiB, at 65,536 positions of one head."""
    for head_dim in (64, 128):
        case = Case(torch.bfloat16, head_dim, 1, 1 << 16)
        peaks = []
        for run in list(second(case, "cuda").values())[:2]:
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            peaks.append((torch.cuda.max_memory_allocated() - before) / (1 << 20))
        yield case.name, *(f"{each:.1f}" for each in peaks), f"{peaks[1] / peaks[0]:.2f}"


def main() -> None:
    """Publish the tables of a CPU, print those of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=(*TABLES, "memory"))
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    chosen = [each for name, each in TABLES.items() if arguments.only in (None, name)]
    for table in chosen:
        if arguments.device == "cpu":
            rows = list(table.rows("cpu", arguments.seconds / len(chosen)))
            publish(table.section, "python -m tools.benchmarks.forward_mode", table.columns, rows, table.goals)
            continue
        for cells in itertools.chain(
            (table.columns,), table.rows("cuda", arguments.seconds / len(chosen)), ((table.goals,),)
        ):
            print(" | ".join(cells), flush=True)
    if arguments.memory or arguments.only == "memory":
        of_gpu = ("", "forward and backward, MiB", "second backward, MiB", "second / first")
        of_cpu = ("positions", "gradients, MiB", "o and its tangent, MiB", "gradients of gradients, MiB")
        columns, found = (of_gpu, memory_of_gpu()) if arguments.device == "cuda" else (of_cpu, memory_of_cpu())
        for cells in itertools.chain((columns,), found):
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
