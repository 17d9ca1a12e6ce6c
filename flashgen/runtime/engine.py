"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows
nothing of autograd or dispatch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.plan.arguments import gradient_field, param_field, tensor_field
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout
from flashgen.reference.philox import drop_threshold
from flashgen.runtime.call import Call, CallChecker
from flashgen.runtime.kernel import Kernel
from flashgen.runtime.signature import Signature

# A forked child must not use its parent's OpenMP threads: they are not there, and libgomp waits for them.
_PROCESS = os.getpid()


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of the operators, by what they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Sequence[Tensor]
    params: Sequence[Tensor | None]
    seed: Tensor | None
    dropout_p: Tensor | None
    offsets: Any
    deterministic: bool


class Engine:
    """Forward and backward of one spec, on kernels where there are some, else in slices of the reference.

    ``pairs`` bounds a slice; None runs the reference densely.
    """

    def __init__(
        self, spec: AttentionSpec, kernels: Mapping[HeadDim, Kernel] | None, pairs: int | None = tiled.SLICE_PAIRS
    ) -> None:
        self.spec = spec
        self.signature = Signature.of(spec)
        self._kernels = kernels
        self._pairs = pairs
        runs_reference = kernels is None and pairs is None
        self.checker = CallChecker(spec, kernels, any_dtype=runs_reference, cpu_only=not runs_reference)
        self._tensor_fields = [tensor_field(tensor.name) for tensor in spec.tensors]
        self._param_fields = [param_field(param.name) for param in spec.params]

    def forward(self, *args: Any) -> Any:
        """``o``, or ``(o, lse)`` where the spec has one."""
        a = self._arguments(args)
        call = self.checker(a.q, a.k, a.v, a.tensors, a.offsets)
        params = self.checker.params(call, a.params)
        dropout = self._dropout(call, a, params)
        if call.shard.is_empty:
            o = a.q.new_zeros(call.o_shape)
            empty = a.q.new_full(call.o_shape[:3], -math.inf, dtype=_lse_dtype(a.q))
            lse = empty if self.signature.has_lse else None
        elif call.kernel is None:
            o, lse = tiled.forward(self._problem(call, a, params, dropout))
            lse = None if lse is None else lse.to(_lse_dtype(a.q))
        else:
            o = torch.empty(call.o_shape, dtype=a.q.dtype)
            lse = torch.empty(call.o_shape[:3]) if self.signature.has_lse else None
            values = self._values(call, a, params, dropout)
            slots = call.kernel.layout.slots
            values[slots["o"]] = o.data_ptr()
            if lse is not None:
                values[slots["lse"]] = lse.data_ptr()
            threads = values[slots["threads"]]
            self._run(call, values, ("forward", threads), call.kernel.forward_workspace, call.kernel.forward)
        return o if lse is None else (o, lse)

    def backward(self, d_o: Tensor, *args: Any) -> list[Tensor]:
        """The gradients that ``needs``, the last argument, asks for, in the order of the inputs."""
        *inner, needs = args
        d_lse, o, lse = (None, None, None)
        if self.signature.has_lse:
            d_lse, o, lse, *inner = inner
        a = self._arguments(inner)
        call = self.checker(a.q, a.k, a.v, a.tensors, a.offsets)
        params = self.checker.params(call, a.params)
        dropout = self._dropout(call, a, params)
        inputs: list[Any] = [a.q, a.k, a.v, *a.tensors, *a.params]
        if call.shard.is_empty:
            wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
            return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in wanted]
        if call.kernel is None:
            with _deterministic(a.deterministic), _autograd_inside():
                found = tiled.backward(self._problem(call, a, params, dropout), d_o, d_lse, needs)
            gradients: list[Any] = found
        else:
            gradients = self._run_backward(call, a, params, dropout, d_o, d_lse, o, lse, needs)
        return [gradient.to(x.dtype) for x, gradient, need in zip(inputs, gradients, needs, strict=True) if need]

    def _run_backward(
        self,
        call: Call,
        a: Arguments,
        params: Sequence[float],
        dropout: Dropout | None,
        d_o: Tensor,
        d_lse: Tensor | None,
        o: Tensor | None,
        lse: Tensor | None,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        assert call.kernel is not None
        slots = call.kernel.layout.slots
        d_o = _unit_stride(d_o)
        d_lse = None if d_lse is None else d_lse.contiguous()
        values = self._values(call, a, params, dropout)
        for name, tensor in (("d_o", d_o), ("d_lse", d_lse), ("o", o), ("lse", lse)):
            values[slots[name]] = 0 if tensor is None else tensor.data_ptr()
        for axis, stride in zip("bhn", d_o.stride(), strict=False):
            values[slots[f"d_o_stride_{axis}"]] = stride
        gradients: list[Tensor | None] = []
        for name, x in (("dq", a.q), ("dk", a.k), ("dv", a.v)):
            buffer = torch.empty(x.shape, dtype=x.dtype)
            gradients.append(buffer)
            values[slots[name]] = buffer.data_ptr()
        for name, captured, need in zip(self.signature.names, (*a.tensors, *a.params), needs[3:], strict=True):
            if captured is None or not need:
                gradients.append(None)
                continue
            buffer = torch.zeros(captured.shape)
            gradients.append(buffer)
            values[slots[gradient_field(name)]] = buffer.data_ptr()
        key = ("backward", values[slots["threads"]], a.deterministic, tuple(needs[3:]))
        self._run(call, values, key, call.kernel.backward_workspace, call.kernel.backward)
        return gradients

    def _values(self, call: Call, a: Arguments, params: Sequence[float], dropout: Dropout | None) -> list[float]:
        """The values of the struct that both passes share."""
        assert call.kernel is not None
        assert call.static is not None
        values = list(call.static)
        slots = call.kernel.layout.slots
        values[slots["q"]] = a.q.data_ptr()
        values[slots["k"]] = a.k.data_ptr()
        values[slots["v"]] = a.v.data_ptr()
        for name, tensor in zip(self._tensor_fields, a.tensors, strict=True):
            values[slots[name]] = tensor.data_ptr()
        for name, value in zip(self._param_fields, params, strict=True):
            values[slots[name]] = value
        values[slots["threads"]] = torch.get_num_threads() if os.getpid() == _PROCESS else 1
        values[slots["deterministic"]] = a.deterministic
        values[slots["dropout_scale"]] = 1.0
        if dropout is not None:
            values[slots["dropout_threshold"]] = drop_threshold(dropout.probability)
            values[slots["dropout_scale"]] = 1.0 / (1.0 - dropout.probability)
            values[slots["seed"]] = int(dropout.seed)
        return values

    def _run(self, call: Call, values: list[float], key: object, workspace: Any, run: Any) -> None:
        assert call.kernel is not None
        pack = call.kernel.layout.pack
        needed = call.workspaces.get(key)
        if needed is None:
            needed = call.workspaces[key] = workspace(pack(*values))
        scratch = torch.empty(needed, dtype=torch.uint8)
        values[call.kernel.layout.slots["workspace"]] = scratch.data_ptr()
        run(pack(*values))

    def _arguments(self, args: Sequence[Any]) -> Arguments:
        q, k, v = (_unit_stride(x) for x in args[:3])
        tensors_end = 3 + len(self.spec.tensors)
        end = self.signature.inputs
        seed, dropout_p = args[end : end + 2] if self.signature.has_dropout else (None, None)
        return Arguments(
            q, k, v, args[3:tensors_end], args[tensors_end:end], seed, dropout_p, tuple(args[-9:-1]), args[-1]
        )

    def _dropout(self, call: Call, a: Arguments, params: Sequence[float]) -> Dropout | None:
        if not self.signature.has_dropout:
            return None
        probability = self.checker.drop_probability(call, a.dropout_p, params)
        if probability == 0.0:
            return None
        if a.seed is None:
            raise ValueError("dropout needs a seed")
        return Dropout(probability, int(a.seed.item()) & 0xFFFF_FFFF_FFFF_FFFF)

    def _problem(self, call: Call, a: Arguments, params: Sequence[float], dropout: Dropout | None) -> tiled.Problem:
        names = [param.name for param in self.spec.params]
        return tiled.Problem(
            spec=self.spec,
            q=a.q,
            k=a.k,
            v=a.v,
            tensors={declared.name: x for declared, x in zip(self.spec.tensors, a.tensors, strict=True)},
            params={name: value if x is None else x for name, value, x in zip(names, params, a.params, strict=True)},
            shard=call.shard,
            dropout=dropout,
            pairs=self._pairs,
        )


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` with its last dimension contiguous: itself, or a copy."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _autograd_inside() -> contextlib.AbstractContextManager[None]:
    """Lets the reference use autograd inside an operator, where the dispatcher has left autograd behind."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
    return guard  # type: ignore[no-any-return]


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
