"""What transformers' model tests ask of an attention, asked of flashgen's: hidden states are those of eager attention,
with padding on either side or none, in float32 and bfloat16. ``tests/integrations`` trains some of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import flashgen.integrations.transformers as fgt
from tests.slices import one_of

fgt.register()

LAYERS, HEADS, VOCABULARY = 2, 4, 89
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOTH_SIDES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
OF_IMAGES = ("vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model")
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("qwen2", "mixtral", "phi", "phi3", "olmo", "olmo2", "starcoder2", "granite", "glm", "glm4", "cohere"),
            *("cohere2", "stablelm", "gemma", "nemotron", "persimmon", "helium", "smollm3", "gpt2", "gpt_neox", "opt"),
            *("exaone4", "ernie4_5", "seed_oss", "hunyuan_v1_dense", "arcee", "lfm2"),
            *("roberta", "distilbert", "electra", "albert", "xlm-roberta"),
        ),
        DECODER,
    ),
    **dict.fromkeys(("bart", "mbart"), BOTH_SIDES),
    **{name: {**DECODER, "image_size": 48, "patch_size": 16} for name in OF_IMAGES},
}
CASES = [(name, dtype) for name in SIZES for dtype in (torch.float32, torch.bfloat16)]


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    model = hf.AutoModel.from_config(hf.AutoConfig.for_model(name, **SIZES[name]), attn_implementation="eager").eval()
    with torch.no_grad():  # the usual 0.02 makes every score nearly 0, and every mistake in one invisible
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def inputs_of(name: str, model: Any, side: str | None) -> tuple[dict[str, Tensor], Tensor | None]:
    """What a model is given, and which tokens are no padding."""
    generator = torch.Generator().manual_seed(5)
    if name in OF_IMAGES:
        size = model.config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}, None
    ids = torch.randint(3, VOCABULARY, (2, 21), generator=generator)
    if side is None:
        return {"input_ids": ids}, None
    mask = torch.ones_like(ids)
    mask[0, slice(15, None) if side == "right" else slice(0, 6)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}, mask.bool()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dtype"), one_of(9, CASES))
def test_hidden_states_are_those_of_eager_attention(name: str, dtype: torch.dtype) -> None:
    """In float32 to its roundings; in bfloat16 no further from these than twice what eager attention is."""
    model = model_of(name)
    for side in (None, "left", "right"):
        given, kept = inputs_of(name, model, side)

        def states(
            implementation: str, of: torch.dtype, given: dict[str, Tensor] = given, kept: Tensor | None = kept
        ) -> Tensor:
            model.to(of).set_attn_implementation(implementation)
            assert model.config._attn_implementation == implementation
            with torch.no_grad():
                found = model(**{key: x.to(of) if x.is_floating_point() else x for key, x in given.items()})
            rows: Tensor = found.last_hidden_state.float()
            return rows if kept is None else rows[kept]

        exact = states("eager", torch.float32)
        roundings = 1e-5 * float(exact.abs().max())
        if dtype is not torch.float32:
            model.to(dtype).float()  # weights that both types hold
            exact = states("eager", torch.float32)
            off = float((states("eager", dtype) - exact).abs().max())
            roundings = 2 * off + torch.finfo(dtype).eps * float(exact.abs().max())
        assert float((states("flashgen", dtype) - exact).abs().max()) <= roundings, side
        model.float()
