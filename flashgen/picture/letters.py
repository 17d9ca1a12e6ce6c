"""A mask's tile classes as lines of letters, where there is no colour. In: a ``MaskPicture``. Out: text."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.tiles import TileClass
from flashgen.picture.mask import MaskPicture, coarser

LETTERS = MappingProxyType({"FULL": "█", "PARTIAL": "▒", "EMPTY": "·"})


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
