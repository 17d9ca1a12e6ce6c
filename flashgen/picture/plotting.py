"""Matplotlib, which the extra ``plot`` brings, and the style that all figures share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which stay apart for every kind of colour vision; the first is flashgen's.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 160,
    "svg.hashsalt": "flashgen",  # the same bytes each time
    "svg.fonttype": "none",
}
_METADATA = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None, "Producer": None}}


class PlottingMissing(RuntimeError):  # noqa: N818 - reads as what it says
    """Matplotlib is not installed; the message says how to get it."""


def require() -> None:
    """Ask for what pictures need before anything takes long. Raises ``PlottingMissing``."""
    _import("matplotlib")


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib ``Figure`` of this size in inches, written to ``path`` at the end; its suffix is the format.

    Raises ``PlottingMissing``, and ``ValueError`` for another suffix than those of ``SUFFIXES``.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"'{path}' ends in '{path.suffix}'; pictures are written as {', '.join(SUFFIXES)}")
    matplotlib = _import("matplotlib")
    with matplotlib.rc_context(_STYLE):
        # A Figure of its own: no window is opened, and none of pyplot's state is touched.
        drawn = _import("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield drawn
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format=suffix[1:], metadata=_METADATA[suffix])


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PlottingMissing(f"pictures need matplotlib: pip install 'flashgen[plot]' ({error})") from None
