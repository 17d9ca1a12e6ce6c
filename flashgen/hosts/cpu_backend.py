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
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.compiler.tile_choices import TileChoices, tile_choices
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.explained_call import ExplainedCall, with_mask_of_call, with_prediction
from flashgen.hosts.kernel import ArgumentLayout, call_of
from flashgen.hosts.library import Find, Functions, LibraryKernel, functions_of
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.plan.arguments import argument_fields
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.measured import PASSES, PLANNERS_OWN, Pins
from flashgen.plan.plan import Tiles
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import Cpu, local_cpu
from flashgen.targets.cpu.plan import CpuPlan
from flashgen.targets.cpu.products import FEWEST_ROWS, Products
from flashgen.targets.cpu.target import CpuTarget
from flashgen.toolchains.cpp import Binary, CompileFailed, CompilerMissing, compile_sources, find_compiler

if TYPE_CHECKING:
    from flashgen.compiler.package.manifest import Manifest
    from flashgen.compiler.package.opened import Library

    Brought = Mapping[HeadDim, Library]


CPU_TANGENTS = ("all that the others take", "all that the others take")
# Libraries of tangents: the function of each, and what it computes.
_TANGENTS: Mapping[Kind, tuple[str, Callable[[Variant], Variant]]] = {
    FORWARD_MODE: ("jvp", with_tangent),
    FORWARD_MODE_BACKWARD: ("jvp_backward", with_slopes),
}

# The sources of a package for CPUs, by head dimension, without macros.
Texts = Mapping[HeadDim, KernelSource]
Build = Callable[[KernelSource], Path]
# A generated package: its folder, and what it says of itself.
Package = tuple[Path, "Manifest"]


def cpu_provider(
    spec: AttentionSpec, texts: Texts | None = None, package: Package | None = None, *, warns: bool = True
) -> CpuProvider | None:
    """Shared libraries; without a compiler those of a package, else None, and unless not ``warns`` a warning."""
    try:
        find_compiler()
    except CompilerMissing as error:
        why = str(error)
        if package is not None and texts is not None:
            from flashgen.compiler.package.opened import NoLibrary, libraries

            try:
                provider = CpuProvider(spec, texts, libraries(*package, spec))
                for each in spec.head_dims:
                    provider.library(each, DENSE, PLANNERS_OWN, "forward", 0)
            except (NoLibrary, CompileFailed, OSError) as other:
                why = f"{error} Nor does a library of the package run here: {other}"
            else:
                return provider
        if warns:
            warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {why}", stacklevel=6)
        return None
    return CpuProvider(spec, texts)


def _compiled(source: KernelSource) -> Path:
    return compile_sources([source])[0].path


