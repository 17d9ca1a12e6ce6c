"""Blocks of one warpgroup that add up dK, dV and dQ take one key tile after another."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.schedule import ListCache
from flashgen.op.op import AttentionOp
from tests.cuda.hopper import changed, hopper, random

BLOCKS = "layout block 64: I == J or hash(I, J, 3) % 4 == 0"
Shape = tuple[int, int, int, int, int]  # batch, heads, heads of keys, queries, keys
IN_TURN: dict[str, tuple[str, Shape]] = {
    "blocks": (BLOCKS, (1, 6, 3, 500, 640)),
    "few visits, or none": ("layout block 64: hash(I, J, 5) % 7 == 0", (2, 4, 2, 700, 640)),
    "partial and full tiles": ("mask hash(i // 100, j // 130, 7) % 3 == 0 and i % 97 != 5", (1, 4, 4, 600, 700)),
    "documents": ("tensor doc: i32[B, Nk]  mask causal and same_document(doc)", (2, 4, 2, 600, 600)),
    "by head": ("layout block 64: hash(I, J, h) % 4 == 0", (1, 6, 3, 500, 640)),
    "window": ("mask causal and i - j < 100", (1, 4, 2, 600, 700)),
    "no key is kept": ("mask i > Nq", (1, 4, 4, 200, 500)),
    "a bias of heads with a gradient": (f"tensor tau: f32[H] grad  score s * tau[h]  {BLOCKS}", (1, 6, 3, 500, 640)),
    "a bias of keys with a gradient": (
        f"tensor tau: f32[B, Nk] grad  score s + tau[b, j]  {BLOCKS}",
        (2, 4, 2, 300, 640),
    ),
    "a param with a gradient": (f"param tau: f32 = 0.7 grad  score s * tau  {BLOCKS}", (1, 6, 3, 500, 640)),
    "pointwise": (f"weights relu(s) / Nk  {BLOCKS}", (1, 6, 3, 500, 640)),
    "dropout": (f"dropout 0.2  {BLOCKS}", (1, 6, 3, 500, 640)),
}


def gradients(op: AttentionOp, shape: Shape, text: str, *, exact: bool = False) -> list[Tensor]:
    """Of q, k, v and what is learned; ``exact``: by the reference in float64."""
    batch, heads, kv_heads, q_len, kv_len = shape
    width, v_width = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    sizes = ((heads, q_len, width), (kv_heads, kv_len, width), (kv_heads, kv_len, v_width))
    q, k, v = (random(batch, *size, seed=seed).requires_grad_() for seed, size in enumerate(sizes))
    documents = torch.arange(batch * kv_len).reshape(batch, kv_len) // 150 % 4
    arguments: dict[str, Any] = {"doc": documents.int()} if "tensor doc" in text else {}
    if "tau: f32[H]" in text:
        arguments["tau"] = torch.linspace(-0.3, 1.2, heads).requires_grad_()
    elif "tau: f32[B, Nk]" in text:
        arguments["tau"] = torch.linspace(-1.0, 1.0, batch * kv_len).reshape(batch, kv_len).requires_grad_()
    elif "param tau" in text:
        arguments["tau"] = torch.tensor(0.8, requires_grad=True)
    arguments |= {"seed": 3} if "dropout" in text else {}
    learned = [arguments["tau"]] if "grad " in text else []
    o = op.reference(q, k, v, **arguments, dtype=torch.float64) if exact else op(q, k, v, **arguments)
    d_o = random(*o.shape, seed=9).to(o.dtype)
    return [each.double() for each in torch.autograd.grad(o, (q, k, v, *learned), d_o)]


def require_alike(found: list[Tensor], exact: list[Tensor]) -> None:
    for x, y in zip(found, exact, strict=True):
        assert (x - y).abs().max() <= 0.02 * y.abs().max()


EACH = [*((name, "64") for name in IN_TURN), ("blocks", "64/32"), ("blocks", "128")]


@pytest.mark.parametrize(
    ("name", "head_dim"), [pytest.param(*each, marks=pytest.mark.slow if n % 2 else ()) for n, each in enumerate(EACH)]
)
def test_key_tiles_in_turn(name: str, head_dim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than blocks; with lists, where there are some, and without."""
    text, shape = IN_TURN[name]
    op = hopper(f"head_dim {head_dim}  {text}")
    exact = gradients(op, shape, text, exact=True)
    require_alike(gradients(op, shape, text), exact)
    monkeypatch.setattr(ListCache, "find", lambda *_: None)
    require_alike(gradients(op, shape, text), exact)


@pytest.mark.slow
def test_several_windows_in_turn() -> None:
    text, shape = "mask hash(i // 64, j // 64, 3) % 400 == 0", (1, 2, 1, 66000, 448)
    op = hopper(f"head_dim 16  {text}")
    require_alike(gradients(op, shape, text), gradients(op, shape, text, exact=True))


# What was planted, what the emulator may call it.
MISTAKES = {
    "K of the next tile before everyone is done with this one's": (
        "      Team::barrier();  // everyone is done with K, V and the list before\n",
        "",
        {FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED},
    ),
    "a list that nobody has waited for": (
        "      if constexpr (prefetches_next) fg::copy_async_wait<0>();  // the list\n",
        "",
        {FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED},
    ),
    "the first tile by signals of the tile before": (
        "    Base::make_signals(!first);\n",
        "    if (first) Base::make_signals(false);\n",
        {FaultKind.MBARRIER, FaultKind.NOT_AWAITED, FaultKind.RACE, FaultKind.UNINITIALIZED, FaultKind.DEADLOCK},
    ),
    "signals are made over others": (
        "    Base::make_signals(!first);\n",
        "    Base::make_signals(false);\n",
        {FaultKind.MBARRIER},
    ),
    "dK and dV to the place of the next tile": (
        "if (!first) store_keys(before);",
        "if (!first) store_keys(place);",
        set[FaultKind](),
    ),
    "sums that go on": (
        "    fg::clear(Base::dk);\n    fg::clear(Base::dv);\n",
        "    if (first) fg::clear(Base::dk), fg::clear(Base::dv);\n",
        set[FaultKind](),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_turn(name: str) -> None:
    old, new, kinds = MISTAKES[name]
    text, shape = IN_TURN["partial and full tiles"]
    op = changed(f"planted_turn_{list(MISTAKES).index(name)}", f"head_dim 64  {text}", "backward", re.escape(old), new)
    if kinds:
        with pytest.raises(EmulatorError) as caught:
            gradients(op, shape, text)
        assert caught.value.kind in kinds, str(caught.value)
    else:
        with pytest.raises((AssertionError, EmulatorError)):
            require_alike(gradients(op, shape, text), gradients(op, shape, text, exact=True))


def test_a_head_without_a_tile_is_left_by_all_before_the_next_one_begins() -> None:
    text = "attention few_heads { head_dim 16  tensor bias: bool[ceildiv(Nq, 8)]  mask bias[i // 8] }"
    op = flashgen.loads(text, backend="emulator", target="sm_90a")
    q, k, v = (torch.randn(1, heads, 1, 16).bfloat16().requires_grad_() for heads in (2, 1, 1))
    op(q, k, v, bias=torch.tensor([False])).sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert not q.grad.any()
