"""The whole compiler: from a spec file to diagnostics, a plan, or binaries for every target.

    text ─parse─▶ AttentionSpec ─analyse─▶ Variant ─plan─▶ Plan ─emit─▶ KernelSource ─compile─▶ Binary
                                                  └────────────── a Target ───────────────┘

``compile_file`` is that line, for every target alike; everything else here decides where results go. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import Assembled, CompiledKernel, assembled, compiled
from flashgen.compiler.reading import (
    Checked,
    Constant,
    Verdict,
    did_you_mean,
    errors_of,
    read_file,
    verdicts_of,
    warnings_of,
)
from flashgen.compiler.tile_choices import planned, planned_at, tile_choices
from flashgen.diagnostics import Diagnostic, SpecError, in_reading_order
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.plan.plan import Plan
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.device_table import known_devices, product_of
from flashgen.targets.protocol import AnyTarget, BinaryT, Device, PlanT, Target
from flashgen.targets.registry import ARCHITECTURES
from flashgen.targets.registry import targets as known_targets

if TYPE_CHECKING:
    from flashgen.plan.report import PlanReport


def compile_file(
    path: Path | str, target: Target[PlanT, BinaryT], constants: Mapping[str, Constant] | None = None
) -> tuple[Assembled[PlanT, BinaryT], ...]:
    """Every part of every spec and head dimension of a file for a target, from its text to binaries.

    Raises ``SpecError``, ``CompilerMissing``, ``CompileFailed``.
    """
    variants = variants_of(read_file(path, constants))
    return assembled([part for each in variants for part in compiled(each, target).parts()])


def compile_spec(spec: AttentionSpec, target: Target[PlanT, BinaryT]) -> tuple[CompiledKernel[PlanT, BinaryT], ...]:
    """The texts of every head dimension of a spec, with the tiles that are taken where no shape is given."""
    variants = [analyse(spec, head_dim) for head_dim in spec.head_dims]
    if target.device is None:
        return tuple(compiled(each, target) for each in variants)
    return tuple(compiled(each, target, tile_choices(each, target.device).usual()) for each in variants)


# -- check and plan ----------------------------------------------------------------------------------------------------


def check_file(
    path: Path | str,
    constants: Mapping[str, Constant] | None = None,
    targets: Sequence[str] | None = None,
    heard: Callable[[Verdict], object] = lambda _: None,
) -> Checked:
    """Everything that is wrong with a file or deserves a warning; raises ``SpecError`` where there is an error.

    Every target is asked whether it takes the specs. What one refuses is a warning while another takes it; where
    ``targets`` are named, it is an error. ``heard`` is called with each verdict, those before an error, too.
    """
    asked = list(known_targets().values()) if targets is None else [target_named(each) for each in targets]
    checked = read_file(path, constants)
    verdicts: list[Verdict] = []
    errors: list[Diagnostic] = []
    for spec in checked.specs:
        found = verdicts_of(spec, asked)
        for each in found:
            heard(each)
        verdicts += found
        if not all(each.takes for each in found) and (targets is not None or not any(each.takes for each in found)):
            errors += errors_of(found)
    if errors:
        raise SpecError(in_reading_order((*checked.warnings, *errors), checked.sources), checked.sources)
    warnings = in_reading_order((*checked.warnings, *warnings_of(verdicts)), checked.sources)
    return replace(checked, warnings=warnings, verdicts=tuple(verdicts))


def plan_file(
    path: Path | str,
    *,
    device: str | None = None,
    sram: int | None = None,
    constants: Mapping[str, Constant] | None = None,
) -> tuple[Plan, ...]:
    """The plans of every spec and head dimension of a file, for a device by name or the machine at hand."""
    on = device_named(device or "local", sram)
    return tuple(planned(each, on) for each in variants_of(read_file(path, constants)))


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
    from flashgen.targets.families import report

    on, at = device_named(device or "local", sram), shape or DEFAULT_SHAPE
    variants = variants_of(read_file(path, constants))
    return tuple(report(each, on, at, planned_at(each, on, at)) for each in variants)


def variants_of(checked: Checked) -> tuple[Variant, ...]:
    """Every spec of a file at each of its head dimensions."""
    return tuple(analyse(spec, head_dim) for spec in checked.specs for head_dim in spec.head_dims)


def device_names() -> tuple[str, ...]:
    """The devices that plans can be made for: CPUs, GPUs, and architectures of GPUs."""
    return ("local", *known_devices().names, *(name for name, each in ARCHITECTURES.items() if each.is_generated))


def device_named(name: str, sram: int | None = None) -> Device:
    """A CPU, a GPU, a product that stands for an architecture of GPUs, or ``local``; ``SpecError`` for another name.

    With ``sram`` bytes of memory for a tile, where these are given.
    """
    known = known_devices()
    if name == "local":
        found: Device = local_cpu()
    elif name in known.cpus:
        found = known.cpus[name]
    elif name in known.gpus:
        found = known.gpus[name]
    elif name in ARCHITECTURES:
        found = product_of(ARCHITECTURES[name])
    else:
        hints = did_you_mean(name, device_names())
        raise SpecError([Diagnostic("E405", f"there is no device '{name}'", None, hints=hints)])
    return found if sram is None else found.with_sram(sram)


def target_names() -> tuple[str, ...]:
    """The targets that kernels can be made for."""
    return tuple(known_targets())


def target_named(name: str) -> AnyTarget:
    """A target; ``SpecError`` for an unknown name."""
    known = known_targets()
    if name not in known:
        raise SpecError([Diagnostic("E405", f"there is no target '{name}'", None, hints=did_you_mean(name, known))])
    return known[name]
