"""A kind of call is one declaration: kernels, operator and engine follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.kinds.table import KINDS
from flashgen.op import op_calls

from .helpers import CAUSAL, op, qkv

# Dense calls under another name.
COPY = replace(DENSE, name="copy", mark="_copy", suffix="_copy")


@pytest.fixture
def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """As if a module of ``kinds/`` declared it."""
    monkeypatch.setattr(op_calls, "KINDS", {**KINDS, COPY.name: COPY})
    return COPY


@pytest.mark.parametrize("backend", ["cpu", pytest.param("emulator", marks=pytest.mark.slow), "reference"])
def test_a_kind_that_copies_the_dense_one_is_a_declaration(backend: str, with_a_copy: Kind) -> None:
    own = op(CAUSAL.replace("attention causal", f"attention copied_on_{backend}"), backend)
    q, k, v = qkv()
    rest: Any = (DENSE.whole, False)
    dense, copied = (own.engine_of(kind).attend((q, k, v), rest) for kind in (DENSE, with_a_copy))
    for x, y in zip(dense, copied, strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)
    operator: Any = getattr(torch.ops.flashgen, f"{own.name.partition('::')[2]}_copy")
    assert torch.equal(operator(q, k, v, *DENSE.whole, False)[0], dense[0])
    kernel = own.engine_of(with_a_copy).checker.find((q, k, v), rest).kernel
    assert (kernel is None) is (backend == "reference")


def test_every_kind_has_a_name_and_a_mark_of_its_own() -> None:
    called = [kind for kind in KINDS.values() if kind.suffix is not None]
    assert len({kind.suffix for kind in called}) == len(called)
    marks = [kind.mark for kind in KINDS.values() if not kind.backward_only]  # the passes of forward mode share one
    assert len(set(marks)) == len(marks) == len(KINDS) - 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_pointers_of_a_kind_vary_and_sizes_do_not(kind: Kind) -> None:
    assert all(each.varies and "pointer" in each.kind for each in kind.pointers)
    assert not any(each.varies or "pointer" in each.kind for each in kind.sizes)
