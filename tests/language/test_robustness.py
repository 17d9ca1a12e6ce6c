"""No input ends in a traceback, and none takes long."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.diagnostics import SpecError, render
from flashgen.language import parse_text

A = "attention a { head_dim 64 score "
WORDS = [
    *(
        "attention",
        "a",
        "{",
        "}",
        "head_dim",
        "64",
        ",",
        "score",
        "s",
        "+",
        "(",
        ")",
        "[",
        "]",
        "mask",
        "let",
        "=",
        "x",
    ),
    *("if", "else", "not", "-", "**", "schedule", "layout", "block", ":", "param", "f32", "tensor", "grad", "def"),
    *("import", '"x"', "1.5", "causal", "@", "weights", "softmax", "dtype", "f16", "const", "window", "i", "j", "<"),
    *("Br", "dropout", "0.1", "#", "\n", "007", "1x", "true", "and", "scor", "maks", "\t", "τ", "全", "\u00a0", "\x00"),
]


def outcome(text: str) -> str:
    """The rendered errors; every one has a place and a code."""
    try:
        file = parse_text(text, imports={})
    except SpecError as error:
        wrong = error
    else:
        return render(file.warnings, file.sources)
    assert wrong.diagnostics
    for diagnostic in wrong.diagnostics:
        assert diagnostic.span is not None
        assert diagnostic.span.line >= 1
        assert diagnostic.span.column >= 1
        assert diagnostic.severity == "error"
    return str(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1_000_000,
        A + "(" * 1_000_000,
        A + "(" * 400_000 + "s" + ")" * 400_000 + "}",
        A + "-" * 1_000_000 + "s }",
        A + "not " * 200_000 + "s }",
        A + "s" + "+1" * 400_000 + "}",
        A + "s" + "**1" * 300_000 + "}",
        A + "s if true else " * 50_000 + "s }",
        A.replace("score", "mask") + "i" + "<1" * 400_000 + "}",
        A + "min(" + ",".join(["1"] * 300_000) + ") }",
        A + "t" + "[0]" * 300_000 + "}",
        A + "f" + "(0)" * 300_000 + "}",
        A + "x" * 1_000_000 + "}",
        A + "1" * 1_000_000 + "}",
        A + "1." * 500_000 + "}",
        "#" * 1_000_000,
        " " * 1_000_000 + "@",
        "\n" * 1_000_000 + "@",
        "\t" * 1_000_000 + "@",
        '"' * 1_000_000,
        "@ " * 500_000,
        "{" * 1_000_000,
        "}" * 1_000_000,
        "attention " * 100_000,
        "attention a { " * 70_000,
        "attention a { " + "score " * 150_000,
        "attention a { head_dim 64 " + "\nscor x" * 100_000,
        "attention a { head_dim " + ", ".join(f"ynam{n}" for n in range(5000)) + "}",
        "attention a { head_dim 64 " + "".join(f"let x{n} = {n}\n" for n in range(4000)) + "}",
        "".join(f"attention a{n} {{ head_dim 64 mask causal }}\n" for n in range(20_000)),
        "".join(f"def d{n}(x) = d{(n + 1) % 1500}(x)\n" for n in range(1500)) + A + "s }",
        "def d0(x) = x\n" + "".join(f"def d{n}(x) = d{n - 1}(x)\n" for n in range(1, 1500)) + A + "d1499(s) }",
        "def d0(x) = x + x\n"
        + "".join(f"def d{n}(x) = d{n - 1}(d{n - 1}(x))\n" for n in range(1, 60))
        + A
        + "d59(s) }",
        "def d0(x) = x\n"
        + "".join(f"def d{n}(x) = d{n - 1}(x) * d{n - 1}(x)\n" for n in range(1, 60))
        + A
        + "s * d59(1) }",
        "def d0(x) = x\n"
        + "".join(f"def d{n}(x) = d{n - 1}(x) * d{n - 1}(x)\n" for n in range(1, 13))
        + "attention a { head_dim 64 "
        + "".join(f"let x{n} = d12(1)\n" for n in range(2000))
        + "}",
        "attention a { head_dim 64 " + "".join(f"const x{n} = x{(n + 1) % 3000}\n" for n in range(3000)) + "}",
        "attention a { head_dim 64 let x0 = s "
        + "".join(f"let x{n} = x{n - 1} + x{n - 1}\n" for n in range(1, 2000))
        + "}",
        'import "x"\n' * 10_000,
        "x" * 10_000_000,
    ],
)
def test_absurd_text_is_refused_quickly(text: str) -> None:
    parse_text("attention warm { head_dim 64 }")

    def seconds() -> float:
        start = time.process_time()
        assert len(outcome(text)) < 1_000_000
        return time.process_time() - start

    assert seconds() < 2 or seconds() < 2  # neighbours on a shared machine slow one of them down, not both


@given(st.text(max_size=200))
@settings(max_examples=300)
def test_random_text(text: str) -> None:
    outcome(text)


@given(st.text(alphabet='abij s01.+-*/%<>=()[]{}#:,\n"&|^!', max_size=120))
@settings(max_examples=300)
def test_random_signs_inside_a_block(text: str) -> None:
    outcome(f"attention a {{ head_dim 64\nscore {text}\nmask causal }}")


@given(st.lists(st.sampled_from(WORDS), max_size=80))
@settings(max_examples=500)
def test_random_words(words: list[str]) -> None:
    outcome(" ".join(words))
    outcome("attention a { head_dim 64 " + " ".join(words))


def test_a_long_random_program() -> None:
    choice = random.Random(3)
    start = time.process_time()
    outcome(" ".join(choice.choice(WORDS) for _ in range(100_000)).replace("\x00", ""))
    assert time.process_time() - start < 2


@given(st.data())
@settings(max_examples=200)
def test_a_gallery_text_with_a_stretch_cut_out_or_doubled(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(GALLERY))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    outcome(text[:start] + text[end:])
    outcome(text[:end] + text[start:])


def gallery() -> list[str]:
    from pathlib import Path

    return [path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))]


GALLERY = gallery()
