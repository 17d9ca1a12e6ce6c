"""Python itself is the judge of structure and value."""

from __future__ import annotations

import ast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashgen.diagnostics import SpecError
from flashgen.ir.expr import Expr
from flashgen.ir.text import text as printed
from flashgen.language import syntax
from tests.language.helpers import constant, mask, score, spec, tree

OPERATORS = ["or", "and", "|", "^", "&", "<<", ">>", "+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">"]
PYTHON = {
    ast.Or: "or",
    ast.And: "and",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def ours(node: syntax.Expression) -> object:
    """Our tree as nested tuples, groups left out."""
    match node:
        case syntax.Group(inner=inner):
            return ours(inner)
        case syntax.Binary(operator="and" | "or" as word, left=left, right=right):
            return (word, ours(left), ours(right))
        case syntax.Unary(operator=sign, operand=operand):
            return (sign, ours(operand))
        case syntax.Binary(operator=sign, left=left, right=right):
            return (sign, ours(left), ours(right))
        case syntax.Compare(operands=operands, operators=signs):
            return ("compare", signs, *map(ours, operands))
        case syntax.Conditional(yes=yes, condition=condition, no=no):
            return ("if", ours(condition), ours(yes), ours(no))
        case syntax.Index(base=base, indices=indices):
            return ("index", ours(base), *map(ours, indices))
        case syntax.Call(callee=callee, arguments=arguments):
            return ("call", ours(callee), *map(ours, arguments))
        case syntax.Reference(name=name):
            return name
        case syntax.Number(text=text):
            return ast.literal_eval(text)
        case syntax.Boolean(value=value):
            return str(value)
    raise AssertionError(node)


def pythons(node: ast.expr) -> object:
    """Python's tree in the same form; its chains of 'and' and 'or' as pairs."""
    match node:
        case ast.BoolOp(op=op, values=[first, *rest]):
            whole = pythons(first)
            for value in rest:
                whole = (PYTHON[type(op)], whole, pythons(value))
            return whole
        case ast.UnaryOp(op=op, operand=operand):
            return ("-" if isinstance(op, ast.USub) else "not", pythons(operand))
        case ast.BinOp(op=op, left=left, right=right):
            return (PYTHON[type(op)], pythons(left), pythons(right))
        case ast.Compare(left=left, ops=ops, comparators=others):
            signs = tuple(PYTHON[type(op)] for op in ops)
            return ("compare", signs, pythons(left), *map(pythons, others))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ("if", pythons(test), pythons(body), pythons(orelse))
        case ast.Subscript(value=value, slice=ast.Tuple(elts=indices)):
            return ("index", pythons(value), *map(pythons, indices))
        case ast.Subscript(value=value, slice=index):
            return ("index", pythons(value), pythons(index))
        case ast.Call(func=func, args=arguments):
            return ("call", pythons(func), *map(pythons, arguments))
        case ast.Name(id=name):
            return name
        case ast.Constant(value=value):
            return value
    raise AssertionError(ast.dump(node))


NUMBERS = st.sampled_from(["3", "0x1f", "1_000", "1e-3", ".5", "2.", "0", "00", "0b11", "1_0.2_5e+1_0"])
ATOMS = st.one_of(st.sampled_from(["s", "i", "Nk", "t[h]", "t[h, i - j]", "f(x)", "f(x, 2)"]), NUMBERS)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("({})".format, inner),
        st.builds("-{}".format, inner),
        st.builds("not {}".format, inner),
        st.builds("{} if {} else {}".format, inner, inner, inner),
        st.builds("t[{}, {}]".format, inner, inner),
        st.builds("max({}, {})".format, inner, inner),
        st.builds("({})[{}]".format, inner, inner),
    )


@given(st.recursive(ATOMS, grown, max_leaves=14))
@example("2 ** -1 ** 2")
@example("-2 ** 2")
@example("not a == b")
@example("a < b < c == d")
@example("a if b else c if d else e")
@example("a if (b if c else d) else e")
@example("- - 1 ** - - 2")
@example("a << b + c & d ^ e | f")
@example("(a < b) < c")
def test_structure_is_pythons(text: str) -> None:
    try:
        expected = ast.parse(text, mode="eval").body
    except SyntaxError:  # 'x + not y', and '00' beside a name
        return
    assert ours(tree(text)) == pythons(expected)


INTS = st.one_of(st.integers(0, 40).map(str), st.sampled_from(["0x10", "1_0", "2147483647"]))


def int_grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sign = st.sampled_from(["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>"])
    comparison = st.sampled_from(["<", "<=", "==", "!=", ">", ">="])
    condition = st.one_of(
        st.builds("{} {} {}".format, inner, comparison, inner),
        st.builds("{} {} {} {} {}".format, inner, comparison, inner, comparison, inner),
        st.builds("not ({} {} {})".format, inner, comparison, inner),
    )
    both = st.builds("({}) {} ({})".format, condition, st.sampled_from(["and", "or"]), condition)
    return st.one_of(
        st.builds("{} {} {}".format, inner, sign, inner),
        st.builds("({})".format, inner),
        st.builds("-{}".format, inner),
        st.builds("{} ** {}".format, inner, st.sampled_from(["0", "1", "2", "3"])),
        st.builds("({} if {} else {})".format, inner, st.one_of(condition, both), inner),
        st.builds("max({}, {}, abs({}))".format, inner, inner, inner),
    )


@given(st.recursive(INTS, int_grown, max_leaves=12))
@example("-7 // 2")
@example("-7 % 3")
@example("7 // 0 if 1 < 0 else 2")
@example("2 ** 31")
@example("-2 ** 31")
@example("2 ** 40 // 2 ** 20")
def test_value_is_pythons(text: str) -> None:
    try:
        expected = eval(text, {"__builtins__": {}, "max": max, "abs": abs})
    except (ZeroDivisionError, ValueError, MemoryError):  # division by zero, negative shifts
        with pytest.raises(SpecError):
            constant(text)
        return
    if -(2**31) <= expected < 2**31:
        assert value_or_too_large(text) in (expected, None)
    else:
        with pytest.raises(SpecError) as caught:
            constant(text)
        assert {each.code for each in caught.value.diagnostics} == {"E205"}


def value_or_too_large(text: str) -> object:
    """The value; None where integers were very long on the way."""
    try:
        return constant(text)
    except SpecError as error:
        if "far too large" in str(error):
            return None
        raise


@given(st.recursive(st.sampled_from(["s", "dot", "1.5", "3", "slope[h]", "-2.0"]), grown, max_leaves=8))
def test_printed_and_read_again_is_the_same(text: str) -> None:
    before = "def f(x) = x + 1\n"
    body = text.replace("t[h, i - j]", "slope[h]").replace("t[h]", "slope[h]")
    try:
        first = spec_score(body, before)
    except SpecError:
        return
    assert spec_score(printed(first), before) == first


def spec_score(text: str, before: str) -> Expr:
    return spec(f"tensor slope: f32[H]\nscore {text}", before=before).score


def test_operands_of_a_chain_are_one_object() -> None:
    both = mask("0 < i - j < 5")
    first, second = both.children
    assert first.children[1] is second.children[0]


def test_unary_minus_binds_weaker_than_power() -> None:
    assert constant("-2 ** 2") == -4
    assert constant("2 ** -1") == 0.5
    assert score("-s ** 2") == score("-(s ** 2)")
