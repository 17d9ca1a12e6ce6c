"""Whether entries of a batch are independent of each other, so that further entries may be put beside them.

Stage: analyse. In: an ``AttentionSpec``. Out: the axis of each captured tensor that runs along the batch.
``torch.vmap`` folds mapped dimensions into the batch where entries are independent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Load, index, size, walk
from flashgen.ir.spec import AttentionSpec

_B, _b = size("B"), index("b")


@functools.lru_cache(maxsize=64)
def batch_axes(spec: AttentionSpec) -> Mapping[str, int | None] | None:
    """The axis of each captured tensor that runs along the batch, None for a tensor without one. None for all where an
    entry's result depends on its number or on the size of the batch.

    Dropout, which depends on the number of an entry, is not considered: a call may drop nothing.
    """
    roots = [simplify(each) for each in spec.expressions]
    axes: dict[str, int | None] = {}
    for tensor in spec.tensors:
        along = [axis for axis, extent in enumerate(tensor.shape) if _B in set(walk(extent))]
        if len(along) > 1 or any(tensor.shape[axis] != _B for axis in along):
            return None
        axes[tensor.name] = along[0] if along else None
    defaults = [param.default for param in spec.params if param.default is not None]
    if any(_B in set(walk(root)) for root in (*defaults, *roots)):
        return None
    for node in walk(*roots):
        own = axes[node.tensor] if isinstance(node, Load) else None
        if own is not None and isinstance(node, Load) and node.indices[own] != _b:
            return None
        if _b in (child for n, child in enumerate(node.children) if n != own):
            return None
    return axes
