"""Random arguments for any spec: queries, keys, values, captured tensors, params and the gradients that arrive.

In: an ``AttentionSpec`` and the sizes of a call. Out: ``Inputs``, in the declared element types; captured tensors as
``captured.py`` draws them, as noise or such as users have, everything else normally distributed, q and k in a size
that gives scores of size 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import check_index
from flashgen.ir.expr import (
    score_input,
    substitute,
    walk,
)
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ScalarType
from flashgen.reference.dense import constant_number, known_values, param_values
from flashgen.verification.captured import random_captured, realistic_captured, sizes_of, tensor_shape

__all__ = ["Inputs", "accepts", "fitting", "random_inputs", "refusal", "scale_factor", "tensor_shape"]

_LARGEST_BATCH = 4096


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: Mapping[str, Tensor]
    params: Mapping[str, Tensor | float | int]
    d_o: Tensor
    d_lse: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def named(self) -> dict[str, Any]:
        """Captured tensors and params, as keyword arguments."""
        return {**self.captured, **self.params}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The arguments with every tensor changed, also params that are tensors, as those of a module are."""
        return Inputs(
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            captured={name: change(x) for name, x in self.captured.items()},
            params={name: change(x) if isinstance(x, Tensor) else x for name, x in self.params.items()},
            d_o=change(self.d_o),
            d_lse=change(self.d_lse),
        )

    def to(self, device: str) -> Inputs:
        return self.mapped(lambda x: x.to(device))

    def differentiable(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """Every tensor that receives a gradient, under the name of its gradient's row in a report."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        for captured in spec.tensors:
            if captured.grad:
                found[captured.name] = self.captured[captured.name]
        for param in spec.params:
            value = self.params.get(param.name)
            if param.grad and isinstance(value, Tensor):
                found[param.name] = value
        return found


def random_inputs(
    spec: AttentionSpec,
    shape: Shape,
    head_dim: HeadDim,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    realistic: bool = False,
) -> Inputs:
    """Arguments for one call at these sizes; the same for the same seed.

    ``realistic``: captured tensors such as users have, for timings; noise reaches more kinds of tiles.
    """
    generator = torch.Generator().manual_seed(seed)
    params = _params(spec, sizes_of(shape, head_dim))
    unit = _size_of_elements(spec, shape, head_dim, params)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    B, H, Hkv, Nq, Nk = shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len
    return Inputs(
        q=(unit * normal(B, H, Nq, head_dim.qk)).to(dtype),
        k=(unit * normal(B, Hkv, Nk, head_dim.qk)).to(dtype),
        v=normal(B, Hkv, Nk, head_dim.v).to(dtype),
        captured=realistic_captured(spec, shape, head_dim, seed=seed)
        if realistic
        else {tensor.name: random_captured(spec, tensor, shape, head_dim, generator) for tensor in spec.tensors},
        params=params,
        d_o=normal(B, H, Nq, head_dim.v).to(dtype),
        d_lse=normal(B, H, Nq),
    )


def _size_of_elements(
    spec: AttentionSpec, shape: Shape, head_dim: HeadDim, params: Mapping[str, Tensor | float | int]
) -> float:
    """The standard deviation of q and k at which s = τ q·k (or ‖q - k‖² / 2, where it is used) has one of 1.

    Far larger scores make a softmax that picks one key, and gradients that cancel.
    """
    given = {name: float(value) for name, value in params.items()}
    scale = abs(scale_factor(spec, given, sizes_of(shape, head_dim)))
    if any(node == score_input("sqdist") for node in walk(spec.score)):
        scale = 1.0
    return (scale * math.sqrt(head_dim.qk)) ** -0.5 if math.isfinite(scale) and scale > 0 else 1.0


def scale_factor(spec: AttentionSpec, params: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """τ at these sizes and params."""
    known = known_values(sizes, spec.params, param_values(spec, params, sizes))
    return float(constant_number(substitute(spec.scale, known)))


def refusal(spec: AttentionSpec, shape: Shape) -> str | None:
    """Why the operator would refuse a call at these sizes; None if it would not."""
    head_dim = spec.head_dims[0]
    for tensor in spec.tensors:
        extents = tensor_shape(tensor, shape, head_dim)
        if min(extents, default=0) < 0:
            return f"tensor '{tensor.name}' would have the shape {list(extents)}"
    sizes = sizes_of(shape, head_dim)
    return next(filter(None, (check_index(proof, sizes) for proof in prove_indices(spec, head_dim))), None)


def accepts(spec: AttentionSpec, shape: Shape) -> bool:
    """Whether the operator can be called at these sizes, and no captured tensor is empty."""
    extents = (extent for tensor in spec.tensors for extent in tensor_shape(tensor, shape, spec.head_dims[0]))
    return 0 not in extents and refusal(spec, shape) is None


def fitting(spec: AttentionSpec, shape: Shape, *, pairs: int = 2**22) -> Shape:
    """The nearest shape that the spec accepts: the batch doubled, then both lengths halved, as often as needed.

    Lengths are also halved while there are more pairs than the limit. Where no shape fits, the given one is returned.
    """
    tried = shape
    while True:
        grown = tried
        while grown.batch < _LARGEST_BATCH and not accepts(spec, grown):
            grown = dataclasses.replace(grown, batch=2 * max(grown.batch, 1))
        if accepts(spec, grown) and grown.batch * grown.heads * grown.q_len * grown.kv_len <= pairs:
            return grown
        if max(tried.q_len, tried.kv_len) <= 1:
            return shape
        tried = dataclasses.replace(tried, q_len=-(-tried.q_len // 2), kv_len=-(-tried.kv_len // 2))


def _params(spec: AttentionSpec, sizes: Mapping[str, int]) -> dict[str, Tensor | float | int]:
    """Values of required params (1, or half the keys), and tensors for params with gradients; else defaults hold."""
    given: dict[str, float] = {
        param.name: 1.0 if param.type is ScalarType.FLOAT else max(sizes["Nk"] // 2, 1)
        for param in spec.params
        if param.default is None
    }
    values = param_values(spec, given, sizes)
    for param in spec.params:
        if param.grad and not math.isfinite(values[param.name]):  # log(0) where there is no key
            values[param.name] = 0.0
    return {
        param.name: torch.tensor(values[param.name]) if param.grad else values[param.name]
        for param in spec.params
        if param.grad or param.default is None
    }
