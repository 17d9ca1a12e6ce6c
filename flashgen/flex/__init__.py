"""FlexAttention's mods, compiled by flashgen.

    from flashgen.flex import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 1024, 1024)
    o = flex_attention(q, k, v, score_mod, mask)

How a mod becomes a kernel:

    score_mod ─signature─▶ CapturedValues ─trace─▶ Trace(Traced) ─make_spec─▶ AttentionSpec ─load_spec─▶ op
    (function) captured.py           tracing.py           specs.py, shapes.py        pipeline

``CapturedValues``: what the mod reads besides its arguments (numbers and tensors, in closures, globals, partials, other
mods), and a signature by which a later call finds the trace again. ``Traced``: the expressions, typed, as nodes
of the IR, with plain names: mods that do the same are equal, whatever they are called. ``Trace``: how a call finds the
values of captured tensors and params. A Python number that a mod captures is a param, so that another value compiles
nothing; where Python itself asks for its value (``if causal:``, ``range(n)``) the answer belongs to the trace.
"""

from functools import partial
from typing import Any

from torch.nn.attention.flex_attention import create_mask

from flashgen.flex.attention import AuxOutput, AuxRequest, flex_attention, from_mods, to_spec
from flashgen.flex.masks import BlockMask, and_masks, create_block_mask, create_nested_block_mask, noop_mask, or_masks
from flashgen.plan.notebook import DRAWINGS

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "flex_attention",
    "from_mods",
    "noop_mask",
    "or_masks",
    "to_spec",
]


def _drawn(how: str, mask: Any) -> Any:
    from flashgen.flex import drawing

    return getattr(drawing, how)(mask)


DRAWINGS.update({"mask": partial(_drawn, "html"), "mask in letters": partial(_drawn, "letters_of")})
