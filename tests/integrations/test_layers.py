"""What a layer hands to the attention function arrives in the kernel, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import flashgen.integrations.transformers as fgt
from flashgen.integrations.transformers import calls
from flashgen.integrations.transformers.calls import attention_forward
from flashgen.integrations.transformers.masks import LayerMask, layer_mask
from flashgen.op import layer as layers
from tests.integrations.models import VOCABULARY, assert_same_step, build, packed, padded, step, tokens
from tests.slices import one_of

fgt.register()


def heads(length: int = 24, batch: int = 2, count: int = 4) -> Tensor:
    return torch.randn(batch, count, length, 16, generator=torch.Generator().manual_seed(length + count))


def test_sequences_are_packed_by_their_ends() -> None:
    model = build("llama")
    inputs = packed((5, 11, 3))
    ends = torch.tensor([0, 5, 16, 19], dtype=torch.int32)
    # With a mask of ones transformers does not look at the positions, so that the ends alone say it.
    ours = {
        **inputs, "attention_mask": torch.ones(1, 19), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone(),
        "max_length_q": 11, "max_length_k": 11,
    }  # fmt: skip
    assert_same_step(model, ours, eager_inputs=inputs)
    assert_same_step(model, {**ours, "attention_mask": None}, eager_inputs=inputs)


def test_ends_that_differ_or_do_not_fit_are_refused() -> None:
    model = build("llama")
    inputs = {**packed((5, 11, 3)), "attention_mask": torch.ones(1, 19)}
    ends = torch.tensor([0, 5, 16, 19])
    with pytest.raises(ValueError, match="'cu_seq_lens_q' and 'cu_seq_lens_k' are given both"):
        model(**inputs, cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match="say different lengths"):
        model(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=torch.tensor([0, 19]))
    with pytest.raises(RuntimeError, match="say different lengths"):
        model(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=torch.tensor([0, 6, 16, 19]))
    q = heads(19, 1)
    with pytest.raises(ValueError, match="say different lengths"):
        attention_forward(
            nn.Module(), q, q, q, None, is_causal=True, cu_seq_lens_q=ends, cu_seq_lens_k=torch.tensor([0, 19])
        )
    with pytest.raises(ValueError, match="chunks begin where a sequence does"):
        build("llama4")(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    with pytest.raises(ValueError, match="there are 2"):
        model(tokens(2, 19), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_ends_of_keys_may_differ_without_an_order() -> None:
    q, k, v = heads(10, 1), heads(14, 1, 2), heads(14, 1, 2)
    q_ends, k_ends = torch.tensor([0, 4, 10]), torch.tensor([0, 9, 14])
    o, _ = attention_forward(nn.Module(), q, k, v, None, is_causal=False, cu_seq_lens_q=q_ends, cu_seq_lens_k=k_ends)
    kept = torch.zeros(10, 14, dtype=torch.bool)
    kept[:4, :9] = kept[4:, 9:] = True
    torch.testing.assert_close(o, eager(q, k, v, kept[None, None]), rtol=1e-5, atol=1e-5)


def eager(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> Tensor:
    """Attention by PyTorch, in transformers' layout."""
    o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)
    return o.transpose(1, 2)


