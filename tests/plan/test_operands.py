"""Operands: declared once, and everything that follows agrees with tensors."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch

from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled
from flashgen.compiler.pipeline import target_named
from flashgen.compiler.reading import read_file
from flashgen.hosts.emulated import extents
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.ir.spec import HeadDim
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import AXES, Elements, Operand, Rows
from flashgen.plan.arguments import argument_fields
from flashgen.targets.gpu.printed.operands import addressing_code

HEAD_DIM = HeadDim(24, 40)
KNOWN = {"batch": 2, "heads": 6, "kv_heads": 3, "q_len": 5, "kv_len": 7, "element": 2}
EVERY = tuple(OPERANDS.values())


def tensor_of(operand: Operand) -> torch.Tensor:
    """One that lies as the operand says: rows further apart than they are wide where strides are arguments."""
    batch, heads, rows = operand.lengths(KNOWN)
    columns = operand.columns(HEAD_DIM)
    dtype = torch.float32 if operand.elements is Elements.FLOAT32 else torch.float16
    if operand.rows is Rows.CONTIGUOUS:
        return torch.arange(batch * heads * rows * columns).to(dtype).view(batch, heads, rows, columns)
    wide = torch.arange(batch * rows * heads * (columns + 8)).to(dtype)
    return wide.view(batch, rows, heads, columns + 8).transpose(1, 2)[..., :columns]


def known_of(operand: Operand, tensor: torch.Tensor) -> dict[str, int]:
    return KNOWN | dict(zip(operand.stride_fields, tensor.stride(), strict=False))


@pytest.mark.parametrize("operand", EVERY, ids=lambda each: each.name)
def test_rows_lie_where_the_operand_says(operand: Operand) -> None:
    tensor = tensor_of(operand)
    known = known_of(operand, tensor)
    strides = operand.strides(HEAD_DIM, known)
    memory = tensor.untyped_storage()
    flat = torch.tensor([], dtype=tensor.dtype).set_(memory)
    for place in product(*(range(count) for count in operand.lengths(known))):
        at = sum(n * stride for n, stride in zip(place, strides, strict=True))
        assert torch.equal(flat[at : at + operand.columns(HEAD_DIM)], tensor[place])
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    assert operand.reach(HEAD_DIM, known) == last


@pytest.mark.parametrize("operand", EVERY, ids=lambda each: each.name)
def test_a_kernel_may_touch_what_the_tensor_reaches_over(specs: Path, operand: Operand) -> None:
    layout = ArgumentLayout(argument_fields(read_file(specs / "causal.attn").specs[0]))
    tensor = tensor_of(operand)
    known = known_of(operand, tensor) | {operand.name: 4096}
    address, size = extents(layout, HEAD_DIM, layout.values(known))[operand.name]
    assert address == 4096
    assert size == tensor.element_size() * operand.reach(HEAD_DIM, known)


@pytest.mark.parametrize("operand", [each for each in EVERY if each.by_row], ids=lambda each: each.name)
def test_results_between_others_are_runs_of_rows(operand: Operand) -> None:
    """Of a tensor without gaps one run; else those of its rows, and nothing of what lies between them."""
    tensor = tensor_of(operand)
    for x in (tensor, tensor.contiguous()):
        known = known_of(operand, x)
        size = 2 * operand.reach(HEAD_DIM, known)
        runs = operand.runs(HEAD_DIM, known, size)
        touched = [n for begin, length in runs for n in range(begin, begin + length, 2)]
        flat = x.untyped_storage().nbytes() // 2
        own = torch.arange(flat).as_strided(x.shape, x.stride()).flatten().mul(2).tolist()
        assert sorted(touched) == sorted(own)
    assert len(runs) == 1


def test_nothing_is_reached_where_there_is_nothing() -> None:
    for operand in EVERY:
        known = KNOWN | dict.fromkeys(operand.stride_fields, 1) | {"q_len": 0, "kv_len": 0}
        assert operand.reach(HEAD_DIM, known) == 0


def test_the_struct_has_each_with_its_strides(specs: Path) -> None:
    fields = {each.name: each for each in argument_fields(read_file(specs / "alibi.attn").specs[0])}
    for operand in EVERY:
        field = fields[operand.name]
        assert (field.kind == "pointer") == operand.is_written
        assert field.element == operand.c_type
        assert field.comment.startswith(operand.shape)
        assert field.varies
        assert [name for name in fields if name.startswith(f"{operand.name}_stride_")] == list(operand.stride_fields)
        assert len(operand.stride_fields) in (0, len(AXES))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_only_operands_compute_strides(specs: Path, repository: Path, target: str) -> None:
    for path in sorted((repository / "templates").rglob("*.cuh*")):
        assert "_stride_" not in path.read_text(encoding="utf-8"), f"{path.name} computes a stride"
    (spec,) = read_file(specs / "causal.attn").specs
    on = target_named(target)
    variant = analyse(spec, spec.head_dims[0])
    source = "".join(each.source.whole for each in compiled(variant, on).parts())
    used = set(re.findall(r"\ba\.(\w+_stride_\w)", source))
    assert used == {name for each in EVERY for name in each.stride_fields}
    for each in EVERY:
        if each.stride_fields:
            from_where = "int64_t b, int64_t h, int64_t n" if each.by_row else "int first"
            assert f"rows_of_{each.name}(const Arguments& a, {from_where})" in addressing_code(OPERANDS)
            assert re.search(rf"rows?_of_{each.name}<T>\(a, ", source)
