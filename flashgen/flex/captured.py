"""The values that a mod captures, read anew at each call, so that a trace is used only for what it was made for.

In: a mod. Out: a signature, equal for mods that compute the same over other numbers and tensors, and the *leaves*:
these numbers and tensors, in order. Closures, globals, defaults, partials, containers and other mods are followed.
``lifted`` rebuilds a mod over numbers that record what is computed of them (``numbers.py``).
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import math
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashgen.flex.numbers import Guards, lifted, told
from flashgen.flex.places import NOT_THE_USERS, spellings

_PACKAGES = frozenset(("flashgen", "numpy", "torch"))
_PYTHONS = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib")), Path(os.__file__).parent)
_PYTHONS_FOLDERS = tuple(f"{each}{os.sep}" for folder in _PYTHONS for each in spellings(folder))
_FOLDERS = (*NOT_THE_USERS, *spellings(Path(np.__file__).parent), *_PYTHONS_FOLDERS)
_COMPOSING = "torch.nn.attention.flex_attention"  # whose closures hold mods of the user's
# What tells a number that is lifted from a plain one, or changes what is captured.
_UNLIFTABLE_NAMES = frozenset(
    ("type", "id", "globals", "locals", "eval", "exec", "vars", "setattr", "delattr", "__import__")
)
# What reads values by names that no instruction has.
_READ_BY_TEXT = frozenset(("globals", "locals", "eval", "exec", "vars", "__import__"))
_STORES = frozenset(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"))
_STORES_OF_OBJECTS = frozenset(("STORE_ATTR", "DELETE_ATTR"))

_SCALARS = frozenset((int, float))
# Python's own, which hold what the user puts there.
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CONSTANTS = (
    bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.Size,
    types.MethodDescriptorType, types.WrapperDescriptorType, enum.Enum,
)  # fmt: skip


class _Code(NamedTuple):
    """What a function's code object tells of the values that the function reads."""

    global_names: tuple[str, ...]
    liftable: bool
    is_known: bool  # whether nothing else is read: by a text, or of a module that it imports


@functools.lru_cache(maxsize=1024)
def _read_code(code: CodeType) -> _Code:
    names: dict[str, None] = {}
    liftable = is_known = True
    for each in _codes(code):
        own = frozenset(each.co_cellvars)
        before = None
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[instruction.argval] = None
            stores = instruction.opname in _STORES and instruction.argval not in own
            liftable &= not stores and instruction.opname not in _STORES_OF_OBJECTS
            # What stands for an object is another one.
            liftable &= instruction.opname != "IS_OP" or before == "LOAD_CONST"
            before = instruction.opname
            is_known &= instruction.opname != "IMPORT_NAME" or _is_library(instruction.argval)
    return _Code(
        tuple(names),
        liftable and not _UNLIFTABLE_NAMES & names.keys(),
        is_known and not _READ_BY_TEXT & names.keys(),
    )


def _codes(code: CodeType) -> list[CodeType]:
    """The code object of a function, and those of the functions that are defined in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [code, *(below for each in inner for below in _codes(each))]


@functools.lru_cache(maxsize=256)
def _is_library(module: str | None) -> bool:
    """Whether a module name is Python's, NumPy's, PyTorch's or ours; a user's module may share such a name."""
    top = "" if module is None else module.partition(".")[0]
    if top in _PACKAGES or top not in sys.stdlib_module_names or top == "__main__":
        return top in _PACKAGES
    if top not in sys.modules:
        return True
    origin = getattr(sys.modules[top].__spec__, "origin", None) or ""
    is_pythons = origin.startswith(_PYTHONS_FOLDERS) and "site-packages" not in origin
    return is_pythons or origin in ("built-in", "frozen")


def _is_constant(value: Any) -> bool:
    """Whether a value never changes, as libraries do not; classes of the user have attributes and methods that may."""
    if isinstance(value, type):
        return _is_library(value.__module__)
    if isinstance(value, enum.Enum):
        return _is_library(type(value).__module__)
    if isinstance(value, types.BuiltinFunctionType):
        # A method of an object is as that is: ``table.get``.
        owner = value.__self__
        return owner is None or isinstance(owner, ModuleType) or (isinstance(owner, type) and _is_constant(owner))
    return isinstance(value, _CONSTANTS)


def _number_of(value: Any) -> int | float | None:
    """A number, also one of NumPy's, as Python's own; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if type(value) in _SCALARS else None


def _is_of_library(value: ModuleType | FunctionType) -> bool:
    """Whether a module or function is a library's own; one of the user may share its name, or wrap another."""
    if isinstance(value, ModuleType):
        return _is_library(value.__name__) and sys.modules.get(value.__name__) is value
    return _is_library(value.__module__) and value.__code__.co_filename.startswith(_FOLDERS)


