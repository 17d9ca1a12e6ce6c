"""Speed on a CPU that others use, too: one thread's own time, the least of many calls, beside PyTorch's.

    python -m tools.benchmarks.one_thread [--only attention,window,overhead,decode,cold]

The system does not count the time in which a thread waits for a core, so that ratios hold where those of
``tools.benchmarks.speed`` do not. What others do to caches and memory stays. A machine with AVX-512 stands in for one
without it, PyTorch's side, too, where the environment says

    CXX="c++ -mno-avx512f" ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.ir.shape import Shape
from flashgen.op.node import ENVIRONMENT_VARIABLE as NODE
from tools.benchmarks.report import publish, table_lines
from tools.benchmarks.speed import (
    BF16,
    F32,
    Attention,
    Setting,
    both_passes,
    forward,
    inputs,
    names_of,
    operator,
    sdpa,
)

SHAPE = Shape(1, 1, 1, 4096, 4096)
GOALS = {("plain", False): 1.15, ("causal", False): 1.3, ("plain", True): 1.1, ("causal", True): 1.3}
OF_HALVES = {False: 1.0, True: 2.0}
OF_COPY = 0.85  # of a copy's bytes a second, read and written, where a cache is larger than the last level
LAST_LEVEL = 32 << 20
COLD = """
import resource, sys, torch
x = [torch.randn(1, 2, 256, 64) for _ in range(3)]
def used():
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(r.ru_utime + r.ru_stime for r in each)
if sys.argv[1] == "flashgen":
    import flashgen
else:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
before = used()
with torch.no_grad():
    if sys.argv[1] == "flashgen":
        flashgen.loads("attention cold { head_dim 64  mask causal }", backend="cpu")(*x)
    else:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu")
        torch.compile(flex_attention)(*x, block_mask=mask)
print(used() - before)
"""

Row = tuple[str, str, float, float, float | None]  # what, against whom, own and its seconds, the goal of their ratio


@dataclass(frozen=True)
class Step:
    """A step of decoding: ``of``, heads and type; ``call``, queries of keys; seconds, those of a copy if it counts."""

    of: str
    call: str
    own: float
    sdpa: float
    copy: float | None


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*SECTIONS, DECODE]
    parser.add_argument("--only", type=names_of(kinds), default=kinds, help="kinds of rows, with commas between them")
    names = parser.parse_args().only
    torch.set_num_threads(1)
    os.environ.setdefault(NODE, "1")  # as calls are after the first thousand
    rows = [row for name in names if name != DECODE for row in SECTIONS[name]()]
    steps = decode() if DECODE in names else []
    isa = torch.backends.cpu.get_cpu_capability()
    columns = ["work", "against", "flashgen (ms)", "peer (ms)", "×", "goal", "met"]
    remark = (
        f"{isa}, one thread, whose own time is counted, the least of many calls in turns. Others used the machine. "
        "B 1, H 1, N 4096 unless it says otherwise; attention float32 unless it says bf16. 16 tokens: calls in C++. "
        "Cold: user and system time "
        "of the process and its compiler, caches empty."
    )
    publish(
        "one_thread_avx2" if isa == "AVX2" else "one_thread",
        "python -m tools.benchmarks.one_thread",
        columns,
        [*map(_line, rows)],
        remark,
        decoded(steps),
    )


def _line(row: Row) -> list[str]:
    what, peer, own, other, goal = row
    ratio = other / own
    met = ["", ""] if goal is None else [f"{goal:.2f}", "yes" if ratio >= goal else "**no**"]
    return [what, peer, f"{own * 1e3:.3g}", f"{other * 1e3:.3g}", f"{ratio:.2f}", *met]


def least(calls: Sequence[Callable[[], object]], budget: float = 4.0) -> list[float]:
    """The least seconds of this thread that each takes, of many turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    turns, end = 0, time.perf_counter() + budget
    while turns < 6 or time.perf_counter() < end:
        for n, call in enumerate(calls):
            begin = time.thread_time()
            call()
            best[n] = min(best[n], time.thread_time() - begin)
        turns += 1
    return best


def _show(row: Row) -> Row:
    print(*_line(row), flush=True)
    return row


def attention() -> list[Row]:
    """Plain and causal beside SDPA."""
    table = []
    for dtype, d, ((name, both), goal) in itertools.product((F32, BF16), (64, 128), GOALS.items()):
        op = operator(name, d)
        given = inputs(op, Setting(name, d, goal, SHAPE, dtype, both))
        peer = functools.partial(sdpa, is_causal=name == "causal")
        make: Callable[..., Callable[[], object]] = both_passes if both else forward
        own, other = least([make(op, given), make(peer, given)])
        what = f"{name}, D {d}, {'bf16, ' if dtype is BF16 else ''}{'with backward' if both else 'forward'}"
        table.append(_show((what, "SDPA", own, other, OF_HALVES[both] if dtype is BF16 else goal)))
    return table


