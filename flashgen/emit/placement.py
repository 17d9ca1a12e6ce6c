"""Stage 4a: place every subexpression of the hooks at its level and print it as C++.

In: named expressions (the hooks of a template) and how each load is kept inside its tensor. Out: ``Hooks``: values
computed once a launch, head, row vector, column and vector of diagonals, as members of structs named ``u``, ``x``,
``r``, ``c`` and ``d``, and one straight-line function for each hook, evaluated per pair. No arithmetic is left to the
template.

At row, diagonal and pair level a value is a vector over neighbouring rows (``fg::VecF``, ``fg::VecI``, ``fg::VecB``);
elsewhere it is a scalar. Where there are few rows, neighbouring columns are the lanes instead. The functions of
``templates/include/flashgen/cpu`` are overloaded for both, so that an operator prints the same way at every level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashgen.analysis.bounds import IndexProof, clamped_dimensions
from flashgen.analysis.levels import Level, kept_level, level_of
from flashgen.analysis.norms import NORM_OF_KEY, NORM_OF_ROW
from flashgen.emit.distance import AHEAD
from flashgen.emit.spelling import c_literal, c_operator, user_name
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, index, walk
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.plan.arguments import dimension_field, param_field, stride_field, tensor_field

_STRUCTS = {Level.LAUNCH: "u", Level.HEAD: "x", Level.ROW: "r", Level.COLUMN: "c", Level.DIAGONAL: "d"}
_SCALARS = {ScalarType.FLOAT: "float", ScalarType.INT: "int", ScalarType.BOOL: "bool"}
_VECTORS = {ScalarType.FLOAT: "fg::VecF", ScalarType.INT: "fg::VecI", ScalarType.BOOL: "fg::VecB"}
_INDEX_MEMBERS = {"b": "x.b", "h": "x.h", "hkv": "x.hkv", "i": "r.i", "j": "c.j", "distance": "d.distance"}
_BELOW = {
    Level.LAUNCH: (),
    Level.HEAD: (Level.LAUNCH,),
    Level.ROW: (Level.LAUNCH, Level.HEAD),
    Level.COLUMN: (Level.LAUNCH, Level.HEAD),
    Level.DIAGONAL: (Level.LAUNCH, Level.HEAD),
    Level.PAIR: (Level.LAUNCH, Level.HEAD, Level.ROW, Level.COLUMN, Level.DIAGONAL),
}
_NORMS: Mapping[Expr, str] = {NORM_OF_ROW: "r.qq", NORM_OF_KEY: "c.from_norm"}
_LONGEST_LINE = 100
_I, _J = index("i"), index("j")


@dataclass(frozen=True)
class Member:
    """A value computed once at its level and kept in that level's struct."""

    name: str
    c_type: str
    code: str
    comment: str


@dataclass(frozen=True)
class Function:
    """The body of one hook: straight-line code that ends in ``result``."""

    name: str
    c_type: str
    lines: tuple[str, ...]
    result: str
    comment: str
    level: Level
    reads_diagonals: bool


@dataclass(frozen=True)
class Hooks:
    """Everything that the spec contributes to one template: members by level, functions by name."""

    members: Mapping[str, tuple[Member, ...]]
    functions: Mapping[str, Function]


