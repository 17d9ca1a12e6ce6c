"""A mask as a picture in letters, with the tensors that its mod captures.

In: a ``BlockMask``. Out: lines of text. Time follows the picture, not the number of pairs.
"""

from __future__ import annotations

import torch

from flashgen.flex import overflow
from flashgen.flex.masks import BlockMask
from flashgen.flex.ops import arguments, bind
from flashgen.flex.shapes import declared
from flashgen.flex.specs import Shell, make_spec, plain_names
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.op.narrowing import Narrowing
from flashgen.picture.html import of_mask
from flashgen.picture.mask import MaskPicture, caption, mask_picture
from flashgen.picture.paint import letters

_WIDTH = 64


def letters_of(mask: BlockMask) -> str:
    """The blocks of one batch entry and head: all kept, some, none."""
    if 0 in mask.seq_lengths:
        return "no pairs"
    picture = picture_of(mask)
    shown = caption(picture)[0].partition(": ")[2]
    return "\n".join((*letters(picture, _WIDTH), shown, *caption(picture)[1:]))


def html(mask: BlockMask) -> str:
    """The same for notebooks."""
    return of_mask(repr(mask), lambda: picture_of(mask))


def picture_of(mask: BlockMask) -> MaskPicture:
    """With the values that the mod captures now. Raises ``ValueError`` where there is no query, or no key."""
    if 0 in mask.seq_lengths:
        raise ValueError("no pairs")
    batch, heads, q_len, kv_len = mask.shape
    bound = bind(None, mask, torch.device("cpu"))
    traced = bound.trace.traced
    sizes = {"B": batch, "H": heads, "Hkv": heads, "Nq": q_len, "Nk": kv_len}
    overflow.check(bound, sizes, (None, mask.mask_mod))
    shapes = declared(traced, tuple(x.shape for x in bound.tensors), sizes)
    learned = (False,) * (len(traced.tensors) + len(traced.params))
    head_dim = HeadDim(64, 64)
    spec = make_spec(traced, Shell("mask", head_dim, plain_names(traced)), shapes, learned)
    values = Narrowing(spec).narrowed(arguments(bound, learned))
    count = len(traced.tensors)
    return mask_picture(
        spec,
        head_dim,
        Shape(batch, heads, heads, q_len, kv_len),
        *mask.BLOCK_SIZE,
        captured={each.name: x.cpu() for each, x in zip(spec.tensors, values, strict=False)},
        params={each.name: float(x) for each, x in zip(spec.params, values[count:], strict=True)},
    )
