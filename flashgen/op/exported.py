"""Remembers the operators of exported programs, so that other processes of this user and machine find them by name.

    <cache>/operators/<key>/operator.json    name, spec, backend and target of one operator

In: what an op is made of. Out: the same, by the name that a program calls it. Programs that go to other machines need
the package of the spec there, or the spec: an import of the one, a load of the other makes the same operator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.ir.fingerprint import operator_name
from flashgen.ir.serialize import spec_from_data, spec_to_data
from flashgen.ir.spec import AttentionSpec
from flashgen.store.cache import Cache, key_of

_FILE = "operator.json"


@dataclass(frozen=True)
class Exported:
    """An operator: ``target`` is the architecture that the emulator's kernels are made for, empty for other backends.

    The package of a user's own sources is not remembered: its folder may be elsewhere.
    """

    spec: AttentionSpec
    backend: str | None
    target: str

    @property
    def name(self) -> str:
        """Of its torch operator, without the namespace."""
        return operator_name(self.spec, self.backend, self.target)

    def remember(self) -> None:
        """Keep it under its name, for this machine; nothing happens where the cache folder cannot be written."""
        name = self.name
        content = {"name": name, "spec": spec_to_data(self.spec), "backend": self.backend, "target": self.target}
        Cache.of_operators().usable().write(_key(name), _FILE, json.dumps(content).encode())


def recalled(name: str) -> Exported | None:
    """The operator of this name; None where no program with it was exported here."""
    return _read(Cache.of_operators(), _key(name), name)


def all_recalled() -> Iterator[Exported]:
    """Every operator that was exported here. What cannot be relied on, or is damaged, is passed over."""
    stored = Cache.of_operators()
    keys = stored.keys()
    if not keys or stored.doubt() is not None:
        return
    for key in keys:
        found = _read(stored, key)
        if found is not None:
            yield found


def _read(stored: Cache, key: str, name: str | None = None) -> Exported | None:
    content = stored.read(key, _FILE) if stored.root.is_dir() else None
    if content is None:
        return None
    try:
        data = json.loads(content)
        found = Exported(spec_from_data(data["spec"]), data["backend"], data["target"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    # Another version may write specs, or name operators, otherwise.
    return found if found.name == data["name"] and name in (None, found.name) else None


def _key(name: str) -> str:
    return key_of("operator", name)
