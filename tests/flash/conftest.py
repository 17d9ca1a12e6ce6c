"""What tests of FlashAttention's functions share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import flashgen
from flashgen import layer
from flashgen.flash import options


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions run the specs that they make on the reference: what arguments mean, without a kernel of each."""
    monkeypatch.setattr(layer, "loads", functools.partial(flashgen.loads, backend="reference"))
    monkeypatch.setattr(layer, "_OPS", SimpleNamespace())
    monkeypatch.setattr(layer, "_NAMES", {})
    options._settled.cache_clear()
    yield
    options._settled.cache_clear()
