"""Captured tensors for a picture: random, the same for the same seed, and such as a mask would meet.

In: an ``AttentionSpec`` and the sizes of a call. Out: the tensors that the mask reads. Beyond ``random_inputs``, which
tests with noise where it can: padding stands at the end, and a square of booleans over the queries is a tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashgen.ir.expr import Expr, Load, size, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.ir.types import ElementType
from flashgen.verification.inputs import random_captured, tensor_shape


def tensors_of(spec: AttentionSpec, keep: Expr) -> tuple[CapturedTensor, ...]:
    """The captured tensors that a condition reads."""
    read = {node.tensor for node in walk(keep) if isinstance(node, Load)}
    return tuple(tensor for tensor in spec.tensors if tensor.name in read)


def plausible_captured(
    spec: AttentionSpec, keep: Expr, shape: Shape, head_dim: HeadDim, *, seed: int = 0
) -> Mapping[str, Tensor]:
    """The tensors that ``keep`` reads, by name, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: _values(spec, tensor, shape, head_dim, generator) for tensor in tensors_of(spec, keep)}


def _values(
    spec: AttentionSpec, tensor: CapturedTensor, shape: Shape, head_dim: HeadDim, generator: torch.Generator
) -> Tensor:
    extents = tensor_shape(tensor, shape, head_dim)
    if tensor.element is ElementType.BOOL and 0 not in extents:
        if tensor.shape[-2:] == (size("Nq"), size("Nq")):
            return _tree(extents[-1], generator).expand(extents)
        if tensor.shape[-1] in (size("Nq"), size("Nk")):
            return _prefixes(extents, generator)
    return random_captured(spec, tensor, shape, head_dim, generator)


def _prefixes(extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """True up to a length between half of the last dimension and all of it."""
    length = extents[-1]
    lengths = torch.randint((length + 1) // 2, length + 1, (*extents[:-1], 1), generator=generator)
    return torch.arange(length).expand(extents) < lengths


def _tree(count: int, generator: torch.Generator) -> Tensor:
    """[count, count]: whether the second is the first or one of its ancestors; parents come before their children."""
    ancestors = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        parent = int(torch.randint(max(0, node - 4), node, (), generator=generator))
        ancestors[node] |= ancestors[parent]
    return ancestors
