"""Statements to the parts of a spec."""

from __future__ import annotations

import pytest

from flashgen.ir.expr import Literal, Symbol, SymbolKind, index_set, literal, score_input, size, walk
from flashgen.ir.spec import HeadDim, Schedule
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import NORMALIZE, POINTWISE, SOFTMAX, Weights
from flashgen.language import parse_text
from tests.language.helpers import codes, codes_of, mask, score, spec


def test_what_is_left_out() -> None:
    found = spec("")
    assert found.head_dims == (HeadDim(64, 64),)
    assert found.dtypes is None
    assert found.scale == spec("scale 1 / sqrt(D)").scale
    assert found.score == score_input("s")
    assert found.mask == literal(True)
    assert (found.layout, found.dropout) == (None, None)
    assert found.weights == Weights()
    assert found.schedule == Schedule()
    assert (found.constants, found.params, found.tensors) == ((), (), ())


def test_head_dims() -> None:
    found = parse_text("attention a { const d = 32 head_dim 1, 512, d * 2, 192/128, d/(d // 2), (d * 3) }").specs[0]
    assert list(map(str, found.head_dims)) == ["1", "512", "64", "192/128", "32/16", "96"]


def test_dtypes() -> None:
    assert spec("dtype bf16, f32").dtypes == (ElementType.BF16, ElementType.F32)


def test_sizes_are_symbols() -> None:
    assert spec("score s / sqrt(Dv) * D").score.children[1].children[0] == size("D")
    assert mask("hkv == 0").children[0] == Symbol(ScalarType.INT, name="hkv", kind=SymbolKind.INDEX)


def test_params() -> None:
    found = spec(
        "param n: i32 = Nk // 2   param x: f32 = 3 grad   param y: f32 = x * n   param z: f32\nscore s * x * y * z + n"
    )
    assert [(each.name, each.type, each.grad) for each in found.params] == [
        ("n", ScalarType.INT, False),
        ("x", ScalarType.FLOAT, True),
        ("y", ScalarType.FLOAT, False),
        ("z", ScalarType.FLOAT, False),
    ]
    assert found.params[1].default == literal(3.0)
    assert found.params[3].default is None


def test_tensors_see_later_constants_and_earlier_lets() -> None:
    found = spec("let m = 2 * Nk - 1 tensor t: bf16[H, m, side] grad const side = 7 score s + t[h, i, 0]")
    (tensor,) = found.tensors
    assert (tensor.name, tensor.element, tensor.grad) == ("t", ElementType.BF16, True)
    assert tensor.shape[0] == size("H")
    assert tensor.shape[2] == literal(7)


@pytest.mark.parametrize(
    ("kind", "scalar"),
    [("f32", "float"), ("f16", "float"), ("bf16", "float"), ("i32", "int"), ("i64", "int"), ("bool", "bool")],
)
def test_elements_of_tensors(kind: str, scalar: str) -> None:
    use = "where(t[h], s, 0)" if kind == "bool" else "s + t[h]"
    loads = [node for node in walk(spec(f"tensor t: {kind}[H] score {use}").score) if hasattr(node, "tensor")]
    assert [str(load.type) for load in loads] == [scalar]


def test_a_let_that_is_used_twice_is_one_object() -> None:
    found = spec("let n = max(i - j, 0) score s + n * n").score
    product = found.children[1].children[0]
    assert product.children[0] is product.children[1]


def test_an_argument_that_is_used_twice_is_one_object() -> None:
    product = score("s * square(i - j)", before="def square(x) = x * x").children[1].children[0]
    assert product.children[0] is product.children[1]


def test_an_int_stands_for_a_float() -> None:
    found = spec("scale 1 score i dropout 0 weights softmax(sink = h)")
    assert found.scale == literal(1.0)
    assert found.score.type is ScalarType.FLOAT
    assert found.dropout == literal(0.0)
    assert found.weights.form == SOFTMAX
    assert found.weights.sink is not None
    assert found.weights.sink.type is ScalarType.FLOAT


def test_weights() -> None:
    assert spec("weights softmax").weights == Weights()
    assert spec("weights sigmoid(s)").weights.form == POINTWISE
    assert spec("weights normalize(exp(s))").weights.form == NORMALIZE
    assert spec("weights silu(s) / (i + 1)").weights.form == POINTWISE
    sink = spec("tensor t: f32[H, Nq] grad weights softmax(sink = t[h, i])").weights
    assert sink.form == SOFTMAX
    assert sink.sink is not None
    assert index_set(sink.sink) == {"h", "i"}


def test_layout() -> None:
    found = spec("const side = 2**6 layout block side * 2: I == J and h > 0").layout
    assert found is not None
    assert found.block == 128
    assert index_set(found.keep) == {"h", "i", "j"}


def test_dropout() -> None:
    assert spec("dropout 0.1").dropout == literal(0.1)
    assert spec("const p = 0.5 dropout p / 2").dropout == literal(0.25)
    param = spec("param p: f32 dropout p").dropout
    assert param == Symbol(ScalarType.FLOAT, name="p", kind=SymbolKind.PARAM)


def test_schedule() -> None:
    found = spec("schedule { Br = 64 Bc = 2 * 32 backward_stages = 1 }").schedule
    assert found == Schedule(Br=64, Bc=64, backward_stages=1)
    assert found.span is not None


def test_statements_as_written() -> None:
    found = spec("score s +  # a comment\n\n  1\nmask causal")
    assert [(each.keyword, each.text) for each in found.statements] == [
        ("head_dim", "head_dim 64"),
        ("score", "score s + 1"),
        ("mask", "mask causal"),
    ]


