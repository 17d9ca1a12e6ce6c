"""What kernels are called with: operands and where their rows lie, ``struct Arguments``, the workspace.

In: the plan of a variant in one element type, the passes. Out: ``operands`` in templates. No
template computes a stride: of each operand C++ functions of ``struct Arguments`` say where rows are read and written.
In ragged batches and over caches kernels see one sequence at a time; in the former ``sequence_code`` moves the pointers
to it. Over caches rows are counted from the first sequence's where they are asked for, so that nothing is computed
ahead of the first keys that they do without. There a tile has the queries of all heads that share a key/value head,
head by head within each position, and finds keys through a sequence's entry or pages:
``templates/cuda/cached.cuh.jinja`` has these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from flashgen.analysis.variant import Variant
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ScalarType
from flashgen.kinds.kind import PassName
from flashgen.kinds.operand import HEAD_ROWS, Elements, Operand, Rows
from flashgen.plan.arguments import fields_of_sequences, param_field, param_place_field
from flashgen.targets.gpu.launches import captured_elements
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.gpu.workspace import count_code, workspace_code


def operand_code(plan: GpuPlan, passes: Collection[PassName]) -> dict[str, object]:
    """Rows of q, k, v and o of a variant, and all other arguments."""
    variant = plan.recipe.variant
    spec, has_sequences = variant.spec, variant.kind.ragged or variant.kind.cached
    return {
        # The type of elements of o and dq, and of dk and dv: T, that of the call, or another.
        "written": _written(variant, "o", "dq"),
        "written_of_keys": _written(variant, "dk", "dv"),
        "addressing": addressing_code(variant.kind.operands),
        "sequence_code": sequence_code(variant.kind.operands, variant.head_dim) if variant.kind.ragged else (),
        # Fields, and those of their tables.
        "of_sequences": tuple(fields_of_sequences(spec).items()) if has_sequences else (),
        "arguments": cuda_fields(plan.recipe),
        # Names and types in C++, and the fields that say where they lie.
        "params": tuple(
            {
                "name": param_field(each.name),
                "c_type": "float" if each.type is ScalarType.FLOAT else "int32_t",
                "place": param_place_field(each.name),
            }
            for each in spec.params
        ),
        # The elements of each that has a gradient, by the field that receives it.
        "captured": {name: count_code(count) for name, count in captured_elements(variant).items()},
        "workspace": workspace_code(plan, passes),
    }


def _written(variant: Variant, *names: str) -> str:
    """The C type of all of these operands that a variant's kernels write."""
    operands = variant.kind.operands
    elements = {operands[name].elements for name in names if name == "o" or not variant.kind.forward_only}
    assert len(elements) < 2, f"{' and '.join(names)} are of one type"
    return "float" if elements == {Elements.FLOAT32} else "T"


def addressing_code(operands: Mapping[str, Operand]) -> str:
    """Where a head begins, the rows from there on, and one row; of rows that are packed how far heads are apart."""
    if operands["k"].rows is Rows.CACHED:
        return "\n".join((*_of_cache(operands), _of_group(operands["q"], operands["o"])))
    strided = [each for each in operands.values() if each.rows.has_strides]
    found = (_by_row(each) if each.by_row else _strided(each) for each in strided)
    return "\n".join((_rows_apart(operands["lse"]), *found))


def sequence_code(operands: Mapping[str, Operand], head_dim: HeadDim) -> tuple[str, ...]:
    """Statements that move the pointers of ``a`` to a sequence's rows, which begin at ``q_begin`` and ``kv_begin``."""
    return tuple(_moved(each, head_dim) for each in operands.values())


def _strided(each: Operand) -> str:
    by_batch, by_head, by_row = (f"a.{field}" for field in each.stride_fields)
    name, pair = each.name, "const Arguments& a, int64_t b, int64_t h"
    return f"""// {name} {each.shape}: where a head begins, in elements; the rows of a tile from there on; one row.
FG_DEVICE int first_of_{name}({pair}) {{ return int(b * {by_batch} + h * {by_head}); }}
template <class T> FG_DEVICE fg::GlobalRows<T> rows_of_{name}(const Arguments& a, int first) {{
  return fg::global_rows<T>(a.{name}, first, {by_row});
}}
template <class T> FG_DEVICE const T* row_of_{name}({pair}, int64_t n) {{
  return static_cast<const T*>(a.{name}) + b * {by_batch} + h * {by_head} + n * {by_row};
}}"""


