"""A ``MaskPicture`` as a figure: axes in positions, the order of the tiles, a legend, and a caption with the numbers.

In: a ``MaskPicture`` and a path. Out: a PNG, SVG or PDF.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashgen.analysis.tiles import TileClass
from flashgen.picture.mask import MaskPicture, caption
from flashgen.picture.paint import LEGEND, PALETTE, hex_of, paint, size_of
from flashgen.picture.plotting import figure

_PIXELS = 960
_MOST_NUMBERED, _MOST_LINES = 16, 64  # tiles a side
_INK = "#c8102e"


def save_figure(picture: MaskPicture, path: Path) -> None:
    """Raises ``PlottingMissing`` without matplotlib, ``ValueError`` for a suffix that is no format, ``OSError``."""
    height, width = size_of(picture, _PIXELS)
    inches = 4.6 / _PIXELS
    with figure(path, max(width * inches, 3.2) + 0.6, height * inches + 1.4) as drawn:
        axes = drawn.add_subplot()
        q, k = picture.shape.q_len, picture.shape.kv_len
        colors = PALETTE[paint(picture, height, width)]
        axes.imshow(colors, extent=(0, k, q, 0), aspect="auto", interpolation="nearest")
        axes.grid(visible=False)
        axes.set_xlabel("key j")
        axes.set_ylabel("query i")
        axes.xaxis.set_label_position("top")
        axes.xaxis.tick_top()
        axes.spines[:].set_visible(False)
        _draw_order(axes, picture)
        _add_legend(drawn)
        axes.annotate(
            "\n".join(caption(picture)), (0, 0), (0, -8), "axes fraction", "offset points", va="top", fontsize=7.5
        )


def _draw_order(axes: Any, picture: MaskPicture) -> None:
    """A number in each visited tile, or a line along each row of them where numbers would not be read."""
    rows, columns = picture.classes.shape
    height, width = picture.cell
    q, k = picture.shape.q_len, picture.shape.kv_len
    middles = [
        ((column * width + min((column + 1) * width, k)) / 2, (row * height + min((row + 1) * height, q)) / 2)
        for row, column in picture.order()
    ]
    if max(rows, columns) <= _MOST_NUMBERED:
        for number, ((row, column), (x, y)) in enumerate(zip(picture.order(), middles, strict=True), start=1):
            dark = picture.classes[row, column] == TileClass.FULL
            axes.text(x, y, str(number), ha="center", va="center", fontsize=5.5, color="white" if dark else "#333333")
    elif max(rows, columns) <= _MOST_LINES:
        for row in range(rows):
            ends = [middle for (place, _), middle in zip(picture.order(), middles, strict=True) if place == row]
            if ends:
                axes.plot(*np.transpose(ends), color=_INK, linewidth=0.5, alpha=0.7)
                axes.plot(*ends[-1], color=_INK, marker=">", markersize=2, markeredgewidth=0)


def _add_legend(drawn: Any) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 - the extra may be missing

    entries = [
        Patch(facecolor=hex_of(color), edgecolor="#999999", linewidth=0.4, label=label) for color, label in LEGEND
    ]
    drawn.legend(handles=entries, loc="outside lower left", ncols=4, fontsize=6.5, handlelength=1, columnspacing=1)
