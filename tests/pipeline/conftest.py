"""What these tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.toolchains import nvrtc
from tests.pipeline.gpus import SPEC


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    return path


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CuPy cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends", "cupyx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    nvrtc.find_nvrtc.cache_clear()
    yield
    nvrtc.find_nvrtc.cache_clear()
