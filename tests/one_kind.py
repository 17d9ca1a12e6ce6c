"""For tests that are about commands, packages and tables: kernels with one of the three kinds of products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.runtime import compiler


@pytest.fixture(scope="package", autouse=True)
def one_kind_of_products() -> Iterator[None]:
    """No products in matrix registers, which take most of a compiler's time where a CPU has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "REQUIRED_FLAGS", (*compiler.REQUIRED_FLAGS, "-DFLASHGEN_MATRIX_PRODUCTS=0"))
        yield
