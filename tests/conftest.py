"""What all tests share: a cache of their own, seeded random tests, and no fight for the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from tests.slices import long_ones

ROOT = Path(__file__).resolve().parent.parent

# Set before anything is imported, so that subprocesses and OpenMP see it. Compiled kernels are kept between runs:
# the cache is addressed by content, and a change of a template is another entry.
os.environ.setdefault("FLASHGEN_CACHE_DIR", str(ROOT / ".pytest_cache" / "kernels"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What takes long on a slow machine is no part of what a command prints.
os.environ.setdefault("FLASHGEN_PROGRESS", "0")
os.environ.setdefault("FLASHGEN_NODE", "0")  # test_node.py asks for it; elsewhere its compiler would only take time

hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None, print_blob=True, database=None)
hypothesis.settings.load_profile("seeded")


def pytest_report_header() -> list[str]:
    """What is left out, and how to run it."""
    if find_spec("transformers"):
        return []
    return ["tests/integrations: left out, as transformers is not installed; run them with `make test-integrations`"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow what ``LONG`` says, before what is slow is left out."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for n in long_ones(item.nodeid for item in quick):
        quick[n].add_marker(pytest.mark.slow)


# Folders that are not about the numbers of bfloat16. Their kernels have no products for it alone, of pairs or in matrix
# registers, which take a third of a compiler's time.
ONE_KIND_OF_PRODUCTS = frozenset(
    {"benchmark", "cache", "cli", "cuda", "distributed", "documents", "emulator", "examples", "flash", "flex", "fuzz"}
    | {"integrations", "masks", "nn", "pipeline", "tuning"}
)


@pytest.fixture(scope="module", autouse=True)
def kinds_of_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a module: a package's fixture would last to the session's end, as folders here have no __init__.py."""
    from flashgen.runtime import compiler

    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(ROOT / "tests").parts[0] in ONE_KIND_OF_PRODUCTS:
            none = ("-DFLASHGEN_MATRIX_PRODUCTS=0", "-DFLASHGEN_PAIR_PRODUCTS=0")
            patch.setattr(compiler, "REQUIRED_FLAGS", (*compiler.REQUIRED_FLAGS, *none))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def specs(repository: Path) -> Path:
    """The gallery."""
    return repository / "specs"
