"""Ops on the emulator with the kernels of Hopper's own target, as they are or with a change in their source."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.emulated import EmulatedKernel
from flashgen.hosts.emulator import FaultKind, Program, compile_program
from flashgen.hosts.emulator_backend import EmulatorProvider
from flashgen.hosts.gpu_calls import launches_of
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.schedule import Compiled
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.op.op import AttentionOp, OpParts
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS

TARGET = GPUS["sm_90a"]
# What the emulator may call it where something is read before it is there; where its place is written too soon; where
# another block of the cluster does that.
LATE = frozenset({FaultKind.RACE, FaultKind.NOT_AWAITED, FaultKind.UNINITIALIZED})
EARLY = LATE | {FaultKind.MBARRIER}
EARLY_IN_CLUSTERS = EARLY | {FaultKind.NOT_PUBLISHED}


@functools.cache
def hopper(text: str, dtype: str = "bf16") -> AttentionOp:
    """The op of a spec's text."""
    spec = flashgen.loads(f"attention copied {{ dtype {dtype}  {text} }}", backend="reference").spec
    return AttentionOp(OpParts(spec, {"cpu": EmulatorProvider(spec, TARGET)}, backend="emulator"))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@functools.cache
def emitted_for(text: str) -> tuple[GpuPlan, KernelSource]:
    spec = flashgen.loads(f"attention planted {{ dtype bf16  {text} }}", backend="reference").spec
    kernel = compiled(analyse(spec, spec.head_dims[0]), TARGET)
    assert isinstance(kernel.plan, GpuPlan)
    return kernel.plan, kernel.source


def changed(name: str, text: str, pass_name: str, old: str, new: str, *, count: int = 1) -> AttentionOp:
    """An op whose source is that of a spec but for one pass, where a pattern occurs ``count`` times.

    With another forward pass it has no backward one.
    """
    spec = flashgen.loads(f"attention planted {{ dtype bf16  {text} }}", backend="reference").spec
    variant = analyse(spec, spec.head_dims[0])
    plan, source = emitted_for(text)
    forward, mark, backward = source.whole.partition("// ---- Backward")
    part, found = re.subn(old, new, forward if pass_name == "forward" else backward)
    assert mark
    assert found == count
    # Of a pass its own kernels alone: a compiler takes as long for those of the others, which stay what they were.
    sources = {pass_name: part if pass_name == "forward" else forward + mark + part}
    if pass_name == "backward":
        sources["forward"] = source.whole
    launches = launches_of(variant, plan, source.symbol, ElementType.BF16)

    @functools.cache
    def program(which: PassName, kernels: frozenset[str]) -> Program:
        return compile_program(sources[which], name=source.name, kernels=kernels)

    def of_pass(which: PassName, values: Mapping[str, float]) -> Compiled[Program]:
        return Compiled(program(which, frozenset(launches(which, values).kernels)), launches)

    kernel = EmulatedKernel(ArgumentLayout(cuda_fields(plan.recipe)), variant.head_dim, of_pass)
    # An op is known by what it computes, so that each of these has to be called by another name.
    return AttentionOp(OpParts(replace(spec, name=name), {"cpu": lambda *_: kernel}, backend="emulator"))
