"""``flashgen import``: a mod of FlexAttention as the text of a spec."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import click

from flashgen.cli.console import near_matches, print_json
from flashgen.cli.options import json_option
from flashgen.language.statements import MAX_HEAD_DIM


@click.command(name="import", short_help="Print the spec that a mod of FlexAttention means.")
@click.argument("mods", metavar="MODULE:FUNCTION...", nargs=-1, required=True)
@click.option(
    "--head-dim", type=click.IntRange(1, MAX_HEAD_DIM), default=64, show_default=True, help="The head dimension."
)
@click.option("--score", "kind", flag_value="score", help="FUNCTION is a score_mod, whatever its arguments.")
@click.option("--mask", "kind", flag_value="mask", help="FUNCTION is a mask_mod, whatever its arguments.")
@click.option("--name", help="The name of the attention.  [default: that of the functions]")
@json_option
def import_(mods: tuple[str, ...], head_dim: int, kind: str | None, name: str | None, as_json: bool) -> None:
    """Print the spec that one or two mods mean: a score_mod, a mask_mod, or both.

    A function with five arguments (score, b, h, q_idx, kv_idx) is a score_mod, one with four a mask_mod. MODULE is
    looked for here and where Python finds modules. Captured numbers become params with their values as defaults.
    """
    found: dict[str, Any] = {}
    for place in mods:
        mod = _loaded(place)
        role = f"{kind or _kind(place, mod)}_mod"
        if role in found:
            raise click.UsageError(f"'{place}' is another {role}; combine mods in Python")
        found[role] = mod
    from flashgen.flex import to_spec
    from flashgen.flex.specs import check_name

    if name is not None:
        try:
            check_name(name)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    text = to_spec(**found, head_dim=head_dim, name=name)
    if as_json:
        print_json({"spec": text})
    else:
        click.echo(text, nl=False)


def _loaded(place: str) -> Any:
    module, colon, names = place.partition(":")
    if not colon or not module or not names:
        raise click.UsageError(f"'{place}' is not of the form module:function")
    file = Path(module)
    if file.suffix == ".py":
        raise click.UsageError(f"'{module}' is a file; name the module: {'.'.join(file.with_suffix('').parts)}:{names}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise click.UsageError(f"module '{module}' cannot be imported: {error}") from None
    except Exception as error:
        raise click.UsageError(f"module '{module}' fails when imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    for each in names.split("."):
        if not hasattr(found, each):
            raise click.UsageError(f"'{module}' has no '{names}'.{near_matches(each, dir(found))}")
        found = getattr(found, each)
    if not callable(found):
        raise click.UsageError(f"'{place}' is {type(found).__name__}, not a function")
    return found


def _kind(place: str, mod: Any) -> str:
    try:
        arguments = list(inspect.signature(mod).parameters.values())
    except (TypeError, ValueError):
        raise click.UsageError(f"the arguments that '{place}' takes are not known (--score, --mask)") from None
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(each.default is each.empty and each.kind in places for each in arguments)
    if count not in (4, 5):
        taken = "any number of" if any(each.kind is each.VAR_POSITIONAL for each in arguments) else count
        known = "a mask_mod takes 4, a score_mod 5 (--score, --mask)"
        raise click.UsageError(f"'{place}' takes {taken} argument{'s' * (taken != 1)}; {known}")
    return "score" if count == 5 else "mask"
