"""For tests that are about commands, packages and tables: kernels with one of the three kinds of products."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_kind_of_products() -> Iterator[None]:
    """No products in matrix registers, which take most of a compiler's time where a CPU has them."""
    with pytest.MonkeyPatch.context() as patch:
        if "CXX" not in os.environ:
            patch.setenv("CXX", "c++ -DFLASHGEN_MATRIX_PRODUCTS=0")
        yield
