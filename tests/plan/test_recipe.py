"""Recipes: what is decided once, why, and that nobody decides it again."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashgen as package
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.pipeline import target_named
from flashgen.compiler.reading import read_file
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.recipe import Decision, Rule, gathered
from flashgen.store.headers import shipped_header
from flashgen.targets.gpu import rules as gpu_rules
from flashgen.targets.gpu.recipe import Lists, decide
from flashgen.targets.gpu.schedules import Backward, Forward
from flashgen.targets.gpu.score import MOST_LSE, Extremes, Product, Weighing
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.wgmma import rules as wgmma_rules
from tests.cli.helpers import flashgen

TARGETS = Path(package.__file__).parent / "targets"
# What decides; whoever else asks one of these would decide again.
DECIDES = {"recipe.py", "recipes.py", "rules.py", "tables.py", "diagonals.py", "prefetch.py", "score.py"}
POLICY = {
    "is_irregular",
    "is_cut",
    "observed_loads",
    "takes_longer_than_a_read",
    "over_diagonals",
    "DOT",
    "prefetched",
    "score_of",
}
GALLERY = ("causal", "alibi", "packed_documents", "softcap", "t5", "random_blocks", "evoformer", "gaussian_regression")


def variants(specs: Path, name: str) -> Iterator[Variant]:
    for spec in read_file(specs / f"{name}.attn").specs:
        for head_dim in spec.head_dims:
            yield analyse(spec, head_dim)


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", GALLERY)
def test_every_choice_has_a_reason_and_a_measurement(specs: Path, name: str, target: str) -> None:
    for variant in variants(specs, name):
        plan = target_named(target).plan(variant)
        assert plan.decided("")
        for each in plan.decisions:
            assert all((each.question, each.choice, each.reason, each.measured)), each
        asked = [(each.about, each.question) for each in plan.decisions if each.question != "tiles"]
        assert len(asked) == len(set(asked)), "a question is answered twice"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", GALLERY)
def test_plans_are_of_their_recipes(specs: Path, name: str, target: str) -> None:
    for variant in variants(specs, name):
        plan = target_named(target).plan(variant)
        assert isinstance(plan, GpuPlan)
        for title, tiles in plan.passes.items():
            said = {each.question: each.choice for each in plan.decided(title)}
            assert ("wgmma" in said["products"]) == tiles.warpgroups  # type: ignore[attr-defined]
            if not isinstance(tiles, Forward | Backward):
                continue
            persistent = tiles.tensor_copies if isinstance(tiles, Forward) else tiles.persistent
            assert (said["staging"] == "tensor copies") == tiles.tensor_copies
            assert ("producer" in said["roles"]) == (tiles.producers > 0)
            assert (said["tile order"] == "persistent") == persistent
            assert ("prologue" in said) == (tiles.prefetches_next or getattr(tiles, "overlaps_next", False))


def test_what_is_decided_of_well_known_masks(specs: Path) -> None:
    found = {name: decide(next(variants(specs, name))) for name in GALLERY}
    assert [found[name].lists for name in ("causal", "packed_documents", "random_blocks")] == list(Lists)
    assert found["random_blocks"].longest_first
    assert found["random_blocks"].cuts
    assert not found["causal"].longest_first
    assert found["t5"].numbers
    assert not found["alibi"].numbers
    assert isinstance(found["causal"].score, Product)
    assert found["causal"].weighing is Weighing.FIRST
    assert found["causal"].extremes is Extremes.MARKS
    assert found["softcap"].weighing is Weighing.WITH_SLOPE
    assert found["softcap"].extremes is Extremes.NONE
    assert found["gaussian_regression"].weighing is Weighing.LAST
    assert found["gaussian_regression"].extremes is Extremes.TOPS
    assert found["causal"].one_pass
    assert not found["gaussian_regression"].one_pass


@pytest.mark.parametrize(
    ("text", "folded", "bounded"),
    [
        ("score softcap(s, 60)", True, True),
        ("score softcap(s, 80)", True, False),  # exp(80) times as many keys as there may be
        ("score softcap(s, 30)  tensor sink: f32[H]  weights softmax(sink = sink[h])", True, False),
        ("tensor bias: f32[H, Nk] grad  score softcap(s, 30) + bias[h, j]", False, False),
        ("score softcap(s, 30)  dropout 0.1", False, True),
        ("score s * s", False, False),  # a derivative that is infinite times no weight would be no number
        ("mask causal", False, False),
    ],
)
def test_what_weights_take_in(text: str, folded: bool, bounded: bool) -> None:
    (spec,) = parse_text(f"attention a {{ head_dim 64  {text} }}").specs
    recipe = decide(analyse(spec, spec.head_dims[0]))
    assert (recipe.weighing.with_slope, recipe.extremes is Extremes.NONE) == (folded, bounded)


def test_kernels_call_the_same_scores_extreme() -> None:
    header = shipped_header("flashgen/math.cuh")
    assert f"MOST_LSE = {MOST_LSE}f;" in header


def test_documents_keep_to_one_key_tile_a_block(specs: Path) -> None:
    """The one measurement that goes the other way."""
    by_name = {
        name: {each.question: each for each in target_named("sm_90a").plan(variant).decided("backward, bf16")}
        for name in ("packed_documents", "random_blocks")
        for variant in variants(specs, name)
    }
    assert by_name["random_blocks"]["tile order"].rule == wgmma_rules.PERSISTENT_KEYS.name
    document = by_name["packed_documents"]["tile order"]
    assert document.choice == "one tile a block"


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    imported = {name.name for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for name in each.names}
    return names | imported | {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}


@pytest.mark.parametrize("folder", ["gpu", "mma", "wgmma"])
def test_nobody_decides_again(folder: str) -> None:
    for path in (TARGETS / folder).glob("*.py"):
        if path.name not in DECIDES:
            again = named_in(path) & (POLICY | {"rules"})
            assert not again, f"{folder}/{path.name} decides by {again}; the recipe says it"


def test_templates_are_told_and_do_not_ask(repository: Path) -> None:
    """What a source has more than one kind of is said by the recipe and its blocks, not formed of other things."""
    for path in sorted((repository / "templates" / "cuda").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for formed in ("set row_state", "set shows_", "set copies_lists", "set persistent"):
            assert formed not in text, f"{path.name}: {formed}"


def test_rules_are_named_once_and_used() -> None:
    """A rule that nobody asks is no rule; two of one name would be one too many."""
    rules = {
        name: each
        for module in (gpu_rules, wgmma_rules)
        for name, each in vars(module).items()
        if isinstance(each, Rule)
    }
    assert len({each.name for each in rules.values()}) == len(rules)
    deciding = [
        TARGETS / folder / f"{name}.py" for folder in ("gpu", "wgmma") for name in ("recipe", "recipes", "model")
    ]
    used = set().union(*(named_in(path) for path in deciding if path.exists()))
    assert set(rules) <= used, set(rules) - used


def test_plan_prints_it(spec_file: Path) -> None:
    short = flashgen("plan", str(spec_file), "--device", "h200")
    assert "recipe: tiles to visit: each block finds them" in short.stdout
    assert "tile order: persistent" in short.stdout
    long = flashgen("plan", str(spec_file), "--device", "h200", "--verbose")
    assert f"measured, {wgmma_rules.PRODUCERS.name}: {wgmma_rules.PRODUCERS.measured}" in long.stdout
    plans = json.loads(flashgen("plan", str(spec_file), "--device", "h200", "--json").stdout)
    decided = [Decision(**each) for each in plans[0]["decisions"]]
    assert {"dQ", "staging", "roles", "tile order", "overlap"} <= {each.question for each in decided}
    assert "forward, f16 and bf16" in gathered(decided).values()


def test_other_types_are_decided_by_themselves(spec_file: Path) -> None:
    """Float32 has no products of warpgroups, and says so."""
    (variant,) = (analyse(each, each.head_dims[0]) for each in read_file(spec_file).specs)
    plan = target_named("sm_90a").plan(variant)
    assert isinstance(plan, GpuPlan)
    assert not plan.by_element[ElementType.F32].forward.tensor_copies
    (products,) = (each for each in plan.decided("forward, f32") if each.question == "products")
    assert "mma.sync" in products.choice


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "plain.attn"
    path.write_text("attention plain {\n    head_dim 64\n    mask causal\n}\n", encoding="utf-8")
    return path
