"""From a spec or a package to its operator: ``flashgen.load``, ``loads`` and ``open_package``.

In: a file, a text, an ``AttentionSpec``, or the folder of a package. Out: an ``AttentionOp``. PyTorch is imported when
an operator is asked for, not before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.compiler.reading import CONSTANTS, Constant, by_name, did_you_mean, read_file, read_text
from flashgen.compiler.tile_choices import TunedStore
from flashgen.diagnostics import quoted_list
from flashgen.emit.recall import specs_of_file, specs_of_text
from flashgen.ir.serialize import spec_from_data
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.op.operators import Exported
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
    from flashgen.compiler.package.manifest import SPEC_FILE_NAME, Manifest, digest, rebuild_hint
    from flashgen.compiler.package.opened import source_of

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
        from flashgen.compiler.package.opened import edited_sources

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
