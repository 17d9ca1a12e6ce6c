"""Stage 1a, parse: one source text in, its syntax tree and every syntax error out.

Tokens are fed to lark's LALR automaton one by one. At each border between statements the automaton's stack is
remembered; after an error it is put back, a BROKEN token takes the place of the statement, and parsing goes on at
the next statement word. The stack is explicit and bounded, so no nesting in the text can exhaust Python's.

What this stage does not do: look at what names mean, or at numbers beyond their form.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lark
from lark import Lark, UnexpectedCharacters, UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from flashgen.diagnostics import Diagnostic, Source, Span
from flashgen.language import syntax, words
from flashgen.language.complaints import (
    complain_about_character,
    complain_about_token,
    meant_statements,
    not_closed,
    statement_ended,
    unknown_statement,
)
from flashgen.language.report import GiveUpError, Report
from flashgen.language.tree import TooDeepError, TreeBuilder, Word
from flashgen.store.cache import Cache, key_of

MAX_TOKENS = 20_000
_MAX_STACK = 1_000

# What recovery looks for: inside a block any statement or brace, outside a top-level word; not in comments.
_IGNORED = r"#[^\n]*|\"[^\"\n]*\"|(?<![\w.])(?P<word>"
_BORDER_IN_BLOCK = re.compile(_IGNORED + "|".join((*words.STATEMENTS, *words.TOP_LEVEL)) + r")(?!\w)|[{}]")
_BORDER_OUTSIDE = re.compile(_IGNORED + "|".join(words.TOP_LEVEL) + r")(?!\w)")
_LONGEST_NAME = 200
# A line that starts like a statement: a word, and then what could be its operand.
_LIKE_STATEMENT = re.compile(r"[ \t]*([A-Za-z_]\w*)[ \t]+[\w{]")
_LIKE_DECLARATION = re.compile(r"\s*[A-Za-z_]\w*[ \t]+([A-Za-z_]\w*)[ \t]*[=:]")
_MOST_LINES_SEARCHED = 200
_LEADING_ZERO = re.compile(r"0[0_]*[1-9][0-9_]*$")
_OPENING = frozenset({"LPAR", "LSQB", "LBRACE"})
_CLOSING = frozenset({"RPAR", "RSQB"})


_OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "lexer": "basic",
    "keep_all_tokens": True,
    "maybe_placeholders": False,
}
_TABLES = "grammar.tables"


@cache
def grammar() -> Lark:
    """The automaton of ``attn.lark``; its tables are built once and kept in the cache."""
    text = Path(__file__).with_name("attn.lark").read_text(encoding="utf-8")
    key = key_of("grammar", text, repr(_OPTIONS), lark.__version__, str(sys.implementation.cache_tag))
    stored = Cache.of_compiler().read(key, _TABLES)
    if stored is not None:
        tables = pickle.loads(stored)  # noqa: S301 - from the folder that libraries are loaded from
        loaded: Lark = Lark._load_from_dict(**tables, transformer=TreeBuilder())  # type: ignore[no-untyped-call]
        return loaded
    built = Lark(text, transformer=TreeBuilder(), **_OPTIONS)
    saved = io.BytesIO()
    built.save(saved, exclude_options={"transformer"})
    Cache.of_compiler().write(key, _TABLES, saved.getvalue())
    return built


@dataclass(frozen=True)
class Parsed:
    """The tree, empty where the text was given up, and the errors."""

    file: syntax.File
    diagnostics: tuple[Diagnostic, ...]
    lost: frozenset[str] = frozenset()  # names that misspelt statements would have declared


def parse(source: Source) -> Parsed:
    """Read one source text."""
    return _Parser(source).run()


@dataclass
class _Parser:
    """The automaton over one text, with the memory that recovery needs."""

    source: Source
    report: Report = field(default_factory=Report)
    last: Word | None = None  # the last token that was accepted
    statement: list[Word] = field(default_factory=list)  # the first tokens of the statement being read
    open: list[Word] = field(default_factory=list)  # brackets not yet closed, the block's own brace first
    block: Word | None = None  # the name of the attention block being read
    misused: set[str] = field(default_factory=set)  # reserved words that were declared as names, and reported
    lost: set[str] = field(default_factory=set)  # names that unreadable statements would have declared
    queue: list[Word] = field(default_factory=list)  # tokens to read before the text goes on
    file: syntax.File | None = None  # the result, once the end is reached

    def __post_init__(self) -> None:
        self.automaton: InteractiveParser = grammar().parse_interactive(self.source.text)
        self.state = self.automaton.parser_state
        lexer = self.automaton.lexer_thread.state
        assert lexer is not None
        self.lexer = lexer
        self.border = (list(self.state.state_stack), list(self.state.value_stack))

    def run(self) -> Parsed:
        """Feed everything, recovering after each error."""
        try:
            for _ in range(MAX_TOKENS):
                token = self.queue.pop(0) if self.queue else self._next()
                if token is not None:
                    self._feed(token)
                if self.file is not None:
                    return Parsed(self.file, tuple(self.report.diagnostics), frozenset(self.lost))
            self.report.add("E002", f"the text has more than {MAX_TOKENS:,} words and signs", self._here())
        except GiveUpError:
            pass
        return Parsed(syntax.File(()), tuple(self.report.diagnostics))

    # --- tokens

    def _next(self) -> Word | None:
        """The next token; None where a character has been reported and passed over."""
        try:
            token = self.automaton.lexer_thread.lexer.next_token(self.lexer, self.state)  # type: ignore[attr-defined]
        except EOFError:
            return Word.make("$END", "", self._here())
        except UnexpectedCharacters:
            self._unreadable(self.lexer.line_ctr.char_pos)
            return None
        span = Span(self.source.name, token.line, token.column, token.end_line, token.end_column)
        if token.type == "NUMBER" and _LEADING_ZERO.match(token):
            hints = ("drop the zeros, or write 0o for octal",)
            self.report.add("E005", f"the number '{token}' starts with a zero", span, hints=hints)
        text = str(token)
        if token.type == "NAME" and len(text) > _LONGEST_NAME:
            self.report.add("E004", f"a name has more than {_LONGEST_NAME} characters", span)
            text = text[:_LONGEST_NAME]
        return Word.make(token.type, text, span)

    def _here(self) -> Span:
        """The place that the lexer has reached."""
        counter = self.lexer.line_ctr
        return Span(self.source.name, counter.line, counter.column, counter.line, counter.column)

    def _unreadable(self, position: int) -> None:
        """Report characters that form no token, pass over them and, where needed, over the rest of the statement."""
        complaint = complain_about_character(self.source.text, position, self._here())
        self.report.put(complaint.diagnostic)
        self._move(position + complaint.length)
        if not complaint.harmless:
            self._recover(None, finished=False)

    def _move(self, position: int) -> None:
        counter = self.lexer.line_ctr
        counter.feed(self.source.text[counter.char_pos : position])

    # --- feeding

    def _feed(self, token: Word) -> None:
        """Offer a token to the automaton."""
        before = (list(self.state.state_stack), list(self.state.value_stack))
        try:
            result = self.state.feed_token(token, is_end=token.type == "$END")
        except UnexpectedToken:
            self._restore(before)  # the automaton may have reduced before it refused
            self._unexpected(token)
        except TooDeepError as error:
            self._too_deep(error.span)
        else:
            if token.type == "$END":
                self.file = result
                return
            self._accepted(token)
            if len(self.state.state_stack) > _MAX_STACK:
                self._too_deep(token.span)

    def _accepted(self, token: Word) -> None:
        if token.type in words.STATEMENT_TERMINALS or token.type in words.TOP_LEVEL_TERMINALS:
            self._remember_border(1)
            self.statement = [token]
            del self.open[1 if self.block is not None else 0 :]
        elif len(self.statement) < 2:
            self.statement.append(token)
        if token.type in _OPENING:
            self.open.append(token)
            if token.type == "LBRACE" and self.statement and self.statement[0].type == "ATTENTION":
                self.block = self.statement[1]
                self._remember_border(0)
                self.statement = []
        elif token.type == "RBRACE":
            self._close_brace()
            if not self.open:
                self.block = None
                self._finish_statement()
        elif token.type in _CLOSING:
            self.open.pop()
        self.last = token

    def _remember_border(self, pending: int) -> None:
        """The stacks as they are without the last ``pending`` tokens."""
        states, values = self.state.state_stack, self.state.value_stack
        self.border = (states[: len(states) - pending], values[: len(values) - pending])

    # --- errors

    def _too_deep(self, span: Span) -> None:
        message = "the expression is nested too deeply or is too long"
        self.report.add("E008", message, span, hints=("give parts of it names with 'let'",))
        self._recover(None, finished=False)

    def _unexpected(self, token: Word) -> None:
        """Report a token that the grammar does not admit here, and decide what to read next."""
        accepted = frozenset(self.automaton.accepts())  # type: ignore[no-untyped-call]
        if "NAME" in accepted and str(token) in self.misused:
            self.queue.append(Word.make("NAME", str(token), token.span))
            return
        if self._only_brace_missing(token, accepted):
            self._close_block(token)
            return
        complaint = complain_about_token(token, accepted, self.last, self.statement, self.open, self.block)
        self.report.put(complaint.diagnostic)
        if complaint.new_statement:
            self._lose(self.source.text[self.lexer.line_ctr.char_pos - len(token) :])
        if complaint.read_as:
            if complaint.read_as == str(token):
                self.misused.add(str(token))
            self.queue.append(Word.make("NAME", complaint.read_as, token.span))
            return
        new_line = self.last is None or self.last.span.end_line < token.span.line
        self._recover(token, finished=statement_ended(accepted) and (new_line or complaint.new_statement))

    def _only_brace_missing(self, token: Word, accepted: frozenset[str]) -> bool:
        if self.block is None or "RBRACE" not in accepted or len(self.open) != 1:
            return False
        return token.type == "$END" or token.type in words.TOP_LEVEL_TERMINALS

    def _close_block(self, token: Word) -> None:
        """Report the missing brace, and read on as if it stood before the token."""
        assert self.block is not None
        self.report.put(not_closed(self.block, token))
        self.queue += [Word.make("RBRACE", "}", token.span), token]

    def _recover(self, token: Word | None, *, finished: bool) -> None:
        """Go back to the last border and on to the next statement."""
        if not (finished and self._finish_statement()):
            self._replace_statement()
        if token is None or not self._is_border(token):
            position = self.lexer.line_ctr.char_pos
            if token is not None and token.type == "RBRACE":
                self._close_brace()
            token = self._skip()
            self._report_misspelt(position, token)
        del self.open[1 if self.block is not None else 0 :]
        if self.block is not None and (token.type == "$END" or token.type in words.TOP_LEVEL_TERMINALS):
            self._close_block(token)
        else:
            self.queue.append(token)

    def _is_border(self, token: Word) -> bool:
        if token.type in words.TOP_LEVEL_TERMINALS or token.type == "$END":
            return True
        return self.block is not None and (
            token.type in words.STATEMENT_TERMINALS or (token.type == "RBRACE" and self._inner_braces() == 0)
        )

    def _inner_braces(self) -> int:
        """How many braces are open inside the block."""
        return sum(bracket.type == "LBRACE" for bracket in self.open[1:])

    def _close_brace(self) -> None:
        """Forget what was opened since the innermost brace, and that brace."""
        while self.open and self.open.pop().type != "LBRACE":
            pass

    def _finish_statement(self) -> bool:
        """Reduce what has been read to a whole statement, by offering the word of a next one and taking it back."""
        word = "LET" if self.block is not None else "DEF"
        try:
            self.state.feed_token(Word.make(word, word.lower(), self._here()))
        except (UnexpectedToken, TooDeepError):
            return False
        self._remember_border(1)
        self._restore(self.border)
        self.statement = []
        return True

    def _replace_statement(self) -> None:
        """Put a BROKEN in place of what was being read; it remembers the name that would have been declared."""
        self._restore(self.border)
        if not self.statement:
            return
        word, *rest = self.statement
        if word.type == "ATTENTION":
            self.open.clear()
        declared = word.type in words.DECLARING_TERMINALS and bool(rest) and rest[0].type in ("NAME", "GRAD", "BLOCK")
        name = syntax.Name(str(rest[0]), rest[0].span) if declared else None
        broken = syntax.Broken(word.span, str(word), name)
        self.state.feed_token(Word.make("BROKEN", "", word.span, broken))
        self.statement = []

    def _restore(self, stacks: tuple[list[Any], list[Any]]) -> None:
        states, values = stacks
        self.state.state_stack[:] = states
        self.state.value_stack[:] = values

    def _skip(self) -> Word:
        """Pass over text up to the next place where parsing can go on."""
        text = self.source.text
        depth = self._inner_braces()
        border = _BORDER_IN_BLOCK if self.block is not None else _BORDER_OUTSIDE
        for match in border.finditer(text, self.lexer.line_ctr.char_pos):
            sign = match.group()
            if match["word"]:
                return self._jump(match.start(), sign, sign.upper())
            if sign == "{":
                depth += 1
            elif sign == "}":
                if depth == 0:
                    return self._jump(match.start(), sign, "RBRACE")
                depth = max(0, depth - 1)
        self._move(len(text))
        return Word.make("$END", "", self._here())

    def _report_misspelt(self, start: int, border: Word) -> None:
        """Report the misspelt statements among the lines that were passed over."""
        if self.block is None:
            return
        end = self.lexer.line_ctr.char_pos
        skipped = self.source.text[start:end].split("\n")
        line = border.span.line - len(skipped) + 1
        for offset, text in enumerate(skipped[1:_MOST_LINES_SEARCHED], 1):
            word = _LIKE_STATEMENT.match(text)
            close = meant_statements(word[1]) if word and word[1] not in words.RESERVED else ()
            if word and close:
                span = Span(self.source.name, line + offset, word.start(1) + 1, line + offset, word.end(1) + 1)
                self.report.put(unknown_statement(word[1], span, close))
                self._lose(text)

    def _lose(self, text: str) -> None:
        """Remember the name that a misspelt statement would have declared."""
        declared = _LIKE_DECLARATION.match(text)
        if declared:
            self.lost.add(declared[1])

    def _jump(self, position: int, text: str, kind: str) -> Word:
        self._move(position)
        start = self._here()
        self._move(position + len(text))
        return Word.make(kind, text, start.to(self._here()))
