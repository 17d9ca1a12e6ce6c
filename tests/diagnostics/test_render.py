"""The look of a diagnostic, to the character."""

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError, in_reading_order, render

T5 = Source("specs/t5.attn", "\n" * 8 + "    score s + table[bucket, h]\n")


def one(text: str, span: Span, **parts: object) -> str:
    return render([Diagnostic("E101", "no", span, **parts)], [Source(span.file, text)])  # type: ignore[arg-type]


def test_the_example_of_the_contract() -> None:
    diagnostic = Diagnostic(
        "W501",
        "index may fall outside 'table'; the load is clamped",
        Span("specs/t5.attn", 9, 21, 9, 27),
        "is in [0, 33], the dimension has 32 entries",
        ("'bucket' is defined at line 8",),
        ("if no pair that the mask keeps can reach it, write min(bucket, 31) and the warning goes",),
    )
    assert render([diagnostic], [T5]) == (
        "specs/t5.attn:9:21: warning[W501]: index may fall outside 'table'; the load is clamped\n"
        "   9 |     score s + table[bucket, h]\n"
        "     |                     ^^^^^^ is in [0, 33], the dimension has 32 entries\n"
        "     = note: 'bucket' is defined at line 8\n"
        "     = help: if no pair that the mask keeps can reach it, write min(bucket, 31) and the warning goes"
    )


def test_severity_follows_the_code() -> None:
    assert Diagnostic("W502", "", None).severity == "warning"
    assert Diagnostic("E101", "", None).severity == "error"


def test_without_a_place() -> None:
    assert render([Diagnostic("E001", "the file does not exist", None)], []) == "error[E001]: the file does not exist"


def test_in_a_file_whose_text_is_not_at_hand() -> None:
    shown = render([Diagnostic("E101", "no", Span("x.attn", 3, 4, 3, 5), "here", ("a fact",))], [])
    assert shown == "x.attn:3:4: error[E101]: no\n     = here\n     = note: a fact"


def test_a_place_behind_the_end_of_the_text_is_shown_without_a_line() -> None:
    assert one("a\n", Span("x", 9, 1, 9, 2)) == "x:9:1: error[E101]: no"
    assert one("ab", Span("x", 1, 3, 1, 3)).splitlines()[2] == "     |   ^"


def test_tabs_are_shown_as_spaces_up_to_the_next_stop() -> None:
    assert one("\ta\tbad\n", Span("x", 1, 4, 1, 7)).splitlines()[1:] == ["   1 |     a   bad", "     |         ^^^"]


def test_wide_characters_take_two_columns_and_combining_ones_none() -> None:
    assert one("全角 bad", Span("x", 1, 4, 1, 7)).splitlines()[2] == "     |      ^^^"
    assert one("e\u0301 bad", Span("x", 1, 4, 1, 7)).splitlines()[2] == "     |   ^^^"
    assert one("全角", Span("x", 1, 1, 1, 3)).splitlines()[2] == "     | ^^^^"


def test_characters_that_steer_a_terminal_are_replaced() -> None:
    shown = one("\x1b[31m bad", Span("x", 1, 7, 1, 10), label="a\x1bb")
    assert "\x1b" not in shown
    assert shown.splitlines()[1] == "   1 | �[31m bad"


def test_a_long_line_is_cut_around_the_carets() -> None:
    text = "x" * 500 + "bad" + "y" * 500
    line, carets = one(text, Span("x", 1, 501, 1, 504)).splitlines()[1:]
    assert len(line) <= 120
    assert line[carets.index("^") : carets.rindex("^") + 1] == "bad"
    assert line.startswith("   1 | …")
    assert line.endswith("…")


def test_a_long_mark_is_cut_too() -> None:
    line, carets = one("x" * 5000, Span("x", 1, 1, 1, 5001)).splitlines()[1:]
    assert len(line) <= 120
    assert len(carets) <= 120


def test_several_lines_are_shown_by_the_first() -> None:
    assert one("f(\n  x\n)", Span("x", 1, 1, 3, 2)).splitlines()[1:] == ["   1 | f(", "     | ^^"]


def test_large_line_numbers_widen_the_margin() -> None:
    lines = one("\n" * 123455 + "bad", Span("x", 123456, 1, 123456, 4), notes=("n",)).splitlines()
    assert lines[1:] == ["123456 | bad", "       | ^^^", "       = note: n"]


def test_colours_frame_the_text_and_change_nothing_else() -> None:
    diagnostic = Diagnostic("E101", "no", Span("x", 1, 1, 1, 2), "label", ("n",), ("h",))
    import re

    plain = render([diagnostic], [Source("x", "a")])
    coloured = render([diagnostic], [Source("x", "a")], color=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_blank_line_stands_between_two() -> None:
    both = [Diagnostic("E101", "one", None), Diagnostic("E101", "two", None)]
    assert render(both, []) == "error[E101]: one\n\nerror[E101]: two"


def test_reading_order_is_by_file_then_line_and_drops_repetitions() -> None:
    sources = [Source("b", ""), Source("a", "")]
    places = [("a", 1, 1), ("b", 2, 5), ("b", 2, 1), ("b", 1, 1), ("a", 1, 1)]
    given = [Diagnostic("E101", "", Span(file, line, column, line, column)) for file, line, column in places]
    ordered = in_reading_order(given, sources)
    assert [str(each.span) for each in ordered] == ["b:1:1", "b:2:1", "b:2:5", "a:1:1"]


def test_the_error_shows_its_diagnostics() -> None:
    error = SpecError([Diagnostic("E101", "no", Span("specs/t5.attn", 9, 5, 9, 10))], [T5])
    assert str(error) == render(error.diagnostics, error.sources)
    assert isinstance(error.diagnostics, tuple)
