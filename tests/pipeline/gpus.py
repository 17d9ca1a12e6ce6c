"""What tests of GPU targets share, on a machine without a GPU."""

from __future__ import annotations

import pytest

from flashgen.targets.registry import GPUS as GPU_TARGETS
from flashgen.toolchains import nvrtc
from flashgen.toolchains.nvrtc import NvrtcMissing

SPEC = "attention tiny { head_dim 16  dtype bf16  mask causal  weights relu(s) }"
SM_80 = GPU_TARGETS["sm_80"]
CUBINS = {"tiny_d16_sm_80_forward_bf16.cubin", "tiny_d16_sm_80_backward_bf16.cubin"}


def has_nvrtc() -> bool:
    try:
        nvrtc.find_nvrtc()
    except NvrtcMissing:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: pip install 'flashgen[cuda13]'")
