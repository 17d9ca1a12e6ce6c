"""``flashgen tune`` and what ``flashgen cache`` says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.verify import _verdict
from flashgen.compiler import tile_choices as tuned
from flashgen.compiler.tile_choices import TunedStore
from flashgen.plan.measured import Measured, MeasuredPass, Tile
from flashgen.tuning import tune as tuning
from tests.cli.helpers import flashgen

SMALL = ("--shape", "1,1,1,64,64", "--candidates", "2", "--seconds", "0.01")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = TunedStore(tmp_path / "tuned")
    monkeypatch.setattr(TunedStore, "beside", lambda _cache: own)
    file = tmp_path / "small.attn"
    file.write_text("attention small { head_dim 16 dtype f32 }")
    return file


def test_tune_shows_keeps_and_clears(spec: Path) -> None:
    outcome = flashgen("tune", spec, *SMALL)
    assert outcome.code == 0, outcome.stderr
    assert "small, head_dim 16, f32, B·H ≤ 1, Nq ≤ 64, Nk ≤ 64" in outcome.stdout
    assert "Spearman's ρ" in outcome.stdout
    again = flashgen("tune", spec, *SMALL, "--json")
    assert "4 of 4 candidates were measured before; --again measures them anew" in again.stderr
    (found,) = json.loads(again.stdout).values()
    assert found["tuning"]["complete"] is True
    assert len(found["tuning"]["passes"]["forward"]["candidates"]) == 2

    (listed,) = json.loads(flashgen("cache", "--json").stdout)["tuned"]
    assert (listed["spec"], listed["head_dim"]) == ("small", "16")
    assert "tuned tiles of 1 kernels" in flashgen("cache").stdout
    assert "tuned on" in flashgen("plan", spec, *SMALL[:2]).stdout
    assert "tuned on" not in flashgen("plan", spec).stdout  # of 4096 keys: too far from what was measured
    libraries = {each["key"] for each in json.loads(flashgen("cache", "--json").stdout)["entries"]}
    assert flashgen("cache", "clear", "--only", "tuned").code == 0
    left = json.loads(flashgen("cache", "--json").stdout)
    assert left["tuned"] == []
    assert libraries
    assert libraries <= {each["key"] for each in left["entries"]}  # other tests may add to them meanwhile
    assert "tuned on" not in flashgen("plan", spec, *SMALL[:2]).stdout


def test_an_interruption_keeps_what_was_measured(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuning.tune

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield next(real(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    outcome = flashgen("tune", spec, *SMALL)
    assert outcome.code == 130
    assert "interrupted after 1 of 4; what was measured is kept" in outcome.stderr
    assert ", in part" in flashgen("cache").stdout
    monkeypatch.setattr(tuning, "tune", real)
    assert "1 of 4 candidates were measured before" in flashgen("tune", spec, *SMALL).stderr


def test_another_version_is_kept_and_said_so(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(tuned, "__version__", "0.0.9")
        assert flashgen("tune", spec, *SMALL).code == 0
    outcome = flashgen("tune", spec, *SMALL)
    assert "'small' was tuned by flashgen 0.0.9, too; that is kept, and not used by this version" in outcome.stderr
    assert "by flashgen 0.0.9: kept, not used by this version" in flashgen("cache").stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--shape", "1,1,1,0,64"), "there is nothing to measure"),
        (("--dtype", "f64"), "unknown dtype 'f64'"),
        (("--candidates", "0"), "0 is not in the range"),
        (("--name", "smal"), "Did you mean 'small'?"),
    ],
)
def test_wrong_usage_is_explained(spec: Path, arguments: tuple[str, ...], reason: str) -> None:
    outcome = flashgen("tune", spec, *arguments)
    assert outcome.code == 2
    assert reason in " ".join(outcome.stderr.split())


@pytest.mark.parametrize(("others", "says_little"), [((1.4, 1.7, 2.1), False), ((1.01, 0.99, 2.1), True)])
def test_ranks_of_tiles_that_take_as_long_say_little(others: tuple[float, ...], says_little: bool) -> None:
    candidates = tuple(
        Measured(Tile(16 * n, 16), 3, ratio, ratio, ratio - 0.05, ratio + 0.05) for n, ratio in enumerate(others, 2)
    )
    said = _verdict(MeasuredPass(Tile(16, 16), 1.0, candidates))
    assert ("which says little: 2 of 3 take as long" in said) is says_little


def test_tiles_in_a_folder_that_is_not_used_are_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "tuned").mkdir(mode=0o755)
    content = {"flashgen": "0.0.9", "spec": "small", "head_dim": "16", "device": "x", "tunings": []}
    (tmp_path / "tuned" / "small-0-0.0.9.json").write_text(json.dumps(content))
    tmp_path.chmod(0o1777)
    listed = flashgen("cache")
    assert "nothing of this is used" in listed.stderr
    assert "by flashgen 0.0.9: kept, not used by this version" in listed.stdout
    assert "removed the tuned tiles of 1 kernels" in flashgen("cache", "clear", "--only", "tuned").stderr
    assert not (tmp_path / "tuned").exists()
