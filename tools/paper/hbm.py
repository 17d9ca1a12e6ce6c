"""Slow memory: matrices by name, reached only through ``load`` and ``store``, which count every element.

In: torch tensors. Out: copies of their blocks, and counts. Whatever the algorithms keep in variables of their own is
the paper's SRAM; the products that they form of it are counted here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Place = int | slice


@dataclass
class Hbm:
    """One memory. ``loads`` and ``stores`` count elements by the matrix's name.

    ``extra`` are the elements of matrices that are neither inputs nor outputs: what Theorem 1 bounds by O(N).
    ``flops`` are those of the matrix products on the chip, two for each multiplication with its addition.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    extra: int = 0
    flops: int = 0
    _matrices: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def accesses(self) -> int:
        """Elements moved either way."""
        return self.loads.total() + self.stores.total()

    @property
    def by_name(self) -> Mapping[str, int]:
        """Elements moved either way, by name."""
        return self.loads + self.stores

    def put(self, name: str, matrix: Tensor) -> None:
        """An input, which lies there already."""
        self._matrices[name] = matrix

    def initialise(self, name: str, like: Tensor, *shape: int, value: float = 0.0, output: bool = False) -> None:
        """A new matrix, filled with ``value``: one store an element."""
        self._matrices[name] = torch.full(shape, value, dtype=like.dtype, device=like.device)
        self.stores[name] += self._matrices[name].numel()
        self.extra += 0 if output else self._matrices[name].numel()

    def reserve(self, name: str, like: Tensor, *shape: int, output: bool = False) -> None:
        """A new matrix that is written before it is read. Reading it sooner gives NaN."""
        self._matrices[name] = torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
        self.extra += 0 if output else self._matrices[name].numel()

    def load(self, name: str, *place: Place) -> Tensor:
        """A copy of a block."""
        block = self._matrices[name][place].clone()
        self.loads[name] += block.numel()
        return block

    def store(self, name: str, block: Tensor, *place: Place) -> None:
        """Write a block; ``ValueError`` where it does not have the shape of the place."""
        matrix = self._matrices[name]
        if matrix[place].shape != block.shape:
            raise ValueError(f"a block of shape {list(block.shape)} in '{name}' {list(matrix[place].shape)}")
        matrix[place] = block
        self.stores[name] += block.numel()

    def add(self, name: str, terms: Tensor, elements: int) -> None:
        """Add to ``elements`` of a matrix, in place: each is loaded and stored. ``terms`` is zero elsewhere."""
        self._matrices[name] += terms
        self.loads[name] += elements
        self.stores[name] += elements

    def read(self, name: str, elements: int) -> None:
        """Count elements of a matrix that were read one by one."""
        self.loads[name] += elements

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right`` of two blocks on the chip, with its flops counted."""
        self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return left @ right

    def holds(self, name: str) -> bool:
        """Whether there is a matrix of this name."""
        return name in self._matrices

    def result(self, name: str) -> Tensor:
        """The whole matrix, for whoever called the algorithm: not counted."""
        return self._matrices[name]
