"""Random specs on every backend: some of them here, other ones by `make test-random` and `flashgen fuzz`."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cli.helpers import flashgen_process

# What a core judges in about 15 seconds, or in 30 where a compiler builds it first.
SPECS = {"cpu": 1, "tiled": 6, "emulator sm_75": 1, "emulator sm_80": 1, "emulator sm_90a": 1}


@pytest.mark.parametrize("machine", SPECS)
def test_random_specs(machine: str, seed: int) -> None:
    """To repeat a failure: the command that the message begins with."""
    backend, _, target = machine.partition(" ")
    arguments = ["--backend", backend, *(["--target", target] if target else [])]
    arguments += ["--seed", str(seed), "--count", str(SPECS[machine])]
    done = flashgen_process("fuzz", *arguments, "--jobs", "1", "--attempts", "0", "--json", seconds=280)
    sys.stdout.write(f"flashgen fuzz {' '.join(arguments)}\n")
    assert done.code == 0, f"flashgen fuzz {' '.join(arguments)}\n{done.stderr}"
    summary = json.loads(done.stdout)
    assert summary["specs"] == SPECS[machine]
    # A target may refuse all of a few: head dimensions without a tile that fits, pinned tiles that do not fit.
    assert summary["results"] > 0 or summary["judged"] == 0, summary["refused"]
    assert summary["judged"] + sum(summary["refused"].values()) == summary["specs"]


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_random_specs_over_ranks(count: int, seed: int) -> None:
    """To repeat a failure: the command that the message begins with."""
    arguments = ["--backend", "tiled", "--ranks", "3", "--count", str(count)]
    arguments += ["--seed", str(seed)]
    done = flashgen_process("fuzz", *arguments, "--attempts", "0", "--json", seconds=280)
    assert done.code == 0, f"flashgen fuzz {' '.join(arguments)}\n{done.stderr}"
    assert json.loads(done.stdout)["specs"] == count
