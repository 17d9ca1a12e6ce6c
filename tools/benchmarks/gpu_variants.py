"""Times on a GPU of what a second round asked of it: every variant near causal attention, and ahead of its peers.

In: a report to write to. Out: its tables; bfloat16. Rows and goals stand in ``gpu_rows``. Each row's calls take turns
in five rounds, as replays of captured graphs, so that the host's pace is not measured, but for short calls.

    python -m tools.benchmarks.gpu_variants softcap,by_distance,…   compiles what these sections need, in many processes
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import flashgen
from tools.benchmarks.gpu_batches import by_many, copy_rate, replay, warmed
from tools.benchmarks.gpu_peers import Attention, captured, flash4, flex, inputs, sdpa, sigmoid_formula
from tools.benchmarks.gpu_rows import BIAS, BY_DISTANCE, DENSE, MASKS, SHORT, SOFTCAP, WINDOW, Row
from tools.benchmarks.gpu_speed import medians

cuda: Any = torch.cuda
Calls = dict[str, Callable[[], object]]
PASSES = ("forward", "both")
ROUNDS = 5


@functools.cache
def operator(text: str) -> Any:
    """One op a text."""
    return flashgen.loads(text, backend="cuda")


def causal_of(row: Row) -> Row:
    """flashgen's own causal kernel of the same sizes."""
    return Row("causal", "mask causal", row.head_dims, row.length, row.batch, row.heads, row.kv_heads)


def attentions(row: Row) -> tuple[dict[str, Attention], dict[str, Tensor]]:
    """flashgen and what a row is compared with; the tensors that it captures."""
    op, of = operator(row.spec), captured(row)
    found: dict[str, Attention] = {"flashgen": lambda q, k, v: op(q, k, v, **of)}
    for peer in row.goals:
        match peer:
            case "flex":
                found["flex"] = flex(row, of)
            case "causal" | "bound":
                found["causal"] = operator(causal_of(row).spec)
            case "formula":
                found["formula"] = sigmoid_formula(row)
            case "flash":
                found["flash"] = sdpa(row, SDPBackend.FLASH_ATTENTION)
            case "cudnn":
                found["cudnn"] = sdpa(row, SDPBackend.CUDNN_ATTENTION)
            case "flash 4":
                found["flash 4"] = flash4(row)
            case "sdpa":
                found["sdpa"] = sdpa(row, None)
    return found, of


def passes(row: Row) -> dict[str, dict[str, Callable[[], list[Tensor]]]]:
    """Of each pass the call of each attention."""
    q, k, v, d_o = inputs(row)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    calls: dict[str, dict[str, Callable[[], list[Tensor]]]] = {"forward": {}, "both": {}}
    found, of = attentions(row)
    wanted = [x for x in of.values() if x.requires_grad]
    for name, attention in found.items():
        mine = [*leaves, *(wanted if name in ("flashgen", "flex") else [])]

        def forward(attention: Attention = attention) -> list[Tensor]:
            with torch.no_grad():
                return [attention(*leaves)]

        def both(attention: Attention = attention, mine: Sequence[Tensor] = tuple(mine)) -> list[Tensor]:
            return list(torch.autograd.grad(attention(*leaves), mine, d_o))

        calls["forward"][name], calls["both"][name] = forward, both
    return calls


def measure(row: Row) -> dict[str, dict[str, float | str]]:
    """Milliseconds of each by pass, or the error of what cannot; the distance of each peer's result from flashgen's."""
    found: dict[str, dict[str, float | str]] = {}
    calls = passes(row)
    for part in PASSES:
        ready: Calls = {}
        results: dict[str, list[Tensor]] = {}
        times: dict[str, float | str] = {}
        for name, call in calls[part].items():
            try:
                if "dropout" not in row.body and name != "causal":
                    results[name] = call()
                ready[name] = replay(call) if row.length <= 8192 else warmed(call)
            except Exception as error:
                times[name] = f"{type(error).__name__}: {str(error)[:160]}"
                cuda.synchronize()
        times |= medians(ready, ROUNDS, 0.012)
        for name, result in results.items():
            if name != "flashgen" and "flashgen" in results:
                pairs = zip(result, results["flashgen"], strict=True)
                worst = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs)
                times[f"{name} differs"] = worst
        found[part] = times
        del results, ready
    return found


