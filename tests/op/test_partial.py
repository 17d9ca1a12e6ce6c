"""Rows whose keys are seen in parts, where lse holds nothing of their weights: far scores, and far sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from tools.fuzz.parts import in_parts

SPECS = {
    "softmax": """attention far_scores {
        head_dim 8
        tensor bias: f32[H] grad
        score s + bias[h]
    }""",
    "sink": """attention far_sinks {
        head_dim 8
        tensor bias: f32[H] grad
        tensor z: f32[H] grad
        score s + bias[h]
        weights softmax(sink = z[h])
    }""",
}
# A score that all keys of a head share nearly, and a sink.
FAR = [
    *((-1e30, -1e30), (1e30, 1e30), (1e6, 1e6 + 1), (-1e6, -1e6 - 2)),
    *((-1e30, 0.0), (0.0, -1e30), (100.0, 101.0), (0.0, 200.0)),
]


@pytest.mark.parametrize(("bias", "sink"), FAR)
@pytest.mark.parametrize("name", SPECS)
def test_parts_of_rows_with_far_scores_make_the_whole(name: str, bias: float, sink: float) -> None:
    op: Any = flashgen.loads(SPECS[name], backend="cpu")
    q, k, v, d_o = (torch.randn(1, 2, n, 8) for n in (3, 5, 5, 3))
    captured = {"bias": torch.tensor([bias, 0.5])} | ({"z": torch.tensor([sink, 0.1])} if name == "sink" else {})

    def step(call: Any, **more: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *captured.values())]
        o, lse = call(*leaves[:3], **dict(zip(captured, leaves[3:], strict=True)), return_lse=True)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, d_o)]

    whole = step(op)
    for count, wide in ((2, False), (3, True)):
        merged = step(lambda *given, count=count, wide=wide, **more: in_parts(op, count, wide, *given, **more))
        for x, y in zip(merged, whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-6)
