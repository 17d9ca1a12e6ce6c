"""The whole compiler: from a spec file to diagnostics, a plan, a generated package, or an operator.

    text ─parse_file─▶ AttentionSpec ─analyse─▶ Variant ─plan─▶ Plan ─emit_cpu─▶ KernelSource ─compile_sources─▶ Binary

``compile_spec`` runs the middle of that line; everything else here decides where text comes from and where results go.
Nothing here imports torch until an operator is asked for.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.analysis.index_checks import index_diagnostics
from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import Diagnostic, Source, SpecError, in_reading_order, nearest, quoted_list
from flashgen.ir.serialize import spec_from_data
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.plan.cuda_devices import TARGETS as GPU_TARGETS
from flashgen.plan.cuda_devices import Target
from flashgen.plan.device_table import Gpu, known_devices, product_of
from flashgen.plan.devices import GENERIC_CPU, Device, local_cpu
from flashgen.plan.gpu_architecture import target_named
from flashgen.plan.manifest import SPEC_FILE_NAME, Manifest, rebuild_hint
from flashgen.plan.plan import Plan
from flashgen.plan.planner import plan, schedule_warnings
from flashgen.recall import cpu_source, specs_of_file, specs_of_text
from flashgen.runtime.compiler import CompilerMissing, compile_sources
from flashgen.tuned import adopted, planned

if TYPE_CHECKING:
    from flashgen.emit.kernel_source import KernelSource
    from flashgen.emit.package import GpuFiles
    from flashgen.language import SpecFile
    from flashgen.plan.cuda_plan import CudaPlan
    from flashgen.plan.report import PlanReport
    from flashgen.runtime.op import AttentionOp, BaseOp, OpParts

CPU_TARGET = "cpu"
TARGETS = (CPU_TARGET, *GPU_TARGETS)
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
    plan: Plan | CudaPlan
    source: KernelSource


@dataclass(frozen=True)
class BuildResult:
    """One generated package; ``changed`` are the files that were not yet as they are to be.

    ``rejected`` are sentences about tiles of GPU kernels that were passed over because registers spilled.
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    changed: tuple[Path, ...]
    seconds: float
    rejected: tuple[str, ...] = ()


def compile_spec(spec: AttentionSpec, device: Device | Target) -> tuple[CompiledKernel, ...]:
    """Analyse, plan and emit every head dimension of a spec for a device."""
    variants = (analyse(spec, head_dim) for head_dim in spec.head_dims)
    return tuple(
        _compile_gpu(each, device) if isinstance(device, Target) else _compile_cpu(each, device) for each in variants
    )


def _compile_cpu(variant: Variant, device: Device) -> CompiledKernel:
    """The text depends on the spec alone: it shows a plan for a generic CPU; macros carry the tiles of the device."""
    decisions = planned(variant, device)
    source = cpu_source(variant, lambda: _emit_cpu(variant))
    return CompiledKernel(variant, decisions, replace(source, defines=decisions.defines))


def _emit_cpu(variant: Variant) -> KernelSource:
    from flashgen.emit.cpu import emit_cpu

    return emit_cpu(variant, plan(variant, GENERIC_CPU))


def _compile_gpu(variant: Variant, target: Target) -> CompiledKernel:
    from flashgen.targets import source_for

    return CompiledKernel(variant, *source_for(variant, target))


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
) -> tuple[Plan | CudaPlan, ...]:
    """The plans of every spec and head dimension of a file, for a device by name or the machine at hand."""
    found = local_cpu() if device is None else device_named(device)
    target = found.target if isinstance(found, Gpu) else found
    target = target if sram is None else target.with_sram(sram)
    checked = check_file(path, constants)
    variants = (analyse(spec, head_dim) for spec in checked.specs for head_dim in spec.head_dims)
    return tuple(_plan_gpu(each, target) if isinstance(target, Target) else planned(each, target) for each in variants)


def _plan_gpu(variant: Variant, target: Target) -> CudaPlan:
    from flashgen.plan.cuda_planner import plan_cuda

    return plan_cuda(variant, target)


