"""The arguments that every op has beside what its spec declares: no tensor or param may be called like one of them."""

from __future__ import annotations

OPTIONS = (
    "return_lse", "dropout_p", "seed", "q_start", "kv_start", "b_start", "h_start",
    "q_total", "kv_total", "b_total", "h_total", "deterministic", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
# What a spec may capture, tensors and params together: operators of PyTorch have 64 arguments at most, of which those
# of 8 bits and of caches need up to 23 for themselves.
MAX_CAPTURED = 40
OP_ARGUMENTS = frozenset((*OPTIONS, "q", "k", "v", "o", "lse", "dtype", "backend", "self"))
