"""Tuning: what is measured, kept, recalled, and used by later plans."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler import tile_choices as tuned
from flashgen.compiler.compiled import compiled
from flashgen.compiler.pipeline import plan_file
from flashgen.compiler.tile_choices import TunedStore, planned, tile_choices
from flashgen.hosts.cpu_backend import CpuProvider
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.op.loading import load, load_spec, loads
from flashgen.plan.measured import PASSES, Measured, MeasuredPass, Pins, ShapeClass, Tile, Tuning, spearman
from flashgen.targets.cpu.device import GENERIC_CPU, cpu_identity, local_cpu
from flashgen.targets.cpu.plan import CpuPlan, plan_cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.device_table import known_devices
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.tuning import tune as tuning_module
from flashgen.tuning.tune import Job, Spread, Times, candidates, tune
from flashgen.verification import random_inputs

TEXT = "attention tuned { head_dim 16 dtype f32 mask causal }"
SHAPE = Shape(1, 2, 2, 96, 96)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedStore:
    """Of its own, as tunings change what other tests would load; libraries are kept between runs as everywhere."""
    own = TunedStore(tmp_path / "tuned")
    monkeypatch.setattr(TunedStore, "default", lambda: own)
    return own


def spec_of(text: str = TEXT) -> AttentionSpec:
    (spec,) = parse_text(text).specs
    return spec


def variant_of(text: str = TEXT) -> Variant:
    spec = spec_of(text)
    return analyse(spec, spec.head_dims[0])


def job_of(text: str = TEXT, most: int = 2) -> Job:
    spec = spec_of(text)
    return Job(spec, spec.head_dims[0], SHAPE, ElementType.F32, most=most, seconds=0.01)


def tuning_of(forward: Tile, backward: Tile, *, ratio: float = 0.5, element: ElementType = ElementType.F32) -> Tuning:
    """One candidate of each pass, twice as fast as a planner's choice."""
    passes = {
        name: MeasuredPass(Tile(16, 16), 1.0, (Measured(tile, 1, 1.1, ratio, ratio - 0.1, ratio + 0.1),))
        for name, tile in (("forward", forward), ("backward", backward))
    }
    return Tuning(ShapeClass.of(SHAPE, element), SHAPE, passes, 1e9, complete=True)


# -- candidates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 8, 1000])
def test_the_planner_comes_first_and_all_fit(most: int) -> None:
    variant, device = variant_of("attention a { head_dim 64 mask causal }"), local_cpu()
    chosen = plan_cpu(variant, device).of_call(device, ElementType.F32, SHAPE)
    for name, found in candidates(variant, device, SHAPE, ElementType.F32, most).items():
        assert (found[0].tile, found[0].rank, found[0].predicted) == (
            Tile(chosen[name][1].Br, chosen[name][1].Bc),
            0,
            1.0,
        )
        assert len({each.tile for each in found}) == len(found) <= most + 1
        assert [each.rank for each in found] == sorted(each.rank for each in found)
        assert all(each.predicted > 0 for each in found)
        assert [each.predicted for each in found[1:]] == sorted(each.predicted for each in found[1:])


def test_candidates_go_with_the_blocks_of_a_layout() -> None:
    variant = variant_of("attention a { head_dim 64 layout block 32: I >= J }")
    for found in candidates(variant, GENERIC_CPU, SHAPE, ElementType.F32, 100).values():
        assert all(0 in (32 % size, size % 32) for each in found for size in (each.tile.Br, each.tile.Bc))


def test_what_the_spec_pins_is_not_varied() -> None:
    variant = variant_of("attention a { head_dim 64 schedule { Br = 48 backward_Bc = 32 } }")
    found = candidates(variant, GENERIC_CPU, SHAPE, ElementType.F32, 100)
    assert {each.tile.Br for each in found["forward"]} == {48}
    assert {each.tile.Bc for each in found["backward"]} == {32}
    assert len({each.tile.Bc for each in found["forward"]}) > 2


@pytest.mark.parametrize("name", ["a100", "h100"])
@pytest.mark.parametrize("element", [ElementType.F32, ElementType.BF16])
def test_candidates_of_a_gpu_work_when_they_are_pinned(name: str, element: ElementType) -> None:
    variant = variant_of("attention a { head_dim 64 mask causal }")
    gpu = known_devices().gpus[name]
    chosen = gpu.target.plan(variant).by_element[element]
    found = candidates(variant, gpu, Shape(4, 16, 16, 4096, 4096), element, 3)
    for pass_name, tiles in (("forward", chosen.forward), ("backward", chosen.backward)):
        assert found[pass_name][0].tile == Tile(tiles.Br, tiles.Bc, tiles.warps, tiles.stages)
        assert len({each.tile for each in found[pass_name]}) == len(found[pass_name])
        for each in found[pass_name]:
            pinned = replace(variant, spec=replace(variant.spec, dtypes=(element,)))
            tuning = tuning_of(each.tile, each.tile)
            only = replace(tuning, passes={pass_name: tuning.passes[pass_name]})
            own = gpu.target.plan(replace(pinned, spec=pins_of(only).pinned(pinned.spec))).by_element[element]
            got = own.forward if pass_name == "forward" else own.backward
            assert (got.Br, got.Bc, got.warps, got.stages) == (
                each.tile.Br,
                each.tile.Bc,
                each.tile.warps,
                each.tile.stages,
            )


