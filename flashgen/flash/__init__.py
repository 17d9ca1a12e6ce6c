"""FlashAttention's functions, compiled by flashgen: the same names, layouts, arguments and meaning.

    from flashgen.flash import flash_attn_func

    o = flash_attn_func(q, k, v, causal=True, window_size=(1023, 0))

On CPUs and GPUs, in float32, bfloat16 and float16, with gradients, those of ``alibi_slopes`` too. What cannot be given
is refused by name.
"""

from flashgen.flash.functions import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashgen.flash.kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