class Parts(NamedTuple):
    """The captured values inside a container, and ``fixed``, all else of it.

    ``made`` rebuilds the container of other values; None for a function, which ``Lifting`` rebuilds.
    """

    fixed: Hashable
    names: tuple[str, ...]
    values: tuple[Any, ...]
    made: Callable[[list[Any]], Any] | None = None


def _parts(value: Any) -> Parts | None:
    """The parts of a container or function; None for values that hold nothing to follow."""
    kind: Any = type(value)
    if kind is FunctionType:
        return _function_parts(value)
    if kind is functools.partial:
        names, count = tuple(map(str, value.keywords)), 1 + len(value.args)
        return Parts(
            ("partial", len(value.args), names),
            (*("",) * count, *names),
            (value.func, *value.args, *value.keywords.values()),
            lambda made: functools.partial(
                made[0], *made[1:count], **dict(zip(value.keywords, made[count:], strict=True))
            ),
        )
    if kind is MethodType:
        return Parts("method", ("", ""), (value.__func__, value.__self__), lambda made: MethodType(*made))
    if kind is slice:
        return Parts("slice", ("", "", ""), (value.start, value.stop, value.step), lambda made: slice(*made))
    if kind is tuple or kind is list:
        return Parts((kind.__name__, len(value)), ("",) * len(value), tuple(value), type(value))
    if kind is dict and all(type(key) is str for key in value):
        return Parts(
            ("dict", *value), tuple(value), tuple(value.values()), lambda made: dict(zip(value, made, strict=True))
        )
    mod = getattr(kind, "__flashgen_mod__", None)
    return None if mod is None else Parts(kind.__name__, ("",), (mod(value),), lambda made: made[0])


def _function_parts(function: FunctionType) -> Parts | None:
    if _is_of_library(function) and function.__module__ != _COMPOSING:
        return None
    code = function.__code__
    names, values = [*code.co_freevars], [content_of(cell) for cell in function.__closure__ or ()]
    there = function.__globals__
    for name in _read_code(code).global_names:
        if name in there:
            names.append(name)
            values.append(there[name])
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    arguments = code.co_varnames[: code.co_argcount]
    attributes = vars(function)
    names += [*arguments[len(arguments) - len(defaults) :], *keywords, *attributes]
    values += [*defaults, *keywords.values(), *attributes.values()]
    # Two functions of one text may read other names from other globals.
    return Parts((code, len(defaults), tuple(keywords), tuple(names)), tuple(names), tuple(values))


class Empty:
    """The content of a closure cell that has no value yet."""


