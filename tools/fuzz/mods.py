"""A spec as a person writes it for FlexAttention: the text of a score_mod and a mask_mod.

In: an ``AttentionSpec``. Out: Python text, a statement for each node, so that what stands twice is computed once.
Raises ``NotExpressibleError`` for what no mod can say. Numbers that a call decides (params, sizes) are tensors without
dimensions, which functions of PyTorch take, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, index_set, score_input
from flashgen.ir.operators import OPERATORS, Library
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.ir.weights import Weights

# What PyTorch writes for an operator; a power of ints is one of ints there, too.
_SPELT: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"{{}} {sign} {{}}" for name, sign in (
            ("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("floordiv", "//"), ("mod", "%"), ("pow", "**"),
            ("ipow", "**"), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="),
            ("and", "&"), ("or", "|"), ("bitand", "&"), ("bitor", "|"), ("bitxor", "^"), ("shl", "<<"), ("shr", ">>"),
        )},
        "neg": "-{}", "not": "~{}", "ceildiv": "-(-{} // {})", "to_float": "{}.float()", "to_int": "{}.int()",
        "min": "torch.minimum({}, {})", "max": "torch.maximum({}, {})", "clamp": "torch.clamp({}, {}, {})",
        "where": "torch.where({}, {}, {})",
        **{name: f"torch.{name}({{}})" for name in ("abs", "sign", "floor", "ceil", "round")},
        **{name: f"torch.nn.functional.{name}({{}})" for name in ("silu", "relu", "gelu", "softplus")},
        **{row.name: f"torch.{row.meaning.torch[0]}({{}})" for row in OPERATORS.values()
           if isinstance(row.meaning, Library)},
    }
)  # fmt: skip
_OF_16_BITS = (ElementType.BF16, ElementType.F16)
_BY_NAME = {"i": "q_idx", "j": "kv_idx"}


class NotExpressibleError(ValueError):
    """What a door cannot say of a spec, and so why it is not judged there."""


@dataclass
class _Writer:
    """The body of one mod. ``block`` is that of the layout."""

    elements: Mapping[str, ElementType]
    block: int
    lines: list[str] = field(default_factory=list)
    _known: dict[Expr, str] = field(default_factory=dict)

    def name(self, node: Expr) -> str:
        """What a node is called, once it is computed."""
        if node not in self._known:
            self._known[node] = self._named(self._text(node))
        return self._known[node]

    def _named(self, text: str) -> str:
        if text.isidentifier():
            return text
        self.lines.append(f"x{len(self.lines)} = {text}")
        return f"x{len(self.lines) - 1}"

    def _text(self, node: Expr) -> str:
        match node:
            case Literal(value=value):
                number = f"float('{value}')" if isinstance(value, float) and abs(value) == float("inf") else repr(value)
                return f"torch.tensor({number})"
            case Symbol(name=name, kind=SymbolKind.INDEX):
                return f"h // {self._named('H // Hkv')}" if name == "hkv" else _BY_NAME.get(name, name)
            case Symbol(name=name, kind=SymbolKind.BLOCK):
                return f"{'q_idx' if name == 'I' else 'kv_idx'} // {self.block}"
            case Symbol(name="s", kind=SymbolKind.SCORE):
                return "score"
            case Symbol(name=name, kind=SymbolKind.SCORE):
                raise NotExpressibleError(f"flex: a mod does not know '{name}'")
            case Symbol(name=name, kind=kind):
                return name if kind is SymbolKind.SIZE else in_mods(name)
            case Load(tensor=tensor, indices=indices):
                places = ", ".join(self._place(tensor, n, index) for n, index in enumerate(indices))
                return f"{in_mods(tensor)}[{places}]" + (".float()" if self.elements[tensor] in _OF_16_BITS else "")
            case Apply(op=op, args=args) if op in _SPELT:
                return _SPELT[op].format(*map(self.name, args))
            case Apply(op=op):
                raise NotExpressibleError(f"flex: PyTorch has no '{op}'")
        raise AssertionError(f"no text for {type(node).__name__}")

    def _place(self, tensor: str, dimension: int, index: Expr) -> str:
        """An index: one below 0 is the first entry in a spec, and counts from the end in PyTorch."""
        if isinstance(index, Symbol) and index_set(index):
            return self.name(index)
        if index_set(index):
            return f"torch.clamp_min({self.name(index)}, 0)"
        # One number for a call: PyTorch refuses it beyond the end, too.
        return f"torch.clamp({self.name(index)}, 0, {in_mods(tensor)}.shape[{dimension}] - 1)"


def mods_text(spec: AttentionSpec) -> str:
    """``score_mod`` and ``mask_mod`` of a spec; either may be left out. Raises ``NotExpressibleError``."""
    if spec.weights != Weights():
        raise NotExpressibleError("flex: weights other than a softmax of scores")
    for what, there in (("dropout", spec.dropout), ("a selection", spec.select)):
        if there is not None:
            raise NotExpressibleError(f"flex: {what}")
    block = 1 if spec.layout is None else spec.layout.block
    masks = [spec.mask, *([] if spec.layout is None else [spec.layout.keep])]
    masks = [mask for mask in masks if not (isinstance(mask, Literal) and mask.value)]
    elements = {tensor.name: tensor.element for tensor in spec.tensors}
    texts = []
    if spec.score != score_input("s"):
        texts.append(_function("score_mod(score, b, h, q_idx, kv_idx)", [spec.score], _Writer(elements, block)))
    if masks:
        texts.append(_function("mask_mod(b, h, q_idx, kv_idx)", masks, _Writer(elements, block)))
    return "\n".join(texts)


def _function(head: str, parts: list[Expr], writer: _Writer) -> str:
    result = " & ".join(map(writer.name, parts))
    body = "".join(f"    {line}\n" for line in (*writer.lines, f"return {result}"))
    return f"def {head}:\n{body}"


def in_mods(name: str) -> str:
    """What a captured value of a spec is called: any name of a spec may mean something to Python."""
    return f"of_{name}"
