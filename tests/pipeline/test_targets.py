"""One way for every target: the same function compiles for each, and a family more is a folder and a line."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import flashgen
from flashgen import targets
from flashgen.analysis.variant import analyse
from flashgen.compiler.building import build_file
from flashgen.compiler.compiled import compiled
from flashgen.compiler.pipeline import check_file, compile_file, target_named, target_names
from flashgen.diagnostics import SpecError
from flashgen.language import parse_text
from flashgen.plan.measured import Pins, Tile
from flashgen.targets import registry
from flashgen.targets.protocol import AnyTarget
from flashgen.toolchains.cpp import CompilerMissing
from tests.cli.helpers import flashgen as command
from tests.pipeline.listing import target as listing

TEXT = "attention tiny {\n    head_dim 16, 32\n    dtype bf16\n    mask causal\n}\n"
SOURCE = Path(flashgen.__file__).parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.attn"
    path.write_text(TEXT)
    return path


@pytest.fixture
def with_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of registration."""
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, listing.targets))


# -- the protocol ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", target_names())
def test_every_target_plans_and_emits_alike(name: str) -> None:
    spec = parse_text(TEXT).specs[0]
    variant, target = analyse(spec, spec.head_dims[0]), target_named(name)
    assert target.name == name
    assert not target.limits(variant)
    plan = target.plan(variant)
    assert (plan.spec_name, plan.head_dim) == ("tiny", "16")
    assert plan.reasons
    assert set(plan.elements_apart)
    for element in plan.elements_apart:
        assert {"forward", "backward"} <= set(plan.of_element(element))
    assert plan.joined(dict.fromkeys(plan.elements_apart, (plan, plan))) == plan
    for each in compiled(variant, target).parts():
        assert each.source.target == name
        assert each.source.file_name.startswith(f"{each.source.symbol}_")
        assert each.source.name.endswith(f"_{name}")
        assert (each.packed().kernel is None) is not (each.packed().described is None)
    pinned = target.plan(variant, Pins(Tile(32, 32)))
    assert all(pinned.of_element(each)["forward"].Br == 32 for each in pinned.elements_apart)
    assert hash(target) == hash(target_named(name)), "targets are keys of what is remembered"


@pytest.mark.parametrize("name", ["cpu", "sm_80", "sm_90a"])
def test_one_function_goes_from_a_file_to_binaries(file: Path, name: str) -> None:
    try:
        made = compile_file(file, target_named(name))
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert list(dict.fromkeys(str(each.kernel.variant.head_dim) for each in made)) == ["16", "32"]
    for each in made:
        images = each.kernel.packed(each.binary).binaries
        assert images
        assert all(image.content.startswith(b"\x7fELF") for image in images)


def test_families_have_the_same_files() -> None:
    """What families of GPUs share stands in ``gpu`` under the same names."""
    of = {name: {each.stem for each in (SOURCE / "targets" / name).glob("*.py")} for name in _families()}
    assert set(of) == {"cpu", "mma", "wgmma", "gpu"}
    stages = {"target", "limits", "recipes", "plan", "model", "cost", "emit", "compile"}
    assert stages - {"compile"} <= of["cpu"]
    assert stages <= of["gpu"]
    for family in ("mma", "wgmma"):
        assert "target" in of[family]
        assert of[family] - {"__init__", "tables"} <= of["gpu"]


def _families() -> list[str]:
    return [each.name for each in pkgutil.iter_modules(targets.__path__) if each.ispkg]


def test_no_plan_and_no_target_is_asked_what_it_is() -> None:
    kinds = {"Plan", "CpuPlan", "GpuPlan", "Cpu", "Gpu", "Device", "Target", "CpuTarget", "GpuTarget", "Architecture"}
    for family in _families():
        importlib.import_module(f"flashgen.targets.{family}")
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                assert not asked & kinds, f"{path}:{node.lineno}"


# -- a family more -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_listings")
def test_a_family_more_compiles(file: Path) -> None:
    """Planned again where what was compiled spills, as for every target."""
    first, second = compile_file(file, listing.ListingTarget())
    assert (first.kernel.source.text, second.kernel.plan.tile.Br) == ("P = exp(S) / Σ exp(S)\n16 rows\n", 16)
    assert first.kernel.plan.rejected
    assert len(first.binary) == 64


@pytest.mark.usefixtures("with_listings")
def test_a_family_more_is_built_and_checked(file: Path, tmp_path: Path) -> None:
    (result,) = build_file(file, output=tmp_path / "generated", targets=["listing"])
    assert (result.folder / "tiny_d16_listing.txt").read_text().startswith("P = ")
    written = json.loads((result.folder / "manifest.json").read_text())
    assert [each["target"] for each in written["kernels"]] == ["listing", "listing"]
    assert not build_file(file, output=tmp_path / "generated", targets=["listing"], check=True)[0].changed
    assert "listing" in {each.target for each in check_file(file).verdicts}
    outcome = command("check", file, "--target", "listing")
    assert outcome.code == 0, outcome


@pytest.mark.usefixtures("with_listings")
def test_a_family_more_refuses_with_the_place(file: Path) -> None:
    file.write_text(TEXT.replace("mask causal", "mask causal\n    param p: f32\n    dropout p"))
    checked = check_file(file)
    (said,) = checked.warnings
    assert (said.code, said.message) == ("W505", "refused by 'listing': listings know no dropout")
    assert said.span is not None
    assert said.span.line == 6
    with pytest.raises(SpecError, match="listings know no dropout"):
        compile_file(file, listing.ListingTarget())


def test_without_its_line_a_family_is_unknown() -> None:
    with pytest.raises(SpecError, match="no target 'listing'"):
        target_named("listing")


def _is_a_target(each: listing.ListingTarget) -> AnyTarget:
    """The type checker says whether it is one."""
    return each
