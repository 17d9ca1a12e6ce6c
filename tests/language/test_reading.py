"""What is read: files, and what a process was started with; nothing that would be waited for without an end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flashgen.compiler.pipeline import check_file
from flashgen.diagnostics import SpecError
from flashgen.op.loading import loads
from tests.cli.helpers import flashgen_process
from tests.slices import one_of

TEXT = "attention a { head_dim 16 }"


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.attn")
    with pytest.raises(SpecError, match="pipe or a device") as refused:
        check_file(tmp_path / "pipe.attn")
    assert refused.value.diagnostics[0].code == "E001"


@pytest.mark.parametrize("name", ["pipe.attn", "/dev/zero", "/dev/tty", "given.attn", "GIVEN"])
def test_an_import_of_a_pipe_or_a_device(tmp_path: Path, name: str) -> None:
    """Also of one that this process was given, by its name or by a link: who runs it need not have written the spec."""
    os.mkfifo(tmp_path / "pipe.attn")
    reading, writing = os.pipe()
    (tmp_path / "given.attn").symlink_to(f"/dev/fd/{reading}")
    name = name.replace("GIVEN", f"/dev/fd/{reading}")
    (tmp_path / "a.attn").write_text(f'import "{name}"\n{TEXT}')
    with pytest.raises(SpecError, match="cannot import") as refused:
        check_file(tmp_path / "a.attn")
    assert refused.value.diagnostics[0].code == "E011"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("content", [b"root:x:0:0:secret\n", b"secret = import os\n", b"secret \xff", b"secret\0"])
@pytest.mark.parametrize("name", ["accounts", "link.attn"])
def test_an_import_shows_nothing_of_what_is_no_spec(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "accounts").write_bytes(content)
    (tmp_path / "link.attn").symlink_to("accounts")
    (tmp_path / "a.attn").write_text(f'import "{name}"\n{TEXT}')
    with pytest.raises(SpecError, match="it is no spec") as refused:
        check_file(tmp_path / "a.attn")
    assert [each.code for each in refused.value.diagnostics] == ["E011"]
    assert not any(word in str(refused.value) for word in ("secret", "0xff"))
    (tmp_path / "accounts").write_text("def near(w) = abs(i - j) <= w")
    assert check_file(tmp_path / "a.attn").specs


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
