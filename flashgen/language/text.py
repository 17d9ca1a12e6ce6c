"""Stage 0, text: bytes from the disk to a ``Source``, and stretches of it back to one line.

In: a path or bytes. Out: text with plain newlines and no byte order mark, or the diagnostic that says why not.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from flashgen.diagnostics import Diagnostic, Source, Span, SpecError
from flashgen.language import words
from flashgen.store import gallery

MAX_BYTES = 1 << 20

_GIVEN = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")
_PIPE_HINT = "to read a pipe, name /dev/stdin: flashgen check /dev/stdin < PIPE"
_ONLY_FILES = "imports are of files"
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
_TEXT_HINT = "a text holds 'attention NAME { … }'"
_LONGEST_FILE_NAME = 255
_FILE_NAME = re.compile(r"[\w.~/\\:-]*[A-Za-z][\w.~/\\:-]*|[^{}\"#\n]*\.attn", re.ASCII)
_COMMENT = re.compile(r"#[^\n]*")


def read_source(name: str, *, imported: bool = False) -> Source:
    """The text of the file of that name; raises ``SpecError``. What is ``imported`` is nothing but a file."""
    path = Path(name)
    if "{" in name and "}" in name and not os.path.lexists(path):
        raise _refused("E001", "<text>", "this is the text of a spec, no file's name", "flashgen.loads takes it")
    try:
        if not _is_file(path) and (imported or not _is_given(path)):
            hint = _ONLY_FILES if imported else _PIPE_HINT
            raise _refused("E001", name, "this is a pipe or a device, not a file", hint)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _refused("E001", name, "the file does not exist", gallery.hint(path)) from None
    except IsADirectoryError:
        raise _refused("E001", name, "this is a directory, not a file", f"name a file: {name}/….attn") from None
    except PermissionError:
        raise _refused("E001", name, "the file may not be read") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _refused("E001", name, f"the file cannot be read: {reason.lower()}") from None
    return decoded(data, name)


def _is_file(path: Path) -> bool:
    """Whether a path is read to an end: a named pipe that nobody writes to, and most devices, are waited for."""
    mode = path.stat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _is_given(path: Path) -> bool:
    """Whether a path is something that this process was started with, such as ``/dev/stdin``."""
    return _GIVEN.fullmatch(os.path.normpath(path.absolute())) is not None


def given_text(text: str, name: str) -> Source:
    """What a caller passes as the text of a spec; raises ``SpecError``, also where it is a file's name."""
    word = text.strip()
    if len(word) <= _LONGEST_FILE_NAME and word not in words.RESERVED and _FILE_NAME.fullmatch(word):
        message = f"'{word}' is the name of a file or of a spec of the gallery, not the text of a spec"
        raise _refused("E009", name, message, f'write flashgen.load("{word}"); {_TEXT_HINT}')
    return accepted(text, name)


def decoded(data: bytes, name: str) -> Source:
    """Bytes as a source text; raises ``SpecError``."""
    if len(data) > MAX_BYTES:
        raise _too_large(name)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused("E003", name, "the file is UTF-16, not UTF-8", "save it as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8"
        raise _refused("E003", name, message, "save the file as UTF-8", before) from None
    return accepted(text, name)


def accepted(text: str, name: str) -> Source:
    """A text as a source, newlines made plain; raises ``SpecError``."""
    if len(text) > MAX_BYTES:
        raise _too_large(name)
    plain = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    zero = plain.find("\0")
    if zero >= 0:
        raise _refused("E003", name, "the text holds a zero byte, so it is no spec", "", plain[:zero])
    half = _HALF_CHARACTER.search(plain)
    if half is not None:
        message = f"the text holds U+{ord(half[0]):04X}, half of a character, which no file can hold"
        raise _refused("E003", name, message, "", plain[: half.start()])
    return Source(name, plain)


def _too_large(name: str) -> SpecError:
    return _refused("E002", name, f"the text is larger than {MAX_BYTES // 1024} KiB", "a spec is a page long")


def _refused(code: str, name: str, message: str, hint: str = "", before: str = "") -> SpecError:
    """The error at the place that ``before`` leads up to."""
    line = before.count("\n") + 1
    column = len(before) - (before.rfind("\n") + 1) + 1
    span = Span(name, line, column, line, column + 1)
    return SpecError((Diagnostic(code, message, span, hints=(hint,) if hint else ()),))


def excerpt(all_lines: Sequence[str], span: Span) -> str:
    """What stands at a span, without comments and on one line."""
    lines = list(all_lines[span.line - 1 : span.end_line])
    if not lines:
        return ""
    lines[-1] = lines[-1][: span.end_column - 1]
    lines[0] = lines[0][span.column - 1 :]
    return " ".join(_COMMENT.sub("", "\n".join(lines)).split())
