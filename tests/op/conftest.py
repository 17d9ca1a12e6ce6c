"""The backends that the op is tested on."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that this machine can run."""
    name: str = request.param
    if name == "cpu" and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return name
