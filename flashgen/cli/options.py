"""Options that several commands share, with the types that read them, and the operators of the file that they name."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from flashgen.cli.console import near_matches
from flashgen.diagnostics import nearest, quoted_list
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.store import gallery

if TYPE_CHECKING:
    from flashgen.op.op import AttentionOp

VARIABLE = "_FLASHGEN_COMPLETE"  # by which a shell asks what completes a word
_LONGEST_COUNTED = 2**26
Constant = bool | int | float


def read_constant(text: str) -> tuple[str, Constant]:
    """``NAME=VALUE`` with a value of the language: ``true``, ``12``, ``0x1f``, ``1_000``, ``-1.5e-3``."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier() or not text.isascii():
        raise click.BadParameter(f"'{text}' is not NAME=VALUE, for example window=1024")
    if value in ("true", "false"):
        return name, value == "true"
    for read in (functools.partial(int, base=0), _read_float):
        try:
            return name, read(value)
        except ValueError:
            continue
    raise click.BadParameter(f"the value of '{name}' is '{value}', which is not a number, true or false")


def _read_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value) and "inf" not in digits.lower():
        raise click.BadParameter(f"{digits} does not fit in a 32-bit float; write inf for infinity")
    return value


def read_shape(text: str) -> Shape:
    """``B,H,Hkv,Nq,Nk``."""
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def named(known: Iterable[str], incomplete: str, help_text: str | None = None) -> list[CompletionItem]:
    """Those that begin like this. Who does not know completes nothing: nothing may be raised or said on the way."""
    return [CompletionItem(name, help=help_text) for name in known if name.startswith(incomplete)]


def spec_files(incomplete: str) -> list[CompletionItem]:
    """Specs of the gallery by name, and files."""
    files = CompletionItem(incomplete, type="file")
    plain = named(gallery.names(), incomplete, "a spec that comes with flashgen")
    if not plain:
        return [files]
    if not os.environ.get(VARIABLE, "").startswith("bash"):
        return [*plain, files]
    return plain + named(_here(), incomplete)  # bash forgets names where it is told to look for files


def _here() -> list[str]:
    found = sorted(each for each in Path().iterdir() if not each.name.startswith("."))
    return [f"{each}/" if each.is_dir() else str(each) for each in found if each.is_dir() or each.suffix == ".attn"]


