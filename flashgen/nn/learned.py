"""The captured tensors and params with ``grad`` that a module owns, with their shapes and initial values.

In: an ``AttentionSpec`` and the sizes that a module knows (H, Hkv, D, Dv, and lengths that its user fixes). Out: a
``Learned`` for each owned value. A tensor whose shape depends on other sizes (B, or a length that is not fixed) is an
activation, which the caller passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.analysis.differentiate import derivative
from flashgen.diagnostics import quoted_list
from flashgen.ir.expr import Expr, Literal, Load, Symbol, index, size, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.op.conversion import as_number
from flashgen.op.signature import TORCH_DTYPES
from flashgen.reference.dense import constant_number, known_values

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
