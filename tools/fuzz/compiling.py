"""Operators of drawn specs, compiled as cheaply as it can be done without compiling something else.

In: a ``Case``. Out: an ``AttentionOp``. What is compiled is what users get, but in a folder that vanishes: thousands of
libraries that nobody asks for again would fill the cache.

A CPU's library has the flags of every library, and those that imitate another kind of CPU where the case says so.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import flashgen
from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled as compiled_kernel
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.emulator_machine import emulator_provider
from flashgen.hosts.kernel import KernelProvider
from flashgen.hosts.library import LibraryKernel
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.parts import PARTS
from flashgen.op.op import AttentionOp, OpParts, make_op
from flashgen.plan.arguments import argument_fields
from flashgen.store.cache import Cache
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import compile_sources, find_compiler
from tools.fuzz.draws import Case
from tools.fuzz.inputs import head_dim_of


def without_kernels(case: Case) -> AttentionOp:
    """The op of a case on the reference, with its sources; raises ``SpecError``."""
    if case.file:
        return flashgen.load(case.file, name=case.name, backend="reference")
    return flashgen.loads(case.text, backend="reference")


def compiled(case: Case, scratch: Path) -> AttentionOp:
    """The op of a case, with its libraries in ``scratch``.

    Raises ``SpecError`` where spec or target refuse it, and ``CompileFailed``.
    """
    backend = case.machine.backend
    if backend == "cpu":
        return _on_the_cpu(case, without_kernels(case).spec, scratch)
    if backend == "emulator":
        spec, target = without_kernels(case).spec, GPUS[case.machine.target or "sm_80"]
        sized = Shape(*case.build.sized) if case.build.sized else None
        provider = emulator_provider(spec, target, cache=Cache(scratch), sized=sized)
        return _op(case, spec, provider, provider.sources())
    if backend == "tiled":
        return make_op(without_kernels(case).spec, None)
    if case.file:
        return flashgen.load(case.file, name=case.name, backend=backend)
    return flashgen.loads(case.text, backend=backend)


def _on_the_cpu(case: Case, spec: AttentionSpec, scratch: Path) -> AttentionOp:
    wanted = {(head_dim_of(spec, call), False): None for call in case.calls}
    wanted |= {(head_dim_of(spec, call), True): None for call in case.calls if call.wide and (call.parts or call.ranks)}
    variants = [replace(analyse(spec, head_dim), kind=PARTS if parts else DENSE) for head_dim, parts in wanted]
    target = CpuTarget(local_cpu())
    sources = [compiled_kernel(variant, target).source for variant in variants]
    moved = list(dict.fromkeys(head_dim_of(spec, call) for call in case.calls if call.order > 1))
    of_tangents = [each(analyse(spec, head_dim)) for head_dim in moved for each in (with_tangent, with_slopes)]
    sources += [target.emit(variant, target.plan(variant)) for variant in of_tangents]
    imitated = {"FLASHGEN_MATRIX_PRODUCTS": case.build.matrices, "FLASHGEN_PAIR_PRODUCTS": case.build.pairs}
    defines = tuple((macro, "2") for macro, wanted in imitated.items() if wanted)
    sources = [replace(each, defines=(*each.defines, *defines)) for each in sources]
    compiler = replace(find_compiler(), flags=case.build.flags)
    binaries = compile_sources(sources, cache=Cache(scratch), compiler=compiler)
    fields = argument_fields(spec)
    kernels = {
        key: LibraryKernel.load(binary.path, source.symbol, fields)
        for key, source, binary in zip(wanted, sources, binaries, strict=False)
    }
    moving = [
        LibraryKernel.load(
            binary.path,
            source.symbol,
            argument_fields(variant.spec, variant.kind),
            "jvp" if variant.kind is FORWARD_MODE else "jvp_backward",
        )
        for variant, source, binary in zip(of_tangents, sources[len(wanted) :], binaries[len(wanted) :], strict=True)
    ]
    pairs = dict(zip(moved, zip(moving[::2], moving[1::2], strict=True), strict=True))

    def find(head_dim: HeadDim, _: int) -> LibraryKernel:
        forward, backward = pairs.get(head_dim, (None, None))
        others = {PARTS: kernels.get((head_dim, True)), FORWARD_MODE: forward, FORWARD_MODE_BACKWARD: backward}
        return replace(kernels[head_dim, False], other=others.get)

    return _op(case, spec, functools.cache(find), tuple(sources))


def _op(case: Case, spec: AttentionSpec, kernels: KernelProvider, sources: tuple[KernelSource, ...]) -> AttentionOp:
    """The same text built in another way is another op: a process judges many."""
    identity = repr(case.build)
    return AttentionOp(OpParts(spec, {"cpu": kernels}, sources, identity, backend=case.machine.backend))
