"""Which numbers of a score are functions of the distance, and which only look like it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.analysis.diagonals import diagonal_values, over_diagonals
from flashgen.analysis.levels import Level
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import literal
from flashgen.ir.text import text
from flashgen.language import parse_text

TENSORS = """
    tensor slope: f32[H] grad
    tensor table: f32[H, 64] grad
    tensor bucket: i32[64]
    tensor bias: f32[Nq, Nk] grad
"""


def of(score: str, rest: str = "") -> Variant:
    """The variant of a spec with this score, over diagonals. That of a softmax would be in base 2."""
    spec = parse_text(f"attention a {{ head_dim 64 {TENSORS} score {score} weights sigmoid(s) {rest} }}").specs[0]
    return over_diagonals(analyse(spec, spec.head_dims[0]))


@pytest.mark.parametrize(
    ("score", "values"),
    [
        ("s - slope[h] * (i - j)", ["slope[h] * distance"]),
        ("s + table[h, clamp(j - i, 0, 63)]", ["table[h, clamp(-distance, 0, 63)]"]),
        ("s + table[h, clamp(Nk + i + 3 - j, 0, 63)]", ["table[h, clamp(distance + Nk + 3, 0, 63)]"]),
        ("s + table[h, bucket[min(abs(i - j), 63)]]", ["table[h, bucket[min(abs(distance), 63)]]"]),
        ("s + (log1p(i - j) if i > j else 0.5)", ["log1p(distance) if distance > 0 else 0.5"]),
        ("s + (log1p(i - j) if j < i else 0.5)", ["log1p(distance) if 0 < distance else 0.5"]),
        ("s * sin(i - j) - slope[h] * abs(i - j)", ["sin(distance)", "slope[h] * abs(distance)"]),
        # Something of the pair is left in each of these.
        ("s + table[h, (i + j) % 64]", []),
        ("s + table[h, abs(i // 8 - j // 8) % 64]", []),
        ("s + table[h, clamp(i - j + i, 0, 63)]", []),
        ("s + table[h, clamp(2 * i - j, 0, 63)]", []),
        ("s + bias[i, j]", []),
        ("s + (1.0 if i == 0 or i > j else 0.5)", []),
    ],
)
def test_what_a_kernel_keeps_for_each_diagonal(score: str, values: list[str]) -> None:
    of_score = replace(of(score), score_by_dot=literal(1.0), gradients=())
    assert [text(each) for each in diagonal_values(of_score)] == values


def test_of_a_mixed_number_only_the_part_is() -> None:
    variant = of("s + exp(bias[i, j] * log1p(abs(i - j)))")
    assert [text(each) for each in diagonal_values(variant)] == ["log1p(abs(distance))"]


def test_derivatives_are_kept_beside_the_score() -> None:
    variant = of("s * sin(i - j) - slope[h] * (i - j)")
    kept = {text(each) for each in diagonal_values(variant)}
    assert kept == {"sin(distance)", "slope[h] * distance", "0.125 * sin(distance)", "-float(distance)"}


def test_reads_by_distance_receive_their_gradient_by_diagonals() -> None:
    variant = of("s + table[h, clamp(i - j, 0, 63)] + bias[i, j] - slope[h] * abs(i - j)")
    levels = {each.name: each.level for each in variant.gradients}
    assert levels == {"table": Level.DIAGONAL, "bias": Level.PAIR, "slope": Level.HEAD}


def test_the_mask_stays_over_positions() -> None:
    variant = of("s + table[h, i - j]", "mask causal and i - j < 64")
    assert text(variant.keep) == text(analyse(variant.spec, variant.head_dim).keep)
    assert [text(each) for each in diagonal_values(variant)] == ["table[h, distance]"]


def test_a_proof_goes_with_its_read() -> None:
    """What the conditions prove is clamped where they do not hold, over distances as over positions."""
    clamps = {text(proof.load): proof.clamp for proof in of("s + table[h, i - j]", "mask causal and i - j < 64").proofs}
    assert clamps["table[h, distance]"] == clamps["table[h, i - j]"]
    assert clamps["table[h, distance]"]


def test_nothing_else_is_changed() -> None:
    spec = parse_text("attention plain { head_dim 64 mask causal }").specs[0]
    variant = analyse(spec, spec.head_dims[0])
    assert over_diagonals(variant) == variant


def test_equal_specs_keep_their_own_texts() -> None:
    plain = "attention same { head_dim 16  score s - abs(i - j) }"
    written = [plain, f"# With a comment\n{plain}"]
    variants = [analyse(spec, spec.head_dims[0]) for each in written for spec in parse_text(each).specs]
    assert variants[0] == variants[1]
    assert [over_diagonals(variant).spec.sources[0].text for variant in variants] == written
