"""A loss with a tangent in it: flashgen and the MATH path train alike."""

from __future__ import annotations

import pytest

from examples.mean_flow import largest_difference, main, train


@pytest.mark.parametrize("through", [False, True])
def test_losses_are_those_of_the_math_path(through: bool) -> None:
    runs = train(4, 40, 2, through=through, tell=lambda _: None)
    assert len(runs[0].losses) == 4
    assert len(set(runs[0].losses)) == 4
    assert largest_difference(runs) < 1e-5


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps=2", "--points=10", "--batch=1"]) == 0
    told = capsys.readouterr().out
    assert "SDPA, MATH" in told
    assert "largest difference of the losses" in told
    with pytest.raises(SystemExit):
        main(["--steps=0"])