def content_of(cell: CellType) -> Any:
    """The content of a closure cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return Empty


def is_settled(value: Any) -> bool:
    """Whether a captured value cannot change while it stays the same object; false for mods of the user."""
    if isinstance(value, (ModuleType, FunctionType)):
        return _is_of_library(value) and getattr(value, "__module__", None) != _COMPOSING
    return _number_of(value) is not None or _is_constant(value)


def globals_of(function: FunctionType) -> tuple[str, ...] | None:
    """The names of the globals that a function reads; None where its code does not tell."""
    code = _read_code(function.__code__)
    return code.global_names if code.is_known else None


@dataclass
class CapturedValues:
    """The values that one or several mods capture.

    ``leaves`` are numbers and tensors, ``names`` their names. ``cacheable``: the signature and the leaves hold
    everything that a trace could depend on.
    """

    leaves: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    cacheable: bool = True
    _seen: dict[int, int] = field(default_factory=dict)

    def signature(self, value: Any, name: str = "") -> Hashable:
        """A key of a value; values with equal keys are traced alike."""
        kind = type(value)
        number = _number_of(value)
        if number is not None:
            if not math.isfinite(number):
                return repr(value)
            self.leaves.append(number)
            self.names.append(name)
            return kind.__name__
        if _is_constant(value):
            return (kind, value)  # 1 and True are equal
        if id(value) in self._seen:
            return ("seen", self._seen[id(value)])
        if isinstance(value, Tensor):
            self._seen[id(value)] = len(self._seen)
            self.leaves.append(value)
            self.names.append(name)
            # A device is made anew for each question.
            return (kind, value.dtype, value.dim(), value.requires_grad, value.is_cpu or value.device)
        parts = _parts(value)
        if parts is None:
            # Libraries and their functions do not change; anything else may hold what is not seen here.
            if isinstance(value, (ModuleType, FunctionType)) and _is_of_library(value):
                return value
            self.cacheable = False
            return None
        self._seen[id(value)] = len(self._seen)
        self.cacheable &= kind is not FunctionType or _read_code(value.__code__).is_known
        return (parts.fixed, *map(self.signature, parts.values, parts.names))

    def tensor_names(self) -> dict[int, str]:
        """The names of tensors by identity, and of number n by -1 - n."""
        return {
            id(leaf) if isinstance(leaf, Tensor) else -1 - number: name
            for number, (leaf, name) in enumerate(zip(self.leaves, self.names, strict=True))
        }


class Lifting:
    """Rebuilds mods over lifted numbers, in the order of ``CapturedValues.signature``."""

    def __init__(self, guards: Guards, names: dict[int, str]) -> None:
        self._guards = guards
        self._names = names  # of tensors that are found in attributes
        self._count = 0
        self._seen: dict[int, Any] = {}
        self._tensors: set[int] = set()

    def lifted(self, value: Any) -> Any:
        """The value, with lifted numbers in the place of plain ones. Raises ``TypeError``."""
        number = _number_of(value)
        if number is not None and math.isfinite(number):
            self._count += 1
            return lifted(number, ("leaf", self._count - 1), self._guards)
        if isinstance(value, Tensor):
            self._count += id(value) not in self._tensors
            self._tensors.add(id(value))
            return value
        if number is not None or _is_constant(value):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        parts = _parts(value)
        if parts is None:
            return self.attribute_holder(value)
        if parts.made is None:
            return self._function(value, parts)
        self._seen[id(value)] = value  # a container that holds itself stays as it is
        self._seen[id(value)] = result = parts.made([self.lifted(each) for each in parts.values])
        return result

    def _function(self, function: FunctionType, parts: Parts) -> Any:
        code = function.__code__
        if not _read_code(code).liftable:
            raise TypeError(f"'{function.__qualname__}' tells lifted numbers from plain ones, and has to run on these")
        cells = tuple(CellType() for _ in code.co_freevars)
        kept = ("__builtins__", "__name__", "__package__", "__spec__")
        there = {name: function.__globals__[name] for name in kept if name in function.__globals__}
        copy = FunctionType(code, there, function.__name__, None, cells)
        copy.__module__ = function.__module__
        self._seen[id(function)] = copy
        made = [self.lifted(each) for each in parts.values]
        left = iter(zip(parts.names, made, strict=True))
        for cell, (_, content) in zip(cells, left):  # noqa: B905 - the others follow
            if content is not Empty:
                cell.cell_contents = content
        defaults, keywords, attributes = function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function)
        named = len(made) - len(cells) - len(defaults) - len(keywords) - len(attributes)
        copy.__globals__.update(islice(left, named))
        copy.__defaults__ = tuple(value for _, value in islice(left, len(defaults))) or None
        copy.__kwdefaults__ = dict(islice(left, len(keywords))) or None
        vars(copy).update(left)
        return copy

    def attribute_holder(self, value: Any) -> Any:
        """A stand-in for an object, whose attributes are lifted when they are read; libraries stay as they are.

        So do classes and members of enums, as Python compares their identity.
        """
        kind = type(value)
        of_library = _is_of_library(value) if isinstance(value, ModuleType) else _is_library(kind.__module__)
        if isinstance(value, (type, enum.Enum)) or (callable(value) and not hasattr(kind.__call__, "__code__")):
            return value
        has_attributes = hasattr(value, "__dict__") or any("__slots__" in vars(each) for each in kind.__mro__)
        if not has_attributes or (of_library and kind not in _NAMESPACES):
            return value
        self._seen[id(value)] = made = Attributes(value, self)
        return made

    def attribute(self, holder: Any, name: str) -> Any:
        value = getattr(holder, name)
        number = _number_of(value)
        if number is not None and math.isfinite(number):
            # Another value is another number: the mod may change what it reads.
            return lifted(number, ("attribute", id(holder), name, repr(value)), self._guards)
        if isinstance(value, Tensor):
            self._names.setdefault(id(value), name)
            return value
        if isinstance(value, MethodType) and value.__self__ is holder:
            return MethodType(self.lifted(value.__func__), self.attribute_holder(holder))
        return self.lifted(value)


class Attributes:
    """A stand-in for an object while a mod is traced, so that numbers among its attributes become params."""

    def __init__(self, target: Any, lifting: Lifting) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_lifting", lifting)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_target"))

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(object.__getattribute__(self, "_target"))
        lifting = object.__getattribute__(self, "_lifting")
        return lifting.attribute(object.__getattribute__(self, "_target"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_target"), name, told(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = object.__getattribute__(self, "_target")
        method: Callable[..., Any] = type(target).__call__
        if type(method) is FunctionType and not _is_of_library(method):
            return object.__getattribute__(self, "_lifting").lifted(method)(self, *args, **kwargs)
        return target(*args, **kwargs)


def _passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(object.__getattribute__(self, "_target"), *args)


for _function in (bool, repr, str, format, len, iter, hash, operator.getitem, operator.contains, operator.eq):
    setattr(Attributes, f"__{_function.__name__}__", _passed_on(_function))
