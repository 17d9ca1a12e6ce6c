"""A ``MaskPicture`` as pixels, one colour for each class, white where nothing is computed; and as letters.

In: a ``MaskPicture`` and a size. Out: an array of palette entries; written as a PNG of a few kilobytes where the
picture is small. Blue is kept, the darker the fewer comparisons it takes; sand is computed for nothing. Letters
are for terminals without colours.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.tiles import TileClass
from flashgen.picture.mask import MaskPicture, coarser

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
