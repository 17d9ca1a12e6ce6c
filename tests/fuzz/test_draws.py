"""What is drawn: legal, all of the language, the same for the same seed; and what is cut down."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

import flashgen
from flashgen.diagnostics import SpecError
from flashgen.ir.expr import Apply, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.weights import FORMS
from flashgen.language import parse_text
from tools.fuzz.draws import VIEWS, CallDraw, Draw, Machine, draw, pins_of
from tools.fuzz.expressions import uses
from tools.fuzz.inputs import arguments
from tools.fuzz.nodes import SpecDraw
from tools.fuzz.running import run
from tools.fuzz.shrink import shrink, size_of

CPU = Machine("cpu")
SEEDS = range(2100)  # so many that the rarest operator is drawn, whatever rows are added


def spec_of(drawn: Draw) -> SpecDraw:
    assert drawn.spec is not None
    return drawn.spec


@pytest.fixture(scope="module")
def drawn() -> list[Draw]:
    return [draw(seed, CPU) for seed in SEEDS]


@pytest.fixture(scope="module")
def parsed(drawn: list[Draw]) -> list[AttentionSpec]:
    found = []
    for each in drawn:
        try:
            found.append(parse_text(each.case.text).specs[0])
        except SpecError:
            continue
    return found


def test_a_seed_is_a_draw() -> None:
    for machine in (CPU, Machine("emulator", "sm_90a")):
        assert [draw(seed, machine) for seed in range(20)] == [draw(seed, machine) for seed in range(20)]
    assert draw(1, CPU) != draw(2, CPU)


def test_drawn_specs_are_legal(parsed: list[AttentionSpec]) -> None:
    """All but a few, which are refused for what only the compiler can tell, as a constant that is divided by zero."""
    assert len(parsed) > 0.97 * len(SEEDS)


def test_every_operator_is_drawn(parsed: list[AttentionSpec]) -> None:
    seen: set[str] = set()
    for spec in parsed:
        weights = spec.weights.expression
        roots = [spec.score, spec.mask, *([weights] if weights is not None else [])]
        seen |= {node.op for node in walk(*roots) if isinstance(node, Apply)}
    assert seen == set(OPERATORS)


def test_every_operator_of_the_table_has_a_use() -> None:
    assert {use.operator.name for choices in uses().values() for each in choices for use in each} == set(OPERATORS)


def test_every_statement_is_drawn(drawn: list[Draw], parsed: list[AttentionSpec]) -> None:
    words = Counter(each.word for one in drawn for each in (*spec_of(one).statements, *spec_of(one).definitions))
    expected = [*("const", "param", "tensor", "let", "scale", "score", "mask", "layout", "weights", "dropout")]
    expected += ["schedule", "dtype", "def"]
    assert all(words[word] > 3 for word in expected), words
    assert {spec.weights.form.name for spec in parsed} == set(FORMS)
    assert any(spec.weights.sink is not None for spec in parsed)
    emptying = ("i % 5 != 0", "causal_lower_right", "i < 0 and j > i", "j < Nk // 2")
    texts = [str(spec_of(one)) for one in drawn]
    assert any(mask in text and "sink =" in text for text in texts for mask in emptying), "rows of sinks without keys"
    elements = {str(tensor.element) for spec in parsed for tensor in spec.tensors}
    assert elements == {"f32", "bf16", "f16", "i32", "i64", "bool"}


def test_every_kind_of_call_is_drawn(drawn: list[Draw]) -> None:
    calls = [call for each in drawn for call in each.calls]
    assert {view for call in calls for _, view in call.views} == set(VIEWS)
    assert {call.dtype for call in calls} == {"f32", "bf16", "f16"}
    assert any(0 in call.shape for call in calls)
    assert any(call.shape[1] > call.shape[2] for call in calls)
    assert any(any(call.starts) and call.totals for call in calls)
    assert any(call.extremes for call in calls)
    head_dims = {int(n) for each in drawn for n in re.findall(r"\d+", spec_of(each).head_dim)}
    assert {1, 512, 576} <= head_dims


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_pins_for_the_kernels_of_a_gpu(target: str) -> None:
    pins = {
        str(each)
        for n in range(200)
        for each in spec_of(draw(n, Machine("emulator", target))).statements
        if each.word == "schedule"
    }
    assert all(any(each in text for text in pins) for each in pins_of(Machine("emulator", target)))
    tuned = {text for text in pins if not any(each and each in text for each in pins_of(Machine("emulator", target)))}
    assert len(tuned) > 10


def test_a_failure_is_cut_down_to_what_fails(drawn: list[Draw]) -> None:
    """Without a compiler: whatever contains a hash 'fails'."""
    failing = [each for each in drawn if "hash(" in each.case.text][:8]
    for each in failing:
        smallest = shrink(each, lambda tried: "hash(" in tried.case.text, 2000)
        assert "hash(" in smallest.case.text
        assert len(spec_of(smallest).statements) <= 2, smallest.case.text
        assert size_of(smallest) <= 12, smallest.case.text
        (call,) = smallest.calls
        assert (call.views, call.shape[:3], call.dtype) == ((), (1, 1, 1), "f32")


def test_what_is_cut_down_stays_legal(drawn: list[Draw]) -> None:
    """Every text that cutting down asks for is one that the parser takes, nearly always."""
    refused = asked = 0
    for each in drawn[:6]:
        texts: set[str] = set()

        def fails(tried: Draw, texts: set[str] = texts) -> bool:
            texts.add(tried.case.text)
            return len(texts) % 3 == 0

        shrink(replace(each, calls=each.calls[:1]), fails, 150)
        for text in texts:
            asked += 1
            try:
                parse_text(text)
            except SpecError:
                refused += 1
    assert asked > 100
    assert refused < 0.2 * asked


def test_what_is_normalised_stays_positive(drawn: list[Draw]) -> None:
    """``normalize`` is of what is never negative: a failure of less is another one."""
    words = "weights normalize("
    some = [each for each in drawn if words in each.case.text][:4]
    assert some
    for each in some:
        seen: list[str] = []

        def fails(tried: Draw, seen: list[str] = seen) -> bool:
            seen.append(tried.case.text)
            return words in tried.case.text

        smallest = shrink(each, fails, 2000)
        assert f"{words}0.0)" in smallest.case.text, smallest.case.text
        assert not any(re.search(r"weights normalize\(\(?-", text) for text in seen)


def test_ragged_batches_are_drawn_and_cut_down(drawn: list[Draw]) -> None:
    """Empty sequences, single rows, other lengths of queries and keys, views; a failure keeps the one that fails."""
    ragged = [call for each in drawn for call in each.calls if call.lengths]
    assert len(ragged) > 0.2 * sum(len(each.calls) for each in drawn)
    seen = {lengths for call in ragged for lengths in call.lengths}
    assert {(0, 0), (1, 1)} <= seen
    assert any(q == 0 < k for q, k in seen)
    assert any(k == 0 < q for q, k in seen)
    assert any(call.views for call in ragged)
    assert all(call.shape[0] == len(call.lengths) for call in ragged)
    assert any(call.lengths for each in range(50) for call in draw(each, Machine("emulator", "sm_80")).calls)
    first = next(each for each in drawn if any((33, 33) in call.lengths for call in each.calls))
    small = shrink(first, lambda each: any((33, 33) in call.lengths for call in each.calls), 2000)
    assert [call.lengths for call in small.calls] == [((33, 33),)]


def test_caches_are_drawn_and_cut_down(drawn: list[Draw]) -> None:
    """In entries and pages, padded and empty but for that, with rows to write and parts of the keys."""
    calls = [call for each in drawn for call in each.calls if call.cached]
    assert len(calls) > 0.15 * sum(len(each.calls) for each in drawn)
    assert {0, 1, 3, 16, 64, 256} == {call.page for call in calls}
    assert {call.shape[3] for call in calls} > {1, 2, 17}
    assert any(length == padding for call in calls for length, padding in call.cached)
    assert any(0 < padding < length for call in calls for length, padding in call.cached)
    assert any(call.new and call.views for call in calls)
    assert any(call.splits and call.spare for call in calls)
    for call in calls:
        batch, _, _, queries, room = call.shape
        assert batch == len(call.cached)
        assert room % max(1, call.page) == 0
        assert all(queries <= length <= room and 0 <= padding <= length for length, padding in call.cached)
        assert call.new <= min(length for length, _ in call.cached)
    assert any(call.cached for each in range(50) for call in draw(each, Machine("emulator", "sm_80")).calls)
    first = next(each for each in drawn if any(call.cached and call.page and call.new for call in each.calls))
    small = shrink(first, lambda each: any(call.cached and call.page for call in each.calls), 2000)
    (call,) = small.calls
    assert (call.shape, call.cached, call.new, call.splits, call.spare) == ((1, 1, 1, 1, call.page), ((1, 0),), 0, 0, 0)


def test_a_cache_holds_nothing_where_nobody_may_read() -> None:
    spec = parse_text("attention a { head_dim 16  mask causal }").specs[0]
    op = flashgen.loads("attention a { head_dim 16  mask causal }", backend="reference")
    call = CallDraw(0, "f32", (1, 2, 1, 1, 1), page=3, new=2, spare=2)
    found = arguments(spec, call.of_cache([(7, 2), (9, 9)], 10, 2))
    assert int(found.inputs.k.isnan().all(-1).sum()) == (2 * 4 + 2) * 3 - 5
    assert run(op, spec, found, call)["o"].isfinite().all()


def test_ragged_batches_are_placed_in_a_whole_by_sequences_and_heads() -> None:
    call = CallDraw(0, "f32", (1, 2, 1, 1, 1), starts=(1, 2, 0, 0), more=(1, 2, 0, 0), totals=True)
    spec = parse_text("attention a { head_dim 16  mask causal }").specs[0]
    found = arguments(spec, call.of_sequences([(3, 4), (0, 2)]))
    op = flashgen.loads("attention a { head_dim 16  mask causal }", backend="reference")
    assert run(op, spec, found, call)["o"].shape == (3, 2, 16)
