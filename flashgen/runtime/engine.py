"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows nothing of
autograd or dispatch. Every call passes here, so the way to a kernel is kept short: what shapes determine comes ready
from ``call.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.plan.arguments import gradient_field, param_field, param_place_field, tensor_field
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout
from flashgen.reference.philox import drop_threshold
from flashgen.runtime.call import Call, CallChecker, is_readable
from flashgen.runtime.kernel import Kernel, KernelProvider, LibraryKernel, PassName
from flashgen.runtime.signature import Signature

# A forked child must not use its parent's OpenMP threads: they are not there, and libgomp waits for them for ever.
_IS_FORKED = threading.Event()
os.register_at_fork(after_in_child=_IS_FORKED.set)

# Workspaces up to this size are kept for the next call: fresh pages cost more than a small kernel.
_SPARE_BYTES = 1 << 22
_MOST_SPARE = 4

_ROWS = ("d_lse", "o", "lse")


class _Arguments(NamedTuple):
    """A checked call: tensors as kernels take them, and the values of params and dropout."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Sequence[Tensor] = ()
    given: Sequence[Tensor | None] = ()
    params: Sequence[float] = ()
    dropout: Dropout | None = None
    seed: Tensor | None = None  # where kernels fetch it, if they do


class Engine:
    """Forward and backward of one spec: on kernels, or on the reference.

    ``kernels`` holds a provider for each type of device that there are kernels for; None where the reference stands in,
    in slices of ``pairs``. ``pairs`` None runs the reference densely, on any device.
    """

    def __init__(
        self, spec: AttentionSpec, kernels: Mapping[str, KernelProvider | None], pairs: int | None = tiled.SLICE_PAIRS
    ) -> None:
        self.spec = spec
        self.signature = Signature.of(spec)
        self._pairs = pairs
        self._spare: list[Tensor] = []  # workspaces that no call is using; popping and appending are atomic
        self.checker = CallChecker(spec, kernels, is_reference=pairs is None)
        self._tensors_end = 3 + len(spec.tensors)
        self._is_plain = not (spec.tensors or spec.params or spec.dropout is not None)
        self._tensor_fields = [tensor_field(tensor.name) for tensor in spec.tensors]
        self._param_fields = [param_field(param.name) for param in spec.params]
        self._param_places = [param_place_field(param.name) for param in spec.params]

    def forward(self, *args: Any) -> Any:
        """``o``, or ``(o, lse)`` where the spec has one."""
        return self._forward(self._check(args), keeps_lse=True)

    def output(self, *args: Any) -> Any:
        """What ``forward`` gives; the lse may be None, as nobody asked for it."""
        a = self._check(args)
        return self._forward(a, keeps_lse=not isinstance(a.call.kernel, LibraryKernel))

    def _forward(self, a: _Arguments, *, keeps_lse: bool) -> Any:
        call, kernel = a.call, a.call.kernel
        if kernel is None or call.is_empty:
            return self._forward_without_kernel(a)
        values, slots = self._values(a, kernel), kernel.layout.slots
        if call.o_is_like_q:  # the faster way
            o = torch.empty_like(a.q, memory_format=torch.contiguous_format)
        else:
            o = torch.empty_strided(*call.o, dtype=a.q.dtype, device=call.device)
        values[slots["o"]] = o.data_ptr()
        has_lse, lse = self.signature.has_lse, None
        if has_lse and keeps_lse:
            lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
            values[slots["lse"]] = lse.data_ptr()
        self._run(a, kernel, "forward", values, None)
        return (o, lse) if has_lse else o

    def _forward_without_kernel(self, a: _Arguments) -> Any:
        has_lse, dtype = self.signature.has_lse, _lse_dtype(a.q)
        if a.call.is_empty:
            o = a.q.new_zeros(a.call.o[0])
            return (o, a.q.new_full(a.call.lse[0], -math.inf, dtype=dtype)) if has_lse else o
        o, lse = tiled.forward(self._problem(a))
        return o if lse is None else (o, lse.to(dtype))

    def backward(self, d_o: Tensor, *args: Any) -> list[Tensor]:
        """The gradients that ``needs``, the last argument, asks for, in the order of the inputs."""
        rows: tuple[Tensor | None, ...] = args[:3] if self.signature.has_lse else (None, None, None)
        needs = args[-1]
        a = self._check(args[3:-1] if self.signature.has_lse else args[:-1])
        if a.call.kernel is not None and not a.call.is_empty:
            return self._run_backward(a, a.call.kernel, d_o, rows, needs)
        inputs: list[Any] = [a.q, a.k, a.v, *a.tensors, *a.given]
        if a.call.is_empty:
            wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
            return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in wanted]
        with _deterministic(a.call.deterministic), _autograd_inside():
            gradients = tiled.backward(self._problem(a), d_o, rows[0], needs)
        return [
            gradient if gradient.dtype is x.dtype and gradient.device == x.device else gradient.to(x)
            for gradient, x in zip(gradients, inputs, strict=True)
            if gradient is not None
        ]

    def _run_backward(
        self,
        a: _Arguments,
        kernel: Kernel,
        d_o: Tensor,
        rows: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor]:
        """The gradients asked for, each like what it is the gradient of. ``rows`` are d_lse, o and lse."""
        d_o = _readable(kernel, d_o)
        values, slots = self._values(a, kernel), kernel.layout.slots
        strides = d_o.stride()
        values[slots["d_o"]] = d_o.data_ptr()
        values[slots["d_o_stride_b"]], values[slots["d_o_stride_h"]], values[slots["d_o_stride_n"]], _ = strides
        held = [None if x is None else x.contiguous() for x in rows]
        for name, x in zip(_ROWS, held, strict=True):
            if x is not None:
                values[slots[name]] = x.data_ptr()
        # Kernels write all three, asked for or not.
        dq = torch.empty_like(a.q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(a.k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(a.v, memory_format=torch.contiguous_format)
        values[slots["dq"]], values[slots["dk"]], values[slots["dv"]] = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        found = [x for x, need in zip((dq, dk, dv), needs, strict=False) if need]
        if self._is_plain:
            self._run(a, kernel, "backward", values, strides)
            return found
        # Kernels add to these in float32.
        sums: list[tuple[Tensor, Tensor]] = []
        for name, captured, need in zip(self.signature.names, (*a.tensors, *a.given), needs[3:], strict=True):
            if captured is not None and need:
                buffer = torch.zeros(captured.shape, dtype=torch.float32, device=a.call.device)
                values[slots[gradient_field(name)]] = buffer.data_ptr()
                sums.append((buffer, captured))
        self._run(a, kernel, "backward", values, (strides, *needs[3:]))
        return found + [x if x.dtype is like.dtype and x.device == like.device else x.to(like) for x, like in sums]

    def _run(self, a: _Arguments, kernel: Kernel, name: PassName, values: list[float], more: object) -> None:
        """One pass of a kernel, with the workspace that it takes; ``more`` is what it depends on beside the call."""
        slots = kernel.layout.slots
        key = (name, values[slots["threads"]], a.dropout is None, more)
        prepared = a.call.prepared.get(key)
        if prepared is None:
            prepared = a.call.prepared[key] = kernel.prepare(name, values)
        if prepared.workspace_bytes == 0:
            prepared.run(values)
            return
        keeps = a.q.is_cpu  # on a GPU the memory belongs to the stream, and PyTorch keeps what is freed
        scratch = self._spare.pop() if keeps and self._spare else None
        if scratch is None or scratch.numel() < prepared.workspace_bytes:
            scratch = torch.empty_strided((prepared.workspace_bytes,), (1,), dtype=torch.uint8, device=a.call.device)
        values[slots["workspace"]] = scratch.data_ptr()
        prepared.run(values)
        if keeps and scratch.numel() <= _SPARE_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(scratch)

    def _check(self, args: tuple[Any, ...]) -> _Arguments:
        """The arguments of the forward operator, checked."""
        q, k, v = args[:3]
        tensors, rest = args[3 : self._tensors_end], args[-9:]
        call = self.checker(q, k, v, tensors, rest)
        kernel = call.kernel
        if kernel is not None and (call.needs_copy or not _starts_well(kernel, q, k, v)):
            q, k, v = (_readable(kernel, x) for x in (q, k, v))
            call = self.checker(q, k, v, tensors, rest)
        if self._is_plain:
            return _Arguments(call, q, k, v)
        end = self.signature.inputs
        given = args[self._tensors_end : end]
        params = self.checker.params(call, given) if given else ()
        dropout, fetched = None, None
        if self.signature.has_dropout:
            seed, dropout_p = args[end : end + 2]
            probability = self.checker.drop_probability(call, dropout_p, params)
            if probability > 0.0:
                if seed is None:
                    raise ValueError("dropout needs a seed")
                if seed.dtype is torch.int64 and seed.dim() == 0 and self.checker.is_fetched(call, seed):
                    fetched = seed
                number = 0 if fetched is not None else int(seed.item()) & 0xFFFF_FFFF_FFFF_FFFF
                dropout = Dropout(probability, number)
        return _Arguments(call, q, k, v, tensors, given, params, dropout, fetched)

    def _values(self, a: _Arguments, kernel: Kernel) -> list[float]:
        """The values of ``struct Arguments`` that both passes share."""
        values = a.call.static.copy()
        slots = kernel.layout.slots
        values[slots["q"]] = a.q.data_ptr()
        values[slots["k"]] = a.k.data_ptr()
        values[slots["v"]] = a.v.data_ptr()
        values[slots["threads"]] = _threads()
        if self._is_plain:
            return values
        for name, tensor in zip(self._tensor_fields, a.tensors, strict=True):
            values[slots[name]] = tensor.data_ptr()
        for name, value in zip(self._param_fields, a.params, strict=True):
            values[slots[name]] = value
        for name, given in zip(self._param_places, a.given, strict=True):
            if given is not None and self.checker.is_fetched(a.call, given):
                values[slots[name]] = given.data_ptr()
        if a.dropout is not None:
            values[slots["dropout_threshold"]] = drop_threshold(a.dropout.probability)
            values[slots["dropout_scale"]] = 1.0 / (1.0 - a.dropout.probability)
            values[slots["seed"]] = int(a.dropout.seed)
            if a.seed is not None:
                values[slots["seed_at"]] = a.seed.data_ptr()
        return values

    def _problem(self, a: _Arguments) -> tiled.Problem:
        if _threads() != torch.get_num_threads():
            torch.set_num_threads(1)  # in a forked child, where PyTorch's own threads are missing just the same
        names = [param.name for param in self.spec.params]
        return tiled.Problem(
            spec=self.spec,
            q=a.q,
            k=a.k,
            v=a.v,
            tensors={declared.name: x for declared, x in zip(self.spec.tensors, a.tensors, strict=True)},
            params={name: value if x is None else x for name, value, x in zip(names, a.params, a.given, strict=True)},
            shard=a.call.shard,
            dropout=a.dropout,
            pairs=self._pairs,
        )


def _threads() -> int:
    return 1 if _IS_FORKED.is_set() else torch.get_num_threads()


def _starts_well(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the first rows lie where the kernel can read them."""
    alignment = kernel.row_alignment
    return alignment == 1 or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % alignment == 0


def _readable(kernel: Kernel, x: Tensor) -> Tensor:
    """``x`` as the kernel reads it: itself, or a copy."""
    return x if is_readable(kernel, x) else x.clone(memory_format=torch.contiguous_format)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _autograd_inside() -> contextlib.AbstractContextManager[None]:
    """Lets the reference use autograd inside an operator, where the dispatcher has left autograd behind."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    guard: contextlib.AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude)
    return guard


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms for the reference, which gathers and scatters by its operators."""
    before = torch.are_deterministic_algorithms_enabled()
    if before or not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
