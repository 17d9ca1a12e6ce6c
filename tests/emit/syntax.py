"""Whether compilers take what was generated, without making code of it."""

from __future__ import annotations

import subprocess

import pytest

from flashgen.analysis.variant import analyse
from flashgen.ir.spec import AttentionSpec
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import REQUIRED_FLAGS, find_compiler
from flashgen.toolchains.nvrtc import NvrtcMissing, created, find_nvrtc
from tests.cuda.helpers import of_type


def assert_compiles_for_cpus(spec: AttentionSpec) -> None:
    """The C++ of every head dimension."""
    for head_dim in spec.head_dims:
        variant = analyse(spec, head_dim)
        source = emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole
        flags = [flag for flag in REQUIRED_FLAGS if flag != "-shared"]
        command = [*find_compiler().command, *flags, "-fsyntax-only", "-x", "c++", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{spec.sources[0].text}\n{done.stderr}"


def assert_compiles_for_gpus(spec: AttentionSpec, target: str = "sm_80") -> None:
    """The CUDA C++ of every head dimension and element type, no further than its syntax and its types."""
    try:
        nvrtc, _ = find_nvrtc()
    except NvrtcMissing as missing:
        pytest.skip(str(missing))
    plans = [GPUS[target].plan(analyse(spec, head_dim)) for head_dim in spec.head_dims]
    for own in (of_type(plan, element) for plan in plans for element in plan.by_element):
        program = created(nvrtc, emit_cuda(own))
        try:
            arch = f"-arch=compute_{target.removeprefix('sm_')}"
            nvrtc.compileProgram(program, (arch, "-std=c++17", "-diag-suppress=177", "-fdevice-syntax-only"))
        except nvrtc.NVRTCError:
            pytest.fail(f"{spec.sources[0].text}\n{nvrtc.getProgramLog(program)}")
        finally:
            nvrtc.destroyProgram(program)
