"""Builds, checks and times everything on the GPU at hand, in one call: tables in Markdown and data in JSON.

    python -m benchmarks.gpu_check OUT [--seconds 540] [--only build,check,tests,speed,overhead,sanitizer]

Every section writes its part of OUT/report.md and OUT/report.json when it
ends, so that a run that is cut off keeps what it had; a section that fails is reported and the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cupy
import torch

import flashgen
from benchmarks.gpu_speed import overhead, speed
from flashgen.ir.shape import Shape
from flashgen.verification import fitting, random_inputs
from flashgen.verification.verify import verify

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Report:
    """What was found so far, written to the folder after each section."""

    folder: Path
    stop: float
    sections: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def seconds_left(self) -> float:
        """Until the run has to end."""
        return self.stop - time.monotonic()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], remark: str = "") -> None:
        """A section of the page."""
        lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
        self.text("\n".join([*lines, *(["", remark] if remark else [])]))

    def text(self, text: str) -> None:
        """Add to the page, and save it."""
        print(f"\n{text}", flush=True)
        self.sections.append(text)
        self.save()

    def save(self) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "report.md").write_text("\n\n".join(self.sections) + "\n", encoding="utf-8")
        (self.folder / "report.json").write_text(json.dumps(self.data, indent=1, default=str) + "\n", encoding="utf-8")


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
    """Every spec of the gallery, from its text to the first result."""
    rows = []
    for file in sorted((ROOT / "specs").glob("*.attn")):
        if report.seconds_left() < 60:
            break
        start = time.perf_counter()
        try:
            op = flashgen.load(file, backend="cuda")
            for head_dim in op.spec.head_dims:
                inputs = random_inputs(op.spec, fitting(op.spec, Shape(1, 1, 1, 8, 8)), head_dim, torch.float16).to(
                    "cuda"
                )
                op(inputs.q, inputs.k, inputs.v, **inputs.named)
            note = ""
        except Exception as error:
            note = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append((file.stem, f"{time.perf_counter() - start:.1f}", note))
    report.data["build"] = rows
    report.table("Built", ["spec", "seconds", ""], rows)


def check(report: Report) -> None:
    """Every spec against the float64 reference, forward and every gradient."""
    rows, failed, data = [], [], {}
    for file in sorted((ROOT / "specs").glob("*.attn")):
        if report.seconds_left() < 60:
            rows.append((file.stem, "not run: out of time", ""))
            continue
        try:
            op = flashgen.load(file, const={"rows": 2} if file.stem == "evoformer" else {}, backend="cuda")
            shapes = [fitting(op.spec, shape) for shape in (Shape(2, 4, 2, 113, 113), Shape(1, 2, 1, 77, 203))]
            cases = list(verify(op, shapes, device="cuda"))
            bad = [f"{case.dtype} {case.head_dim} {case.shape} {row.tensor}: {row.error:.1e} > {row.tolerance:.1e}"
                   for case in cases for row in case.rows if not row.ok]  # fmt: skip
            worst = max(row.error / row.tolerance for case in cases for row in case.rows)
            count = sum(len(case.rows) for case in cases)
            rows.append((file.stem, f"{count - len(bad)} of {count} within tolerance", f"{worst:.2f}"))
            failed += [f"{file.stem} {line}" for line in bad]
            data[file.stem] = {"tensors": count, "failed": bad, "worst": worst}
        except Exception:
            rows.append((file.stem, "ERROR", ""))
            failed.append(f"{file.stem}: {traceback.format_exc(limit=-3)}")
    report.data["check"] = data
    remark = "\n".join(["```", *failed[:100], "```"]) if failed else "Everything is within tolerance."
    report.table("Checked against the float64 reference", ["spec", "tensors", "worst error / tolerance"], rows, remark)


def tests(report: Report) -> None:
    """tests/gpu, without the sanitizer."""
    _pytest(report, "Tests on the GPU", ["--deselect", "tests/gpu/test_sanitizer.py"])


def sanitizer(report: Report) -> None:
    """compute-sanitizer over small calls."""
    _pytest(report, "compute-sanitizer", ["tests/gpu/test_sanitizer.py"])


def _pytest(report: Report, title: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20", "tests/gpu", *arguments]
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
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for report.md, report.json and logs")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop starting new work after this")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    given = parser.parse_args()
    report = Report(given.out, time.monotonic() + given.seconds)
    environment(report)
    for name in given.only.split(","):
        if report.seconds_left() < 30:
            report.text(f"## {name}\n\nNot run: out of time.")
            continue
        start = time.monotonic()
        try:
            SECTIONS[name](report)
        except Exception:
            report.text(f"## {name}\n\nFAILED\n\n```\n{traceback.format_exc()}\n```")
        report.data.setdefault("seconds", {})[name] = time.monotonic() - start
        report.save()


if __name__ == "__main__":
    main()
