"""Writes measured tables into README.md beside this file, each with the machine and the command that made it.

A table stays where it is of another processor, so that a run elsewhere loses nothing: the new one is printed. With
``REPLACE_TABLES=1`` in the environment it is replaced all the same.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).resolve().parent / "README.md"


def publish(
    section: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remark: str = ""
) -> None:
    """Print the table, and put it between the section's markers in place of one that is of the same processor."""
    lines = [
        f"`{command}` on {machine()}",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    if remark:
        lines += ["", remark]
    text = "\n".join(lines)
    print(text)
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    page = README.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    found = pattern.search(page)
    if not found:
        raise SystemExit(f"{README} has no section '{section}'")
    other = _processor(found[0])
    if other not in (None, _processor(text)) and os.environ.get("REPLACE_TABLES") != "1":
        print(f"\nNot written: section '{section}' of {README} is of another processor, {other}.")
        print("REPLACE_TABLES=1 replaces it.")
        return
    README.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page), encoding="utf-8")


def _processor(table: str) -> str | None:
    """Whose a table is; None where it does not say."""
    found = re.search(r"^`[^`]+` on ([^,\n]+)", table, re.MULTILINE)
    return found[1] if found else None


def machine() -> str:
    """The processor, the cores, and the versions that matter."""
    import torch  # noqa: PLC0415 - timed scripts decide when torch is imported

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = found[1] if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]  # noqa: S607
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, {compiler}"
