"""The GPT whose sequences are spread over ranks: its losses and weights are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.train_long import Settings, main, train
from tests.distributed.ranks import run

TEXT = b"def causal(i, j):\n    return j <= i\n\n" * 100
TINY = Settings(steps=3, length=65, heads=2, head_dim=64, layers=2)


def quiet(_: str) -> None:
    """Say nothing."""


def runs(settings: list[Settings]) -> list[tuple[tuple[float, ...], dict[str, Tensor]]]:
    """Losses and last gradients of each; of the first one also those of rank 0 alone, at the end."""
    found = [train(each, quiet) for each in settings]
    single = dist.new_group([0])
    if dist.get_rank() == 0:
        found.append(train(settings[0], quiet, single))
    dist.barrier()
    return [(each.losses, {name: x.grad for name, x in each.model.named_parameters()}) for each in found]  # type: ignore[misc]


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    usual = replace(TINY, text=file)
    first, second = run(runs, 2, [usual, replace(usual, method="ulysses", partition="contiguous")])
    losses, gradients = first.pop()
    assert len(set(losses)) == TINY.steps
    for other, theirs in (*first, *second):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses), rtol=1e-6, atol=0)
        for name, x in gradients.items():  # AdamW steps by their signs: what is nearly 0 goes one way or the other
            assert (theirs[name] - x).norm() <= 1e-3 * x.norm(), name


def test_the_command_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    sizes = ["--steps=2", "--length=16", "--layers=1", "--heads=2", "--head-dim=64", f"--text={file}", "--beside"]
    assert main(["alibi", *sizes]) == 0
    told = capsys.readouterr().out
    assert "partition: 16 positions on 1 ranks" in told
    assert "the losses differ by at most 0.0e+00" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["albi"], "did you mean 'alibi'"),
        (["plain", "--length", "100"], "'plain' is not causal: the byte at 0 sees the one at 1"),
        (["packed_documents"], "'packed_documents' captures 'doc'"),
        (["alibi", "--device", "cuda:9"], "--device cuda:9: "),
        (["alibi", "--length", "2000"], "with sequences of 2000 it takes 20,011"),
        (["alibi", "--text", "/nowhere"], "--text /nowhere: No such file"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    given = arguments if "--text" in arguments else [*arguments, "--text", str(file)]
    assert main(given) == 2
    assert says in capsys.readouterr().err
