"""A mask as a picture in letters, with the tensors that its mod captures.

In: a ``BlockMask``. Out: lines of text. Time follows the picture, not the number of pairs.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.flex.attention import described
from flashgen.flex.masks import BlockMask
from flashgen.flex.ops import arguments
from flashgen.flex.specs import make_spec
from flashgen.ir.shape import Shape
from flashgen.op.narrowing import Narrowing
from flashgen.picture.html import of_mask
from flashgen.picture.mask import MaskPicture, caption, mask_picture
from flashgen.picture.paint import letters

_WIDTH = 64


def letters_of(mask: BlockMask) -> str:
    """The letters of one batch entry and head: blocks that are full, partial and empty."""
    if 0 in mask.seq_lengths:
        return "no pairs"
    picture = picture_of(mask)
    shown = caption(picture)[0].partition(": ")[2]
    return "\n".join((*letters(picture, _WIDTH), shown, *caption(picture)[1:]))


def html(mask: BlockMask) -> str:
    """The picture as HTML, for notebooks."""
    return of_mask(repr(mask), lambda: picture_of(mask))


def picture_of(mask: BlockMask) -> MaskPicture:
    """The picture of a mask with current captured values. Raises ``ValueError`` without queries or keys."""
    if 0 in mask.seq_lengths:
        raise ValueError("no pairs")
    batch, heads, q_len, kv_len = mask.shape
    bound, shell, shapes = described(None, mask, 64, mask.shape, None)
    learned = (False,) * len(shell.names)
    spec = make_spec(bound.trace.traced, replace(shell, name="mask"), shapes, learned)
    values = Narrowing(spec).narrowed(arguments(bound, learned))
    count = len(bound.tensors)
    return mask_picture(
        spec,
        shell.head_dim,
        Shape(batch, heads, heads, q_len, kv_len),
        *mask.BLOCK_SIZE,
        captured={each.name: x.cpu() for each, x in zip(spec.tensors, values, strict=False)},
        params={each.name: float(x) for each, x in zip(spec.params, values[count:], strict=True)},
    )