def test_sinks_and_position_biases_are_trained() -> None:
    for name, part in (("gpt_oss", "sinks"), ("t5", "relative_attention_bias")):
        model = build(name)
        inputs: dict[str, Any] = padded(2, 15, "right")
        gradients = step(model, "flashgen", inputs).gradients
        learned = [x for key, x in gradients.items() if part in key]
        assert learned
        assert all(x.abs().max() > 1e-4 for x in learned)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "t5"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = build(name)
    inputs: dict[str, Any] = {**padded(2, 15, "right"), "use_cache": False}
    plain = step(model, "flashgen", inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again = step(model, "flashgen", inputs)
    assert torch.equal(plain.loss, again.loss)
    for key, x in plain.gradients.items():
        torch.testing.assert_close(again.gradients[key], x, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_with_dropout_draws_the_same_again() -> None:
    model = build("llama")
    model.config.attention_dropout = 0.3
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.3
    inputs: dict[str, Any] = {**padded(2, 15, "right"), "use_cache": False}
    torch.manual_seed(1)
    plain = step(model, "flashgen", inputs)
    model.activation_checkpointing_enable()
    torch.manual_seed(1)
    again = step(model, "flashgen", inputs)
    assert torch.equal(plain.loss, again.loss)
    for key, x in plain.gradients.items():
        torch.testing.assert_close(again.gradients[key], x, rtol=1e-5, atol=1e-6)


def test_dropout_while_training_and_only_then() -> None:
    q, k = heads(64), heads(64, count=2)
    v = torch.eye(64).expand(2, 2, 64, 64)  # o is the matrix of weights
    module = nn.Module()
    kept, _ = attention_forward(module.eval(), q, k, v, None, dropout=0.4)
    dropped, weights = attention_forward(module.train(), q, k, v, None, dropout=0.4)
    assert weights is None
    torch.testing.assert_close(kept, eager(q, k, v, None), rtol=1e-5, atol=1e-6)
    survived = dropped != 0
    torch.testing.assert_close(dropped[survived], kept[survived] / (1 - 13107 / 2**15), rtol=1e-5, atol=1e-7)
    # 32768 draws: four standard deviations are 0.011.
    assert abs(survived.float().mean().item() - 0.6) < 0.011


def test_dropout_is_that_of_the_op() -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    torch.manual_seed(11)
    o, _ = attention_forward(nn.Module(), q, k, v, None, dropout=0.4)
    torch.manual_seed(11)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    wanted = layers.Layer((16, 16), dropout=True).op().reference(q, k, v, dropout_p=0.4, seed=seed)
    torch.testing.assert_close(o.double(), wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


# -- masks of callers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "shape"), one_of(2, product(["bool", "float", "minus infinity"], [(2, 1), (1, 1), (1, 4)])), ids=str
)
def test_masks_that_are_tensors(form: str, shape: tuple[int, int]) -> None:
    model = build("gemma2")
    kept = torch.rand(*shape, 15, 15, generator=torch.Generator().manual_seed(1)) < 0.6
    kept |= torch.eye(15, dtype=torch.bool)
    added = torch.where(kept, 0.0, torch.finfo(torch.float32).min if form == "float" else -torch.inf)
    inputs: dict[str, Any] = {"input_ids": tokens(2, 15), "labels": tokens(2, 15)}
    ours = kept if form == "bool" else added
    both = [{**inputs, "attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), mask)}
            for mask in (ours, added)]  # fmt: skip
    assert_same_step(model, *both)


def test_masks_of_callers_that_do_not_fit_are_refused() -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    for mask, error, words in (
        (torch.ones(2, 24), ValueError, r"'attention_mask' has shape \[2, 24\]; expected what broadcasts"),
        (torch.ones(2, 1, 24, 25), ValueError, r"= \[2, 4, 24, 24\]"),
        (torch.ones(2, 1, 24, 24, dtype=torch.int64), TypeError, "'attention_mask' is torch.int64"),
    ):
        with pytest.raises(error, match=words):
            attention_forward(nn.Module(), q, k, v, mask)
    with pytest.raises(TypeError, match=r"'attention_mask' must be a tensor \[B, H, Nq, Nk\], not dict"):
        attention_forward(nn.Module(), q, k, v, {})  # type: ignore[arg-type]


# -- image masks -------------------------------------------------------------------------------------------------------


def gemma3_with_images() -> Any:
    """Gemma 3 with its language and vision parts, tiny."""
    torch.manual_seed(0)
    text = build("gemma3").config
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=88)
    model = hf.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="flashgen").train()
    for parameter in model.model.multi_modal_projector.parameters():
        nn.init.normal_(parameter, std=0.1)  # 0 at first
    return model


def test_images_are_seen_in_both_directions() -> None:
    model = gemma3_with_images()
    ids = tokens(2, 21).clamp(max=80)
    images = torch.zeros_like(ids)
    images[0, 3:7] = images[0, 10:14] = images[1, 8:12] = 1
    ids[images == 1] = 88
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill((mask == 0) | (images == 1), -100)
    labels[1, 3] = -100
    inputs = {
        "input_ids": ids, "token_type_ids": images, "pixel_values": pixels, "attention_mask": mask, "labels": labels
    }  # fmt: skip
    assert_same_step(model, inputs)
    found = []
    for implementation in ("eager", "flashgen"):
        model.set_attn_implementation(implementation)
        del_labels = {name: x for name, x in inputs.items() if name != "labels"}
        found.append(model.eval().generate(**del_labels, max_new_tokens=8, min_new_tokens=8, do_sample=False))
    assert torch.equal(*found)


# -- one kernel for a structure, none of size N x N --------------------------------------------------------------------


def test_numbers_are_no_part_of_a_kernel() -> None:
    def texts(window: int, scalar: float, cap: float, length: int) -> set[str]:
        config = build("gemma2").config
        config.sliding_window, config.query_pre_attn_scalar, config.attn_logit_softcapping = window, scalar, cap
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="flashgen")
        before = set(layers._NAMES)
        model(tokens(2, length)).logits.sum().backward()
        return set(layers._NAMES) - before

    texts(6, 13, 2.0, 15)
    assert not texts(9, 11, 3.0, 33)


