"""What runs an op on the CPU at hand: shared libraries, compiled from sources, or as a package brings them.

In: an ``AttentionSpec``, the texts of a package. Out: a ``KernelProvider`` that also answers ``op.plan``,
``op.sources`` and ``op.explain``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import analyse
from flashgen.compiler.choice import TileChoices, tile_choices
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.asked import AskedCall
from flashgen.hosts.explain_cpu import explain_cpu, explain_jvp
from flashgen.hosts.kernel import call_of
from flashgen.hosts.library import LibraryKernel, LibraryPart, load_forward_mode
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.plan.arguments import argument_fields
from flashgen.plan.explanation import Explanation
from flashgen.plan.measured import Pins
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.cpu.tiles import CpuPlan
from flashgen.toolchains.cpp import Binary, CompileFailed, CompilerMissing, compile_sources, find_compiler

if TYPE_CHECKING:
    from flashgen.compiler.package.cpu import Library
    from flashgen.compiler.package.manifest import Manifest

CPU_TANGENTS = ("all that the others take",) * 2

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
            from flashgen.compiler.package.cpu import NoLibrary

            try:
                return _packaged(spec, texts, package)
            except (NoLibrary, CompileFailed, OSError) as other:
                why = f"{error} Nor does a library of the package run here: {other}"
        if at_once:
            warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {why}", stacklevel=6)
        return None
    provider = CpuProvider(spec, texts)
    if at_once:
        provider.libraries()
    return provider


def _packaged(spec: AttentionSpec, texts: Texts, package: Package) -> PackagedProvider:
    from flashgen.compiler.package.cpu import libraries

    provider = PackagedProvider(spec, texts, libraries(*package, spec))
    provider.libraries()
    return provider


class CpuProvider:
    """Shared libraries for the CPU at hand, one a head dimension, and one more where a tuned class has other tiles.

    ``texts`` are the sources of a package, which are compiled as they stand.
    """

    def __init__(self, spec: AttentionSpec, texts: Texts | None = None) -> None:
        self.spec, self._texts = spec, texts
        self.device = local_cpu()
        self.target = CpuTarget(self.device)
        self.choices: Mapping[HeadDim, TileChoices[CpuPlan, Binary]] = {
            each: tile_choices(analyse(spec, each), self.device) for each in spec.head_dims
        }
        self.libraries = functools.cache(self._libraries)
        self._kernel_of = functools.cache(self._kernel_of_kind)
        self._other = functools.cache(self._load)

    takes_tangents: ClassVar[tuple[str, ...]] = CPU_TANGENTS

    def __call__(self, head_dim: HeadDim, index: int) -> LibraryKernel:  # noqa: ARG002 - there is one CPU
        return self.libraries()[head_dim]

    def plan(self, head_dim: HeadDim, pins: Pins) -> CpuPlan:
        """The tiles that are compiled in."""
        return compiled(self.choices[head_dim].variant, self.target, pins).plan

    def source(self, head_dim: HeadDim, pins: Pins) -> KernelSource:
        """What is compiled: the text of the package, else what the spec says, and the tiles as macros."""
        if self._texts is None:
            return compiled(self.choices[head_dim].variant, self.target, pins).source
        return replace(self._texts[head_dim], defines=self.plan(head_dim, pins).defines)

    def plans(self) -> Mapping[HeadDim, CpuPlan]:
        """By head dimension, with the tiles that were tuned last."""
        found = {}
        for head_dim, choices in self.choices.items():
            pins = choices.usual()
            found[head_dim] = with_reasons(self.plan(head_dim, pins), pins)
        return found

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
        of_tangents = (plan_cpu(each(choices.variant), self.device) for each in (with_tangent, with_slopes))
        forward, backward = (explain_jvp(self.device, asked, plan, symbol) for plan in of_tangents)
        return replace(found, jvp=forward, jvp_backward=backward)

    def _forward_mode(self, kind: Kind, head_dim: HeadDim) -> LibraryKernel:
        """A library of its own, compiled when tangents are first asked for; its tiles are the planner's own."""
        own = self.choices[head_dim].variant
        variant = with_tangent(own) if kind is FORWARD_MODE else with_slopes(own)
        source = self.target.emit(variant, self.target.plan(variant))
        (binary,) = compile_sources([source])
        fields = argument_fields(variant.spec, variant.kind)
        return load_forward_mode(binary.path, source.symbol, fields, kind.passes[0])

    def _libraries(self) -> Mapping[HeadDim, LibraryKernel]:
        """Those of the usual tiles, compiled side by side."""
        found: dict[HeadDim, LibraryKernel] = {}
        sources = self.sources()
        for source, own in zip(sources, self._compiled(sources), strict=True):
            found[source.head_dim] = self._choosing(source.head_dim, own)
        return found

    def _compiled(self, sources: Sequence[KernelSource]) -> list[LibraryKernel]:
        """The forward passes, side by side; the backward pass and ragged batches are compiled when they are first
        needed, each as a library. Texts of a package may be older or edited, and are compiled whole.
        """
        fields = argument_fields(self.spec)
        if self._texts is not None:
            return [
                LibraryKernel.load(binary.path, source.symbol, fields)
                for source, binary in zip(sources, compile_sources(sources), strict=True)
            ]

        def load(source: KernelSource, part: LibraryPart) -> LibraryKernel:
            (binary,) = compile_sources([source.of_part(part)])
            return LibraryKernel.load(binary.path, source.symbol, fields, part)

        binaries = compile_sources([source.of_part("forward") for source in sources])
        return [
            replace(
                LibraryKernel.load(binary.path, source.symbol, fields, "forward"),
                others=functools.cache(functools.partial(load, source)),
            )
            for source, binary in zip(sources, binaries, strict=True)
        ]

    def _kernel_of_kind(self, head_dim: HeadDim, kind: Kind) -> LibraryKernel | None:
        """Another library, with the usual tiles; what a text says that may have been edited, no other library does."""
        if kind in (FORWARD_MODE, FORWARD_MODE_BACKWARD):
            return self._forward_mode(kind, head_dim)
        if not kind.on_cpus or self._texts is not None:
            return None
        choices = self.choices[head_dim]
        variant = replace(choices.variant, kind=kind)
        source = compiled(variant, self.target, choices.usual()).source
        (binary,) = compile_sources([source])
        return LibraryKernel.load(binary.path, source.symbol, argument_fields(self.spec, kind))

    def _choosing(self, head_dim: HeadDim, usual: LibraryKernel) -> LibraryKernel:
        """The kernel, which takes another library for calls that were tuned to other tiles."""
        choices = self.choices[head_dim]
        usual = replace(usual, other=functools.partial(self._kernel_of, head_dim))
        if not choices.tunings:
            return usual

        def choose(values: Mapping[str, float]) -> LibraryKernel:
            pins = choices.of_call(*call_of(values))
            is_usual = self.plan(head_dim, pins).defines == self.plan(head_dim, choices.usual()).defines
            return usual if is_usual else self._other(head_dim, pins)

        return replace(usual, choose=choose)

    def _load(self, head_dim: HeadDim, pins: Pins) -> LibraryKernel:
        (kernel,) = self._compiled([self.source(head_dim, pins)])
        return kernel


class PackagedProvider(CpuProvider):
    """The libraries of a package as they are, where nothing can be compiled: whatever was tuned, these tiles run.

    It has none of forward mode.
    """

    takes_tangents = ("", "")

    def __init__(self, spec: AttentionSpec, texts: Texts, brought: Mapping[HeadDim, Library]) -> None:
        super().__init__(spec, texts)
        self._brought = brought
        self.choices = {each: replace(choices, tunings=()) for each, choices in self.choices.items()}

    def plan(self, head_dim: HeadDim, pins: Pins) -> CpuPlan:  # noqa: ARG002 - nothing is chosen here
        return self._brought[head_dim].plan

    def _libraries(self) -> Mapping[HeadDim, LibraryKernel]:
        fields = argument_fields(self.spec)
        return {
            source.head_dim: LibraryKernel.load(self._brought[source.head_dim].path, source.symbol, fields)
            for source in self.sources()
        }