def bound(row: Row, part: str, causal: float) -> float:
    """Milliseconds of the causal kernel and of moving a bias: what is kept of it is read, its gradient written."""
    (bias,) = captured(row).values()
    size = bias.numel() * bias.element_size()
    moved = size / 2 + (size / 2 + size if part == "both" else 0.0)
    return causal + moved / copy_rate() * 1e3


def ratio(row: Row, part: str, peer: str, times: Mapping[str, float | str]) -> float | None:
    """How many times as fast as a peer; beside causal attention by the pairs that each keeps."""
    own, other = times.get("flashgen"), times.get("causal" if peer == "bound" else peer)
    if not isinstance(own, float) or not isinstance(other, float):
        return None
    if peer == "bound":
        return bound(row, part, other) / own
    window = WINDOW if "window" in row.name else None
    return other * (row.causal_pairs(window) / row.causal_pairs() if peer == "causal" else 1.0) / own


def cells(row: Row, part: str, times: Mapping[str, float | str]) -> list[str]:
    """flashgen's time, and each ratio with its goal and whether it is met."""
    own = times.get("flashgen", "nothing")
    shown = [f"{own:.3f}" if isinstance(own, float) else own]
    for peer, goals in row.goals.items():
        goal, value = goals[PASSES.index(part)], ratio(row, part, peer, times)
        if value is None:
            reason = times.get(peer, "")
            shown.append(f"{peer}: cannot ({str(reason)[:90]})" if isinstance(own, float) else "")
            continue
        differs = times.get(f"{peer} differs", 0.0)
        note = f", differs by {differs:.0e}" if isinstance(differs, float) and differs > 2e-2 else ""
        shown.append(f"{peer} ×{value:.2f} of {goal:.2f}, {'yes' if value >= goal else '**no**'}{note}")
    return shown


def section(key: str, title: str, rows: Sequence[Row], report: Any, *, seconds: float = 20) -> None:
    """A table of rows, in their order, until time is short."""
    prepared([key], report)
    table: list[tuple[str, ...]] = []
    data = []
    for row in rows:
        if report.seconds_left() < seconds:
            table.append((row.name, row.size, "not run", ""))
            continue
        torch.compiler.reset()
        try:
            found = measure(row)
        except Exception as error:
            found = {part: {"flashgen": f"{type(error).__name__}: {str(error)[:200]}"} for part in PASSES}
        cuda.empty_cache()
        data.append({"row": row.name, "size": row.size, "milliseconds": found})
        report.data[key] = data
        report.save()
        table.append((row.name, row.size, *("; ".join(cells(row, part, found[part])) for part in PASSES)))
        print(*table[-1], sep="  ", flush=True)
    columns = ["row", "B×H×N×D", "forward: ms; × of its goal", "with backward"]
    report.table(title, columns, table, "Medians of five rounds in turns; × is the peer's time over flashgen's.")


def softcap(report: Any) -> None:
    """Soft-caps beside the own causal kernel, by kept pairs."""
    section("softcap", "Soft-cap", SOFTCAP, report)


def by_distance(report: Any) -> None:
    """T5, KERPLE, learned slopes and a table, with gradients, beside causal."""
    section("by_distance", "Scores by distance, with gradients", BY_DISTANCE, report)


def bias(report: Any) -> None:
    """A bias for each pair and its gradient, beside the time to move it."""
    section("bias", "Pair bias, with gradient", BIAS, report)


def other_masks(report: Any) -> None:
    """Masks, sinks, other weights, dropout."""
    section("other_masks", "Masks, sinks, weights, dropout", MASKS, report)


def dense(report: Any) -> None:
    """Plain and causal beside cuDNN."""
    section("dense", "Plain and causal", DENSE, report)
    ratios = {
        part: [
            times["cudnn"] / times["flashgen"]
            for each in report.data.get("dense", ())
            if isinstance((times := each["milliseconds"][part]).get("cudnn"), float)
            and isinstance(times.get("flashgen"), float)
        ]
        for part in PASSES
    }
    lines = [f"{part}: {statistics.geometric_mean(values):.3f}" for part, values in ratios.items() if values]
    report.text("Geometric mean of × cuDNN (goal 1.08): " + ", ".join(lines))


