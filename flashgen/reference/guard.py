"""Stops gradients of the dense formula at values that no kept pair uses, so that 0 · ∞ does not make a row NaN.

In: which pairs are kept, and where each operator passes a gradient to its arguments. Out: hooks that zero all other
gradients. A gradient is 0, whatever the derivatives are, at a masked pair, and in a branch that is not taken (of ``x if
c else y``, ``max``, ``min``, ``clamp`` and ``relu``). Kernels do the same (``analysis/differentiate.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.ir.expr import Expr

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
                each.register_hook(partial(self._stop, shape, live))  # type: ignore[no-untyped-call]
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
