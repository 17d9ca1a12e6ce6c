"""Checks a call, once for each combination of shapes, and keeps what follows from them.

In: the tensors of a call and its offsets. Out: a ``Call``: the shard, the sizes, the defaults of params,
the part of ``struct Arguments`` that shapes and strides determine; a ``KindCall``, as an engine runs it. Errors name
the argument, what was expected and what came.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, contiguous_format, get_num_threads

from flashgen.analysis.selection import lowered, selection_of
from flashgen.hosts.kernel import Kernel, KernelProvider, Node, Prepared, Stored
from flashgen.ir.expr import Expr, Symbol, SymbolKind, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.op.checks import CHECKS, Checks, Indices, check_captured_type
from flashgen.op.conversion import Offsets, check_scalar
from flashgen.op.lengths import LengthChecks
from flashgen.op.selected import read_by_kernels
from flashgen.op.signature import ELEMENTS, F8, TORCH_DTYPES, dtype_of, kind
from flashgen.op.tensor_kinds import Layout, NoMemoryError, by_axis, layout_like, packed_layout, type_of_sums
from flashgen.plan.arguments import dimension_field, stride_field
from flashgen.reference import tiled
from flashgen.reference.dense import drop_probability, param_values
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

# The first arguments of the operators: q, k, v, captured tensors, params, seed and dropout_p, and those of the kind.
Tensors = tuple[Any, ...]
# d_lse, then what the forward pass saved: o, lse and its parts.
Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# o, lse and its parts, [B, H, Nq, 2]: what lse cannot hold of rows whose scores are extreme, a maximum of these and the
# logarithm in base 2 of the sum of what exp gives of them less that. 0 and 0 for other rows. Only kernels read it.
Attended = tuple[Tensor, Tensor | None, Tensor | None]
# The last arguments of the operator: offsets, and whether gradients are to be bitwise repeatable.
Rest = tuple[Offsets, bool]

_KERNEL_DTYPES = (ElementType.F32, ElementType.BF16, ElementType.F16)
_MOST_REMEMBERED = 512

# A forked child must not use its parent's OpenMP threads: they are not there, and libgomp waits for them for ever.
# Not empty in a child; every call asks.
FORKS: list[int] = []
os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))


@dataclass(frozen=True, eq=False)
class Call:
    """What follows from the shapes, strides, types and device of a call, and from its last arguments.

    ``o``, ``lse`` and ``lse_parts`` are shapes and strides, ``gradients`` those of dq, dk and dv; ``written`` is the
    type of o and of these gradients; ``o_is_like_q``: torch.empty_like(q) lies as o does. ``fixed`` are the values of
    ``struct Arguments`` behind those that vary; empty where no kernel runs. ``needs_copy``: the kernel cannot read q, k
    or v with these strides; ``may_copy``: or perhaps not at their addresses. ``needs_lse`` and ``writes_parts`` are
    those of the ``Kernel``. ``reads_nothing``: a captured tensor has no elements, so that its strides are 0 and one
    zero stands for all. Remembered are, once known: ``forward`` passes with and without dropout, ``backward`` passes by
    ``backward_key``, the defaults of ``params``, the node of autograd in C++ or None in ``nodes``, and in ``stored``
    the captured tensors whose gradients kernels store.
    """

    shard: Shard
    head_dim: HeadDim
    sizes: Mapping[str, int]
    is_empty: bool
    deterministic: bool
    written: torch.dtype
    o: Layout
    o_is_like_q: bool
    lse: Layout
    lse_parts: Layout
    gradients: tuple[Layout, Layout, Layout]
    device: torch.device
    is_on_cpu: bool
    kernel: Kernel | None
    fixed: tuple[float, ...]
    needs_copy: bool
    may_copy: bool
    needs_lse: bool
    writes_parts: bool
    reads_nothing: bool
    threads: int
    forward: dict[object, Prepared] = field(default_factory=dict)
    backward: dict[object, Prepared] = field(default_factory=dict)
    params: dict[object, tuple[float, ...]] = field(default_factory=dict)
    nodes: list[Node | None] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)


def backward_key(
    drops: bool, strides: Sequence[int], needs: Sequence[bool] = (), places: Sequence[object] = ()
) -> tuple[object, ...]:
    """By what ``Call.backward`` remembers a pass.

    ``strides`` are those of d_o, ``needs`` says which captured tensors' gradients are wanted, and ``places`` where
    results lie that are parts of others.
    """
    return (drops, strides, places, *needs)


class CallChecker:
    """Turns calls of one op and kind into ``Call``s; remembers those of recent shapes. ``checks.py`` says how kinds
    differ. ``of_kernels`` is the spec whose captured tensors kernels read, with bits in the place of lists of keys.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Mapping[str, KernelProvider | None],
        kind: Kind = DENSE,
        *,
        is_reference: bool,
    ) -> None:
        self.spec, self.kind, self.of_kernels = spec, kind, spec if kind.lists else lowered(spec)
        self._selection = None if kind.lists else selection_of(spec)
        self._kernels, self.has_kernels = kernels, bool(kernels)
        self._is_reference = is_reference
        allowed = [each for each in _KERNEL_DTYPES if spec.dtypes is None or each in spec.dtypes]
        self.dtypes = tuple(TORCH_DTYPES[each] for each in allowed)
        self._accepted = (*self.dtypes, torch.float64) if is_reference else self.dtypes
        if kind.parts:  # calls of 16 bits may have been widened
            self._accepted = tuple(dict.fromkeys((*self._accepted, torch.float32)))
        self._known: dict[object, Call] = {}
        self._last: tuple[object, Call | None] = (None, None)
        self.checks = CHECKS.get(kind.name, Checks())
        self.indices = Indices(spec)
        self.lengths = LengthChecks(spec, self.indices)
        self._captured_end = 3 + len(spec.tensors)
        defaults = [param.default for param in spec.params if param.default is not None]
        self._learned = _reads_params(*defaults)
        self._host_params = self._learned or (spec.dropout is not None and _reads_params(spec.dropout))

    def find(self, tensors: Sequence[Any], rest: Rest) -> Call:
        """The call of q, k, v and the captured tensors, which ``tensors`` begin with.

        Raises ``ValueError`` or ``TypeError``.
        """
        q, k, v = tensors[0], tensors[1], tensors[2]  # a slice takes longer
        threads = 1 if FORKS else get_num_threads()
        # A contiguous tensor's strides follow from its shape, but for dimensions of 1, where none is used. To ask for
        # a device makes an object; to hash a key takes longer than to compare it with the last one.
        key: tuple[object, ...] = (
            q.dtype, q.shape, q.is_contiguous() or q.stride(), q.is_cpu or q.device,
            k.dtype, k.shape, k.is_contiguous() or k.stride(), k.is_cpu or k.device,
            v.dtype, v.shape, v.is_contiguous() or v.stride(), v.is_cpu or v.device, rest, threads,
        )  # fmt: skip
        captured: Sequence[Tensor] = ()
        if self._captured_end > 3:
            captured = tensors[3 : self._captured_end]
            key += tuple([(x.dtype, x.shape, x.is_contiguous() or x.stride(), x.is_cpu or x.device) for x in captured])
        last, call = self._last
        if call is not None and key == last:
            return call
        call = self._known.get(key)
        if call is None:
            call = self._check(q, k, v, captured, rest, threads)
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = call
        self._last = (key, call)
        return call

    def read(self, tensors: Sequence[Tensor], sizes: Mapping[str, int], *, in_memory: bool = True) -> Sequence[Tensor]:
        """What kernels read in the place of captured tensors, in the order of ``of_kernels``."""
        if self._selection is None:
            return tensors
        named = {each.name: x for each, x in zip(self.spec.tensors, tensors, strict=True)}
        return tuple(read_by_kernels(self._selection, named, sizes, in_memory=in_memory).values())

    def is_fetched(self, call: Call, value: Tensor | None) -> bool:
        """Whether kernels fetch a param or seed from a GPU's memory themselves, so that the host waits for nothing."""
        return value is not None and value.is_cuda and call.kernel is not None and value.device == call.device

    def params(self, call: Call, given: Sequence[Tensor | None]) -> tuple[float, ...]:
        """The value of every param, defaults filled in; 0 for those that kernels fetch.

        Raises ``ValueError`` or ``TypeError``.
        """
        values: list[float | None] = []
        for param, value in zip(self.spec.params, given, strict=True):
            if value is not None:
                wanted = dtype_of(param)
                if value.dtype is not wanted:
                    raise TypeError(
                        f"param '{param.name}' is {value.dtype}; the spec declares {kind(param)} ({wanted})"
                    )
                check_scalar(value, f"param '{param.name}'", call.device)
            fetched = not self._host_params and self.is_fetched(call, value)
            values.append(None if value is None else 0 if fetched else value.item())
        found = self._with_defaults(call, values)
        if self.indices.ask_params(call.head_dim):
            each = zip(self.spec.params, given, found, strict=True)
            on_host = {
                param.name: x for param, value, x in each if self._host_params or not self.is_fetched(call, value)
            }
            self.indices.check(call.head_dim, call.sizes, on_host)
        return found

    def _with_defaults(self, call: Call, values: Sequence[float | None]) -> tuple[float, ...]:
        if None not in values:
            return tuple(values)  # type: ignore[arg-type]
        key = tuple(values) if self._learned else tuple(value is None for value in values)
        known = call.params.get(key)
        if known is None:
            names = (param.name for param in self.spec.params)
            present = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            known = tuple(param_values(self.spec, present, call.sizes).values())
            if len(call.params) >= _MOST_REMEMBERED:
                call.params.clear()
            call.params[key] = known
        return tuple(default if value is None else value for value, default in zip(values, known, strict=True))

    def drop_probability(self, call: Call, given: Tensor | None, params: Sequence[float]) -> float:
        """The drop probability in force. Raises ``ValueError`` outside [0, 1)."""
        if given is not None:
            check_scalar(given, "'dropout_p'", call.device)
        names = (param.name for param in self.spec.params)
        return probability_in_force(self.spec, dict(zip(names, params, strict=True)), call.sizes, given)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], rest: Rest, threads: int) -> Call:
        shard, sizes = self.checks.shapes(self.spec, q, k, v, tensors, rest[0])
        if q.is_meta:
            raise NoMemoryError("tensors on 'meta' hold no numbers")
        head_dim = HeadDim(q.shape[-1], v.shape[-1])
        if head_dim not in self.spec.head_dims:
            dims = ", ".join(str(each) for each in self.spec.head_dims)
            stated = f"'{self.spec.name}' is built for {dims}, as its statement `head_dim` says"
            raise ValueError(f"the head dimension is {head_dim}; {stated}")
        self.check_types(q, k, v, tensors)
        kernel = self.kernel(q, v)
        if not self.kind.by_sequence:  # else by the lengths of each sequence
            self.indices.check(head_dim, sizes)
        fixed: Sequence[float] = ()
        written = self.written(q.dtype)
        o = self.layout(q, (*q.shape[:-1], v.shape[-1]))
        gradients = self.layout(q, q.shape), self.layout(k, k.shape), self.layout(v, v.shape)
        read: Sequence[Tensor] = ()
        if kernel is not None:
            read = self.read(tensors, sizes, in_memory=False)
            known = fixed_values(self.of_kernels, shard, q, k, v, read)
            for name, layout in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True):
                known |= row_strides(name, layout[1])
            known |= {"deterministic": rest[1], "threads": threads, **self.checks.fixed(shard, q, k, rest[0])}
            fixed = kernel.layout.values(known)[kernel.layout.varying :]
        needs_copy = kernel is not None and not all(
            kernel.reads(x.shape, x.stride(), x.element_size()) for x in (q, k, v)
        )
        rows = self.kind.rows(q)
        return Call(
            shard,
            head_dim,
            sizes,
            # A ragged batch may have lengths, and no rows.
            shard.is_empty or (self.kind.ragged and 0 in (q.shape[0], k.shape[0])),
            rest[1],
            written,
            o,
            written is q.dtype and q.shape == o[0] and torch.empty_like(q, device="meta").stride() == o[1],
            packed_layout(*rows),
            packed_layout(*rows, 2),
            gradients,
            q.device,
            q.is_cpu,
            kernel,
            tuple(fixed),
            needs_copy,
            needs_copy or (kernel is not None and kernel.row_alignment > 1),
            kernel is not None and kernel.needs_lse and not self.kind.forward_only,
            kernel is not None and kernel.writes_parts and not self.kind.f8,
            any(x.numel() == 0 for x in read),
            threads,
        )

    def kernel(self, q: Tensor, v: Tensor) -> Kernel | None:
        """The kernel of these calls. Parts in the type of their sums take that of dense calls."""
        dense = self.dense_kernel(q, v)
        if dense is None or self.kind is DENSE or (self.kind.parts and self.written(q.dtype) is q.dtype):
            return dense
        return dense.of(self.kind)

    def dense_kernel(self, q: Tensor, v: Tensor) -> Kernel | None:
        """The kernel of dense calls of tensors like these, if there is one."""
        provider, head_dim = self._kernels.get(q.device.type), HeadDim(q.shape[-1], v.shape[-1])
        if provider is None or head_dim not in self.spec.head_dims:
            return None
        return provider(head_dim, q.device.index or 0)

    def check_types(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` and ``TypeError`` for types and devices that the op is not built for."""
        alike = self.checks.of_one_type(self.spec, self.dtypes, q, k, v)  # none if each was checked
        for name, tensor in zip(self.checks.keys_and_values, alike[1:], strict=False):
            if tensor.dtype is not q.dtype:
                together = "q, {} and {}".format(*self.checks.keys_and_values)
                raise TypeError(f"'{name}' is {tensor.dtype}, but 'q' is {q.dtype}; {together} share one type")
        if alike and q.dtype not in self._accepted:
            known = ", ".join(str(each) for each in self._accepted)
            hint = "; 8 bits are for dense calls, and for the caches of op.decode" if q.dtype is F8 else ""
            raise TypeError(f"q, k and v are {q.dtype}; '{self.spec.name}' is built for {known}{hint}")
        if not self._is_reference and q.device.type not in self._kernels:
            known = " and ".join(kind.upper() for kind in self._kernels)
            raise ValueError(
                f"q, k and v are on {q.device}; this build of '{self.spec.name}' runs on {known} tensors "
                "(backend='reference' runs on any device)"
            )
        for declared, tensor in zip(self.spec.tensors, tensors, strict=True):
            check_captured_type(declared, tensor)

    def written(self, dtype: torch.dtype) -> torch.dtype:
        """The type of o and of gradients for this type of q, k and v."""
        if self.kind.parts:
            return type_of_sums(dtype)
        return dtype if self.kind.o is None else TORCH_DTYPES[self.kind.o]

    def layout(self, x: Tensor, shape: Sequence[int]) -> Layout:
        """The layout of a result of this shape that belongs to ``x``; of parts, which are added up, contiguous."""
        return packed_layout(*shape) if self.kind.parts else layout_like(x, shape)


def probability_in_force(
    spec: AttentionSpec, params: Mapping[str, float], sizes: Mapping[str, int], given: Tensor | None = None
) -> float:
    """The drop probability that is given, or else the spec's. Raises ``ValueError`` outside [0, 1)."""
    probability = drop_probability(spec, params, sizes) if given is None else float(given.item())
    if not 0.0 <= probability < 1.0:
        name = "dropout" if given is None else "dropout_p"
        raise ValueError(f"'{name}' is {probability}; a drop probability lies in [0, 1)")
    return probability


def is_readable(kernel: Kernel, x: Tensor) -> bool:
    """Whether a kernel can read this tensor where it is."""
    if x.data_ptr() % kernel.row_alignment:
        return False
    # A copy of a contiguous tensor would lie no better.
    return x.is_contiguous() or kernel.reads(x.shape, x.stride(), x.element_size())


def readable(kernel: Kernel, x: Tensor) -> Tensor:
    """A tensor that a kernel can read: itself, or a copy."""
    return x if is_readable(kernel, x) else x.clone(memory_format=contiguous_format)


def row_strides(name: str, strides: Sequence[int]) -> dict[str, int]:
    """The strides of an operand, as ``by_axis`` has them."""
    b, h, n = by_axis(strides)[:3]
    return {f"{name}_stride_b": b, f"{name}_stride_h": h, f"{name}_stride_n": n}


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor; those of a contiguous one as its shape says."""
    return packed_layout(*x.shape)[1] if x.is_contiguous() else x.stride()


def _reads_params(*roots: Expr) -> bool:
    return any(isinstance(node, Symbol) and node.kind is SymbolKind.PARAM for node in walk(*roots))


def fixed_values(
    spec: AttentionSpec, shard: Shard, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]
) -> dict[str, Any]:
    """The values of ``struct Arguments`` that shapes, strides and types determine."""
    b_total, h_total, q_total, kv_total = shard.totals()
    known: dict[str, Any] = {
        "element": ELEMENTS[q.dtype],
        "batch": shard.batch, "heads": shard.heads, "kv_heads": shard.kv_heads,
        "q_len": shard.q_len, "kv_len": shard.kv_len,
        "b_start": shard.b_start, "h_start": shard.h_start, "q_start": shard.q_start, "kv_start": shard.kv_start,
        "b_total": b_total, "h_total": h_total, "q_total": q_total, "kv_total": kv_total,
    }  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        known |= row_strides(name, strides_of(tensor))
    for declared, tensor in zip(spec.tensors, tensors, strict=True):
        strides = strides_of(tensor) if tensor.numel() else (0,) * tensor.dim()  # whatever the index: one zero
        for axis, (length, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
            known[stride_field(declared.name, axis)] = stride
            known[dimension_field(declared.name, axis)] = length
    return known


# Gives the view that one problem has of a tensor of the call, by the tensor's place.
View = Callable[[Place, Any], Any]
# A dense problem of a call: the number of its sequence, its shard, q, k and v, and its view.
OneProblem = tuple[int, Shard, Tensors, View]


@dataclass(frozen=True)
class KindCall:
    """A checked call, the tensors of a dense one, and its last arguments; ``ragged.py``, ``cached.py`` and
    ``eight_bits.py`` make those of their kinds. ``pointers`` are the values of the kind's pointer fields.
    """

    call: Call
    tensors: Tensors
    rest: Rest
    pointers: list[int]

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """The lengths of each sequence, of queries and of keys, where the host knows them."""
        return ()

    def problems(self, spec: AttentionSpec) -> Iterator[OneProblem]:
        """The problems whose results are not zero: one, or one for each sequence."""
        if not tiled.gives_nothing(spec, self.call.shard):
            yield 0, self.call.shard, self.tensors, lambda _place, x: x

    def widened(self, dtypes: Sequence[torch.dtype]) -> Tensors | None:  # noqa: ARG002 - subclasses read it
        """Tensors in one of these types for a dense call where no kernel takes 8 bits; None for other kinds."""
        return None

    def finish(self, o: Tensor, lse: Tensor | None) -> None:
        """Write the rows of o and lse that kernels leave out."""

    def finish_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the rows of gradients that kernels leave out."""
