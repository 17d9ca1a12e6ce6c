"""``flashgen devices``, ``cache``, ``doctor``, ``completion``: what is known, stored, missing; what a shell needs."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from flashgen.cli.console import note, print_json, print_table
from flashgen.cli.options import VARIABLE, json_option

if TYPE_CHECKING:
    from flashgen.compiler.tile_choices import TunedFile

SHELLS = ("bash", "zsh", "fish")
_BEHIND_BASH = """
# A folder is not the end of a name.
_flashgen() {
    _flashgen_completion "$@"
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace; fi
}
complete -o nosort -F _flashgen flashgen
"""


@click.command(short_help="List the devices that plans can be made for.")
@json_option
def devices(as_json: bool) -> None:
    """List the devices that plans can be made for; the first is this machine's CPU.

    Your own stand in a TOML file, which the last line names; its form is that of the table that comes with flashgen.
    """
    from flashgen.targets.cpu.device import local_cpu
    from flashgen.targets.device_table import known_devices, user_file

    known = known_devices()
    cpus = (local_cpu(), *known.cpus.values())
    if as_json:
        print_json([dataclasses.asdict(device) for device in cpus] + [gpu.to_json() for gpu in known.gpus.values()])
        return
    columns = ["device", "cores", "lanes", "GHz", "L1 KiB", "SRAM KiB", "GB/s"]
    rows = [
        (
            device.name,
            str(device.cores),
            str(device.lanes),
            f"{device.clock_hz / 1e9:.2f}",
            f"{device.l1_bytes // 1024}",
            f"{device.sram_bytes // 1024}",
            "" if device.bandwidth is None else f"{device.bandwidth / 1e9:.0f}",
        )
        for device in cpus
    ]
    print_table("CPUs; SRAM is the memory that a tile lives in", columns, rows, left=["device"])
    columns = ["device", "product", "target", "SRAM KiB", "SMs", "MHz", "L2 MiB", "GB/s", "16-bit", "TF32", "f32"]
    title = "GPUs; SRAM is what one block may use; peaks in TFLOP/s, dense; * no kernels are generated for it"
    of_gpus = [
        (
            gpu.name,
            gpu.product,
            gpu.target.name if gpu.is_generated_for else f"{gpu.target.name} *",
            f"{gpu.target.block_bytes // 1024}",
            str(gpu.sms),
            f"{gpu.clock_hz / 1e6:.0f}",
            f"{gpu.l2_bytes // 2**20}",
            f"{gpu.bandwidth / 1e9:.0f}",
            *("" if x is None else f"{x / 1e12:.3g}" for x in (gpu.tensor_16, gpu.tensor_tf32, gpu.fma)),
        )
        for gpu in known.gpus.values()
    ]
    print_table(title, columns, of_gpus, left=["device", "product", "target"])
    click.echo("figures from")
    sources = [(cpu.name, cpu.source) for cpu in cpus] + [(gpu.name, gpu.source) for gpu in known.gpus.values()]
    for name, source in sources:
        click.echo(f"  {name}: {source}")
    note(f"your own devices: {user_file()}{'' if user_file().is_file() else ' (not there)'}")


@click.group(invoke_without_command=True, short_help="List or clear compiled libraries and tuned tiles.")
@json_option
@click.pass_context
def cache(ctx: click.Context, as_json: bool) -> None:
    """List the compiled libraries and the tuned tiles that are stored."""
    if ctx.invoked_subcommand is not None:
        return
    from flashgen.compiler.tile_choices import TunedStore
    from flashgen.store.cache import Cache

    stored = Cache.default()
    entries, tuned = stored.entries(), TunedStore.beside(stored).files()
    doubt = stored.doubt()
    if doubt is not None:
        note(f"warning: nothing of this is used: {doubt}")
    if as_json:
        listed = {
            "entries": [dataclasses.asdict(entry) for entry in entries],
            "tuned": [_tuned(each) for each in tuned],
        }
        print_json({"folder": str(stored.root), **listed})
        return
    total = sum(entry.size for entry in entries)
    title = f"{stored.root}: {len(entries)} libraries, {total / 1e6:.1f} MB"
    rows = [(entry.name, _when(entry.built), f"{entry.size / 1e3:.0f}", entry.key[:12]) for entry in entries]
    print_table(title, ["library", "built", "kB", "key"], rows, left=["library"])
    if tuned:
        _print_tuned(tuned)


def _print_tuned(tuned: Sequence[TunedFile]) -> None:
    left = ["spec", "device", "class of shapes", "forward", "backward"]
    columns = ["spec", "head_dim", "device", "class of shapes", "forward", "backward", "tuned"]
    rows: list[tuple[str, ...]] = []
    for each in tuned:
        place = (each.spec_name, each.head_dim, each.device)
        if each.tunings is None:
            rows.append((*place, f"by flashgen {each.version}: kept, not used by this version", "", "", ""))
        for tuning in each.tunings or ():
            tiles = [str(tuning.passes[name].tile) if name in tuning.passes else "" for name in ("forward", "backward")]
            when = _when(tuning.time) if tuning.complete else f"{_when(tuning.time)}, in part"
            rows.append((*place, str(tuning.shape_class), *tiles, when))
    print_table(f"tuned tiles of {len(tuned)} kernels", columns, rows, left=left)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _tuned(each: TunedFile) -> dict[str, object]:
    return {
        "spec": each.spec_name,
        "head_dim": each.head_dim,
        "device": each.device,
        "version": each.version,
        "path": str(each.path),
        "tunings": None if each.tunings is None else [tuning.to_json() for tuning in each.tunings],
    }


@cache.command(short_help="Remove what is stored.")
@click.option("--only", type=click.Choice(("libraries", "tuned")), help="Remove these alone; default: everything.")
def clear(only: str | None) -> None:
    """Remove every stored library, each of which is built again when it is next needed, and all tuned tiles."""
    from flashgen.compiler.tile_choices import TunedStore
    from flashgen.store.cache import Cache

    if only != "tuned":
        note(f"freed {Cache.default().clear() / 1e6:.1f} MB")
    if only != "libraries":
        removed = TunedStore.beside(Cache.default()).clear()
        if removed or only:
            note(f"removed the tuned tiles of {removed} kernels")


@click.command(short_help="Say what is missing here, and how to get it.")
@json_option
def doctor(as_json: bool) -> None:
    """Look for what flashgen needs on this machine, and say how to get what is not there.

    A compiler and its OpenMP, the cache folder, PyTorch, GPU, driver, CuPy, NVRTC, and what pictures and models need.
    Exits with 0 where a backend can run, with 1 where none can.
    """
    from flashgen.cli.doctor import examine

    report = examine()
    if as_json:
        print_json(report.to_json())
    else:
        width = max(len(each.name) for each in report.findings)
        for each in report.findings:
            mark = {"ok": "ok", "missing": "MISSING", "optional": "-"}[each.state]
            indent = " " * (width + 11)
            lines = [_wrapped(each.found, indent)]
            if each.state != "ok" and each.cure:
                lines.append(indent + _wrapped(f"to get it: {each.cure}", indent))
            click.echo(f"{mark:<7}  {each.name:<{width}}  " + "\n".join(lines))
        click.echo()
        for name, why in report.backends.items():
            click.echo(f"backend '{name}' {'runs here' if not why else f'does not run here; {why}'}")
    if not report.runs:
        note("no backend runs here")
        sys.exit(1)


def _wrapped(text: str, indent: str) -> str:
    """Lines of a terminal, but words, as paths and commands are, stay whole."""
    columns = max(40, 120 - len(indent))
    return f"\n{indent}".join(textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False) or [""])


@click.command(short_help="Print what completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the code that completes commands, options, names of the gallery, targets, devices and files in a shell.

    \b
    bash, in ~/.bashrc:  eval "$(flashgen completion bash)"
    zsh, in ~/.zshrc:    eval "$(flashgen completion zsh)"
    fish, once:          flashgen completion fish > ~/.config/fish/completions/flashgen.fish

    In ~/.zshrc the line stands behind the one that runs compinit.
    """  # noqa: D301 - click reads \b as what it is
    found = get_completion_class(shell)
    assert found is not None
    text = found(ctx.find_root().command, {}, "flashgen", VARIABLE).source()
    click.echo(text + (_BEHIND_BASH if shell == "bash" else ""))
