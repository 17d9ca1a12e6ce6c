"""Text to syntax: spans, statements, recovery, limits."""

import pytest

from flashgen.diagnostics import Source, Span
from flashgen.language import syntax
from flashgen.language.parser import Parsed, parse
from flashgen.language.report import MAX_ERRORS
from tests.language.helpers import tree


def read(text: str) -> Parsed:
    return parse(Source("x", text))


def statements(text: str) -> tuple[syntax.Statement, ...]:
    parsed = read(f"attention a {{{text}}}")
    assert not parsed.diagnostics
    block = parsed.file.items[0]
    assert isinstance(block, syntax.Attention)
    return block.statements


def kinds(parsed: Parsed) -> list[str]:
    """Keywords of the statements of all blocks, '!' behind the broken ones."""
    return [
        statement.keyword + "!" * isinstance(statement, syntax.Broken)
        for item in parsed.file.items
        if isinstance(item, syntax.Attention)
        for statement in item.statements
    ]


def test_newlines_mean_nothing() -> None:
    one_line = "head_dim 64 dtype f16 score s mask causal weights softmax"
    assert [each.keyword for each in statements(one_line)] == [
        each.keyword for each in statements(one_line.replace(" ", "\n\n # words\n"))
    ]


def test_spans_are_the_smallest() -> None:
    (single,) = statements("score s +\n (t[h, i] * -2)  ")
    assert isinstance(single, syntax.Single)
    assert single.span == Span("x", 1, 14, 2, 16)
    total = single.value
    assert isinstance(total, syntax.Binary)
    assert total.left.span == Span("x", 1, 20, 1, 21)
    assert total.right.span == Span("x", 2, 2, 2, 16)
    assert isinstance(total.right, syntax.Group)
    product = total.right.inner
    assert isinstance(product, syntax.Binary)
    assert product.left.span == Span("x", 2, 3, 2, 10)
    assert product.right.span == Span("x", 2, 13, 2, 15)


def test_every_statement() -> None:
    text = """
    head_dim 64, 192/128   dtype f16, bf16   const c = 3   param p: f32 = 1.0 grad   param n: i32
    tensor t: f32[H, Nq] grad   tensor u: bool[B]   let x = 1   scale 2   score s   mask true
    layout block 2 * 32: I == J   weights softmax(sink = 1.0)   dropout 0.1   schedule { Br = 64 Bc = 2 * 32 }
    schedule { }
    """
    found = statements(text)
    assert [type(each).__name__ for each in found] == [
        *("HeadDims", "Dtypes", "Const", "Param", "Param", "Tensor", "Tensor", "Let"),
        *("Single", "Single", "Single", "Layout", "Single", "Single", "Schedule", "Schedule"),
    ]
    first, second = found[3], found[4]
    assert isinstance(first, syntax.Param)
    assert isinstance(second, syntax.Param)
    assert (first.default is not None, first.grad is not None) == (True, True)
    assert (second.default, second.grad) == (None, None)


def test_words_of_one_place_are_names_everywhere_else() -> None:
    assert len(statements("param grad: f32 = block grad tensor block: f32[grad] let x = grad * block")) == 3


def test_definitions_with_and_without_parameters() -> None:
    parsed = read("def a = 1 def b(x) = x def c(x, y) = x + y def d() = 2")
    assert [
        (item.name.text, None if item.parameters is None else tuple(name.text for name in item.parameters))
        for item in parsed.file.items
        if isinstance(item, syntax.Definition)
    ] == [("a", None), ("b", ("x",)), ("c", ("x", "y")), ("d", ())]


def test_trailing_commas_where_python_has_them() -> None:
    assert isinstance(tree("f(1, 2,)"), syntax.Call)
    assert isinstance(tree("t[1, 2,]"), syntax.Index)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("attention a { score s + mask causal dropout 0.1 }", ["score!", "mask", "dropout"]),
        ("attention a { head_dim 64\n scor s\n mask causal }", ["head_dim", "mask"]),
        ("attention a { score (s mask causal }", ["score!", "mask"]),
        ("attention a { schedule { Br = } mask causal }", ["schedule!", "mask"]),
        ("attention a { schedule { Br = (64 } mask causal }", ["schedule!", "mask"]),
        ("attention a { score s $ 2 # mask\n mask causal }", ["score!", "mask"]),
        ("attention a { let x = } attention b { mask }", ["let!", "mask!"]),
        ("attention a { mask causal attention b { mask causal }", ["mask", "mask"]),
        ("attention a { mask causal } } attention b { mask causal }", ["mask", "mask"]),
        ("attention a mask causal } attention b { mask causal }", ["mask"]),
        ("attention { mask causal } attention b { score s }", ["score"]),
        ("def f( = 3 attention b { score s }", ["score"]),
        ("oops attention b { score s }", ["score"]),
        ("score s attention b { score s }", ["score"]),
        ('import 3 attention b { score "x" mask causal', ["score!", "mask"]),
        ("attention a { tensor t f32[H] score t[h] }", ["tensor!", "score"]),
    ],
)
def test_parsing_goes_on_behind_an_error(text: str, left: list[str]) -> None:
    parsed = read(text)
    assert parsed.diagnostics
    assert kinds(parsed) == left


def test_what_a_broken_statement_would_have_declared() -> None:
    (block,) = read("attention a { tensor t f32[H] const c 3 let = 4 }").file.items
    assert isinstance(block, syntax.Attention)
    names = [each.name and each.name.text for each in block.statements if isinstance(each, syntax.Broken)]
    assert names == ["t", "c", None]


def test_each_error_is_reported_once() -> None:
    parsed = read("attention a { score s + mask (causal let x = 3 schedule { Br 3 } }")
    assert [each.code for each in parsed.diagnostics] == ["E006", "E007", "E006"]


def test_errors_are_cut_off_at_a_number_that_a_person_can_read() -> None:
    parsed = read("attention a { " + "score $\n" * 1000 + "}")
    assert len(parsed.diagnostics) == MAX_ERRORS + 1
    assert parsed.diagnostics[-1].code == "E010"
    assert parsed.file.items == ()
