"""From a spec or a package to its operator: ``flashgen.load``, ``loads`` and ``open_package``.

In: a file, a text, an ``AttentionSpec``, or the folder of a package. Out: an ``AttentionOp``. PyTorch is imported when
an operator is asked for, not before.

The operators of exported programs are remembered, so that other processes of this user and machine find them by name:

    <cache>/operators/<key>/operator.json    name, spec, backend and target of one operator

They are operators of ``torch.library`` as soon as both PyTorch and flashgen are imported. Nothing is compiled before
one is called, and PyTorch is not imported for it. Programs that go to other machines need the package of the spec
there, or the spec: an import of the one, a load of the other makes the same operator.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.compiler.reading import CONSTANTS, Constant, by_name, did_you_mean, read_file, read_text
from flashgen.compiler.tile_choices import TunedStore
from flashgen.diagnostics import quoted_list
from flashgen.emit.recall import specs_of_file, specs_of_text
from flashgen.ir.fingerprint import operator_name
from flashgen.ir.serialize import spec_from_data, spec_to_data
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.store.cache import Cache, key_of
from flashgen.store.gallery import spec_file
from flashgen.targets.cpu.target import CpuTarget

if TYPE_CHECKING:
    from flashgen.compiler.package.manifest import Manifest
    from flashgen.emit.kernel_source import KernelSource
    from flashgen.op.op import AttentionOp, BaseOp, OpParts

_Reopen = tuple[Callable[..., Any], tuple[Any, ...]]
Operator = TypeVar("Operator", bound="BaseOp")


def load(
    path: Path | str,
    name: str | None = None,
    const: Mapping[str, Constant] | None = None,
    backend: str | None = None,
    target: str | None = None,
) -> AttentionOp:
    """Compile a spec (or take it from the cache) and return its operator.

    ``path`` is a file, or the name of a spec that comes with flashgen (``"alibi"``; ``store.gallery.names()``).
    ``name`` chooses among several attention blocks; ``const`` overrides constants; ``target`` is the architecture
    whose kernels ``backend="emulator"`` runs (``sm_80``). Raises ``SpecError`` for a wrong spec and ``ValueError`` for
    a name, backend or target that is not there.
    """
    constants, path = by_name(const, *CONSTANTS), spec_file(path)
    specs = specs_of_file(path, constants, lambda: read_file(path, constants).specs)
    again = (load, (str(Path(path).resolve()), name, constants, backend, target))
    return _load(specs, name, backend, target, again)


def loads(
    text: str,
    name: str | None = None,
    const: Mapping[str, Constant] | None = None,
    backend: str | None = None,
    target: str | None = None,
) -> AttentionOp:
    """``load`` for the text of a spec. Raises ``TypeError`` for what is no text."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a spec must be a str, not {type(text).__name__}; flashgen.load takes files")
    constants = by_name(const, *CONSTANTS)
    specs = specs_of_text(text, constants, lambda: read_text(text, constants).specs)
    return _load(specs, name, backend, target, (loads, (text, name, constants, backend, target)))


def load_spec(spec: AttentionSpec, backend: str | None = None, target: str | None = None) -> AttentionOp:
    """The operator of a spec that no text says, as it was changed after it was parsed."""
    return _load((spec,), None, backend, target, (load_spec, (spec, backend, target)))


def open_package(folder: Path, operator: type[Operator]) -> Operator:
    """The operator of a generated package, an instance of the class that the package defines.

    The sources are compiled as they stand in the folder, with the plan for the machine at hand; those for GPUs where
    no binary runs on the one that a call meets. Raises ``ImportError`` where the folder is damaged or was written by
    another version.
    """
    from flashgen.compiler.package.manifest import SPEC_FILE_NAME, Manifest, digest, rebuild_hint, source_of

    manifest = Manifest.read(folder)
    try:
        written = (folder / SPEC_FILE_NAME).read_bytes()
        if digest(written) != manifest.files.get(SPEC_FILE_NAME):
            raise ImportError(f"'{folder / SPEC_FILE_NAME}' is not as flashgen wrote it; {rebuild_hint(folder)}")
        spec = spec_from_data(json.loads(written))
        kernels = [kernel for kernel in manifest.kernels if kernel.target == CpuTarget.name]
        texts = [source_of(folder, manifest, kernel)[0] for kernel in kernels]
    except OSError as error:
        raise ImportError(f"'{error.filename}' cannot be read; {rebuild_hint(folder)}") from None
    sources = dict(zip(spec.head_dims, texts, strict=True)) if texts else None
    return operator(_parts(spec, None, (open_package, (folder, operator)), package=(folder, manifest), texts=sources))


def _load(
    specs: Sequence[AttentionSpec], name: str | None, backend: str | None, target: str | None, again: _Reopen | None
) -> AttentionOp:
    from flashgen.hosts.backends import emulated_target, gpu_at_hand
    from flashgen.op.op import AttentionOp, check_backend

    check_backend(backend)
    emulated = emulated_target(backend, target)
    spec = _choose(specs, name)
    if backend == "cuda":
        gpu_at_hand()  # raises where it cannot work
    return AttentionOp(_parts(spec, backend, again, emulated=emulated))


def _parts(
    spec: AttentionSpec,
    backend: str | None,
    again: _Reopen | None,
    *,
    package: tuple[Path, Manifest] | None = None,
    texts: Mapping[HeadDim, KernelSource] | None = None,
    emulated: str | None = None,
) -> OpParts:
    from flashgen.hosts.backends import EMULATED, providers
    from flashgen.op.op import OpParts

    kernels = providers(spec, backend, package, texts, emulated or EMULATED)
    on_host: Any = kernels.get("cpu")
    edited: Sequence[KernelSource] = ()
    if package is not None:
        from flashgen.compiler.package.manifest import edited_sources

        edited = edited_sources(*package)
    label = "" if backend != "emulator" else emulated or EMULATED
    return OpParts(
        spec=spec,
        kernels=kernels,
        sources=(*(() if on_host is None else on_host.sources()), *edited),
        identity=TunedStore.default().digest(spec.name),
        backend=backend,
        reopen=again,
        label=label,
        edited=tuple(edited),
        remember=None if edited else Exported(spec, backend, label).remember,
    )


def _choose(specs: Sequence[AttentionSpec], name: str | None) -> AttentionSpec:
    names = [spec.name for spec in specs]
    if name is None and len(specs) == 1:
        return specs[0]
    if name is None:
        raise ValueError(f"there are {len(specs)} attention blocks, choose one by name: {quoted_list(names)}")
    if name not in names:
        raise ValueError(f"there is no attention '{name}'; {did_you_mean(name, names)[0]}")
    return specs[names.index(name)]


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
