"""Operators of the gallery on a GPU, their arguments and their results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.language import parse_file
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification import Inputs, fitting, random_inputs
from tests.numeric.helpers import SMALL_CONSTANTS, SPECS, dtypes

cuda: Any = torch.cuda
# One of each kind of spec: for what is tested beside numbers, and takes long.
REPRESENTATIVE = ("causal", "alibi", "gemma2_local", "packed_documents", "t5", "gpt_oss", "sigmoid_attention", "cosine")


def spec_of(name: str) -> AttentionSpec:
    """A gallery spec as it is read: no target is asked, which took each process seconds before its first test."""
    (spec,) = parse_file(SPECS / f"{name}.attn", SMALL_CONSTANTS.get(name, {})).specs
    return spec


@contextlib.contextmanager
def capturing(x: Tensor) -> Iterator[None]:
    """A graph that is captured; with something in it, because PyTorch warns of one without."""
    with cuda.graph(cuda.CUDAGraph()):
        x.neg()
        yield


@functools.cache
def operator(name: str) -> AttentionOp:
    """A gallery spec for GPUs."""
    return flashgen.load(SPECS / f"{name}.attn", const=SMALL_CONSTANTS.get(name, {}), backend="cuda")


def arguments(
    op: AttentionOp,
    shape: Shape,
    *,
    head_dim: HeadDim | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cuda",
    seed: int = 0,
) -> Inputs:
    """Random arguments on a device; in 16 bits where the spec has them."""
    chosen = dtype or TORCH_DTYPES[dtypes(op.spec)[-1]]
    return random_inputs(op.spec, fitting(op.spec, shape), head_dim or op.spec.head_dims[0], chosen, seed=seed).to(
        device
    )


def results(op: AttentionOp, inputs: Inputs, **options: Any) -> list[Tensor]:
    """o and every gradient."""
    leaves = {key: value.detach().clone().requires_grad_() for key, value in inputs.differentiable(op.spec).items()}
    named = {key: leaves.get(key, value) for key, value in inputs.named.items()}
    o = op(leaves["q"], leaves["k"], leaves["v"], seed=3, **named, **options)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), inputs.d_o)]
