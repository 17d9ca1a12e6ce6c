"""The attention function: what a layer of transformers passes, as a call of the op of a ``Layer``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.integrations.transformers.masks import ELSEWHERE, LayerMask
from flashgen.op.layer import LOWER_RIGHT, Layer, broadcast, conjunction, element, scale_of
from flashgen.op.tensor_kinds import UnchangedTensor

# Keywords by which some attention function or layer of transformers computes something else, and that are not honoured
# here. Models hand all others through to every layer, where eager attention does not look at them either.
_PAGES = "continuous batching keeps keys and values in pages; use 'sdpa' or 'paged|eager' for it"
_SELECTED = "selected keys come as an attention_mask here; use attn_implementation='eager' or 'sdpa'"
_HEADS = "weights cannot be scaled a head; scale the output of the heads"
_REFUSED = {
    "output_attentions": "the weights are never made; use attn_implementation='eager' to see them",
    "cache": _PAGES,
    "block_table": _PAGES,
    "k_cache": _PAGES,
    "v_cache": _PAGES,
    "indices": _SELECTED,
    "block_indices": _SELECTED,
    "head_mask": _HEADS,
    "layer_head_mask": _HEADS,
    "cross_attn_head_mask": _HEADS,
    "seq_idx": "pass cu_seq_lens_q and cu_seq_lens_k, or position_ids, which say the same",
    "sinks": "a sink with a value of its own; use attn_implementation='eager' (s_aux are sinks without one)",
    "use_top_left_mask": "a mask that begins at the first key; pass an attention_mask",
}

_ORDERS = frozenset(("causal", "window"))  # kinds of masks that go by where a query stands among the keys


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention: ``query`` [B, H, Nq, D], ``key`` [B, Hkv, Nk, D], ``value`` [B, Hkv, Nk, Dv] → ([B, Nq, H, Dv], None).

    ``attention_mask`` is a ``LayerMask``, or a tensor that broadcasts to [B, H, Nq, Nk]: bools that are true where a
    pair is kept, or floats that are added to the scores. Where there is one it decides alone, as in transformers' eager
    attention: the models' ``is_causal`` and windows are in it. ``is_causal``, else ``module.is_causal``, and
    ``sliding_window`` count where there is none.
    ``softcap``, ``s_aux`` ([H], trained sinks), ``position_bias`` (broadcasts to [B, H, Nq, Nk], added to the scores)
    and ``cu_seq_lens_*`` (int, the ends of packed sequences; B is 1) as in transformers; sinks and biases receive
    gradients. ``dropout`` counts where the module trains.

    Keywords that no attention of transformers reads are left alone. Raises ``TypeError`` for one that would change the
    result and is not honoured, and ``ValueError`` for values that do not fit, by name.
    """
    for name, given in others.items():
        if name in _REFUSED:
            _check_other(name, given, cu_seq_lens_q, attention_mask)
    if key.itemsize == 1 and key.dtype is not query.dtype:
        raise TypeError(_EIGHT_BITS.format(key.dtype, query.dtype))
    batch, count, q_length, width = query.shape
    key_batch, _, kv_length, _ = key.shape
    if batch != key_batch:
        query, key, value = _same_batch(query, key, value)
        batch = query.shape[0]
    sizes = (batch, count, q_length, kv_length)
    asked = _CallBuilder(sizes, scale_of(scaling, int(width)))
    bias = position_bias
    if attention_mask is None:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        asked.order(bool(causal), sliding_window)
    elif isinstance(attention_mask, LayerMask):
        asked.layer_mask(attention_mask)
    else:
        _check_broadcast("attention_mask", attention_mask, sizes)
        if attention_mask.dtype is torch.bool:
            asked.matrix(attention_mask)
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        asked.documents(cu_seq_lens_q, cu_seq_lens_k)
    if bias is not None:
        _check_broadcast("position_bias", bias, sizes)
        asked.captured["bias"] = bias
    if softcap is not None:
        asked.captured["cap"] = softcap
    if s_aux is not None:
        asked.captured["sinks"] = s_aux.reshape(-1)
    drops = dropout > 0 and module.training
    layer = Layer(
        head_dim=(int(width), int(value.shape[3])),
        scaling="scaling" in asked.captured,
        softcap=softcap is not None,
        bias=None if bias is None else broadcast(tuple(bias.shape), sizes),
        sinks=s_aux is not None,
        dropout=drops,
        mask=conjunction(asked.conditions),
        declarations=tuple(asked.declarations),
    )
    o = layer.op()(query, key, value, dropout_p=dropout if drops else None, **asked.captured)
    return o.transpose(1, 2).contiguous(), None


