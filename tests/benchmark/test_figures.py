"""The script behind ``make figures``: data that is drawn elsewhere, the page, and what was left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.picture.plotting import PlottingMissing
from flashgen.tuning import tune
from tools.benchmarks import figures
from tools.benchmarks.sweep import Absent, Sweep


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The figure over lengths at N 128, without peers, in no time."""
    out = tmp_path_factory.mktemp("figures")
    small = {"length": dataclasses.replace(figures.FIGURES["length"], peers=())}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tune, "_TURN_SECONDS", 1e-9)
        patched.setattr(figures, "FIGURES", {**figures.FIGURES, **small})
        figures.main(["--only", "length", "--longest", "128", "--seconds", "20", "--out", str(out)])
        yield out


def test_the_page_shows_what_was_measured(measured: Path) -> None:
    page = (measured / "README.md").read_text(encoding="utf-8")
    data = json.loads((measured / "cpu" / "length.json").read_text(encoding="utf-8"))
    sweep = Sweep.from_json(data)
    assert [(point.x, point.backward) for point in sweep.points] == [(128, False), (128, True)]
    assert sweep.options == ("dropout 0.1", "padding mask")
    for name in ("cpu/length.png", "cpu/length.svg"):
        assert f"({name})" in page
        assert 1000 < (measured / name).stat().st_size < figures.MOST_BYTES
    assert sweep.device.split(";")[0] in page
    assert sweep.of_code in page
    assert sweep.of_code.startswith("20")  # the day
    unmeasured = f"## CPU: {figures.FIGURES['totals'].title}\n\nUnmeasured."
    assert unmeasured in page


def test_data_without_pictures_is_kept_and_drawn_later(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = measured / "cpu" / "length.png"
    before = picture.read_bytes()
    picture.unlink()
    with monkeypatch.context() as patched:

        def missing(*_: object) -> None:
            raise PlottingMissing("no matplotlib here")

        patched.setattr(figures, "save_plot", missing)
        figures.main(["--draw", "--out", str(measured)])
        assert not picture.exists()
    figures.main(["--draw", "--out", str(measured)])
    assert picture.read_bytes() == before


def test_totals_are_a_table_of_those_that_were_measured(measured: Path) -> None:
    sweep = Sweep.from_json(json.loads((measured / "cpu" / "length.json").read_text(encoding="utf-8")))
    own = sweep.points[-1]
    other = dataclasses.replace(own, who="standard", flops=2.5e9, hbm_bytes=3 * 10**9)
    lines = figures.totals_table(dataclasses.replace(sweep, kind="totals", points=(*sweep.points, other)))
    assert lines[0] == "| forward + backward | flashgen | standard |"
    assert lines[2].endswith("| 2.5 |")
    assert lines[3].endswith("| 3 |")
    assert f"{1e3 * own.seconds.median:.3g}" in lines[4]


def test_what_was_left_out_is_said_once(measured: Path) -> None:
    sweep = Sweep.from_json(json.loads((measured / "cpu" / "length.json").read_text(encoding="utf-8")))
    absent = tuple(
        Absent("", 128 << n, str(128 << n), "flex", backward, "it has no dropout")
        for n in (0, 1)
        for backward in (False, True)
    )
    said = figures.left_out(Sweep(**{**vars(sweep), "absent": absent}))
    assert said == "Not measured: flex at 128, 256 (it has no dropout)."


def test_an_unknown_figure_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["--only", "lenght", "--out", str(tmp_path)])
    assert "there is no figure lenght; known: length, chunks, flex, blocks, sparsity, totals" in capsys.readouterr().err
