"""Stage 1e, statements: each statement of a block to its part of the ``AttentionSpec``.

In: the syntax of a statement and the block that it stands in. Out: the part, or None with the reasons reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashgen.diagnostics import Span
from flashgen.ir.expr import Expr, Literal, Symbol
from flashgen.ir.spec import CapturedTensor, HeadDim, Layout, Param, Schedule, Select
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import FORMS, Form, Weights
from flashgen.language import names, syntax
from flashgen.language.block import ELEMENT_TYPES, PARAM_TYPES, Block
from flashgen.language.expressions import Expressions
from flashgen.language.imports import expressions_below
from flashgen.language.names import Site, TensorName
from flashgen.language.report import suggestion

MAX_HEAD_DIM = 576  # of multi-head latent attention: 512 and 64 for positions
DTYPES = ("f16", "bf16", "f32", "f8e4m3")
SCHEDULE_ENTRIES = tuple(name for name in Schedule.__dataclass_fields__ if name != "span")


def typed(
    block: Block, node: syntax.Expression, place: Site, wanted: ScalarType, hints: Sequence[str] = ()
) -> Expr | None:
    """An expression of the wanted type; an int stands for a float."""
    value = Expressions(place, block).resolved(node, wanted)
    if value is not None and value.type is not wanted:
        message = f"{place.title} must be {wanted.noun}, not {value.type.noun}"
        block.report.add("E208", message, node.span, hints=tuple(hints))
        return None
    return value


def integer_constant(block: Block, node: syntax.Expression, title: str) -> int | None:
    """A constant int, for places that need one at compile time."""
    value = typed(block, node, names.compile_time(title, "use numbers and 'const' only"), ScalarType.INT)
    return int(value.value) if isinstance(value, Literal) else None


# --- head_dim, dtype


def head_dims(block: Block, statement: syntax.HeadDims) -> tuple[HeadDim, ...] | None:
    """``head_dim 64, 192/128``."""
    found: list[HeadDim] = []
    sound = True
    for node in statement.values:
        slash = isinstance(node, syntax.Binary) and node.operator == "/"
        parts = (node.left, node.right) if isinstance(node, syntax.Binary) and slash else (node,)
        values = [_head_dim(block, part) for part in parts]
        whole = [value for value in values if value is not None]
        if len(whole) < len(values):
            sound = False
            continue
        pair = HeadDim(whole[0], whole[-1])
        if pair in found:
            block.report.add("E304", f"the head dimension '{pair}' is named twice", node.span)
            sound = False
        found.append(pair)
    return tuple(found) if sound else None


def _head_dim(block: Block, node: syntax.Expression) -> int | None:
    value = integer_constant(block, node, "a head dimension")
    if value is None or 1 <= value <= MAX_HEAD_DIM:
        return value
    message = f"a head dimension must be from 1 to {MAX_HEAD_DIM}, not {value}"
    block.report.add("E303", message, node.span)
    return None


def dtypes(block: Block, statement: syntax.Dtypes) -> tuple[ElementType, ...] | None:
    """``dtype f16, bf16``; with ``f8e4m3`` among them for caches, and for q, k and v, beside one of the others."""
    found: list[ElementType] = []
    sound = True
    for name in statement.names:
        if name.text not in DTYPES:
            _bad_type(block, name, "q, k, v, o and caches", DTYPES)
            sound = False
        elif ElementType(name.text) in found:
            block.report.add("E304", f"'{name.text}' is named twice", name.span)
            sound = False
        else:
            found.append(ElementType(name.text))
    if sound and found == [ElementType.F8E4M3]:
        block.report.add(
            "E110",
            "'f8e4m3' is an element type of q, k, v and caches alone",
            statement.names[0].span,
            hints=("name a type that o has, too: dtype bf16, f8e4m3",),
        )
        return None
    return tuple(found) if sound else None


_OTHER_SPELLINGS = {
    **dict.fromkeys(("float", "float32", "fp32"), "f32"),
    **dict.fromkeys(("half", "float16", "fp16"), "f16"),
    **dict.fromkeys(("fp8", "f8", "e4m3", "float8_e4m3fn"), "f8e4m3"),
    "bfloat16": "bf16",
    **dict.fromkeys(("int", "int32"), "i32"),
    **dict.fromkeys(("long", "int64"), "i64"),
    "boolean": "bool",
}


def _bad_type(block: Block, name: syntax.Name, what: str, allowed: Sequence[str]) -> None:
    """Report a type that does not exist, or not for this."""
    known = name.text in {element.value for element in ElementType}
    message = f"'{name.text}' is no element type of {what}" if known else f"unknown element type '{name.text}'"
    meant = _OTHER_SPELLINGS.get(name.text)
    hints = (f"did you mean '{meant}'?",) if meant in allowed else suggestion(name.text, allowed)
    block.report.add("E110", message, name.span, notes=(f"the types of {what} are {', '.join(allowed)}",), hints=hints)


# --- const, param, tensor


def param(block: Block, statement: syntax.Param) -> Param | None:
    """``param NAME: f32 = EXPR grad``."""
    scalar = PARAM_TYPES.get(statement.type.text)
    if scalar is None:
        _bad_type(block, statement.type, "a param", tuple(PARAM_TYPES))
        return None
    if statement.grad is not None and scalar is not ScalarType.FLOAT:
        message = f"the param '{statement.name.text}' is an int and has no gradient"
        block.report.add("E306", message, statement.grad, hints=("make it f32, or leave 'grad' out",))
        return None
    default = None
    if statement.default is not None:
        hints = ("write int(…)",) if scalar is ScalarType.INT else ()
        default = typed(block, statement.default, names.DEFAULT, scalar, hints)
        if default is None:
            return None
    return Param(statement.name.text, scalar, default, statement.grad is not None, statement.span)


def tensor(block: Block, statement: syntax.Tensor) -> CapturedTensor | None:
    """``tensor NAME: f32[H, Nk] grad``."""
    name = statement.name.text
    element = ELEMENT_TYPES.get(statement.element.text)
    if element is None:
        _bad_type(block, statement.element, "a tensor", tuple(ELEMENT_TYPES))
    if element is not None and statement.grad is not None and not element.is_floating:
        message = f"the tensor '{name}' holds {element} and has no gradient"
        block.report.add("E306", message, statement.grad, hints=("leave 'grad' out",))
        element = None
    if not statement.shape:
        hints = (f"a single number is a 'param': param {name}: f32",)
        block.report.add("E210", f"the tensor '{name}' has no dimensions", statement.span, hints=hints)
        return None
    shape = [_dimension(block, name, node) for node in statement.shape]
    whole = tuple(dimension for dimension in shape if dimension is not None)
    if element is None or len(whole) < len(shape):
        return None
    return CapturedTensor(name, element, whole, statement.grad is not None, statement.span)


def _dimension(block: Block, name: str, node: syntax.Expression) -> Expr | None:
    value = Expressions(names.SHAPE, block).resolved(node)
    if value is None:
        return None
    if value.type is not ScalarType.INT:
        hints = ("'//' divides to an int",) if value.type is ScalarType.FLOAT else ()
        block.report.add("E210", f"a dimension of '{name}' must be an int, not a {value.type}", node.span, hints=hints)
        return None
    if isinstance(value, Literal) and value.value < 1:
        block.report.add("E210", f"a dimension of '{name}' must be at least 1, not {value.value}", node.span)
        return None
    return value


# --- layout, select, dropout


def layout(block: Block, statement: syntax.Layout) -> Layout | None:
    """``layout block 64: EXPR``."""
    side = _side(block, statement.block, "the block size of a layout")
    keep = typed(block, statement.value, names.LAYOUT, ScalarType.BOOL, ("compare it, as in '… != 0'",))
    return None if side is None or keep is None else Layout(side, keep)


def _side(block: Block, node: syntax.Expression, title: str) -> int | None:
    side = integer_constant(block, node, title)
    if side is None or side >= 1:
        return side
    block.report.add("E309", f"{title} must be at least 1, not {side}", node.span)
    return None


def select(block: Block, statement: syntax.Select) -> Select | None:
    """``select 64: idx[b, hkv, i, :]``."""
    side = _side(block, statement.block, "the block size of a selection")
    tensor = _listing(block, statement.tensor)
    nodes = _indices(block, statement)
    place = replace(names.SELECT, title="an index of a selection")
    indices = [typed(block, node, place, ScalarType.INT) for node in nodes or ()]
    if tensor is None or nodes is None:
        return None
    if len(nodes) + 1 != tensor.rank:
        dimensions = f"{tensor.rank} dimension{'s' if tensor.rank > 1 else ''}"
        given = "the list is all that is given" if not nodes else f"{len(nodes)} and the list are given"
        message = f"'{tensor.name}' has {dimensions}, {given}"
        notes = (f"'{tensor.name}' is declared at line {tensor.span.line}",)
        block.report.add("E203", message, statement.span, notes=notes)
        return None
    known = tuple(each for each in indices if each is not None)
    if side is None or len(known) < len(indices):
        return None
    return Select(side, tensor.name, known, statement.span)


def _listing(block: Block, name: syntax.Name) -> TensorName | None:
    """The tensor whose elements are numbers of blocks."""
    meaning = block.find(name.text, name.span)
    if meaning is None:
        hints = suggestion(name.text, block.declarations)
        block.report.add("E101", f"unknown tensor '{name.text}'", name.span, hints=hints or _LISTS)
        return None
    if meaning.value is None:
        return None
    if not isinstance(meaning.value, TensorName):
        block.report.add("E204", f"'{name.text}' is no tensor and cannot list blocks", name.span, hints=_LISTS)
        return None
    element = meaning.value.element
    if element.is_floating or element.scalar is not ScalarType.INT:
        message = f"'{name.text}' holds {element}; the numbers of blocks are i32 or i64"
        block.report.add("E312", message, name.span, hints=_LISTS)
        return None
    return meaning.value


_LISTS = ("declare it as in 'tensor idx: i32[B, Hkv, Nq, 16]'",)


def _indices(block: Block, statement: syntax.Select) -> tuple[syntax.Expression, ...] | None:
    """What stands before the colon, which is last."""
    *before, last = statement.slots
    early = next((each for each in before if isinstance(each, Span)), None)
    name = statement.tensor.text
    if early is not None:
        message = f"':' stands once in '{name}[…]', for its last dimension"
        block.report.add("E312", message, early, hints=("the last dimension lists the blocks that a query reads",))
        return None
    if not isinstance(last, Span):
        message = f"the last dimension of '{name}' lists the blocks, and has no index"
        block.report.add("E312", message, last.span, hints=(f"write {name}[…, :]",))
        return None
    return tuple(each for each in before if not isinstance(each, Span))


def dropout(block: Block, statement: syntax.Single) -> Expr | None:
    """``dropout EXPR``."""
    node = statement.value
    value = typed(block, node, names.DROPOUT, ScalarType.FLOAT)
    if value is None:
        return None
    if isinstance(value, Literal):
        if 0 <= value.value < 1:
            return value
        message = f"a dropout probability must be at least 0 and less than 1, not {value.value:g}"
        block.report.add("E305", message, node.span)
        return None
    if not isinstance(value, Symbol):
        message = "a dropout probability must be a constant or a single float param"
        block.report.add("E305", message, node.span, hints=("work it out where the op is called",))
        return None
    declared = block.declarations[value.name].statement
    assert isinstance(declared, syntax.Param)
    if declared.grad is not None:
        message = f"no gradient reaches the dropout probability '{value.name}'"
        block.report.add("E306", message, declared.grad, hints=("leave 'grad' out",))
        return None
    return value


# --- weights


def weights(block: Block, statement: syntax.Single) -> Weights | None:
    """``weights E``, or a form by its word: ``weights softmax(sink = E)``, ``weights normalize(E)``."""
    node = statement.value
    called = node.callee if isinstance(node, syntax.Call) else node
    form = _FORMS.get(called.name) if isinstance(called, syntax.Reference) else None
    if form is None:
        weight = typed(block, node, names.WEIGHTS, ScalarType.FLOAT, _WEIGHT_HINTS)
        return None if weight is None else Weights(_ALONE, weight)
    if isinstance(node, syntax.Call):
        return _with_sink(block, form, node) if form.exponential else _of_weight(block, form, node)
    if form.exponential:
        return Weights(form)
    block.report.add("E310", f"'{form.word}' needs {form.needs}", node.span, hints=_example(form))
    return None


_FORMS = {form.word: form for form in FORMS.values() if form.word}
(_ALONE,) = (form for form in FORMS.values() if not form.word)
_WEIGHT_HINTS = ("write float(…) for 0 and 1",)


_OTHER_DENOMINATOR = "for another denominator write 'weights exp(s)', which has none, and divide what the op returns"


def _example(form: Form) -> tuple[str, ...]:
    return (f"write {form.written[-1].format('exp(s)')}",)


def _with_sink(block: Block, form: Form, node: syntax.Call) -> Weights | None:
    sinks = [argument for argument in node.arguments if isinstance(argument, syntax.Named)]
    for argument in node.arguments:
        if not isinstance(argument, syntax.Named):
            message = f"'{form.word}' takes nothing but a sink; the score is stated by 'score'"
            block.report.add("E310", message, argument.span, hints=(_instead_of_score(form, argument),))
            return None
        if argument.name.text != "sink":
            hints = suggestion(argument.name.text, ("sink",))
            message = f"'{form.word}' has no argument '{argument.name.text}', only 'sink'"
            block.report.add("E310", message, argument.name.span, hints=hints)
            return None
    if not sinks:
        message = f"'{form.word}' without a sink has no parentheses"
        block.report.add("E310", message, node.span, hints=(f"write '{form.word}'",))
        return None
    if len(sinks) > 1:
        block.report.add("E310", "'sink' is given twice", sinks[1].span)
        return None
    sink = typed(block, sinks[0].value, names.SINK, ScalarType.FLOAT)
    return None if sink is None else Weights(form, sink=sink)


def _instead_of_score(form: Form, node: syntax.Expression) -> str:
    """What to write for ``softmax(s)``, ``softmax(s / 2)`` or ``softmax(z[h])``."""
    if isinstance(node, syntax.Reference) and node.name == "s":
        return f"write 'weights {form.word}', which is of the score"
    if any(isinstance(each, syntax.Reference) and each.name in names.SCORES for each in expressions_below(node)):
        return f"state this expression by 'score', and write 'weights {form.word}'"
    return f"write {form.word}(sink = …)"


def _of_weight(block: Block, form: Form, node: syntax.Call) -> Weights | None:
    if len(node.arguments) != 1 or isinstance(node.arguments[0], syntax.Named):
        given = len(node.arguments)
        message = f"'{form.word}' takes one weight, by its place{f'; {given} are given' if given > 1 else ''}"
        is_ratio = given > 1 and not any(isinstance(each, syntax.Named) for each in node.arguments)
        hints = (*_example(form), *([_OTHER_DENOMINATOR] if is_ratio else []))
        block.report.add("E310", message, node.span, hints=hints)
        return None
    place = replace(names.WEIGHTS, title="a weight")
    weight = typed(block, node.arguments[0], place, ScalarType.FLOAT, _WEIGHT_HINTS)
    return None if weight is None else Weights(form, weight)


# --- schedule


def schedule(block: Block, statement: syntax.Schedule) -> Schedule | None:
    """``schedule { Br = 128 … }``."""
    values: dict[str, int] = {}
    sound = True
    for entry in statement.entries:
        name = entry.name.text
        if name not in SCHEDULE_ENTRIES:
            hints = suggestion(name, SCHEDULE_ENTRIES) or (f"the entries are {', '.join(SCHEDULE_ENTRIES)}",)
            block.report.add("E401", f"unknown schedule entry '{name}'", entry.name.span, hints=hints)
            sound = False
        elif name in values:
            block.report.add("E302", f"the schedule entry '{name}' occurs twice", entry.name.span)
            sound = False
        value = integer_constant(block, entry.value, "a schedule entry")
        if value is not None and value < 1:
            block.report.add("E402", f"'{name}' must be at least 1, not {value}", entry.value.span)
            value = None
        if value is None:
            sound = False
        else:
            values[name] = value
    return Schedule(**values, span=statement.span) if sound else None


# --- all

_OF_TYPE: Mapping[str, tuple[Site, ScalarType, tuple[str, ...]]] = {
    "scale": (names.SCALE, ScalarType.FLOAT, ()),
    "score": (names.SCORE, ScalarType.FLOAT, ("a condition belongs into 'mask'",)),
    "mask": (
        names.MASK,
        ScalarType.BOOL,
        ("compare it, as in '… != 0'; a bias that is added belongs into 'score'",),
    ),
}

_RULES: Mapping[str, Callable[[Block, Any], object]] = {
    "param": param,
    "tensor": tensor,
    "head_dim": head_dims,
    "dtype": dtypes,
    "layout": layout,
    "select": select,
    "schedule": schedule,
    "weights": weights,
    "dropout": dropout,
}


def meaning(block: Block, statement: syntax.Statement) -> object:
    """What a statement gives to the spec; None where it is wrong, or gives nothing by itself, as constants do."""
    match statement:
        case syntax.Let():
            block.define_let(statement)
        case syntax.Const() | syntax.Broken():
            pass  # constants are worked out when asked for; broken statements have been reported
        case syntax.Single(keyword=word) if word in _OF_TYPE:
            return typed(block, statement.value, *_OF_TYPE[word])
        case _:
            return _RULES[statement.keyword](block, statement)
    return None
