"""What cannot be traced is named with the user's own file and line, and with what to write instead."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.diagnostics import SpecError
from flashgen.flex import AuxRequest, create_block_mask, flex_attention, from_mods, to_spec
from flashgen.flex.places import spellings
from tests.flex.helpers import inputs

TABLE, COLUMN = torch.zeros(4, 8), torch.zeros(8)


def branch(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    if q > kv:
        return s
    return s * 2


def loop(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    for _ in range(q):
        s = s + 1
    return s


MISTAKES: list[tuple[Callable[..., Any], str, str]] = [
    (branch, "E601", "write torch.where"),
    (loop, "E601", "'range'"),
    (lambda s, b, h, q, kv: s * math.exp(q), "E601", "instead of math's"),
    (lambda s, b, h, q, kv: s + q.item(), "E601", ".item()"),
    (lambda s, b, h, q, kv: s + int(q), "E601", "x.int()"),
    (lambda s, b, h, q, kv: max(s, 0.0), "E601", "torch.where"),
    (lambda s, b, h, q, kv: s + np.minimum(q, 3), "E601", "NumPy"),
    (lambda s, b, h, q, kv: torch.expm1(s), "E602", "torch.exp(x) - 1"),
    (lambda s, b, h, q, kv: torch.erfinv(s), "E602", "'erfinv'"),
    (lambda s, b, h, q, kv: s + torch.rand(()), "E602", "at random"),
    (lambda s, b, h, q, kv: s.detach(), "E602", "detach"),
    (lambda s, b, h, q, kv: torch.stack([s, s]).sum(), "E602", "one by one"),
    (lambda s, b, h, q, kv: s + TABLE[h], "E603", "TABLE[…, …]"),
    (lambda s, b, h, q, kv: s + TABLE, "E603", "shape [4, 8]"),
    (lambda s, b, h, q, kv: s + TABLE[h, s], "E603", "index.int()"),
    (lambda s, b, h, q, kv: s + TABLE[h, q, kv], "E603", "3 indices"),
    (lambda s, b, h, q, kv: s + TABLE[99, q], "E603", "index 99"),
    (lambda s, b, h, q, kv: s + torch.cat([COLUMN, TABLE[h]])[q], "E602", "no 'cat'"),
    (lambda s, b, h, q, kv: s + torch.where(COLUMN > 0, TABLE[h], 0)[q], "E603", "is indexed by a value"),
    (lambda s, b, h, q, kv: s + torch.where(COLUMN > 0, input=TABLE[h], other=0)[q], "E603", "is indexed by a value"),
    (lambda s, b, h, q, kv: (q - kv).to(torch.float16), "E603", "would round"),
    (lambda s, b, h, q, kv: q >= kv, "E603", "returns a tensor of torch.bool"),
    (lambda s, b, h, q, kv: None, "E603", "returns nothing"),
    (lambda s, b, h, q, kv: s + q * 3_000_000_000, "E604", "3000000000"),
    (lambda s, b, h, q, kv: s + [0.5, 1.0, 2.0, 4.0][h], "E601", "torch.tensor([…])[h]"),
    (lambda s, b, h, q, kv: s + {0: 1.0}[h], "E601", "a dict asks"),
    (lambda s, b, h, q, kv: (s, s), "E603", "returns an object of tuple"),
    (lambda b, h, q, kv: q >= kv, "E606", "this one takes (b, h, q, kv)"),
    (lambda b, h, q, kv: q >= kv, "E606", "block_mask=create_block_mask(mod"),
    (lambda s: s, "E606", "this one takes (s)"),
    (lambda s, b, h, q, kv: s + torch.zeros(0)[q], "E605", "a tensor that the mod makes has shape [0]"),
    (lambda s, b, h, q, kv: s + undefined, "E606", "NameError"),  # type: ignore[name-defined] # noqa: F821
]


@pytest.mark.parametrize(("mod", "code", "words"), MISTAKES)
def test_a_mistake_is_shown_where_it_is(mod: Any, code: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        to_spec(score_mod=mod)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert words in str(caught.value)
    first, span = mod.__code__.co_firstlineno, diagnostic.span
    assert span is not None
    assert span.file == __file__
    assert span.line == first + (1 if mod in (branch, loop) else 0)
    assert span.end_column > span.column


def test_a_mistake_in_a_helper_is_shown_there() -> None:
    def helper(x: Any) -> Any:
        return 1 if x else 0

    with pytest.raises(SpecError) as caught:
        to_spec(score_mod=lambda s, b, h, q, kv: s + helper(q > kv))
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert span.line == helper.__code__.co_firstlineno + 1


def test_packages_behind_links_are_no_code_of_the_users(tmp_path: Path) -> None:
    there, link = tmp_path / "torch", tmp_path / "link"
    there.mkdir()
    link.symlink_to(there)
    assert set(spellings(link)) == {str(there), str(link)}
    assert spellings(there) == (str(there),)


def test_a_mod_that_fails_inside_of_pytorch_is_shown_where_it_begins() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + q

    with pytest.raises(SpecError) as caught:
        to_spec(score_mod=functools.partial(torch.vmap(mod, in_dims=1)))
    assert caught.value.diagnostics[0].code == "E606"
    with pytest.raises(SpecError) as caught:
        to_spec(mask_mod=functools.partial(mod, torch.zeros(()), torch.zeros(())))
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert (span.file, span.line) == (__file__, mod.__code__.co_firstlineno)


def test_a_value_that_is_used_after_its_mod() -> None:
    kept = SimpleNamespace()

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept.value = s
        return s

    to_spec(score_mod=mod)
    for use in (lambda x: x + 1, repr, bool, lambda x: x.shape):
        with pytest.raises(SpecError, match="used after the mod had returned"):
            use(kept.value)


def test_what_is_no_function_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"'score_mod' must be a function of \(score, b, h, q_idx, kv_idx\), not str"):
        flex_attention(q, k, v, "alibi", backend="reference")  # type: ignore[arg-type]


def test_errors_of_a_call_have_the_users_names() -> None:
    q, k, v = inputs()
    short, slopes = torch.zeros(10), torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match="index 'i' of tensor 'short' is 23, but dimension 0 of it has 10 entries"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h, h] + short[i], backend="reference")
    with pytest.raises(TypeError, match=r"'slopes' has layout .*: pass slopes\.to_dense\(\)"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h, h], backend="reference")


def test_a_scale_has_the_name_that_the_caller_knows() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match="argument 'scale' must be a number or a 0-dim tensor"):
        flex_attention(q, k, v, scale="x", backend="reference")  # type: ignore[arg-type]


def test_a_tensor_without_a_name() -> None:
    words = "index 5 is outside dimension 0 of a tensor that the mod makes, which has 3 entries"
    with pytest.raises(SpecError, match=words):
        to_spec(score_mod=lambda s, b, h, i, j: s + torch.zeros(3)[5])
    with pytest.raises(SpecError, match=r"an index of a tensor that the mod makes is torch\.float32"):
        to_spec(score_mod=lambda s, b, h, i, j: s + torch.zeros(3)[s])


@pytest.mark.parametrize("head_dim", [0, 577, "x", 16.5, (8, 8, 8)])
def test_a_head_dimension_that_is_none(head_dim: Any) -> None:
    with pytest.raises(ValueError, match=r"'head_dim' is .*; an int from 1 to 576, or two"):
        from_mods(head_dim=head_dim)


@pytest.mark.parametrize("mod", [lambda b, h, q, kv: q - kv, lambda b, h, q, kv: True])
def test_masks_are_boolean(mod: Any) -> None:
    with pytest.raises(SpecError, match="boolean tensor is expected"):
        to_spec(mask_mod=mod)


def test_a_mistake_in_a_mask_is_shown_in_its_mod() -> None:
    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv

    mask = create_block_mask(mod, None, None, 24, 24)
    for ask in (lambda: str(mask), lambda: from_mods(mask_mod=mask)):
        with pytest.raises(SpecError) as caught:
            ask()
        span = caught.value.diagnostics[0].span
        assert span is not None
        assert (span.file, span.line) == (__file__, mod.__code__.co_firstlineno)


def test_products_of_positions_beyond_32_bits_are_refused() -> None:
    q = torch.zeros(1, 1, 70_000, 4)
    with pytest.raises(SpecError, match=r"'i \* j' reaches 4899860001"):
        flex_attention(q, q, q, lambda s, b, h, i, j: s + i * j, backend="reference")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel_options": {"BACKEND": "CUDNN"}}, "'BACKEND' is 'CUDNN'; FlexAttention has AUTO, TRITON"),
        ({"kernel_options": {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}}, "exclude each other"),
        ({"kernel_options": {"OUTPUT_MAX": True}}, r"'OUTPUT_MAX' is set by .*AuxRequest\(max_scores=True\)"),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse and return_aux"),
        ({"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 25, 24)}, "25 queries"),
        ({"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, 3, None, 24, 24)}, "3 batch entries"),
    ],
)
def test_arguments_are_refused_by_name(change: Any, words: str) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=words):
        flex_attention(q, k, v, **change, backend="reference")


@pytest.mark.parametrize("name", ["x y", "class", "score", "1a", "", "größe", 5])
def test_a_name_that_is_none(name: Any) -> None:
    for make in (from_mods, to_spec):
        with pytest.raises(ValueError, match=r"'name' is .*; letters, digits and '_' are expected"):
            make(name=name)


@pytest.mark.parametrize("shape", [(2, 4, 24), (2, 4, 24, None), 5, (2, 4, -1, 3)])
def test_a_shape_that_is_none(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"'shape' is .*; \(B, H, Nq, Nk\) is expected"):
        to_spec(shape=shape)


@pytest.mark.parametrize("size", [0, -1, 2.5, (5,), (5, 0), "x", None])
def test_a_size_of_blocks_that_is_none(size: Any) -> None:
    with pytest.raises(ValueError, match=r"'BLOCK_SIZE' is .*; an int of at least 1, or two, is expected"):
        create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 24, 24, BLOCK_SIZE=size)


def test_lengths_of_masks_are_ints() -> None:
    for lengths in ((24.7, 24), (24, "24"), (24, None)):
        with pytest.raises(TypeError, match="_LEN' must be an int, not"):
            create_block_mask(lambda b, h, q, kv: q >= kv, None, None, *lengths)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel_options": []}, "'kernel_options' must be a dict, not list"),
        ({"return_aux": True}, "'return_aux' must be an AuxRequest, not bool"),
    ],
)
def test_arguments_of_other_types(change: Any, words: str) -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=words):
        flex_attention(q, k, v, **change, backend="reference")


def test_grouped_queries_are_asked_for() -> None:
    q, k, v = inputs(kv_heads=2)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v, backend="reference")
