"""``Attention``: the op of a spec as a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flashgen.compiler.reading import Constant, by_name
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.nn.learned import Initial, learned_values
from flashgen.op.conversion import head_dim_argument, int_argument
from flashgen.op.loading import load
from flashgen.op.op import BaseOp


class Attention(nn.Module):
    """Attention of a spec; its learned tensors and params are Parameters of the module.

        attention = flashgen.nn.Attention("specs/alibi.attn", heads=16)
        o = attention(q, k, v)                    # attention.slope is a Parameter [16]

    ``spec``: the file of a spec, or an op that was loaded. ``heads``, ``kv_heads`` (default: ``heads``) and
    ``head_dim`` (an int, or (D, Dv); default: the spec's first) are the sizes that shapes of learned tensors may
    depend on; ``sizes`` adds others that stay as they are, such as ``{"Nk": 1024}``. A tensor with ``grad`` whose
    shape follows from these is owned; every other tensor, and what has no ``grad``, is passed to the call by its name.
    Calls have these heads. ``initial`` gives owned values their first values by name: a number, a tensor, or a function
    that fills a tensor.
    Without it slopes of heads are those of ALiBi, sinks 0, params their defaults, other tensors normal (0.02).
    A scalar param is a Parameter of shape [1], which FSDP can shard. ``name``, ``const`` and ``backend`` are those
    of ``flashgen.load``; ``device`` and ``dtype`` those of the Parameters (default: the declared types).

    In ``eval()`` nothing is dropped, whatever the spec says. Raises ``SpecError`` for a wrong spec, ``ValueError``
    for sizes, names and initial values that do not fit, and ``TypeError`` for what is no size and no value.
    """

    def __init__(
        self,
        spec: str | os.PathLike[str] | BaseOp,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | tuple[int, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        initial: Mapping[str, Initial] | None = None,
        name: str | None = None,
        const: Mapping[str, Constant] | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.op = as_op(spec, name, const, backend)
        own = self.op.spec
        kv_heads = heads if kv_heads is None else kv_heads
        heads, kv_heads = int_argument("heads", heads), int_argument("kv_heads", kv_heads)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads is {heads} and kv_heads {kv_heads}; heads must be a multiple of kv_heads")
        dims = _head_dim(own, head_dim)
        known = {
            "H": heads,
            "Hkv": kv_heads,
            "D": dims.qk,
            "Dv": dims.v,
            **_checked(by_name(sizes, "sizes", "{'Nk': 1024}")),
        }
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dims
        given: object = dtype
        if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
            raise TypeError(f"'dtype' is {dtype!r}; what is learned has a floating one, as torch.float32")
        self._learned = learned_values(own, known, by_name(initial, "initial values", "{'slope': 0.1}"))
        for each in self._learned:
            if hasattr(self, each.name):
                raise ValueError(f"'{each.name}' is an attribute of every module; the spec has to call it otherwise")
            self.register_parameter(
                each.name, nn.Parameter(torch.empty(each.shape, device=device, dtype=dtype or each.dtype))
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every Parameter its initial values again."""
        for each in self._learned:
            each.fill(getattr(self, each.name))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """``q`` [B, H, Nq, D], ``k`` [B, Hkv, Nk, D], ``v`` [B, Hkv, Nk, Dv] → ``o`` [B, H, Nq, Dv].

        ``arguments`` are those of the op: tensors and params that the module does not own, ``return_lse``, ``seed`` …
        Raises what the op raises, ``TypeError`` for a value that the module owns, and ``ValueError`` for other heads
        than the module's.
        """
        return self.attend_with(self.op, q, k, v, **arguments)

    def attend_with(self, op: BaseOp, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """``forward`` with another op that captures the same learned values: that of the spec with one more mask."""
        for each in self._learned:
            if each.name in arguments:
                raise TypeError(f"'{each.name}' is a Parameter of this module, not an argument of its call")
            value = getattr(self, each.name).to(each.dtype)
            arguments[each.name] = value.reshape(()) if each.is_scalar else value
        self._check_heads(q, k, arguments)
        if not self.training and op.spec.dropout is not None and arguments.get("dropout_p") is None:
            arguments["dropout_p"] = 0.0
        return op(q, k, v, **arguments)  # type: ignore[operator]

    def _check_heads(self, q: Any, k: Any, arguments: Mapping[str, Any]) -> None:
        """Check that a call has the heads of the module, or says which of them it has."""
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k)) or {"h_start", "h_total"} & set(arguments):
            return
        for name, x, heads, wanted in (("q", q, "heads", self.heads), ("k", k, "kv_heads", self.kv_heads)):
            if x.shape[1] != wanted:
                raise ValueError(
                    f"'{name}' has {x.shape[1]} heads, the module {heads}={wanted}; give Attention({heads}=…) those of "
                    "its calls, or pass h_start and h_total with a part of them"
                )

    def extra_repr(self) -> str:
        return f"{self.op.spec.name}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


def as_op(
    spec: str | os.PathLike[str] | BaseOp,
    name: str | None,
    const: Mapping[str, Constant] | None,
    backend: str | None,
) -> BaseOp:
    """The op of a spec's file, or the one that was given."""
    if not isinstance(spec, BaseOp):
        path = os.fspath(spec) if isinstance(spec, os.PathLike) else spec
        return load(path, name=name, const=const, backend=backend)
    for argument, value in (("name", name), ("const", const), ("backend", backend)):
        if value is not None:
            raise ValueError(f"{argument}: '{spec.spec.name}' is loaded already; pass {argument} to flashgen.load")
    return spec


def _head_dim(spec: AttentionSpec, given: int | tuple[int, int] | None) -> HeadDim:
    if given is None:
        return spec.head_dims[0]
    dims = head_dim_argument(given)
    if dims is None:
        raise TypeError(f"'head_dim' is {given!r}; an int, or two, (D, Dv), is expected")
    if dims not in spec.head_dims:
        known = ", ".join(str(each) for each in spec.head_dims)
        raise ValueError(f"the head dimension is {dims}; '{spec.name}' is built for {known}")
    return dims


def _checked(sizes: Mapping[str, int]) -> Mapping[str, int]:
    for name, value in sizes.items():
        if name not in ("B", "Nq", "Nk"):
            raise ValueError(f"sizes: '{name}' is not among 'B', 'Nq' and 'Nk'; heads and head_dim say the others")
        if int_argument(name, value) < 0:
            raise ValueError(f"sizes: '{name}' is {value}; it must not be negative")
    return sizes