def test_constant_conditions_choose() -> None:
    body = "const on = {} tensor t: f32[H] score s + t[h] if on else s"
    assert spec(body.format("false")).score == score_input("s")
    assert spec(body.format("true")).score == spec("tensor t: f32[H] score s + t[h]").score


def test_spans_point_into_the_users_text() -> None:
    found = spec("tensor doc: i32[B, Nk] mask same_document(doc)")
    for node in walk(found.mask):
        assert node.span is not None
        assert node.span.file == "<text>"
        assert node.span.line == 3


# --- names


def test_names_of_functions_and_of_values_are_apart() -> None:
    found = spec("const window = 4 tensor min: f32[H] mask window(window) score min(s, min[h])")
    assert found.mask == mask("abs(i - j) <= 4")


def test_hygiene() -> None:
    before = "def shifted(i) = i + j\ndef twice(n) = shifted(n) + shifted(n)"
    assert score("s + twice(h)", before) == score("s + ((h + j) + (h + j))")
    assert codes("def f(x) = x + n\nattention a { head_dim 64 let n = 1 score s + f(n) }") == ["E101"]


def test_definitions_in_any_order_see_each_other() -> None:
    before = "def one(x) = two(x) + c\ndef two(x) = x * 2\ndef c = 1"
    assert score("one(s)", before) == score("s * 2 + 1")


def test_tensors_pass_through_definitions() -> None:
    before = "def at(t, x) = t[h, x]\ndef both(t) = at(t, i) - at((t), j)"
    body = "tensor F: f32[H, Nk] score s + "
    assert spec(body + "both(F)", before=before).score == spec(body + "(F[h, i] - F[h, j])").score


def test_a_let_with_the_score_means_the_score_of_its_place() -> None:
    found = spec("let x = s * 2 score x weights sigmoid(x)")
    assert found.weights.form == POINTWISE
    assert found.weights.weight == spec("weights sigmoid(s * 2)").weights.weight


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("score s + n let n = 1", "E107"),
        ("let n = n", "E107"),
        ("tensor t: f32[m] let m = 2 * Nk score s + t[0]", "E107"),
        ("param x: f32 = y param y: f32 score s * x * y", "E107"),
        ("param x: f32 = x score s * x", "E107"),
        ("mask s > 0", "E108"),
        ("mask dot > 0", "E108"),
        ("mask I == J", "E108"),
        ("score s + I", "E108"),
        ("layout block 64: i == j", "E108"),
        ("layout block 64: s > 0", "E108"),
        ("weights dot", "E108"),
        ("weights softmax(sink = s)", "E108"),
        ("weights softmax(sink = j)", "E108"),
        ("scale i", "E108"),
        ("scale s", "E108"),
        ("tensor t: f32[h] score s + t[0]", "E108"),
        ("tensor t: f32[H] dropout t[0]", "E108"),
        ("param x: f32 = h score s * x", "E108"),
        ("dropout Nk", "E108"),
        ("layout block 64: I == J weights sigmoid(s) mask x let x = I > 0", "E107"),
        ("let x = I > 0 mask x", "E108"),
        ("head_dim 32", "E302"),
        ("let x = 1 let x = 2 score s + x", "E104"),
        ("param causal: f32 score s * causal", "E105"),
        ("tensor k: f32[H] score s + k[h]", "E111"),
        ("tensor None: f32[H] score s + None[h]", "E111"),
    ],
)
def test_refused(body: str, code: str) -> None:
    assert set(codes_of(body)) == {code}


def test_the_first_of_two_definitions_counts() -> None:
    assert codes_of("const x = 1 const x = true score s * x") == ["E104"]


def test_every_mistake_of_a_block_is_reported() -> None:
    body = "dtype f8 scale i score s + a mask b1 + 1 weights c dropout 2 layout block 0: true"
    assert codes_of(body) == ["E110", "E108", "E101", "E101", "E101", "E305", "E309"]


def test_blocks_do_not_see_each_other() -> None:
    text = "attention a { head_dim 64 const c = 1 score s * c } attention b { head_dim 64 score s * c }"
    assert codes(text) == ["E101"]


def test_several_blocks() -> None:
    found = parse_text("attention a { head_dim 64 } attention b { head_dim 32 }")
    assert [each.name for each in found.specs] == ["a", "b"]


# --- limits


def test_a_sum_within_the_limits() -> None:
    assert spec("score s" + " + 1" * 100).score.depth == 101


@pytest.mark.parametrize(
    "body",
    [
        "score s" + " + i" * 119,
        "score s" + "".join(f" * exp({k} * s)" for k in range(110)),
        "score " + "exp(" * 119 + "s" + ")" * 119,
        "score i" + " + 1" * 119,
        "score " + "(" * 100 + "s" + ")" * 100,
    ],
)
def test_at_the_limit_there_is_a_spec_or_a_diagnostic(body: str) -> None:
    assert codes_of(body) in ([], ["E308"])


def test_literals_hold_floats_for_floats() -> None:
    literals = [node for node in walk(spec("score s * 2 + 1").score) if isinstance(node, Literal)]
    assert all(isinstance(node.value, float) for node in literals)


def test_what_uses_an_unsound_definition_is_left_out_quietly() -> None:
    text = "def f(x) = x + nope\nattention a {{ {} }}"
    for body in ("head_dim f(1)", "head_dim 64 score f(s) mask f(i) > 0 scale f(1) dropout f(0) weights f(s)"):
        assert codes(text.format(body)) == ["E101"]


def test_a_definition_without_parameters_is_written_out_once_a_statement() -> None:
    before = "def d0 = i\n" + "".join(f"def d{n} = d{n - 1} - d{n - 1} + 1\n" for n in range(1, 8))
    found = mask("d7 > 0", before=before)
    assert len(list(walk(found))) < 30
    assert found == mask("d7 > 0", before=before)
