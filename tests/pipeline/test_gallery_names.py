"""Specs that come with flashgen, by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashgen
from flashgen.diagnostics import SpecError
from flashgen.store import gallery
from tests.cli.helpers import flashgen as command

TEXT = "attention mine { head_dim 16 }"


def test_every_spec_has_its_name() -> None:
    assert {"alibi", "causal", "t5"} <= set(gallery.names())
    for name in gallery.names():
        assert Path(gallery.spec_file(name)).is_file()


def test_a_name_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert flashgen.load("alibi", backend="reference").spec.name == "alibi"
    assert [each.name for each in flashgen.check("t5").specs] == ["t5"]
    outcome = command("check", "causal")
    assert outcome.code == 0
    assert command("plan", "causal").code == 0


def test_a_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alibi").write_text(TEXT)
    assert flashgen.load("alibi", backend="reference").spec.name == "mine"


@pytest.mark.parametrize("name", ["alibi.attn", "./alibi", "specs/alibi", "nothing_like_it", "", "a\0b"])
def test_what_is_no_name_of_the_gallery(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="E001"):
        flashgen.load(name, backend="reference")


def test_the_nearest_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="did you mean 'alibi'"):
        flashgen.load("aliby", backend="reference")
    outcome = command("plan", "caussal")
    assert outcome.code == 2
    assert "Did you mean 'causal', of the specs that come with flashgen?" in outcome.stderr
    assert "did you mean 'causal'" in command("check", "caussal").stderr


@pytest.mark.parametrize("text", ["attention x { head_dim 16 }", "attention x {\n" + " " * 999 + "}"])
def test_the_text_of_a_spec_in_place_of_a_file(text: str) -> None:
    with pytest.raises(SpecError, match=r"this is the text of a spec, no file's name\n.*flashgen.loads takes it"):
        flashgen.load(text)


@pytest.mark.parametrize("given", [None, 3, ["alibi"], b"alibi"])
def test_what_is_no_path_is_named(given: Any) -> None:
    for door in (flashgen.load, flashgen.check, flashgen.build):
        with pytest.raises(TypeError, match=f"must be a str or a Path, not {type(given).__name__}"):
            door(given)


@pytest.mark.parametrize("given", [["w=3"], "w=3", {3: 3}])
def test_constants_have_names(given: Any) -> None:
    text = "attention a { head_dim 16 const w = 3 mask window(w) }"
    for call in (lambda: flashgen.loads(text, const=given), lambda: flashgen.check("alibi", given)):
        with pytest.raises(TypeError, match="constants are given by their names, as in"):
            call()
