"""What tests of FlashAttention's functions share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import flashgen
from flashgen.flash import options
from flashgen.op.layer import Layer


@functools.cache
def by_reference(text: str) -> Any:
    """The op of a text."""
    return flashgen.loads(text, backend="reference")


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions run the specs that they make on the reference: what arguments mean, without a kernel of each."""
    monkeypatch.setattr(Layer, "op", lambda self: by_reference(self.text()))
    options._settled.cache_clear()
    yield
    options._settled.cache_clear()