@contextlib.contextmanager
def one_word() -> Iterator[str]:
    """What ``CXX`` says as the name of one program, which is all that inductor takes: with flags, a script."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        if len(command) > 1:
            script = Path(folder) / ("clang++" if "clang" in command[0] else "g++")  # inductor goes by the name, too
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)
            command = [str(script)]
        yield command[0]


def window() -> list[Row]:
    """The causal window of 256 beside compiled FlexAttention, its block mask made before and in the call."""
    length, table = SHAPE.q_len, []

    def keep(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < 256)

    make = functools.partial(create_block_mask, keep, None, None, length, length, device="cpu")
    flex: Callable[..., Tensor] = torch.compile(flex_attention)
    made = make()
    for d in (64, 128):
        op = operator("window 256", d)
        given = inputs(op, Setting("window 256", d, 4.0, SHAPE))
        peers: list[Attention] = [
            op,
            lambda q, k, v: flex(q, k, v, block_mask=made),
            lambda q, k, v: flex(q, k, v, block_mask=make()),
        ]
        with one_word() as compiler, inductor.patch({"cpp.cxx": (None, compiler)}):
            own, before, inside = least([forward(each, given) for each in peers])
        what = f"window of 256, D {d}, forward"
        table.append(_show((what, "FlexAttention, block mask made before", own, before, 4.0)))
        table.append(_show((what, "FlexAttention, made in the call", own, inside, 10.0)))
    return table


def overhead() -> list[Row]:
    """One head of 16 tokens."""
    table, shape = [], Shape(1, 1, 1, 16, 16)
    for name, both in itertools.product(("plain", "causal"), (False, True)):
        op = operator(name, 64)
        given = inputs(op, Setting(name, 64, 1.0, shape))
        make: Callable[..., Callable[[], object]] = both_passes if both else forward
        calls = [make(op, given), make(functools.partial(sdpa, is_causal=name == "causal"), given)]
        own, other = least([functools.partial(_repeat, call) for call in calls], 2.0)
        what = f"{name}, D 64, 16 tokens, {'with backward' if both else 'forward'}"
        table.append(_show((what, "SDPA", own / 20, other / 20, 1.0)))
    return table


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(20):
        call()


def decode() -> list[Step]:
    """The last queries over a cache, beside SDPA of the same rows."""
    op = flashgen.loads("attention bench_decode { head_dim 64, 128  mask causal }", backend="cpu")
    found: list[Step] = []
    heads, lengths = ((32, 8), (16, 16), (32, 4)), ((1, 1024), (1, 8192), (4, 1024), (4, 8192))
    for dtype, d, (h, hkv), (queries, n) in itertools.product((F32, BF16), (64, 128), heads, lengths):
        q, k, v = (torch.randn(1, x, rows, d).to(dtype) for x, rows in ((h, queries), (hkv, n), (hkv, n)))
        kept = torch.ones(queries, n, dtype=torch.bool).tril(n - queries) if queries > 1 else None
        copy = torch.empty_like(k)
        calls = [
            functools.partial(op.decode, q, k, v, n),
            functools.partial(scaled_dot_product_attention, q, k, v, attn_mask=kept, enable_gqa=h != hkv),
            functools.partial(copy.copy_, k),
        ]
        with torch.no_grad():
            own, other, copied = least(calls, 0.8)
        size = 2 * k.numel() * k.element_size()  # of the cache; a copy of k reads and writes as much
        of = f"{h}/{hkv} heads, D {d}, {'bf16' if dtype is BF16 else 'float32'}"
        found.append(Step(of, f"{queries} of {n}", own, other, copied if size > LAST_LEVEL else None))
        print(found[-1], flush=True)
    return found


def decoded(steps: Sequence[Step]) -> str:
    """A table of steps, a row for each kind of heads; nothing where there are none."""
    if not steps:
        return ""
    calls, kinds = ([*dict.fromkeys(each)] for each in zip(*((step.call, step.of) for step in steps), strict=True))
    cells = {(step.of, step.call): _cell(step) for step in steps}
    rows = [[of, *(cells.get((of, call), "") for call in calls)] for of in kinds]
    text = (
        "Decoding, by queries of keys: ms of a step: SDPA's time over it (goal 1.00); where the cache is larger than "
        f"the last level of cache, a copy's time, as many bytes read and written, over it (goal {OF_COPY})."
    )
    return "\n".join([text, "", *table_lines(["heads", *calls], rows)])


def _cell(step: Step) -> str:
    goals = [(step.sdpa / step.own, 1.0), *([(step.copy / step.own, OF_COPY)] if step.copy else [])]
    ratios = [f"{ratio:.2f}" if ratio >= goal else f"**{ratio:.2f}**" for ratio, goal in goals]
    return f"{step.own * 1e3:.3g}: {', '.join(ratios)}"


def cold() -> list[Row]:
    """From a spec with one head dimension to the first result."""
    own, other = (_cold(who) for who in ("flashgen", "flex"))
    return [_show(("cold, causal, D 64", "compiled FlexAttention's first call", own, other, 3.0))]


def _cold(who: str) -> float:
    with tempfile.TemporaryDirectory() as folder, one_word() as compiler:
        told = {"FLASHGEN_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        if who == "flex":
            told["CXX"] = compiler
        run = subprocess.run(
            [sys.executable, "-c", COLD, who], capture_output=True, text=True, check=True, env={**os.environ, **told}
        )
    return float(run.stdout.split()[-1])


DECODE = "decode"
SECTIONS: Mapping[str, Callable[[], list[Row]]] = {
    "attention": attention,
    "window": window,
    "overhead": overhead,
    "cold": cold,
}


if __name__ == "__main__":
    main()
