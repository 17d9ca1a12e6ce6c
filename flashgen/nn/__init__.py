"""Modules: an attention of a spec that owns what it learns.

    Attention           the op of a spec; learned tensors and params are Parameters, with initial values that make sense
    MultiheadAttention  ``torch.nn.MultiheadAttention``'s arguments, projections and state, around any spec

``learned_values`` decides what a module owns; ``masked`` gives a spec the masks that a call of the second one brings.
"""

from flashgen.nn.attention import Attention
from flashgen.nn.multihead import MultiheadAttention

__all__ = ["Attention", "MultiheadAttention"]