def test_models_make_conditions_and_no_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(arguments[4])
        return attention_forward(*arguments, **options)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "flashgen", watched)
    for name in ("llama", "gemma3", "llama4", "gpt_oss"):
        build(name)(**padded(2, 15, "left"))
        build(name)(**packed((4, 9)))
    assert len(seen) == 16
    assert all(isinstance(mask, LayerMask) for mask in seen)
    for mask in seen:
        for value in mask.captured.values():
            assert not isinstance(value, Tensor) or value.numel() <= 2 * 15


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"output_attentions": True}, "'output_attentions' is not supported by flashgen's attention: the weights"),
        ({"cache": object()}, "'cache' is not supported by flashgen's attention: continuous batching"),
        ({"block_indices": torch.zeros(1)}, "'block_indices' is not supported"),
        ({"indices": torch.zeros(1)}, "'indices' is not supported by flashgen's attention: selected keys"),
        ({"block_table": torch.zeros(1)}, "'block_table' is not supported"),
        ({"sinks": torch.zeros(1)}, "'sinks' is not supported .*s_aux are sinks"),
        ({"use_top_left_mask": True}, "'use_top_left_mask' is not supported"),
        ({"layer_head_mask": torch.ones(4)}, "'layer_head_mask' is not supported"),
        ({"head_mask": torch.ones(4)}, "'head_mask' is not supported"),
        ({"seq_idx": torch.zeros(1, 19)}, "'seq_idx' is not supported"),
    ],
)
def test_keywords_that_are_not_honoured_are_refused(others: dict[str, Any], words: str) -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    with pytest.raises(TypeError, match=words):
        attention_forward(nn.Module(), q, k, v, None, **others)


def test_keywords_that_say_nothing_of_attention_pass() -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    o, _ = attention_forward(
        nn.Module(), q, k, v, None, position_ids=torch.arange(24)[None], num_items_in_batch=3, output_attentions=False,
        head_mask=None, max_length_q=24,
    )  # fmt: skip
    torch.testing.assert_close(o, eager(q, k, v, None), rtol=1e-5, atol=1e-5)
    assert o.is_contiguous()


def test_keywords_that_eager_attention_does_not_read_pass() -> None:
    """Models hand down what their callers gave: PaliGemma labels, trainers what belongs to the loss."""
    model, ids = build("llama").eval(), tokens(1, 9)
    wanted = model(ids).logits
    for name, value in (
        ("labels", ids), ("shift_labels", ids), ("num_logits_to_keep", 1), ("token_type_ids", ids * 0),
        ("mm_token_type_ids", ids * 0), ("skip_logits", True), ("num_items_in_batch", torch.tensor(3)),
        ("output_hidden_states", True), ("cu_seqlens", None), ("whatever_comes_next", object()),
    ):  # fmt: skip
        hidden = model.model(ids, **{name: value}).last_hidden_state
        assert torch.equal(model.lm_head(hidden), wanted), name


