"""The operators of a spec file, loaded one by one for the commands that run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import near_matches
from flashgen.cli.options import Constant
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    from flashgen.runtime.op import AttentionOp


def loaded_operators(
    file: Path,
    name: str | None,
    backend: str | None,
    shape: Shape | None,
    constants: tuple[tuple[str, Constant], ...],
) -> Iterator[AttentionOp]:
    """Every attention of the file, or the one of this name, built and imported, if it can be called at this shape."""
    from flashgen.pipeline import check_file, load
    from flashgen.verification import refusal

    specs = {spec.name: spec for spec in check_file(file, dict(constants)).specs}
    names = list(specs)
    if name is not None and name not in names:
        raise click.BadParameter(
            f"'{file}' holds no attention '{name}'.{near_matches(name, names)}", param_hint="'--name'"
        )
    for chosen in names if name is None else [name]:
        reason = refusal(specs[chosen], shape) if shape else None
        if reason:
            raise click.BadParameter(f"'{chosen}' cannot be called so: {reason}", param_hint="'--shape'")
        try:
            op = load(file, name=chosen, const=dict(constants), backend=backend)
        except ValueError as error:  # a backend that this machine lacks
            raise click.UsageError(str(error)) from error
        yield op
