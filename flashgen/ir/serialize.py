"""AttentionSpec as plain data and back, so that a generated package opens without parsing its text again.

In: a spec. Out: JSON-compatible data from which ``spec_from_data`` makes an equal spec. Nodes are written once each,
children first, so that a DAG stays one. Places in the source are not kept, but for those of statements.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from flashgen.diagnostics.diagnostic import Source, Span
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim, Layout, Param, Schedule, Select, Statement
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import FORMS, Weights

Data = dict[str, Any]


class _Nodes:
    """Expressions as rows of a table; an expression is the number of its row."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._numbers: dict[Expr, int] = {}

    def number(self, expr: Expr | None) -> int | None:
        if expr is None:
            return None
        for node in walk(expr):
            if node not in self._numbers:
                self._numbers[node] = len(self.rows)
                self.rows.append(self._row(node))
        return self._numbers[expr]

    def _row(self, node: Expr) -> list[Any]:
        children = [self._numbers[child] for child in node.children]
        match node:
            case Literal(value=value):
                # JSON has no infinity, and 1 and 1.0 are the same to some readers.
                return ["literal", node.type.value, value if isinstance(value, bool) else repr(value)]
            case Symbol(name=name, kind=kind):
                return ["symbol", node.type.value, name, kind.value]
            case Load(tensor=tensor):
                return ["load", node.type.value, tensor, children]
            case Apply(op=op):
                return ["apply", node.type.value, op, children]
        raise AssertionError(f"{type(node).__name__} is no node")


def spec_to_data(spec: AttentionSpec) -> Data:
    """The spec as dictionaries, lists, strings and numbers."""
    nodes = _Nodes()
    number, select = nodes.number, spec.select
    return {
        "name": spec.name,
        "head_dims": [[each.qk, each.v] for each in spec.head_dims],
        "dtypes": None if spec.dtypes is None else [each.value for each in spec.dtypes],
        "takes_f8": spec.takes_f8,
        "constants": [[name, value if isinstance(value, bool) else repr(value)] for name, value in spec.constants],
        "params": [[each.name, each.type.value, number(each.default), each.grad] for each in spec.params],
        "tensors": [
            [each.name, each.element.value, [number(extent) for extent in each.shape], each.grad]
            for each in spec.tensors
        ],
        "scale": number(spec.scale),
        "score": number(spec.score),
        "mask": number(spec.mask),
        "layout": None if spec.layout is None else [spec.layout.block, number(spec.layout.keep)],
        **({} if select is None else {"select": [select.block, select.tensor, [number(x) for x in select.indices]]}),
        "weights": [spec.weights.form.name, number(spec.weights.expression)],
        "dropout": number(spec.dropout),
        "schedule": spec.schedule.pins,
        "statements": [[each.keyword, each.text, [*astuple(each.span)]] for each in spec.statements],
        "sources": [[each.name, each.text] for each in spec.sources],
        "nodes": nodes.rows,
    }


def spec_from_data(data: Data) -> AttentionSpec:
    """The spec that ``spec_to_data`` wrote. Raises ``KeyError``, ``ValueError`` or ``TypeError`` for other data."""
    nodes: list[Expr] = []
    for row in data["nodes"]:
        nodes.append(_node(row, nodes))

    def expr(number: int | None) -> Expr | None:
        return None if number is None else nodes[number]

    layout, select = data["layout"], data.get("select")
    return AttentionSpec(
        name=data["name"],
        head_dims=tuple(HeadDim(qk, v) for qk, v in data["head_dims"]),
        dtypes=None if data["dtypes"] is None else tuple(ElementType(each) for each in data["dtypes"]),
        takes_f8=bool(data["takes_f8"]),
        constants=tuple((name, _number(value)) for name, value in data["constants"]),
        params=tuple(
            Param(name, ScalarType(kind), expr(default), grad) for name, kind, default, grad in data["params"]
        ),
        tensors=tuple(
            CapturedTensor(name, ElementType(element), tuple(nodes[each] for each in shape), grad)
            for name, element, shape, grad in data["tensors"]
        ),
        scale=nodes[data["scale"]],
        score=nodes[data["score"]],
        mask=nodes[data["mask"]],
        layout=None if layout is None else Layout(layout[0], nodes[layout[1]]),
        select=None if select is None else Select(select[0], select[1], tuple(nodes[each] for each in select[2])),
        weights=_weights(data["weights"][0], expr(data["weights"][1])),
        dropout=expr(data["dropout"]),
        schedule=Schedule(**data["schedule"]),
        statements=tuple(Statement(keyword, text, Span(*span)) for keyword, text, span in data["statements"]),
        sources=tuple(Source(name, text) for name, text in data["sources"]),
    )


def _node(row: list[Any], nodes: list[Expr]) -> Expr:
    kind, scalar, content = row[0], ScalarType(row[1]), row[2]
    if kind == "literal":
        return Literal(scalar, value=_number(content))
    if kind == "symbol":
        return Symbol(scalar, name=content, kind=SymbolKind(row[3]))
    children = tuple(nodes[each] for each in row[3])
    if kind == "load":
        return Load(scalar, tensor=content, indices=children)
    if kind == "apply":
        return Apply(scalar, op=content, args=children)
    raise ValueError(f"'{kind}' is no kind of node")


def _number(written: bool | str) -> bool | int | float:
    if isinstance(written, bool):
        return written
    try:
        return int(written)
    except ValueError:
        return float(written)


def _weights(kind: str, weight: Expr | None) -> Weights:
    if kind not in FORMS:
        raise ValueError(f"'{kind}' is no form of weights")
    form = FORMS[kind]
    return Weights(form, sink=weight) if form.exponential else Weights(form, weight)
