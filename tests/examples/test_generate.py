"""Tokens written with a paged cache are those of the dense formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.generate import generate, main
from examples.train_gpt import Settings

from .test_train_gpt import TEXT, quiet

TINY = Settings(steps=3, batch=2, length=32, heads=2, head_dim=64, layers=2, beside=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    return file


@pytest.mark.parametrize(("name", "positions"), [("alibi", True), ("gpt_oss", False)])
def test_the_tokens_are_those_of_the_formula(name: str, positions: bool, text: Path) -> None:
    settings = Settings(**{**vars(TINY), "spec": name, "text": text, "positions": positions})
    paged, dense = generate(settings, [b"def causal", b"i", b"return"], 12, 5, quiet)
    assert paged.tokens == dense.tokens
    assert [len(tokens) for tokens in paged.tokens] == [22, 13, 18]


def test_the_command_says_times_and_what_cannot_be(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps=2", "--batch=1", "--length=32", "--layers=1", "--heads=2", "--head-dim=64", "--text", str(text)]
    assert main(["alibi", *sizes, "--tokens=8", "--prompt", "def "]) == 0
    told = capsys.readouterr().out
    assert "paged cache" in told
    assert "the tokens are the same" in told
    assert main(["alibi", *sizes, "--tokens=40"]) == 2
    assert "the model has 32 positions" in capsys.readouterr().err
    assert main(["plain", *sizes, "--tokens=4"]) == 2
    assert "is not causal" in capsys.readouterr().err
