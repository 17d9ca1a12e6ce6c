"""What tests of GPU targets share, on a machine without a GPU."""

from __future__ import annotations

import pytest

from flashgen.targets.registry import GPUS as GPU_TARGETS
from flashgen.toolchains import nvrtc
from flashgen.toolchains.nvrtc import NvrtcMissing

SPEC = "attention tiny { head_dim 16  dtype bf16  mask causal  weights relu(s) }"
SM_80 = GPU_TARGETS["sm_80"]
SOURCES = {"tiny_d16_forward_bf16_sm_80.cu", "tiny_d16_backward_bf16_sm_80.cu"}
CUBINS = {name.replace(".cu", ".cubin") for name in SOURCES}


def has_nvrtc() -> bool:
    try:
        nvrtc.find_nvrtc()
    except NvrtcMissing:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: pip install 'flashgen[cuda13]'")
