"""At what shape a mask is drawn where nobody says one, and what would take too long to draw.

In: a spec. Out: a ``Shape``; a ``ValueError`` for what is too large.
"""

from __future__ import annotations

import math

from flashgen.analysis.selection import list_read
from flashgen.ir.expr import Load, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.verification import fitting
from flashgen.verification.inputs import tensor_shape

DEFAULT_SHAPE = Shape(1, 8, 8, 1024, 1024)
_ANY = 2**62  # pairs
_MOST_ELEMENTS = 2**26  # of a tensor that is drawn at random


def usual_shape(spec: AttentionSpec) -> Shape:
    """The one that a picture has where nobody says another."""
    return fitting(spec, DEFAULT_SHAPE, pairs=_ANY)


def check_drawable(spec: AttentionSpec, shape: Shape) -> None:
    """Raise ``ValueError`` where a tensor that the mask reads would take too long to draw at random."""
    conditions = [spec.mask, *([] if spec.layout is None else [spec.layout.keep])]
    conditions += [] if spec.select is None else [list_read(spec.select)]
    read = {node.tensor for node in walk(*conditions) if isinstance(node, Load)}
    for tensor in (each for each in spec.tensors if each.name in read):
        elements = math.prod(tensor_shape(tensor, shape, spec.head_dims[0]))
        if elements > _MOST_ELEMENTS:
            raise ValueError(
                f"the tensor '{tensor.name}' would have {elements:,} elements, which takes too long to draw; "
                f"{_MOST_ELEMENTS:,} are allowed"
            )
