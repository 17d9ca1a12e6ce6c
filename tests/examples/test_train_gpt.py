"""The GPT that trains: both models have the same losses, what a spec learns moves, errors are for people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.train_gpt import Settings, Trained, draw_losses, main, read_text, split, train

TINY = Settings(steps=4, batch=2, length=32, heads=2, head_dim=64)
TEXT = b"def causal(i, j):\n    return j <= i\n\n" * 100


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    return file


def quiet(_: str) -> None:
    """Say nothing."""


@pytest.mark.parametrize(("name", "beside"), [("alibi", "SDPA with a bias of N × N"), ("gpt_oss", "the dense formula")])
def test_both_models_have_the_same_losses(name: str, beside: str, text: Path) -> None:
    own, their = train(replace(TINY, spec=name, text=text), quiet)
    assert (own.name, their.name) == ("flashgen", beside)
    assert len(own.losses) == TINY.steps
    torch.testing.assert_close(torch.tensor(own.losses), torch.tensor(their.losses), rtol=1e-5, atol=0)
    assert own.held_out == pytest.approx(their.held_out, rel=1e-5)
    assert len(set(own.losses)) == TINY.steps


def test_what_a_spec_learns_is_trained(text: Path) -> None:
    told: list[str] = []
    own, their = train(replace(TINY, spec="alibi", text=text), told.append)
    for mine, theirs in zip(own.model.blocks, their.model.blocks, strict=True):
        slope = mine.get_parameter("attention.slope")
        assert not torch.allclose(slope, torch.tensor([0.0625, 0.00390625]), atol=1e-5)
        torch.testing.assert_close(slope, theirs.get_parameter("attention.slope"), rtol=1e-3, atol=1e-6)
    assert [line for line in told if line.startswith("learned: slope of layer 1 [2] moved by")]


def test_a_model_learns(text: Path) -> None:
    (own,) = train(replace(TINY, spec="causal", text=text, steps=40, beside=False, positions=False), quiet)
    assert own.losses[-1] < 0.5 * own.losses[0]
    assert own.held_out < 0.5 * own.losses[0]


def test_the_command_says_losses_and_speed(text: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "losses.png"
    sizes = ["--steps=2", "--batch=1", "--length=16", "--layers=1", "--heads=2", "--head-dim=64"]
    assert main(["alibi", "--text", str(text), *sizes, "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "tokens a second" in told
    assert "the losses differ by at most" in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_curve_is_drawn_alone(tmp_path: Path) -> None:
    alone = Trained("flashgen", torch.nn.Module(), [3.0, 2.0], [1.0, 1.0])  # type: ignore[arg-type]
    draw_losses([alone], replace(TINY, steps=2), tmp_path / "one.svg")
    assert (tmp_path / "one.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["albi"], "did you mean 'alibi'"),
        (["plain"], "'plain' is not causal: the byte at 0 sees the one at 1"),
        (["packed_documents"], "'packed_documents' captures 'doc'"),
        (["forgetting"], "'forgetting' captures 'F', whose shape depends on the batch"),
        (["gemma2_local", "--dtype", "float32"], "'gemma2_local' is for bfloat16"),
        (["alibi", "--device", "cuda:9"], "--device cuda:9: "),
        (["alibi", "--length", "2000"], "with sequences of 2000 it takes 20,011"),
        (["alibi", "--text", "/nowhere"], "--text /nowhere: No such file"),
        (["alibi", "--plot", "losses.gif"], "pictures are written as .png"),
        (["alibi", "--set", "size=3"], "size"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: list[str], says: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--text" in arguments else [*arguments, "--text", str(text)]
    assert main(given) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("option", "says"), [("--steps=0", "1 is the least"), ("--set=size", "is not NAME=VALUE")])
def test_what_is_no_value_of_an_option_is_said(option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["alibi", option])
    assert says in capsys.readouterr().err


def test_the_default_text_is_there_and_a_part_is_held_out() -> None:
    found = read_text(None)
    assert len(found) > 2**20
    trained, held_out = split(found, 256)
    assert bytes(trained.tolist()[-5:]) + bytes(held_out.tolist()[:5]) in found
    assert 0.09 < len(held_out) / len(found) < 0.11
