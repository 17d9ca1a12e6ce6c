"""``flashgen plan``: the tile sizes, with their reasons, costs and rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json, print_table, tool
from flashgen.cli.options import (
    Constant,
    check_countable,
    json_option,
    planned_device_option,
    read_numbers,
    read_rate,
    read_tensor,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    from flashgen.plan.plan import Plan
    from flashgen.plan.report import PassReport, PlanReport

_KIB = 1024
_MOST_REJECTED = 8  # of a pass, that are shown


@click.command(short_help="Show the tile sizes and why these.")
@spec_argument
@planned_device_option
@click.option(
    "--sram",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Plan as if the device had this much SRAM.",
)
@shape_option
@click.option(
    "--ranks",
    type=read_numbers("rank count"),
    metavar="N,...",
    help="Spread the sequence over so many devices, up to 1024: what each method takes; with --link.",
)
@click.option(
    "--link",
    type=read_rate,
    metavar="BYTES/S",
    help="What a rank sends and receives in a second; 450e9: NVLink of an H100, 50e9: 400 Gb/s.",
)
@click.option(
    "--tokens",
    type=read_numbers("length"),
    metavar="N,...",
    help="Positions of each rank; default: 8192, with --shape its Nq over the ranks.",
)
@click.option(
    "--tensor",
    "tensors",
    type=read_tensor,
    metavar="NAME=FILE",
    multiple=True,
    help="With --ranks: what the mask reads, from a .npy file; may be repeated.",
)
@set_option
@click.option(
    "-v", "--verbose", is_flag=True, help="Also the reasons of the recipe, buffers, the paper's tiles, runners-up."
)
@json_option
def plan(
    file: Path,
    device: str | None,
    sram: int | None,
    shape: Shape | None,
    ranks: tuple[int, ...] | None,
    link: float | None,
    tokens: tuple[int, ...] | None,
    tensors: tuple[tuple[str, Path], ...],
    constants: tuple[tuple[str, Constant], ...],
    verbose: bool,
    as_json: bool,
) -> None:
    """Show how a spec is computed, the tile sizes, why these, and what they cost at a shape.

    Times are predicted, not measured; HBM bytes stand beside those of standard attention and of the paper's algorithm.
    --verbose and --json tell everything that is known.

    With --ranks and --link it says instead what flashgen.distributed is
    predicted to take on several devices: time of the busiest rank by method,
    what it waits for, imbalance, bytes, and where communication stops hiding.
    """
    from flashgen.compiler.pipeline import report_file

    if shape is not None and 0 in (shape.batch, shape.q_len, shape.kv_len):
        raise click.UsageError(
            f"--shape {shape}: there is nothing to plan for; B, Nq and Nk are at least 1 (an operator takes 0, too)"
        )
    if shape is not None:
        check_countable(shape)
    if ranks is not None or link is not None or tokens is not None or tensors:
        where = (file, device, sram, shape, dict(constants))
        tool("plan --ranks")(*where, ranks, link, tokens, dict(tensors), as_json=as_json)
        return
    reports = report_file(file, device=device, sram=sram, shape=shape, constants=dict(constants))
    if as_json:
        print_json([entry.to_json() for entry in reports])
        return
    for entry in reports:
        on = "" if entry.timed_on == entry.device else f" ({entry.timed_on})"
        title = f"{entry.plan.spec_name}, head_dim {entry.plan.head_dim}, on '{entry.device}'{on}"
        click.echo(click.style(title, bold=True) + f"; B,H,Hkv,Nq,Nk = {entry.shape}")
        if verbose:
            _print(entry)
        else:
            _print_short(entry)
    if not verbose:
        note("--verbose: why each choice of the recipe, buffers, the paper's tiles, runners-up, what was rejected")


def _print_short(report: PlanReport) -> None:
    """What is decided for all, and a few lines a pass: the tile with the one reason, how it works, time, bytes."""
    from flashgen.plan.recipe import in_short
    from flashgen.plan.report import describe_bound

    click.echo(f"recipe: {in_short(report.plan.decided(''))}")
    for what, each in _alike(report.passes).items():
        moved, most = each.moved, _at_most(each)
        click.echo(f"{what}: {each.reason}")
        decided = report.plan.decided(f"{each.name}, {each.element}")
        if decided:
            click.echo(f"  {in_short(decided)}")
        kernels = " + ".join(f"{kernel.name} {1e3 * kernel.seconds:.3g}" for kernel in each.time.kernels)
        total = f" = {most}{1e3 * each.time.seconds:.3g}" if len(each.time.kernels) > 1 else ""
        click.echo(
            f"  {most if not total else ''}{kernels}{total} ms, predicted; {describe_bound(each.time)}; "
            f"{most}{each.counts.visited_fraction:.0%} of the tiles are visited"
        )
        standard = f"standard attention {_mb(moved.standard)}"
        paper = f"the paper's algorithm {_mb(moved.paper)}, any {_mb(moved.least)}"
        click.echo(f"  {most}{_mb(moved.kernels)} MB between SRAM and HBM; {standard}, {paper}")
    for remark in report.remarks:
        click.echo(remark)


def _print(report: PlanReport) -> None:
    decisions, groups = report.plan, _alike(report.passes)
    _print_recipe(decisions)
    _print_choice(groups, decisions.sram_bytes)
    for what, each in groups.items():
        for kernel, sizes in each.buffers.items():
            parts = ", ".join(f"{name} {size / _KIB:.1f}" for name, size in sizes.items())
            click.echo(f"  {_kernel(what, each, kernel)}: KiB of {parts}")
    _print_moved(groups)
    _print_paper(groups)
    click.echo("why")
    for reason in (*decisions.reasons, *report.remarks):
        click.echo(f"  {reason}")
    _print_runners_up(groups)
    if decisions.rejected:
        rows: list[tuple[str, ...]] = []
        for name in dict.fromkeys(lost.pass_name for lost in decisions.rejected):
            rejected = [lost for lost in decisions.rejected if lost.pass_name == name]
            rows += [(name, str(lost.Br), str(lost.Bc), lost.reason) for lost in rejected[:_MOST_REJECTED]]
            if len(rejected) > _MOST_REJECTED:
                rows.append((name, "", "", f"{len(rejected) - _MOST_REJECTED} more; --json lists them"))
        print_table("rejected", ["pass", "B_r", "B_c", "because"], rows, left=["pass", "because"])


def _print_recipe(plan: Plan) -> None:
    """Every choice with its reason and what was measured."""
    from flashgen.plan.recipe import gathered

    click.echo("recipe")
    for each, about in gathered(plan.decisions).items():
        of = f" ({about})" if about else ""
        click.echo(f"  {each.question}: {each.choice}{of}")
        click.echo(f"    because {each.reason}")
        click.echo(f"    measured{f', {each.rule}' if each.rule else ''}: {each.measured}")


def _alike(passes: Sequence[PassReport]) -> Mapping[str, PassReport]:
    """The passes by name; element types of which everything is said alike share one, as f16 and bf16 do."""
    groups: list[list[PassReport]] = []
    for each in passes:
        for group in groups:
            if replace(each, element=group[0].element).to_json() == group[0].to_json():
                group.append(each)
                break
        else:
            groups.append([each])
    return {f"{group[0].name}, {' and '.join(str(each.element) for each in group)}": group[0] for group in groups}


def _kernel(what: str, each: PassReport, kernel: str) -> str:
    """The name of a pass, that of its kernel where it has several."""
    return what if len(each.tiles) == 1 else what.replace(each.name, kernel, 1)


def _print_choice(groups: Mapping[str, PassReport], sram: int) -> None:
    from flashgen.plan.report import describe_bound

    columns = ["pass", "B_r", "B_c", "KiB kept", "of M", "pairs kept", "tiles visited"]
    columns += ["blocks", "waves", "idle", "registers", "predicted ms", "TFLOP/s", "limited by"]
    rows = []
    for what, each in groups.items():
        main = each.time.main
        for number, (kernel, tiles) in enumerate(zip(each.buffers, each.tiles, strict=True)):
            cells = [_kernel(what, each, kernel), str(tiles.Br), str(tiles.Bc), f"{tiles.sram_bytes / _KIB:.0f}"]
            cells.append(f"{tiles.sram_bytes / sram:.0%}")
            if number == 0:
                at_most, counts = _at_most(each), each.counts
                cells += [f"{at_most}{share:.0%}" for share in (counts.kept_fraction, counts.visited_fraction)]
                cells += [f"{main.blocks}", f"{main.waves:.1f}", f"{main.idle:.0%}", str(main.registers or "")]
                cells += [f"{at_most}{1e3 * each.time.seconds:.3g}", f"{each.time.flops_per_second / 1e12:.3g}"]
                cells.append(describe_bound(each.time))
            rows.append(cells)
    print_table("the choice; times are predicted", columns, rows, left=["pass", "limited by"])


def _at_most(each: PassReport) -> str:
    """Before a figure that depends on tensors which nobody knows yet."""
    return "≤ " if each.counts.unknown else ""


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _print_moved(groups: Mapping[str, PassReport]) -> None:
    columns = ["pass", "kernels", "standard attention", "× more", "the paper's algorithm", "Rabe and Staats"]
    columns += ["N²d²/M", "least possible"]
    rows = []
    for what, each in groups.items():
        moved = each.moved
        more = f"{'≥ ' if each.counts.unknown else ''}{moved.standard / max(moved.kernels, 1):.1f}"
        others = map(_mb, (moved.paper, moved.rabe_staats, moved.bound, moved.least))
        rows.append((what, _at_most(each) + _mb(moved.kernels), _mb(moved.standard), more, *others))
    print_table("MB between SRAM and HBM", columns, rows, left=["pass"])


def _print_paper(groups: Mapping[str, PassReport]) -> None:
    columns = ["pass", "M", "B_r", "B_c", "its buffers", "", "as a kernel's tile", "needs", ""]
    title = "the paper's B_c = ⌈M / 4d⌉, B_r = min(⌈M / 4d⌉, d), M in numbers; KiB"
    rows = []
    for what, each in groups.items():
        tile, own = each.paper, each.paper.kernel_blocks
        blocks = (f"{tile.elements:,}", str(tile.blocks.Br), str(tile.blocks.Bc))
        needs, own_needs = (_needs(size, tile.sram_bytes) for size in (tile.needed, tile.kernel_bytes))
        rows.append((what, *blocks, *needs, f"{own.Br} × {own.Bc}", *own_needs))
    print_table(title, columns, rows, left=["pass", ""])


def _needs(size: int, there: int) -> tuple[str, str]:
    return f"{size / _KIB:.1f}", "fits" if size <= there else f"{size / there:.2f} × too much"


def _print_runners_up(groups: Mapping[str, PassReport]) -> None:
    columns = ["pass", "B_r", "B_c", "with", "predicted ms", "beside the choice", "why"]
    rows = []
    for what, each in groups.items():
        for other in each.runners_up:
            times = (f"{1e3 * other.seconds:.3g}", f"{other.slower:+.0%}")
            rows.append((what, str(other.Br), str(other.Bc), other.what, *times, other.why))
    if rows:
        print_table("runners-up", columns, rows, left=["pass", "with", "why"])
