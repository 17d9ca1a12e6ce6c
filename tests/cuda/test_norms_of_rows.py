"""Squared distances without |q|², which a softmax does not see: rows far from all keys, sinks, factors of heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashgen.distributed.partial import Offsets, Partial
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.score import Distance
from flashgen.verification.verify import relative_error, verify_case
from tests.cuda.helpers import emitted, variant_of
from tests.cuda.hopper import hopper, random
from tests.cuda.targets import KINDS, emulated
from tests.numeric.helpers import failures, normal

Attention = Callable[..., tuple[Tensor, Tensor]]
SCORE = "head_dim 64  score -sqdist / 8  mask causal"
SERVED = "schedule { Br = 128  Bc = 64  warps = 8 }"


@pytest.mark.parametrize(
    ("body", "split"),
    [
        ("score -sqdist / 16", True),
        ("tensor sink: f32[H]  score s - sqdist / 16  weights softmax(sink = sink[h])", True),
        ("score -sqdist / 16  weights normalize(exp(s))", True),
        ("score -sqdist / 16  weights sigmoid(s)", False),
        ("score -sqdist / 16  weights normalize2(s)", False),
        ("score softcap(-sqdist, 30.0)", False),
        ("score clamp(-0.1 * sqdist, -40, 0)", False),
        ("score s", False),
    ],
)
def test_which_scores_are_without(body: str, split: bool) -> None:
    variant = variant_of(f"attention a {{ head_dim 64  {body} }}")
    recipe = decide(variant)
    assert isinstance(recipe.score, Distance) == split
    assert any(each.question == "squared distances" for each in recipe.decisions) == split


@pytest.mark.parametrize("target", KINDS)
def test_a_pair_takes_one_operation(target: str) -> None:
    """The forward pass forms no distance."""
    source = emitted("attention a { head_dim 64  score -0.5 * sqdist }", target)
    text, pairs = source.text, dict(source.headers)["flashgen/forward/pairs.cuh"]
    assert "  return dot + c.from_norm;\n" in text
    forward, _, _ = text.partition("// ---- Backward")
    assert "squared_distance(" not in forward
    assert " norms = true" in text
    assert "else if constexpr (Spec::sqdist && !Spec::norms) return score(" in pairs
    backward = dict(source.headers)["flashgen/backward/pair.cuh"]  # one for both kernels
    assert "if constexpr (Spec::sqdist && !Spec::norms) return score(" in backward


def _differentiated(op: Attention, inputs: list[Tensor], moved: tuple[Tensor, Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, lse = op(*inputs)
    gradients = torch.autograd.grad((o, lse), inputs, (moved[0].to(o.dtype), moved[1].to(lse.dtype)))
    return [o.detach(), lse.detach(), *gradients]


@pytest.mark.parametrize("of_lse", [0.0, 1.0])
@pytest.mark.parametrize("distance", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("target", KINDS)
def test_rows_far_from_all_keys(target: str, distance: float, of_lse: float) -> None:
    """Rounded to |q|² their scores would be off by 0.001, 0.1 and 10 here: weights of keys that are apart by less.

    Where nothing arrives at lse, nothing may arrive at |q|².
    """
    op = emulated(f"attention far {{ dtype f32  {SCORE} }}", target)
    q, k, v, d_o = (normal(1, 2, 90, 64, seed=seed) for seed in range(4))
    inputs, moved = [q + distance, k * (3.0 / distance), v], (d_o, of_lse * normal(1, 2, 90, seed=4))

    def reference(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = op.reference(*inputs, dtype=torch.float64, return_lse=True)
        return o, lse

    def kernels(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = op(*inputs, return_lse=True)
        return o, lse

    found, exact = (
        _differentiated(kernels, inputs, moved),
        _differentiated(reference, [x.double() for x in inputs], moved),
    )
    assert max(relative_error(*each) for each in zip(found, exact, strict=True)) < 4e-6


@pytest.mark.parametrize("distance", [0.0, 300.0])
@pytest.mark.parametrize("target", KINDS[1:])
def test_parts_of_the_keys(target: str, distance: float) -> None:
    """What parts leave of a row is of whole scores, in two numbers where these are extreme."""
    op = emulated("attention split { dtype f32  head_dim 64  score -sqdist / 8 }", target)
    q, k, v, d_o = (normal(1, 2, n, 64, seed=seed) for seed, n in enumerate((70, 90, 90, 70)))
    q, k, d_lse = q + distance, k / (1 + distance), normal(1, 2, 70, seed=4)
    parts = Partial(op)
    places = [(slice(first, last), Offsets(0, first, 0, 0, 70, 90, 1, 2)) for first, last in ((0, 33), (33, 90))]

    def tensors(of: slice) -> tuple[Tensor, Tensor, Tensor]:
        return q, k[:, :, of].contiguous(), v[:, :, of].contiguous()

    rows = parts.begin(q, v)
    for of, where in places:
        rows = parts.add(rows, tensors(of), where)
    closed = parts.close(rows, None, (q, k, v))
    assert closed[1] is not None
    found = [parts.gradients(d_o, d_lse, closed, tensors(of), where, [True] * 3, False) for of, where in places]

    def reference(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = op.reference(*inputs, dtype=torch.float64, return_lse=True)
        return o, lse

    exact = _differentiated(reference, [x.double() for x in (q, k, v)], (d_o, d_lse))
    d_q, *of_keys = (
        torch.stack(each).sum(0) if n == 0 else torch.cat(each, 2) for n, each in enumerate(zip(*found, strict=True))
    )
    for mine, truth in zip((closed[0], closed[1], d_q, *of_keys), exact, strict=True):
        assert relative_error(mine, truth) < 4e-6


@pytest.mark.parametrize("target", KINDS)
def test_a_sink_beside_far_rows(target: str) -> None:
    """It competes with whole scores."""
    op = emulated(
        f"attention sunk {{ dtype f32  tensor sink: f32[Nq]  weights softmax(sink=sink[i])  {SCORE} }}", target
    )
    q, k, v = (normal(1, 1, 90, 64, seed=seed) for seed in range(3))
    q, k = q + 10, k / 3
    whole = -((q[..., None, :] - k[..., None, :, :]).double().square().sum(-1) / 8)
    sink = whole.masked_fill(torch.ones(90, 90).triu(1) > 0, -torch.inf).logsumexp(-1)[0, 0].float()
    exact, exact_lse = op.reference(q, k, v, sink=sink, dtype=torch.float64, return_lse=True)
    o, lse = op(q, k, v, sink=sink, return_lse=True)
    assert relative_error(o, exact) < 4e-4  # 2^-24 of a score of 1,000
    assert (lse.double() - exact_lse).abs().max() < 4e-4
    alone = emulated(f"attention unsunk {{ dtype f32  {SCORE} }}", target)(q, k, v)
    assert relative_error(o, alone.double() / 2) < 4e-4


@pytest.mark.parametrize("target", KINDS)
def test_bytes_of_what_arrives_at_lse(target: str) -> None:
    op = emulated(f"attention counted {{ {SCORE} }}", target)
    for element in (ElementType.F32, ElementType.F16):
        case = verify_case(op, op.spec.head_dims[0], element, Shape(2, 4, 2, 150, 201))
        assert case.ok, failures(case)
        assert case.hbm_bytes
        assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


@pytest.mark.parametrize("ragged", [False, True])
def test_heads_with_factors_of_their_own(ragged: bool) -> None:
    """Who takes norms of keys knows of which head."""
    op = hopper(f"head_dim 64  tensor g: f32[H]  score -sqdist * g[h]  mask i - j < 70000  {SERVED}")
    q, k, v = (random(1, 4, 330, 64, seed=seed) / 2 for seed in range(3))
    g = torch.tensor([0.01, 0.3, 0.05, 1.0])
    if not ragged:
        found, exact = op(q, k, v, g=g), op.reference(q, k, v, g=g, dtype=torch.float64)
        assert (found.double() - exact).abs().max() < 0.02
        return
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    starts = torch.tensor([0, 100, 100, 330], dtype=torch.int32)
    found = op.varlen(q, k, v, starts, starts, 230, 230, g=g)
    for first, last in ((0, 100), (100, 330)):
        part = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        exact = op.reference(*part, g=g, dtype=torch.float64)[0].transpose(0, 1)
        assert (found[first:last].double() - exact).abs().max() < 0.02


def test_sequences_with_factors_of_their_own() -> None:
    """So they know of which sequence: a param's default may follow from its length."""
    op = hopper("head_dim 64  param f: f32 = 1 / (1 + Nk)  score -sqdist * f")
    q, k, v = (random(180, 2, 64, seed=seed) / 2 for seed in range(3))
    starts = torch.tensor([0, 40, 43, 180], dtype=torch.int32)
    found = op.varlen(q, k, v, starts, starts, 137, 137)
    for first, last in ((0, 40), (40, 43), (43, 180)):
        part = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        exact = op.reference(*part, dtype=torch.float64)[0].transpose(0, 1)
        assert (found[first:last].double() - exact).abs().max() < 0.02
