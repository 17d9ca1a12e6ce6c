"""What the examples share: PyTorch's way to compute a spec is the spec, and what a mask leaks is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashgen
from examples.small_gpt import InPyTorch, Refused, attentions_of, device_named, first_leak, spec_of
from flashgen.nn import Attention
from flashgen.op.loading import load_spec

LENGTH, HEADS, HEAD_DIM = 24, 2, 16


def outputs_and_gradients(module: Attention) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, HEADS, LENGTH, HEAD_DIM)
    q, k, v, d_o = (0.3 * torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = module(q, k, v)
    return [o, *torch.autograd.grad(o, [*leaves, *module.parameters()], d_o)]


@pytest.mark.parametrize(
    ("name", "const", "way"),
    [
        ("causal", None, "SDPA"),
        ("plain", None, "SDPA"),
        ("sliding_window", {"size": 5}, "SDPA with a mask of N × N"),
        ("alibi", None, "SDPA with a bias of N × N"),
        ("t5", None, "SDPA with a bias of N × N"),
        ("kerple", None, "SDPA with a bias of N × N"),
        ("cosine", None, "SDPA"),
        ("gpt_oss", None, "the dense formula"),
        ("hstu", None, "the dense formula"),
    ],
)
def test_pytorch_computes_the_spec(name: str, const: dict[str, int] | None, way: str) -> None:
    causal = name == "cosine"
    op = load_spec(spec_of(name, HEADS, HEAD_DIM, LENGTH, const=const, causal=causal), "reference")
    torch.manual_seed(0)
    (own,) = attentions_of(Attention, op, 1, HEADS, LENGTH)
    found = [attentions_of(InPyTorch, op, 1, HEADS, LENGTH)[0]]
    assert found[0].way == way
    if way.startswith("SDPA"):
        found.append(InPyTorch(op, standard=True, heads=HEADS, sizes={"Nq": LENGTH, "Nk": LENGTH}))
        assert found[1].way == "standard attention"
    for each in found:
        each.load_state_dict(own.state_dict())
        for mine, theirs in zip(outputs_and_gradients(own), outputs_and_gradients(each), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_mask_is_made_again_for_another_length() -> None:
    op = load_spec(spec_of("sliding_window", HEADS, HEAD_DIM, 12, const={"size": 3}), "reference")
    module = InPyTorch(op, heads=HEADS)
    for length in (8, 12, 8):
        q = torch.randn(1, HEADS, length, HEAD_DIM)
        torch.testing.assert_close(module(q, q, q), op(q, q, q))


def test_nothing_is_dropped_beside_a_model_in_eval() -> None:
    text = f"attention dropping {{ head_dim {HEAD_DIM} mask causal dropout 0.5 }}"
    op = flashgen.loads(text, backend="reference")
    module = InPyTorch(op, heads=HEADS)
    q = torch.randn(1, HEADS, LENGTH, HEAD_DIM)
    assert not torch.equal(module(q, q, q), module(q, q, q))
    module.eval()
    assert torch.equal(module(q, q, q), module(q, q, q))


@pytest.mark.parametrize(
    ("mask", "leak"),
    [
        ("causal", None),
        ("causal and hash(b, h, i, j) % 2 == 0", None),
        ("true", (0, 1)),
        ("j < i + 4 if i > 10 else causal", (11, 12)),
        ("causal or (b == 1 and h == 1 and j == i + 2)", (0, 2)),
        ("j < max(i, 1)", None),
    ],
)
def test_a_mask_that_shows_a_query_what_follows_is_found(mask: str, leak: tuple[int, int] | None) -> None:
    spec = flashgen.loads(f"attention leaky {{ head_dim 16 mask {mask} }}", backend="reference").spec
    assert first_leak(spec, 2, 2, LENGTH) == leak


def test_masks_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.small_gpt._PAIRS_AT_ONCE", 5 * LENGTH)
    spec = flashgen.loads("attention leaky { head_dim 16 mask j <= i + i // 20 }", backend="reference").spec
    assert first_leak(spec, 1, 1, LENGTH) == (20, 21)


@pytest.mark.parametrize("name", ["tpu", "cuda:77", "meta", "?"])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(Refused, match=f"--device {name}".replace("?", "[?]")):
        device_named(name)