def report_file(
    path: Path | str,
    *,
    device: str | None = None,
    sram: int | None = None,
    shape: Shape | None = None,
    constants: Mapping[str, Constant] | None = None,
) -> tuple[PlanReport, ...]:
    """The plans of a file with everything that is known of them at a shape. An architecture is timed on a product."""
    from flashgen.plan.report import DEFAULT_SHAPE, report

    found = local_cpu() if device is None else device_named(device)
    if isinstance(found, Target):
        found = product_of(found)
    found = found if sram is None else found.with_sram(sram)
    checked = check_file(path, constants)
    variants = (analyse(spec, head_dim) for spec in checked.specs for head_dim in spec.head_dims)
    if isinstance(found, Gpu):
        return tuple(report(each, found, shape or DEFAULT_SHAPE) for each in variants)
    return tuple(
        replace(report(adopted(each, found), found, shape or DEFAULT_SHAPE), plan=planned(each, found))
        for each in variants
    )


def device_names() -> tuple[str, ...]:
    """The devices that plans can be made for: CPUs, GPUs, and architectures of GPUs."""
    return ("local", *known_devices().names, *GPU_TARGETS)


def device_named(name: str) -> Device | Gpu | Target:
    """A CPU, a GPU, an architecture of GPUs, or ``local``; ``SpecError`` for an unknown name."""
    if name == "local":
        return local_cpu()
    known = known_devices()
    found = known.cpus.get(name) or known.gpus.get(name) or target_named(name)
    if found is not None:
        return found
    hints = _did_you_mean(name, device_names())
    raise SpecError([Diagnostic("E405", f"there is no device '{name}'", None, hints=hints)])


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
    targets: Sequence[str] = (CPU_TARGET,),
    constants: Mapping[str, Constant] | None = None,
    check: bool = False,
) -> tuple[BuildResult, ...]:
    """Write ``output/<name>/`` for every spec of a file and compile it into the cache.

    With ``check`` nothing is written; ``changed`` then names the files that differ. Raises ``SpecError``,
    ``CompileFailed``, ``OSError``, and ``NvrtcMissing`` where there is a GPU among the targets. Where there is no C++
    compiler the package is written all the same.
    """
    for target in targets:
        if target not in TARGETS:
            raise SpecError(
                [Diagnostic("E405", f"there is no target '{target}'", None, hints=_did_you_mean(target, TARGETS))]
            )
    return tuple(_build(spec, output, targets, check=check) for spec in check_file(path, constants).specs)


def _build(spec: AttentionSpec, output: Path, targets: Sequence[str], *, check: bool) -> BuildResult:
    from flashgen.emit.package import package_files

    start = time.perf_counter()
    kernels = compile_spec(spec, local_cpu()) if CPU_TARGET in targets else ()
    binaries = _binaries(spec, [GPU_TARGETS[target] for target in targets if target != CPU_TARGET])
    folder = output / spec.name
    changed = []
    files = package_files(spec, [(kernel.source, plan(kernel.variant, GENERIC_CPU)) for kernel in kernels], binaries)
    for name, content in files.items():
        file = folder / name
        if file.is_file() and file.read_bytes() == content:
            continue
        changed.append(file)
        if not check:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    stale = _stale(folder, files)
    changed += stale
    if not check:
        for file in stale:
            file.unlink()
        # The cache is filled for the machine at hand, so that the import finds everything there.
        with contextlib.suppress(CompilerMissing):
            compile_sources([kernel.source for kernel in kernels])
    return BuildResult(
        name=spec.name,
        folder=folder,
        files=tuple(folder / name for name in files),
        changed=tuple(changed),
        seconds=time.perf_counter() - start,
        rejected=tuple(
            f"{binary.file}: {lost.pass_name}, {lost.reason}"
            for binary in (each.binary for each in binaries)
            for lost in binary.rejected
            if "spills" in lost.reason
        ),
    )


def _binaries(spec: AttentionSpec, targets: Sequence[Target]) -> Sequence[GpuFiles]:
    """Every head dimension for every GPU target."""
    if not targets:
        return ()
    from flashgen.targets import compile_variant, files_of

    variants = [analyse(spec, head_dim) for head_dim in spec.head_dims]
    return [files_of(compile_variant(variant, target)) for target in targets for variant in variants]


