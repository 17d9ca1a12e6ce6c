"""Commands that a checkout has and a wheel has not: entry points of the group ``flashgen.tools``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

_GROUP = "flashgen.tools"


def tools() -> Iterator[tuple[str, Any]]:
    """Each command that is there, by its name."""
    for each in entry_points(group=_GROUP):
        found = _loaded(each)
        if isinstance(found, click.Command):
            yield each.name, found


def tool(name: str) -> Any:
    """What an entry point names; None for a name that no tool has. ``UsageError`` where only a checkout has it."""
    there = tuple(entry_points(group=_GROUP, name=name))
    if not there:
        return None
    found = _loaded(there[0])
    if found is None:
        raise click.UsageError(
            f"'flashgen {name}' is a tool for developers, which only a checkout of flashgen has: "
            "run 'pip install -e .' in one, and the command there"
        )
    return found


def _loaded(entry: EntryPoint) -> Any:
    """None where the tool is not installed."""
    try:
        return entry.load()
    except ImportError as error:
        if (error.name or "").split(".")[0] != "tools":
            raise
        return None
