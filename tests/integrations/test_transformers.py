"""Models of transformers compute with flashgen what they compute with their own eager attention."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashgen.integrations.transformers as fgt
from tests.integrations.models import CONFIGS, DECODERS, assert_same_step, build, packed, padded, tokens

fgt.register()

# One of each in a process: a step leaves nothing behind in a model but gradients, which the next one clears.
built = functools.cache(build)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_with_padding(name: str, side: str) -> None:
    inputs: dict[str, Any] = padded(3, 21, side)
    if name == "t5":
        inputs["labels"] = tokens(3, 9, seed=4)
    assert_same_step(built(name), inputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_without_padding(name: str) -> None:
    inputs: dict[str, Any] = padded(3, 21, "right")
    assert_same_step(built(name), {**inputs, "attention_mask": None})


@pytest.mark.parametrize("lengths", [(5, 11, 3), (19,)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_training_on_packed_sequences(name: str, lengths: tuple[int, ...]) -> None:
    assert_same_step(built(name), packed(lengths))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_greedy_tokens(name: str, side: str, cache: str) -> None:
    model = built(name)
    inputs: dict[str, Any] = padded(3, 13, side)
    del inputs["labels"]
    found = []
    for implementation in ("eager", "flashgen"):
        model.set_attn_implementation(implementation)
        found.append(
            model.eval().generate(
                **inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False, cache_implementation=cache,
                pad_token_id=0,
            )
        )  # fmt: skip
    model.train()
    assert found[0].shape[1] == (13 if name == "t5" else 25)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["gemma2", "llama4"])
def test_prompts_that_come_in_parts(name: str) -> None:
    """A cache goes on with more than one token, beyond windows and chunks."""
    model = built(name).eval()
    ids = tokens(2, 23)
    found = []
    for implementation in ("eager", "flashgen"):
        model.set_attn_implementation(implementation)
        cache, rows = None, []
        with torch.no_grad():
            for part in (ids[:, :11], ids[:, 11:18], ids[:, 18:]):
                outcome = model(part, past_key_values=cache, use_cache=True)
                cache = outcome.past_key_values
                rows.append(outcome.logits)
        found.append(torch.cat(rows, 1))
    model.train()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_model_is_saved_and_loaded_with_its_attention(tmp_path: Any) -> None:
    model = built("llama")
    model.set_attn_implementation("flashgen")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="flashgen")
    inputs: dict[str, Any] = padded(2, 9, "right")
    assert again.config._attn_implementation == "flashgen"
    assert torch.equal(model(**inputs).loss, again(**inputs).loss)
