"""For tests that are about commands, packages and tables: kernels with one kind of products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.runtime import compiler


@pytest.fixture(scope="package", autouse=True)
def one_kind_of_products() -> Iterator[None]:
    """No products of bfloat16, which take a third of a compiler's time, in matrix registers most of it."""
    with pytest.MonkeyPatch.context() as patch:
        none = ("-DFLASHGEN_MATRIX_PRODUCTS=0", "-DFLASHGEN_PAIR_PRODUCTS=0")
        patch.setattr(compiler, "REQUIRED_FLAGS", (*compiler.REQUIRED_FLAGS, *none))
        yield
