"""What kernels are called with: operands and where their rows lie, ``struct Arguments``, the workspace.

In: the plan of a variant in one element type, the passes. Out: an ``OperandCode``, ``operands`` in templates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ScalarType
from flashgen.kinds.kind import PassName
from flashgen.kinds.operand import Elements, Field
from flashgen.plan.arguments import fields_of_sequences, param_field, param_place_field
from flashgen.targets.gpu.addressing import addressing_code, sequence_code
from flashgen.targets.gpu.launches import captured_elements
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.gpu.workspace import count_code, workspace_code


@dataclass(frozen=True)
class Param:
    """A param: its name and type in C++, and the field that says where it lies."""

    name: str
    c_type: str
    place: str


@dataclass(frozen=True)
class OperandCode:
    """Rows of q, k, v and o, and all other arguments.

    ``written`` and ``written_of_keys``: the type of elements of o and dq, and of dk and dv: T, that of the call, or
    another. ``of_sequences`` are fields, and those of their tables.
    """

    written: str
    written_of_keys: str
    addressing: str
    sequence_code: tuple[str, ...]
    of_sequences: tuple[tuple[str, str], ...]
    arguments: tuple[Field, ...]
    params: tuple[Param, ...]
    captured: dict[str, str]  # the elements of each that has a gradient, by the field that receives it
    workspace: str


def operand_code(plan: GpuPlan, passes: Collection[PassName]) -> OperandCode:
    """The operands of a variant."""
    variant = plan.recipe.variant
    spec, has_sequences = variant.spec, variant.kind.ragged or variant.kind.cached
    return OperandCode(
        written=_written(variant, "o", "dq"),
        written_of_keys=_written(variant, "dk", "dv"),
        addressing=addressing_code(variant.kind.operands),
        sequence_code=sequence_code(variant.kind.operands, variant.head_dim) if variant.kind.ragged else (),
        of_sequences=tuple(fields_of_sequences(spec).items()) if has_sequences else (),
        arguments=cuda_fields(plan.recipe),
        params=tuple(
            Param(
                param_field(each.name),
                "float" if each.type is ScalarType.FLOAT else "int32_t",
                param_place_field(each.name),
            )
            for each in spec.params
        ),
        captured={name: count_code(count) for name, count in captured_elements(variant).items()},
        workspace=workspace_code(plan, passes),
    )


def _written(variant: Variant, *names: str) -> str:
    """The same for all of these that a variant's kernels write."""
    operands = variant.kind.operands
    elements = {operands[name].elements for name in names if name == "o" or not variant.kind.forward_only}
    assert len(elements) < 2, f"{' and '.join(names)} are of one type"
    return "float" if elements == {Elements.FLOAT32} else "T"
