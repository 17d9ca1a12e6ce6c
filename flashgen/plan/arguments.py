"""The argument struct of a kernel: one ordered list of fields that the emitter prints and the runtime fills.

In: an ``AttentionSpec`` and a kind of call. Out: the fields of ``struct Arguments``, the same for every pass, head
dimension and element type of that spec. Pointers that a pass does not use are null. Names that come from the spec
stand last, behind a prefix that says what of them is meant (``tensor_slope``, ``stride0_slope``, ``param_bias``,
``grad_slope``), so that none meets a field, a macro, a C++ keyword, or what is made of another name; build them with
the functions below. Fields in which calls of the same shapes differ come first: a repeated call packs these alone.
"""

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.analysis.selection import lowered
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, index_set, size, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.types import ScalarType
from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.kind import Kind
from flashgen.kinds.operand import Field, operand_field

# The dimensions of a tensor of which each pair has an element of its own, and how it is read.
_AXES_OF_PAIRS: Mapping[Expr, Expr] = {
    size(extent): index(name) for extent, name in (("B", "b"), ("H", "h"), ("Nq", "i"), ("Nk", "j"))
}


def tensor_field(name: str) -> str:
    """The pointer to a captured tensor."""
    return f"tensor_{name}"


def stride_field(name: str, axis: int) -> str:
    """A captured tensor's stride, in elements."""
    return f"stride{axis}_{name}"


def dimension_field(name: str, axis: int) -> str:
    """A captured tensor's dimension."""
    return f"dim{axis}_{name}"


def param_field(name: str) -> str:
    """The value of a param."""
    return f"param_{name}"


def param_place_field(name: str) -> str:
    """The pointer to a param that is not known on the host."""
    return f"place_{name}"


def gradient_field(name: str) -> str:
    """The float32 buffer that receives the gradient of a tensor or param."""
    return f"grad_{name}"


def stored_field(name: str) -> str:
    """The buffer of a captured tensor's own type where each pair's gradient is stored instead of added to others."""
    return f"stored_{name}"


def stored_tensors(spec: AttentionSpec) -> tuple[CapturedTensor, ...]:
    """Those of 16 bits with a gradient of which each pair has an element of its own.

    It is a bias ``[B, H, Nq, Nk]``, in any order. One of float32 is what sums are made in.
    """
    return _of_pairs(spec, "bhij")


def summed_tensors(spec: AttentionSpec) -> tuple[CapturedTensor, ...]:
    """Those of which batch entries alone share elements: a bias ``[H, Nq, Nk]``, in any order.

    Kernels that add them up in turn store the sums, rounded once.
    """
    return _of_pairs(spec, "hij")


def _of_pairs(spec: AttentionSpec, axes: str) -> tuple[CapturedTensor, ...]:
    """Tensors of 16 bits with a gradient that are read once, where these axes say, each of them one of theirs."""
    roots = (spec.score, spec.mask, spec.weights.weight, spec.weights.sink)
    loads = {each for root in roots if root is not None for each in walk(root) if isinstance(each, Load)}

    def is_one(tensor: CapturedTensor) -> bool:
        reads = [each for each in loads if each.tensor == tensor.name]
        own = [_AXES_OF_PAIRS.get(extent) for extent in tensor.shape]
        wanted = {index(name) for name in axes}
        return len(reads) == 1 and list(reads[0].indices) == own and len(own) == len(axes) and set(own) == wanted

    return tuple(each for each in spec.tensors if each.grad and each.element.bytes == 2 and is_one(each))


def argument_fields(spec: AttentionSpec, kind: Kind = DENSE) -> tuple[Field, ...]:
    """Every field of the struct, in order: those that vary first. Strides and dimensions count elements."""
    spec = lowered(spec)
    has_dropout = spec.dropout is not None
    varying = [
        Field("workspace", "pointer", "as many bytes as the _workspace function says"),
        *(operand_field(kind.operands[name] if kind.rows_as_declared else each) for name, each in OPERANDS.items()),
        *(_dropout() if has_dropout else ()),
        *(_pointer_to(tensor) for tensor in spec.tensors),
        *(_value_of(param) for param in spec.params),
        *(_place_of(param) for param in spec.params),
        *(_gradient_of(each.name, "contiguous") for each in spec.tensors if each.grad),
        *(_gradient_of(each.name, "[1]") for each in spec.params if each.grad),
        *(_stored_gradient_of(each) for each in (*stored_tensors(spec), *summed_tensors(spec))),
    ]
    fields = [dataclasses.replace(each, varies=True) for each in varying]
    fields += () if has_dropout else _dropout()
    fields += [Field(name, "i64") for each in OPERANDS.values() for name in each.stride_fields]
    fields += [
        Field("element", "i32", "of q, k, v, o and their gradients: 0 float32, 1 bfloat16, 2 float16"),
        Field("threads", "i32"),
        Field("deterministic", "i32", "1: every gradient is bitwise repeatable"),
    ]
    fields += [Field(name, "i64", "of this shard") for name in ("batch", "heads", "kv_heads", "q_len", "kv_len")]
    fields += [Field(f"{name}_start", "i64", "of this shard in the whole") for name in ("b", "h", "q", "kv")]
    fields += [Field(f"{name}_total", "i64", "of the whole") for name in ("b", "h", "q", "kv")]
    for tensor in spec.tensors:
        axes = range(len(tensor.shape))
        fields += [Field(stride_field(tensor.name, axis), "i64") for axis in axes]
        fields += [Field(dimension_field(tensor.name, axis), "i64") for axis in axes]
    return fields_of_kind(fields, kind)


