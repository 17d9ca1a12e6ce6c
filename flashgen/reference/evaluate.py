"""Evaluates expressions over torch tensors, with gradients that stop at pairs without weight.

In: an ``Expr`` and the values of its symbols and captured tensors. Out: a tensor that broadcasts to [B, H,
Nq, Nk].

Two rules make it safe and fair:

- A pair that is masked must not disturb a gradient: 0 · ∞ in the derivative of ``log(i - j)`` at a masked
  pair would make the gradient of a whole row NaN. ``Guard`` zeroes every gradient at such pairs between any
  two operators.
- In half precision, what depends on the score is computed in that precision, everything else (positions,
  biases, slopes) in float32: what a person composing the formula in PyTorch would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType
from flashgen.reference.namespace import TorchNamespace


@dataclass
class Guard:
    """Stops gradients at pairs that are not kept; ``keep`` [B, H, Nq, Nk] may be narrowed until backward."""

    keep: Tensor | None = None
    _reduced: dict[torch.Size, Tensor] = field(default_factory=dict)

    def narrow(self, keep: Tensor) -> None:
        """From now on ``keep`` says which pairs have weight."""
        self.keep = keep
        self._reduced.clear()

    def protect(self, value: Tensor, shape: torch.Size) -> Tensor:
        """``value`` expanded to ``shape``; its gradient is zero where no pair of that element is kept.

        So is that of its tangent, where it has one: tangents themselves are 0 where a score is masked.
        """
        if not torch.is_grad_enabled():
            return value
        has_tangent = forward_ad._current_level >= 0 and _tangent(value) is not None
        if not (value.requires_grad or has_tangent):
            return value
        guarded = value.expand(shape)
        for each in (guarded, _tangent(guarded) if has_tangent else None):
            if each is not None and each.requires_grad:
                each.register_hook(partial(self._stop, shape))  # type: ignore[no-untyped-call]
        return guarded

    def _stop(self, shape: torch.Size, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.where(self._over(shape), gradient, 0.0)

    def _over(self, shape: torch.Size) -> Tensor:
        """Whether any pair of each element of a broadcast shape is kept."""
        if shape not in self._reduced:
            assert self.keep is not None, "gradients flow only after the kept pairs are known"
            keep = self.keep
            for axis in range(-4, 0):
                if len(shape) < -axis or shape[axis] == 1:
                    keep = keep.any(axis, keepdim=True)
            self._reduced[shape] = keep.reshape(shape) if len(shape) < 4 else keep
        return self._reduced[shape]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates with memory: an expression that occurs twice is computed once.

    ``symbols`` holds indices, sizes and score inputs, ``params`` and ``tensors`` the arguments of the call;
    ``dtype`` is the precision of what depends on the score.
    """

    symbols: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    guard: Guard
    _done: dict[Expr, tuple[Tensor, bool]] = field(default_factory=dict, repr=False)

    @property
    def wide(self) -> torch.dtype:
        """The precision of what does not depend on the score."""
        return torch.promote_types(self.dtype, torch.float32)

    def boolean(self, expr: Expr) -> Tensor:
        """The value of a condition."""
        return self._visit(expr)[0]

    def real(self, expr: Expr) -> Tensor:
        """The value of a number, in ``dtype``."""
        return self._visit(expr)[0].to(self.dtype)

    def listed(self, name: str, indices: Sequence[Expr]) -> Tensor:
        """The elements along the last dimension of a tensor of ints, which has no index; others are clamped."""
        tensor, found = self.tensors[name], [self._visit(each)[0] for each in indices]
        if tensor.numel() == 0:
            return tensor.new_full((1,), -1)
        clamped = (index.clamp(0, length - 1) for index, length in zip(found, tensor.shape, strict=False))
        return tensor[tuple(clamped)] if found else tensor

    def given(self, **symbols: Tensor) -> Evaluator:
        """An evaluator that knows these symbols as well."""
        return replace(self, symbols={**self.symbols, **symbols}, _done={})

    def _visit(self, node: Expr) -> tuple[Tensor, bool]:
        """The value, and whether it depends on the score."""
        if node not in self._done:
            self._done[node] = self._compute(node)
        return self._done[node]

    def _compute(self, node: Expr) -> tuple[Tensor, bool]:
        match node:
            case Literal(value=value):
                dtype = self.wide if node.type is ScalarType.FLOAT else None
                return torch.tensor(value, dtype=dtype, device=self._device()), False
            case Symbol(name=name, kind=SymbolKind.PARAM):
                param = self.params[name]
                return param.to(self.wide if node.type is ScalarType.FLOAT else torch.int64), False
            case Symbol(name=name, kind=kind):
                return self.symbols[name], kind is SymbolKind.SCORE
            case Load(tensor=name, indices=indices):
                return self._load(self.tensors[name], [self._visit(index)[0] for index in indices]), False
            case Apply(op=op, args=args):
                visited = [self._visit(arg) for arg in args]
                by_score = any(depends for _, depends in visited)
                dtype = self.dtype if by_score else self.wide
                shape = _common_shape([value for value, _ in visited])
                values = [
                    self.guard.protect(value.to(dtype), shape) if value.is_floating_point() else value
                    for value, _ in visited
                ]
                return OPERATORS[op].meaning(TorchNamespace(dtype), *values), by_score
        raise AssertionError(f"no value for {type(node).__name__}")

    def _load(self, tensor: Tensor, indices: list[Tensor]) -> Tensor:
        """One element for each index, clamped into the tensor; an empty tensor reads as zero."""
        if tensor.is_floating_point():
            tensor = tensor.to(self.wide)
        elif tensor.dtype is not torch.bool:
            tensor = (tensor.to(torch.int64) + 2**31 & 0xFFFFFFFF) - 2**31
        if not indices:
            return tensor
        if tensor.numel() == 0:
            return tensor.new_zeros(_common_shape(indices))
        clamped = tuple(index.clamp(0, length - 1) for index, length in zip(indices, tensor.shape, strict=True))
        return tensor[clamped]

    def _device(self) -> torch.device:
        return next(iter(self.symbols.values())).device


def _tangent(value: Tensor) -> Tensor | None:
    found: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return found


def _common_shape(values: list[Tensor]) -> torch.Size:
    shapes = (value.shape for value in values)
    common: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return common
