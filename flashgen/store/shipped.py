"""Folders that come with the package.

In: the name of one. Out: where it is. A wheel holds them inside the package, a checkout beside it.
"""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """The folder of this name: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name
