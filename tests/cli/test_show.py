"""``flashgen show``: in a terminal, as a file, as JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import flashgen


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "causal.attn"
    file.write_text("attention causal { head_dim 16 mask causal schedule { Br = 32 Bc = 32 } }")
    return file


def test_few_tiles_are_numbered(spec: Path) -> None:
    outcome = flashgen("show", spec, "--shape", "1,1,1,96,96")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.splitlines()[:3] == ["  1▒   ·   ·", "  2█  3▒   ·", "  4█  5█  6▒"]
    assert "50.52% of the pairs kept, 66.7% of the tiles visited" in outcome.stdout
    assert "tiles of 32 × 32: 3 FULL, 3 PARTIAL, 3 EMPTY" in outcome.stdout


def test_many_tiles_are_cells(spec: Path) -> None:
    outcome = flashgen("show", spec, "--shape", "1,1,1,1000,1000")
    first, *others = outcome.stdout.splitlines()[:32]
    assert first == "▒▒" + "··" * 31
    assert others[-1] == "██" * 31 + "▒▒"


def test_colours_where_a_terminal_reads(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    outcome = flashgen("show", spec, "--shape", "1,1,1,1000,1000")
    lines = [line for line in outcome.stdout.splitlines() if "▀" in line]
    assert len(lines) == 30
    assert {line.count("▀") for line in lines} == {59}
    assert "\x1b[38;2;30;77;122" in outcome.stdout  # FULL


def test_as_json(spec: Path) -> None:
    found = json.loads(flashgen("show", spec, "--shape", "1,2,1,96,96", "--json").stdout)["causal"]
    assert found["classes"] == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert found["tiles"] == {"FULL": 3, "PARTIAL": 3, "EMPTY": 3}
    assert found["kept_share"] == pytest.approx(97 / 192)
    assert found["kept_share_is_exact"] is True


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_the_same_bytes_each_time(spec: Path, tmp_path: Path, suffix: str, start: bytes) -> None:
    files = [tmp_path / name / f"mask.{suffix}" for name in ("one", "two")]
    for file in files:
        outcome = flashgen("show", spec, "--shape", "1,1,1,640,640", "-o", file)
        assert outcome.code == 0, outcome.stderr
        assert outcome.stdout == ""
        assert str(file) in outcome.stderr
    one, two = (file.read_bytes() for file in files)
    assert one == two
    assert one.startswith(start)
    if suffix == "svg":
        assert "of the tiles visited" in one.decode()


def test_a_random_tensor_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "documents.attn"
    file.write_text("attention documents { head_dim 16 tensor doc: i32[B, Nk] mask same_document(doc) }")
    arguments = ("show", file, "--shape", "2,1,1,100,100", "--seed", 3, "--batch", 1)
    outcome = flashgen(*arguments)
    assert "'doc' drawn at random, seed 3" in outcome.stdout
    assert "batch entry 1 of 2" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-o", "mask.bmp"), "'mask.bmp' is no picture: its name has to end in .png, .svg, .pdf"),
        (("--shape", "1,1,1,0,5"), "no pair to draw"),
        (("--head", "8"), "'--head': at this shape they are numbered 0 to 7"),
        (("--batch", "1"), "'--batch': at this shape they are numbered 0 to 0"),
        (("--device", "h10"), "'h100'"),
        (("--name", "casual"), "Did you mean 'causal'?"),
    ],
)
def test_wrong_usage_is_explained(spec: Path, arguments: tuple[str, ...], reason: str) -> None:
    outcome = flashgen("show", spec, *arguments)
    assert outcome.code == 2
    assert reason in outcome.stderr


def test_two_specs_do_not_go_into_one_file(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text() + "\nattention other { head_dim 16 }")
    outcome = flashgen("show", spec, "-o", tmp_path / "a.png")
    assert outcome.code == 2
    assert "choose one by --name" in outcome.stderr
    assert flashgen("show", spec, "-o", tmp_path / "a.png", "--name", "other").code == 0


def test_without_matplotlib_the_terminal_still_works(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert flashgen("show", spec, "--shape", "1,1,1,96,96").code == 0
    outcome = flashgen("show", spec, "--shape", "1,1,1,96,96", "-o", tmp_path / "a.png")
    assert outcome.code == 2
    assert "pip install 'flashgen[plot]'" in outcome.stderr
