"""Compiles the kernels of calls over ranks side by side, so that no rank waits for a compiler later.

In: a ``Run``, what it is to do. Out: kernels in the cache, and how long that took in the report.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import flashgen
from flashgen.distributed.partial import Partial
from flashgen.hosts.cuda import cuda_provider
from flashgen.hosts.kernel import ELEMENTS
from flashgen.ir.shape import Shape
from flashgen.kinds.table import KINDS
from flashgen.op.signature import TORCH_DTYPES
from tools.benchmarks.rank_calls import SPECS, text_of
from tools.benchmarks.rank_checks import CHECK_SHAPE, CHECKED, TOLERANCE, checked_text
from tools.benchmarks.rank_run import GPU, Run

WORKERS = min(os.cpu_count() or 1, 32)
_ROWS = ("dense", "parts", "slices")


def build(run: Run) -> None:
    """Those of the variants that are timed, and of what is checked where it is."""
    if not run.is_gpu:
        return
    if run.rank == 0:
        start = time.monotonic()
        names = run.variants or tuple(SPECS)
        jobs = [(name, text_of(name, GPU.unit), (torch.bfloat16,), _long(run), False) for name in names]
        jobs += [
            (f"{name}, checked", checked_text(name), (dtype,), (CHECK_SHAPE,), name == "dropped")
            for name in (CHECKED if "check" in run.sections else ())
            for dtype in TOLERANCE
        ]
        # What is wide already has no other kernels for parts and slices.
        wanted = [
            (*job, rows, which)
            for job in jobs
            for which in ("backward", "forward")
            for rows in (_ROWS if job[2] != (torch.float32,) else _ROWS[:1])
        ]
        failed = []
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(WORKERS, context) as pool:
            for job, result in [(job, pool.submit(compile_one, *job[1:])) for job in wanted]:
                try:
                    result.result()
                except Exception as error:
                    failed.append(f"{job[0]}: {type(error).__name__}: {str(error)[:300]}")
        text = f"## Compiled\n\n{len(wanted)} parts in {time.monotonic() - start:.0f} s by {WORKERS} processes."
        run.report.text("\n\n".join([text, *failed]))
    dist.barrier()


def _long(run: Run) -> tuple[Shape, ...]:
    return tuple(
        Shape(1, heads, kv, rows, keys)
        for tokens in run.scale.tokens
        for heads, kv, rows, keys in (
            (run.scale.heads, run.scale.kv_heads, tokens, tokens),
            (run.scale.heads, run.scale.kv_heads, tokens // 2, tokens),
            (run.scale.heads // run.world, max(run.scale.kv_heads // run.world, 1), tokens * run.world,
             tokens * run.world),
        )
    )  # fmt: skip


def compile_one(
    text: str, dtypes: Sequence[torch.dtype], shapes: Sequence[Shape], dropped: bool, rows: str, which: str
) -> None:
    """One pass of a spec, or of some of its keys or rows, for these shapes."""
    op = flashgen.loads(text, backend="cuda")
    codes = {TORCH_DTYPES[element]: code for code, element in enumerate(ELEMENTS)}
    # A sink is of rows, not of parts of their keys.
    of_parts = rows == "parts" or (rows == "slices" and which == "backward")
    provider = cuda_provider(Partial(op).inner.spec if of_parts else op.spec, kind=KINDS[rows])
    for dtype in dtypes:
        for shape in shapes:
            values = {
                "element": codes[dtype], "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads,
                "q_len": shape.q_len, "kv_len": shape.kv_len, "dropout_threshold": int(dropped), "deterministic": 0,
            }  # fmt: skip
            name: Any = which
            provider.of_call(op.spec.head_dims[0], provider.machines(0), name, values)
