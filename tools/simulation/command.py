"""``flashgen plan --ranks``: what attention over several devices is predicted to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import print_json, print_table
from flashgen.cli.options import Constant, check_countable
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tools.simulation.simulate import Simulation

_MB, _MS = 1e6, 1e3
_MOST_RANKS = 1024
_TOKENS = (8192,)  # of each rank, where nothing else is said


@dataclass(frozen=True)
class Asked:
    """What ``--ranks``, ``--link``, ``--tokens`` and ``--tensor`` say; without ``tokens`` the sequence is that of
    ``--shape``.
    """

    ranks: tuple[int, ...]
    link: float
    tokens: tuple[int, ...] | None
    tensors: Mapping[str, Path]

    @classmethod
    def of(
        cls,
        ranks: tuple[int, ...] | None,
        link: float | None,
        tokens: tuple[int, ...] | None,
        shape: Shape | None,
        tensors: Mapping[str, Path],
    ) -> Asked:
        """The options together. Raises ``UsageError`` where one is missing, or too much."""
        if ranks is None:
            named = "--link" if link is not None else "--tokens" if tokens is not None else "--tensor"
            raise click.UsageError(f"{named} goes with --ranks, such as --ranks 8")
        if link is None:
            raise click.UsageError(
                "--ranks goes with --link, the bytes that a rank sends in a second: 450e9 for NVLink of an H100, 50e9 "
                "for a network of 400 Gb/s"
            )
        if max(ranks) > _MOST_RANKS:
            raise click.UsageError(f"--ranks {max(ranks)}: up to {_MOST_RANKS} are simulated")
        if shape is not None and tokens is None and shape.q_len != shape.kv_len:
            raise click.UsageError(
                f"--shape {shape}: ranks hold the same positions of q, k and v; Nq and Nk have to be equal"
            )
        return cls(ranks, link, _TOKENS if tokens is None and shape is None else tokens, tensors)

    def shapes(self, shape: Shape) -> Sequence[tuple[int, Shape]]:
        """Ranks, and the whole call that they share."""
        if self.tokens is None:
            return [(count, shape) for count in self.ranks]
        return [
            (count, replace(shape, q_len=count * each, kv_len=count * each))
            for each in self.tokens
            for count in self.ranks
        ]


def show_ranks(
    file: Path,
    device: str | None,
    sram: int | None,
    shape: Shape | None,
    constants: Mapping[str, Constant],
    ranks: tuple[int, ...] | None,
    link: float | None,
    tokens: tuple[int, ...] | None,
    tensors: Mapping[str, Path],
    *,
    as_json: bool,
) -> None:
    """Simulate, and print."""
    from flashgen.compiler.pipeline import device_named, variants_of
    from flashgen.compiler.reading import read_file
    from tools.simulation.simulate import in_words, simulate

    asked = Asked.of(ranks, link, tokens, shape, tensors)
    calls = asked.shapes(shape or Shape(1, 16, 16, 0, 0))
    for count, each in calls:
        if each.q_len < count:
            raise click.UsageError(f"{each.q_len} positions on {count} ranks: some would have nothing to do")
        check_countable(each)
    on = device_named(device or "local", sram)
    variants = variants_of(read_file(file, constants))
    captured = _read(asked.tensors, {each.name for variant in variants for each in variant.spec.tensors})
    try:
        found = {
            variant: [simulate(variant, on, each, count, asked.link, captured) for count, each in calls]
            for variant in variants
        }
    except ValueError as error:  # of a tensor of another shape
        raise click.UsageError(f"--tensor: {error}; --shape or --tokens and --ranks say the length") from None
    if as_json:
        print_json(
            [
                {"spec": variant.spec.name, "head_dim": str(variant.head_dim), "device": on.name, **each.to_json()}
                for variant, simulations in found.items()
                for each in simulations
            ]
        )
        return
    for variant, simulations in found.items():
        first = simulations[0]
        sizes = f"B,H,Hkv = {first.shape.batch},{first.shape.heads},{first.shape.kv_heads}"
        title = f"{variant.spec.name}, head_dim {variant.head_dim}, {first.element}, on '{on.name}' ({on.product})"
        click.echo(click.style(title, bold=True) + f"; {sizes}; {asked.link / 1e9:g} GB/s a rank")
        _print(simulations)
        for length in asked.tokens or (None,):
            if length is not None:
                click.echo(f"{length:,} positions a rank")
            for line in in_words([each for each in simulations if length in (None, each.shape.q_len // each.ranks)]):
                click.echo(f"  {line}")
        if first.unknown:
            names = ", ".join(f"'{name}'" for name in first.unknown)
            click.echo(
                f"the mask reads {names}, known only to a call: what depends on it counts as kept, so that times and "
                "bytes are the most there can be; --tensor NAME=FILE.npy says what a tensor holds"
            )


def _read(tensors: Mapping[str, Path], declared: set[str]) -> dict[str, NDArray[np.generic]]:
    """What tensors hold. Raises ``UsageError`` for a name that no spec declares, and a file that is none of NumPy's."""
    import numpy as np

    found: dict[str, NDArray[np.generic]] = {}
    for name, path in tensors.items():
        if name not in declared:
            known = ", ".join(f"'{each}'" for each in sorted(declared)) or "none"
            raise click.UsageError(f"--tensor {name}: the spec declares no such tensor; it has {known}")
        try:
            found[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--tensor {name}: '{path}' is no .npy file: {error}") from None
    return found


def _print(simulations: Sequence[Simulation]) -> None:
    columns = [
        "ranks",
        "positions",
        "imbalance",
        "method",
        "pass",
        "ms",
        "work",
        "link",
        "waits",
        "efficiency",
        "MB sent",
    ]
    rows = []
    for each in simulations:
        lengths = each.partition.lengths
        shared = [str(each.ranks), f"{max(lengths):,}", f"{each.partition.imbalance:.1%}"]
        for by in each.methods:
            for one in by.passes:
                times = (f"{_MS * x:.3g}" for x in (one.seconds, one.work, one.travel, one.waited))
                best = "*" if by is each.best else ""
                sent = f"{max(one.sent) / _MB:,.1f}"
                rows.append((*shared, by.name + best, one.name, *times, f"{one.efficiency:.0%}", sent))
    print_table("of the busiest rank; all is predicted", columns, rows, left=["method", "pass"])
    click.echo("*: the least time, both passes together")
