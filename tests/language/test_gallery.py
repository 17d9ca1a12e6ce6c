"""Every spec of the gallery: no error, no warning, the right facts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashgen.ir.expr import Expr, Load, index_set, walk
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text
from flashgen.ir.weights import NORMALIZE, POINTWISE
from flashgen.language import parse_file

SPECS = Path(__file__).parents[2] / "specs"
FILES = sorted(SPECS.glob("*.attn"))
CONTRACT = [
    *("causal", "alibi", "packed_documents", "t5", "sparse_butterfly", "gpt_oss", "sigmoid_attention"),
    *("gaussian_regression", "hstu", "swin", "evoformer", "forgetting", "gemma2_local"),
]


def load(name: str) -> AttentionSpec:
    (spec,) = parse_file(SPECS / f"{name}.attn").specs
    return spec


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_parses_without_errors_or_warnings(path: Path) -> None:
    file = parse_file(path)
    assert file.warnings == ()
    assert [spec.name for spec in file.specs] == [path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_opened_by_its_formula_and_where_it_comes_from(path: Path) -> None:
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment
    assert comment[0].startswith(f"# {path.stem}: ")
    assert comment[0].count("\n") >= 2


def test_the_specs_of_the_contract_are_there() -> None:
    assert set(CONTRACT) <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_printed_reads_back(path: Path) -> None:
    spec = load(path.stem)
    assert text(spec.score)
    assert text(spec.mask)


FACTS = {
    # name: (head dims, score, mask)
    "alibi": ("64", "s - slope[h] * (i - j)", "j <= i"),
    "packed_documents": ("128", "s", "j <= i and doc[b, i] == doc[b, j]"),
    "gpt_oss": ("64", "s", "j <= i and i - j < 128"),
    "gemma2_local": ("256", "50.0 * tanh(s / 50.0)", "j <= i and i - j < 4096"),
    "gaussian_regression": ("64", "-sqdist / (2.0 * ell * ell)", "true"),
    "hstu": ("64", "s + bias[h, i - j + Nk - 1]", "j <= i"),
    "evoformer": ("32", "s + pair[b // 128, h, i, j]", "valid[b, j]"),
    "forgetting": ("128", "s + F[b, h, i] - F[b, h, j]", "j <= i"),
    "mla": ("192/128", "s", "j <= i"),
    "prefix_lm": ("64, 128", "s", "j <= i or j < length[b]"),
    "streaming_llm": ("128", "s", "j <= i and (j < 4 or i - j < 1020)"),
    "chunked": ("128", "s", "j <= i and i // 8192 == j // 8192"),
    "decode": ("64, 128", "s", "j <= i + Nk - Nq"),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    spec = load(name)
    assert (", ".join(map(str, spec.head_dims)), text(spec.score), text(spec.mask)) == FACTS[name]


def test_weights_of_the_gallery() -> None:
    kinds = {path.stem: load(path.stem).weights.form for path in FILES}
    assert {name for name, kind in kinds.items() if kind is POINTWISE} == {
        "hstu",
        "relu_attention",
        "sigmoid_attention",
    }
    assert {name for name, kind in kinds.items() if kind is NORMALIZE} == {"exp_kernel", "relu2_normalized"}
    sinks = [path.stem for path in FILES if load(path.stem).weights.sink is not None]
    assert sinks == ["gpt_oss"]


def loads(expr: Expr) -> dict[str, frozenset[str]]:
    """The index sets with which tensors are read."""
    found: dict[str, frozenset[str]] = {}
    for node in walk(expr):
        if isinstance(node, Load):
            found[node.tensor] = found.get(node.tensor, frozenset()) | index_set(node)
    return found


def test_index_sets() -> None:
    assert loads(load("alibi").score) == {"slope": frozenset("h")}
    assert loads(load("t5").score) == {"table": frozenset("hij")}
    assert loads(load("forgetting").score) == {"F": frozenset("bhij")}
    assert loads(load("evoformer").score) == {"pair": frozenset("bhij")}


def test_t5_shares_its_let() -> None:
    table = next(node for node in walk(load("t5").score) if isinstance(node, Load))
    condition, near, _ = table.indices[0].children
    assert condition.children[0] is near


def test_overrides_reach_the_gallery() -> None:
    (spec,) = parse_file(SPECS / "gemma2_local.attn", {"window": 128, "cap": 30}).specs
    assert spec.constants == (("window", 128), ("cap", 30.0))
    assert text(spec.mask) == "j <= i and i - j < 128"


def test_a_spec_is_the_same_every_time() -> None:
    for path in FILES:
        assert parse_file(path) == parse_file(path)
