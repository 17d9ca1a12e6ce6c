"""Every tile that `flashgen tune` may choose: its kernels compile, and are right, under the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.measured import PASSES, Tile
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.family import gpu_candidates, tile_of
from flashgen.targets.registry import GPUS
from tools.fuzz.draws import CallDraw, Case, Machine
from tools.fuzz.judge import judge

SPEC = "attention tiles {{ head_dim {} mask causal dtype bf16 {}}}"
CALLS = (
    CallDraw(0, "bf16", (1, 2, 1, 300, 333), seed=1),
    CallDraw(0, "bf16", (2, 2, 2, 129, 65), seed=2, deterministic=True),
)


def wrong(target: str, head_dim: str, name: str, tile: Tile, scratch: Path) -> str:
    """What is wrong of a spec that pins a tile of a pass; empty where nothing is."""
    prefix = "" if name == "forward" else "backward_"
    pins = {"Br": tile.Br, "Bc": tile.Bc, "warps": tile.warps, "stages": tile.stages}
    schedule = " ".join(f"{prefix}{word} = {number}" for word, number in pins.items())
    text = SPEC.format(head_dim, f"schedule {{ {schedule} }} ")
    verdict = judge(Case(text, CALLS, Machine("emulator", target)), scratch)
    said = [verdict.refused] if verdict.refused else [f"{each.kind}: {each.detail}" for each in verdict.findings]
    return f"{tile}: {'; '.join(said)}" if said else ""


def candidates(target: str, head_dim: str) -> Iterator[tuple[str, Tile]]:
    """The tiles of both passes beside the planner's own."""
    (spec,) = parse_text(SPEC.format(head_dim, "")).specs
    variant: Any = kernel_variant(spec, spec.head_dims[0])
    gpu = product_of(GPUS[target])
    own = gpu.target.plan(variant)
    for name in PASSES:
        for plan in gpu_candidates(own.recipe, gpu, own.by_element[ElementType.BF16], name):
            yield name, tile_of(plan, name)


def test_more_queries_than_lanes_look_at_once(tmp_path: Path) -> None:
    """A warp weighs 192 queries: whether scores are extreme took a lane for each four of them, of 128 at most."""
    assert not wrong("sm_90a", "64", "backward", Tile(192, 128, 8, 2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ["17", "64", "128", "192/128", "256"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_every_candidate(target: str, head_dim: str, tmp_path: Path) -> None:
    found = [wrong(target, head_dim, name, tile, tmp_path) for name, tile in candidates(target, head_dim)]
    assert len(found) > 10
    assert not any(found), "\n".join(filter(None, found))
