"""Whether entries of a batch know of one another."""

from __future__ import annotations

import pytest

from flashgen.analysis.captured import batch_axes
from flashgen.language.front import parse_text


def axes(body: str) -> object:
    (spec,) = parse_text(f"attention drawn {{ head_dim 16 {body} }}").specs
    found = batch_axes(spec)
    return found if found is None else dict(found)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mask causal", {}),
        ("tensor t: f32[H, B] score s + t[h, b]", {"t": 1}),
        ("tensor t: f32[H] tensor u: i32[B, Nk] score s + t[h] mask u[b, i] == u[b, j]", {"t": None, "u": 0}),
        ("tensor t: f32[B] score s + t[b + 0]", {"t": 0}),
        ("tensor t: f32[B, Nk] tensor u: i32[B] score s + t[b, clamp(u[b], 0, Nk - 1)]", {"t": 0, "u": 0}),
        ("dropout 0.5", {}),  # which a call decides
        ("score s + b", None),
        ("score s / B", None),
        ("param p: f32 = 1 / B score s + p", None),
        ("tensor t: f32[B] score s + t[0]", None),
        ("tensor t: f32[H] score s + t[min(b, H - 1)]", None),
        ("tensor t: f32[B + 1] score s + t[b]", None),
        ("tensor t: f32[B, B] score s + t[b, b]", None),
        ("mask hash(b, i, j) % 2 == 0", None),
        ("tensor t: f32[B, H] weights softmax(sink = t[b, h])", {"t": 0}),
        ("layout block 4: (I + J + b) % 2 == 0", None),
    ],
)
def test_axes(body: str, expected: object) -> None:
    assert axes(body) == expected
