"""Models that do not go through transformers' attention interface say so; parts with attention of their own run."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import transformers as hf

import flashgen.integrations.transformers as fgt
from tests.integrations.models import VOCABULARY, build, tokens

fgt.register()

_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
# Each has attention in code of its own, and what transformers has for it instead.
APART: dict[str, tuple[Any, dict[str, Any], str]] = {
    "Falcon": (hf.FalconConfig, _BERT, "'eager' or 'sdpa'"),
    "Bloom": (hf.BloomConfig, {"hidden_size": 32, "n_layer": 1, "n_head": 4}, "'eager'"),
    "GPTJ": (hf.GPTJConfig, {**_GPT, "rotary_dim": 4}, "'eager'"),
    "CodeGen": (hf.CodeGenConfig, {**_GPT, "rotary_dim": 4}, "'eager'"),
    "Mpt": (hf.MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 1}, "'eager'"),
    "OpenAIGPT": (hf.OpenAIGPTConfig, _GPT, "'eager'"),
    "Longformer": (hf.LongformerConfig, {**_BERT, "intermediate_size": 32, "attention_window": 4}, "'eager'"),
    "DebertaV2": (hf.DebertaV2Config, {**_BERT, "intermediate_size": 32}, "'eager'"),
}


def apart(name: str) -> Any:
    kind, sizes, _ = APART[name]
    return kind(vocab_size=VOCABULARY, **sizes)


@pytest.mark.parametrize("name", APART)
def test_where_a_model_is_made_or_told(name: str) -> None:
    words = rf"{name}Model does not go through .* Use attn_implementation={APART[name][2]}"
    with pytest.raises(ValueError, match=words):
        hf.AutoModel.from_config(apart(name), attn_implementation="flashgen")
    model = hf.AutoModel.from_config(apart(name), attn_implementation="eager")
    with pytest.raises(ValueError, match=words):
        model.set_attn_implementation("flashgen")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")


def test_where_a_model_is_loaded(tmp_path: Any) -> None:
    hf.BloomForCausalLM(apart("Bloom")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BloomForCausalLM does not go through"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashgen")
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "eager"


class OwnBloom(hf.BloomModel):  # type: ignore[misc]
    """In a file without attention."""


def test_classes_of_users_are_judged_by_what_they_are_made_of() -> None:
    with pytest.raises(ValueError, match="OwnBloom does not go through"):
        OwnBloom._from_config(apart("Bloom"), attn_implementation="flashgen")
    # In a notebook there is no source to read.
    own = types.new_class("OwnLlama", (hf.LlamaModel,), exec_body=lambda names: names.update(__module__="notebook"))
    model: Any = own(build("llama").config)
    assert model.config._attn_implementation == "flashgen"


def test_parts_of_a_model() -> None:
    vision = hf.CLIPVisionConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=16
    )
    config = hf.LlavaConfig(text_config=apart("Bloom"), vision_config=vision, image_token_index=88)
    with pytest.raises(ValueError, match=r"BloomModel does not .* a dict says what each part takes"):
        hf.LlavaModel._from_config(copy.deepcopy(config), attn_implementation="flashgen")
    each = {"": "eager", "text_config": "eager", "vision_config": "flashgen"}
    model: Any = hf.LlavaModel._from_config(copy.deepcopy(config), attn_implementation=each)
    assert model.vision_tower.config._attn_implementation == "flashgen"
    model.set_attn_implementation("eager")
    for wrong in ("flashgen", {"text_config": "flashgen"}):
        with pytest.raises(ValueError, match="BloomModel does not go through"):
            model.set_attn_implementation(wrong)
        assert model.vision_tower.config._attn_implementation == "eager"
    model.set_attn_implementation(each)
    assert model.vision_tower.config._attn_implementation == "flashgen"


# -- parts with attention of their own ---------------------------------------------------------------------------------


def grown(model: Any) -> Any:
    """With weights that make scores matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval()


@torch.no_grad()
def test_layers_that_add_masks_to_their_scores() -> None:
    """GIT's text goes another way than its images, by a table of classes that does not have the name."""
    vision = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    config = hf.GitConfig(vision_config=vision, vocab_size=VOCABULARY, intermediate_size=32, **_BERT)
    inputs = {
        "input_ids": tokens(2, 12), "attention_mask": (torch.arange(12) < torch.tensor([[8], [12]])).long(),
        "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
    }  # fmt: skip
    model = grown(hf.GitForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager"))
    wanted = model(**inputs).logits
    with pytest.warns(UserWarning, match=r"GitForCausalLM: 'flashgen' does not reach its layers of GitSelfAttention"):
        model.set_attn_implementation("flashgen")
    torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-4, atol=1e-5)
    made: Any = hf.GitForCausalLM._from_config(copy.deepcopy(config), attn_implementation="flashgen")
    made.eval().load_state_dict(model.state_dict())
    torch.testing.assert_close(made(**inputs).logits, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_that_repeat_masks() -> None:
    """Siglip 2 pools by PyTorch's own attention, which wants a mask for each head."""
    config = hf.Siglip2VisionConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_patches=16, patch_size=2
    )
    model = grown(hf.Siglip2VisionModel._from_config(config, attn_implementation="eager"))
    inputs = {
        "pixel_values": torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0)),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[12], [16]])).long(),
        "spatial_shapes": torch.tensor([[3, 4], [4, 4]]),
    }
    eager = model(**inputs).pooler_output
    exact = copy.deepcopy(model).double()(**inputs | {"pixel_values": inputs["pixel_values"].double()}).pooler_output
    model.set_attn_implementation("flashgen")
    assert (model(**inputs).pooler_output - exact).norm() <= 2 * (eager - exact).norm()  # of numbers up to 100


@torch.no_grad()
def test_rows_that_see_no_key_are_those_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole as long as a window: eager attention averages over all keys there."""
    part: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4, "pad_token_id": 0,
        "attn_logit_softcapping": None, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    config = hf.T5GemmaConfig(
        encoder=hf.T5GemmaModuleConfig(**part), decoder=hf.T5GemmaModuleConfig(**part), vocab_size=VOCABULARY
    )
    model: Any = grown(hf.T5GemmaForConditionalGeneration._from_config(config, attn_implementation="eager"))
    for each in model.modules():  # which is so for its soft cap, of which there is none here
        if isinstance(each, hf.PreTrainedModel):
            monkeypatch.setattr(type(each), "_supports_sdpa", True)
    kept = torch.ones(2, 9, dtype=torch.long)
    kept[0, 1:6] = 0
    found = {}
    for name in ("eager", "sdpa", "flashgen"):
        model.set_attn_implementation(name)
        found[name] = model(tokens(2, 12), decoder_input_ids=tokens(2, 9), decoder_attention_mask=kept).logits
    torch.testing.assert_close(found["flashgen"], found["sdpa"], rtol=1e-4, atol=1e-4)
    off = (found["flashgen"] - found["eager"]).abs().amax(-1) > 1e-2
    assert off.nonzero().tolist() == [[0, 4], [0, 5]]


def test_an_older_version_is_named() -> None:
    code = (
        "from transformers import masking_utils; del masking_utils.remap_positions_for_packed_sequence; "
        "import flashgen.integrations.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: flashgen.integrations.transformers needs transformers 5.23"
    )
