"""What runs an op on the CPU at hand: shared libraries, compiled from sources, or as a package brings them.

In: an ``AttentionSpec``, the texts of a package. Out: a ``KernelProvider`` that also answers ``op.plan``,
``op.sources`` and ``op.explain``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.choice import TileChoices, tile_choices
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.asked import AskedCall
from flashgen.hosts.explain_cpu import explain_cpu, explain_jvp
from flashgen.hosts.kernel import ArgumentLayout, call_of
from flashgen.hosts.library import Find, Functions, LibraryKernel, functions_of
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.plan.arguments import argument_fields
from flashgen.plan.explanation import Explanation
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.cpu.tiles import CpuPlan
from flashgen.toolchains.cpp import Binary, CompileFailed, CompilerMissing, compile_sources, find_compiler

if TYPE_CHECKING:
    from flashgen.compiler.package.cpu import Library
    from flashgen.compiler.package.manifest import Manifest

CPU_TANGENTS = ("all that the others take", "all that the others take")
# Libraries of tangents: the function of each, and what it computes.
_TANGENTS: Mapping[Kind, tuple[str, Callable[[Variant], Variant]]] = {
    FORWARD_MODE: ("jvp", with_tangent),
    FORWARD_MODE_BACKWARD: ("jvp_backward", with_slopes),
}
# The functions of a library that has a part alone.
_NAMES = {"forward": ("forward",), "backward": ("backward",), "ragged": ("ragged_forward", "ragged_backward")}

# The sources of a package for CPUs, by head dimension, without macros.
Texts = Mapping[HeadDim, KernelSource]
# A generated package: its folder, and what it says of itself.
Package = tuple[Path, "Manifest"]


def cpu_provider(
    spec: AttentionSpec, texts: Texts | None = None, package: Package | None = None, *, at_once: bool = True
) -> CpuProvider | None:
    """Shared libraries; without a compiler those of a package, else None, with a warning."""
    try:
        find_compiler()
    except CompilerMissing as error:
        why = str(error)
        if package is not None and texts is not None:
            from flashgen.compiler.package.cpu import NoLibrary, libraries

            try:
                provider = CpuProvider(spec, texts, libraries(*package, spec))
                provider.kernels()
            except (NoLibrary, CompileFailed, OSError) as other:
                why = f"{error} Nor does a library of the package run here: {other}"
            else:
                return provider
        if at_once:
            warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {why}", stacklevel=6)
        return None
    provider = CpuProvider(spec, texts)
    if at_once:
        provider.kernels()
    return provider


class CpuProvider:
    """Shared libraries for the CPU at hand, one a head dimension, and one more where a tuned class has other tiles.

    ``texts`` are the sources of a package, which are compiled as they stand. ``brought`` are its libraries, which run
    as they are where nothing can be compiled: these tiles, whatever was tuned, and no forward mode.
    """

    def __init__(
        self, spec: AttentionSpec, texts: Texts | None = None, brought: Mapping[HeadDim, Library] | None = None
    ) -> None:
        self.spec, self._texts, self._brought = spec, texts, brought
        self.takes_tangents = CPU_TANGENTS if brought is None else ("", "")
        self.device = local_cpu()
        self.target = CpuTarget(self.device)
        choices = {each: tile_choices(analyse(spec, each), self.device) for each in spec.head_dims}
        self.choices: Mapping[HeadDim, TileChoices[CpuPlan, Binary]] = (
            choices if brought is None else {each: replace(of, tunings=()) for each, of in choices.items()}
        )
        self.kernels = functools.cache(self._kernels)
        self.library = functools.cache(self._library)
        self._other = functools.cache(self._of_kind)

    def __call__(self, head_dim: HeadDim, index: int) -> LibraryKernel:  # noqa: ARG002 - there is one CPU
        return self.kernels()[head_dim]

    def plan(self, head_dim: HeadDim, pins: Pins) -> CpuPlan:
        """The tiles that are compiled in."""
        if self._brought is not None:
            return self._brought[head_dim].plan
        return compiled(self.choices[head_dim].variant, self.target, pins).plan

    def source(self, head_dim: HeadDim, pins: Pins) -> KernelSource:
        """What is compiled: the text of the package, else what the spec says, and the tiles as macros."""
        if self._texts is None:
            return compiled(self.choices[head_dim].variant, self.target, pins).source
        return replace(self._texts[head_dim], defines=self.plan(head_dim, pins).defines)

    def plans(self) -> Mapping[HeadDim, CpuPlan]:
        """By head dimension, with the tiles that were tuned last."""
        usual = {head_dim: choices.usual() for head_dim, choices in self.choices.items()}
        return {head_dim: with_reasons(self.plan(head_dim, pins), pins) for head_dim, pins in usual.items()}

    def sources(self) -> tuple[KernelSource, ...]:
        """One a head dimension; others differ from it in macros alone."""
        return tuple(self.source(each, choices.usual()) for each, choices in self.choices.items())

    def explain(self, name: str, asked: AskedCall) -> Explanation:
        """One call."""
        head_dim = asked.head_dim
        choices = self.choices[head_dim]
        pins = choices.of_call(asked.element, asked.shape)
        plan, symbol = self.plan(head_dim, pins), self.source(head_dim, pins).symbol
        found = explain_cpu(name, choices.variant, self.device, asked, plan, symbol, pins.reasons)
        if not any(self.takes_tangents):
            return found
        of_tangents = (compiled(each(choices.variant), self.target).plan for _, each in _TANGENTS.values())
        forward, backward = (explain_jvp(self.device, asked, plan, symbol) for plan in of_tangents)
        return replace(found, jvp=forward, jvp_backward=backward)

    def _kernels(self) -> Mapping[HeadDim, LibraryKernel]:
        """By head dimension; what a first call runs is compiled side by side."""
        first = "forward" if self._texts is None else ""
        if self._brought is None:
            compile_sources([each.of_part(first) if first else each for each in self.sources()])
        for head_dim, choices in self.choices.items():
            self.library(head_dim, choices.usual(), first)
        fields = argument_fields(self.spec)
        return {
            each: LibraryKernel(
                ArgumentLayout(fields),
                functools.partial(self._find, each),
                other=functools.partial(self._other, each),
            )
            for each in self.choices
        }

    def _find(self, head_dim: HeadDim, name: str, values: Mapping[str, float]) -> Functions:
        """What a call runs, with the tiles that were tuned for calls like it."""
        choices, part = self.choices[head_dim], name.partition("_")[0] if self._texts is None else ""
        pins = choices.of_call(*call_of(values)) if choices.tunings else choices.usual()
        return self.library(head_dim, pins, part)(name, values)

    def _library(self, head_dim: HeadDim, pins: Pins, part: str) -> Find:
        """The forward pass, the backward pass and ragged batches are libraries, compiled when they are first needed.

        Texts of a package may be older or edited, and are compiled whole, as ``part`` "".
        """
        source = self.source(head_dim, pins)
        if self._brought is not None:
            return functions_of(self._brought[head_dim].path, source.symbol)
        return functions_of(_compiled(source.of_part(part) if part else source), source.symbol, _NAMES.get(part, ()))

    def _of_kind(self, head_dim: HeadDim, kind: Kind) -> LibraryKernel | None:
        """Another library, with the usual tiles, or with the planner's own of tangents; what a text says that may have
        been edited, no other library does.
        """
        variant, pins, only = self.choices[head_dim].variant, self.choices[head_dim].usual(), ""
        if kind in _TANGENTS:
            only, with_tangents = _TANGENTS[kind]
            variant, pins = with_tangents(variant), PLANNERS_OWN
        elif kind.on_cpus and self._texts is None:
            variant = replace(variant, kind=kind)
        else:
            return None
        source, fields = compiled(variant, self.target, pins).source, argument_fields(variant.spec, variant.kind)
        return LibraryKernel.load(_compiled(source), source.symbol, fields, only)


def _compiled(source: KernelSource) -> Path:
    (binary,) = compile_sources([source])
    return binary.path
