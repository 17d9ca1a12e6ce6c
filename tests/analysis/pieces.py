"""One tile alone, where tests look at tiles one by one."""

from __future__ import annotations

import numpy as np

from flashgen.analysis.tiles import Boxes, Tile, TileClass, classify_tiles
from flashgen.ir.expr import Expr


def class_in_pieces(keep: Expr, tile: Tile) -> TileClass:
    """Of a tile under a mask over positions alone, which is cut where that settles it."""
    b, h, first_i, last_i, first_j, last_j = (
        np.array([end], np.int64) for end in (tile.b.lo, tile.h.lo, tile.i.lo, tile.i.hi, tile.j.lo, tile.j.hi)
    )
    boxes = Boxes(b, h, first_i, last_i, first_j, last_j, tile.sizes, tile.params)
    return TileClass(classify_tiles(keep, boxes)[0])
