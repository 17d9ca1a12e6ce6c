"""``flashgen show``: the mask and its tile classes as a picture, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json
from flashgen.cli.options import (
    Constant,
    chosen_specs,
    json_option,
    name_option,
    picture_path,
    planned_device_option,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style

    from flashgen.ir.spec import AttentionSpec
    from flashgen.picture.mask import MaskPicture

_WIDEST = 96  # columns of a terminal
_MOST_NUMBERED = 16  # tiles a side


@click.command(short_help="Draw the mask and its tile classes.")
@spec_argument
@click.option(
    "-o",
    "output",
    type=picture_path,
    metavar="FILE",
    help="Write a picture (.png, .svg or .pdf) and draw nothing here.",
)
@click.option("--batch", type=click.IntRange(min=0), default=0, show_default=True, help="The batch entry to draw.")
@click.option("--head", type=click.IntRange(min=0), default=0, show_default=True, help="The query head to draw.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of captured tensors, which are drawn at random.",
)
@name_option
@planned_device_option
@shape_option
@set_option
@json_option
def show(
    file: Path,
    output: Path | None,
    batch: int,
    head: int,
    seed: int,
    name: str | None,
    device: str | None,
    shape: Shape | None,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Draw which tiles of a mask are FULL, PARTIAL and EMPTY, in the order in which they are visited.

    Tiles are those of the forward pass on this machine, or on --device. Time follows the picture, not the number of
    pairs: a million tokens take as long as a thousand.
    """
    from flashgen.compiler.pipeline import plan_file
    from flashgen.picture.mask import mask_picture

    specs = chosen_specs(file, name, shape, constants)
    if output is not None and len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise click.UsageError(f"'{file}' holds several attentions ({names}); choose one by --name for '-o'")
    shapes = [_shape_of(spec, shape, batch, head) for spec in specs]
    plans = {plan.spec_name: plan for plan in reversed(plan_file(file, device=device, constants=dict(constants)))}
    pictures = []
    for spec, chosen in zip(specs, shapes, strict=True):
        plan = plans[spec.name]  # of the first head dimension
        tile = plan.of_element(plan.elements_apart[0])["forward"]
        of = (spec, spec.head_dims[0], chosen, tile.Br, tile.Bc)
        pictures.append(mask_picture(*of, batch=batch, head=head, seed=seed))
    if output is not None:
        from flashgen.picture.paint import save_figure

        save_figure(pictures[0], output)
        note(f"wrote {output}")
    if as_json:
        print_json({picture.spec_name: _as_dict(picture) for picture in pictures})
    elif output is None:
        for picture in pictures:
            _print(picture)


def _shape_of(spec: AttentionSpec, shape: Shape | None, batch: int, head: int) -> Shape:
    """The one to draw a spec at."""
    from flashgen.picture.mask import check_drawable, usual_shape

    chosen = shape or usual_shape(spec)
    if 0 in (chosen.batch, chosen.q_len, chosen.kv_len):
        raise click.BadParameter(f"at {chosen} there is no pair to draw", param_hint="'--shape'")
    for option, number, count in (("--batch", batch, chosen.batch), ("--head", head, chosen.heads)):
        if number >= count:
            raise click.BadParameter(f"at this shape they are numbered 0 to {count - 1}", param_hint=f"'{option}'")
    try:
        check_drawable(spec, chosen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--shape'") from None
    return chosen


def _as_dict(picture: MaskPicture) -> dict[str, object]:
    shape = picture.shape
    return {
        "shape": [shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len],
        "batch": picture.batch,
        "head": picture.head,
        "Br": picture.Br,
        "Bc": picture.Bc,
        "grouped": list(picture.grouped),
        "tiles": dict(picture.counts),
        "visited_share": picture.visited_share,
        "kept_share": picture.kept_share,
        "kept_share_is_exact": picture.exact,
        "drawn_at_random": list(picture.drawn),
        "seed": picture.seed,
        "classes": picture.classes.tolist(),
    }


# -- in a terminal -----------------------------------------------------------------------------------------------------


def _print(picture: MaskPicture) -> None:
    from rich.console import Console

    from flashgen.picture.mask import caption
    from flashgen.picture.paint import letters

    console = Console(highlight=False, soft_wrap=True)
    if max(picture.classes.shape) <= _MOST_NUMBERED:
        _print_numbered(console, picture)
    elif console.color_system is None:
        for line in letters(picture, _WIDEST):
            click.echo(line)
    else:
        _print_blocks(console, picture)
    for line in caption(picture):
        click.echo(line)
    _print_legend(console)


def _print_numbered(console: Console, picture: MaskPicture) -> None:
    """Few tiles: each with its number in the order of visits."""
    from rich.text import Text

    from flashgen.analysis.tiles import TileClass
    from flashgen.picture.paint import LETTERS

    numbers = {place: number for number, place in enumerate(picture.order(), start=1)}
    width = max(3, len(str(len(numbers)))) + 1
    styles = _styles()
    for row, classes in enumerate(picture.classes):
        line = Text()
        for column, each in enumerate(classes):
            number, name = str(numbers.get((row, column), "")), TileClass(each).name
            plain = console.color_system is None
            line.append((number + LETTERS[name] if plain else f"{number} ").rjust(width), "" if plain else styles[name])
        console.print(line)


def _print_blocks(console: Console, picture: MaskPicture) -> None:
    """Two rows of pixels a line: the upper half of each character is one, its background the other."""
    from rich.style import Style
    from rich.text import Text

    from flashgen.picture.paint import PALETTE, hex_of, paint, size_of

    height, width = size_of(picture, max(16, min(_WIDEST, console.width - 1)))
    pixels = PALETTE[paint(picture, height + height % 2, width)]
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text()
        for above, below in zip(upper, lower, strict=True):
            line.append("▀", Style(color=hex_of(above), bgcolor=hex_of(below)))
        console.print(line)


def _print_legend(console: Console) -> None:
    from rich.text import Text

    from flashgen.picture.paint import LETTERS

    line = Text()
    for name, meaning in (("FULL", "every pair kept"), ("PARTIAL", "some kept"), ("EMPTY", "never visited")):
        line.append("  " if console.color_system else LETTERS[name], _styles()[name])
        line.append(f" {name}, {meaning}   ")
    console.print(line)
    click.echo("Visited row by row from the top, each from the left.")


def _styles() -> dict[str, Style]:
    from rich.style import Style

    from flashgen.picture.paint import EMPTY, FULL, KEPT, hex_of

    return {
        "FULL": Style(color="white", bgcolor=hex_of(FULL)),
        "PARTIAL": Style(color="black", bgcolor=hex_of(KEPT)),
        "EMPTY": Style(color="black", bgcolor=hex_of(EMPTY)),
    }
