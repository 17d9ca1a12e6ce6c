"""``MultiheadAttention``: projections around the attention of any spec, called and stored as PyTorch's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashgen.compiler.reading import Constant
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, index, literal, size
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.ir.types import ElementType
from flashgen.nn.attention import Attention, Initial, as_op
from flashgen.op.conversion import as_number, int_argument
from flashgen.op.loading import load_spec
from flashgen.op.op import BaseOp

_NESTED = (
    "a nested tensor is taken in the strided layout, for query, key and value at once, with batch_first=True and "
    "without masks; pass a padded tensor and 'key_padding_mask' "
    "(torch.nn.TransformerEncoder: enable_nested_tensor=False)"
)


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` with the attention of a spec.

        layer = flashgen.nn.MultiheadAttention(512, 8, batch_first=True, spec="specs/alibi.attn")
        o, _ = layer(x, x, x)

    The arguments before the ``*``, the projections' names and shapes and the form of a call are PyTorch's. So is the
    state: a ``state_dict`` of PyTorch's loads as it is, and leaves what the spec learns as it was. ``spec`` is the file
    of a spec or a loaded op; it is built for embed_dim // num_heads columns whatever head dimensions it names.
    ``kv_heads`` (default: ``num_heads``) may be fewer. ``sizes``, ``initial``, ``name``, ``const``, ``backend``: as in
    ``Attention``, which is ``self.attention``. It may stand in for PyTorch's in ``torch.nn.TransformerEncoderLayer``
    and ``TransformerDecoderLayer``.

    ``dropout`` drops attention weights while training; 0 leaves what the spec says. ``add_bias_kv`` and
    ``add_zero_attn`` are refused, and so is ``need_weights``: the weights are never made.
    """

    # PyTorch's encoder layers ask for it: they would take the projections' weights and compute plain attention.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: str | os.PathLike[str] | BaseOp,
        kv_heads: int | None = None,
        sizes: Mapping[str, int] | None = None,
        initial: Mapping[str, Initial] | None = None,
        name: str | None = None,
        const: Mapping[str, Constant] | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        for argument, asked in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if asked:
                raise ValueError(f"{argument} is not supported: no position of the spec means the key that it adds")
        kv_heads = num_heads if kv_heads is None else kv_heads
        embed_dim, num_heads = int_argument("embed_dim", embed_dim), int_argument("num_heads", num_heads)
        kv_heads = int_argument("kv_heads", kv_heads)
        if min(embed_dim, num_heads, kv_heads) < 1 or embed_dim % num_heads or num_heads % kv_heads:
            raise ValueError(
                f"embed_dim is {embed_dim}, num_heads {num_heads}, kv_heads {kv_heads}; "
                "num_heads must divide embed_dim, and kv_heads num_heads"
            )
        if as_number(dropout, whole=False) is None:
            raise TypeError(f"'dropout' is {dropout!r}; a drop probability is a number")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"'dropout' is {dropout}; a drop probability lies in [0, 1)")
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        width = embed_dim // num_heads
        op = as_op(spec, name, const, backend)
        changed = op.spec
        if HeadDim(width, width) not in changed.head_dims:
            changed = replace(changed, head_dims=(HeadDim(width, width),))
        if dropout > 0 and changed.dropout is None:
            changed = replace(changed, dropout=literal(0.0))
        if changed is not op.spec:
            op = op.of_spec(changed, load_spec)
        self.attention = Attention(
            op, heads=num_heads, kv_heads=kv_heads, head_dim=width,
            sizes=sizes, initial=initial, device=device, dtype=dtype,
        )  # fmt: skip
        self._op_name = origin_name(self.attention.op)

        made: Any = {"device": device, "dtype": dtype}
        keys = kv_heads * width
        self._is_fused = self.kdim == self.vdim == embed_dim
        if self._is_fused:
            self.in_proj_weight = nn.Parameter(torch.empty(embed_dim + 2 * keys, embed_dim, **made))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **made))
            self.k_proj_weight = nn.Parameter(torch.empty(keys, self.kdim, **made))
            self.v_proj_weight = nn.Parameter(torch.empty(keys, self.vdim, **made))
        self._rows = (embed_dim, keys, keys)
        self.in_proj_bias = nn.Parameter(torch.empty(embed_dim + 2 * keys, **made)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self._reset_projections()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._op_name = origin_name(self.attention.op)

    def reset_parameters(self) -> None:
        """Give every Parameter its initial values again."""
        self.attention.reset_parameters()
        self.out_proj.reset_parameters()
        self._reset_projections()

    def _reset_projections(self) -> None:
        """As PyTorch's: Xavier for what goes in, biases 0."""
        weights = (
            (self.in_proj_weight,) if self._is_fused else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """A checkpoint of PyTorch's has nothing of what the spec learns."""
        own = f"{prefix}attention."
        if not any(name.startswith(own) for name in state_dict):
            state_dict.update((own + name, value) for name, value in self.attention.state_dict().items())
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002 - PyTorch's; it speaks of weights alone
        is_causal: bool = False,
        **captured: Any,
    ) -> tuple[Tensor, None]:
        """``query`` [Nq, B, E], ``key`` and ``value`` [Nk, B, …] ([B, N, …] with ``batch_first``; without B unbatched).

        ``key_padding_mask`` [B, Nk] and ``attn_mask`` [Nq, Nk] or [B·H, Nq, Nk]: true drops a pair, a float is added to
        the score, as in PyTorch; both are kept beside the spec's own mask. ``is_causal`` without ``attn_mask`` keeps
        keys up to the query. The first call with masks of a form compiles a kernel for it. ``captured`` are tensors and
        params of the spec that the module does not own, and options of the op.

        A strided nested tensor, as ``torch.nn.TransformerEncoder`` makes of padding in ``eval()``, is taken for all of
        query, key and value.

        Returns (o, None), o as ``query``. Raises ``ValueError`` and ``TypeError`` by name.
        """
        if need_weights:
            raise ValueError("need_weights: the weights are never made; call with need_weights=False")
        if any(getattr(x, "is_nested", False) for x in (query, key, value)):
            is_self = query is key and key is value and query.layout is torch.strided
            is_masked = key_padding_mask is not None or attn_mask is not None
            if not is_self or is_masked or not self.batch_first:
                raise ValueError(_NESTED)
            return self._of_nested(query, is_causal=is_causal, **captured), None
        self._check(query, key, value)
        is_batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value have shapes {shapes}; all have three dimensions, or two without B")
        q, k, v = (self._split(x, is_batched) for x in self._projected(query, key, value))
        masks = self._masks(q, k, key_padding_mask, attn_mask, is_batched)
        forms = tuple((name, mask.dim(), mask.dtype is torch.bool) for name, mask in masks.items())
        if self.dropout and self.training and captured.get("dropout_p") is None:
            captured["dropout_p"] = self.dropout
        is_causal = is_causal and attn_mask is None
        op = masked_op(self._op_name, forms, is_causal) if forms or is_causal else self.attention.op
        o = self.attention.attend_with(op, q, k, v, **captured, **masks)
        rows = o.transpose(1, 2).flatten(2)
        if not is_batched:
            rows = rows[0]
        elif not self.batch_first:
            rows = rows.transpose(0, 1)
        return self.out_proj(rows), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise ``TypeError`` and ``ValueError`` for what the projections do not take, by name."""
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
            if x.dim() and x.shape[-1] != width:
                raise ValueError(f"'{name}' has shape {list(x.shape)}; its last dimension must be {width}")

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kv_heads={self.kv_heads}"

    def _of_nested(self, x: Tensor, **options: Any) -> Tensor:
        """Self-attention of sequences in a nested tensor, whose padding is masked; a nested tensor of the same."""
        lengths = [each.shape[0] for each in x.unbind()]
        rows = x.to_padded_tensor(0.0)
        ends = torch.tensor(lengths, device=rows.device)
        padding = torch.arange(rows.shape[1], device=rows.device) >= ends[:, None]
        o, _ = self.forward(rows, rows, rows, padding, **options)
        return torch.nested.as_nested_tensor([each[:length] for each, length in zip(o, lengths, strict=True)])

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v before heads are told apart; one product where all three are the same."""
        if self._is_fused and query is key and key is value:
            return functional.linear(query, self.in_proj_weight, self.in_proj_bias).split(self._rows, dim=-1)  # type: ignore[no-any-return,no-untyped-call]
        if self._is_fused:
            weights: tuple[Tensor, ...] = self.in_proj_weight.split(self._rows)  # type: ignore[no-untyped-call]
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias: Any = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.split(self._rows)
        return tuple(map(functional.linear, (query, key, value), weights, biases))

    def _split(self, x: Tensor, is_batched: bool) -> Tensor:
        """[B, H, N, D], a view."""
        if not is_batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        width = self.attention.head_dim.qk
        return x.view(*x.shape[:2], x.shape[-1] // width, width).transpose(1, 2)

    def _masks(
        self, q: Tensor, k: Tensor, padding: Tensor | None, pairs: Tensor | None, is_batched: bool
    ) -> dict[str, Tensor]:
        """The masks of a call as captured tensors. Raises ``ValueError`` and ``TypeError`` by name."""
        batch, heads, q_len, kv_len = *q.shape[:3], k.shape[2]
        found = {}
        if padding is not None:
            wanted = (batch, kv_len) if is_batched else (kv_len,)
            _check_mask(PADDING, padding, (wanted,))
            found[PADDING] = padding.reshape(batch, kv_len)
        if pairs is not None:
            _check_mask(PAIRS, pairs, ((q_len, kv_len), (batch * heads, q_len, kv_len)))
            found[PAIRS] = pairs if pairs.dim() == 2 else pairs.reshape(batch, heads, q_len, kv_len)
        return {name: x if x.dtype is torch.bool else x.float() for name, x in found.items()}


def _check_mask(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"'{name}' must be a tensor, not {type(mask).__name__}")
    if not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise TypeError(f"'{name}' is {mask.dtype}; true drops a pair, a float is added to its score")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(list(each)) for each in shapes)
        raise ValueError(f"'{name}' has shape {list(mask.shape)}; {wanted} is expected")


# Masks ----------------------------------------------------------------------------------------------------------------

# Ops of specs with a captured tensor for each mask, which drops pairs where it is boolean, and is added to the score
# where it is float. Each is made once, and looked up by names and numbers alone: torch.compile does not trace that.

PADDING, PAIRS = "key_padding_mask", "attn_mask"
# The name of each mask's dimensions: which sizes, and which indices read it.
_PLACES = {
    (PADDING, 2): (("B", "Nk"), ("b", "j")),
    (PAIRS, 2): (("Nq", "Nk"), ("i", "j")),
    (PAIRS, 4): (("B", "H", "Nq", "Nk"), ("b", "h", "i", "j")),
}
# One mask of a call: ``PADDING`` or ``PAIRS``, how many dimensions it has, and whether it is boolean.
Form = tuple[str, int, bool]

# The ops, by names that they have here. Attributes, as torch.compile looks at each when it is asked for.
_OPS = SimpleNamespace()
_NAMES: dict[tuple[str, tuple[Form, ...], bool], str] = {}
_ORIGINS: dict[str, BaseOp] = {}
_LOCK = threading.Lock()


def origin_name(op: BaseOp) -> str:
    """The name by which ``masked_op`` knows an op; the same in every process."""
    return _ORIGINS.setdefault(op.name, op).name


def masked_op(origin: str, masks: tuple[Form, ...], causal: bool) -> BaseOp:
    """The op of a spec with the masks of a call. Raises what ``masked`` raises."""
    op: BaseOp = getattr(_OPS, _made(origin, masks, causal))
    return op


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made(origin: str, masks: tuple[Form, ...], causal: bool) -> str:
    """The name among ``_OPS`` of the op."""
    with _LOCK:
        name = _NAMES.get((origin, masks, causal))
        if name is None:
            op = _ORIGINS[origin]
            made = op.of_spec(masked(op.spec, masks, causal=causal), load_spec)
            name = _NAMES[origin, masks, causal] = f"op{len(_NAMES)}"
            setattr(_OPS, name, made)
        return name


def masked(spec: AttentionSpec, masks: Iterable[Form], *, causal: bool) -> AttentionSpec:
    """The spec with the masks of a call. Raises ``ValueError`` where it has a tensor of a mask's name."""
    for name, dimensions, is_bool in masks:
        if name in (*(tensor.name for tensor in spec.tensors), *(param.name for param in spec.params)):
            raise ValueError(f"'{name}' is a captured value of '{spec.name}' already; pass None")
        sizes, indices = _PLACES[name, dimensions]
        element = ElementType.BOOL if is_bool else ElementType.F32
        tensor = CapturedTensor(name, element, tuple(size(each) for each in sizes), grad=not is_bool)
        read: Expr = Load(element.scalar, tensor=name, indices=tuple(index(each) for each in indices))
        spec = replace(spec, tensors=(*spec.tensors, tensor))
        if is_bool:
            spec = replace(spec, mask=apply("and", spec.mask, apply("not", read)))
        else:
            spec = replace(spec, score=apply("add", spec.score, read))
    return replace(spec, mask=apply("and", spec.mask, apply("le", index("j"), index("i")))) if causal else spec
