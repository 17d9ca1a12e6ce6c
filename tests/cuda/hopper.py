"""Ops on the emulator with the kernels of Hopper's own target, as they are or with a change in their source."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import torch
from torch import Tensor

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.hosts.emulated import emulator_provider
from flashgen.hosts.emulator.program import Program, compile_program
from flashgen.hosts.emulator.report import FaultKind
from flashgen.kinds.kind import PassName
from flashgen.op.op import AttentionOp, OpParts
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from tests.cuda.helpers import planted_kernel

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
    return AttentionOp(OpParts(spec, {"cpu": emulator_provider(spec, TARGET)}, backend="emulator"))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@functools.cache
def emitted_for(text: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    spec = flashgen.loads(f"attention planted {{ dtype bf16  {text} }}", backend="reference").spec
    return compiled(analyse(spec, spec.head_dims[0]), TARGET)


def changed(name: str, text: str, pass_name: str, old: str, new: str, *, count: int = 1) -> AttentionOp:
    """An op whose source is that of a spec but for one pass, where a pattern occurs ``count`` times.

    With another forward pass it has no backward one.
    """
    kernel = emitted_for(text)
    source = kernel.source
    forward, mark, backward = source.whole.partition("// ---- Backward")
    part, found = re.subn(old, new, forward if pass_name == "forward" else backward)
    assert mark
    assert found == count
    # Of a pass its own kernels alone: a compiler takes as long for those of the others, which stay what they were.
    sources = {pass_name: part if pass_name == "forward" else forward + mark + part}
    if pass_name == "backward":
        sources["forward"] = source.whole

    @functools.cache
    def program(which: PassName, kernels: frozenset[str]) -> Program:
        return compile_program(sources[which], name=source.name, kernels=kernels)

    own = planted_kernel(kernel.plan, program)
    # An op is known by what it computes, so that each of these has to be called by another name.
    return AttentionOp(OpParts(replace(kernel.variant.spec, name=name), {"cpu": lambda *_: own}, backend="emulator"))
