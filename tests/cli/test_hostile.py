"""What a user can do to the commands: close pipes, interrupt, ask for too much, and read errors as JSON."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flashgen.plan.tile_counts import _nearest
from tests.cli.helpers import flashgen, flashgen_process

SMALL = "attention small { head_dim 16 dtype f32 mask causal }"
LARGEST = str(2**31 - 1)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "small.attn"
    file.write_text(SMALL)
    return file


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flashgen", *map(str, arguments)]


@pytest.mark.parametrize("arguments", [("plan", "--verbose"), ("plan", "--json"), ("show",), ("check", "--json")])
def test_a_reader_that_leaves_is_no_error(spec: Path, arguments: tuple[str, ...]) -> None:
    """``| head -1`` where more comes than a pipe holds."""
    with subprocess.Popen(
        command(arguments[0], spec, *arguments[1:]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said when Ctrl-C was pressed; again where that was lost, as it may be while PyTorch is imported."""
    time.sleep(10)
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it went on")


def test_an_interruption_is_said_in_a_line(spec: Path) -> None:
    """By a signal, while it measures for a minute."""
    arguments = command("tune", spec, "--candidates", "50", "--again", "--json")
    # What runs these tests in the background may ignore the signal, and who is started by it does too.
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listens,  # noqa: PLW1509 - no thread of this process holds what it needs
    ) as process:
        try:
            out, said = interrupted(process)
        finally:
            process.kill()
    # Both are 130 to a shell: Python ends by the signal itself where it came while a module was made from text.
    assert process.returncode in (130, -signal.SIGINT), said
    assert "Traceback" not in said
    assert "interrupted" in said
    assert "interrupted" in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("verify", "flashgen.verification.verify"),
        ("bench", "tools.benchmarks.bench.bench"),
        ("plan", "flashgen.compiler.pipeline.report_file"),
        ("show", "flashgen.picture.mask.mask_picture"),
        ("build", "flashgen.compiler.building.build_files"),
    ],
)
def test_every_command_can_be_interrupted(spec: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    done = flashgen(name, spec, "--json")
    assert done.code == 130
    assert done.stderr == "error: interrupted\n"
    assert json.loads(done.stdout)["error"]["exit_code"] == 130


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan", "SPEC", "--device", "rtx409"), 2, "rtx4090"),
        (("plan", "SPEC", "--shape", "1,1,1,0,1"), 2, "there is nothing to plan for"),
        (("plan", "SPEC", "--shape", f"1,1,1,{LARGEST},{LARGEST}"), 2, "tiles are counted up to"),
        (("tune", "SPEC", "--shape", f"1,1,1,{LARGEST},{LARGEST}"), 2, "tiles are counted up to"),
        (("verify", "SPEC", "--shape", ",".join([LARGEST] * 5)), 2, "not enough memory"),
        (("bench", "SPEC", "--shape", ",".join([LARGEST] * 5)), 2, "not enough memory"),
        (("bench", "SPEC", "--sweep", "length", "--lengths", f"1{0:030}"), 2, "positions are 32-bit integers"),
        (("bench", "SPEC", "--sweep", "blocks", "--blocks", f"1{0:018}"), 2, "positions are 32-bit integers"),
        (("bench", "SPEC", "--sweep", "length", "--budget", "nan"), 2, "is not in the range"),
        (("tune", "SPEC", "--seconds", "nan"), 2, "is not in the range"),
        (("tune", "SPEC", "--seconds", "soon"), 2, "is no number of seconds"),
        (("show", "SPEC", "--seed", "-1"), 2, "is not in the range"),
        (("plan", "MISSING"), 2, "does not exist"),
        (("build", "SPEC", "--target", "cup"), 2, "'cpu'"),
        (("check", "MISSING"), 2, "the file does not exist"),
        (("verify", "BAD"), 1, "unknown name 'causall'"),
        (("plan", "NEAR"), 2, "Did you mean 'small.attn'?"),
        (("import", "math:sqrt"), 2, "takes 1 argument;"),
        (("verify", "SPEC", "--nmae", "x"), 2, "No such option"),
        (("biuld", "SPEC"), 2, "No such command"),
        (("plan --ranks", "SPEC"), 2, "No such command"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_an_error_is_json_where_that_was_asked_for(
    spec: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    bad = tmp_path / "bad.attn"
    bad.write_text("attention bad { head_dim 64 mask causall }")
    files = {
        "SPEC": str(spec),
        "BAD": str(bad),
        "MISSING": str(tmp_path / "missing.attn"),
        "NEAR": str(tmp_path / "smal.attn"),
    }
    done = flashgen(*(files.get(each, each) for each in arguments), "--json")
    assert done.code == code
    found = json.loads(done.stdout)
    if arguments[0] == "check":
        assert said in found["files"][0]["diagnostics"][0]["message"]
        return
    assert said in found["error"]["message"]
    assert found["error"]["exit_code"] == code
    assert said in " ".join(done.stderr.split())
    if arguments[1] == "BAD":
        assert found["error"]["diagnostics"][0]["span"]["line"] == 1
    assert not flashgen(*(files.get(each, each) for each in arguments)).stdout


def test_a_misspelt_file_is_answered_with_the_nearest(spec: Path) -> None:
    for name in ("check", "build", "verify", "plan", "show", "bench", "tune"):
        done = flashgen(name, spec.with_name("smlal.attn"))
        assert done.code == 2
        assert "Did you mean 'small.attn'?" in " ".join(done.stderr.split()), name


def test_import_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_mods.py").write_text("def causal(b, h, q, k): return q >= k")
    monkeypatch.chdir(tmp_path)
    text = json.loads(flashgen("import", "hostile_mods:causal", "--json").stdout)["spec"]
    assert text == flashgen("import", "hostile_mods:causal").stdout


def test_a_tensor_too_large_to_draw_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tree.attn"
    file.write_text("attention t { head_dim 16 tensor tree: bool[Nq, Nq] mask tree[i, min(j, Nq - 1)] }")
    done = flashgen("show", file, "--shape", "1,1,1,100000,100000")
    assert done.code == 2
    assert "the tensor 'tree' would have 10,000,000,000 elements" in " ".join(done.stderr.split())


def test_a_million_tokens_are_planned_in_seconds(spec: Path) -> None:
    begin = time.perf_counter()
    done = flashgen("plan", spec, "--shape", "1,1,1,1048576,1048576")
    assert done.code == 0, done.stderr
    assert time.perf_counter() - begin < 60
    assert "50% of the tiles are visited" in done.stdout


def test_a_row_that_was_not_looked_at_takes_the_nearest() -> None:
    for rows in (1, 2, 5, 9, 50):
        for count in (1, 2, 3, 7):
            sampled = np.unique((np.arange(count) + 0.5) * rows // count).astype(np.int64)
            expected = [min((abs(each - row), each) for each in sampled)[1] for row in range(rows)]
            assert _nearest(rows, sampled).tolist() == expected


def test_a_narrow_terminal_loses_nothing(spec: Path) -> None:
    wide = flashgen("devices").stdout
    narrow = flashgen_process("devices", environment={**os.environ, "COLUMNS": "40", "FORCE_COLOR": "1"})
    assert narrow.code == 0
    assert "…" not in narrow.stdout
    for word in ("bandwidth", "h200", "NVIDIA H200"):
        assert (word in wide) == (word in narrow.stdout)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("arguments", [("plan",), ("plan", "--json"), ("check", "--json"), ("show",)])
def test_a_full_disk_is_said(spec: Path, arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    # Buffered, as users have it: what is left in a buffer is written as the interpreter ends.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(name, spec, *options),
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 2, done.stderr
    assert "what was to be written: No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", [">&- 2>&-", ">&-", "2>&-", "<&-"])
@pytest.mark.parametrize("arguments", ["plan --json", "check", "show", "plan"])
def test_closed_streams(spec: Path, arguments: str, closed: str) -> None:
    line = f"exec {sys.executable} -m flashgen {arguments} {spec} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr, (line, done.stderr)


def test_colours_are_spared(spec: Path) -> None:
    """A terminal that has none, and a user who wants none."""
    for name, value, plain in (("NO_COLOR", "1", True), ("TERM", "dumb", True), ("NO_COLOR", "", False)):
        environment = {**os.environ, "TERM": "xterm", name: value}
        reader, writer = os.openpty()
        done = subprocess.run(
            command("plan", spec), env=environment, stdout=writer, stderr=writer, timeout=120, check=False
        )
        os.close(writer)
        shown = os.read(reader, 1 << 16)
        os.close(reader)
        assert done.returncode == 0
        assert b"B_r" in shown
        assert (b"\x1b[" not in shown) == plain, (name, value, shown)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_what_cannot_be_read_or_written(spec: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    done = flashgen("build", spec, "-o", locked / "out")
    assert done.code == 2
    assert str(locked) in done.stderr
    spec.chmod(0)
    for name in ("check", "plan", "verify"):
        done = flashgen(name, spec)
        assert done.code == 2
        assert "small.attn" in done.stderr