def test_a_padding_mask_that_does_not_fit_is_named() -> None:
    model, ids = build("llama"), tokens(2, 9)
    for mask in (torch.ones(3, 9), torch.ones(1, 9).tril(-3), torch.ones(2, 9, 9)):
        with pytest.raises(ValueError, match=r"'attention_mask' has shape \[.*\]; \[B, Nk\] = \[2, 9\] is expected"):
            model(ids, attention_mask=mask)


def test_rows_of_8_bits_are_named() -> None:
    q, k = heads().bfloat16(), heads(count=2).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"'key' is torch\.float8_e4m3fn, but 'query' is torch\.bfloat16"):
        attention_forward(nn.Module(), q, k, k, None)


def test_packing_is_looked_at_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def documents(ends: Tensor, length: int) -> Tensor:
        counted.append(length)
        return original(ends, length)

    original = calls._documents
    monkeypatch.setattr(calls, "_documents", documents)
    model, ids = build("llama"), tokens(1, 19)
    ends = torch.tensor([0, 5, 16, 19])
    first = model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    assert counted == [19, 19]
    ends[1] = 7
    second = model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    assert counted == [19] * 4
    assert not torch.equal(first, second)
    assert torch.equal(second, model(ids, cu_seq_lens_q=ends.clone(), cu_seq_lens_k=ends.clone()).logits)
    with torch.inference_mode():
        changing = ends.clone()
        assert torch.equal(model(ids, cu_seq_lens_q=changing, cu_seq_lens_k=changing).logits, second)
        changing[1] = 5
        assert torch.equal(model(ids, cu_seq_lens_q=changing, cu_seq_lens_k=changing).logits, first)


def test_attentions_are_refused_where_a_model_is_asked_for_them() -> None:
    with pytest.raises(TypeError, match="'output_attentions'"):
        build("llama")(tokens(1, 9), output_attentions=True)


def test_a_model_is_told_the_direction() -> None:
    inputs: dict[str, Any] = {**padded(2, 15, "right"), "is_causal": False}
    assert_same_step(build("llama"), inputs)
    model = build("llama")
    model.config.is_causal = False
    assert torch.equal(step(model, "flashgen", inputs).loss, step(build("llama"), "flashgen", inputs).loss)


def test_without_a_mask_the_module_says_the_direction() -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(
        attention_forward(module, q, k, v, None)[0], eager(q, k, v, causal), rtol=1e-5, atol=1e-5
    )
    near = causal & torch.ones(24, 24, dtype=torch.bool).triu(-4)
    o, _ = attention_forward(module, q, k, v, None, sliding_window=5)
    torch.testing.assert_close(o, eager(q, k, v, near), rtol=1e-5, atol=1e-5)
    last = attention_forward(module, q[:, :, -1:], k, v, None)[0]
    torch.testing.assert_close(last, eager(q[:, :, -1:], k, v, None), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="does not say where the queries stand"):
        attention_forward(module, q[:, :, :7], k, v, None)


def test_masks_for_other_lengths_are_refused() -> None:
    q, k, v = heads(), heads(count=2), heads(count=2)
    mask = layer_mask(2, 24, 25)
    with pytest.raises(
        ValueError, match=r"'attention_mask' is for \[2, 1, 24, 25\], but there are 24 queries, 24 keys"
    ):
        attention_forward(nn.Module(), q, k, v, mask)
    with pytest.raises(TypeError, match="cannot be indexed"):
        mask[:, :, :, :24]
    with pytest.raises(AttributeError, match="has no 'expand'"):
        mask.expand(2, 4, 24, 25)
    matrix: Any = mask
    changes: list[Callable[[], Any]] = [
        lambda: q - matrix,
        lambda: 1 + matrix,
        lambda: matrix & q,
        lambda: ~matrix,
        lambda: matrix < 0,
    ]
    for change in changes:
        with pytest.raises(TypeError, match=r"has no arithmetic: .* takes attn_implementation='sdpa'"):
            change()


