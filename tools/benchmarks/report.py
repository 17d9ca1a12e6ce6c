"""Writes measured tables: into a folder as a run goes on, or into README.md beside this file with the machine and the
command that made them.

A table of README.md stays where it is of another processor, so that a run elsewhere loses nothing: the new one is
printed. With ``REPLACE_TABLES=1`` in the environment it is replaced all the same.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashgen.targets.cpu.device import cpu_name
from flashgen.version import __version__

README = Path(__file__).resolve().parent / "README.md"


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
        lines = [f"## {title}", "", *table_lines(columns, [[str(cell) for cell in row] for row in rows])]
        self.text("\n".join([*lines, *(["", remark] if remark else [])]))

    def text(self, text: str) -> None:
        """Add to the page, and save it."""
        print(f"\n{text}", flush=True)
        self.sections.append(text)
        self.save()

    def run(self, sections: Mapping[str, Callable[[Report], None]], names: Sequence[str]) -> None:
        """The sections of these names: one that fails is said, and the next one starts."""
        for name in names:
            if self.seconds_left() < 30:
                self.text(f"## {name}\n\nNot run: out of time.")
                continue
            start = time.monotonic()
            try:
                sections[name](self)
            except Exception:
                self.text(f"## {name}\n\nFAILED\n\n```\n{traceback.format_exc()}\n```")
            self.data.setdefault("seconds", {})[name] = time.monotonic() - start
            self.save()

    def save(self) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "report.md").write_text("\n\n".join(self.sections) + "\n", encoding="utf-8")
        (self.folder / "report.json").write_text(json.dumps(self.data, indent=1, default=str) + "\n", encoding="utf-8")


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    each = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *each]


def publish(
    section: str,
    command: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    remark: str = "",
    more: str = "",
) -> None:
    """Print the table, a remark and what comes behind it, and put them between the section's markers in place of those
    of the same processor.
    """
    lines = [f"`{command}` on {machine()}", "", *table_lines(columns, rows)]
    for each in (remark, more):
        lines += ["", each] if each else []
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


def processor(cpuinfo: str) -> str | None:
    """What Linux says of a processor, with its generation: machines of the cloud call several by one name."""

    def value(key: str) -> str:
        found = re.search(rf"^{key}[ \t]*:[ \t]*(.+)", cpuinfo, re.MULTILINE)
        return found[1].strip() if found else ""

    name, family, model = (value(key) for key in ("model name", "cpu family", "model"))
    if not (name and family and model):
        return name or None
    generation = _zen(int(family), int(model)) if value("vendor_id") == "AuthenticAMD" else None
    return f"{name} ({generation or f'family {family} model {model}'})"


def _zen(family: int, model: int) -> str | None:
    """AMD's name of a core, by the families and models that Linux's `arch/x86/kernel/cpu/amd.c` tells apart."""
    known: tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...] = (
        ("Zen", 0x17, ((0x00, 0x2F), (0x50, 0x5F))),
        ("Zen 2", 0x17, ((0x30, 0x4F), (0x60, 0x7F), (0x90, 0x91), (0xA0, 0xAF))),
        ("Zen 3", 0x19, ((0x00, 0x0F), (0x20, 0x5F))),
        ("Zen 4", 0x19, ((0x10, 0x1F), (0x60, 0xAF))),
        ("Zen 5", 0x1A, ((0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F))),
    )
    for name, own, models in known:
        if family == own and any(low <= model <= high for low, high in models):
            return name
    return None


def machine() -> str:
    """The processor, the cores, and the versions that matter."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    told = processor(cpuinfo.read_text()) if cpuinfo.exists() else None
    model = told or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]  # noqa: S607
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, {compiler}"


def device_name(device: str) -> str:
    """The processor, its threads, and the versions that matter."""
    versions = f"torch {torch.__version__}, flashgen {__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}; {versions}"
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}; {versions}"
