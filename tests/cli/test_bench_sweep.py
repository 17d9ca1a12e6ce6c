"""``flashgen bench --sweep``: tables, JSON, plots, interruption, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.tuning import tune
from tests.cli.helpers import flashgen
from tools.benchmarks import sweeps
from tools.benchmarks.sweep import Sweep

SMALL = ("--shape", "1,1,1,128,128")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("specs") / "swept.attn"
    file.write_text("attention swept { head_dim 16 dtype f32 mask causal }")
    return file


@pytest.fixture(autouse=True)
def one_call_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured matters here, and not how well."""
    monkeypatch.setattr(tune, "_TURN_SECONDS", 1e-9)


def test_length_as_json_and_plot(spec: Path, tmp_path: Path) -> None:
    plot = tmp_path / "length.svg"
    outcome = flashgen(
        "bench", spec, *SMALL, "--sweep", "length", "--lengths", "64,32", "--vs", "sdpa", "--json", "--plot", plot
    )
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout)["swept"]
    assert found["sweep"] == "length"
    assert {point["x"] for point in found["points"]} == {32, 64}
    assert found["points"][0]["shape"] == [1, 1, 1, 32, 32]
    assert {point["pass"] for point in found["points"]} == {"forward", "forward+backward"}
    assert json.loads(json.dumps(Sweep.from_json(found).to_json())) == found
    text = plot.read_text()
    for words in (
        "run time (ms)",
        "N (tokens)",
        "peak beyond the inputs (MiB)",
        "flashgen",
        "SDPA",
        "medians and quartiles",
    ):
        assert words in text, words
    assert str(plot) in outcome.stderr


@pytest.mark.parametrize(
    ("sweep", "more", "words", "in_plot"),
    [
        (
            "blocks",
            ("--blocks", "16,24"),
            ("16 × 16", "(planner)", "× planner"),
            ("run time (ms)", "standard attention, forward"),
        ),
        ("totals", (), ("GFLOP", "rabe_staats", "× flashgen"), ("matrix products (GFLOP)", "HBM bytes (GB)")),
        pytest.param(
            *("sparsity", (), ("butterfly, ", "random blocks, ", "× proportional"), ("pairs kept (%)", "proportional")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tables_and_plots(
    spec: Path, tmp_path: Path, sweep: str, more: tuple[str, ...], words: tuple[str, ...], in_plot: tuple[str, ...]
) -> None:
    plot = tmp_path / "sweep.svg"
    outcome = flashgen("bench", spec, *SMALL, "--budget", 600, "--sweep", sweep, *more, "--plot", plot)
    assert outcome.code == 0, outcome.stderr
    for word in words:
        assert word in outcome.stdout, word
    text = plot.read_text()
    for word in in_plot:
        assert word in text, word
    if sweep == "blocks":
        assert "no flashgen at 24 × 24: the schedule cannot work on a CPU" in outcome.stderr


def test_an_interruption_keeps_what_was_measured(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = sweeps.length_sweep

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(measured(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "length_sweep", interrupted)
    plot = tmp_path / "length.png"
    outcome = flashgen(
        "bench", spec, *SMALL, "--sweep", "length", "--lengths", "64,128", "--vs", "sdpa", "--plot", plot
    )
    assert outcome.code == 130
    assert "interrupted; this is what was measured until then" in outcome.stderr
    assert "flashgen" in outcome.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--plot", "a.png"), "'--plot' belongs to a sweep: add --sweep length, blocks, sparsity, totals"),
        (("--padding",), "'--padding' belongs to a sweep"),
        (("--lengths", "64"), "'--lengths' belongs to a sweep"),
        (("--budget", "60"), "'--budget' belongs to a sweep"),
        (("--sweep", "length", "--dtype", "f16"), "is built for f32, not f16"),
        (("--budget", "inf"), "inf is no time that ends"),
        (("--sweep", "length", "--lengths", "64,x"), "'64,x' is no list of lengths such as 128,256,512"),
        (("--sweep", "length", "--lengths", "0,64"), "a length is at least 1"),
        (("--sweep", "length", "--plot", "a.txt"), "its name has to end in .png, .svg, .pdf"),
        (("--vs", "block_sparse"), "'block_sparse' computes other pairs than the spec"),
        (("--sweep", "width"), "'width' is not one of"),
        (("--sweep", "length", "--vs", "standart"), "Did you mean 'standard'?"),
        (("--sweep", "length", "--dropout", "1"), "1.0 is not in the range"),
        (("--sweep", "length", "--budget", "0"), "0.0 is not in the range"),
    ],
)
def test_wrong_usage_is_explained(spec: Path, arguments: tuple[str, ...], reason: str) -> None:
    outcome = flashgen("bench", spec, *arguments)
    assert outcome.code == 2
    assert reason in " ".join(outcome.stderr.split())


def test_a_gpu_that_is_not_there(spec: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome = flashgen("bench", spec, "--device", "cuda")
    assert outcome.code == 2
    assert "PyTorch finds no GPU here" in outcome.stderr


def test_a_missing_matplotlib_is_noticed_before_anything_is_measured(
    specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tools.benchmarks.sweeps as sweeps_module
    from flashgen.picture import plotting

    def missing(name: str) -> None:
        raise plotting.PlottingMissing("pictures need matplotlib")

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr(plotting, "_import", missing)
    for name in [each for each in vars(sweeps_module) if each.endswith("_sweep")]:
        monkeypatch.setattr(sweeps_module, name, measured)
    options = ("--sweep", "length", "--lengths", "16", "--plot", tmp_path / "a.png")
    outcome = flashgen("bench", specs / "causal.attn", *options)
    assert outcome.code == 2
    assert "need matplotlib" in outcome.stderr
    assert not outcome.stdout
