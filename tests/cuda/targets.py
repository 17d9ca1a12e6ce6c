"""Ops on the emulator with the kernels of any target."""

from __future__ import annotations

import functools
from collections.abc import Collection

import pytest

import flashgen
from flashgen.op.op import AttentionOp

# One without asynchronous copies, one with them, one whose warpgroups multiply.
KINDS = ("sm_75", "sm_80", "sm_90a")


def each_by_kind(names: Collection[str]) -> list[object]:
    """Each name with each kind of target: one of a name's, in turn, in `make test`, and all in `make test-all`."""
    return [
        pytest.param(name, kind, marks=() if (row + column) % len(KINDS) == 0 else pytest.mark.slow)
        for row, name in enumerate(names)
        for column, kind in enumerate(KINDS)
    ]


@functools.cache
def emulated(text: str, target: str) -> AttentionOp:
    """The op of a spec's text, with what a GPU of this target would run."""
    return flashgen.loads(text, backend="emulator", target=target)
