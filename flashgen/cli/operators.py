"""The operators of a spec file, loaded one by one for the commands that run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import near_matches
from flashgen.cli.options import Constant
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType

if TYPE_CHECKING:
    from flashgen.op.op import AttentionOp


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
