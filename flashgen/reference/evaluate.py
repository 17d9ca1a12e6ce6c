"""Evaluates expressions over torch tensors; gradients stop at values that no kept pair uses.

In: an ``Expr`` and the values of its symbols and captured tensors. Out: a tensor that broadcasts to [B, H,
Nq, Nk].

Two rules make it safe and fair:

- A pair that is masked must not disturb a gradient, nor a branch that is not taken: 0 · ∞ in the derivative of
  ``log(i - j)`` there would make the gradient of a whole row NaN. ``Guard`` zeroes such gradients between any two
  operators, also in the branches of ``max``, ``min``, ``clamp`` and ``relu`` that are not taken. Kernels do the same
  (``analysis/differentiate.py``).
- In half precision, what depends on the score is computed in that precision, everything else (positions,
  biases, slopes) in float32: what a person composing the formula in PyTorch would do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind
from flashgen.ir.operators import OPERATORS, Library
from flashgen.ir.types import ScalarType

Live = Callable[[], Tensor | None]  # where a value's gradient may be other than 0; None: at every pair that is kept


@dataclass
class Guard:
    """Stops gradients at pairs that are not kept; ``keep`` [B, H, Nq, Nk] may be narrowed until the backward pass."""

    keep: Tensor | None = None
    _reduced: dict[torch.Size, Tensor] = field(default_factory=dict)

    def narrow(self, keep: Tensor) -> None:
        """From now on ``keep`` says which pairs have weight."""
        self.keep = keep
        self._reduced.clear()

    def protect(self, value: Tensor, shape: torch.Size, live: Live) -> Tensor:
        """``value`` expanded to ``shape``; its gradient is zero where no pair of an element is both kept and ``live``.

        The gradient of its tangent, if it has one, is zero there, too: tangents themselves are 0 where a score is
        masked.
        """
        guarded = value.expand(shape)
        for each in (guarded, tangent_of(guarded)):
            if each is not None and each.requires_grad:
                each.register_hook(functools.partial(self._stop, shape, live))  # type: ignore[no-untyped-call]
        return guarded

    def _stop(self, shape: torch.Size, live: Live, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.where(self._over(shape, live()), gradient, 0.0)

    def _over(self, shape: torch.Size, live: Tensor | None) -> Tensor:
        """Whether any pair of each element of a broadcast shape is kept, and live."""
        assert self.keep is not None, "gradients flow only after the kept pairs are known"
        if live is not None:
            return _any(self.keep & live, shape)
        if shape not in self._reduced:
            self._reduced[shape] = _any(self.keep, shape)
        return self._reduced[shape]


@dataclass
class Uses:
    """The users of each node's value, and where each passes a gradient to the node."""

    _of: dict[Expr, list[tuple[Expr, Tensor | None]]] = field(default_factory=dict)
    _results: set[Expr] = field(default_factory=set)
    _live: dict[Expr, Tensor | None] = field(default_factory=dict)

    def is_result(self, node: Expr) -> None:
        """Declare the value a result, which is used at every pair."""
        self._results.add(node)
        self._live.clear()

    def add(self, node: Expr, user: Expr, chosen: Tensor | None) -> None:
        """``user`` passes a gradient to ``node`` where it is ``chosen``, None: everywhere."""
        self._of.setdefault(node, []).append((user, chosen))
        self._live.clear()

    def live(self, node: Expr) -> Tensor | None:
        """Where any use of a node passes a gradient; None: at every pair that is kept."""
        if node not in self._live:
            self._live[node] = None if node in self._results else self._by_users(node)
        return self._live[node]

    def through(self, user: Expr, chosen: Tensor | None) -> Tensor | None:
        """Where one use passes a gradient."""
        above = self.live(user)
        return chosen if above is None else above if chosen is None else above & chosen

    def _by_users(self, node: Expr) -> Tensor | None:
        found: Tensor | None = None
        for user, chosen in self._of.get(node, ()):
            one = self.through(user, chosen)
            if one is None:
                return None
            found = one if found is None else found | one
        return found


def tangent_of(value: Tensor) -> Tensor | None:
    """The tangent of a value in forward mode; None outside of it."""
    if forward_ad._current_level < 0:
        return None
    found: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return found


def _any(pairs: Tensor, shape: torch.Size) -> Tensor:
    """Whether any of the pairs of each element of a broadcast shape is true."""
    for axis in range(-4, 0):
        if len(shape) < -axis or shape[axis] == 1:
            pairs = pairs.any(axis, keepdim=True)
    return pairs.reshape(shape) if len(shape) < 4 else pairs


