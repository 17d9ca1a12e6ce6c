"""What NVRTC makes of kernels, where there is one: registers, and products that wait for one another."""

from __future__ import annotations

import pytest

from flashgen.kinds.kind import PassName
from flashgen.plan.plan import USUAL_CALLS
from flashgen.targets.gpu.compile import left_out
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.registry import GPUS
from flashgen.toolchains.nvrtc import CudaBinary, NvrtcMissing, compile_cuda, find_nvrtc
from tests.cuda.helpers import variant_of

try:
    find_nvrtc()
    REASON = ""
except NvrtcMissing as error:
    REASON = str(error)
needs_nvrtc = pytest.mark.skipif(bool(REASON), reason=REASON)


def has_products_that_wait(binary: CudaBinary) -> bool:
    """The assembler warns of them: C7510 to C7514."""
    return "C75" in (binary.path.parent / "compile.log").read_text(encoding="utf-8")


def check_registers(text: str, kernel: str, name: PassName | None = None, *, most: int = 0) -> None:
    """Of Hopper's kernels for a spec's text the one of this name spills at most so many bytes; no product waits."""
    variant = variant_of(f"attention checked {{ dtype bf16  {text} }}")
    binary = compile_cuda(left_out(emit_cuda(GPUS["sm_90a"].plan(variant), name), USUAL_CALLS), "sm_90a")
    (found,) = (each for each in binary.kernels if kernel in each.name)
    assert found.spill_bytes <= most
    assert not has_products_that_wait(binary)
