"""Calls like one before: they are checked as that one was, and add few calls of Python to the op."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
from torch import Tensor

from flashgen.flex import create_block_mask, flex_attention, from_mods
from tests.flex.helpers import assert_close, inputs, judged
from tests.flex.test_calls import SLOPES, bias


def test_a_call_like_one_before_is_checked_as_that_one_was() -> None:
    q, k, v = (x.detach() for x in inputs(kv_heads=2))

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = functools.partial(create_block_mask, mask_mod)
    call: Any = functools.partial(flex_attention, enable_gqa=True, backend="reference")
    fitting = mask(2, None, 24, 24)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"enable_gqa": False}, ValueError, "pass enable_gqa=True"),
        ({"block_mask": mask(None, None, 24, 25)}, ValueError, "24 queries and 25 keys"),
        ({"block_mask": mask(3, None, 24, 24)}, ValueError, "3 batch entries"),
        ({"block_mask": mask(None, 3, 24, 24)}, ValueError, "3 heads"),
        ({"block_mask": mask_mod}, TypeError, "becomes one by create_block_mask"),
        ({"key": k[..., :23, :]}, ValueError, "24 queries and 24 keys, but there are 24 and 23"),
        ({"value": v[0]}, ValueError, "'value' has shape"),
        ({"value": v.tolist()}, TypeError, "'value' must be a tensor, not list"),
        ({"kernel_options": 3}, TypeError, "'kernel_options' must be a dict"),
        ({"return_aux": True}, TypeError, "'return_aux' must be an AuxRequest"),
    ]
    right: dict[str, Any] = {"query": q, "key": k, "value": v, "block_mask": fitting}
    truth = judged(q, k, v, None, mask_mod)[0]
    for given, kind, words in wrong:
        assert_close(call(**right), truth)
        with pytest.raises(kind, match=words):
            call(**right | given)
    one = {"key": k[:1], "value": v[:1]}
    for _ in range(2):  # one entry of keys and values for all
        assert_close(call(**right | one), judged(q, k[[0, 0]], v[[0, 0]], None, mask_mod)[0])
    assert_close(call(**right | {"block_mask": None}), judged(q, k, v)[0])


@pytest.mark.parametrize("captures", [False, True])
def test_a_call_like_one_before_adds_few_calls_of_python_to_the_op(captures: bool) -> None:
    q, k, v = (x.detach() for x in inputs())
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24)
    score_mod = bias(SLOPES, 5.0, 3) if captures else None
    op, captured = from_mods(score_mod=score_mod, mask_mod=mask, head_dim=8, shape=(2, 4, 24, 24), backend="reference")

    def calls(call: Any) -> int:
        counts: list[int] = []  # the first makes what is remembered, and collecting garbage may add to one

        def counted(_frame: object, event: str, _arg: object) -> None:
            counts[-1] += event == "call"

        before = sys.getprofile()
        for _ in range(4):
            counts.append(0)
            sys.setprofile(counted)
            try:
                call()
            finally:
                sys.setprofile(before)
        return min(counts)

    more = calls(lambda: flex_attention(q, k, v, score_mod, mask, backend="reference"))
    assert more - calls(lambda: op(q, k, v, **captured)) <= (18 if captures else 8)
