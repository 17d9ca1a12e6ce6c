"""Packages of the gallery with binaries for GPUs, made without a GPU: every spec for every kind of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from flashgen.analysis.variant import analyse
from flashgen.compiler.building import build_file
from flashgen.compiler.compiled import compiled
from flashgen.compiler.package.manifest import Manifest, packaged
from flashgen.compiler.reading import read_file, verdicts_of
from flashgen.diagnostics import SpecError
from flashgen.kinds.kind import BOTH
from flashgen.store import gallery
from flashgen.targets.gpu.launches import started
from flashgen.targets.registry import GPUS
from tests.pipeline.gpus import needs_nvrtc

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120")
QUICK = {("gpt_oss", "sm_80"), ("alibi", "sm_75")}  # one with kernels of a sink, one without instructions for bfloat16
BUILDS = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in product(gallery.names(), TARGETS)
]

pytestmark = needs_nvrtc


@pytest.mark.parametrize(("name", "target"), BUILDS)
def test_a_package_has_the_binaries_of_all_usual_calls(name: str, target: str, tmp_path: Path) -> None:
    (spec,) = read_file(name).specs
    (verdict,) = verdicts_of(spec, [GPUS[target]])
    if not verdict.takes:
        with pytest.raises(SpecError):
            build_file(name, output=tmp_path, targets=(target,))
        return
    (built,) = build_file(name, output=tmp_path, targets=(target,))
    manifest = Manifest.read(built.folder)
    for head_dim in spec.head_dims:
        plan = compiled(analyse(spec, head_dim), GPUS[target]).plan
        found = packaged(built.folder, manifest, plan, GPUS[target])
        assert set(found) == set(product(plan.by_element, BOTH))
        assert all(each.images for each in found.values())
        kernels = {name for each in found.values() for name in started(each.plan, BOTH)}
        said = {each.name for parts in found.values() for each in parts.resources}
        assert {name for name in said if name.startswith(f"{plan.symbol}_")} <= kernels
