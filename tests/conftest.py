"""What all tests share: a cache of their own, seeded random tests, and no fight for the cores."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from tests.chance import SEED, seed_of
from tests.slices import long_ones

ROOT = Path(__file__).resolve().parent.parent

# Set before anything is imported, so that subprocesses and OpenMP see it. Compiled kernels are kept between runs:
# the cache is addressed by content, and a change of a template is another entry.
KERNELS = Path(os.environ.setdefault("FLASHGEN_CACHE_DIR", str(ROOT / ".pytest_cache" / "kernels")))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What takes long on a slow machine is no part of what a command prints.
os.environ.setdefault("FLASHGEN_PROGRESS", "0")
os.environ.setdefault("FLASHGEN_NODE", "0")  # test_node.py asks for it; elsewhere its compiler would only take time

hypothesis.settings.register_profile("seeded", derandomize=not SEED, deadline=None, print_blob=True, database=None)
hypothesis.settings.load_profile("seeded")


def pytest_report_header() -> list[str]:
    """By which seed is drawn, what is left out, and how to run it."""
    drawn = f"drawn by chance: FLASHGEN_TEST_SEED={SEED}"
    if find_spec("transformers"):
        return [drawn]
    left_out = "left out, as transformers is not installed; run them with `make test-integrations`"
    return [drawn, f"tests/integrations, tests/peers/test_transformers.py: {left_out}"]


def seed_everything(seed: int) -> None:
    """The generators that a test draws from where it makes none of its own."""
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a module's fixtures draw does not depend on which of its tests is the first of a process."""
    seed_everything(seed_of(item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """What a test draws does not depend on those before it."""
    seed_everything(seed_of(item.nodeid))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of this test."""
    return seed_of(request.node.nodeid)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Of this test."""
    return np.random.default_rng(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow what ``LONG`` says, before what is slow is left out."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for n in long_ones(item.nodeid for item in quick):
        quick[n].add_marker(pytest.mark.slow)


# Tests of these folders and modules are about something else than numbers of 16 bits on CPUs: their kernels are what a
# compiler has soon. Products of bfloat16 alone, of pairs or in matrix registers, take a third of its time, and what -O2
# does beyond -Og half of the rest.
QUICKLY_COMPILED = frozenset(
    {"benchmark", "cache", "cli", "distributed", "documents", "examples", "flash", "flex", "fuzz", "integrations"}
    | {"masks", "nn", "numeric", "op", "peers", "pipeline", "tuning"}
)
# Modules that ask for every product, by -Og as well, and those whose numbers are the compiler's of users.
OF_EVERY_PRODUCT = frozenset(
    f"numeric/test_{name}.py" for name in ("eight_bits", "elements_of_nothing", "large_head_dims", "ragged")
)
AS_THE_PRODUCT = frozenset(
    f"numeric/test_{name}.py" for name in ("cpu_kinds", "extreme_scores", "gallery", "matrix_products")
)
# -Og takes two thirds of the time of -O1 for a kernel of the emulator, too. It inlines no calls, so that a conflict of
# banks is told without the lines that led to it.
TOLD_BY_LINES = "emulator"
NO_OTHER_PRODUCTS = ("-DFLASHGEN_MATRIX_PRODUCTS=0", "-DFLASHGEN_PAIR_PRODUCTS=0")


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a module: a package's fixture would last to the session's end, as folders here have no __init__.py."""
    from flashgen.hosts.emulator import program
    from flashgen.targets.cpu import device
    from flashgen.toolchains import cpp as compiler

    def quick() -> compiler.Compiler:
        found = find()
        own, *others = found.command  # what CXX says wins
        return replace(found, command=(own, *left_out, *others), flags=("-Og",))

    find, file = compiler.find_compiler, request.path.relative_to(ROOT / "tests")
    folder, module = file.parts[0], file.as_posix()
    left_out = () if module in OF_EVERY_PRODUCT else NO_OTHER_PRODUCTS
    whole = "not slow" not in request.config.option.markexpr  # `make test-all` has what users have
    with pytest.MonkeyPatch.context() as patch:
        if not whole and folder in QUICKLY_COMPILED and module not in AS_THE_PRODUCT:
            patch.setattr(compiler, "find_compiler", quick)
            for asked in ("_has_amx", "_has_pairs") if left_out else ():  # one library then serves every type
                patch.setattr(device, asked, lambda _: False)
        if not whole and folder != TOLD_BY_LINES:
            patch.setattr(program, "_KERNEL_FLAGS", ("-Og",))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def specs(repository: Path) -> Path:
    """The gallery."""
    return repository / "specs"
