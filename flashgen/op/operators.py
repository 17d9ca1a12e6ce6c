"""Makes the operators of exported programs known to PyTorch, as soon as both it and flashgen are imported.

In: what ``exported.py`` remembers. Out: operators of ``torch.library``. Nothing is compiled before one is called, and
PyTorch is not imported for it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from flashgen.op.exported import Exported, all_recalled, recalled


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
        from flashgen.op.namespace import connect as connect_namespace

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
