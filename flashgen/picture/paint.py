"""A ``MaskPicture`` as pixels, one colour for each class, white where nothing is computed; as letters; as a figure.

In: a ``MaskPicture`` and a size. Out: an array of palette entries; written as a PNG of a few kilobytes where the
picture is small. Blue is kept, the darker the fewer comparisons it takes; sand is computed for nothing. Letters
are for terminals without colours. A figure, in a PNG, SVG or PDF, has axes in positions, the order of the tiles, a
legend, and a caption with the numbers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.tiles import TileClass
from flashgen.picture.mask import MaskPicture, caption, coarser
from flashgen.picture.plotting import figure

Color = tuple[int, int, int]

EMPTY: Color = (246, 246, 246)
FULL: Color = (30, 77, 122)
KEPT: Color = (79, 155, 217)  # in a PARTIAL tile
MASKED: Color = (248, 222, 184)  # the same, not kept
LEGEND = ((FULL, "FULL"), (KEPT, "PARTIAL, kept"), (MASKED, "PARTIAL, masked"), (EMPTY, "EMPTY, never visited"))
LETTERS = MappingProxyType({"FULL": "█", "PARTIAL": "▒", "EMPTY": "·"})
_SHADES = 15  # between MASKED and KEPT
_LINE_FROM = 6  # pixels: cells of this size are told apart by lines

_RAMP = [
    tuple(round(a + (b - a) * shade / _SHADES) for a, b in zip(MASKED, KEPT, strict=True))
    for shade in range(_SHADES + 1)
]
_COLORS = np.array([EMPTY, FULL, *_RAMP], np.uint8)
# The same colours a little darker, for the lines between tiles.
PALETTE: NDArray[np.uint8] = np.concatenate([_COLORS, (_COLORS * 0.86).astype(np.uint8)])


def paint(picture: MaskPicture, height: int, width: int) -> NDArray[np.uint8]:
    """Entries of ``PALETTE``, [height, width]."""
    rows, columns = _scaled(picture.shape.q_len, height), _scaled(picture.shape.kv_len, width)
    kept = picture.kept[np.ix_(_scaled(picture.kept.shape[0], height), _scaled(picture.kept.shape[1], width))]
    cells = rows // picture.cell[0], columns // picture.cell[1]
    classes = picture.classes[np.ix_(*cells)]
    colors = np.where(classes == TileClass.PARTIAL, 2 + np.rint(kept * _SHADES), classes == TileClass.FULL)
    if min(height / picture.classes.shape[0], width / picture.classes.shape[1]) >= _LINE_FROM:
        lines = _starts(cells[0])[:, None] | _starts(cells[1])[None, :]
        colors = np.where(lines, colors + len(_COLORS), colors)
    return colors.astype(np.uint8)


def letters(picture: MaskPicture, width: int) -> list[str]:
    """A line for each row of cells, two letters a cell; at most ``width`` letters and half as many lines."""
    return [
        "".join(2 * LETTERS[TileClass(number).name] for number in row) for row in reduced(picture.classes, width // 2)
    ]


def reduced(classes: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """No more than ``most`` cells a side: cells that disagree are PARTIAL together."""
    while max(classes.shape) > most:
        classes = coarser(classes)
    return classes


def size_of(picture: MaskPicture, longest: int) -> tuple[int, int]:
    """Height and width in the proportion of queries to keys, as far as the shorter side stays visible."""
    q, k = picture.shape.q_len, picture.shape.kv_len
    least = max(1, longest // 12)
    return max(least, longest * q // max(q, k)), max(least, longest * k // max(q, k))


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of palette entries, [height, width], the same bytes for the same entries; it needs nothing but NumPy."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, which are entries of a palette
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # each begins with the number of its filter: none
    image = zlib.compress(rows.tobytes(), 9)
    chunks = ((b"IHDR", header), (b"PLTE", PALETTE.tobytes()), (b"IDAT", image), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def hex_of(color: Sequence[int]) -> str:
    """A colour as HTML has it."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def _scaled(length: int, pixels: int) -> NDArray[np.int64]:
    """The position that each pixel shows, of this many."""
    return (
        (np.arange(pixels) * length + length // 2) // pixels
        if length < pixels
        else np.arange(pixels) * length // pixels
    )


def _starts(cells: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where another cell begins, but for the first."""
    found: NDArray[np.bool_] = np.diff(cells, prepend=cells[0]) != 0
    return found


# In files -------------------------------------------------------------------------------------------------------------


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
