"""Loading a spec again: what was read and emitted before is taken from the cache, and never where it is out of date."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import SpecError
from flashgen.emit import recall
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.recall import code_digest, cpu_source, specs_of_file, specs_of_text
from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_file, parse_text
from flashgen.op.loading import load
from flashgen.store.cache import Cache
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.plan import plan_cpu

SPEC = 'import "slope.attn"\nattention tiny { head_dim 16  const w = 8  score s * rise(1)  mask window_left(w) }\n'
SLOPE = "def rise(x) = x / 2\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And code that nobody works on meanwhile."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(recall, "code_digest", lambda: "this flashgen")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "slope.attn").write_text(SLOPE)
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    return path


class Counter:
    """Reads a file, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.reads = 0

    def specs(self, path: Path | str, **constants: float) -> Sequence[AttentionSpec]:
        def read() -> Sequence[AttentionSpec]:
            self.reads += 1
            return parse_file(path, constants).specs

        return specs_of_file(path, constants, read)


def test_a_file_is_read_once(file: Path) -> None:
    counter = Counter()
    first, second = counter.specs(file), counter.specs(file)
    assert counter.reads == 1
    assert list(first) == list(second)
    assert [each.sources for each in first] == [each.sources for each in second]


def test_what_makes_it_another_spec(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    (plain,) = counter.specs(file)
    assert counter.specs(file, w=4)[0].mask != plain.mask
    assert counter.reads == 2
    (file.parent / "slope.attn").write_text("def rise(x) = x / 4\n")
    assert counter.specs(file)[0].score != plain.score, "an imported file has changed"
    assert counter.reads == 3
    counter.specs(file)
    assert counter.reads == 3
    file.write_text(SPEC.replace("head_dim 16", "head_dim 32"))
    assert counter.specs(file)[0].head_dims != plain.head_dims
    monkeypatch.setattr(recall, "code_digest", lambda: "another flashgen")
    counter.specs(file)
    assert counter.reads == 5


def test_code_that_has_changed_since_it_was_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken, and nothing kept that the new code would take for its own."""
    monkeypatch.setattr(recall, "code_digest", code_digest)
    monkeypatch.setattr(recall, "_BEGAN", 0.0)
    assert code_digest() is None
    counter = Counter()
    for _ in range(2):
        counter.specs(file)
    assert counter.reads == 2
    assert not Cache.of_compiler().root.exists() or not list(Cache.of_compiler().root.rglob("specs.json"))


def test_relative_names_belong_to_a_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, other = Counter(), tmp_path / "other"
    other.mkdir()
    (other / "tiny.attn").write_text(SPEC)
    (other / "slope.attn").write_text("def rise(x) = x / 8\n")
    monkeypatch.chdir(tmp_path)
    (first,) = counter.specs("tiny.attn")
    monkeypatch.chdir(other)
    (second,) = counter.specs("tiny.attn")
    assert counter.reads == 2
    assert first.score != second.score


@pytest.mark.parametrize("damage", [b"", b"[", b"[]"])
def test_a_damaged_entry_is_made_anew(file: Path, damage: bytes) -> None:
    counter = Counter()
    expected = list(counter.specs(file))
    (stored,) = Cache.of_compiler().root.rglob("specs.json")
    stored.write_bytes(damage)
    assert list(counter.specs(file)) == expected
    assert counter.reads == 2


def test_errors_are_found_each_time(file: Path) -> None:
    file.write_text(SPEC.replace("rise", "risen"))
    for _ in range(2):
        with pytest.raises(SpecError, match="risen"):
            load(file)
    with pytest.raises(SpecError, match="does not exist"):
        load(file.parent / "none.attn")


def test_a_folder_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch, recwarn: object) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/dev/null/none")
    counter = Counter()
    assert list(counter.specs(file)) == list(counter.specs(file))
    assert counter.reads == 2
    assert not recwarn, "it is only slower"


def variant(text: str) -> Variant:
    (spec,) = specs_of_text(text, {}, lambda: parse_text(text).specs)
    return analyse(spec, spec.head_dims[0])


def test_sources_are_emitted_once() -> None:
    emitted = []

    def emit(chosen: Variant) -> KernelSource:
        emitted.append(chosen)
        return emit_cpu(chosen, plan_cpu(chosen, GENERIC_CPU))

    causal, full = "attention a { head_dim 16 mask causal }", "attention a { head_dim 16 }"
    sources = [cpu_source(each, lambda each=each: emit(each)) for each in map(variant, (causal, causal, full))]  # type: ignore[misc]
    assert len(emitted) == 2
    assert sources[0] == sources[1] != sources[2]
    first = variant(causal)
    assert sources[0] == emit_cpu(first, plan_cpu(first, GENERIC_CPU))


def test_a_second_process_neither_parses_nor_fills_templates(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "code_digest", code_digest)
    monkeypatch.setattr(recall, "_BEGAN", math.inf)
    recall._digest.cache_clear()
    expected = load(file)
    code = (
        f"import sys, flashgen; op = flashgen.load({str(file)!r})\n"
        "print(op.name, [name for name in ('lark', 'jinja2', 'flashgen.language') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{expected.name} []"


def test_clearing_the_cache_clears_this_too(file: Path) -> None:
    counter = Counter()
    counter.specs(file)
    assert Cache.default().entries() == (), "no library"
    assert Cache.default().clear() > 0
    assert not any(Cache.default().root.rglob("*"))
    counter.specs(file)
    assert counter.reads == 2
