"""Runs a mod on symbolic values and collects what it computes.

In: a ``score_mod``, a ``mask_mod``. Out: a ``Trace``: the expressions, and where captured values are found. A mode of
PyTorch intercepts every function that the mod calls: operators of symbolic tensors become nodes (``dispatch.py``),
functions of captured tensors alone are computed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from flashgen.diagnostics import SpecError
from flashgen.flex.captured import CapturedValues, Lifting
from flashgen.flex.dispatch import dispatch
from flashgen.flex.indexing import index, lengths
from flashgen.flex.numbers import Guards, Host, Recipe, as_number, settled
from flashgen.flex.places import (
    DECISIONS,
    border,
    calling_function,
    place_of,
    raise_at,
    refuse,
    refuse_at,
    refuse_decision,
    refuse_raised,
    refuse_unknown,
)
from flashgen.flex.stand_ins import Symbolic, flat, mapped, watched
from flashgen.flex.values import FLOAT, Session, Slot, Value, convert
from flashgen.ir.expr import Expr, score_input
from flashgen.ir.expr import index as position
from flashgen.ir.types import ElementType, ScalarType

Mod = Callable[..., Any]
_NAMES_OF_POSITIONS = ("b", "h", "i", "j")


@dataclass(frozen=True)
class Traced:
    """What mods compute, independent of names.

    ``score`` is over s, positions, params ``p0``… and loads of ``t0``…; None where there is no score_mod. ``tensors``
    are numbered by first read; their lengths are sizes such as ``t0.1`` (t0, dimension 1).
    """

    score: Expr | None
    mask: Expr | None
    tensors: tuple[ElementType, ...]
    params: tuple[ScalarType, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.score, self.mask, self.tensors, self.params)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=False)
class Trace:
    """What mods compute, and how a call finds the values that they capture.

    ``tensors`` and ``params`` are the values of this trace. Where ``settled``, a later call with the same signature
    takes the values from its own leaves by ``recipes`` (tensors first), if the answers to ``guards`` are the same.
    """

    traced: Traced
    tensors: tuple[Tensor, ...]
    params: tuple[int | float | Tensor, ...]
    names: tuple[str, ...]
    settled: bool
    recipes: tuple[Recipe, ...]
    guards: tuple[tuple[Recipe, Host], ...]

    def alone(self) -> Trace:
        """The trace without its values, for later calls."""
        return replace(self, tensors=(), params=())


def trace(score_mod: Mod | None, mask_mod: Mod | None, captured: CapturedValues, device: torch.device) -> Trace:
    """Trace mods of which ``captured`` has the signature. Raises ``SpecError``.

    Captured numbers are lifted. Where the mod fails with lifted numbers, it runs on plain ones, and the trace holds for
    these values alone.
    """
    # Whatever goes wrong with lifted numbers, plain ones either mend it or show the user's own mistake.
    with contextlib.suppress(Exception):
        return _trace(score_mod, mask_mod, captured, device, lift=True)
    return _trace(score_mod, mask_mod, captured, device, lift=False)


def _trace(
    score_mod: Mod | None, mask_mod: Mod | None, captured: CapturedValues, device: torch.device, *, lift: bool
) -> Trace:
    guards: Guards = {}
    names = captured.tensor_names()
    leaves = {id(leaf): number for number, leaf in enumerate(captured.leaves) if isinstance(leaf, Tensor)}
    session = Session(device, dispatch, guards, leaves, names)
    score, mask = score_mod, mask_mod
    if lift:
        lifting = Lifting(guards, names)
        score, mask = lifting.lifted(score_mod), lifting.lifted(mask_mod)
    else:
        for number, leaf in enumerate(captured.leaves):
            if not isinstance(leaf, Tensor):
                guards["leaf", number] = leaf
    try:
        scored = None if score_mod is None else _score(session, score, score_mod)
        kept = None if mask_mod is None else _mask(session, mask, mask_mod)
    finally:
        session.is_over = True
    tensors, params = session.tensors, session.params
    slots: tuple[Slot[Any], ...] = (*tensors, *params)
    traced = Traced(
        scored,
        kept,
        tuple(each.type for each in tensors),
        tuple(each.type for each in params),
    )
    return Trace(
        traced,
        tuple(each.value for each in tensors),
        tuple(each.value for each in params),
        tuple(each.name for each in slots),
        session.settled and captured.cacheable,
        tuple(each.recipe for each in slots),
        tuple(guards.items()),
    )


def _score(session: Session, mod: Any, own: Mod) -> Expr:
    result = _run(session, mod, own, session.symbolic(Value(score_input("s"), torch.float32)))
    value = session.value(result) if isinstance(result, Tensor) and result.dim() == 0 else None
    if value is None or value.dtype is torch.bool:
        hint = "write torch.where(condition, score, -float('inf')) to mask by a score_mod"
        hint = _row_hint(result) if value is None else hint
        refuse_at(own, "E603", f"the score_mod returns {_what(result)}; a score is expected", hint=hint)
    return convert(value.expr, FLOAT)


def _mask(session: Session, mod: Any, own: Mod) -> Expr:
    result = _run(session, mod, own)
    value = session.value(result) if isinstance(result, Tensor) and result.dim() == 0 else None
    if value is None or value.dtype is not torch.bool or value.weak:
        hint = "return torch.ones_like(q_idx, dtype=torch.bool) for a mask that keeps every pair"
        hint = hint if isinstance(result, bool) else _row_hint(result) or "compare it: x != 0"
        refuse_at(own, "E603", f"the mask_mod returns {_what(result)}; a boolean tensor is expected", hint=hint)
    return value.expr


def _row_hint(result: object) -> str:
    if not isinstance(result, Symbolic):
        return ""
    return "index every dimension of the captured tensor, or reduce its row: row.sum(-1), (row == x).any(-1)"


def _what(result: object) -> str:
    if isinstance(result, Symbolic):
        return "a row of a tensor" if result.dim() else f"a tensor of {result.dtype}"
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)} and {result.dtype}"
    if isinstance(result, (bool, int, float, str)):
        return f"{type(result).__name__} {result!r}"
    return "nothing" if result is None else f"an object of {type(result).__name__}"


_ARGUMENTS = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
_OTHER_ROLE = {
    "score_mod": ("mask_mod", "as a mask_mod it goes through block_mask=create_block_mask(mod, B, H, Q_LEN, KV_LEN)"),
    "mask_mod": ("score_mod", "as a score_mod it is passed as score_mod=mod"),
}


def _check_arguments(own: Mod, role: str) -> None:
    """Raise where a mod cannot be called as its role is: ``TypeError`` for what is no function, else ``SpecError``."""
    names = _ARGUMENTS[role]
    if not callable(own):
        raise TypeError(f"'{role}' must be a function of ({', '.join(names)}), not {type(own).__name__}")
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # one that is written in C has none
        return
    if _takes(signature, names):
        return
    other, hint = _OTHER_ROLE[role]
    message = f"a {role} is called with ({', '.join(names)}), but this one takes {signature}"
    refuse_at(own, "E606", message, hint=hint if _takes(signature, _ARGUMENTS[other]) else "")


def _takes(signature: inspect.Signature, arguments: tuple[str, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


@border
def _run(session: Session, mod: Any, own: Mod, *first: Symbolic) -> object:
    """The mod's result for symbolic positions."""
    _check_arguments(own, "score_mod" if first else "mask_mod")
    positions = [session.symbolic(Value(position(name), torch.int64)) for name in _NAMES_OF_POSITIONS]
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), _Watch(session):
            return mod(*first, *positions)
    except SpecError as error:
        first_one = error.diagnostics[0]
        if first_one.span is None:
            raise_at(place_of(own), first_one.code, first_one.message, first_one.notes, first_one.hints)
        raise
    except Exception as error:
        refuse_raised(error, own)


