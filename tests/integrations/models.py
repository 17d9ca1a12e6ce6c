"""Tiny models of transformers with random weights, and how two attentions of one model are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 89
# Kernels are shared: every model has heads of 16 columns.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUNDINGS = 64 * 2**-23
_LAYERS = ["sliding_attention", "full_attention"]


def _llama4() -> Any:
    return hf.Llama4TextConfig(
        **_SIZES, attention_chunk_size=8, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=40, interleave_moe_layer_step=2,
    )  # fmt: skip


CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_SIZES),
    "qwen3": lambda: hf.Qwen3Config(**_SIZES),
    "mistral": lambda: hf.MistralConfig(**_SIZES, sliding_window=6),
    "gemma2": lambda: hf.Gemma2Config(
        **_SIZES, sliding_window=6, layer_types=_LAYERS, attn_logit_softcapping=2.0, query_pre_attn_scalar=10
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_SIZES, sliding_window=6, layer_types=_LAYERS, query_pre_attn_scalar=10),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_SIZES, sliding_window=6, layer_types=_LAYERS, num_local_experts=2, num_experts_per_tok=1
    ),
    "llama4": _llama4,
    "bert": lambda: hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "t5": lambda: hf.T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=16, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0,
    ),
}  # fmt: skip
DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4")


def build(name: str, implementation: str = "flashgen") -> Any:
    """The model, ready for training."""
    torch.manual_seed(3)
    config = CONFIGS[name]()
    classes = {"bert": hf.AutoModelForMaskedLM, "t5": hf.AutoModelForSeq2SeqLM}
    model = classes.get(name, hf.AutoModelForCausalLM).from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual 0.02 makes every score nearly 0, and every mistake in one invisible.
            if parameter.dim() > 1 and name != "t5":  # whose are large from the start
                parameter.mul_(6)
            elif parameter.numel() == config.num_attention_heads:
                parameter.normal_()
    return model.train()


@dataclass
class Outcome:
    """Loss and gradients of a step."""

    loss: Tensor
    gradients: dict[str, Tensor]


def step(model: Any, implementation: str, inputs: dict[str, Any]) -> Outcome:
    """One step of a model with an attention."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return Outcome(loss.detach(), gradients)


def assert_same_step(model: Any, inputs: dict[str, Any], eager_inputs: dict[str, Any] | None = None) -> None:
    """Loss and gradients of every parameter are those of eager attention, in float32.

    A parameter's gradients may differ by 64 roundings of the largest of them: two orders of sums, in attention and, by
    what it hands on, in the layers around it (measured: up to 14). A bias is judged by its weight, if that has larger
    ones: the gradient of a bias of keys is 0 but for roundings.
    """
    ours = step(model, "flashgen", inputs)
    eager = step(model, "eager", inputs if eager_inputs is None else eager_inputs)
    assert ours.gradients.keys() == eager.gradients.keys()
    torch.testing.assert_close(ours.loss, eager.loss, rtol=ROUNDINGS, atol=0)
    for name, gradient in ours.gradients.items():
        wanted = eager.gradients[name]
        largest = max(wanted.abs().max(), eager.gradients.get(_weight_of(name), wanted).abs().max())
        off, allowed = (gradient - wanted).abs().max().item(), ROUNDINGS * largest.item()
        assert off <= allowed, f"{name}: off by {off:.1e}, where {allowed:.1e} is allowed"


def _weight_of(name: str) -> str:
    return name.removesuffix("bias") + "weight" if name.endswith(".bias") else name


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, none of them special, [batch, length]."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(batch: int, length: int, side: str) -> dict[str, Tensor]:
    """Inputs of which each row has less padding than the one before it, and the last one none.

    What the first token of a row and padding are followed by is no label: a padding token sees no key at all, and eager
    attention then spreads over all of them, those to come and other padding.
    """
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        count = 2 * (batch - 1 - row)
        where = slice(0, count) if side == "left" else slice(length - count, length)
        mask[row, where] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[torch.arange(batch), mask.argmax(-1)] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def packed(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Sequences of these lengths, one after another in one row; the first token of each is no label."""
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions == 0, -100),
        "use_cache": False,
    }