def fields_of_kind(dense: Sequence[Field], kind: Kind) -> tuple[Field, ...]:
    """The fields of a kind, by those of dense calls with its pointers to rows."""
    varying = [each for each in dense if each.varies]
    own = [*kind.pointers, *(_tables(varying) if kind.by_sequence else ())]
    return (*varying, *(dataclasses.replace(each, varies=True) for each in own), *dense[len(varying) :], *kind.sizes)


def _tables(varying: Sequence[Field]) -> list[Field]:
    """The tables of what may change from sequence to sequence."""
    comment = "[batch], where it follows from a sequence's lengths; else null"
    return [
        Field(table_field(each.name), "const pointer", comment, _ELEMENTS[each.kind])
        for each in varying
        if each.name in _DROPOUT_BY_SEQUENCE or each.name.startswith(param_field(""))
    ]


_DROPOUT_BY_SEQUENCE = ("dropout_threshold", "dropout_scale")
_ELEMENTS = {"u32": "uint32_t", "f32": "float", "i32": "int32_t"}


def fields_of_sequences(spec: AttentionSpec) -> Mapping[str, str]:
    """The fields that may be other numbers for each sequence, dropout before params, and those of tables of these."""
    names = _DROPOUT_BY_SEQUENCE if spec.dropout is not None else ()
    return {name: table_field(name) for name in (*names, *(param_field(each.name) for each in spec.params))}


def table_field(name: str) -> str:
    """The pointer to what a field is for each sequence."""
    return f"each_{name}"


# The fields from which kernels compute an index's values, and a size.
_INDEX_FIELDS = {"b": ("batch", "b_start"), "h": ("heads", "kv_heads", "h_start")}
_SIZE_FIELDS = {
    "B": ("b_total",),
    "H": ("h_total",),
    "Hkv": ("h_total", "heads", "kv_heads"),
    "Nq": ("q_total",),
    "Nk": ("kv_total",),
}


def mask_sizes(keep: Expr) -> tuple[str, ...]:
    """The integer fields, beside the lengths, on which the tiles of a mask over positions depend."""
    names = [each.name for each in walk(keep) if isinstance(each, Symbol) and each.kind is SymbolKind.SIZE]
    of_axes = [name for axis in ("b", "h") if axis in index_set(keep) for name in _INDEX_FIELDS[axis]]
    return tuple(dict.fromkeys(("q_start", "kv_start", *of_axes, *(x for name in names for x in _SIZE_FIELDS[name]))))


def mask_params(keep: Expr) -> tuple[str, ...]:
    """The params that a mask reads, by their names in the spec."""
    found = (each.name for each in walk(keep) if isinstance(each, Symbol) and each.kind is SymbolKind.PARAM)
    return tuple(dict.fromkeys(found))


def _dropout() -> tuple[Field, ...]:
    return (
        Field("dropout_threshold", "u32", "a pair is kept where its random word is not below this"),
        Field("dropout_scale", "f32", "1 / (1 - p)"),
        Field("seed", "u64"),
        Field("seed_at", "const pointer", "where the seed lies, if that is the memory of a GPU; else null", "uint64_t"),
    )


CAPTURED_TYPES = {
    "f32": "float",
    "f16": "fg::f16",
    "bf16": "fg::bf16",
    "i32": "int32_t",
    "i64": "int64_t",
    "bool": "bool",
}


def _pointer_to(tensor: CapturedTensor) -> Field:
    element = CAPTURED_TYPES[tensor.element.value]
    return Field(tensor_field(tensor.name), "const pointer", f"captured tensor, {tensor.element}", element)


def _value_of(param: Param) -> Field:
    return Field(param_field(param.name), "f32" if param.type is ScalarType.FLOAT else "i32", "param")


def _place_of(param: Param) -> Field:
    where = "where the param lies, if that is the memory of a GPU; else null"
    element = "float" if param.type is ScalarType.FLOAT else "int32_t"
    return Field(param_place_field(param.name), "const pointer", where, element)


def _gradient_of(name: str, form: str) -> Field:
    return Field(gradient_field(name), "pointer", f"{form}, zero at the start; null where not needed", "float")


def _stored_gradient_of(tensor: CapturedTensor) -> Field:
    comment = f"contiguous, {tensor.element}, zero at the start: pairs store theirs; null where they are added up"
    return Field(stored_field(tensor.name), "pointer", comment, CAPTURED_TYPES[tensor.element.value])


_TOTALS = {"B": "b_total", "H": "h_total", "Nq": "q_total", "Nk": "kv_total"}


def sizes_of_values(values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that captured tensors have in the call whose struct says ``values``, by their names in specs."""
    sizes = {size: int(values[field]) for size, field in _TOTALS.items()}
    sizes["Hkv"] = sizes["H"] // (int(values["heads"]) // int(values["kv_heads"]))
    return sizes


def params_of_values(spec: AttentionSpec, values: Mapping[str, Any]) -> dict[str, float]:
    """The params by their names in the spec: floats are float32 in ``struct Arguments``."""
    found = {param.name: values[param_field(param.name)] for param in spec.params}
    return {name: ctypes.c_float(x).value if isinstance(x, float) else x for name, x in found.items()}


def starts_of_values(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Which batch entry, head, query and key of the whole are the first of the call."""
    b, h, q, kv = (int(values[f"{axis}_start"]) for axis in ("b", "h", "q", "kv"))
    return b, h, q, kv