class CpuProvider:
    """Shared libraries for the CPU at hand: one for each pass of a head dimension and way to multiply that calls take.

    ``texts`` are the sources of a package, which are compiled as they stand. ``brought`` are its libraries, which run
    as they are where nothing can be compiled: these tiles, whatever was tuned, and no forward mode. ``build`` compiles.
    """

    def __init__(
        self, spec: AttentionSpec, texts: Texts | None = None, brought: Brought | None = None, build: Build = _compiled
    ) -> None:
        self.spec, self._texts, self._brought, self._build = spec, texts, brought, build
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

    def explain(self, name: str, call: ExplainedCall) -> Explanation | None:
        """One dense call."""
        if call.kind is not DENSE:
            return None
        choices = self.choices[call.head_dim]
        pins = choices.of_call(call.element, call.shape)
        plan, symbol = self.plan(call.head_dim, pins), self.source(call.head_dim, pins).symbol
        of_call = (self.device, call.element, call.shape)
        told = functools.partial(_told, self.device, symbol, call.threads)
        own, passes = with_mask_of_call(choices.variant, call), plan.of_call(*of_call)
        timed = replace(self.device, cores=min(self.device.cores, call.threads))
        found = []
        for each_name, (products, tile) in passes.items():
            predicted = cpu_cost.pass_time(own, products, each_name, tile, timed, call.shape)
            found.append(with_prediction(told(each_name, products, tile), own, call, predicted))
        titles = {products.of_pass(each) for each, (products, _) in passes.items()}
        others = {products.of_pass(each) for products in Products for each in PASSES} - titles
        why = [each for each in (*plan.reasons, *pins.reasons) if each.partition(": ")[0] not in others]
        explained = replace(
            call.explanation(name, "cpu", self.device.name, "cpu", found, why),
            rejected=tuple(each for each in plan.rejected if each.pass_name in titles),
        )
        if not any(self.takes_tangents):
            return explained
        # The kernel of forward mode, were the call's tangents asked for, and that of its backward pass.
        of_tangents = (
            compiled(each(choices.variant), self.target).plan.of_call(*of_call) for _, each in _TANGENTS.values()
        )
        forward, backward = (told(title, *of_pass) for each in of_tangents for title, of_pass in each.items())
        return replace(explained, jvp=forward, jvp_backward=backward)

    def _kernels(self) -> Mapping[HeadDim, LibraryKernel]:
        """By head dimension. What is compiled is compiled when a call first needs it."""
        return {
            each: LibraryKernel(
                ArgumentLayout(argument_fields(self.spec)),
                functools.partial(self._find, each, DENSE),
                other=functools.partial(self._other, each),
            )
            for each in self.choices
        }

    def _find(self, head_dim: HeadDim, kind: Kind, name: str, values: Mapping[str, float]) -> Functions:
        """What a call runs, with the tiles that were tuned for calls like it."""
        element, shape = call_of(values)
        choices = self.choices[head_dim]
        pins = choices.of_call(element, shape) if choices.tunings and kind is DENSE else choices.usual()
        ragged, _, of_pass = name.rpartition("_")
        like = replace(shape, q_len=FEWEST_ROWS) if ragged else shape  # some of the sequences may be so long
        products, _ = self.plan(head_dim, pins).of_call(self.device, element, like)[of_pass]
        return self.library(head_dim, kind, pins, name, products.library)(name, values)

    def _library(self, head_dim: HeadDim, kind: Kind, pins: Pins, part: str, products: int) -> Find:
        """One pass, of calls that multiply in one way; of a package that brings its library, this one."""
        variant = replace(self.choices[head_dim].variant, kind=kind)
        source = self.source(head_dim, pins) if kind is DENSE else compiled(variant, self.target, pins).source
        if self._brought is not None:
            return functions_of(self._brought[head_dim].path, source.symbol)
        return functions_of(self._build(source.of_part(part, products)), source.symbol, (part,))

    def _of_kind(self, head_dim: HeadDim, kind: Kind) -> LibraryKernel | None:
        """With the usual tiles; tangents with the planner's own. A package, whose text may be edited, has no other."""
        variant = self.choices[head_dim].variant
        if kind in _TANGENTS:
            only, with_tangents = _TANGENTS[kind]
            variant = with_tangents(variant)
            source, fields = compiled(variant, self.target).source, argument_fields(variant.spec, variant.kind)
            return LibraryKernel.load(self._build(source), source.symbol, fields, only)
        if not kind.on_cpus or self._texts is not None:
            return None
        layout = ArgumentLayout(argument_fields(variant.spec, kind))
        return LibraryKernel(layout, functools.partial(self._find, head_dim, kind))


def _told(device: Cpu, symbol: str, threads: int, name: str, products: Products, tile: Tiles) -> ExplainedPass:
    return ExplainedPass(
        name=name,
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=_cpu_products(products, device),
        warps=None,
        stages=None,
        kernels=(ExplainedKernel(f"{symbol}_{name}", threads),),
    )


def _cpu_products(products: Products, device: Cpu) -> str:
    if products is Products.VECTORS:
        return f"vectors of {device.lanes} lanes"
    if products is Products.PAIRS:
        return f"vectors of {device.lanes} lanes, bfloat16 in pairs"
    parts = "" if products is Products.BFLOAT16 else ", numbers in three parts"
    return f"matrix registers{parts}"
