"""The whole compiler: from a spec file to diagnostics, a plan, a generated package, or an operator.

    text ─parse_file─▶ AttentionSpec ─analyse─▶ Variant ─plan─▶ Plan ─emit_cpu─▶ KernelSource ─compile_sources─▶ Binary

``compile_spec`` runs the middle of that line; everything else here decides where text comes from and where results go.
Nothing here imports torch until an operator is asked for.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.analysis.index_checks import index_diagnostics
from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import Diagnostic, Source, SpecError, in_reading_order, nearest, quoted_list
from flashgen.ir.serialize import spec_from_data
from flashgen.ir.spec import AttentionSpec
from flashgen.plan.arguments import argument_fields
from flashgen.plan.devices import DEVICES, GENERIC_CPU, Device, local_cpu
from flashgen.plan.manifest import SPEC_FILE_NAME, Manifest, rebuild_hint
from flashgen.plan.plan import Plan
from flashgen.plan.planner import plan, schedule_warnings
from flashgen.runtime.compiler import CompilerMissing, compile_sources

if TYPE_CHECKING:
    from flashgen.emit.kernel_source import KernelSource
    from flashgen.language import SpecFile
    from flashgen.runtime.kernel import KernelProvider
    from flashgen.runtime.op import AttentionOp, BaseOp, OpParts

TARGETS = ("cpu",)
Constant = bool | int | float
_Reopen = tuple[Callable[..., Any], tuple[Any, ...]]
Operator = TypeVar("Operator", bound="BaseOp")


@dataclass(frozen=True)
class Checked:
    """A file without errors: its specs and every warning about them."""

    specs: tuple[AttentionSpec, ...]
    warnings: tuple[Diagnostic, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class CompiledKernel:
    """One head dimension after every stage but the last."""

    variant: Variant
    plan: Plan
    source: KernelSource


@dataclass(frozen=True)
class BuildResult:
    """One generated package; ``changed`` are the files that were not yet as they are to be."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    changed: tuple[Path, ...]
    seconds: float


def compile_spec(spec: AttentionSpec, device: Device) -> tuple[CompiledKernel, ...]:
    """Analyse, plan and emit every head dimension of a spec for a device.

    The text depends on the spec alone: it shows the plan for a generic CPU, and macros carry the device's own tiles.
    """
    from flashgen.emit.cpu import emit_cpu

    kernels = []
    for head_dim in spec.head_dims:
        variant = analyse(spec, head_dim)
        decisions = plan(variant, device)
        source = emit_cpu(variant, plan(variant, GENERIC_CPU))
        kernels.append(CompiledKernel(variant, decisions, replace(source, defines=decisions.defines)))
    return tuple(kernels)


# -- check and plan ----------------------------------------------------------------------------------------------------


def check_file(path: Path | str, constants: Mapping[str, Constant] | None = None) -> Checked:
    """Everything that is wrong with a file or deserves a warning; raises ``SpecError`` where there is an error."""
    from flashgen.language import parse_file

    return _checked(parse_file(path, constants or {}))


def plan_file(
    path: Path | str,
    *,
    device: str | None = None,
    sram: int | None = None,
    constants: Mapping[str, Constant] | None = None,
) -> tuple[Plan, ...]:
    """The plans of every spec and head dimension of a file, for a device by name or the machine at hand."""
    target = local_cpu() if device is None else _device(device)
    if sram is not None:
        target = replace(target, name=f"{target.name} with {sram} bytes", sram_bytes=sram, source="given")
    checked = check_file(path, constants)
    return tuple(plan(analyse(spec, head_dim), target) for spec in checked.specs for head_dim in spec.head_dims)


def device_names() -> tuple[str, ...]:
    """The devices that plans can be made for."""
    return ("local", *DEVICES)


def _device(name: str) -> Device:
    if name == "local":
        return local_cpu()
    if name in DEVICES:
        return DEVICES[name]
    raise SpecError([Diagnostic("E405", f"there is no device '{name}'", None, hints=_did_you_mean(name, DEVICES))])


def _checked(parsed: SpecFile) -> Checked:
    """What only the analysis of every head dimension can see, added to what parsing saw."""
    found: dict[Diagnostic, None] = dict.fromkeys(parsed.warnings)
    for spec in parsed.specs:
        for head_dim in spec.head_dims:
            variant = analyse(spec, head_dim)
            found.update(dict.fromkeys(index_diagnostics(spec, variant.proofs)))
            plan(variant, GENERIC_CPU)
            found.update(dict.fromkeys(schedule_warnings(variant)))
    diagnostics = in_reading_order(found, parsed.sources)
    if any(diagnostic.severity == "error" for diagnostic in diagnostics):
        raise SpecError(diagnostics, parsed.sources)
    return Checked(parsed.specs, diagnostics, parsed.sources)


# -- build -------------------------------------------------------------------------------------------------------------


def build_file(
    path: Path | str,
    *,
    output: Path = Path("generated"),
    targets: Sequence[str] = TARGETS,
    constants: Mapping[str, Constant] | None = None,
    check: bool = False,
) -> tuple[BuildResult, ...]:
    """Write ``output/<name>/`` for every spec of a file and compile it into the cache.

    With ``check`` nothing is written or compiled; ``changed`` then names the files that differ. Raises ``SpecError``,
    ``CompileFailed``, ``OSError``. Where there is no compiler the package is written all the same.
    """
    for target in targets:
        if target not in TARGETS:
            raise SpecError(
                [Diagnostic("E405", f"there is no target '{target}'", None, hints=_did_you_mean(target, TARGETS))]
            )
    return tuple(_build(spec, output, check=check) for spec in check_file(path, constants).specs)