def _by_row(each: Operand) -> str:
    by_batch, by_head, by_row = (f"a.{field}" for field in each.stride_fields)
    name, place = each.name, "const Arguments& a, int64_t b, int64_t h, int64_t n"
    element = "float" if each.elements is Elements.FLOAT32 else "T"  # whatever T is
    element = element if each.is_written else f"const {element}"
    code = f"""// {name} {each.shape}: one row; those of a head from one on.
template <class T> FG_DEVICE {element}* row_of_{name}({place}) {{
  return static_cast<{element}*>(a.{name}) + b * {by_batch} + h * {by_head} + n * {by_row};
}}
template <class T> FG_DEVICE fg::StridedRows<{element}> rows_of_{name}({place}) {{
  return {{row_of_{name}<T>(a, b, h, n), {by_row}}};
}}"""
    return code + _by_number(each, element) if each.of_queries else code


def _by_number(each: Operand, element: str) -> str:
    """Heads are counted through the batch, of which kernels for ragged batches see one entry."""
    batch = "0" if each.rows.is_packed else "unsigned(head) / unsigned(a.heads)"
    return f"""
template <class T> FG_DEVICE fg::StridedRows<{element}> rows_of_{each.name}(const Arguments& a, int head, int n) {{
  const int b = {batch};
  return rows_of_{each.name}<T>(a, b, head - b * int(a.heads), n);
}}"""


def _rows_apart(lse: Operand) -> str:
    length = {Rows.PACKED_HEADS: "q_rows", Rows.SLICED: HEAD_ROWS}.get(lse.rows, "q_len")
    return (
        "// lse, and what else is one number a row: from one head's to the next one's.\n"
        f"FG_DEVICE int64_t rows_apart(const Arguments& a) {{ return a.{length}; }}"
    )


def _moved(each: Operand, head_dim: HeadDim) -> str:
    begin = "a.q_begin" if each.of_queries else "a.kv_begin"
    row = f"call.{each.stride_fields[2]}" if each.rows.has_strides else str(each.columns(head_dim))
    element = "float" if each.elements is Elements.FLOAT32 else "T"
    return f"a.{each.name} = fg::moved<{element}>(call.{each.name}, {begin} * {row});"


def _of_cache(operands: Mapping[str, Operand]) -> Iterator[str]:
    for each in operands.values():
        if each.rows is not Rows.CACHED:
            continue
        name, (by_entry, by_head, by_row) = each.name, (f"a.{field}" for field in each.stride_fields)
        yield f"""// {name} {each.shape}: where a head begins in an entry or page, in elements; the sequence's rows.
FG_DEVICE int first_of_{name}(const Arguments& a, int64_t, int64_t h) {{ return int(h * {by_head}); }}
template <class T> FG_DEVICE fg::CachedRows<T> rows_of_{name}(const Arguments& a, int first) {{
  return cached_rows<T>(a, a.{name}, first, {by_entry}, {by_row});
}}"""


def _of_group(q: Operand, o: Operand) -> str:
    by_batch, by_head, by_row = (f"a.{field}" for field in q.stride_fields)
    o_by_batch, o_by_head, o_by_row = (f"a.{field}" for field in o.stride_fields)
    return f"""// q and o, of the block's sequence {q.shape[4:]}: the rows of the heads of a key/value head.
FG_DEVICE int first_of_q(const Arguments& a, int64_t, int64_t h) {{ return int(h * {by_head}); }}
template <class T> FG_DEVICE fg::GroupRows<const T> rows_of_q(const Arguments& a, int first) {{
  return {{static_cast<const T*>(a.q) + (a.sequence * {by_batch} + first), group_of(a), 0, {by_head}, {by_row}}};
}}
template <class T> FG_DEVICE fg::GroupRows<T> rows_of_o(const Arguments& a, int kv_head, int first) {{
  T* const begin = static_cast<T*>(a.o) + a.sequence * {o_by_batch} + int64_t(kv_head) * group_of(a) * {o_by_head};
  return {{begin, group_of(a), first, {o_by_head}, {o_by_row}}};
}}
// The number of one of these rows in lse.
FG_DEVICE int64_t query_row(const Arguments& a, int kv_head, int row) {{
  const int group = group_of(a), n = int(fg::position_of(row, group));
  return (a.sequence * a.heads + kv_head * group + (row - n * group)) * a.q_len + n;
}}"""
