"""No line of a generated source is long, whatever a spec says, and no token of it changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled
from flashgen.compiler.pipeline import target_named
from flashgen.diagnostics import SpecError
from flashgen.emit import context
from flashgen.emit.layout import COLUMNS, laid_out
from flashgen.language import parse_text
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.tiles import GpuPlan
from tests.cuda.helpers import of_type
from tools.fuzz.draws import Machine, draw

GENERATED = Path(__file__).parents[2] / "generated"
RANDOM_SPECS = 12


def tokens(source: str) -> list[str]:
    """What a compiler sees: no blanks, no comments, string literals that stand beside each other as one."""
    source = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda found: found[1] or "", source)
    source = re.sub(r'"\s*"', "", source)
    return re.findall(r'"(?:\\.|[^"\\])*"|\w+|\S', source)


def too_long(source: str) -> list[str]:
    return [line for line in source.splitlines() if len(line) > COLUMNS]


@pytest.mark.parametrize("path", sorted(GENERATED.glob("*/*.c*")), ids=lambda path: path.name)
def test_what_is_committed_has_no_long_lines(path: Path) -> None:
    assert not too_long(path.read_text(encoding="utf-8"))


def random_specs(target: str) -> Iterator[tuple[int, str]]:
    machine = Machine("cpu") if target == "cpu" else Machine("emulator", target)
    for seed in range(RANDOM_SPECS):
        yield seed, draw(seed, machine).case.text


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
def test_random_specs_have_no_long_lines_and_their_tokens(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def remembered(source: str) -> str:
        rendered.append(source)
        return laid_out(source)

    monkeypatch.setattr(context, "laid_out", remembered)
    emitted = 0
    for seed, text in random_specs(target):
        try:
            spec = parse_text(text).specs[0]
            variant = analyse(spec, spec.head_dims[0])
            plan = compiled(variant, target_named(target)).plan
        except SpecError:
            continue
        source = emit_cuda(of_type(plan)) if isinstance(plan, GpuPlan) else emit_cpu(variant, plan)
        emitted += 1
        assert not too_long(source.text), seed
        assert tokens(source.text) == tokens(rendered[-1]), seed
    assert emitted > RANDOM_SPECS // 2


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            "  const bool may_keep = " + " && ".join(f"fg::ranges::some(t{n})" for n in range(6)) + ";",
            [
                "  const bool may_keep = " + "".join(f"fg::ranges::some(t{n}) && " for n in range(4)).rstrip(),
                "      fg::ranges::some(t4) && fg::ranges::some(t5);",
            ],
        ),
        (
            "FG_DEVICE float twice(const Arguments& a) { const float "
            + "x" * 60
            + " = a.first; return "
            + "x" * 60
            + "; }",
            [
                "FG_DEVICE float twice(const Arguments& a) {",
                f"  const float {'x' * 60} = a.first;",
                f"  return {'x' * 60};",
                "}",
            ],
        ),
        (
            "  float of_slope;  // " + "slope[h] + " * 10 + "gate[b]",
            ["  // " + " ".join(["slope[h] +"] * 10), "  // gate[b]", "  float of_slope;"],
        ),
        (
            "//     let bias = " + " + ".join(["table[clamp(i - j, 0, 31), h]"] * 4),
            [
                "//     let bias = " + " + ".join(["table[clamp(i - j, 0, 31), h]"] * 3) + " +",
                "//         table[clamp(i - j, 0, 31), h]",
            ],
        ),
    ],
    ids=["operators", "block", "comment behind code", "quoted line"],
)
def test_where_lines_are_broken(line: str, lines: list[str]) -> None:
    assert laid_out(line).splitlines() == lines


def test_what_fits_stays_as_it_is() -> None:
    source = "int f( int x ){return   x;}\n// ---- a section ----\n#define PAIR x\n"
    assert laid_out(source) == source


def test_long_macros_stay_on_their_line() -> None:
    macro = "#define LONG " + "x + " * 40 + "1\n"
    assert laid_out(macro) == macro
