"""``Attention``: the op of a spec as a module, and the values that a module owns."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashgen.analysis.differentiate import derivative
from flashgen.compiler.reading import Constant, by_name
from flashgen.diagnostics import quoted_list
from flashgen.ir.expr import Expr, Literal, Load, Symbol, index, size, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim, Param
from flashgen.op.conversion import as_number, head_dim_argument, int_argument
from flashgen.op.loading import load
from flashgen.op.op import BaseOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.reference.dense import constant_number, known_values


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


# -- what a module owns ------------------------------------------------------------------------------------------------

# A tensor whose shape depends on sizes that the module does not know (B, or a length that is not fixed) is an
# activation, which the caller passes.

# How a Parameter gets its values: a number, a tensor of its shape, or a function that fills it (``torch.nn.init``'s).
Initial = float | Tensor | Callable[[Tensor], object]

# What tables of biases begin with in T5, Swin and BERT.
_BIAS_DEVIATION = 0.02


@dataclass(frozen=True)
class Learned:
    """One value that a module owns. ``shape`` is the Parameter's: [1] for a scalar, which FSDP could not shard."""

    name: str
    is_scalar: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: Initial

    def fill(self, parameter: Tensor) -> None:
        """Give a Parameter of this value its initial values, in place."""
        with torch.no_grad():
            if isinstance(self.initial, Tensor):
                parameter.copy_(self.initial.reshape(parameter.shape))
            elif callable(self.initial):
                self.initial(parameter)
            else:
                parameter.fill_(self.initial)


def learned_values(
    spec: AttentionSpec, sizes: Mapping[str, int], initial: Mapping[str, Initial]
) -> tuple[Learned, ...]:
    """What a module of these sizes owns, in the order of the spec.

    ``initial`` replaces initial values by name. Raises ``ValueError`` for a name that is not owned, a tensor of another
    shape, a shape that is not one, and a param that nothing gives a value.
    """
    known = known_values(sizes)
    found = []
    for tensor in spec.tensors:
        extents = _extents(tensor, known)
        if tensor.grad and extents is not None:
            value = initial.get(tensor.name)
            value = _initial_tensor(spec, tensor) if value is None else value
            found.append(Learned(tensor.name, False, extents, TORCH_DTYPES[tensor.element], value))
    for param in spec.params:
        if param.grad:
            value = initial.get(param.name)
            value = _initial_param(param, known) if value is None else value
            found.append(Learned(param.name, True, (1,), torch.float32, value))
    _check(spec, found, initial)
    return tuple(found)


def _extents(tensor: CapturedTensor, known: Mapping[Expr, Expr]) -> tuple[int, ...] | None:
    """The shape of a tensor; None where it depends on a size that is not known."""
    extents = [substitute(each, dict(known)) for each in tensor.shape]
    if any(isinstance(node, Symbol) for node in walk(*extents)):
        return None
    values = tuple(int(constant_number(each)) for each in extents)
    if min(values, default=0) < 0:
        raise ValueError(f"tensor '{tensor.name}' would have the shape {list(values)} with these sizes")
    return values


def _initial_tensor(spec: AttentionSpec, tensor: CapturedTensor) -> Initial:
    """Slopes of heads are ALiBi's, logits of sinks 0, every other tensor is a small normal one."""
    reads = [node for node in walk(spec.score) if isinstance(node, Load) and node.tensor == tensor.name]
    if not reads:
        return 0.0  # read by a sink or by weights alone
    slopes = walk(*(derivative(spec.score, read) for read in reads))
    if tensor.shape == (size("H"),) and not {index("i"), index("j")}.isdisjoint(slopes):
        return _alibi_slopes
    return functools.partial(torch.nn.init.normal_, std=_BIAS_DEVIATION)


def _alibi_slopes(parameter: Tensor) -> None:
    """2^(-8 (h + 1) / H), as ALiBi has them where H is a power of two."""
    heads = parameter.shape[0]
    parameter.copy_(torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads))


def _initial_param(param: Param, known: Mapping[Expr, Expr]) -> Initial:
    """The default, where it depends on nothing that is unknown."""
    default = None if param.default is None else substitute(param.default, dict(known))
    if default is None or any(isinstance(node, Symbol) for node in walk(default)):
        why = "no default" if default is None else "a default that depends on sizes which the module does not know"
        raise ValueError(f"param '{param.name}' has {why}: pass initial={{'{param.name}': …}}, or sizes={{…}}")
    value = float(default.value) if isinstance(default, Literal) else float(constant_number(default))
    if not math.isfinite(value):
        raise ValueError(f"param '{param.name}' would begin at {value}: pass initial={{'{param.name}': …}}")
    return value


def _check(spec: AttentionSpec, found: list[Learned], initial: Mapping[str, Initial]) -> None:
    names = [each.name for each in found]
    for name in initial:
        if name not in names:
            owned = f"it owns {quoted_list(names, 'and')}" if names else "it owns nothing"
            raise ValueError(f"initial: the module of '{spec.name}' owns no '{name}'; {owned}")
    for each in found:
        value = each.initial
        if not isinstance(value, Tensor):
            if not callable(value) and as_number(value, whole=False) is None:
                raise TypeError(
                    f"initial: '{each.name}' is given as {type(value).__name__}; a number, a tensor, or a function "
                    "that fills one is expected"
                )
            continue
        if tuple(value.shape) != each.shape and not (each.is_scalar and value.numel() == 1):
            shape = [] if each.is_scalar else list(each.shape)
            raise ValueError(f"initial: '{each.name}' has shape {shape}; a tensor of shape {list(value.shape)} came")