def _build(spec: AttentionSpec, output: Path, *, check: bool) -> BuildResult:
    from flashgen.emit.package import package_files

    start = time.perf_counter()
    kernels = compile_spec(spec, local_cpu())
    folder = output / spec.name
    changed = []
    texts = package_files(spec, [(kernel.source, plan(kernel.variant, GENERIC_CPU)) for kernel in kernels])
    for name, text in texts.items():
        file = folder / name
        content = text.encode()
        if file.is_file() and file.read_bytes() == content:
            continue
        changed.append(file)
        if not check:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    stale = _stale(folder, texts)
    changed += stale
    if not check:
        for file in stale:
            file.unlink()
        # The cache is filled for the machine at hand, so that the import finds everything there.
        with contextlib.suppress(CompilerMissing):
            compile_sources([kernel.source for kernel in kernels])
    return BuildResult(
        spec.name, folder, tuple(folder / name for name in texts), tuple(changed), time.perf_counter() - start
    )


def _stale(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Sources that an earlier build wrote and this one does not."""
    return sorted(file for file in folder.glob("*.cpp") if file.name not in texts)


# -- load --------------------------------------------------------------------------------------------------------------


def load(
    path: Path | str, name: str | None = None, const: Mapping[str, Constant] | None = None, backend: str | None = None
) -> AttentionOp:
    """Compile a spec (or take it from the cache) and return its operator.

    ``name`` chooses among several attention blocks; ``const`` overrides constants. Raises ``SpecError`` for a wrong
    spec and ``ValueError`` for a name or backend that is not there.
    """
    from flashgen.language import parse_file

    again = (load, (str(Path(path).resolve()), name, dict(const or {}), backend))
    return _load(parse_file(path, const or {}), name, backend, again)


def loads(
    text: str, name: str | None = None, const: Mapping[str, Constant] | None = None, backend: str | None = None
) -> AttentionOp:
    """``load`` for the text of a spec."""
    from flashgen.language import parse_text

    return _load(
        parse_text(text, constants=const or {}), name, backend, (loads, (text, name, dict(const or {}), backend))
    )


def open_package(folder: Path, operator: type[Operator]) -> Operator:
    """The operator of a generated package, an instance of the class that the package defines.

    The sources are compiled as they stand in the folder, with the plan for the machine at hand. Raises
    ``ImportError`` where the folder is damaged or was written by another version.
    """
    from flashgen.emit.kernel_source import KernelSource

    manifest = Manifest.read(folder)
    try:
        spec = spec_from_data(json.loads((folder / SPEC_FILE_NAME).read_text(encoding="utf-8")))
        texts = {kernel.symbol: (folder / kernel.file).read_text(encoding="utf-8") for kernel in manifest.kernels}
    except OSError as error:
        raise ImportError(f"'{error.filename}' cannot be read; {rebuild_hint(folder)}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ImportError(f"'{folder / SPEC_FILE_NAME}' is damaged ({error}); {rebuild_hint(folder)}") from None
    kernels = []
    for entry, head_dim in zip(manifest.kernels, spec.head_dims, strict=True):
        variant = analyse(spec, head_dim)
        decisions = plan(variant, local_cpu())
        name = Path(entry.file).stem
        source = KernelSource(name, entry.target, entry.symbol, head_dim, texts[entry.symbol], decisions.defines)
        kernels.append(CompiledKernel(variant, decisions, source))
    return operator(_parts(spec, kernels, None, (open_package, (folder, operator))))


def _load(parsed: SpecFile, name: str | None, backend: str | None, again: _Reopen) -> AttentionOp:
    from flashgen.runtime.op import AttentionOp, check_backend

    check_backend(backend)
    spec = _choose(_checked(parsed).specs, name)
    return AttentionOp(_parts(spec, compile_spec(spec, local_cpu()), backend, again))


def _parts(spec: AttentionSpec, kernels: Sequence[CompiledKernel], backend: str | None, again: _Reopen) -> OpParts:
    from flashgen.runtime.op import OpParts

    return OpParts(
        spec=spec,
        kernels={} if backend == "reference" else {"cpu": _loaded(spec, kernels)},
        plan={kernel.source.head_dim: kernel.plan for kernel in kernels},
        sources=tuple(kernel.source for kernel in kernels),
        backend=backend,
        reopen=again,
    )


def _loaded(spec: AttentionSpec, kernels: Sequence[CompiledKernel]) -> KernelProvider | None:
    """The kernels as functions; None, with a warning, where this machine has no compiler."""
    from flashgen.runtime.kernel import LibraryKernel

    fields = argument_fields(spec)
    try:
        binaries = compile_sources([kernel.source for kernel in kernels])
    except CompilerMissing as error:
        warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {error}", stacklevel=4)
        return None
    found = {
        kernel.source.head_dim: LibraryKernel.load(binary.path, kernel.source.symbol, fields)
        for kernel, binary in zip(kernels, binaries, strict=True)
    }
    return lambda head_dim, _: found[head_dim]


def _choose(specs: Sequence[AttentionSpec], name: str | None) -> AttentionSpec:
    names = [spec.name for spec in specs]
    if name is None and len(specs) == 1:
        return specs[0]
    if name is None:
        raise ValueError(f"there are {len(specs)} attention blocks, choose one by name: {quoted_list(names)}")
    if name not in names:
        raise ValueError(f"there is no attention '{name}'; {_did_you_mean(name, names)[0]}")
    return specs[names.index(name)]


def _did_you_mean(name: str, known: Iterable[str]) -> tuple[str, ...]:
    close = nearest(name, known, limit=3)
    return (f"did you mean {quoted_list(close)}?",) if close else (f"known: {quoted_list(known, 'and')}",)
