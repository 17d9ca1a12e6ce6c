"""``flashgen verify``: errors against the float64 reference, beside those of PyTorch in the same dtype."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json, print_table, progress
from flashgen.cli.options import (
    Constant,
    backend_option,
    emulated_target_option,
    json_option,
    loaded_operators,
    name_option,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape

if TYPE_CHECKING:
    from flashgen.verification import Case, F8Case, F8Row, Row

    _Errors = tuple[float | str, ...]
    _Case = tuple[tuple[object, ...], Sequence[tuple[Row | F8Row, _Errors]]]


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
@click.option("--f8", is_flag=True, help="q, k and v of 8 bits, too, as where dtype names f8e4m3.")
@set_option
@json_option
def verify(
    file: Path,
    name: str | None,
    backend: str | None,
    target: str | None,
    shape: Shape | None,
    order: int,
    f8: bool,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Run a spec forward and backward and compare with the float64 reference.

    With --order 2 also tangents of o and lse (t_o, t_lse) and gradients of gradients (ddq, …, dd_o, dd_lse); a line
    says which kernels ran.

    For q, k and v of 8 bits a table has the error against float64, beside that of bfloat16 and that of one factor a
    tensor. What the op adds to the rounding of its inputs has a tolerance.

    Exits with 1 if a result is beyond tolerance.
    """
    from flashgen import verification

    reports: dict[str, list[Case]] = {}
    narrow: dict[str, list[F8Case]] = {}
    for op in loaded_operators(file, name, backend, shape, constants, target):
        shapes = (shape,) if shape else verification.default_shapes(op.spec)
        device = "cuda" if backend == "cuda" else "cpu"
        steps = verification.verify(op, shapes, device=device, order=order)
        reports[op.spec.name] = list(progress(steps, f"verifying {op.spec.name}"))
        if f8 and not op.spec.takes_f8:
            raise click.UsageError(f"--f8: '{op.spec.name}' names no f8e4m3 in its dtype statement")
        if f8 or (op.spec.takes_f8 and op.spec.dtypes is not None):
            of_8_bits = verification.verify_f8(op, shapes, device=device)
            narrow[op.spec.name] = list(progress(of_8_bits, f"verifying {op.spec.name} of 8 bits"))
    rows: list[Row | F8Row] = [row for cases in reports.values() for case in cases for row in case.rows]
    rows += [row for f8_cases in narrow.values() for f8_case in f8_cases for row in f8_case.rows]
    failed = sum(not row.ok for row in rows)
    if as_json:
        found: dict[str, list[dict[str, object]]] = {}
        for title, cases in reports.items():
            moved = [{name: dataclasses.asdict(each) for name, each in case.hbm_bytes.items()} for case in cases]
            both = zip(cases, moved, strict=True)
            found[title] = [_as_dict(x, x.dtype, hbm_bytes=y, derived_by=x.derived_by) for x, y in both]
            found[title] += [_as_dict(x, "f8e4m3", wide=str(x.wide)) for x in narrow.get(title, ())]
        print_json(found)
    else:
        for title, cases in reports.items():
            _print(title, cases)
            if title in narrow:
                _print_f8(title, narrow[title])
    note(f"{len(rows) - failed} of {len(rows)} tensors within tolerance")
    if failed:
        sys.exit(1)


def _print(title: str, cases: Sequence[Case]) -> None:
    columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "tensor", "flashgen", "PyTorch", "tolerance"]
    places = [(case.head_dim, case.dtype, case.shape) for case in cases]
    errors = [[(row, (row.error, row.baseline, row.tolerance)) for row in case.rows] for case in cases]
    _print_errors(title, columns, zip(places, errors, strict=True))
    for derived_by in dict.fromkeys(case.derived_by for case in cases if case.derived_by is not None):
        tangents, gradients = derived_by
        note(f"tangents by {tangents}; gradients of gradients by {gradients}")
    if any(case.hbm_bytes for case in cases):
        columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "pass", "predicted", "counted"]
        rows = [
            (str(case.head_dim), str(case.dtype), str(case.shape), name, f"{moved.predicted:,}", f"{moved.counted:,}")
            for case in cases
            for name, moved in case.hbm_bytes.items()
        ]
        print_table("bytes between the kernels and the GPU's memory", columns, rows, left=["dtype", "pass"])


def _print_f8(title: str, cases: Sequence[F8Case]) -> None:
    columns = ["head_dim", "B,H,Hkv,Nq,Nk", "tensor", "8 bits", "wider", "a factor a tensor"]
    columns += ["own rounding", "tolerance"]
    places = [(case.head_dim, case.shape) for case in cases]
    errors = [
        [(x, (x.error, f"{x.wide:.1e} ({case.wide})", x.per_tensor, x.rounding, x.tolerance)) for x in case.rows]
        for case in cases
    ]
    _print_errors(f"{title} of 8 bits", columns, zip(places, errors, strict=True))


def _print_errors(title: str, columns: Sequence[str], cases: Iterable[_Case]) -> None:
    """A line for each row; the first one of a case says which case it is."""
    lines: list[tuple[str, ...]] = []
    for place, rows in cases:
        places = list(map(str, place))
        for row, errors in rows:
            numbers = (each if isinstance(each, str) else f"{each:.1e}" for each in errors)
            lines.append((*places, row.tensor, *numbers, "ok" if row.ok else "FAIL"))
            places = [""] * len(places)
        lines.append(())
    title = f"{title}: relative error against the float64 reference"
    print_table(title, [*columns, ""], lines, left=["dtype", "tensor", ""])


def _as_dict(case: Case | F8Case, dtype: object, **more: object) -> dict[str, object]:
    return {
        "head_dim": str(case.head_dim),
        "dtype": str(dtype),
        "shape": dataclasses.astuple(case.shape),
        "tensors": [{**dataclasses.asdict(row), "ok": row.ok} for row in case.rows],
        **more,
    }
