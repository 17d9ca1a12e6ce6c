"""What kernels keep for each diagonal is floats, whatever a score makes of them: bools, ints, indices, conditions."""

from __future__ import annotations

import random

import pytest

from flashgen.analysis.diagonals import diagonal_values, over_diagonals
from flashgen.analysis.variant import analyse
from flashgen.diagnostics import SpecError
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.language import parse_text
from flashgen.targets.gpu.diagonals import diagonal_numbers
from tests.emit.expressions import Writer
from tests.emit.syntax import assert_compiles_for_cpus, assert_compiles_for_gpus

TENSORS = (
    "tensor rel: f32[Nq + Nk] grad tensor slope: f32[H] grad tensor row: f32[Nq] grad tensor kind: i32[Nq + Nk] "
    "tensor flag: bool[Nq + Nk] tensor table: f32[H, 64] grad tensor p: f32[Nq, Nk] grad "
)
FOUND = (
    "score s - row[j] * clamp(slope[h] * (i - j), 0, 4)",
    "score where(rel[i - j + Nk] > 0, s, s + p[i, j])",
    "score s * (1 if log(1 + abs(i - j)) < 2.0 else tanh(s))",
    "score s + cos(clamp(rel[i - j + Nk], -2, 3.5) + ceil(table[h, j])) layout block 32: not (h <= J or H < -8)",
    "score s + table[h, int(9 * log(1 + abs(i - j))) + j]",
)


def drawn(seed: int) -> AttentionSpec:
    """A spec whose score takes functions of the distance apart; another where that one is refused."""
    rng = random.Random(seed)
    writer = Writer(
        rng,
        floats=("rel[i - j + Nk]", "slope[h]", "log(1 + abs(i - j))", "row[i]", "float(i - j)"),
        ints=("i - j", "j - i + 3", "kind[abs(i - j)]", "j"),
        bools=("i < j", "flag[j - i + Nk]", "row[i] > 0.5", "rel[i - j + Nk] > 0"),
        reads=("table[h, {}]",),
    )
    score = " + ".join(f"0.001 * {writer.number(3)}" for _ in range(3))
    text = f"attention drawn {{ head_dim 16 dtype f32 {TENSORS} {' '.join(writer.shared)} score s + {score} }}"
    try:
        return parse_text(text).specs[0]
    except SpecError:
        return drawn(seed + 1000)


@pytest.mark.parametrize("part", range(4))
def test_kept_values_are_floats(part: int) -> None:
    kept = 0
    for seed in range(25 * part, 25 * (part + 1)):
        spec = drawn(seed)
        variant = analyse(spec, spec.head_dims[0])
        found = (*diagonal_values(over_diagonals(variant)), *diagonal_numbers(variant))
        assert all(each.type is ScalarType.FLOAT for each in found), spec.sources[0].text
        kept += len(found)
    assert kept > 100


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_conditions_on_kept_values_compile(number: int) -> None:
    spec = parse_text(f"attention found {{ head_dim 16 dtype f32 {TENSORS} {FOUND[number]} }}").specs[0]
    assert_compiles_for_cpus(spec)
    assert_compiles_for_gpus(spec)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_scores_compile(seed: int) -> None:
    assert_compiles_for_cpus(drawn(seed))


@pytest.mark.parametrize("seed", range(20, 22))
def test_drawn_scores_compile_for_gpus(seed: int) -> None:
    assert_compiles_for_gpus(drawn(seed))