def _stale(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Sources and binaries that an earlier build wrote and this one does not."""
    written = (file for suffix in ("cpp", "cu", "cubin") for file in folder.glob(f"*.{suffix}"))
    return sorted(file for file in written if file.name not in files)


# -- load --------------------------------------------------------------------------------------------------------------


def load(
    path: Path | str, name: str | None = None, const: Mapping[str, Constant] | None = None, backend: str | None = None
) -> AttentionOp:
    """Compile a spec (or take it from the cache) and return its operator.

    ``name`` chooses among several attention blocks; ``const`` overrides constants. Raises ``SpecError`` for a wrong
    spec and ``ValueError`` for a name or backend that is not there.
    """
    constants = dict(const or {})
    specs = specs_of_file(path, constants, lambda: check_file(path, constants).specs)
    return _load(specs, name, backend, (load, (str(Path(path).resolve()), name, constants, backend)))


def loads(
    text: str, name: str | None = None, const: Mapping[str, Constant] | None = None, backend: str | None = None
) -> AttentionOp:
    """``load`` for the text of a spec."""
    constants = dict(const or {})
    specs = specs_of_text(text, constants, lambda: _check_text(text, constants).specs)
    return _load(specs, name, backend, (loads, (text, name, constants, backend)))


def _check_text(text: str, constants: Mapping[str, Constant]) -> Checked:
    from flashgen.language import parse_text

    return _checked(parse_text(text, constants=constants))


def load_spec(spec: AttentionSpec, backend: str | None = None) -> AttentionOp:
    """The operator of a spec that was changed after it was parsed. It cannot be pickled: no text says the same."""
    from flashgen.runtime.op import AttentionOp, check_backend

    check_backend(backend)
    return AttentionOp(_parts(spec, compile_spec(spec, _device_of(backend)), backend, None))


def open_package(folder: Path, operator: type[Operator]) -> Operator:
    """The operator of a generated package, an instance of the class that the package defines.

    The sources are compiled as they stand in the folder, with the plan for the machine at hand; those for GPUs where
    no binary runs on the one that a call meets. Raises ``ImportError`` where the folder is damaged or was written by
    another version.
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
    kernels = [] if manifest.kernels else [*compile_spec(spec, local_cpu())]
    for entry, head_dim in zip(manifest.kernels, spec.head_dims, strict=bool(manifest.kernels)):
        variant = analyse(spec, head_dim)
        decisions = planned(variant, local_cpu())
        name = Path(entry.file).stem
        source = KernelSource(name, entry.target, entry.symbol, head_dim, texts[entry.symbol], decisions.defines)
        kernels.append(CompiledKernel(variant, decisions, source))
    return operator(_parts(spec, kernels, None, (open_package, (folder, operator)), (folder, manifest)))


def _load(specs: Sequence[AttentionSpec], name: str | None, backend: str | None, again: _Reopen) -> AttentionOp:
    from flashgen.runtime.op import AttentionOp, check_backend

    check_backend(backend)
    spec = _choose(specs, name)
    return AttentionOp(_parts(spec, compile_spec(spec, _device_of(backend)), backend, again))


def _device_of(backend: str | None) -> Device | Target:
    """What the sources of an op are made for that runs on this machine."""
    from flashgen.backends import EMULATED, gpu_at_hand

    return {"emulator": lambda: EMULATED, "cuda": gpu_at_hand}.get(str(backend), local_cpu)()


def _parts(
    spec: AttentionSpec,
    kernels: Sequence[CompiledKernel],
    backend: str | None,
    again: _Reopen | None,
    package: tuple[Path, Manifest] | None = None,
) -> OpParts:
    from flashgen.backends import providers
    from flashgen.runtime.op import OpParts

    sources = tuple(kernel.source for kernel in kernels)
    return OpParts(
        spec=spec,
        kernels=providers(spec, backend, sources, package),
        plan={kernel.source.head_dim: kernel.plan for kernel in kernels},
        sources=sources,
        backend=backend,
        reopen=again,
    )


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
