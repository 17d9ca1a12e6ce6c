"""Names for parts of a drawn spec: ``let``, ``const`` and ``def`` in the place of what they mean.

In: a ``SpecDraw``. Out: one that means the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from tools.fuzz.names import Names
from tools.fuzz.nodes import BOOL, Node, SpecDraw, Statement, leaf

_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"\(?-?\d[\d.e-]*\)?")


def hoisted(draw: SpecDraw, chance: random.Random, names: Names) -> SpecDraw:
    """Some parts under names."""
    for hoist, share in ((_let, 0.35), (_let, 0.15), (_def, 0.25), (_const, 0.25)):
        if chance.random() < share:
            draw = hoist(draw, chance, names)
    return draw


def replaced(node: Node, old: Node, new: Node) -> Node:
    """``node`` with every ``old`` in it replaced."""
    if node == old:
        return new
    children = tuple(replaced(child, old, new) for child in node.children)
    return node if children == node.children else replace(node, children=children)


def _parts(draw: SpecDraw, wanted: Callable[[Node], bool]) -> list[tuple[int, Node]]:
    """What may be named: the number of its statement, and the part."""
    return [
        (number, node)
        for number, statement in enumerate(draw.statements)
        for root in statement.nodes
        for node in (root, *root.below())
        if wanted(node)
    ]


def _let(draw: SpecDraw, chance: random.Random, names: Names) -> SpecDraw:
    """A part of one statement becomes a ``let`` right before it."""
    found = _parts(draw, lambda node: node.size > 2)
    if not found:
        return draw
    number, part = chance.choice(found)
    statement = draw.statements[number]
    name = names.fresh()
    own = Statement("let", f"let {name} = {{0}}", (part,), name)
    use = leaf(part.type, name, part.known)
    changed = replace(statement, nodes=tuple(replaced(node, part, use) for node in statement.nodes))
    return replace(draw, statements=(*draw.statements[:number], own, changed, *draw.statements[number + 1 :]))


def _const(draw: SpecDraw, chance: random.Random, names: Names) -> SpecDraw:
    """A literal becomes a constant, wherever it stands."""
    found = _parts(draw, lambda node: not node.children and _NUMBER.fullmatch(node.template) is not None)
    found += _parts(draw, lambda node: node.type is BOOL and node.template in ("true", "false"))
    if not found:
        return draw
    _, part = chance.choice(found)
    name = names.fresh()
    own = Statement("const", f"const {name} = {{0}}", (part,), name)
    use = leaf(part.type, name, part.known)
    statements = (
        replace(each, nodes=tuple(replaced(node, part, use) for node in each.nodes)) for each in draw.statements
    )
    return replace(draw, statements=(own, *statements))


def _def(draw: SpecDraw, chance: random.Random, names: Names) -> SpecDraw:
    """An operator, with what it is applied to as arguments; tensors are arguments, too."""
    declared = {each.name for each in (*draw.statements, *draw.definitions) if each.name}
    found = _parts(draw, lambda node: 0 < len(node.children) < 4)
    if not found:
        return draw
    number, part = chance.choice(found)
    own = sorted(set(_WORD.findall(part.template)) & declared)
    if len(own) > 1 or any(each.word != "tensor" for each in draw.statements if each.name in own):
        return draw
    name, parameters = names.fresh(), [names.fresh() for _ in (*own, *part.children)]
    body = part.template.format(*(parameters[len(own) :]))
    for tensor, parameter in zip(own, parameters, strict=False):
        body = re.sub(rf"\b{re.escape(tensor)}\b", parameter, body)
    definition = Statement("def", f"def {name}({', '.join(parameters)}) = {body}", (), name)
    places = [*own, *(f"{{{n}}}" for n in range(len(part.children)))]
    use = replace(part, template=f"{name}({', '.join(places)})")
    statement = draw.statements[number]
    changed = replace(statement, nodes=tuple(replaced(node, part, use) for node in statement.nodes))
    return replace(
        draw,
        statements=(*draw.statements[:number], changed, *draw.statements[number + 1 :]),
        definitions=(*draw.definitions, definition),
    )
