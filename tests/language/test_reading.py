"""What is read: files, and what a process was started with; nothing that would be waited for without an end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flashgen.diagnostics import SpecError
from flashgen.pipeline import check_file, loads
from tests.cli.helpers import flashgen_process
from tests.slices import one_of

TEXT = "attention a { head_dim 16 }"


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.attn")
    with pytest.raises(SpecError, match="pipe or a device") as refused:
        check_file(tmp_path / "pipe.attn")
    assert refused.value.diagnostics[0].code == "E001"


@pytest.mark.parametrize("name", ["pipe.attn", "/dev/zero", "/dev/tty"])
def test_an_import_of_a_pipe_or_a_device(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.attn")
    (tmp_path / "a.attn").write_text(f'import "{name}"\n{TEXT}')
    with pytest.raises(SpecError, match="cannot import") as refused:
        check_file(tmp_path / "a.attn")
    assert refused.value.diagnostics[0].code == "E011"


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are files here")
def test_a_pipe_that_was_given_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    assert [spec.name for spec in check_file(Path(f"/dev/fd/{reading}")).specs] == ["a"]
    os.close(reading)


def test_half_a_character_is_an_error_with_its_place() -> None:
    with pytest.raises(SpecError, match="half of a character") as refused:
        loads("attention a {\n  head_dim 16 # \ud800\n}")
    (found,) = refused.value.diagnostics
    assert found.span is not None
    assert (found.code, found.span.line, found.span.column) == ("E003", 2, 17)


@pytest.mark.parametrize("encoding", one_of(2, ["ascii", "utf-8"]))
def test_a_name_that_is_no_text(tmp_path: Path, encoding: str) -> None:
    """Names of files are bytes; what is printed of them is readable, and everything else works."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "good.attn").write_text(TEXT)
    (folder / "bad.attn").write_text("attention a { head_dim 16 mask caussal }")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for name in ("check", "build"):
        outcome = flashgen_process(name, folder / "bad.attn", environment=environment)
        assert outcome.code == 1, outcome
        assert "E101" in outcome.stdout + outcome.stderr
        assert "Traceback" not in outcome.stderr
    for name, *options in (["check", "--json"], ["build", "-o", str(folder / "out")], ["show"], ["plan"]):
        outcome = flashgen_process(name, folder / "good.attn", *options, environment=environment)
        assert outcome.code == 0, outcome
        assert "Traceback" not in outcome.stderr
    assert (folder / "out" / "a" / "spec.json").is_file()
