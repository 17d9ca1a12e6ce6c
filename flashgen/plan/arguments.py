"""The argument struct of a kernel: one ordered list of fields that the emitter prints and the runtime fills.

In: an ``AttentionSpec``. Out: the fields of ``struct Arguments``, the same for every pass, head dimension and
element type of that spec. Pointers that a pass does not use are null. Names that come from the spec stand last,
behind a prefix that says what of them is meant (``tensor_slope``, ``stride0_slope``, ``param_bias``, ``grad_slope``),
so that none meets a field, a macro, a C++ keyword, or what is made of another name; build them with the functions
below. Fields in which calls of the same shapes differ come first: a repeated call packs these alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal as OneOf

from flashgen.analysis.selection import lowered
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, index_set, size, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.types import ScalarType
from flashgen.plan.operands import F8, HEAD_ROWS, OPERANDS, SLICES, TANGENT_GRADIENTS, TANGENTS, Operand, Rows

FieldKind = OneOf["const pointer", "pointer", "i32", "i64", "u32", "u64", "f32"]


# The dimensions of a tensor of which each pair has an element of its own, and how it is read.
_AXES_OF_PAIRS: Mapping[Expr, Expr] = {
    size(extent): index(name) for extent, name in (("B", "b"), ("H", "h"), ("Nq", "i"), ("Nk", "j"))
}


@dataclass(frozen=True)
class Field:
    """One member of ``struct Arguments``; ``element`` is the C type behind a pointer.

    ``varies``: calls of the same shapes, strides and types may differ in it.
    """

    name: str
    kind: FieldKind
    comment: str = ""
    element: str = "void"
    varies: bool = False


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


def argument_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """Every field of the struct, in order: those that vary first. Strides and dimensions count elements."""
    spec = lowered(spec)
    has_dropout = spec.dropout is not None
    varying = [
        *_tensors_of_a_call(),
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
    return tuple(fields)


def sliced_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels of some rows of o and dq, whose heads are further apart than they have rows."""
    rows = {each.name: _operand(each) for each in SLICES.values()}
    fields = (dataclasses.replace(rows.get(each.name, each), varies=each.varies) for each in argument_fields(spec))
    return (*fields, Field(HEAD_ROWS, "i64", "rows from one head's first to the next one's, of lse"))


def tangent_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels of forward mode; the spec is one ``with_tangents``."""
    return _with_rows(spec, TANGENTS)


def tangent_gradient_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels of its backward pass."""
    return _with_rows(spec, TANGENT_GRADIENTS)


def _with_rows(spec: AttentionSpec, operands: Mapping[str, Operand]) -> tuple[Field, ...]:
    fields = argument_fields(spec)
    varying = sum(each.varies for each in fields)
    rows = [dataclasses.replace(_operand(each), varies=True) for each in operands.values()]
    strides = [Field(name, "i64") for each in operands.values() for name in each.stride_fields]
    return (*fields[:varying], *rows, *fields[varying:], *strides)


# Of ragged batches: where sequences begin among which rows, and as long as one may be.
STARTS = {"q_starts": "q", "k_starts": "k and v"}
_MOST = {"q_most": "queries", "kv_most": "keys"}
# Of caches: where the rows of sequences lie, and the sizes of what they lie in.
PLACES = {
    "cache_lengths": "[batch]: the rows of each sequence in the cache",
    "cache_padding": "[batch]: those in front that are not its own; null: none",
    "cache_places": "[batch]: the entry of each sequence, where there are no pages; null: its number",
    "block_table": "[batch, table_columns]: the pages of each sequence; null where it has an entry",
}
FACTORS = {
    f"{name}_factors": f"[batch, kv_heads]: what {name} of 8 bits is multiplied by; null where by nothing"
    for name in ("k", "v")
}
_CACHE_SIZES = {
    "cache_entries": "entries of the cache, or its pages",
    "cache_rows": "of an entry, or of a page",
    "table_columns": "of block_table",
    "group_rows": "queries of all heads that share a key/value head, the rows of its tiles",
}
# Of caches, where the last block of a tile to come to its end merges parts: zero before and after each launch.
ARRIVALS = {"arrivals": "[blocks of one part]: how many parts of each are done; null: another kernel merges them"}
SPLITS = {
    "splits": "parts of a sequence's keys, by a block each",
    "merges": "1 where there are several, else 0",
    "merges_apart": "1 where a kernel of its own merges them",
}
_ELEMENTS = {"u32": "uint32_t", "f32": "float", "i32": "int32_t"}


def ragged_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels for ragged batches, whose lengths are those of all rows, and batch that of sequences."""
    starts = [
        Field(name, "const pointer", f"where sequences begin among the rows of {rows}, [batch + 1]", "int32_t", True)
        for name, rows in STARTS.items()
    ]
    most = [Field(name, "i64", f"{rows} that a sequence may have") for name, rows in _MOST.items()]
    return _with_sequences(spec, starts, most)


def cached_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels for caches, whose keys are as many as a sequence has room for.

    The last ones are decided when a call is scheduled, from the number of splits that was asked for.
    """
    places = [Field(name, "const pointer", comment, "int32_t", True) for name, comment in PLACES.items()]
    places += [Field(name, "const pointer", comment, "float", True) for name, comment in FACTORS.items()]
    places += [Field(name, "pointer", comment, "uint32_t", True) for name, comment in ARRIVALS.items()]
    sizes = [Field(name, "i64", comment) for name, comment in _CACHE_SIZES.items()]
    sizes.append(Field("key_element", "i32", "of k and v: as element, or 3, float8_e4m3fn"))
    return _with_sequences(spec, places, [*sizes, *(Field(each, "i32", says) for each, says in SPLITS.items())])


def f8_fields(spec: AttentionSpec) -> tuple[Field, ...]:
    """The same of kernels that multiply q, k and v of 8 bits, and what each of these is multiplied by."""
    fields = argument_fields(spec)
    varying = sum(each.varies for each in fields)
    factors = (_operand(each) for each in F8.values() if each.rows is Rows.PER_HEAD)
    return (*fields[:varying], *(dataclasses.replace(each, varies=True) for each in factors), *fields[varying:])


def _with_sequences(spec: AttentionSpec, places: list[Field], sizes: list[Field]) -> tuple[Field, ...]:
    """The fields of a call, where its sequences are, and tables of what changes with them."""
    fields = argument_fields(spec)
    comment = "[batch], where it follows from a sequence's lengths; else null"
    kinds = {each.name: each.kind for each in fields}
    tables = [
        Field(table, "const pointer", comment, _ELEMENTS[kinds[name]], True)
        for name, table in fields_of_sequences(spec).items()
    ]
    varying = sum(each.varies for each in fields)
    return (*fields[:varying], *places, *tables, *fields[varying:], *sizes)


def fields_of_sequences(spec: AttentionSpec) -> Mapping[str, str]:
    """The fields that may be other numbers for each sequence, dropout before params, and those of tables of these."""
    names = ("dropout_threshold", "dropout_scale") if spec.dropout is not None else ()
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


def _tensors_of_a_call() -> tuple[Field, ...]:
    workspace = Field("workspace", "pointer", "as many bytes as the _workspace function says")
    return (workspace, *(_operand(each) for each in OPERANDS.values()))


def _operand(each: Operand) -> Field:
    comment = f"{each.shape}, {each.says}" if each.says else each.shape
    return Field(each.name, "pointer" if each.is_written else "const pointer", comment, each.c_type)


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
