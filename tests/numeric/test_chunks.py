"""Chunks whose size a call gives, any int of it, on every kind of target: results, gradients, and the tiles counted."""

from __future__ import annotations

import functools

import pytest
import torch

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.ir.shape import Shape
from flashgen.language import parse_text
from flashgen.op.op import AttentionOp
from flashgen.plan.tile_counts import MaskedCall, counts_of_call, tile_counts
from tests.numeric.helpers import normal

MASKS = {
    "self": "causal and chunked(chunk)",
    "lower right": "causal_lower_right and (i + Nk - Nq) // chunk == j // chunk",
    "the next one": "i // chunk - j // chunk <= 1 and j // chunk - i // chunk <= 1",
}
SIZES = (1, 7, 64, 1000, 2**31 - 1, 0, -1, -7, -(2**31))
QUERIES, KEYS, WIDTH = 150, 171, 16


@functools.cache
def op(name: str, backend: str, target: str | None) -> AttentionOp:
    text = f"attention chunks {{ head_dim {WIDTH}  dtype f16  param chunk: i32  mask {MASKS[name]} }}"
    return flashgen.loads(text, backend=backend, target=target)


@pytest.mark.parametrize("chunk", SIZES)
@pytest.mark.parametrize(
    ("name", "backend", "target"),
    [
        ("self", "cpu", None),
        ("self", "emulator", "sm_90a"),
        ("lower right", "cpu", None),
        pytest.param("lower right", "emulator", "sm_90a", marks=pytest.mark.slow),
        pytest.param("lower right", "emulator", "sm_80", marks=pytest.mark.slow),
        pytest.param("the next one", "cpu", None, marks=pytest.mark.slow),
        pytest.param("the next one", "emulator", "sm_90a", marks=pytest.mark.slow),
    ],
)
def test_results(name: str, backend: str, target: str | None, chunk: int) -> None:
    found = op(name, backend, target)
    lengths = (QUERIES, KEYS, KEYS)
    q, k, v = (normal(1, 2, n, WIDTH, seed=seed).half().requires_grad_() for seed, n in enumerate(lengths))
    o, lse = found(q, k, v, chunk=chunk, return_lse=True)
    exact, exact_lse = found.reference(q, k, v, chunk=chunk, return_lse=True, dtype=torch.float64)
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert (o.double() - exact).abs().max() < 3e-3
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    weight = normal(*o.shape, seed=9).half()
    own = torch.autograd.grad(o, (q, k, v), weight)
    for x, y in zip(own, torch.autograd.grad(exact, (q, k, v), weight.double()), strict=True):
        assert (x.double() - y.double()).norm() <= 5e-3 * max(float(y.norm()), 1.0)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_of_a_constant(name: str, chunk: int) -> None:
    """What a plan counts by the param's default, and what a call visits."""
    text = "attention chunks {{ head_dim 64  {}  mask {} }}"
    specs = [
        parse_text(text.format(declared, MASKS[name])).specs[0]
        for declared in (f"const chunk = {chunk}", f"param chunk: i32 = {chunk}", "param chunk: i32")
    ]
    constant, known, given = (analyse(spec, spec.head_dims[0]) for spec in specs)
    for shape in (Shape(1, 1, 1, 1500, 1500), Shape(1, 2, 2, 700, 1200)):
        for rows, columns in ((64, 64), (128, 48)):
            expected = tile_counts(constant, shape, rows, columns)
            found = tile_counts(known, shape, rows, columns)
            assert (found.full, found.partial, found.keys) == (expected.full, expected.partial, expected.keys)
            call = MaskedCall(shape, (0, 0, 0, 0), MaskedCall.of_shape(shape, ()).sizes, {"chunk": chunk}, None)
            of_call = counts_of_call(given.keep, call, rows, columns)
            assert (of_call.full, of_call.partial, of_call.keys) == (expected.full, expected.partial, expected.keys)
