"""Hugging Face transformers with flashgen's kernels.

    import flashgen.integrations.transformers

    flashgen.integrations.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="flashgen")

How a layer becomes a kernel:

    mask function + padding ─recognise─▶ LayerMask(condition, captured) ┐
    (transformers.masking_utils)         masks.py                       ├─▶ Layer ─text─▶ op
    arguments of the attention function ────────────────────────────────┘
                                         calls.py                           flashgen.op.layer

Nothing of size Nq × Nk is made: what transformers' own functions say of a mask becomes the mask of a spec, over
captured tensors of length Nk (padding, documents, image blocks). A mask that is given as a tensor is captured as it is.
"""

from flashgen.integrations.transformers.registering import register

__all__ = ["register"]
