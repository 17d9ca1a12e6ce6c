"""Options that several commands share, with the types that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import click

from flashgen.cli.console import near_matches
from flashgen.ir.shape import Shape

Command = TypeVar("Command", bound=Callable[..., object])

Constant = bool | int | float


def read_constant(text: str) -> tuple[str, Constant]:
    """``NAME=VALUE`` with a value of the language: ``true``, ``12``, ``0x1f``, ``1_000``, ``-1.5e-3``."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"'{text}' is not NAME=VALUE, for example window=1024")
    if value in ("true", "false"):
        return name, value == "true"
    for read in (_read_int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    raise click.BadParameter(f"the value of '{name}' is '{value}', which is not a number, true or false")


def _read_int(digits: str) -> int:
    return int(digits, 0)


def read_shape(text: str | Shape) -> Shape:
    """``B,H,Hkv,Nq,Nk``."""
    try:
        return text if isinstance(text, Shape) else Shape.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def read_name(what: str, known: Callable[[], Iterable[str]]) -> Callable[[str], str]:
    """One name out of a list that is looked up when it is needed; a wrong one is answered with the nearest."""

    def read(text: str) -> str:
        names = tuple(known())
        if text not in names:
            raise click.BadParameter(f"unknown {what} '{text}'.{near_matches(text, names)} Known: {', '.join(names)}.")
        return text

    return read


def read_names(what: str, known: Callable[[], Iterable[str]]) -> Callable[[str | tuple[str, ...]], tuple[str, ...]]:
    """Several such names, with commas between them."""
    read = read_name(what, known)

    def read_all(text: str | tuple[str, ...]) -> tuple[str, ...]:
        parts = text.split(",") if isinstance(text, str) else text
        return tuple(dict.fromkeys(read(part.strip()) for part in parts))

    return read_all


def read_numbers(what: str) -> Callable[[str | tuple[int, ...]], tuple[int, ...]]:
    """Positive integers with commas between them."""

    def read(text: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(text, tuple):
            return text
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"'{text}' is no list of {what}s such as 128,256,512") from None
        if min(numbers) < 1:
            raise click.BadParameter(f"a {what} is at least 1, and '{text}' holds {min(numbers)}")
        return tuple(sorted(set(numbers)))

    return read


def picture_path(text: str | Path) -> Path:
    """A file whose suffix names a format of pictures."""
    from flashgen.picture.plotting import SUFFIXES

    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"'{path}' is no picture: its name has to end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise click.BadParameter(f"'{path}' is a folder")
    return path


SPEC_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


def _backends() -> tuple[str, ...]:
    from flashgen.runtime.op import BACKENDS

    return BACKENDS


def _devices() -> tuple[str, ...]:
    from flashgen.pipeline import device_names

    return device_names()


def spec_argument(command: Command) -> Command:
    """The one spec file of a command."""
    return click.argument("file", type=SPEC_FILE)(command)


def spec_arguments(command: Command) -> Command:
    """The spec files of a command, at least one."""
    return click.argument("files", metavar="FILE...", type=SPEC_FILE, nargs=-1, required=True)(command)


def set_option(command: Command) -> Command:
    """``--set NAME=VALUE``, repeatable."""
    return click.option(
        "--set",
        "constants",
        type=read_constant,
        metavar="NAME=VALUE",
        multiple=True,
        help="Override a constant of the spec; repeatable.",
    )(command)


def name_option(command: Command) -> Command:
    """``--name NAME``: one attention of a file that holds several."""
    return click.option("--name", default=None, metavar="NAME", help="Only this attention of the file.")(command)


def shape_option(command: Command) -> Command:
    """``--shape B,H,Hkv,Nq,Nk``."""
    return click.option(
        "--shape",
        type=read_shape,
        metavar="B,H,Hkv,Nq,Nk",
        default=None,
        help="Batch, query heads, key/value heads, query and key length.",
    )(command)


def backend_option(command: Command) -> Command:
    """``--backend NAME``."""
    kind = read_name("backend", _backends)
    return click.option("--backend", type=kind, metavar="NAME", help="Run on this one; default: the CPU's.")(command)


def planned_device_option(command: Command) -> Command:
    """``--device NAME``: a device that plans can be made for."""
    kind = read_name("device", _devices)
    return click.option(
        "--device", type=kind, metavar="NAME", default=None, help="Plan for this device; default: this CPU."
    )(command)


def json_option(command: Command) -> Command:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(command)
