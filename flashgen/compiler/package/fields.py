"""JSON as dataclasses: each field is of the type that its class says, or an error names it.

In: a type and what JSON holds. Out: an instance. Types are those of manifests: plain values, enumerations, tuples,
mappings, dataclasses, and what may be None besides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Made = TypeVar("Made")

_JSON = {dict: "an object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
_MOST_SHOWN = 40


class Damaged(ValueError):  # noqa: N818 - reads as what happened
    """Data is not what a type says; the message names the field."""


def made(kind: type[Made], value: Any, where: str = "") -> Made:
    """``value`` as a ``kind``; ``where`` is its place in the data. Raises ``Damaged``."""
    found: Made = _made(kind, value, where)
    return found


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in inner):
        return value
    if origin is UnionType:
        return _made(_likeliest([each for each in inner if each is not NoneType], value), value, where)
    if origin is tuple:
        return tuple(_made(inner[0], each, f"{where}[{n}]") for n, each in enumerate(_checked(list, value, where)))
    if origin is Mapping:
        return {name: _made(inner[1], each, _at(where, name)) for name, each in _checked(dict, value, where).items()}
    if is_dataclass(kind):
        return _instance(kind, _checked(dict, value, where), where)
    if issubclass(kind, Enum):
        if value not in [each.value for each in kind]:
            raise Damaged(f"'{where}' is {_shown(value)}, not one of {', '.join(str(each.value) for each in kind)}")
        return kind(value)
    return _checked(kind, value, where)


def _likeliest(kinds: Sequence[Any], value: Any) -> Any:
    """Of several dataclasses the one that ``schedule`` names, else the one whose fields differ least from these."""
    if len(kinds) == 1 or not isinstance(value, dict):
        return kinds[0]
    named = value.get("schedule")
    return min(kinds, key=lambda kind: (kind.__name__ != named, len(_types(kind).keys() ^ value.keys())))


def _instance(kind: Any, value: dict[str, Any], where: str) -> Any:
    """Of a dataclass, all of whose fields are there, but those that are None where nothing is said."""
    types = _types(kind)
    for name in value:
        if name not in types:
            raise Damaged(f"'{_at(where, name)}' is not known")
    for each in fields(kind):
        if each.name not in value and each.default is not None:
            raise Damaged(f"'{_at(where, each.name)}' is missing")
    return kind(**{name: _made(types[name], each, _at(where, name)) for name, each in value.items()})


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(kind: type[Made], value: Any, where: str) -> Made:
    if type(value) is not kind:  # true is no integer
        raise Damaged(f"'{where}' is {_shown(value)}, not {_JSON[kind]}" if where else f"it is not {_JSON[kind]}")
    return value


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
