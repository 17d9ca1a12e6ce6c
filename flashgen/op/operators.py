"""Remembers the operators of exported programs, so that other processes of this user and machine find them by name.

    <cache>/operators/<key>/operator.json    name, spec, backend and target of one operator

In: what an op is made of. Out: operators of ``torch.library``, as soon as both PyTorch and flashgen are imported.
Nothing is compiled before one is called, and PyTorch is not imported for it. Programs that go to other machines need
the package of the spec there, or the spec: an import of the one, a load of the other makes the same operator.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

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


def connect() -> None:
    """Define every operator of an exported program now, or behind the import of PyTorch."""
    if "torch" in sys.modules:
        _define_all()
    else:
        sys.meta_path.insert(0, _BehindTorch())


class _BehindTorch(MetaPathFinder):
    """Finds nothing itself; runs ``_define_all`` when PyTorch has been imported.

    Where a module of flashgen's is what imports it, the next import behind that module does: operators are made of
    modules that it may be one of.
    """

    def __init__(self) -> None:
        self._is_there = False

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the arguments are the protocol's
        target: ModuleType | None = None,  # noqa: ARG002 - see above
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self._is_there:
            self._define()
            return None
        sys.meta_path.remove(self)
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = None if found is None else found.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._is_there = True
                self._define()

            loader.exec_module = exec_module
        return found

    def _define(self) -> None:
        if self._is_there and self in sys.meta_path and not _is_being_imported():
            sys.meta_path.remove(self)
            _define_all()


def _is_being_imported() -> bool:
    """Whether a module of flashgen's is half-way."""
    ours = (module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "flashgen")
    return any(getattr(getattr(each, "__spec__", None), "_initializing", False) for each in ours)


def _define_all() -> None:
    try:
        from flashgen.op.registered import connect as connect_namespace

        connect_namespace(_define_by_name)
        for each in all_recalled():
            _define(each)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        warnings.warn(
            f"the operators of exported programs cannot be defined: {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno}); programs that flashgen exported do not run in this process",
            RuntimeWarning,
            stacklevel=2,
        )


def _define_by_name(name: str) -> bool:
    found = recalled(name)
    if found is not None:
        _define(found)
    return found is not None


def _define(exported: Exported) -> None:
    from flashgen.hosts.backends import deferred, emulated_target
    from flashgen.op.op import AttentionOp, OpParts

    target = emulated_target(exported.backend, exported.target or None)
    AttentionOp(
        OpParts(
            spec=exported.spec,
            kernels=deferred(exported.spec, exported.backend, target),
            identity="deferred",
            backend=exported.backend,
            label=exported.target,
            remember=exported.remember,
        )
    )