@dataclass(frozen=True)
class Evaluator:
    """Evaluates expressions; one that occurs twice is computed once.

    ``symbols`` holds indices, sizes and score inputs, ``params`` and ``tensors`` the arguments of the call; ``dtype``
    is the precision of values that depend on the score.
    """

    symbols: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    guard: Guard
    _done: dict[Expr, tuple[Tensor, bool]] = field(default_factory=dict, repr=False)
    _uses: Uses = field(default_factory=Uses, repr=False)

    @property
    def wide(self) -> torch.dtype:
        """The precision of values that do not depend on the score."""
        return torch.promote_types(self.dtype, torch.float32)

    def boolean(self, expr: Expr) -> Tensor:
        return self._result(expr)

    def real(self, expr: Expr) -> Tensor:
        """The value of a number, in ``dtype``."""
        return self._result(expr).to(self.dtype)

    def listed(self, name: str, indices: Sequence[Expr]) -> Tensor:
        """The elements along the last dimension, which has no index, of an int tensor; indices are clamped."""
        tensor, found = self.tensors[name], [self._visit(each)[0] for each in indices]
        if tensor.numel() == 0:
            return tensor.new_full((1,), -1)
        clamped = (index.clamp(0, length - 1) for index, length in zip(found, tensor.shape, strict=False))
        return tensor[tuple(clamped)] if found else tensor

    def given(self, **symbols: Tensor) -> Evaluator:
        """An evaluator that also knows these symbols."""
        return replace(self, symbols={**self.symbols, **symbols}, _done={}, _uses=Uses())

    def of_rows(self, shape: torch.Size) -> Evaluator:
        """An evaluator for values of rows [B, H, Nq, 1], all of which count, also rows without a kept pair."""
        guard = Guard(torch.ones(shape, dtype=torch.bool, device=self._device()))
        return replace(self, guard=guard, _done={}, _uses=Uses())

    def _result(self, expr: Expr) -> Tensor:
        self._uses.is_result(expr)
        return self._visit(expr)[0]

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
                    self._guarded(node, k, value.to(dtype), shape) if value.is_floating_point() else value
                    for k, (value, _) in enumerate(visited)
                ]
                return OPERATORS[op].meaning(TorchNamespace(dtype), *values), by_score
        raise AssertionError(f"no value for {type(node).__name__}")

    def _guarded(self, node: Apply, k: int, value: Tensor, shape: torch.Size) -> Tensor:
        """Argument k as ``node`` uses it, expanded to the shape of its arguments."""
        if not torch.is_grad_enabled() or not (value.requires_grad or tangent_of(value) is not None):
            return value
        chosen, uses = self._chosen(node, k), self._uses
        uses.add(node.args[k], node, chosen)
        return self.guard.protect(value, shape, lambda: uses.through(node, chosen))

    def _chosen(self, node: Apply, k: int) -> Tensor | None:
        """Where a node passes a gradient to its argument k; None: wherever the node has one."""
        rule = OPERATORS[node.op].derivative
        partial = None if rule is None else rule(node.args, k)
        if not (isinstance(partial, Apply) and partial.op == "where"):
            return None
        known = {each: (value.detach(), by_score) for each, (value, by_score) in self._done.items()}
        with torch.no_grad():
            return replace(self, _done=known, _uses=Uses())._passes(partial)

    def _passes(self, partial: Expr) -> Tensor | None:
        """Where a derivative is not the constant 0 of a branch; None: everywhere. Accidental zeros pass."""
        match partial:
            case Literal(value=0):
                return torch.zeros((), dtype=torch.bool, device=self._device())
            case Apply(op="where", args=(condition, yes, no)):
                x, y = self._passes(yes), self._passes(no)
                if x is None and y is None:
                    return None
                return torch.where(self.boolean(condition), True if x is None else x, True if y is None else y)
        return None

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


def _common_shape(values: list[Tensor]) -> torch.Size:
    shapes = (value.shape for value in values)
    common: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return common


Value = Tensor | bool | int | float


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Value, Value], Tensor]:
    return lambda x, y: function(_tensor(x, y), _tensor(y, x))


@dataclass(frozen=True)
class TorchNamespace:
    """Torch in one working precision."""

    dtype: torch.dtype
    isnan = staticmethod(torch.isnan)
    logical_not = staticmethod(torch.logical_not)
    abs = staticmethod(torch.abs)
    floor = staticmethod(torch.floor)
    ceil = staticmethod(torch.ceil)
    round = staticmethod(torch.round)
    minimum = staticmethod(_of_two(torch.minimum))
    maximum = staticmethod(_of_two(torch.maximum))
    floor_divide = staticmethod(_of_two(functools.partial(torch.div, rounding_mode="floor")))
    remainder = staticmethod(_of_two(torch.remainder))
    pow = staticmethod(_of_two(torch.pow))

    def is_float(self, x: Value) -> bool:
        return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)

    def to_float(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x.to(self.dtype)

    def to_int(self, x: Tensor) -> Tensor:
        return x.to(torch.int64)

    def where(self, c: Tensor, x: Value, y: Value) -> Tensor:
        return torch.where(c, _like(x, y), _like(y, x))

    def clamp(self, x: Tensor, lo: Value, hi: Value) -> Tensor:
        return torch.clamp(x, _tensor(lo, x), _tensor(hi, x))

    def call(self, function: Library, x: Tensor) -> Tensor:
        computed: Tensor = getattr(torch, function.torch[0])(x)
        return computed


def _tensor(x: Value, like: Value) -> Tensor:
    """``x`` as a tensor of the type of ``like``."""
    if isinstance(x, Tensor):
        return x
    return torch.tensor(x, dtype=like.dtype, device=like.device) if isinstance(like, Tensor) else torch.tensor(x)


def _like(x: Value, other: Value) -> Value:
    """A Python number beside a tensor, as a tensor of its type: a plain number may overflow in float16."""
    return _tensor(x, other) if isinstance(other, Tensor) and other.is_floating_point() else x
