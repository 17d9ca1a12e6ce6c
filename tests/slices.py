"""What of a long list runs in `make test`; the rest runs in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first of each ``every`` as they are, others marked slow. A tuple is a row of them.

    What is marked already stays as it is, and is not counted.
    """
    found: list[Any] = []
    counted = 0
    for value in values:
        each = pytest.param(*(value if isinstance(value, tuple) else (value,))) if not _is_param(value) else value
        if not each.marks:
            each = pytest.param(*each.values, marks=pytest.mark.slow if counted % every else ())
            counted += 1
        found.append(each)
    return found


def _is_param(value: Any) -> bool:
    return isinstance(value, type(pytest.param()))
