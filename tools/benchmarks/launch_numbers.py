"""Times of numbers that a launch gives, beside the same numbers as constants.

    python -m tools.benchmarks.gpu_check OUT --only launch_numbers

In: a report to write to. Out: its table; bfloat16. Every row is one spec written twice, with a ``param`` and with a
``const``, timed in turns. The two should take the same time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from tools.benchmarks.doors import ON_GPU, PASSES, ROUNDS, WAIT, Call, in_turns, operator, passes, reason
from tools.benchmarks.gpu_batches import by_many, warmed
from tools.benchmarks.gpu_peers import inputs
from tools.benchmarks.gpu_rows import Row

# What is declared as a param or a constant, with its value, and the rest of the spec.
NUMBERS: Mapping[str, tuple[str, str, float, str]] = {
    "scale": ("c", "f32", 0.1, "scale c  mask causal"),
    "soft-cap": ("c", "f32", 50.0, "score softcap(s, c)  mask causal"),
    "window": ("c", "i32", 4096, "mask causal and window_left(c)"),
    "chunks": ("c", "i32", 1024, "mask causal and i // c == j // c"),
    "prefix": ("c", "i32", 1024, "mask causal or j < c"),
}
SIZES = ((128, 2, 16, 16, 8192), (64, 2, 16, 16, 8192))
PARAM, CONSTANT = "param", "constant"


def rows(name: str, sizes: tuple[int, int, int, int, int]) -> dict[str, Row]:
    """The spec with a param and with a constant."""
    symbol, kind, value, rest = NUMBERS[name]
    d, batch, heads, kv_heads, length = sizes
    declared = {PARAM: f"param {symbol}: {kind}", CONSTANT: f"const {symbol} = {value}"}
    return {way: Row(name, f"{each}  {rest}", (d, d), length, batch, heads, kv_heads) for way, each in declared.items()}


def call_of(row: Row, way: str, part: str) -> Call:
    """One pass of one spec, ready to be timed."""
    symbol, _, value, _ = NUMBERS[row.name]
    attention = functools.partial(operator(row.spec), **({symbol: value} if way == PARAM else {}))
    *x, d_o = inputs(row)
    call = passes(attention, x, d_o)[part]
    call()
    return warmed(call) if ON_GPU else call


def launch_numbers(
    report: Any, sizes: tuple[tuple[int, int, int, int, int], ...] = SIZES, rounds: int = ROUNDS
) -> None:
    """Params beside constants."""
    jobs = [(row, way) for each in sizes for name in NUMBERS for way, row in rows(name, each).items()]
    if ON_GPU and "FLASHGEN_PREPARED" not in os.environ:
        by_many(_prepare, jobs, report.text)
    table: list[tuple[str, ...]] = []
    data = report.data.setdefault("launch_numbers", [])
    for each in sizes:
        for name in NUMBERS:
            pair, cells = rows(name, each), list[str]()
            for part in PASSES:
                makers = {way: functools.partial(call_of, row, way, part) for way, row in pair.items()}
                times = in_turns(makers, rounds, 1.0)
                data.append({"number": name, "size": pair[PARAM].size, "pass": part, "times": times})
                if failed := [x for x in times.values() if isinstance(x, str)]:
                    cells += [f"cannot: {failed[0]}", "", ""]
                    continue
                own, other = (1e3 * times[way].seconds.median for way in (PARAM, CONSTANT))  # type: ignore[union-attr]
                cells += [f"{own:.3f}", f"{other:.3f}", f"{own / other:.3f}"]
            table.append((name, pair[PARAM].size, *cells))
            print(*table[-1], sep="  ", flush=True)
            report.save()
    columns = ["number", "B×H×N×D", *(f"{part}{x}" for part in PASSES for x in (", param (ms)", ", constant", " ×"))]
    report.table("Numbers of a launch", columns, table, f"Medians of {rounds} rounds in turns.")


def _prepare(job: tuple[Row, str]) -> str:
    row, way = job
    try:
        for part in PASSES:
            call_of(row, way, part)
            WAIT()
    except Exception as error:
        return f"{row.name}, {way}: {reason(error)}"
    return ""


SECTIONS = {"launch_numbers": launch_numbers}