class _Watch(TorchFunctionMode):
    """Intercepts the functions that a mod calls."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._learns = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._answer(func, args, kwargs or {})
        if self._learns and isinstance(result, Symbolic) and not torch.is_grad_enabled():
            # Under ``no_grad`` PyTorch keeps no gradient of a result: the kernel's has to be none, too.
            function = calling_function()
            if function is not None:
                _refuse_opaque(f"'{function.__name__}' is an autograd.Function")
            self._session.check_detached(result, "no_grad")
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        session, name, given = self._session, _name_of(func), flat((args, kwargs))
        is_symbolic = any(type(each) is Symbolic for each in given)
        if name == "__getitem__" and (is_symbolic or _indexed_by_number(args)):
            return index(session, *args)
        if is_symbolic:
            return self._symbolic(func, name, args, kwargs)
        numbers = any(as_number(each) is not None for each in given)
        if numbers and name in _MAKERS and not any(isinstance(each, Tensor) for each in given):
            return self._made(func, name, args, kwargs)
        return self._plain(func, name, args, kwargs)

    def _symbolic(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of values that only a kernel knows."""
        session, first = self._session, args[0] if args else None
        if _namespace(func) not in _TORCHS:
            _refuse_opaque(f"'{_namespace(func)}::{name}' is an operator of torch.library")
        self._check(name, first, alone=len(args) + len(kwargs) == 1)
        if name in _PLACES:
            return session.device if name == "get:device" else session.device.type == name.removeprefix("get:is_")
        if name in _LENGTHS and isinstance(first, Symbolic) and first.row is not None:
            return lengths(session, name, *args, **kwargs)
        if name == "__deepcopy__":
            func, args = Tensor.clone, args[:1]
        found = self._called(func, name, args, kwargs)
        if isinstance(found, Tensor) and type(found) is not Symbolic and found.dim() == 0:
            session.remember(found, found.item())
        return found

    def _check(self, name: str, x: object, *, alone: bool) -> None:
        """Refuse what a mod cannot ask of a value."""
        if name in DECISIONS and not (name in _OF_DIMENSIONS and isinstance(x, Tensor) and x.dim() > 0):
            refuse_decision(name)
        if name == "__setitem__":
            refuse_unknown(name)
        if name == "type" and alone:
            refuse("E602", "a mod cannot ask for the name of a type", hint="ask for x.dtype")
        if name in _WITHOUT_GRADIENT and isinstance(x, Symbolic):
            self._session.check_detached(x, "detach")

    def _called(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a composite function of PyTorch: its operators come to ``dispatch.py``."""
        self._session.function = name
        operand = self._operand(name)
        try:
            with watched():
                return func(*mapped(args, operand), **mapped(kwargs, operand))
        except (TypeError, ValueError, RuntimeError) as error:
            if name in _CONVERSIONS and args[1:] and not isinstance(error, SpecError):
                shown = f"'{args[1].__name__}'" if isinstance(args[1], type) else f"{args[1]!r}"
                hint = "give a torch.dtype: torch.float32"
                refuse("E603", f"{shown} is no type of {_CONVERSIONS[name]}", hint=hint)
            raise

    def _operand(self, name: str) -> Callable[[Any], Any]:
        """A captured tensor as a symbolic one; a captured number, too, where PyTorch would ask for its value."""
        session = self._session

        def operand(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x if type(x) is Symbolic else session.stand_in(x)
            if isinstance(x, (str, torch.device)):
                return _here(x)
            return session.symbolic(session.value(x)) if name in _OF_TENSORS and as_number(x) is not None else x

        return operand

    def _made(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor that is made of a captured number."""
        place = _MAKERS[name]
        value = args[place] if place is not None and place < len(args) else kwargs.get("fill_value")
        if place is None or as_number(value) is None:
            return self._plain(func, name, args, kwargs)
        made: Tensor = self._session.symbolic(self._session.value(value))
        with watched():
            made = made if kwargs.get("dtype") is None else made.to(kwargs["dtype"])
            return made.expand(args[0] if args[1:] else kwargs["size"]) if name == "full" else made

    def _plain(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of captured tensors and numbers alone: it is computed."""
        session = self._session
        if name in _RANDOM:
            message = f"'{name}' draws at random, once for all pairs: the mod means something else"
            refuse("E602", message, hint="draw outside of the mod, and index what was drawn")
        if name in _LENGTHS and isinstance(args[0], Tensor) and id(args[0]) in session.leaves and args[0].dim() > 0:
            return lengths(session, name, *args, **kwargs)
        result = func(*mapped(args, settled), **mapped(kwargs, settled))
        if name in _QUESTIONS:
            return result
        makes = name in _MAKERS and not any(isinstance(each, Tensor) for each in flat((args, kwargs)))
        if makes and isinstance(result, Tensor) and result.dim() == 0:
            session.remember(result, result.item())
            return result
        session.settled = False
        if isinstance(result, Tensor):  # it is called as the tensor that it is computed of
            names = session.names
            session.alive.append(result)
            names.setdefault(
                id(result), next((names[id(x)] for x in args if isinstance(x, Tensor) and id(x) in names), "")
            )
        return result


# Functions that make tensors, and which of their arguments is the value.
_MAKERS: Mapping[str, int | None] = MappingProxyType(
    {"tensor": 0, "as_tensor": 0, "scalar_tensor": 0, "asarray": 0, "full": 1, "zeros": None, "ones": None}
)
_OF_TENSORS = frozenset(("where", "float_power"))
_PLACES = frozenset(("get:device", "get:is_cuda", "get:is_cpu"))
_OF_DIMENSIONS = frozenset(("__len__", "__iter__"))
_WITHOUT_GRADIENT = frozenset(("detach", "detach_", "get:data"))
_CONVERSIONS: Mapping[str, str] = MappingProxyType({"to": "numbers", "type": "tensors"})
_QUESTIONS = frozenset(
    (
        *(*_PLACES, "get:dtype", "get:ndim", "get:requires_grad", "get:layout"),
        *("dim", "is_floating_point", "is_complex"),
    )
)
_LENGTHS = frozenset(("get:shape", "size", "__len__"))
_RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "bernoulli_", "dropout", "normal", "normal_", "uniform_", "multinomial"),
    )
)


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{func.__self__.__name__}"
    return name.partition(".")[0] if not name.startswith("_") else name


_TORCHS = frozenset(("", "aten", "prims"))


def _namespace(func: Any) -> str:
    """The namespace of an operator of ``torch.ops``; None for other functions."""
    is_operator = isinstance(func, (OpOverload, OpOverloadPacket))
    return str(getattr(func, "_qualified_op_name", func)).partition("::")[0].partition(".")[0] if is_operator else ""


def _here(place: Any) -> Any:
    """The device of symbolic tensors for any device; other texts as they are."""
    try:
        torch.device(place)
    except RuntimeError:
        return place
    return torch.device("cpu")


def _refuse_opaque(what: str) -> NoReturn:
    hint = "write its formula in the mod, in PyTorch's functions; derivatives follow from it"
    refuse("E602", f"{what}, whose code a kernel cannot call", hint=hint)


def _indexed_by_number(args: tuple[Any, ...]) -> bool:
    """Whether a captured tensor is indexed by captured numbers, which then are constants of the trace."""
    key = args[1] if type(args[1]) is tuple else (args[1],)
    return 0 < args[0].dim() == len(key) and all(type(each) is int or as_number(each) is not None for each in key)
