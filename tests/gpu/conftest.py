"""Tests of this folder need an NVIDIA GPU; where there is none each is skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def missing() -> str | None:
    """What kernels on a GPU need and this machine lacks."""
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU and a PyTorch that is built for CUDA"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "needs CuPy: pip install 'flashgen[cuda13]'"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where they cannot run."""
    own = [item for item in items if HERE in item.path.parents]
    reason = missing() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        # PyTorch's own, where a gradient of the reference begins in a thread that has not met the device.
        item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