def short(report: Any) -> None:
    """Calls whose pace the host sets: eager, host included, beside SDPA's own choice."""
    prepared(["short"], report)
    table = []
    for row in SHORT:
        if report.seconds_left() < 10:
            break
        calls = passes(row)
        shown = []
        for part in PASSES:
            times = wall_medians({name: warmed(call) for name, call in calls[part].items()})
            goal, value = row.goals["sdpa"][PASSES.index(part)], times["sdpa"] / times["flashgen"]
            met = "yes" if value >= goal else "**no**"
            shown.append(f"{times['flashgen'] * 1e6:.0f}; {times['sdpa'] * 1e6:.0f}; ×{value:.2f} of {goal:.1f}, {met}")
        table.append((row.name, row.size, *shown))
        print(*table[-1], sep="  ", flush=True)
    report.data["short"] = table
    columns = ["row", "B×H×N×D", "forward: µs; SDPA's; ×", "with backward"]
    report.table("Short calls, host included", columns, table, "One call after another, eager; medians of 7 rounds.")


def wall_medians(calls: Mapping[str, Callable[[], object]], rounds: int = 7, count: int = 60) -> dict[str, float]:
    """Seconds a call, of so many in a row and the wait for the last, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            cuda.synchronize()
            samples[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(values) for name, values in samples.items()}


_COLD = """
import sys, time, torch
q, k, v = (torch.randn(1, 8, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.matmul(q, k.transpose(-1, -2)); torch.cuda.synchronize()
start = time.perf_counter()
if sys.argv[1] == "flashgen":
    import flashgen
    flashgen.load(sys.argv[2], backend="cuda")(q, k, v)
else:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 2048, 2048, device="cuda")
    torch.compile(flex_attention)(q, k, v, block_mask=mask)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def cold(report: Any, goal: float = 3.0) -> None:
    """From a spec of one head dimension to its first result, beside compiled FlexAttention's first call."""
    seconds: dict[str, list[float]] = {"flashgen": [], "flex": []}
    for _ in range(2):
        for name, found in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                spec = Path(folder) / "cold.attn"
                spec.write_text("attention cold { head_dim 64  mask causal }\n", encoding="utf-8")
                fresh = {
                    key: f"{folder}/{key}"
                    for key in ("FLASHGEN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
                }
                command = [sys.executable, "-c", _COLD, name, str(spec)]
                run = subprocess.run(command, env=os.environ | fresh, capture_output=True, text=True, check=True)
                found.append(float(run.stdout.split()[-1]))
    own, other = min(seconds["flashgen"]), min(seconds["flex"])
    met = "yes" if other / own >= goal else "**no**"
    report.data["cold"] = seconds
    report.table(
        "Cold, one head dimension, forward",
        ["flashgen (s)", "FlexAttention (s)", "×", "goal", "met"],
        [(f"{own:.2f}", f"{other:.2f}", f"{other / own:.2f}", f"{goal:.1f}", met)],
        "From before the import of flashgen to the first result; torch and CUDA are there; the lesser of two.",
    )


ROWS: Mapping[str, Sequence[Row]] = {
    "softcap": SOFTCAP,
    "by_distance": BY_DISTANCE,
    "bias": BIAS,
    "short": SHORT,
    "other_masks": MASKS,
    "dense": DENSE,
}
SECTIONS: Mapping[str, Callable[[Any], None]] = {
    "softcap": softcap,
    "by_distance": by_distance,
    "bias": bias,
    "short": short,
    "other_masks": other_masks,
    "dense": dense,
    "cold": cold,
}


def _small(row: Row) -> Row:
    """One sequence: kernels do not depend on how many there are, but for FlexAttention's, whose shapes are fixed."""
    return row if "flex" in row.goals else Row(**{**row.__dict__, "batch": 1})


def _prepare(job: tuple[Row, str]) -> str:
    row, part = job
    try:
        calls = passes(_small(row))
        for call in calls[part].values():
            call()
            cuda.synchronize()
    except Exception as error:
        return f"{row.name}, {row.size}: {type(error).__name__}: {str(error)[:200]}"
    return ""


_PREPARED: set[str] = set()


def prepared(names: Sequence[str], report: Any | None = None) -> None:
    """Every kernel of some sections, compiled by several processes at once."""
    jobs: dict[tuple[str, ...], tuple[Row, str]] = {}
    for name in names:
        if name not in _PREPARED:
            for row in ROWS[name]:
                key = (row.spec, row.size) if "flex" in row.goals else (row.spec,)
                for part in PASSES:
                    jobs.setdefault((*key, part), (row, part))
    _PREPARED.update(names)
    if not jobs or "FLASHGEN_PREPARED" in os.environ:
        return
    by_many(_prepare, list(jobs.values()), print if report is None else report.text)


if __name__ == "__main__":
    prepared([name for name in sys.argv[1].split(",") if name in ROWS])