@dataclass
class _CallBuilder:
    """The conditions of a mask over [B, H, Nq, Nk] = ``sizes``, and the values that they capture."""

    sizes: tuple[int, int, int, int]
    captured: dict[str, Any]
    conditions: list[str] = field(default_factory=list)
    declarations: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)  # what the mask goes by: those of a LayerMask

    def order(self, causal: bool, sliding_window: int | None) -> None:
        """The mask of a layer that is given none: causal, and a sliding window."""
        if causal:
            q_length, kv_length = self.sizes[2:]
            if q_length not in (1, kv_length):
                raise ValueError(
                    f"'is_causal' for {q_length} queries, {kv_length} keys and no mask does not say where the queries "
                    "stand; pass an attention_mask"
                )
            self.conditions.append(f"j <= {LOWER_RIGHT}")
            self.kinds.add("causal")
        if sliding_window is not None:
            self.kinds.add("window")
            self.conditions.append(f"abs({LOWER_RIGHT} - j) < window")
            self.declarations.append("param window: i32")
            self.captured["window"] = sliding_window

    def layer_mask(self, mask: LayerMask) -> None:
        batch, _, q_length, kv_length = self.sizes
        if (mask.shape[0], *mask.shape[2:]) != (batch, q_length, kv_length):
            raise ValueError(
                f"'attention_mask' is for {list(mask.shape)}, but there are {q_length} queries, {kv_length} keys and "
                f"{batch} batch entries; {ELSEWHERE}"
            )
        self.conditions.append(mask.condition)
        self.declarations += mask.declarations
        self.captured |= mask.captured
        self.kinds |= mask.kinds

    def matrix(self, kept: Tensor) -> None:
        """A mask of bools that the caller passes as a tensor."""
        shape = broadcast(tuple(kept.shape), self.sizes)
        self.conditions.append(element("allowed", shape))
        self.declarations.append(f"tensor allowed: bool[{', '.join(shape)}]")
        self.captured["allowed"] = kept

    def documents(self, q_ends: Tensor | None, k_ends: Tensor | None) -> None:
        """Sequences that are packed into one row, by where they end."""
        if q_ends is None or k_ends is None:
            raise ValueError("'cu_seq_lens_q' and 'cu_seq_lens_k' are given both or not at all")
        if self.sizes[0] != 1:
            raise ValueError(f"'cu_seq_lens_q' packs sequences into one batch entry, but there are {self.sizes[0]}")
        if "start" in self.kinds and "documents" not in self.kinds:
            raise ValueError("'cu_seq_lens_q': chunks begin where a sequence does; pass position_ids, which say where")
        self.conditions.append("packed_q[i] == packed_k[j]")
        self.declarations += ("tensor packed_q: i32[Nq]", "tensor packed_k: i32[Nk]")
        self.captured |= packed(q_ends, k_ends, self.sizes[2:], is_ordered=bool(self.kinds & _ORDERS))


def _check_other(name: str, value: Any, cu_seq_lens: Tensor | None, mask: object) -> None:
    if value is None or value is False:
        return
    knows_documents = cu_seq_lens is not None or (isinstance(mask, LayerMask) and "documents" in mask.kinds)
    if name != "seq_idx" or not knows_documents:
        raise TypeError(f"'{name}' is not supported by flashgen's attention: {_REFUSED[name]}")


_EIGHT_BITS = (
    "'key' is {}, but 'query' is {}: a cache that keeps rows in 8 bits has to give keys and values in the type of the "
    "queries, as transformers' QuantizedCache does (flashgen.flash.flash_attn_with_kvcache reads 8 bits as they are)"
)


def _same_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expand learned queries, or keys, of batch 1 to all batch entries."""
    batch = max(query.shape[0], key.shape[0])
    if min(query.shape[0], key.shape[0]) != 1:
        raise ValueError(f"'query' has {query.shape[0]} batch entries and 'key' has {key.shape[0]}")
    return tuple(x.expand(batch, -1, -1, -1) for x in (query, key, value))  # type: ignore[return-value]


def _check_broadcast(name: str, x: Tensor, sizes: tuple[int, int, int, int]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor [B, H, Nq, Nk], not {type(x).__name__}")
    fits = x.dim() == 4 and all(length in (1, size) for length, size in zip(x.shape, sizes, strict=True))
    if not fits:
        raise ValueError(
            f"'{name}' has shape {list(x.shape)}; expected what broadcasts to [B, H, Nq, Nk] = {list(sizes)}"
        )
    if not (x.dtype is torch.bool or x.is_floating_point()):
        raise TypeError(f"'{name}' is {x.dtype}; bools say what is kept, floats are added to the scores")


_DIFFERENT = (
    "'cu_seq_lens_q' and 'cu_seq_lens_k' say different lengths; a causal or sliding mask is supported where queries "
    "and keys are the same positions"
)


# What the last call found, of which ends.
_LAST: list[tuple[object, dict[str, Tensor]]] = []


def packed(q_ends: Tensor, k_ends: Tensor, lengths: tuple[int, int], *, is_ordered: bool) -> dict[str, Tensor]:
    """``packed_q`` [Nq] and ``packed_k`` [Nk], for ends int [S + 1]. ``is_ordered``: the mask has positions in it.

    Raises ``ValueError`` where it has, and queries and keys are not packed in the same way.
    """
    key = None
    if _is_remembered(q_ends) and _is_remembered(k_ends):
        key = (UnchangedTensor(q_ends), UnchangedTensor(k_ends), lengths, is_ordered)
        for known, documents in _LAST:
            if known == key:
                return documents
    if is_ordered and q_ends is not k_ends:
        if q_ends.shape != k_ends.shape:
            raise ValueError(_DIFFERENT)
        torch._assert_async((q_ends == k_ends).all(), _DIFFERENT)
    found = {"packed_q": _documents(q_ends, lengths[0]), "packed_k": _documents(k_ends, lengths[1])}
    if key is not None:
        _LAST[:] = [(key, found)]
    return found


def _is_remembered(ends: Any) -> bool:
    """Whether later changes of the numbers can be noticed; graphs compute them each time."""
    if torch.compiler.is_compiling() or ends.is_inference():
        return False
    return not (ends.is_cuda and torch.cuda.is_current_stream_capturing())


def _documents(ends: Tensor, length: int) -> Tensor:
    places = torch.arange(length, device=ends.device)
    return torch.searchsorted(ends.to(places.dtype), places, right=True, out_int32=True)
