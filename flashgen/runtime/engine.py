"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows nothing of
autograd or dispatch. Every call passes here, so the way to a kernel is kept short: what shapes determine comes ready
from ``call.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
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
from flashgen.runtime.kernel import Kernel, KernelProvider, PassName
from flashgen.runtime.signature import Signature

# A forked child must not use its parent's OpenMP threads: they are not there, and libgomp waits for them for ever.
_PROCESS = os.getpid()

# Workspaces up to this size are kept for the next call: fresh pages cost more than a small kernel.
_SPARE_BYTES = 1 << 22
_MOST_SPARE = 4


class _Arguments(NamedTuple):
    """A checked call: tensors as kernels take them, and the values of params and dropout."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Sequence[Tensor]
    given: Sequence[Tensor | None]
    params: Sequence[float]
    dropout: Dropout | None
    seed: Tensor | None  # where kernels fetch it, if they do
    deterministic: bool


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
        self._params_end = self.signature.inputs
        self._tensor_fields = [tensor_field(tensor.name) for tensor in spec.tensors]
        self._param_fields = [param_field(param.name) for param in spec.params]
        self._param_places = [param_place_field(param.name) for param in spec.params]

    def forward(self, *args: Any) -> Any:
        """``o``, or ``(o, lse)`` where the spec has one."""
        a = self._check(args)
        call, kernel = a.call, a.call.kernel
        lse = None
        if call.shard.is_empty:
            o = a.q.new_zeros(call.o_shape)
            if self.signature.has_lse:
                lse = a.q.new_full(call.o_shape[:3], -math.inf, dtype=_lse_dtype(a.q))
        elif kernel is None:
            o, lse = tiled.forward(self._problem(a))
            lse = None if lse is None else lse.to(_lse_dtype(a.q))
        else:
            o = torch.empty(call.o_shape, dtype=a.q.dtype, device=a.q.device)
            values = self._values(a, kernel)
            slots = kernel.layout.slots
            values[slots["o"]] = o.data_ptr()
            if self.signature.has_lse:
                lse = torch.empty(call.o_shape[:3], device=a.q.device)
                values[slots["lse"]] = lse.data_ptr()
            self._run(a, kernel, "forward", values, ())
        return o if lse is None else (o, lse)

    def backward(self, d_o: Tensor, *args: Any) -> list[Tensor]:
        """The gradients that ``needs``, the last argument, asks for, in the order of the inputs."""
        *inner, needs = args
        d_lse, o, lse = (None, None, None)
        if self.signature.has_lse:
            d_lse, o, lse, *inner = inner
        a = self._check(inner)
        inputs: list[Any] = [a.q, a.k, a.v, *a.tensors, *a.given]
        if a.call.shard.is_empty:
            wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
            return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in wanted]
        if a.call.kernel is None:
            with _deterministic(a.deterministic), _autograd_inside():
                gradients = tiled.backward(self._problem(a), d_o, d_lse, needs)
        else:
            gradients = self._run_backward(a, a.call.kernel, d_o, (d_lse, o, lse), needs)
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
        rows: tuple[Tensor | None, Tensor | None, Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of q, k, v in their type and of the rest in float32; None where not asked for."""
        d_o = _readable(kernel, d_o)
        d_lse, o, lse = (None if x is None else x.contiguous() for x in rows)
        device = a.q.device
        values, slots = self._values(a, kernel), kernel.layout.slots
        for name, tensor in (("d_o", d_o), ("d_lse", d_lse), ("o", o), ("lse", lse)):
            values[slots[name]] = 0 if tensor is None else tensor.data_ptr()
        values[slots["d_o_stride_b"]], values[slots["d_o_stride_h"]], values[slots["d_o_stride_n"]], _ = d_o.stride()
        # Kernels write all three, asked for or not.
        buffers = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in (a.q, a.k, a.v)]
        for name, buffer in zip(("dq", "dk", "dv"), buffers, strict=True):
            values[slots[name]] = buffer.data_ptr()
        gradients = [buffer if need else None for buffer, need in zip(buffers, needs, strict=False)]
        for name, captured, need in zip(self.signature.names, (*a.tensors, *a.given), needs[3:], strict=True):
            if captured is None or not need:
                gradients.append(None)
                continue
            buffer = torch.zeros(captured.shape, device=device)
            gradients.append(buffer)
            values[slots[gradient_field(name)]] = buffer.data_ptr()
        self._run(a, kernel, "backward", values, (*needs[3:], d_o.stride()))
        return gradients

    def _run(
        self, a: _Arguments, kernel: Kernel, name: PassName, values: list[float], more: tuple[object, ...]
    ) -> None:
        """One pass of a kernel, with the workspace that it takes; ``more`` is what it depends on beside the call."""
        slots = kernel.layout.slots
        key = (name, values[slots["threads"]], a.deterministic, a.dropout is None, more)
        prepared = a.call.prepared.get(key)
        if prepared is None:
            prepared = a.call.prepared[key] = kernel.prepare(name, values)
        if prepared.workspace_bytes == 0:
            prepared.run(values)
            return
        keeps = a.q.is_cpu  # on a GPU the memory belongs to the stream, and PyTorch keeps what is freed
        scratch = self._spare.pop() if keeps and self._spare else None
        if scratch is None or scratch.numel() < prepared.workspace_bytes:
            scratch = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=a.q.device)
        values[slots["workspace"]] = scratch.data_ptr()
        prepared.run(values)
        if keeps and scratch.numel() <= _SPARE_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(scratch)

    def _check(self, args: Sequence[Any]) -> _Arguments:
        """The arguments of the forward operator, checked."""
        end = self._params_end
        q, k, v = args[:3]
        tensors, given = args[3 : self._tensors_end], args[self._tensors_end : end]
        offsets = tuple(args[-9:-1])
        call = self.checker(q, k, v, tensors, offsets)
        kernel = call.kernel
        if kernel is not None and (
            call.needs_copy or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % kernel.row_alignment
        ):
            q, k, v = (_readable(kernel, x) for x in (q, k, v))
            call = self.checker(q, k, v, tensors, offsets)
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
        return _Arguments(call, q, k, v, tensors, given, params, dropout, fetched, args[-1])

    def _values(self, a: _Arguments, kernel: Kernel) -> list[float]:
        """The values of ``struct Arguments`` that both passes share."""
        values = a.call.static.copy()
        slots = kernel.layout.slots
        values[slots["q"]] = a.q.data_ptr()
        values[slots["k"]] = a.k.data_ptr()
        values[slots["v"]] = a.v.data_ptr()
        for name, tensor in zip(self._tensor_fields, a.tensors, strict=True):
            values[slots[name]] = tensor.data_ptr()
        for name, value in zip(self._param_fields, a.params, strict=True):
            values[slots[name]] = value
        for name, given in zip(self._param_places, a.given, strict=True):
            if given is not None and self.checker.is_fetched(a.call, given):
                values[slots[name]] = given.data_ptr()
        values[slots["threads"]] = _threads()
        values[slots["deterministic"]] = a.deterministic
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
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


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
