"""Time from a spec file to an imported operator: cold (empty cache, compiler runs) and cached.

Every run is a process of its own. Cold: `flashgen build` and then the import of what it wrote, wall time of both
processes, interpreter start and `import torch` included. Cached: `flashgen.load` of the same spec in a new process,
beyond what `import torch` takes in that process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.report import publish

ROOT = Path(__file__).resolve().parents[2]
SPECS = ("causal", "gemma2_local", "t5", "hstu", "forgetting")
COLD_RUNS, CACHED_RUNS = 3, 7

# As on a user's machine: modules are compiled to bytecode once, by the first run, which is not counted.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

LOAD = """
import time
import torch
start = time.perf_counter()
import flashgen
op = flashgen.load({path!r})
print(time.perf_counter() - start)
"""


def main() -> None:
    """Measure and publish."""
    rows = []
    for name in SPECS:
        builds, imports, cached = measure(name)
        cold = [build + load for build, load in zip(builds, imports, strict=True)]
        rows.append(
            [
                name,
                *(f"{statistics.median(series):.2f}" for series in (builds, imports, cold, cached)),
            ]
        )
    publish(
        "build time",
        "make bench",
        ["spec", "flashgen build, cold (s)", "import of the result (s)", "both (s)", "cached load beyond torch (s)"],
        rows,
        f"Medians of {COLD_RUNS} cold and {CACHED_RUNS} cached runs. The import includes `import torch`.",
    )


def measure(name: str) -> tuple[list[float], list[float], list[float]]:
    """Seconds of cold builds, of imports after them, and of cached loads."""
    builds, imports, cached = [], [], []
    spec = ROOT / "specs" / f"{name}.attn"
    for _ in range(COLD_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**ENVIRONMENT, "FLASHGEN_CACHE_DIR": str(Path(folder) / "cache")}
            build = [sys.executable, "-m", "flashgen", "build", str(spec), "-o", str(Path(folder) / "generated")]
            builds.append(seconds(build, folder, environment))
            load = [sys.executable, "-c", f"from generated.{name} import {name}"]
            imports.append(seconds(load, folder, environment))
    for _ in range(CACHED_RUNS + 1):
        code = LOAD.format(path=str(spec))
        load = [sys.executable, "-c", code]
        done = subprocess.run(load, capture_output=True, text=True, check=True, cwd=ROOT, env=ENVIRONMENT)
        cached.append(float(done.stdout))
    return builds, imports, cached[1:]


def seconds(command: list[str], folder: str, environment: dict[str, str]) -> float:
    """Wall time of a process."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
