"""The condition of a mask keeps what transformers' dense mask keeps, for every function that its factories compose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled
from flashgen.integrations.transformers.masks import LayerMask, layer_mask
from flashgen.language import parse_text
from flashgen.op.layer import Layer
from flashgen.targets.registry import GPUS

BATCH = 3
CAUSAL, BOTH_WAYS = hf.causal_mask_function, hf.bidirectional_mask_function


def ids(length: int, seed: int = 0) -> Tensor:
    """Numbers of runs, [BATCH, length]; some are -1."""
    generator = torch.Generator().manual_seed(seed)
    runs = (torch.rand(BATCH, length, generator=generator) < 0.25).cumsum(-1)
    return torch.where(runs % 3 == 1, -1, runs)


def packed(inner: Callable[..., Any], length: int) -> Callable[..., Any]:
    generator = torch.Generator().manual_seed(length)
    starts = torch.rand(BATCH, length, generator=generator) < 0.2
    starts[:, 0] = True
    places = torch.arange(length).expand(BATCH, -1)
    positions = places - torch.where(starts, places, 0).cummax(-1).values
    function: Callable[..., Any] = hf.and_masks(
        hf.packed_sequence_mask_function(starts.cumsum(-1)), hf.remap_positions_for_packed_sequence(inner, positions)
    )
    return function


# Mask functions for keys up to a position, by what they are made of.
FUNCTIONS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "causal": lambda _: CAUSAL,
    "bidirectional": lambda _: BOTH_WAYS,
    "sliding": lambda _: hf.sliding_window_causal_mask_function(4),
    "sliding both ways": lambda _: hf.sliding_window_bidirectional_mask_function(3),
    "chunked": lambda _: hf.chunked_causal_mask_function(5, torch.tensor([0, 2, 7])),
    "blocks": lambda n: hf.or_masks(CAUSAL, hf.blockwise_overlay(ids(n))),
    "blocks in a window": lambda n: hf.and_masks(
        hf.or_masks(CAUSAL, hf.blockwise_overlay(ids(n, 1))), hf.sliding_window_overlay(6)
    ),
    "two kinds of blocks": lambda n: hf.or_masks(
        hf.and_masks(CAUSAL, hf.blockwise_overlay(ids(n, 2))), hf.blockwise_overlay(ids(n, 3))
    ),
}
PACKED = ("causal", "bidirectional", "sliding", "sliding both ways", "chunked")


def kept(mask: LayerMask) -> Tensor:
    """What a mask keeps, [B, 1, Nq, Nk], by the reference of its spec."""
    batch, _, q_length, kv_length = mask.shape
    layer = Layer((1, kv_length), mask=mask.condition, declarations=mask.declarations)
    op = flashgen.loads(layer.text(), backend="reference")
    q, k = torch.zeros(batch, 1, q_length, 1), torch.zeros(batch, 1, kv_length, 1)
    v = torch.eye(kv_length).expand(batch, 1, -1, -1)
    return torch.as_tensor(op.reference(q, k, v, **mask.captured) > 0)


def assert_same(function: Callable[..., Any], sizes: dict[str, Any], padding: Tensor | None) -> None:
    found = layer_mask(BATCH, **sizes, mask_function=function, attention_mask=padding)
    assert isinstance(found, LayerMask)
    assert found.shape == (BATCH, 1, sizes["q_length"], sizes["kv_length"])
    dense = hf.sdpa_mask(BATCH, **sizes, mask_function=function, attention_mask=padding, allow_is_causal_skip=False)
    assert dense is not None
    assert torch.equal(kept(found), dense.expand(BATCH, 1, -1, -1))


@pytest.mark.parametrize("padded", [None, "left", "right", "holes", "nothing"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_length": 17, "kv_length": 17},
        {"q_length": 1, "kv_length": 18, "q_offset": 17},
        {"q_length": 4, "kv_length": 19, "q_offset": 15},  # more of a prompt
        {"q_length": 17, "kv_length": 30},  # a static cache
        {"q_length": 1, "kv_length": 30, "q_offset": torch.tensor(12)},
        {"q_length": 3, "kv_length": 8, "q_offset": 14, "kv_offset": 9},  # a sliding cache
        {"q_length": 1, "kv_length": 6, "q_offset": torch.tensor(14), "kv_offset": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_dense_mask(name: str, sizes: dict[str, Any], padded: str | None) -> None:
    seen = int(sizes.get("q_offset", 0)) + sizes["q_length"]
    padding = None
    if padded is not None:
        padding = torch.ones(BATCH, seen, dtype=torch.bool)
        padding[0, : 4 if padded == "left" else 0] = False
        padding[1, seen - (3 if padded == "right" else 0) :] = False
        if padded == "holes":
            padding[:, ::5] = False
        if padded == "nothing":
            padding[2] = False
    keys = sizes["kv_length"] + sizes.get("kv_offset", 0)
    assert_same(FUNCTIONS[name](keys), sizes, padding)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    assert_same(packed(FUNCTIONS[name](17), 17), {"q_length": 17, "kv_length": 17}, None)


@pytest.mark.parametrize("name", ["causal", "sliding"])
def test_packed_sequences_look_at_places(name: str) -> None:
    """Positions inside a document are captured only where something depends on them."""
    found = layer_mask(BATCH, 17, 17, mask_function=packed(FUNCTIONS[name](17), 17))
    assert isinstance(found, LayerMask)
    assert found.kinds >= {"documents"}
    assert "positions" not in found.kinds


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gpus_take_every_structure(name: str, target: str) -> None:
    padding = ids(17) > 0
    for offset in (0, torch.tensor(0)):
        found = layer_mask(BATCH, 17, 17, offset, mask_function=FUNCTIONS[name](17), attention_mask=padding)
        assert isinstance(found, LayerMask)
        layer = Layer((128, 128), softcap=True, sinks=True, dropout=True, mask=found.condition,
                      declarations=found.declarations)  # fmt: skip
        (spec,) = parse_text(layer.text()).specs
        parts = compiled(analyse(spec, spec.head_dims[0]), GPUS[target]).parts()
        assert all(each.source.text for each in parts)


def test_a_function_of_a_caller_is_evaluated() -> None:
    def even(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query + key) % 2 == 0

    padding = torch.ones(BATCH, 9, dtype=torch.bool)
    padding[1, :2] = False
    found = layer_mask(BATCH, 9, 9, mask_function=hf.and_masks(CAUSAL, even), attention_mask=padding, use_vmap=True)
    assert isinstance(found, Tensor)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    assert torch.equal(found, ((j <= i) & ((i + j) % 2 == 0))[None, None] & padding[:, None, None])


def test_no_padding_is_no_condition() -> None:
    found = layer_mask(BATCH, 9, 9, attention_mask=torch.ones(BATCH, 9, dtype=torch.bool))
    assert isinstance(found, LayerMask)
    assert found.condition == "j <= i + Nk - Nq"
    assert not found.captured
    with pytest.raises(ValueError, match=r"'attention_mask' has shape \[3, 9, 9\]"):
        layer_mask(BATCH, 9, 9, attention_mask=torch.ones(BATCH, 9, 9))


def test_a_mask_keeps_the_offset_that_it_was_made_for() -> None:
    offset = torch.tensor(5)
    found = layer_mask(BATCH, 1, 12, offset, attention_mask=None)
    offset.add_(1)
    assert isinstance(found, LayerMask)
    assert found.captured["offset"] == 5


def test_the_matrix_is_there_for_attention_of_a_models_own() -> None:
    offset = torch.tensor(5)
    padding = torch.arange(12) < torch.tensor([[12], [4], [2]])
    found = layer_mask(BATCH, 1, 12, offset, attention_mask=padding)
    offset.add_(1)
    assert isinstance(found, LayerMask)
    kept = (torch.arange(12) <= 5) & padding[:, None, None]
    assert torch.equal(found.dense(), kept)
    assert torch.equal(found.to("cpu").repeat(1, 4, 1, 1), kept.expand(BATCH, 4, 1, 12))
    scores = torch.randn(BATCH, 4, 1, 12, generator=torch.Generator().manual_seed(0))
    for total in (scores + found, found + scores):
        assert torch.equal(total[kept.expand_as(scores)], scores[kept.expand_as(scores)])
        assert total[~kept.expand_as(scores)].max() < -1e38


def test_a_mask_goes_where_it_is_sent() -> None:
    found = layer_mask(BATCH, 9, 9, attention_mask=ids(9) > 0)
    assert isinstance(found, LayerMask)
    moved = found.to("meta")
    assert moved.device == torch.device("meta")
    assert (moved.shape, moved.condition, moved.ndim) == (found.shape, found.condition, 4)
    assert moved.contiguous() is moved
