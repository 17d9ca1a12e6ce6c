"""What every section of ``tools.benchmarks.ranks`` knows: the scale, the report, this rank among all.

In: a report. Out: a ``Run``, by which ranks talk with each other, and the rate of links that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tools.benchmarks.rank_calls import Scale, Setting
from tools.benchmarks.report import Report

GPU = Scale(32, 8, (32768, 8192, 131072), "cuda", 4096)
CPU = Scale(4, 2, (128, 64), "cpu", 64)
LINK = 450e9  # bytes a second, where none was measured


@dataclass(frozen=True)
class Run:
    """What every section knows. Rank 0 alone writes the report."""

    scale: Scale
    report: Report
    rank: int
    world: int
    link: list[float]  # bytes a second, once measured
    most: int  # rows of times
    variants: tuple[str, ...]  # that are timed and traced; none: all
    sections: tuple[str, ...]  # that were asked for

    @property
    def is_gpu(self) -> bool:
        """Else all is tried on CPUs."""
        return self.scale.device.startswith("cuda")

    def takes(self, setting: Setting) -> bool:
        """Whether a setting was asked for."""
        return not self.variants or setting.variant in self.variants

    def said(self, value: Any) -> Any:
        """What rank 0 says."""
        found = [value]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def all(self, value: Any) -> list[Any]:
        """What every rank says."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def has(self, seconds: float) -> bool:
        """Whether so much time is left, as rank 0 sees it."""
        return bool(self.said(self.report.seconds_left() > seconds))

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Any], remark: str = "") -> None:
        """A section of the page, and its data."""
        if self.rank == 0:
            self.report.data[name] = [dict(zip(columns, row, strict=True)) for row in rows]
            self.report.table(title, columns, rows, remark)
