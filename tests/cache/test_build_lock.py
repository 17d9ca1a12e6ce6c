"""Waiting for another's build: said after a while, and not for one that is gone or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from flashgen.store import build_lock
from flashgen.store.build_lock import exclusive

HOLD = """
    import os, sys, time
    from pathlib import Path
    from flashgen.store.build_lock import exclusive
    with exclusive(Path(sys.argv[1]), "some spec"):
        if sys.argv[2] == "fork" and os.fork() == 0:
            time.sleep(60)
        Path(sys.argv[1] + ".held").touch()
        time.sleep(float(sys.argv[3]))
"""


def held(lock: Path, fork: str, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(lock), fork, str(seconds)], start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not Path(f"{lock}.held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "entry.lock"


def test_who_waits_is_told_for_whom(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_lock, "_TELL_SECONDS", 0.0)
    process = held(lock, "", 2)
    expected = rf"waiting for process {process.pid} .*'some spec'.*entry\.lock"
    with pytest.warns(RuntimeWarning, match=expected) as told, exclusive(lock, "mine"):
        assert process.wait(60) == 0, "it was waited for"
    assert len(told) == 1


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_what_is_gone_or_stopped(lock: Path, signalled: signal.Signals) -> None:
    """A child that was forked during the build keeps the lock of its dead parent."""
    process = held(lock, "fork" if signalled is signal.SIGKILL else "", 60)
    process.send_signal(signalled)
    if signalled is signal.SIGKILL:
        process.wait()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with exclusive(lock, "mine"):
                pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert all("does not go on" in str(each.message) for each in told)


def test_a_lock_that_nobody_holds_is_silent_and_leaves_no_note(lock: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with exclusive(lock, "mine"):
            assert lock.with_suffix(".holder").exists()
        with exclusive(lock, "mine"):
            pass
    assert not lock.with_suffix(".holder").exists()
