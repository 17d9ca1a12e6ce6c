"""Tables of the benchmarks' page: those of another machine stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmarks import report
from tools.benchmarks.report import processor

PAGE = "before\n<!-- speed -->\n`make bench` on {}, 2 cores\n\nold\n<!-- end of speed -->\nafter\n"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "README.md"
    monkeypatch.setattr(report, "README", path)
    monkeypatch.setattr(report, "machine", lambda: "Xeon @ 2.50GHz, 2 cores")
    monkeypatch.delenv("REPLACE_TABLES", raising=False)
    return path


def publish() -> None:
    report.publish("speed", "make bench", ("N", "ms"), [("1024", "3.5")], "New.")


def test_a_table_of_the_same_processor_is_replaced(page: Path) -> None:
    page.write_text(PAGE.format("Xeon @ 2.50GHz"))
    publish()
    text = page.read_text()
    assert "| 1024 | 3.5 |" in text
    assert "New." in text
    assert "old" not in text
    assert text.startswith("before\n<!-- speed -->\n`make bench` on Xeon @ 2.50GHz")
    assert text.endswith("<!-- end of speed -->\nafter\n")


def test_one_of_another_stays_unless_asked_for(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = PAGE.format("EPYC 9654")
    page.write_text(old)
    publish()
    assert page.read_text() == old
    printed = capsys.readouterr().out
    assert "| 1024 | 3.5 |" in printed
    assert "another processor, EPYC 9654." in printed
    assert "REPLACE_TABLES=1 replaces it" in printed
    monkeypatch.setenv("REPLACE_TABLES", "1")
    publish()
    assert "| 1024 | 3.5 |" in page.read_text()


def test_a_section_that_is_not_there_is_named(page: Path) -> None:
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="no section 'speed'"):
        publish()


@pytest.mark.parametrize(
    ("vendor", "family", "model", "said"),
    [
        ("AuthenticAMD", 25, 1, "AMD EPYC (Zen 3)"),
        ("AuthenticAMD", 25, 17, "AMD EPYC (Zen 4)"),
        ("AuthenticAMD", 26, 2, "AMD EPYC (Zen 5)"),
        ("AuthenticAMD", 40, 2, "AMD EPYC (family 40 model 2)"),
        ("GenuineIntel", 6, 143, "AMD EPYC (family 6 model 143)"),
    ],
)
def test_processors_of_one_name_are_told_apart(vendor: str, family: int, model: int, said: str) -> None:
    cpuinfo = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n"
    )
    assert processor(cpuinfo) == said


def test_a_processor_without_a_family_is_called_by_its_name() -> None:
    assert processor("model name\t: Neoverse\n") == "Neoverse"
    assert processor("processor\t: 0\n") is None