def test_models_that_change_their_masks_are_refused() -> None:
    """Doge merges a mask into its own unless it is a BlockMask: tokens saw later ones."""
    config = hf.DogeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="flashgen")
    with pytest.raises(AttributeError, match=r"has no 'dtype': .* takes attn_implementation='sdpa'"):
        model(tokens(1, 9))


def test_masks_that_are_made_before_are_handed_through() -> None:
    model = build("mistral")
    ids = tokens(2, 9)
    mask = hf.masking_utils.create_sliding_window_causal_mask(model.config, model.model.embed_tokens(ids), None, None)
    assert isinstance(mask, LayerMask)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, model(ids).logits)


# -- names -------------------------------------------------------------------------------------------------------------


def test_other_names_mean_the_same() -> None:
    fgt.register("fgen")
    fgt.register("fgen")
    model = build("llama")
    inputs: dict[str, Any] = padded(2, 15, "right")
    model.set_attn_implementation("fgen")
    loss = model(**inputs).loss
    assert torch.equal(loss, step(model, "flashgen", inputs).loss)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "my/kernel", "", "paged|flashgen"])
def test_names_of_transformers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be registered"):
        fgt.register(name)


def test_names_of_others_are_refused() -> None:
    hf.AttentionInterface.register("somebody", lambda *_: None)
    with pytest.raises(ValueError, match="'somebody' is registered already"):
        fgt.register("somebody")


def test_the_name_is_no_flash_attention_and_others_still_are() -> None:
    from transformers.utils.generic import is_flash_attention_requested

    config = hf.LlamaConfig()
    config._attn_implementation = "flashgen"
    assert not is_flash_attention_requested(config)
    assert not is_flash_attention_requested(requested_attention_implementation="flashgen")
    assert is_flash_attention_requested(requested_attention_implementation="flash_attention_2", version=2)
    with pytest.raises((ImportError, ValueError)):
        hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(vocab_size=8), attn_implementation="flash_attention_2")


# -- graphs and half precision -----------------------------------------------------------------------------------------


# Where a graph ends torch looks at gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("name", "whole"), [("llama", True), ("t5", True), ("bert", True), ("mistral", False)])
def test_compiled_models(name: str, whole: bool) -> None:
    model = build(name)
    inputs: dict[str, Any] = padded(2, 15, "left")
    plain = step(model, "flashgen", inputs)
    torch._dynamo.reset()
    model.zero_grad()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=whole)
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, plain.loss, rtol=1e-5, atol=1e-6)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain.gradients[key], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_compiled_decoding_with_a_static_cache() -> None:
    """As generate does on GPUs: masks are made before the compiled call, which meets another offset each time."""
    model = build("mistral").eval()
    ids = tokens(2, 12)
    torch._dynamo.reset()
    found = []
    for implementation, compiles in (("eager", False), ("flashgen", True)):
        model.set_attn_implementation(implementation)
        cache = hf.StaticCache(config=model.config, max_cache_len=32)
        compiled: Any = torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compiles else model.forward
        logits = model(ids, past_key_values=cache).logits[:, -1:]
        rows = [logits]
        for _ in range(6):
            token = logits.argmax(-1)
            inputs = model.prepare_inputs_for_generation(
                torch.cat([ids, token], 1), past_key_values=cache, next_sequence_length=1
            )
            logits = compiled(**inputs).logits[:, -1:]
            rows.append(logits)
        found.append(torch.cat(rows, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_autocast() -> None:
    model = build("qwen3")
    inputs: dict[str, Any] = padded(2, 15, "right")
    losses = []
    for implementation in ("eager", "flashgen"):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(step(model, implementation, inputs).loss)
    # bfloat16 has 8 bits; the loss is a mean over some 25 tokens.
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-7, atol=0)
    assert VOCABULARY > 80
