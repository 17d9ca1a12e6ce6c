"""pyproject.toml, constraints.txt and the build commands agree with each other."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashgen.version import __version__


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    with (repository / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


@pytest.fixture(scope="module")
def locked(repository: Path) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_every_requirement_is_locked_within_its_range(project: dict[str, Any], locked: dict[str, str]) -> None:
    extras = project["project"]["optional-dependencies"]
    plain = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    listed = [*plain, *(text for extra in extras.values() for text in extra)]
    for text in listed:
        requirement = Requirement(text)
        assert requirement.specifier, f"'{text}' declares no range"
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


def test_extras(project: dict[str, Any]) -> None:
    assert set(project["project"]["optional-dependencies"]) == {"cuda12", "cuda13", "dev", "plot"}


def test_the_changelog_knows_the_version(repository: Path) -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_continuous_integration_runs_the_command_of_the_readme(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert "make test" in (repository / "README.md").read_text()
    assert "make demo" in (repository / "README.md").read_text()
