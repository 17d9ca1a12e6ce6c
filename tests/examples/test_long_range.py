"""The task over long distances: it is what it says, it is learned, and its memory is limited."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.long_range import Settings, Trainer, _op, draw_curve, learn, main, sequences
from flashgen.nn import Attention

EASY = Settings(length=256, batch=8, heads=1, head_dim=64, pairs=8, vocabulary=8, memory=0)


def test_an_answer_is_the_value_beside_its_key_and_nowhere_else() -> None:
    settings = Settings(pairs=16, vocabulary=32)
    tokens, answers = sequences(settings, 512, 3, torch.Generator().manual_seed(0))
    asked = settings.asked(512)
    assert tokens.shape == (3, 512)
    assert answers.shape == (3, asked) == (3, 64)
    for row, right in zip(tokens.tolist(), answers.tolist(), strict=True):
        memory, rest, questions = row[:128], row[128:-asked], row[-asked:]
        assert min(rest) >= 64
        assert sum(token < 64 for token in memory) == 32
        for key, value in zip(questions, right, strict=True):
            assert key < 32
            assert memory[memory.index(key) + 1] == 32 + value
            assert memory.count(key) == 1


def test_lengths_double_up_to_the_one_that_is_asked_for() -> None:
    assert Settings(length=4096).lengths == (128, 256, 512, 1024, 2048, 4096)
    assert Settings(length=1000).lengths == (250, 500, 1000)
    assert Settings(length=1024, pairs=32).lengths == (256, 512, 1024)
    assert Settings(length=16384, batch=1).batch_at(16384) == 1
    assert Settings(length=16384, batch=1).batch_at(128) == 32


@pytest.mark.slow
def test_it_is_learned(tmp_path: Path) -> None:
    told: list[str] = []
    found = learn(EASY, _op(EASY), told.append)
    draw_curve(EASY, found, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(found.curve) == found.steps
    assert found.accuracy > 0.9
    assert found.reached == 256
    assert found.steps < EASY.steps


def test_it_cannot_be_learned_through_a_window_that_is_too_short() -> None:
    settings = replace(EASY, spec="gpt_oss", length=512, batch=1)
    trainer = Trainer(settings, Attention, _op(settings))
    loss, _ = trainer.step(512)
    assert loss > 1
    tokens, _ = sequences(settings, 512, 1, torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, :128] = 2 * settings.vocabulary
    with torch.no_grad():  # what stands in front of the window leaves no trace
        torch.testing.assert_close(trainer.model(tokens, 64), trainer.model(changed, 64), rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_standard_attention_does_not_fit_where_flashgen_does(repository: Path) -> None:
    settings = replace(EASY, length=2048, batch=1, memory=40)
    code = (
        "import json, sys; from dataclasses import asdict; from examples.long_range import Settings, measure\n"
        "settings = Settings(**json.loads(sys.argv[1]))\n"
        "print(json.dumps([asdict(measure(settings, kind)) for kind in ('flashgen', 'standard')]))"
    )
    given = json.dumps({"length": 2048, "batch": 1, "heads": 1, "head_dim": 64, "memory": settings.memory})
    done = subprocess.run(
        [sys.executable, "-c", code, given], cwd=repository, capture_output=True, text=True, check=True, timeout=120
    )
    own, standard = json.loads(done.stdout)
    assert own["failure"] is None
    assert 0 < own["peak"] < 40 * 2**20
    assert standard["way"] == "standard attention"
    assert "MiB more" in standard["failure"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--length", "100"], "--length 100: 16 pairs take sequences of 128 or more"),
        (["--pairs", "40", "--vocabulary", "32"], "--pairs 40: "),
        (["--pairs", "8", "--vocabulary", "4"], "a key stands in one pair, and there are 4 keys"),
        (["--device", "cuda:9"], "--device cuda:9: "),
        (["packed_documents"], "'packed_documents' captures 'doc'"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
