"""Builds, checks and times everything on the GPU at hand, in one call: tables in Markdown and data in JSON.

    python -m tools.benchmarks.gpu_check OUT [--seconds 540] [--only build,check,tests,speed,…]

Every section writes its part of OUT/report.md and OUT/report.json when it
ends, so that a run that is cut off keeps what it had; a section that fails is reported and the next one starts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import cupy
import torch

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import assembled, compiled
from flashgen.hosts.backends import gpu_at_hand
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.signature import TORCH_DTYPES
from flashgen.plan.plan import Part
from flashgen.toolchains.nvrtc import Resources
from flashgen.verification import fitting, random_inputs
from flashgen.verification.verify import verify
from tools.benchmarks import doors, gpu_batches, gpu_variants, launch_numbers
from tools.benchmarks.gpu_speed import overhead, speed
from tools.benchmarks.report import Report
from tools.benchmarks.speed import names_of

ROOT = Path(__file__).resolve().parents[2]
WORKERS = min(os.cpu_count() or 1, 12)


def environment(report: Report) -> None:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CuPy {cupy.__version__}"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    report.data["environment"] = {"gpu": name, "capability": capability, "versions": versions, "driver": driver}
    report.text(f"# flashgen on {name}\n\nCompute capability {capability}; {versions}; driver and clocks: {driver}")


def build(report: Report) -> None:
    """Every spec of the gallery, from its text to the first result, and what its kernels take."""
    rows = list(_each_spec(report, _build))
    report.data["build"] = rows
    columns = ["spec", "seconds", "dtypes", "registers", "spilled bytes"]
    report.table("From text to the first result", columns, rows, f"{WORKERS} processes at once.")


def _build(file: Path) -> tuple[str, ...]:
    start, target = time.perf_counter(), gpu_at_hand()
    op = flashgen.load(file, backend="cuda")
    elements = op.spec.dtypes or (ElementType.F16, ElementType.BF16, ElementType.F32)
    kernels: list[Resources] = []
    for head_dim in op.spec.head_dims:
        shape = fitting(op.spec, Shape(1, 1, 1, 8, 8))
        for element in elements:
            inputs = random_inputs(op.spec, shape, head_dim, TORCH_DTYPES[element]).to("cuda")
            op(inputs.q, inputs.k, inputs.v, **inputs.named)
            (made,) = assembled([compiled(analyse(op.spec, head_dim), target, part=Part(element))])
            kernels += made.binary.kernels
    most = max(kernel.registers for kernel in kernels)
    spilled = ", ".join(f"{each.name} {each.spill_bytes}" for each in kernels if each.spill_bytes) or "0"
    return (f"{time.perf_counter() - start:.1f}", ", ".join(map(str, elements)), str(most), spilled)


def check(report: Report) -> None:
    """Every spec against the float64 reference, forward and every gradient."""
    rows = list(_each_spec(report, _check))
    report.data["check"] = rows
    failed = [line for row in rows for line in row[3:]]
    remark = "\n".join(["```", *failed[:100], "```"]) if failed else "Everything is within tolerance."
    columns = ["spec", "tensors", "worst error / tolerance"]
    report.table("Checked against the float64 reference", columns, [row[:3] for row in rows], remark)


def _check(file: Path) -> tuple[str, ...]:
    op = flashgen.load(file, const={"rows": 2} if file.stem == "evoformer" else {}, backend="cuda")
    shapes = [fitting(op.spec, shape) for shape in (Shape(2, 4, 2, 113, 113), Shape(1, 2, 1, 77, 203))]
    cases = list(verify(op, shapes, device="cuda"))
    bad = [
        f"{file.stem} {case.dtype} {case.head_dim} {case.shape} {row.tensor}: {row.error:.1e} > {row.tolerance:.1e}"
        for case in cases
        for row in case.rows
        if not row.ok
    ]
    worst = max(row.error / row.tolerance for case in cases for row in case.rows)
    count = sum(len(case.rows) for case in cases)
    return (f"{count - len(bad)} of {count} within tolerance", f"{worst:.2f}", *bad)


def _each_spec(report: Report, work: Callable[[Path], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows of work over the gallery, several specs at once; what fails is said in its row."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, context) as pool:
        files = sorted((ROOT / "specs").glob("*.attn"))
        waiting = [(file, pool.submit(work, file)) for file in files]
        for file, result in waiting:
            try:
                yield (file.stem, *result.result(timeout=max(report.seconds_left() - 30, 0)))
            except TimeoutError:
                result.cancel()
                yield (file.stem, "out of time", "")
            except Exception as error:
                yield (file.stem, "FAILED", "", f"{file.stem}: {''.join(traceback.format_exception(error, limit=-3))}")


def tests(report: Report) -> None:
    """tests/gpu, without the sanitizer."""
    _pytest(report, "Tests on the GPU", ["tests/gpu", "--ignore", "tests/gpu/test_sanitizer.py"])


def sanitizer(report: Report) -> None:
    """compute-sanitizer over small calls."""
    _pytest(report, "compute-sanitizer", ["tests/gpu/test_sanitizer.py"])


def _pytest(report: Report, title: str, arguments: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--maxfail=100",
        "-n",
        str(WORKERS),
        *arguments,
    ]
    log = report.folder / f"{title.replace(' ', '_')}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as out:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False,
                timeout=max(report.seconds_left() - 20, 10),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            out.write("\nout of time\n")
    lines = log.read_text().splitlines()
    report.data[title] = lines[-1:]
    report.text("\n".join([f"## {title}", "", "```", *lines[-25:], "```"]))


SECTIONS: Mapping[str, Callable[[Report], None]] = {
    "build": build,
    "check": check,
    "speed": speed,
    "overhead": overhead,
    "tests": tests,
    "sanitizer": sanitizer,
    **gpu_batches.SECTIONS,
    **gpu_variants.SECTIONS,
    **doors.SECTIONS,
    **launch_numbers.SECTIONS,
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for report.md, report.json and logs")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop starting new work after this")
    known = ", ".join(SECTIONS)
    parser.add_argument("--only", type=names_of(SECTIONS), default=[*SECTIONS], help=f"with commas: {known}")
    given = parser.parse_args()
    report = Report(given.out, time.monotonic() + given.seconds)
    environment(report)
    report.run(SECTIONS, given.only)


if __name__ == "__main__":
    main()
