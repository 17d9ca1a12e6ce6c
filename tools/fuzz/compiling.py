"""Operators of drawn specs, compiled as cheaply as it can be done without compiling something else.

In: a ``Case``. Out: an ``AttentionOp``. What is compiled is what users get, but in a folder that vanishes: thousands of
libraries that nobody asks for again would fill the cache.

A CPU's library has the flags of every library, and those that imitate another kind of CPU where the case says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import flashgen
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.cpu_backend import CpuProvider
from flashgen.hosts.emulated import emulator_provider
from flashgen.hosts.kernel import KernelProvider
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.op.op import AttentionOp, OpParts
from flashgen.store.cache import Cache
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import compile_sources, find_compiler
from tools.fuzz.draws import Case


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
        return AttentionOp(OpParts(without_kernels(case).spec, {"cpu": None}))
    if case.file:
        return flashgen.load(case.file, name=case.name, backend=backend)
    return flashgen.loads(case.text, backend=backend)


def _on_the_cpu(case: Case, spec: AttentionSpec, scratch: Path) -> AttentionOp:
    imitated = {"FLASHGEN_MATRIX_PRODUCTS": case.build.matrices, "FLASHGEN_PAIR_PRODUCTS": case.build.pairs}
    defines = tuple((macro, "2") for macro, wanted in imitated.items() if wanted)
    compiler, cache = replace(find_compiler(), flags=case.build.flags), Cache(scratch)

    def build(source: KernelSource) -> Path:
        source = replace(source, defines=(*source.defines, *defines))
        (binary,) = compile_sources([source], cache=cache, compiler=compiler)
        return binary.path

    provider = CpuProvider(spec, build=build)
    return _op(case, spec, provider, provider.sources())


def _op(case: Case, spec: AttentionSpec, kernels: KernelProvider, sources: tuple[KernelSource, ...]) -> AttentionOp:
    """The same text built in another way is another op: a process judges many."""
    identity = repr(case.build)
    return AttentionOp(OpParts(spec, {"cpu": kernels}, sources, identity, backend=case.machine.backend))