class Placement:
    """Builds ``Hooks``: call ``function`` (and ``value``) for each hook, then ``hooks``.

    ``lanes`` is the level whose neighbours share a vector. None, for GPUs: rows are computed one by one, and every
    value is a scalar; params are members of the launch, which may have to fetch them. ``ahead``: loads of pairs that
    templates may have at hand, by the names of functions of the pair that read them. ``measures_distance``: code uses
    ``ahead``, a member of rows and columns: floats, counted from the block's first position, whose difference is that
    of the positions; to convert each pair's difference would cost a GPU as much as an exponential each.
    """

    def __init__(
        self,
        proofs: Sequence[IndexProof],
        *,
        lanes: Level | None = Level.ROW,
        ahead: Mapping[Load, str] | None = None,
    ) -> None:
        self._proofs = proofs
        self._ahead = ahead or {}
        self._lanes = lanes
        self._members: dict[Level, dict[Expr, Member]] = {level: {} for level in _STRUCTS}
        self._functions: dict[str, Function] = {}
        self.measures_distance = False

    def with_lanes(self, lanes: Level) -> Placement:
        """One for the same kernel, of other lanes: both have the members of launches and heads together."""
        other = Placement(self._proofs, lanes=lanes)
        for level in (Level.LAUNCH, Level.HEAD):
            other._members[level] = self._members[level]
        return other

    def hooks(self) -> Hooks:
        """What has been placed so far."""
        members = {level.value: tuple(found.values()) for level, found in self._members.items()}
        return Hooks(members, dict(self._functions))

    def function(self, name: str, expr: Expr, comment: str = "") -> None:
        """A hook evaluated per pair; where rows are vectors the result is one whatever the level of the expression."""
        lines, result = self._body(expr, Level.PAIR)
        if self._lanes and (not self._is_vector(level_of(expr)) or isinstance(expr, Literal)):
            result = f"fg::broadcast({result})"
        c_type = self._c_type(expr.type, Level.PAIR)
        level, reads = level_of(expr), any(level_of(node) is Level.DIAGONAL for node in walk(expr))
        self._functions[name] = Function(name, c_type, lines, result, comment or text(expr), level, reads)

    def row_code(self, expr: Expr) -> str:
        """An expression over a row and what it has ``ahead``, as code where ``r`` is in scope."""
        return _one_expression(*self._body(expr, Level.PAIR))

    def value(self, name: str, expr: Expr, level: Level) -> str:
        """The expression placed as a member of ``level``'s struct (or a lower one's); returns its spelling."""
        if isinstance(expr, Literal | Symbol):
            return self._operand(expr, level, {})
        return self._member(expr, level_of(expr), name)

    def offset_of_pair(self, load: Load) -> str:
        """Where an element that a pair reads lies in its tensor, where rows and columns are scalars."""
        strides = tuple(f"a.{stride_field(load.tensor, axis)}" for axis in range(len(load.indices)))
        return self._offsets(load, Level.PAIR, {}, strides)[0]

    def gradient_offset(self, load: Load, at: Level) -> str:
        """Where an element lies in a contiguous buffer of the tensor's shape, as arguments of ``fg::add_rows``.

        The scalar part, then (vector index, stride) for each index that depends on the row.
        """
        rank = len(load.indices)
        strides = tuple(
            " * ".join(f"a.{dimension_field(load.tensor, later)}" for later in range(axis + 1, rank)) or "1"
            for axis in range(rank)
        )
        scalar, vectors = self._offsets(load, at, {}, strides)
        return ", ".join((f"int64_t({scalar})", *(part for pair in vectors for part in pair)))

    def _is_vector(self, level: Level) -> bool:
        return self._lanes is not None and level.is_vector(self._lanes)

    def _c_type(self, scalar: ScalarType, level: Level) -> str:
        return (_VECTORS if self._is_vector(level) else _SCALARS)[scalar]

    # -- one function ------------------------------------------------------------------------------------------

    def _body(self, expr: Expr, at: Level) -> tuple[tuple[str, ...], str]:
        """Straight-line code of ``expr`` at level ``at``: a name for what is used twice or grows long."""
        uses = Counter(child for node in self._own_nodes(expr, at) for child in node.children)
        named: dict[Expr, str] = {}
        lines: list[str] = []
        for node in self._own_nodes(expr, at):
            if isinstance(node, Literal | Symbol) or node == expr:
                continue
            code = self._code(node, at, named)
            if uses[node] > 1 or len(code) > _LONGEST_LINE // 2:
                named[node] = f"t{len(named)}"
                lines.append(f"const auto {named[node]} = {code};")
        return tuple(lines), self._operand(expr, at, named)

    def _own_nodes(self, root: Expr, at: Level) -> Iterable[Expr]:
        """The distinct nodes that have to be computed at ``at``, children first."""
        seen: dict[Expr, None] = {}

        def visit(node: Expr) -> None:
            if node in seen or (kept_level(node) in _BELOW[at] and not isinstance(node, Literal | Symbol)):
                return
            for child in node.children:
                visit(child)
            seen[node] = None

        visit(root)
        return seen

    def _operand(self, node: Expr, at: Level, named: Mapping[Expr, str]) -> str:
        """How code at level ``at`` refers to a node."""
        if node in named:
            return named[node]
        match node:
            case Literal(value=value):
                return c_literal(value)
            case Symbol(kind=SymbolKind.INDEX, name="distance") if at is not Level.DIAGONAL:
                return "(r.i - c.j)"
            case Symbol(kind=SymbolKind.INDEX, name=name):
                return _INDEX_MEMBERS[name]
            case Symbol(kind=SymbolKind.SIZE, name=name):
                return f"u.{name}"
            case Symbol(kind=SymbolKind.PARAM, name=name):
                return f"{'a' if self._lanes else 'u'}.{param_field(name)}"
            case Symbol(name=name):
                return name
        own = kept_level(node)
        return self._member(node, own) if own in _BELOW[at] else self._code(node, at, named)

    def _code(self, node: Expr, at: Level, named: Mapping[Expr, str]) -> str:
        """The operation of one node over its operands."""
        match node:
            case Load():
                return self._load(node, at, named)
            case Apply(op="to_float", args=(Apply(op="sub", args=(first, second)),)) if not self._lanes and (
                {first, second} == {_I, _J}
            ):
                self.measures_distance = True
                return "(r.ahead() - c.ahead())" if first == _I else "(c.ahead() - r.ahead())"
            case Apply() if node in _NORMS:
                return _NORMS[node]
            case Apply(op=op) if op in AHEAD:
                self.measures_distance = True
                return AHEAD[op]
            case Apply(op=op, args=args):
                return c_operator(op, tuple(self._operand(argument, at, named) for argument in args))
        raise AssertionError(f"{type(node).__name__} is an operand, not an operation")

    # -- members -----------------------------------------------------------------------------------------------

    def _member(self, node: Expr, level: Level, name: str | None = None) -> str:
        found = self._members[level]
        if node not in found:
            code = _one_expression(*self._body(node, level))
            c_type = self._c_type(node.type, level)
            # The name is chosen after the operands have taken theirs.
            found[node] = Member(self._free_name(found, node, level, name), c_type, code, text(node))
        return f"{_STRUCTS[level]}.{found[node].name}"

    @staticmethod
    def _free_name(found: Mapping[Expr, Member], node: Expr, level: Level, wanted: str | None) -> str:
        taken = {member.name for member in found.values()}
        tensors = {each.tensor for each in walk(node) if isinstance(each, Load)}
        named_by_load = len(tensors) == 1 and (isinstance(node, Load) or node.type is ScalarType.FLOAT)
        base = wanted or (user_name(tensors.pop()) if named_by_load else f"{level.value}_value")
        candidates = (base if n == 1 else f"{base}_{n}" for n in range(1, len(taken) + 2))
        return next(candidate for candidate in candidates if candidate not in taken)

    # -- captured tensors --------------------------------------------------------------------------------------

    def _offsets(
        self, load: Load, at: Level, named: Mapping[Expr, str], strides: tuple[str, ...]
    ) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The scalar part of an element's offset, and (index, stride) where the index is a vector."""
        scalars: list[str] = []
        vectors: list[tuple[str, str]] = []
        clamped = clamped_dimensions(load, self._proofs)
        for axis, (each, stride) in enumerate(zip(load.indices, strides, strict=True)):
            code = self._operand(each, at, named)
            if clamped[axis]:
                code = f"fg::clamp_index({code}, a.{dimension_field(load.tensor, axis)})"
            if self._is_vector(level_of(each)):
                vectors.append((code, f"int64_t({stride})" if stride == "1" else stride))
            elif code != "0":
                scalars.append(f"int64_t({code}) * {stride}" if stride != "1" else f"int64_t({code})")
        return " + ".join(scalars) or "0", tuple(vectors)

    def _load(self, load: Load, at: Level, named: Mapping[Expr, str]) -> str:
        if load in self._ahead:
            return f"{self._ahead[load]}(a, u, x, r, c)"
        base = f"a.{tensor_field(load.tensor)}"
        strides = tuple(f"a.{stride_field(load.tensor, axis)}" for axis in range(len(load.indices)))
        offset, vectors = self._offsets(load, at, named, strides)
        if not vectors:
            return f"fg::element({base}, {offset})"
        address = base if offset == "0" else f"{base} + {offset}"
        return f"fg::rows({address}, {', '.join(f'{code}, {stride}' for code, stride in vectors)})"


def _one_expression(lines: tuple[str, ...], result: str) -> str:
    """Straight-line code where an expression is wanted."""
    return f"[&] {{ {' '.join(lines)} return {result}; }}()" if lines else result
