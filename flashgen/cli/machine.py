"""``flashgen devices`` and ``flashgen cache``: what is known and what is stored."""

from __future__ import annotations

import dataclasses
import time

import click

from flashgen.cli.console import note, plain_table, print_json, print_table
from flashgen.cli.options import json_option


@click.command(short_help="List the devices that plans can be made for.")
@json_option
def devices(as_json: bool) -> None:
    """List the devices that plans can be made for; the first is this machine's CPU."""
    from flashgen.plan.cuda_devices import GPUS, TARGETS
    from flashgen.plan.devices import DEVICES, local_cpu

    known = (local_cpu(), *DEVICES.values())
    sram = {gpu.name: TARGETS[gpu.target].block_bytes for gpu in GPUS.values()}
    if as_json:
        gpus = [dataclasses.asdict(gpu) | {"kind": "gpu", "sram_bytes": sram[gpu.name]} for gpu in GPUS.values()]
        print_json([dataclasses.asdict(device) for device in known] + gpus)
        return
    columns = ["device", "kind", "cores", "lanes", "L1 KiB", "SRAM KiB", "figures from"]
    table = plain_table("CPUs; SRAM is the memory that a tile lives in", columns, left=["device", "figures from"])
    for device in known:
        table.add_row(
            device.name,
            device.kind,
            str(device.cores),
            str(device.lanes),
            f"{device.l1_bytes // 1024}",
            f"{device.sram_bytes // 1024}",
            device.source,
        )
    print_table(table)
    columns = ["device", "target", "multiprocessors", "L2 MiB", "SRAM KiB", "figures from"]
    table = plain_table("GPUs; SRAM is what one block may use", columns, left=["device", "target", "figures from"])
    for gpu in GPUS.values():
        numbers = (str(gpu.sms), f"{gpu.l2_bytes // 2**20}", f"{sram[gpu.name] // 1024}")
        table.add_row(gpu.name, gpu.target, *numbers, gpu.source)
    print_table(table)


@click.group(invoke_without_command=True, short_help="List or clear the compiled libraries.")
@json_option
@click.pass_context
def cache(ctx: click.Context, as_json: bool) -> None:
    """List the compiled libraries that are stored."""
    if ctx.invoked_subcommand is not None:
        return
    from flashgen.runtime.cache import Cache

    stored = Cache.default()
    entries = stored.entries()
    if as_json:
        print_json({"folder": str(stored.root), "entries": [dataclasses.asdict(entry) for entry in entries]})
        return
    total = sum(entry.size for entry in entries)
    table = plain_table(
        f"{stored.root}: {len(entries)} libraries, {total / 1e6:.1f} MB",
        ["library", "built", "kB", "key"],
        left=["library"],
    )
    for entry in entries:
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.built))
        table.add_row(entry.name, built, f"{entry.size / 1e3:.0f}", entry.key[:12])
    print_table(table)


@cache.command(short_help="Remove everything that is stored.")
def clear() -> None:
    """Remove every stored library; each is built again when it is next needed."""
    from flashgen.runtime.cache import Cache

    freed = Cache.default().clear()
    note(f"freed {freed / 1e6:.1f} MB")
