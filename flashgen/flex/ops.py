"""The ops of mods: traced once, compiled once.

``bind`` finds the trace of mods without tracing them again; a ``family`` gives the op of a trace for the lengths and
tensors of a call. Traces and families are found by what mods compute, not by their identity.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.analysis.ranging import plain_range
from flashgen.flex.captured import CapturedValues, Empty, content_of, globals_of, is_settled
from flashgen.flex.numbers import evaluate
from flashgen.flex.places import refuse_at
from flashgen.flex.shapes import Extents, Shapes, Sizes, declared, fits
from flashgen.flex.specs import Shell, differentiable, make_spec, plain_names
from flashgen.flex.tracing import Mod, Trace, Traced, trace
from flashgen.flex.values import BOOL, FLOAT, INT, readable
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, walk
from flashgen.ir.interval import FULL_BOOL, FULL_FLOAT, FULL_INT, INT_MAX, INT_MIN, FloatRange, IntRange, Range
from flashgen.ir.spec import HeadDim
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp

_MOST = 512  # signatures, mods, calls
_MOST_TRACES = 16  # of one signature, by what Python was told of captured numbers
_TRACES: dict[Hashable, list[Trace]] = {}
_KNOWN: dict[Hashable, _BoundRefs] = {}


class Bindings(NamedTuple):
    """The trace of mods and the values that they capture now; ``calls`` are remembered while the mods do not change."""

    trace: Trace
    tensors: tuple[Tensor, ...]
    params: tuple[int | float | Tensor, ...]
    calls: dict[Hashable, Any]


class _BoundRefs(NamedTuple):
    """A remembered ``Bindings``, with weak references to its tensors, and the conditions under which it holds."""

    mods: tuple[weakref.ref[Any] | None, ...]
    unchanged: Unchanged
    bound: Bindings


def bind(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device) -> Bindings:
    """The trace of two mods and their captured values. Raises ``SpecError``."""
    key = (id(score_mod), id(mask_mod), device, torch.is_grad_enabled(), torch.get_default_dtype())
    known = _KNOWN.get(key)
    if known is not None and known.unchanged.holds():
        trace, tensors, params, calls = known.bound
        return Bindings(trace, _alive(tensors), _alive(params), calls) if tensors or params else known.bound
    found = _look_up(score_mod, mask_mod, device)
    _know(key, score_mod, mask_mod, found)
    return found


def _alive(held: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([x() if type(x) is weakref.ref else x for x in held])


def _know(key: Hashable, score_mod: Mod | None, mask_mod: Mod | None, found: Bindings) -> None:
    """Keep what mods are bound to, until they change or vanish."""
    _KNOWN.pop(key, None)
    unchanged = Unchanged()
    if not found.trace.settled or not all(mod is None or unchanged.look_at(mod) for mod in (score_mod, mask_mod)):
        return

    def forget(_: object, known: dict[Hashable, _BoundRefs] = _KNOWN) -> None:  # at exit there are no globals any more
        known.pop(key, None)

    mods = tuple(None if mod is None else weakref.ref(mod, forget) for mod in (score_mod, mask_mod))
    kept = Bindings(found.trace.alone(), tuple(map(held, found.tensors)), tuple(map(held, found.params)), found.calls)
    remember(_KNOWN, key, _BoundRefs(mods, unchanged, kept))


def remember(known: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Keep a value under a key; a full table is emptied first."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = found


def _look_up(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device) -> Bindings:
    captured = CapturedValues()
    # A mod may ask whether there are gradients, which it may leave out, and what type numbers become.
    settings = (device.type, torch.is_grad_enabled(), torch.get_default_dtype())
    signature = (captured.signature(score_mod), captured.signature(mask_mod), settings)
    if captured.cacheable:
        leaves = captured.leaves
        for known in _TRACES.get(signature, ()):
            values = _values_of(known, leaves)
            if values is not None:
                count = len(known.traced.tensors)
                return Bindings(known, values[:count], values[count:], {})
    found = trace(score_mod, mask_mod, captured, device)
    if found.settled and captured.cacheable:
        # Without the tensors of this call.
        remember(_TRACES, signature, [found.alone(), *_TRACES.get(signature, ())][:_MOST_TRACES])
    return Bindings(found, found.tensors, found.params, {})


def _values_of(known: Trace, leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """The tensors and params of a trace from current captured values; None where its guards do not hold."""
    try:
        if not all(evaluate(recipe, leaves) == answer for recipe, answer in known.guards):
            return None
        values = tuple([evaluate(recipe, leaves) for recipe in known.recipes])
    except (ArithmeticError, ValueError):
        return None  # the mod raises it, too, where it is traced
    # 2 ** n is an int or a float, and may be a large one.
    params = values[len(known.traced.tensors) :]
    return values if all(map(_is_of_type, params, known.traced.params)) else None


def _is_of_type(value: object, scalar: ScalarType) -> bool:
    if isinstance(value, Tensor):
        return True
    if scalar is ScalarType.INT:
        return isinstance(value, int) and INT_MIN <= value <= INT_MAX
    return isinstance(value, float)


@dataclass(frozen=True, eq=False)
class ModOp:
    """An op, the names of its tensors and params in order, and their declarations."""

    op: AttentionOp
    names: tuple[str, ...]
    shapes: Shapes
    learned: tuple[bool, ...]


Find = Callable[[Sizes, Extents, tuple[bool, ...]], ModOp]


@functools.lru_cache(maxsize=256)
def family(traced: Traced, head_dim: HeadDim, scaled: bool, backend: str | None, *, maxima: bool = False) -> Find:
    """The ops of equal mods at one head dimension, one for each set of declared shapes.

    Returns the function that finds the op for sizes, lengths of captured tensors, and tensors that want a gradient.
    """
    shell = Shell("flex", head_dim, plain_names(traced), scaled, maxima=maxima)
    made: list[ModOp] = []
    calls: dict[Hashable, ModOp] = {}

    def find(sizes: Sizes, extents: Extents, wanted: tuple[bool, ...]) -> ModOp:
        key = (*sizes.values(), *extents, wanted)
        found = calls.get(key)
        if found is None:
            for found in made:
                if all(map(operator.ge, found.learned, wanted)) and fits(found.shapes, extents, sizes):
                    break
            else:
                found = compiled(traced, shell, declared(traced, extents, sizes), wanted, backend)
                made.append(found)
            remember(calls, key, found)
        return found

    return find


@functools.lru_cache(maxsize=256)
def compiled(traced: Traced, shell: Shell, shapes: Shapes, learned: tuple[bool, ...], backend: str | None) -> ModOp:
    """One op. Raises ``SpecError`` where the compiler refuses the spec."""
    spec = make_spec(traced, shell, shapes, learned)
    return ModOp(load_spec(spec, backend), shell.names, shapes, learned)


def wanted_gradients(bound: Bindings) -> tuple[bool, ...]:
    """For each tensor, then each param: whether it requires a gradient that the score can give."""
    values: tuple[Any, ...] = (*bound.tensors, *bound.params)
    if not values:
        return ()
    able = differentiable(bound.trace.traced)
    return tuple([can and isinstance(x, Tensor) and x.requires_grad for x, can in zip(values, able, strict=True)])


def named(bound: Bindings, made: ModOp) -> dict[str, Any]:
    """The captured values of an op, by name."""
    return dict(zip(made.names, arguments(bound, made.learned), strict=True))


def arguments(bound: Bindings, learned: Sequence[bool]) -> list[Any]:
    """Captured tensors, then params, as the op takes them."""
    read: list[Any] = [readable(x) for x in bound.tensors]
    read += [x.int() if isinstance(x, Tensor) and x.dtype is torch.bool else x for x in bound.params]
    given = zip(read, learned, strict=True)
    return [x.detach() if getattr(x, "requires_grad", False) and not learns else x for x, learns in given]


class Unchanged:
    """The objects that mods captured. Of a tensor the type, the shape and ``requires_grad`` have to stay, too.

    It holds tensors weakly, and is dropped together with the mods.
    """

    __slots__ = ("_cells", "_functions", "_globals", "_tensors")

    def __init__(self) -> None:
        self._functions: dict[int, tuple[weakref.ref[FunctionType], Any, Any]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[weakref.ref[Tensor], Any, Any, bool]] = []

    def holds(self) -> bool:
        for mod, code, defaults in self._functions.values():
            function = mod()
            if function is None or function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ or function.__dict__:
                return False
        for there, name, content in self._globals:
            if there.get(name, Empty) is not (content() if type(content) is weakref.ref else content):
                return False
        try:
            for cell, content in self._cells:
                if cell.cell_contents is not (content() if type(content) is weakref.ref else content):
                    return False
        except ValueError:  # a cell was emptied
            return False
        for tensor, dtype, shape, learns in self._tensors:
            x = tensor()
            if x is None or x.dtype is not dtype or x.shape != shape or x.requires_grad is not learns:
                return False
        return True

    def look_at(self, value: Any) -> bool:
        """Record a captured value; returns whether a later call can tell that it is unchanged."""
        if isinstance(value, Tensor):
            self._tensors.append((weakref.ref(value), value.dtype, value.shape, value.requires_grad))
            return True
        if type(value) is tuple:
            return all(map(self.look_at, value))
        if is_settled(value):
            return True
        return type(value) is FunctionType and self._look_at_function(value)

    def _look_at_function(self, function: FunctionType) -> bool:
        names = globals_of(function)
        if names is None or id(function) in self._functions or vars(function) or function.__kwdefaults__:
            return False
        there, defaults = function.__globals__, function.__defaults__
        self._functions[id(function)] = (weakref.ref(function), function.__code__, defaults)
        closure = [(cell, content_of(cell)) for cell in function.__closure__ or ()]
        named = [(name, there.get(name, Empty)) for name in names]
        self._cells += [(cell, held(content)) for cell, content in closure]
        self._globals += [(there, name, held(content)) for name, content in named]
        contents = [content for _, content in (*closure, *named) if content is not Empty]
        return all(map(self.look_at, (*contents, *(defaults or ()))))


def held(content: Any) -> Any:
    """A weak reference to a tensor; any other object itself."""
    return weakref.ref(content) if isinstance(content, Tensor) else content


# -- ints beyond 32 bits -----------------------------------------------------------------------------------------------

# PyTorch's ints have 64 bits. Operators whose result may leave 32 bits are evaluated exactly, others by the compiler's
# ranges. Ints that are read from tensors are taken to fit, together with what is computed of them, until an operator
# bounds them (``%``, ``clamp``). Conversions of floats to ints saturate at 32 bits.


def _power(x: int, n: int) -> int:
    if n < 0:
        n, x = n % 2, x if abs(x) == 1 else 0
    return int(x ** min(n, 64))


# The operators whose result may leave 32 bits.
_LEAVING: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "abs": abs,
        "shl": lambda x, n: x << min(n, 64) if n >= 0 else 0,
        "ipow": _power,
    }
)
# What may stand for a value of which nothing is known. A result that is the same for both does not hang on it.
_WIDE: Mapping[ScalarType, Range] = MappingProxyType({BOOL: FULL_BOOL, INT: FULL_INT, FLOAT: FULL_FLOAT})
_NEAR: Mapping[ScalarType, Range] = MappingProxyType(
    {BOOL: FULL_BOOL, INT: IntRange(-(2**15), 2**15), FLOAT: FloatRange(-1.0, 1.0, may_be_nan=True)}
)
_SIZE_OF: Mapping[str, str] = MappingProxyType({"b": "B", "h": "H", "i": "Nq", "j": "Nk"})
# Mods that stay inside up to here are not looked at again.
_ORDINARY = 2**18
_ORDINARY_SIZES: tuple[tuple[str, int], ...] = tuple((name, _ORDINARY) for name in _SIZE_OF.values())

# Of each param the ends of its value; None where it is a tensor's, or a float.
_Params = tuple[tuple[int, int] | None, ...]


def check_ints(bound: Bindings, sizes: Mapping[str, int], mods: Sequence[Mod | None]) -> None:
    """Raise ``SpecError`` (E604) where an int of a mod does not fit in 32 bits."""
    traced = bound.trace.traced
    ints = [x if isinstance(x, int) else None for x in bound.params]
    is_ordinary = max(sizes.values()) <= _ORDINARY and all(x is None or abs(x) <= _ORDINARY for x in ints)
    if is_ordinary:
        ends = tuple([(-_ORDINARY, _ORDINARY) if each is INT else None for each in traced.params])
        if _leaving(traced, _ORDINARY_SIZES, ends) is None:
            return
    lengths = tuple((name, sizes[name]) for name in _SIZE_OF.values())
    found = _leaving(traced, lengths, tuple(None if x is None else (x, x) for x in ints))
    if found is None:
        return
    number, node, reached = found
    known = dict(zip(plain_names(traced), bound.trace.names, strict=True))
    shown = re.sub(r"\b[tp]\d+\b", lambda name: known[name[0]] or name[0], text(node))
    message = f"'{shown}' reaches {reached} at these lengths; ints of flashgen have 32 bits"
    refuse_at(mods[number], "E604", message, hint="compute it with floats, or divide before you multiply")


@functools.lru_cache(maxsize=1024)
def _leaving(traced: Traced, lengths: tuple[tuple[str, int], ...], params: _Params) -> tuple[int, Expr, int] | None:
    """The mod with an int that leaves 32 bits, the int, and its extreme value; None where all ints fit."""
    sizes = dict(lengths)
    for number, root in enumerate((traced.score, traced.mask)):
        known: dict[Expr, Range | None] = {}
        for node in _deciding(root):
            found = known[node] = _range(node, known, sizes, params)
            if isinstance(found, IntRange) and not INT_MIN <= found.lo <= found.hi <= INT_MAX:
                reached = found.lo if found.lo < INT_MIN else found.hi
                return number, node, reached
    return None


def _deciding(root: Expr | None) -> list[Expr]:
    """The ints of an expression, operands before operators, with the numbers that they are computed from."""
    nodes = [] if root is None else list(walk(root))
    wanted: set[Expr] = set()
    for node in reversed(nodes):
        if node.type is INT or node in wanted:
            wanted.add(node)
            wanted.update(arg for arg in node.children if arg.type is not BOOL)
    return [node for node in nodes if node in wanted]


def _range(
    node: Expr, known: Mapping[Expr, Range | None], sizes: Mapping[str, int], params: _Params
) -> IntRange | FloatRange | None:
    """The range of a number; None where it is not known."""
    found: Any
    match node:
        case Symbol(name=name, kind=SymbolKind.PARAM):
            ends = params[int(name[1:])]
            return None if ends is None else IntRange(*ends)
        case Symbol(name=name, kind=SymbolKind.INDEX):
            return IntRange(0, max(sizes[_SIZE_OF[name]] - 1, 0))
        case Apply(args=args):
            ranges = [known.get(arg) for arg in args]
            wide, near = (
                _applied(node, tuple(each or other[arg.type] for each, arg in zip(ranges, args, strict=True)))
                for other in (_WIDE, _NEAR)
            )
            found = wide if wide == near else None
        case _:
            found = plain_range(node, {}, None, tuple(_WIDE[each.type] for each in node.children))
    return None if found == _WIDE[node.type] else found


def _applied(node: Apply, ranges: tuple[Range, ...]) -> Range:
    exact = _LEAVING.get(node.op)
    if exact is None or node.type is not INT:
        found = plain_range(node, {}, None, ranges)
        stops = node.op == "to_int" and isinstance(found, IntRange) and (found.lo == INT_MIN or found.hi == INT_MAX)
        return FULL_INT if stops else found
    reached = [exact(*points) for points in itertools.product(*map(_points, ranges))]
    return IntRange(min(reached), max(reached))


def _points(x: Range) -> set[int]:
    """Arguments at which operators have their extremes: the ends of a range, the next ones of other parity, and 0."""
    assert isinstance(x, IntRange)
    return {n for n in (x.lo, x.lo + 1, 0, x.hi - 1, x.hi) if x.lo <= n <= x.hi}
