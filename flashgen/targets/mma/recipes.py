"""Which tiles are considered where one warp multiplies: those of all GPUs."""

from __future__ import annotations

from flashgen.targets.gpu.recipes import WARPS

RECIPES = WARPS