class OneOf(click.ParamType):  # type: ignore[type-arg]  # in newer versions of click alone
    """One name out of a list that is looked up when it is needed; a wrong one is answered with the nearest."""

    name = "name"

    def __init__(self, what: str, known: Callable[[], Iterable[str]]) -> None:
        self._what, self._known = what, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        known = tuple(self._known())
        if value not in known:
            near = near_matches(value, known)
            self.fail(f"unknown {self._what} '{value}'.{near} Known: {', '.join(known)}.", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        return named(self._known(), incomplete)


class SomeOf(OneOf):
    """Several such names, with commas between them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(dict.fromkeys(super(SomeOf, self).convert(part.strip(), param, ctx) for part in parts))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """What came before, and a name that is not there yet."""
        before, comma, last = incomplete.rpartition(",")
        left = [name for name in self._known() if name not in before.split(",")]
        return [CompletionItem(before + comma + each.value) for each in named(left, last)]


def read_numbers(what: str) -> Callable[[str], tuple[int, ...]]:
    """Positive integers with commas between them."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"'{text}' is no list of {what}s such as 128,256,512") from None
        if min(numbers) < 1:
            raise click.BadParameter(f"a {what} is at least 1, and '{text}' holds {min(numbers)}")
        if max(numbers) >= 2**31:
            raise click.BadParameter(f"'{text}' holds a {what} that is too large: positions are 32-bit integers")
        return tuple(sorted(set(numbers)))

    return read


def read_seconds(text: str | float) -> float:
    """A time that a measurement may take."""
    try:
        seconds = float(text)
    except ValueError:
        raise click.BadParameter(f"'{text}' is no number of seconds") from None
    if not seconds > 0:  # nor no number
        raise click.BadParameter(f"{seconds} is not in the range x>0.")
    if math.isinf(seconds):
        raise click.BadParameter(f"{seconds} is no time that ends")
    return seconds


def read_rate(text: str | float) -> float:
    """Bytes a second."""
    try:
        rate = float(text)
    except ValueError:
        raise click.BadParameter(f"'{text}' is no number of bytes a second such as 450e9") from None
    if not 0 < rate < float("inf"):
        raise click.BadParameter(f"{rate:g} bytes a second are not in the range x>0")
    return rate


def read_tensor(text: str) -> tuple[str, Path]:
    """A captured tensor and the file that holds it."""
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise click.BadParameter(f"'{text}' is no NAME=FILE such as doc=documents.npy")
    return name, Path(path)


def check_countable(shape: Shape) -> None:
    """Refuse lengths at which the model would count tiles for minutes."""
    if max(shape.q_len, shape.kv_len) > _LONGEST_COUNTED:
        raise click.BadParameter(
            f"tiles are counted up to {_LONGEST_COUNTED} positions, and {shape} has more", param_hint="'--shape'"
        )


def picture_path(text: str | Path) -> Path:
    """A file whose suffix names a format of pictures."""
    from flashgen.picture.plotting import SUFFIXES

    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"'{path}' is no picture: its name has to end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise click.BadParameter(f"'{path}' is a folder")
    return path


class SpecFileType(click.Path):
    """A file that is there; of one that is not, the nearest names beside it are told."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, readable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a bare name that is no file is the gallery's."""
        try:
            return super().convert(gallery.spec_file(value), param, ctx)
        except click.BadParameter as error:
            hint = gallery.hint(value)
            close = near_files(Path(value)) or (f" D{hint[1:]}" if hint else "")
            raise click.BadParameter(error.message + close, ctx, param) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        return spec_files(incomplete)


def near_files(path: Path) -> str:
    """`` Did you mean 'causal.attn'?`` for a file that is not there, or nothing."""
    try:
        stems = [] if path.exists() else [each.stem for each in path.parent.glob("*.attn") if each.is_file()]
    except (OSError, ValueError):
        stems = []
    close = [f"{stem}.attn" for stem in nearest(path.stem, stems, limit=3)]
    return f" Did you mean {quoted_list(close)}?" if close else ""


SPEC_FILE = SpecFileType()


def _known(module: str, name: str) -> Callable[[], Iterable[str]]:
    """The names that a module knows, or that a function of it gives; it is imported when they are asked for."""

    def names() -> Iterable[str]:
        found: Any = getattr(importlib.import_module(module), name)
        return found() if callable(found) else found  # type: ignore[no-any-return]

    return names


spec_argument = click.argument("file", type=SPEC_FILE)
spec_arguments = click.argument("files", metavar="FILE...", type=SPEC_FILE, nargs=-1, required=True)
# They need not be there: what is wrong with a file is the result.
checked_arguments = click.argument(
    "files",
    metavar="FILE...",
    type=click.Path(path_type=Path),
    nargs=-1,
    required=True,
    shell_complete=lambda _ctx, _param, incomplete: spec_files(incomplete),
)
set_option = click.option(
    "--set",
    "constants",
    type=read_constant,
    metavar="NAME=VALUE",
    multiple=True,
    help="Override a constant of the spec; repeatable.",
)
name_option = click.option("--name", metavar="NAME", help="Only this attention of the file.")
shape_option = click.option(
    "--shape",
    type=read_shape,
    metavar="B,H,Hkv,Nq,Nk",
    help="Batch, query heads, key/value heads, query and key length.",
)
backend_option = click.option(
    "--backend",
    type=OneOf("backend", _known("flashgen.op.op", "BACKENDS")),
    metavar="NAME",
    help="Run on this one; default: the CPU's.",
)
emulated_target_option = click.option(
    "--target",
    type=OneOf("target", _known("flashgen.targets.registry", "GPUS")),
    metavar="NAME",
    help="With --backend emulator: its kernels (sm_80).",
)
planned_device_option = click.option(
    "--device",
    type=OneOf("device", _known("flashgen.compiler.pipeline", "device_names")),
    metavar="NAME",
    help="Plan for this device; default: this CPU.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
TARGETS = SomeOf("target", _known("flashgen.compiler.pipeline", "target_names"))


def chosen_specs(
    file: Path, name: str | None, shape: Shape | None, constants: tuple[tuple[str, Constant], ...]
) -> tuple[AttentionSpec, ...]:
    """Every attention of the file, or the one of this name, if it can be called at this shape."""
    from flashgen.compiler.pipeline import check_file
    from flashgen.verification import refusal

    specs = {spec.name: spec for spec in check_file(file, dict(constants)).specs}
    names = list(specs)
    if name is not None and name not in names:
        raise click.BadParameter(
            f"'{file}' holds no attention '{name}'.{near_matches(name, names)}", param_hint="'--name'"
        )
    chosen = tuple(specs.values()) if name is None else (specs[name],)
    for spec in chosen:
        reason = refusal(spec, shape) if shape else None
        if reason:
            raise click.BadParameter(f"'{spec.name}' cannot be called so: {reason}", param_hint="'--shape'")
    return chosen


def element_of(spec: AttentionSpec, dtype: str | None) -> ElementType | None:
    """The type that is asked for. Raises where the spec is not built for it."""
    if dtype is None:
        return None
    built = [str(each) for each in spec.dtypes or ()]
    if built and dtype not in built:
        raise click.BadParameter(f"'{spec.name}' is built for {', '.join(built)}, not {dtype}", param_hint="'--dtype'")
    return ElementType(dtype)


def loaded_operators(
    file: Path,
    name: str | None,
    backend: str | None,
    shape: Shape | None,
    constants: tuple[tuple[str, Constant], ...],
    target: str | None = None,
) -> Iterator[AttentionOp]:
    """Every attention of the file, or the one of this name, built and imported, if it can be called at this shape."""
    from flashgen.op.loading import load

    for spec in chosen_specs(file, name, shape, constants):
        try:
            op = load(file, name=spec.name, const=dict(constants), backend=backend, target=target)
        except ValueError as error:  # a backend that this machine lacks, or one that takes no target
            raise click.UsageError(str(error)) from error
        yield op
