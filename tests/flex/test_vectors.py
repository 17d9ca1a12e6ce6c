"""Rows of captured tensors in mods: PyTorch's numbers and gradients, unrolled; what is too long is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.diagnostics import SpecError
from flashgen.flex import create_block_mask, flex_attention, to_spec
from tests.flex.helpers import assert_close, inputs, judged

_GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


MEANS = drawn(24, 3).requires_grad_()
QUERIES, KEYS = drawn(2, 4, 24, 5).requires_grad_(), drawn(2, 1, 24, 5).requires_grad_()
WEIGHTS = drawn(3).requires_grad_()
TOP = torch.randint(0, 6, (2, 4, 6, 3), generator=_GENERATOR)
GRID = drawn(24, 2, 3)
SEEN = drawn(24, 4) > 0
SHORT = torch.randint(-100, 100, (24, 4), generator=_GENERATOR, dtype=torch.int8)
LONG = drawn(24, 300)
FOUR = drawn(24, 4)


def _changed(row: Any) -> Any:
    first, last = row[0], row.view(1, 3)[0, 2]
    first += row[1]
    last *= 2
    return first - last


SCORES: dict[str, Any] = {
    "a squared distance": lambda s, b, h, i, j: s - (MEANS[i] - MEANS[j]).pow(2).sum(-1),
    "a distance": lambda s, b, h, i, j: s - (MEANS[i] - MEANS[j] + 0.1).square().sum(-1).sqrt(),
    "dot": lambda s, b, h, i, j: s + torch.dot(QUERIES[b, h, i], KEYS[b, 0, j]),
    "@": lambda s, b, h, i, j: s + QUERIES[b, h, i] @ KEYS[b, 0, j],
    "a product and a sum": lambda s, b, h, i, j: s + (QUERIES[b][h][i] * KEYS[b, 0, j]).sum(),
    "a captured vector": lambda s, b, h, i, j: s + (WEIGHTS * MEANS[i]).mean(-1),
    "amax": lambda s, b, h, i, j: s + (MEANS[i] - MEANS[j]).amax(-1),
    "max of a dimension": lambda s, b, h, i, j: s + 0.3 * MEANS[i].max(dim=-1).values + MEANS[j].max(-1)[1],
    "min": lambda s, b, h, i, j: s + torch.min(MEANS[i] * MEANS[j]),
    "argmin": lambda s, b, h, i, j: s + (MEANS[i] - MEANS[j]).argmin(),
    "prod": lambda s, b, h, i, j: s + torch.prod(MEANS[i], dim=0) * MEANS[j].prod(),
    "a norm": lambda s, b, h, i, j: s - torch.linalg.vector_norm(MEANS[i] - MEANS[(j + 1) % 24], dim=-1),
    "norms of other orders": lambda s, b, h, i, j: (
        s - (MEANS[i] - MEANS[j]).norm(p=1) - torch.norm(MEANS[i] - MEANS[j] + 1, 3, -1)
        - torch.linalg.norm(MEANS[i] - MEANS[j], ord=float("inf"))
    ),
    "two dimensions": lambda s, b, h, i, j: (
        s + (GRID[i] * GRID[j]).sum((0, 1)) - GRID[i].amax(0).mean() - GRID[j].sum(1)[0]
    ),
    "keepdim": lambda s, b, h, i, j: s + (MEANS[i] - MEANS[i].mean(-1, keepdim=True)).abs().sum(-1),
    "parts": lambda s, b, h, i, j: s + (MEANS[i] * MEANS[j])[1:].sum() - (MEANS[i] + 1)[-1],
    "a loop": lambda s, b, h, i, j: s + sum(x * y for x, y in zip(MEANS[i], MEANS[j] * 2, strict=True)),
    "where": lambda s, b, h, i, j: s + torch.where(MEANS[i] > MEANS[j], MEANS[i], 0.5).sum(-1),
    "a function": lambda s, b, h, i, j: s + torch.tanh(MEANS[i].float() * 2).sum(dim=-1) / MEANS[i].shape[0],
    "small ints": lambda s, b, h, i, j: s + 0.001 * SHORT[i].sum() + 0.1 * (SHORT[j] > 3).sum(-1),
    "other shapes": lambda s, b, h, i, j: (
        s + (MEANS[i].view(3, 1) * MEANS[j].reshape(1, 3)).sum() + MEANS[i].expand(2, 3)[1] @ WEIGHTS
    ),
    "a changed element": lambda s, b, h, i, j: s + _changed(MEANS[i] * MEANS[j]),
    "an unequal length": lambda s, b, h, i, j: s + (MEANS[i].unsqueeze(-1) * FOUR[j].unsqueeze(0)).sum(),
}  # fmt: skip
MASKS: dict[str, Any] = {
    "any": lambda b, h, i, j: (TOP[b, h, i // 4] == j // 4).any(-1) | (i == j),
    "any, unsqueezed": lambda b, h, i, j: (TOP[b, h, i // 4] == (j // 4).unsqueeze(-1)).any(dim=-1) | (i == j),
    "all": lambda b, h, i, j: torch.all(SEEN[i] | SEEN[j]) | (i == j),
    "a count": lambda b, h, i, j: ((SEEN[i] & SEEN[j]).sum(-1) > 1) | (i == j),
    "any of numbers": lambda b, h, i, j: SHORT[j].any() & (i >= j),
}


def compared(score_mod: Any, mask_mod: Any, backend: str) -> None:
    q, k, v = inputs()
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, 24, 24)
    mine = flex_attention(q, k, v, score_mod, mask, backend=backend)
    truth = judged(q, k, v, score_mod, mask_mod)[0]
    assert_close(mine, truth)
    learned = [q, *(x for x in (MEANS, QUERIES, KEYS, WEIGHTS) if score_mod is not None)]
    weight = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad((o * weight).sum(), learned, **options) for o in (mine, truth)]
    for own, right in zip(*gradients, strict=True):
        torch.testing.assert_close(own, right, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    compared(SCORES[name], None, "reference")


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    compared(None, MASKS[name], "reference")


def test_in_a_kernel() -> None:
    compared(SCORES["dot"], MASKS["any"], "cpu")


def test_a_norm_of_nothing_has_no_gradient() -> None:
    q, k, v = inputs()
    rows = MEANS.detach().clone().requires_grad_()
    o = flex_attention(q, k, v, lambda s, b, h, i, j: s - (rows[i] - rows[j]).norm(), backend="reference")
    o.square().sum().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_what_a_row_becomes() -> None:
    text = to_spec(score_mod=lambda s, b, h, i, j: s + torch.dot(WEIGHTS[:2], MEANS[:, :2][j]))
    assert "score s + (WEIGHTS[0] * MEANS[j, 0] + WEIGHTS[1] * MEANS[j, 1])" in text


def test_another_length_of_a_row_is_another_trace() -> None:
    q, k, v = inputs()
    for width in (2, 5, 2):
        rows = torch.randn(24, width, generator=torch.Generator().manual_seed(width))
        mod = make_dot(rows)
        assert_close(flex_attention(q, k, v, mod, backend="reference"), judged(q, k, v, mod)[0])


def make_dot(rows: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: s + torch.dot(rows[i], rows[j])


UNLIKE = r"torch\.float32\[3\] and torch\.float32\[4\]"
REFUSED: dict[str, tuple[Any, str]] = {
    "too long": (lambda s, b, h, i, j: s + LONG[i].sum(), "a row of 'LONG' has 300 entries; .* at most 256"),
    "too many": (
        lambda s, b, h, i, j: s + (LONG[:, :100][j].unsqueeze(0) * FOUR[i].unsqueeze(1)).sum(),
        "at most 256 terms at once, and here are 400",
    ),
    "unlike lengths": (lambda s, b, h, i, j: s + (MEANS[i] * FOUR[j]).sum(), rf"'mul' of {UNLIKE}: "),
    "a dot of unlike lengths": (lambda s, b, h, i, j: s + torch.dot(MEANS[i], FOUR[j]), rf"'dot' of {UNLIKE}: "),
    "a row as a score": (lambda s, b, h, i, j: s + MEANS[i], "returns a row of a tensor; a score is expected"),
    "an unknown function": (lambda s, b, h, i, j: s + MEANS[i].cumsum(-1)[0], "flashgen has no 'cumsum' for a mod"),
    "in place": (lambda s, b, h, i, j: s + MEANS[i].mul_(2).sum(), "cannot change a row"),
    "a condition": (lambda s, b, h, i, j: s if (MEANS[i] > 0).all() else -s, "a Python condition"),
    "a mean of ints": (lambda s, b, h, i, j: s + SHORT[i].mean(), r"'mean' of torch\.int8\[4\]: "),
    "a symbolic place": (lambda s, b, h, i, j: s + (MEANS[i] * 2)[h], "indexed by a value"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    mod, message = REFUSED[name]
    q, k, v = inputs()
    with pytest.raises(SpecError, match=message):
        flex_attention(q, k, v, mod, backend="reference")
