"""Commands that judge or time kernels, where there is no compiler to make any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import flashgen


@pytest.mark.parametrize(
    "arguments",
    [("tune", "a.attn", "--shape", "1,2,1,20,20"), ("fuzz", "--count", "1"), ("fuzz", "--backend", "emulator")],
    ids=["tune", "fuzz", "emulator"],
)
def test_they_say_so(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "nonsense")
    (tmp_path / "a.attn").write_text("attention a { head_dim 16 }")
    outcome = flashgen(*arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "no C++ compiler: $CXX names 'nonsense'" in outcome.stderr
