"""Where all of a tile is kept warpgroups look at no maxima of rows: sums of weights tell where one has grown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.op.op import AttentionOp
from tests.cuda.hopper import changed, hopper, random

# By how much scores grow from key to key, about: weights that become large, infinite ones, and such as are counted from
# the maxima themselves.
GROWTH = {"slowly": 0.5, "fast": 1.3, "far": 16.0}
SPECS = {
    "alone": "head_dim 64  mask causal  schedule { Br = 64  Bc = 128  warps = 4 }",
    "three warpgroups": "head_dim 64",
    "two places of Q": "head_dim 128  schedule { Br = 128  Bc = 128  warps = 8 }",
    "one place of Q": "head_dim 128",
    "no next tile": "head_dim 256  mask causal",
    "documents": "head_dim 128  tensor doc: i32[B, Nk]  mask same_document(doc)",
    "sink and dropout": "head_dim 64  tensor sink: f32[H]  weights softmax(sink = sink[h])  dropout 0.2",
}
QUERIES, KEYS = 300, 640  # whole tiles, so that scores grow to the last visit


def deviation(op: AttentionOp, growth: float) -> float:
    """Of o, by norm, or of lse, beside float64, where scores of one head grow and those of another fall."""
    width = op.spec.head_dims[0].qk
    q = random(1, 2, QUERIES, width, seed=0)
    k, v = (random(1, 2, KEYS, width, seed=seed) for seed in (1, 2))
    q[..., 0] = (q[..., 0].abs() + 1) * torch.tensor([[[1.0], [-1.0]]])
    k[..., 0] = torch.arange(KEYS) * growth
    known = {"doc": (torch.arange(KEYS)[None] // 300).int(), "sink": torch.tensor([0.3, -2.0])}
    arguments: dict[str, Any] = {each.name: known[each.name] for each in op.spec.tensors}
    arguments |= {"seed": 5} if op.spec.dropout is not None else {}
    o, lse = op(q, k, v, **arguments, return_lse=True)
    exact, exact_lse = op.reference(q, k, v, **arguments, return_lse=True, dtype=torch.float64)
    if not torch.allclose(lse.double(), exact_lse, rtol=2e-6, atol=1e-5):
        return torch.inf
    return float((o.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if n % 2 else ()) for n, each in enumerate(SPECS)]
)
def test_scores_that_grow(name: str, growth: str) -> None:
    assert deviation(hopper(SPECS[name]), GROWTH[growth]) < 6e-3


# In which spec: what was planted, what the emulator may call it; nothing where results are wrong.
EARLY = {FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED, FaultKind.MBARRIER, FaultKind.DEADLOCK}
MISTAKES: dict[str, tuple[str, str, str, set[FaultKind]]] = {
    "sums are never too large": (
        "three warpgroups",
        r"if \(ballot\(grown\) != 0\) return false;\n    row_sum\[0\]",
        "row_sum[0]",
        set(),
    ),
    "products are added to weights": (
        "three warpgroups",
        r"(void multiply_again.*\n)    clear\(s\);\n",
        r"\1",
        set(),
    ),
    "K is given back before it is multiplied again": (
        "two places of Q",
        (
            r"(?s)(      release_q_of_last\(n\);\n)"
            r"((?-s:.*\n){1,9}    if constexpr \(P::maxima_by_sums\).{1,700}?    }\n)"
            r"    if constexpr \([^\n]*\) release_k\(n\);\n"
        ),
        r"\1      release_k(n);\n\2",
        {FaultKind.RACE, FaultKind.NOT_AWAITED},
    ),
    "a list is used before it is there": ("alone", r" +Team::barrier\(\);  // the list is there\n", "", EARLY),
    "parts begin at another stage": ("alone", r"n % \(2 \* stages\) != 0; \+\+n", "n % stages != 0; ++n", EARLY),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    which, old, new, kinds = MISTAKES[name]
    op = changed(f"planted_sums_{list(MISTAKES).index(name)}", SPECS[which], "forward", old, new)
    if not kinds:
        assert not deviation(op, GROWTH["fast"]) < 6e-3
        return
    with pytest.raises(EmulatorError) as caught:
        deviation(op, GROWTH["fast"])
    assert caught.value.kind in kinds, str(caught.value)
