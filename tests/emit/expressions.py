"""Random expressions in the language's own text, of every type, over whatever they are given to read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_Write = Callable[[], str]


@dataclass
class Writer:
    """Writes floats, ints and bools; ``floats``, ``ints`` and ``bools`` are what expressions end in.

    ``shared`` are declarations of ``let``, which expressions refer to more than once.
    """

    rng: random.Random
    floats: Sequence[str]
    ints: Sequence[str]
    bools: Sequence[str] = ("true",)
    reads: Sequence[str] = ()  # elements of tensors, with {} for an index
    shared: list[str] = field(default_factory=list)

    def number(self, depth: int) -> str:
        """A float."""
        if depth == 0:
            return self.rng.choice((*self.floats, f"{self.rng.uniform(-4, 4):.2f}"))
        x, y, z = self._below(depth)
        forms: list[_Write] = [
            lambda: f"({x()} {self.rng.choice('+-*/')} {self.rng.choice((x, y))()})",
            lambda: f"({y()} {self.rng.choice(('/', '* 0.5 *', '+ 0.25 -'))} {self.rng.choice((x, y))()})",
            lambda: f"({x()} {self.rng.choice(('//', '%', '**'))} {self.rng.choice((x, y))()})",
            lambda: f"{self.rng.choice(('abs', 'sign', '-', 'relu', 'float'))}({x()})",
            lambda: f"{self.rng.choice(_FUNCTIONS)}({self.rng.choice((x, y))()})",
            lambda: f"{self.rng.choice(('min', 'max'))}({x()}, {self.rng.choice((x, y))()}, {x()})",
            lambda: f"clamp({x()}, {y()}, {x()})",
            lambda: f"pow({self.rng.choice((x, y))()}, {x()})",
            lambda: f"({x()} if {z()} else {self.rng.choice((x, y))()})",
            lambda: f"where({z()}, {y()}, {x()})",
            lambda: f"float({self.rng.choice((y, z))()})",
        ]
        if self.reads:
            forms += [lambda: self.rng.choice(self.reads).format(y())] * 2
        return self._maybe_shared(self.rng.choice(forms)())

    def whole(self, depth: int) -> str:
        """An int."""
        if depth == 0:
            return self.rng.choice((*self.ints, str(self.rng.randint(-9, 70))))
        x, y, z = self._below(depth)
        forms: list[_Write] = [
            lambda: f"({y()} {self.rng.choice(('+', '-', '*', '//', '%', '&', '|', '^', '<<', '>>', '**'))} {y()})",
            lambda: f"{self.rng.choice(('abs', 'sign', '-', 'popcount', 'hash', 'int'))}({y()})",
            lambda: f"{self.rng.choice(('min', 'max', 'ceildiv', 'hash'))}({y()}, {y()})",
            lambda: f"clamp({y()}, {y()}, {y()})",
            lambda: f"int({self.rng.choice((x, z))()})",
            lambda: f"({y()} if {z()} else {y()})",
        ]
        return self._maybe_shared(self.rng.choice(forms)())

    def truth(self, depth: int) -> str:
        """A bool."""
        if depth == 0:
            return self.rng.choice((*self.bools, "false"))
        x, y, z = self._below(depth)
        compare = self.rng.choice(("<", "<=", ">", ">=", "==", "!="))
        forms: list[_Write] = [
            lambda: f"({x()} {compare} {self.rng.choice((x, y))()})",
            lambda: f"({y()} {compare} {y()} < {y()})",
            lambda: f"({y()} {compare} {y()})",
            lambda: f"({z()} {self.rng.choice(('and', 'or', '==', '!=', '&', '|', '^'))} {z()})",
            lambda: f"(not {z()})",
            lambda: f"({z()} if {z()} else {z()})",
        ]
        return self._maybe_shared(self.rng.choice(forms)())

    def _below(self, depth: int) -> tuple[_Write, _Write, _Write]:
        """Writers of a float, an int and a bool that are one level smaller."""
        return (lambda: self.number(depth - 1)), (lambda: self.whole(depth - 1)), (lambda: self.truth(depth - 1))

    def _maybe_shared(self, text: str) -> str:
        if self.rng.random() > 0.15:
            return text
        self.shared.append(f"let shared{len(self.shared)} = {text}")
        return f"shared{len(self.shared) - 1}"


_FUNCTIONS = (
    *("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf"),
    *("sigmoid", "silu", "gelu", "softplus", "floor", "ceil", "round"),
)
