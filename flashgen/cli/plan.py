"""``flashgen plan``: the tile sizes, with their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import plain_table, print_json, print_table
from flashgen.cli.options import Constant, json_option, read_name, set_option, spec_argument

if TYPE_CHECKING:
    from flashgen.plan.cuda_plan import CudaPlan
    from flashgen.plan.plan import Plan


def _devices() -> tuple[str, ...]:
    from flashgen.pipeline import device_names

    return device_names()


@click.command(short_help="Show the tile sizes and why these.")
@spec_argument
@click.option(
    "--device",
    type=read_name("device", _devices),
    metavar="NAME",
    default=None,
    help="Plan for this device; default: this CPU.",
)
@click.option(
    "--sram",
    type=click.IntRange(min=1),
    default=None,
    metavar="BYTES",
    help="Plan as if the device had this much SRAM.",
)
@set_option
@json_option
def plan(
    file: Path,
    device: str | None,
    sram: int | None,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Show the tile sizes of a spec, why these, and what was rejected."""
    from flashgen.pipeline import plan_file

    plans = plan_file(file, device=device, sram=sram, constants=dict(constants))
    if as_json:
        print_json([entry.to_json() for entry in plans])
        return
    for entry in plans:
        _print(entry)


def _print(plan: Plan | CudaPlan) -> None:
    title = f"{plan.spec_name}, head_dim {plan.head_dim}, on '{plan.device}'"
    table = plain_table(title, ["pass", "B_r", "B_c", "KiB kept", "of M"], left=["pass"])
    for name, tiles in plan.passes.items():
        share = tiles.sram_bytes / plan.sram_bytes
        table.add_row(name, str(tiles.Br), str(tiles.Bc), f"{tiles.sram_bytes / 1024:.0f}", f"{share:.0%}")
    print_table(table)
    for reason in plan.reasons:
        click.echo(f"  {reason}")
    if plan.rejected:
        table = plain_table("rejected", ["pass", "B_r", "B_c", "because"], left=["pass", "because"])
        for lost in plan.rejected:
            table.add_row(lost.pass_name, str(lost.Br), str(lost.Bc), lost.reason)
        print_table(table)
