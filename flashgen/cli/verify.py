"""``flashgen verify``: errors against the float64 reference, beside those of PyTorch in the same dtype."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, plain_table, print_json, print_table, progress
from flashgen.cli.operators import loaded_operators
from flashgen.cli.options import (
    Constant,
    backend_option,
    emulated_target_option,
    json_option,
    name_option,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    from flashgen.verification import Case


@click.command(short_help="Compare results with the float64 reference.")
@spec_argument
@name_option
@backend_option
@emulated_target_option
@shape_option
@click.option(
    "--order",
    type=click.IntRange(1, 2),
    default=1,
    help="2: tangents and gradients of gradients, too.",
)
@set_option
@json_option
def verify(
    file: Path,
    name: str | None,
    backend: str | None,
    target: str | None,
    shape: Shape | None,
    order: int,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Run a spec forward and backward and compare with the float64 reference.

    With --order 2 also what o and lse change by in some direction (t_o, t_lse), and the gradients of gradients in
    another, by all inputs and by the gradients that arrive (ddq, …, dd_o, dd_lse).

    Exits with 1 if a result is beyond tolerance.
    """
    from flashgen import verification

    reports: dict[str, list[Case]] = {}
    for op in loaded_operators(file, name, backend, shape, constants, target):
        shapes = (shape,) if shape else verification.default_shapes(op.spec)
        steps = verification.verify(op, shapes, device="cuda" if backend == "cuda" else "cpu", order=order)
        reports[op.spec.name] = list(progress(steps, f"verifying {op.spec.name}"))
    rows = [row for cases in reports.values() for case in cases for row in case.rows]
    failed = sum(not row.ok for row in rows)
    if as_json:
        print_json({name: [_as_dict(case) for case in cases] for name, cases in reports.items()})
    else:
        for title, cases in reports.items():
            _print(title, cases)
    note(f"{len(rows) - failed} of {len(rows)} tensors within tolerance")
    if failed:
        sys.exit(1)


def _print(title: str, cases: Sequence[Case]) -> None:
    columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "tensor", "flashgen", "PyTorch", "tolerance", ""]
    table = plain_table(f"{title}: relative error against the float64 reference", columns, left=["dtype", "tensor", ""])
    for case in cases:
        for cells in _cells(case):
            table.add_row(*cells)
        table.add_section()
    print_table(table)
    if any(case.hbm_bytes for case in cases):
        columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "pass", "predicted", "counted"]
        table = plain_table("bytes between the kernels and the GPU's memory", columns, left=["dtype", "pass"])
        for case in cases:
            for name, moved in case.hbm_bytes.items():
                place = (str(case.head_dim), str(case.dtype), str(case.shape))
                table.add_row(*place, name, f"{moved.predicted:,}", f"{moved.counted:,}")
        print_table(table)


def _cells(case: Case) -> Iterator[tuple[str, ...]]:
    place: tuple[str, ...] = (str(case.head_dim), str(case.dtype), str(case.shape))
    for row in case.rows:
        numbers = (f"{row.error:.1e}", f"{row.baseline:.1e}", f"{row.tolerance:.1e}")
        yield (*place, row.tensor, *numbers, "ok" if row.ok else "FAIL")
        place = ("", "", "")


def _as_dict(case: Case) -> dict[str, object]:
    return {
        "head_dim": str(case.head_dim),
        "dtype": str(case.dtype),
        "shape": dataclasses.astuple(case.shape),
        "tensors": [{**dataclasses.asdict(row), "ok": row.ok} for row in case.rows],
        "hbm_bytes": {name: dataclasses.asdict(each) for name, each in case.hbm_bytes.items()},
    }
