"""The whole compiler: from a spec file to diagnostics, a plan, a generated package, or an operator.

    text ─parse─▶ AttentionSpec ─analyse─▶ Variant ─plan─▶ Plan ─emit─▶ KernelSource ─compile─▶ Binary
                                                  └────────────── a Target ───────────────┘

``compile_file`` is that line, for every target alike; everything else here decides where text comes from and where
results go. Nothing here imports torch until an operator is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import index_diagnostics
from flashgen.analysis.variant import Variant, analyse
from flashgen.analysis.weight_checks import weight_diagnostics
from flashgen.answers import Answer, answers_of, errors_of, warnings_of
from flashgen.choice import planned, planned_at, tile_choices
from flashgen.compiled import Assembled, CompiledKernel, assembled, compiled
from flashgen.diagnostics import Diagnostic, Source, SpecError, in_reading_order, nearest, quoted_list
from flashgen.exported import Exported
from flashgen.gallery import spec_file
from flashgen.ir.serialize import spec_from_data
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.package.manifest import SPEC_FILE_NAME, Manifest, digest, rebuild_hint
from flashgen.plan.plan import Plan
from flashgen.recall import specs_of_file, specs_of_text
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.device_table import known_devices, product_of
from flashgen.targets.protocol import AnyDevice, AnyTarget, BinaryT, PlanT, Target
from flashgen.targets.registry import ARCHITECTURES
from flashgen.targets.registry import targets as known_targets
from flashgen.tuned import TunedStore

if TYPE_CHECKING:
    from flashgen.emit.kernel_source import KernelSource
    from flashgen.language import SpecFile
    from flashgen.plan.report import PlanReport
    from flashgen.runtime.op import AttentionOp, BaseOp, OpParts
    from flashgen.targets.gpu.target import GpuTarget

Constant = bool | int | float
_Reopen = tuple[Callable[..., Any], tuple[Any, ...]]
Operator = TypeVar("Operator", bound="BaseOp")


@dataclass(frozen=True)
class Checked:
    """A file without errors: its specs, every warning about them, and what targets answered that were asked."""

    specs: tuple[AttentionSpec, ...]
    warnings: tuple[Diagnostic, ...]
    sources: tuple[Source, ...]
    answers: tuple[Answer, ...] = ()


def compile_file(
    path: Path | str, target: Target[PlanT, BinaryT], constants: Mapping[str, Constant] | None = None
) -> tuple[Assembled[PlanT, BinaryT], ...]:
    """Every spec and head dimension of a file for a target, from its text to binaries.

    Raises ``SpecError``, ``CompilerMissing``, ``CompileFailed``.
    """
    checked = read_file(path, constants)
    variants = [analyse(spec, head_dim) for spec in checked.specs for head_dim in spec.head_dims]
    return tuple(assembled(variant, target) for variant in variants)


def compile_spec(spec: AttentionSpec, target: Target[PlanT, BinaryT]) -> tuple[CompiledKernel[PlanT, BinaryT], ...]:
    """The texts of every head dimension of a spec, with the tiles that are taken where no shape is given."""
    variants = [analyse(spec, head_dim) for head_dim in spec.head_dims]
    if target.device is None:
        return tuple(compiled(each, target) for each in variants)
    return tuple(compiled(each, target, tile_choices(each, target.device).usual()) for each in variants)


# -- check and plan ----------------------------------------------------------------------------------------------------


def read_file(path: Path | str, constants: Mapping[str, Constant] | None = None) -> Checked:
    """The specs of a file, with what is wrong or deserves a warning whatever they are compiled for.

    Raises ``SpecError`` where there is an error.
    """
    from flashgen.language import parse_file

    return _checked(parse_file(path, by_name(constants, *_CONSTANTS)))


def check_file(
    path: Path | str,
    constants: Mapping[str, Constant] | None = None,
    targets: Sequence[str] | None = None,
    answered: Callable[[Answer], object] = lambda _: None,
) -> Checked:
    """Everything that is wrong with a file or deserves a warning; raises ``SpecError`` where there is an error.

    Every target is asked whether it takes the specs. What one refuses is a warning while another takes it; where
    ``targets`` are named, it is an error. ``answered`` hears each answer, those before an error, too.
    """
    asked = list(known_targets().values()) if targets is None else [target_named(each) for each in targets]
    checked = read_file(path, constants)
    answers: list[Answer] = []
    errors: list[Diagnostic] = []
    for spec in checked.specs:
        found = answers_of(spec, asked)
        for each in found:
            answered(each)
        answers += found
        if not all(each.takes for each in found) and (targets is not None or not any(each.takes for each in found)):
            errors += errors_of(found)
    if errors:
        raise SpecError(in_reading_order((*checked.warnings, *errors), checked.sources), checked.sources)
    warnings = in_reading_order((*checked.warnings, *warnings_of(answers)), checked.sources)
    return replace(checked, warnings=warnings, answers=tuple(answers))


def plan_file(
    path: Path | str,
    *,
    device: str | None = None,
    sram: int | None = None,
    constants: Mapping[str, Constant] | None = None,
) -> tuple[Plan, ...]:
    """The plans of every spec and head dimension of a file, for a device by name or the machine at hand."""
    on = device_named(device or "local", sram)
    checked = read_file(path, constants)
    return tuple(planned(analyse(spec, each), on) for spec in checked.specs for each in spec.head_dims)


def report_file(
    path: Path | str,
    *,
    device: str | None = None,
    sram: int | None = None,
    shape: Shape | None = None,
    constants: Mapping[str, Constant] | None = None,
) -> tuple[PlanReport, ...]:
    """The plans of a file with everything that is known of them at a shape. An architecture is timed on a product."""
    from flashgen.plan.report import DEFAULT_SHAPE
    from flashgen.targets.report import report

    on, at = device_named(device or "local", sram), shape or DEFAULT_SHAPE
    checked = read_file(path, constants)
    return tuple(report(each, on, at, planned_at(each, on, at)) for each in variants_of(checked))


def variants_of(checked: Checked) -> tuple[Variant, ...]:
    """Every spec of a file at each of its head dimensions."""
    return tuple(analyse(spec, head_dim) for spec in checked.specs for head_dim in spec.head_dims)


def device_names() -> tuple[str, ...]:
    """The devices that plans can be made for: CPUs, GPUs, and architectures of GPUs."""
    return ("local", *known_devices().names, *(name for name, each in ARCHITECTURES.items() if each.is_generated))


def device_named(name: str, sram: int | None = None) -> AnyDevice:
    """A CPU, a GPU, a product that stands for an architecture of GPUs, or ``local``; ``SpecError`` for another name.

    With ``sram`` bytes of memory for a tile, where these are given.
    """
    known = known_devices()
    if name == "local":
        found: AnyDevice = local_cpu()
    elif name in known.cpus:
        found = known.cpus[name]
    elif name in known.gpus:
        found = known.gpus[name]
    elif name in ARCHITECTURES:
        found = product_of(ARCHITECTURES[name])
    else:
        hints = _did_you_mean(name, device_names())
        raise SpecError([Diagnostic("E405", f"there is no device '{name}'", None, hints=hints)])
    return found if sram is None else found.with_sram(sram)


def target_names() -> tuple[str, ...]:
    """The targets that kernels can be made for."""
    return tuple(known_targets())


def target_named(name: str) -> AnyTarget:
    """A target; ``SpecError`` for an unknown name."""
    known = known_targets()
    if name not in known:
        raise SpecError([Diagnostic("E405", f"there is no target '{name}'", None, hints=_did_you_mean(name, known))])
    return known[name]


def _checked(parsed: SpecFile) -> Checked:
    """What only the analysis of every head dimension can see, added to what parsing saw."""
    found: dict[Diagnostic, None] = dict.fromkeys(parsed.warnings)
    for spec in parsed.specs:
        found.update(dict.fromkeys(weight_diagnostics(spec)))
        for head_dim in spec.head_dims:
            found.update(dict.fromkeys(index_diagnostics(spec, prove_indices(spec, head_dim))))
    diagnostics = in_reading_order(found, parsed.sources)
    if any(diagnostic.severity == "error" for diagnostic in diagnostics):
        raise SpecError(diagnostics, parsed.sources)
    return Checked(parsed.specs, diagnostics, parsed.sources)


# -- load --------------------------------------------------------------------------------------------------------------


def load(
    path: Path | str,
    name: str | None = None,
    const: Mapping[str, Constant] | None = None,
    backend: str | None = None,
    target: str | None = None,
) -> AttentionOp:
    """Compile a spec (or take it from the cache) and return its operator.

    ``path`` is a file, or the name of a spec that comes with flashgen (``"alibi"``; ``flashgen.gallery.names()``).
    ``name`` chooses among several attention blocks; ``const`` overrides constants; ``target`` is the architecture
    whose kernels ``backend="emulator"`` runs (``sm_80``). Raises ``SpecError`` for a wrong spec and ``ValueError`` for
    a name, backend or target that is not there.
    """
    constants, path = by_name(const, *_CONSTANTS), spec_file(path)
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
    constants = by_name(const, *_CONSTANTS)
    specs = specs_of_text(text, constants, lambda: _check_text(text, constants).specs)
    return _load(specs, name, backend, target, (loads, (text, name, constants, backend, target)))


def _check_text(text: str, constants: Mapping[str, Constant]) -> Checked:
    from flashgen.language import parse_text

    return _checked(parse_text(text, constants=constants))


_CONSTANTS = ("constants", "{'window': 128}")


def by_name(given: object, what: str, example: str) -> dict[str, Any]:
    """What a caller gives by name, nothing for None. Raises ``TypeError`` for what has no names."""
    found = {} if given is None else given
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{what} are given by their names, as in {example}, not as {given!r}")
    return dict(found)


def load_spec(spec: AttentionSpec, backend: str | None = None, target: str | None = None) -> AttentionOp:
    """The operator of a spec that no text says, as it was changed after it was parsed."""
    return _load((spec,), None, backend, target, (load_spec, (spec, backend, target)))


def open_package(folder: Path, operator: type[Operator]) -> Operator:
    """The operator of a generated package, an instance of the class that the package defines.

    The sources are compiled as they stand in the folder, with the plan for the machine at hand; those for GPUs where
    no binary runs on the one that a call meets. Raises ``ImportError`` where the folder is damaged or was written by
    another version.
    """
    from flashgen.emit.kernel_source import KernelSource

    manifest = Manifest.read(folder)
    try:
        written = (folder / SPEC_FILE_NAME).read_bytes()
        if digest(written) != manifest.files.get(SPEC_FILE_NAME):
            raise ImportError(f"'{folder / SPEC_FILE_NAME}' is not as flashgen wrote it; {rebuild_hint(folder)}")
        spec = spec_from_data(json.loads(written))
        kernels = [kernel for kernel in manifest.kernels if kernel.target == CpuTarget.name]
        texts = {kernel.symbol: (folder / kernel.file).read_text(encoding="utf-8") for kernel in kernels}
    except OSError as error:
        raise ImportError(f"'{error.filename}' cannot be read; {rebuild_hint(folder)}") from None
    sources = None
    if texts:
        sources = {
            head_dim: KernelSource(each.file, each.target, each.symbol, head_dim, texts[each.symbol], ())
            for each, head_dim in zip(kernels, spec.head_dims, strict=True)
        }
    return operator(_parts(spec, None, (open_package, (folder, operator)), package=(folder, manifest), texts=sources))


def _load(
    specs: Sequence[AttentionSpec], name: str | None, backend: str | None, target: str | None, again: _Reopen | None
) -> AttentionOp:
    from flashgen.backends import emulated_target, gpu_at_hand
    from flashgen.runtime.op import AttentionOp, check_backend

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
    emulated: GpuTarget | None = None,
) -> OpParts:
    from flashgen.backends import EMULATED, CpuProvider, EmulatorProvider, providers
    from flashgen.package.gpu import edited_sources
    from flashgen.runtime.op import OpParts

    kernels = providers(spec, backend, package, texts, emulated or EMULATED)
    sources = [
        source
        for provider in kernels.values()
        if isinstance(provider, CpuProvider | EmulatorProvider)
        for source in provider.sources()
    ]
    edited = () if package is None else edited_sources(*package)
    label = "" if backend != "emulator" else (emulated or EMULATED).name
    return OpParts(
        spec=spec,
        kernels=kernels,
        sources=(*sources, *edited),
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
        raise ValueError(f"there is no attention '{name}'; {_did_you_mean(name, names)[0]}")
    return specs[names.index(name)]


def _did_you_mean(name: str, known: Iterable[str]) -> tuple[str, ...]:
    close = nearest(name, known, limit=3)
    return (f"did you mean {quoted_list(close)}?",) if close else (f"known: {quoted_list(known, 'and')}",)