def pins_of(tuning: Tuning) -> Pins:
    """All that was measured, a winner or not."""
    tiles = {name: each.tile for name, each in tuning.passes.items()}
    return Pins(tiles.get("forward"), tiles.get("backward"))


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_spearman_is_scipy_s() -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (3, 5, 9):
        for _ in range(20):
            one, two = torch.randint(0, 5, (2, count), generator=generator).double().tolist()
            if len(set(one)) > 1 and len(set(two)) > 1:
                expected = scipy.stats.spearmanr(one, two).statistic
                assert spearman(one, two) == pytest.approx(expected, abs=1e-12)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_a_winner_is_faster_beyond_what_times_scatter() -> None:
    slower = Measured(Tile(32, 32), 1, 1.2, 1.5, 1.4, 1.6)
    scattered = Measured(Tile(48, 32), 2, 1.3, 0.9, 0.7, 1.1)
    faster = Measured(Tile(64, 32), 3, 1.4, 0.95, 0.94, 0.96)
    found = MeasuredPass(Tile(16, 16), 1.0, (slower, scattered))
    assert found.winner is None
    assert found.tile == Tile(16, 16)
    assert found.loss == 0
    found = MeasuredPass(Tile(16, 16), 1.0, (slower, scattered, faster))
    assert found.tile == Tile(64, 32)
    assert found.loss == pytest.approx(1 / 0.95 - 1)
    assert found.largest_error == pytest.approx(1.4 / 0.95)
    assert found.rank_correlation == pytest.approx(
        scipy.stats.spearmanr([1, 1.2, 1.3, 1.4], [1, 1.5, 0.9, 0.95]).statistic
    )


@pytest.mark.parametrize(
    ("shape", "heads", "q_len", "kv_len"),
    [((1, 8, 8, 1000, 1024), 8, 1024, 1024), ((3, 5, 5, 1, 1025), 16, 1, 2048), ((1, 1, 1, 2, 3), 1, 2, 4)],
)
def test_classes_of_shapes(shape: tuple[int, ...], heads: int, q_len: int, kv_len: int) -> None:
    assert ShapeClass.of(Shape(*shape), ElementType.F32) == ShapeClass(ElementType.F32, heads, q_len, kv_len)


def test_tunings_survive_json() -> None:
    tuning = tuning_of(Tile(32, 64, 4, 2), Tile(64, 32))
    assert Tuning.from_json(json.loads(json.dumps(tuning.to_json()))) == tuning


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_every_candidate_is_measured_beside_the_planner_and_kept(store: TunedStore) -> None:
    job = job_of()
    steps = list(tune(job, store))
    assert [step.pass_name for step in steps] == ["forward", "forward", "backward", "backward"]
    assert not any(step.recalled for step in steps)
    tuning = store.tunings(job.variant, job.identity)[job.shape_class]
    assert tuning.complete
    for name, found in tuning.passes.items():
        own = [step.measured for step in steps if step.pass_name == name]
        assert list(found.candidates) == own
        assert found.seconds > 0
        assert all(each.low <= each.ratio <= each.high for each in found.candidates)


def test_a_run_that_was_stopped_goes_on(store: TunedStore) -> None:
    job = job_of()
    first = list(islice(tune(job, store), 3))
    assert not store.tunings(job.variant, job.identity)[job.shape_class].complete
    steps = list(tune(job, store))
    assert [step.recalled for step in steps] == [True, True, True, False]
    assert [step.measured for step in steps[:3]] == [step.measured for step in first]
    assert all(step.recalled for step in tune(job, store))
    assert not any(step.recalled for step in tune(job, store, again=True))


