"""Random specs: every statement of the language, in any combination.

In: a source of chance, the backend that is to run it. Out: a ``SpecDraw``. Every spec is meant to be legal; what the
compiler refuses all the same is counted, never judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flashgen.ir.interval import FloatRange, IntRange, Range
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import FORMS
from tools.fuzz.expressions import Expressions, Place
from tools.fuzz.hoisting import hoisted
from tools.fuzz.names import Names
from tools.fuzz.nodes import BOOL, FLOAT, INT, Node, SpecDraw, Statement, leaf, number
from tools.fuzz.tables import (
    BIASES,
    BLOCKS,
    DIMENSIONS,
    DROPOUTS,
    HEAD_DIMS,
    LAYOUTS,
    LISTED,
    MASKS,
    NEIGHBOURHOODS,
    NORMALIZED,
    POINTWISE,
    QUERY_LISTS,
    SCALES,
    SCORES,
    SELECTED,
    TILES,
    Dimension,
)

_FORMS = tuple(form for form in FORMS.values() for _ in range(3 if form.exponential else 2))
_SIZE_RANGE = IntRange(0, 4096)
_MOST_TENSORS = 5
_ELEMENTS = {
    FLOAT: (ElementType.F32, ElementType.F32, ElementType.BF16, ElementType.F16),
    INT: (ElementType.I32, ElementType.I64),
    BOOL: (ElementType.BOOL,),
}
# What indices stand in each place, with the names that an index of a dimension may need.
_INDICES = {
    "score": ("b", "h", "hkv", "i", "j"),
    "mask": ("b", "h", "hkv", "i", "j"),
    "weights": ("b", "h", "hkv", "i", "j"),
    "layout": ("b", "h", "hkv", "I", "J"),
    "sink": ("b", "h", "hkv", "i"),
    "select": ("b", "h", "hkv", "i"),
    "scale": (),
    "default": (),
}
_SIZES = ("B", "H", "Hkv", "Nq", "Nk", "D", "Dv")


@dataclass(frozen=True)
class Tensor:
    """A captured tensor: its name, what it holds, its dimensions."""

    name: str
    element: ElementType
    dimensions: tuple[Dimension, ...]


@dataclass
class Builder:
    """A spec while it is drawn. ``pins`` are the schedules to choose from."""

    chance: random.Random
    pins: Sequence[str]
    dtypes: Sequence[str]
    tensors: list[Tensor] = field(default_factory=list)
    declarations: list[Statement] = field(default_factory=list)
    params: dict[ScalarType, list[Node]] = field(default_factory=lambda: {FLOAT: [], INT: []})
    biases: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    names: Names = field(init=False)
    block: int = 64

    def __post_init__(self) -> None:
        self.names = Names(self.chance, self.chance.choice((0.0, 0.3, 1.0)))

    # --- places

    def place(self, name: str, *more: Node, steps: float = 0.15) -> Place:
        """What stands in a place; ``more`` are names of its own, as ``s``."""
        ints = [leaf(INT, index, IntRange(0, 2**30)) for index in _INDICES[name]]
        ints += [leaf(INT, self.chance.choice(_SIZES), _SIZE_RANGE)]
        leaves: dict[ScalarType, list[Node]] = {FLOAT: [], INT: ints, BOOL: []}
        for node in more:
            leaves[node.type] += [node, node]
        readers: dict[ScalarType, list[Callable[[Expressions, int], Node]]] = {FLOAT: [], INT: [], BOOL: []}
        for scalar, known in readers.items():
            if name not in ("scale", "default"):
                known.append(partial(self.read, name, scalar))
            if scalar is not BOOL:
                known.append(partial(self._param_there, name, scalar))
        return Place(leaves, readers, steps)

    def expression(self, place: Place, scalar: ScalarType, depth: int) -> Node:
        """A drawn expression."""
        return Expressions(self.chance, place).draw(scalar, depth)

    def number(self, place: Place, low: float = -2.0, high: float = 2.0) -> Node:
        """A float between two numbers."""
        drawing = Expressions(self.chance, place)
        return drawing.within(drawing.draw(FLOAT, self.chance.choice((0, 1, 1, 2, 3))), low, high)

    # --- what is captured

    def param(self, scalar: ScalarType, place: str) -> Node:
        """A param, declared now or before."""
        known = self.params[scalar]
        if known and (place == "default" or self.chance.random() < 0.6 or len(known) > 2):
            return self.chance.choice(known)
        name = self.names.fresh()
        if scalar is INT:
            text, values = f"param {name}: i32", IntRange(-100, 100)
            default = self.chance.choice((" = 3", " = 9", " = Nk // 2", " = -2", ""))
            node = leaf(INT, name, values)
        else:
            text, node = f"param {name}: f32", leaf(FLOAT, name, FloatRange(-2.0, 2.0))
            default = self.chance.choice((" = 0.7", " = 0.25", " = 1 / (1 + Nk)", " = -1.5", ""))
            default += self.chance.choice(("", " grad"))
        self.declarations.append(Statement("param", text + default, (), name))
        known.append(node)
        return node

    def _param_there(self, place: str, scalar: ScalarType, _drawing: Expressions, _depth: int) -> Node:
        return self.param(scalar, place)

    def read(self, place: str, scalar: ScalarType, drawing: Expressions, depth: int) -> Node:
        """An element of a captured tensor, declared now or before."""
        known = [each for each in self.tensors if each.element.scalar is scalar]
        if not known or (self.chance.random() < 0.5 and len(self.tensors) < _MOST_TENSORS):
            if len(self.tensors) >= _MOST_TENSORS:
                return drawing.literal(scalar)
            known = [self.tensor(scalar, place)]
        return self.element(self.chance.choice(known), place, drawing, depth)

    def tensor(self, scalar: ScalarType, place: str, *dimensions: Dimension) -> Tensor:
        """A new captured tensor."""
        indices = _INDICES[place]
        if not dimensions:
            fitting = [each for each in DIMENSIONS if each.fits(indices)]
            dimensions = tuple(self.chance.choice(fitting) for _ in range(self.chance.choice((1, 1, 2, 2, 3, 4))))
        if place == "layout":
            dimensions = tuple(replace(each, size=each.size.replace("@", str(self.block))) for each in dimensions)
        element = self.chance.choice(_ELEMENTS[scalar])
        found = Tensor(self.names.fresh(), element, dimensions)
        grad = " grad" if scalar is FLOAT and self.chance.random() < 0.7 else ""
        shape = ", ".join(each.size for each in dimensions)
        self.tensors.append(found)
        text = f"tensor {found.name}: {element}[{shape}]{grad}"
        self.declarations.append(Statement("tensor", text, (), found.name))
        return found

    def element(self, tensor: Tensor, place: str, drawing: Expressions, depth: int) -> Node:
        """One read of it."""
        indices = tuple(self._index(each, place, drawing, depth) for each in tensor.dimensions)
        text = f"{tensor.name}[{', '.join(f'{{{n}}}' for n in range(len(indices)))}]"
        scalar = tensor.element.scalar
        values: Range | None = FloatRange(-5.0, 5.0) if scalar is FLOAT else None
        return Node(scalar, text, indices, values)

    def _index(self, dimension: Dimension, place: str, drawing: Expressions, depth: int) -> Node:
        ways = [way for way in dimension.ways if way.fits(_INDICES[place])]
        if not ways:
            return number(0)
        way = self.chance.choice(ways)
        if "{0}" not in way.text:
            return leaf(INT, way.text, IntRange(0, 2**20))
        return Node(INT, way.text, (drawing.draw(INT, max(depth - 1, 0)),), IntRange(0, 2**20))

    # --- statements

    def head_dim(self) -> str:
        """One head dimension, seldom two."""
        count = 2 if self.chance.random() < 0.06 else 1
        return ", ".join(dict.fromkeys(self.chance.choice(HEAD_DIMS) for _ in range(count)))

    def score(self) -> Node:
        """The score: chains of forms over ``s``, ``dot`` and ``sqdist``."""
        start = self.chance.choice(("s",) * 5 + ("(0.25 * dot)", "(-sqdist / (4 * D))", "(s - 0.01 * sqdist)"))
        value = leaf(FLOAT, start, FloatRange(-6.0, 6.0))
        own = (value, leaf(FLOAT, "(0.25 * dot)", FloatRange(-40.0, 40.0)))
        place = self.place("score", *own)
        for _ in range(self.chance.choice((0, 0, 1, 1, 2, 3))):
            form = self.chance.choice(SCORES)
            if form.text == "{e}":
                value = self.expression(place, FLOAT, 4)
                continue
            known = {"s": value}
            if "{n}" in form.text:
                known["n"] = self.number(place)
            if "{c}" in form.text:
                known["c"] = self.expression(place, BOOL, 2)
            if "{p}" in form.text:
                known["p"] = self.param(FLOAT, "score")
            if "{l}" in form.text:
                known["l"] = number(self.chance.choice((0.1, -0.5, 1.0, 0.0, -2.0)))
            numbered = form.text.format(**{name: f"{{{n}}}" for n, name in enumerate(known)})
            value = Node(FLOAT, numbered, tuple(known.values()), FloatRange(-8.0, 8.0))
        return value

    def biased(self, score: Node) -> Node:
        """The score and a bias that calls may fill with the most negative numbers; seldom the bias alone."""
        dimensions = self.chance.choice(BIASES)
        tensor = self.tensor(FLOAT, "score", *dimensions)
        while tensor.element is ElementType.F16:  # whose numbers end at 65504: a mask there is -inf or nothing
            self.declarations.pop()
            self.tensors.pop()
            tensor = self.tensor(FLOAT, "score", *dimensions)
        self.biases.append(tensor.name)
        indices = ", ".join(each.ways[0].text for each in dimensions)
        if self.chance.random() < 0.1:
            self.alone.append(tensor.name)
            return leaf(FLOAT, f"(0.0 + {tensor.name}[{indices}])", FloatRange(-8.0, 8.0))
        return Node(FLOAT, f"({{0}} + {tensor.name}[{indices}])", (score,), FloatRange(-8.0, 8.0))

    def in_neighbourhoods(self, statements: Sequence[Statement]) -> list[Statement]:
        """The same with a bias by place, whose index leaves its tensor but for what the mask drops."""
        said = {each.word: each for each in statements}
        tensor = self.tensor(FLOAT, "score", Dimension("9", ()))
        near = leaf(BOOL, f"(abs(j - {self.chance.choice(NEIGHBOURHOODS)}) <= 2)")
        kept = (near, *said["mask"].nodes) if "mask" in said else (near,)
        score = said["score"].nodes if "score" in said else (leaf(FLOAT, "s", FloatRange(-6.0, 6.0)),)
        mask = Statement("mask", f"mask {' and '.join(f'{{{n}}}' for n in range(len(kept)))}", kept)
        biased = Statement("score", f"score ({{0}} + {tensor.name}[j - i + 4])", score)
        return [mask, biased, *(each for each in statements if each.word not in ("mask", "score"))]

    def condition(self, forms: Sequence[str], place: Place, depth: int) -> Node:
        """A mask or layout: some of the forms and conditions that are drawn, joined."""
        parts = []
        for _ in range(self.chance.choice((1, 1, 1, 2, 2, 3))):
            if self.chance.random() < 0.6:
                form = self.chance.choice(forms)
                known = (self.param(INT, "mask"),) if "{p}" in form else ()
                parts.append(Node(BOOL, f"({form.replace('{p}', '{0}')})", known))
            else:
                parts.append(self.expression(place, BOOL, depth))
        joined = parts[0]
        for part in parts[1:]:
            joined = Node(
                BOOL, f"({{0}} {self.chance.choice(('and', 'or', '&', '|', '^', '=='))} {{1}})", (joined, part)
            )
        return joined

    def select(self) -> Statement:
        """Lists of key blocks, one for each query, for some together, or for all."""
        if self.chance.random() < 1 / 3:
            sizes = (*self.chance.choice((("B",), ("B", "Hkv"), ("Hkv",), ())), "Nq")
            tensor = self.tensor(
                INT, "select", *map(QUERY_LISTS.__getitem__, sizes), Dimension(self.chance.choice("123"), ())
            )
            slots = ", ".join((*(QUERY_LISTS[size].ways[0].text for size in sizes), ":"))
            return Statement("select", f"select {self.chance.choice(TILES)}: {tensor.name}[{slots}]")
        fitting = [each for each in DIMENSIONS if each.fits(_INDICES["select"])]
        dimensions = [self.chance.choice(fitting) for _ in range(self.chance.choice((0, 1, 1, 2, 2, 3)))]
        place = self.place("select")
        tensor = self.tensor(INT, "select", *dimensions, Dimension(self.chance.choice(LISTED), ()))
        drawing = Expressions(self.chance, place)
        indices = tuple(self._index(each, "select", drawing, 2) for each in dimensions)
        slots = ", ".join((*(f"{{{n}}}" for n in range(len(indices))), ":"))
        return Statement("select", f"select {self.chance.choice(SELECTED)}: {tensor.name}[{slots}]", indices)

    def weights(self) -> Statement | None:
        """The form of the weights; nothing for a softmax that is left out."""
        own = leaf(FLOAT, "s", FloatRange(-8.0, 8.0))
        place = self.place("weights", own)
        form = self.chance.choice((None,) * 4 + _FORMS)
        if form is None:
            return None
        if not form.exponential:
            text = self.chance.choice(NORMALIZED if form.normalised else POINTWISE)
            node = Node(FLOAT, text.replace("{n}", "{0}"), (self.number(place),))
            return Statement("weights", "weights " + form.written[-1].format("{0}"), (node,))
        if self.chance.random() < 1 / 3:
            return Statement("weights", f"weights {form.written[0]}")
        sink = self.number(self.place("sink"), -3.0, 3.0)
        return Statement("weights", "weights " + form.written[-1].format("{0}"), (sink,))

    def dropout(self) -> Statement | None:
        """The drop probability: a number, or a param of its own."""
        if self.chance.random() < 0.75:
            return None
        text = self.chance.choice(DROPOUTS)
        if "{p}" in text:
            name = self.names.fresh()
            self.declarations.append(Statement("param", f"param {name}: f32 = 0.3", (), name))
            text = text.replace("{p}", name)
        return Statement("dropout", f"dropout {text}")

    def build(self) -> SpecDraw:
        """The whole spec."""
        head_dim = self.head_dim()
        statements: list[Statement] = []
        if self.chance.random() < 0.65:
            place = self.place("mask")
            statements.append(Statement("mask", "mask {0}", (self.condition(MASKS, place, 3),)))
        if self.chance.random() < 0.3:
            statements.append(Statement("scale", "scale {0}", (self._scale(),)))
        score = self.score()
        weights = self.weights()
        if (weights is None or "softmax" in str(weights)) and self.chance.random() < 0.15:
            score = self.biased(score)
        if str(score) != "s" or self.chance.random() < 0.2:
            statements.append(Statement("score", "score {0}", (score,)))
        if self.chance.random() < 0.25:
            self.block = self.chance.choice(BLOCKS)
            keep = self.condition(LAYOUTS, self.place("layout"), 2)
            statements.append(Statement("layout", f"layout block {self.block}: {{0}}", (keep,)))
        if self.chance.random() < 0.2:
            statements.append(self.select())
        statements += [each for each in (weights, self.dropout()) if each is not None]
        if self.dtypes and self.chance.random() < 0.15:
            caches = ["f8e4m3"] if self.chance.random() < 0.5 else []
            statements.append(Statement("dtype", f"dtype {', '.join([*self.dtypes, *caches])}"))
        pin = self.chance.choice(self.pins)
        if pin:
            statements.append(Statement("schedule", f"schedule {{{{ {pin} }}}}"))
        if self.chance.random() < 0.06:
            statements = self.in_neighbourhoods(statements)
        draw = SpecDraw(self.names.attention(), head_dim, (*self.declarations, *statements))
        return hoisted(draw, self.chance, self.names).tidied()

    def _scale(self) -> Node:
        """A number, a param of either sign, or an expression over these."""
        if self.chance.random() < 0.4:
            return self.param(FLOAT, "scale")
        text = self.chance.choice(SCALES)
        if text:
            return leaf(FLOAT, text)
        return self.number(self.place("scale"), 0.05, 1.0)


def draw_spec(
    chance: random.Random, pins: Sequence[str], dtypes: Sequence[str]
) -> tuple[SpecDraw, Mapping[str, Sequence[str]]]:
    """A random spec, and what its calls have to know.

    ``biases`` are tensors that are only added to the score, ``alone`` those that are all of it.
    """
    builder = Builder(chance, pins, dtypes)
    return builder.build(), {"biases": tuple(builder.biases), "alone": tuple(builder.alone)}
