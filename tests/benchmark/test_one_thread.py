"""What the benchmark of one thread tells inductor of the compiler."""

from __future__ import annotations

import subprocess

import pytest

from flashgen.toolchains.cpp import find_compiler
from tools.benchmarks.one_thread import one_word


def test_a_compiler_with_flags_has_a_name_of_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    command = find_compiler().command[0]
    monkeypatch.setenv("CXX", f"{command} -DTOLD='1 + 2'")
    with one_word() as compiler:
        macros = subprocess.run(
            [compiler, "-dM", "-E", "-x", "c++", "-"], input="", capture_output=True, text=True, check=True
        )
    assert "#define TOLD 1 + 2" in macros.stdout.splitlines()
    monkeypatch.setenv("CXX", command)
    with one_word() as compiler:
        assert compiler == command