def test_what_cannot_be_compiled_is_left_out_with_a_reason(store: TunedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {each.tile for each in job_of().ranked()["forward"][1:2]}

    def failing(spec: AttentionSpec, backend: str | None = None) -> Any:
        if Tile(spec.schedule.Br or 0, spec.schedule.Bc or 0) in refused:
            return loads("attention broken { head_dim 16 schedule { Br = 17 } }")
        return load_spec(spec, backend)

    monkeypatch.setattr(tuning_module, "load_spec", failing)
    first, *_ = tune(job_of(), store)
    assert first.measured is None
    assert "Br = 17" in first.reason


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes half as long as the planner's choice, the later ones less still."""
    factors = iter(0.5 * 0.9**n for n in range(100))

    def times(runs: dict[str, Any], **_: Any) -> tuple[Times, ...]:
        for run in runs.values():
            run()
        one = Spread(1.0, 1.0, 1.0)
        ratio = next(factors)
        return (
            Times("planner", one, one, 3),
            *(Times(name, one, Spread(ratio, ratio, ratio), 3) for name in runs if name != "planner"),
        )

    monkeypatch.setattr(tuning_module, "paired_times", times)


def test_later_loads_use_the_winner_and_say_so(store: TunedStore, fast: None, tmp_path: Path) -> None:
    job = job_of()
    list(tune(job, store))
    ranked = job.ranked()
    op = loads(TEXT)
    found = op.plan[job.head_dim]
    for name, tiles in found.tiles[Products.VECTORS].items():
        assert Tile(tiles.Br, tiles.Bc) == ranked[name][-1].tile != ranked[name][0].tile
    assert f"tuned on '{cpu_identity()}' at {SHAPE} in f32" in "\n".join(found.reasons)
    assert f"faster than the planner's {ranked['forward'][0].tile}" in "\n".join(found.reasons)
    file = tmp_path / "tuned.attn"
    file.write_text(TEXT)
    assert load(file).plan[job.head_dim].forward == found.forward
    (by_command,) = plan_file(file)
    assert by_command == found
    (elsewhere,) = plan_file(file, device="generic")
    assert "tuned" not in "\n".join(elsewhere.reasons)
    given = random_inputs(job.spec, SHAPE, job.head_dim, torch.float32)
    expected = op.reference(given.q, given.k, given.v, dtype=torch.float64)
    torch.testing.assert_close(op(given.q, given.k, given.v).double(), expected, rtol=1e-4, atol=1e-5)


def test_pins_of_a_spec_win(store: TunedStore) -> None:
    variant = variant_of()
    store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    assert "tuned" in "\n".join(loads(TEXT).plan[variant.head_dim].reasons)
    own = loads(TEXT.replace("mask", "schedule { Br = 48 Bc = 16 backward_Br = 48 backward_Bc = 16 } mask"))
    found = own.plan[variant.head_dim]
    assert (found.forward.Br, found.forward.Bc, found.backward.Br) == (48, 16, 48)
    assert "tuned" not in "\n".join(found.reasons)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_another_device_and_another_spec_are_others(store: TunedStore) -> None:
    variant = variant_of()
    store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    assert store.tunings(variant, "another CPU") == {}
    assert store.tunings(variant_of(TEXT.replace("causal", "window(3)")), cpu_identity()) == {}
    assert planned(variant, local_cpu()).forward.Br == 32
    assert planned(variant, GENERIC_CPU) == plan_cpu(variant, GENERIC_CPU)


def test_the_class_that_was_tuned_last_is_used_without_a_shape(store: TunedStore) -> None:
    variant = variant_of()
    later = replace(
        tuning_of(Tile(64, 32), Tile(64, 32)), time=2e9, shape_class=ShapeClass(ElementType.F32, 1, 1024, 1024)
    )
    store.store(variant, cpu_identity(), later)
    store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    assert len(store.tunings(variant, cpu_identity())) == 2
    assert planned(variant, local_cpu()).forward.Br == 64


def test_another_version_is_kept_and_said_so(store: TunedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = variant_of()
    with monkeypatch.context() as older:
        older.setattr(tuned, "__version__", "0.0.9")
        store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    (old,) = store.root.glob("*.json")
    content = old.read_bytes()
    assert store.tunings(variant, cpu_identity()) == {}
    assert store.of_other_versions(variant, cpu_identity()) == ("0.0.9",)
    found = planned(variant, local_cpu())
    assert found.forward == plan_cpu(variant, local_cpu()).forward
    assert "tuned tiles of flashgen 0.0.9 are kept and not used" in "\n".join(found.reasons)
    store.store(variant, cpu_identity(), tuning_of(Tile(64, 32), Tile(64, 32)))
    assert old.read_bytes() == content
    assert {file.version: file.tunings is None for file in store.files()}["0.0.9"] is True
    assert planned(variant, local_cpu()).forward.Br == 64


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"flashgen": "0.1.0"}', b"\xff\xfe", b'{"tunings": 3}'])
def test_a_damaged_file_is_as_none(store: TunedStore, content: bytes) -> None:
    variant = variant_of()
    store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    (path,) = store.root.glob("*.json")
    path.write_bytes(content)
    assert store.tunings(variant, cpu_identity()) == {}
    assert planned(variant, local_cpu()) == plan_cpu(variant, local_cpu())
    assert store.files() == ()
    store.store(variant, cpu_identity(), tuning_of(Tile(32, 32), Tile(32, 32)))
    assert planned(variant, local_cpu()).forward.Br == 32


def test_tiles_that_the_planner_refuses_now_are_not_used(store: TunedStore) -> None:
    variant = variant_of()
    store.store(variant, cpu_identity(), tuning_of(Tile(40, 32), Tile(32, 32)))
    found = planned(variant, local_cpu())
    assert isinstance(found, CpuPlan)
    own = plan_cpu(variant, local_cpu())
    assert all(found.tiles[products] == own.tiles[products] for products in Products)
    assert "tuned tiles are not used, as the planner refuses them" in "\n".join(found.reasons)


GPU = replace(known_devices().gpus["a100"], product="some GPU")


def test_a_gpu_takes_tiles_of_its_own_element_type(store: TunedStore) -> None:
    variant = variant_of("attention a { head_dim 64 }")
    tuning = tuning_of(Tile(64, 32, 4, 2), Tile(64, 64, 4, 1), element=ElementType.BF16)
    store.store(variant, "some GPU", tuning)
    choices = tile_choices(variant, GPU, "some GPU")
    found = compiled(variant, GPU.target, choices.of_call(ElementType.BF16, SHAPE)).plan
    assert isinstance(found, GpuPlan)
    tiles = found.by_element[ElementType.BF16]
    assert (tiles.forward.Br, tiles.forward.Bc, tiles.forward.warps, tiles.forward.stages) == (64, 32, 4, 2)
    assert choices.usual(ElementType.BF16) == choices.of_call(ElementType.BF16, SHAPE)
    assert choices.usual(ElementType.F16).is_empty
    elsewhere = tile_choices(variant, GPU, "another GPU")
    assert elsewhere.of_call(ElementType.BF16, SHAPE) != choices.of_call(ElementType.BF16, SHAPE)


def tuned_at(shape: Shape, tile: Tile, time: float = 1e9) -> Tuning:
    shape_class = ShapeClass.of(shape, ElementType.F32)
    return replace(tuning_of(tile, tile), shape=shape, shape_class=shape_class, time=time)


def test_a_call_takes_the_tiles_of_the_nearest_class(store: TunedStore) -> None:
    """One winner a class; what was measured says nothing of a size that is more than a factor of four away."""
    variant = variant_of()
    for length, Br in ((256, 32), (2048, 64)):
        store.store(variant, cpu_identity(), tuned_at(Shape(1, 4, 4, length, length), Tile(Br, 32), time=length))
    choices = tile_choices(variant, local_cpu())

    def rows(length: int, heads: int = 4) -> int | None:
        tile = choices.of_call(ElementType.F32, Shape(1, heads, heads, length, length)).forward
        return None if tile is None else tile.Br

    assert [rows(length) for length in (200, 256, 500, 1500, 2048, 4096)] == [32, 32, 32, 64, 64, 64]
    assert rows(32) is None
    assert rows(40_000) is None
    assert rows(256, heads=32) is None
    assert choices.usual().forward == Tile(64, 32), "the last one, where no shape is given"


def test_calls_run_the_library_of_their_class(store: TunedStore) -> None:
    """Each by itself right, the same again each time, and what explain says."""
    text = TEXT.replace("attention ", "attention classes_of_")
    spec = loads(text, backend="reference").spec
    variant = analyse(spec, spec.head_dims[0])
    for length, Br in ((32, 16), (512, 64)):
        store.store(variant, cpu_identity(), tuned_at(Shape(1, 2, 2, length, length), Tile(Br, 32), time=length))
    op = loads(text)
    for length, Br in ((30, 16), (400, 64)):
        given = random_inputs(spec, Shape(1, 2, 2, length, length), spec.head_dims[0], torch.float32)
        first = op(given.q, given.k, given.v)
        torch.testing.assert_close(first.double(), op.reference(given.q, given.k, given.v), rtol=1e-4, atol=1e-5)
        assert torch.equal(first, op(given.q, given.k, given.v))
        explained = op.explain(given.q, given.k, given.v)
        assert explained.forward.Br == explained.backward.Br == Br
        assert any("tuned on" in reason for reason in explained.reasons)
    provider = op._registered.engine.kernels["cpu"]
    assert isinstance(provider, CpuProvider)
    assert provider.library.cache_info().currsize == 2, "the library of the usual tiles, and that of the other class"


def test_both_passes_are_known_by_name() -> None:
    assert tuple(candidates(variant_of(), GENERIC_CPU, SHAPE, ElementType.F32, 1)) == PASSES
    assert math.isfinite(job_of().seconds)
