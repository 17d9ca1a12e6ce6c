"""Runs generated kernels on the emulator by following their launches, as a differentiable function.

In: a variant, a plan, its source. Out: ``Kernels``, whose ``function`` takes what ``verification.results`` passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.variant import Variant
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import Pointwise
from flashgen.plan.arguments import argument_fields, gradient_field, param_field, tensor_field
from flashgen.plan.cuda_launches import backward_launches, forward_launches
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.plan.launches import PassLaunches
from flashgen.reference.dense import param_values
from flashgen.reference.philox import drop_threshold
from flashgen.reference.shard import Shard
from flashgen.runtime.call import _static
from flashgen.runtime.emulator import DeviceMemory, Program, Report, compile_program
from flashgen.runtime.kernel import ArgumentLayout
from flashgen.runtime.signature import TORCH_DTYPES

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Kernels:
    """One generated source on the emulator. ``reports`` collects what every launch says."""

    variant: Variant
    plan: CudaPlan
    source: KernelSource
    deterministic: bool = False
    seed: int = 0
    host_threads: int = 2
    shard: Mapping[str, int] = field(default_factory=dict)
    dropout: tuple[float, int] | None = None
    reports: list[tuple[str, Report]] = field(default_factory=list)
    _program: Program | None = None

    @property
    def program(self) -> Program:
        """The compiled source."""
        if self._program is None:
            self._program = compile_program(self.source.text, name=self.source.name)
        return self._program

    def function(self, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``o`` and ``lse``, differentiable."""
        names = [name for name in named if isinstance(named[name], Tensor)]
        plain = {name: value for name, value in named.items() if name not in names}
        o, lse = _Function.apply(self, names, plain, q, k, v, *(named[name] for name in names))  # type: ignore[no-untyped-call]
        return o, None if isinstance(self.variant.weights, Pointwise) else lse

    def forward(self, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The forward pass."""
        call = _Call(self, q, k, v, named)
        o_shape = (*q.shape[:3], v.shape[3])
        o = call.allocate("o", o_shape, q.dtype)
        lse = call.allocate("lse", o_shape[:3], torch.float32)
        dropped = self.dropout is not None
        call.run(forward_launches(self.source.symbol, self.variant, self.plan, call.element, dropped=dropped))
        return o(), lse()

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        named: Mapping[str, Any],
        rows: Mapping[str, Tensor | None],
        wanted: Sequence[str],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """dq, dk, dv and the gradients of what is wanted; ``rows`` are o, lse, d_o and d_lse."""
        call = _Call(self, q, k, v, named)
        for name, value in rows.items():
            if value is not None:
                call.put(name, value)
        d_o = rows["d_o"]
        assert d_o is not None
        for axis, stride in zip("bhn", d_o.stride(), strict=False):
            call.known[f"d_o_stride_{axis}"] = stride
        found = [call.allocate(f"d{name}", x.shape, x.dtype) for name, x in (("q", q), ("k", k), ("v", v))]
        captured = {name: call.zeros(gradient_field(name), named[name].shape) for name in wanted}
        call.run(
            backward_launches(
                self.source.symbol,
                self.variant,
                self.plan,
                call.element,
                dropped=self.dropout is not None,
                deterministic=self.deterministic,
                captured=bool(wanted),
            )
        )
        dq, dk, dv = (each() for each in found)
        return dq, dk, dv, {name: value() for name, value in captured.items()}


class _Call:
    """Device memory and the values of ``struct Arguments`` of one pass."""

    def __init__(self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any]) -> None:
        spec = kernels.variant.spec
        self.kernels = kernels
        self.memory = DeviceMemory()
        self.element = {dtype: each for each, dtype in TORCH_DTYPES.items()}[q.dtype]
        batch, heads, q_len, _ = q.shape
        shard = Shard(batch, heads, k.shape[1], q_len, k.shape[2], **kernels.shard)
        tensors = [named[tensor.name] for tensor in spec.tensors]
        self.known: dict[str, Any] = _static(spec, shard, q, k, v, tensors)
        for name, value in (("q", q), ("k", k), ("v", v)):
            self.put(name, value)
        for tensor, value in zip(spec.tensors, tensors, strict=True):
            self.put(tensor_field(tensor.name), value)
        given = {param.name: float(named[param.name]) for param in spec.params if param.name in named}
        sizes = shard.sizes(kernels.variant.head_dim.qk, kernels.variant.head_dim.v)
        for name, number in param_values(spec, given, sizes).items():
            self.known[param_field(name)] = number
        if kernels.dropout is not None:
            probability, seed = kernels.dropout
            self.known["dropout_threshold"] = drop_threshold(probability)
            self.known["dropout_scale"] = 1.0 / (1.0 - probability)
            self.known["seed"] = seed
        self.known["deterministic"] = int(kernels.deterministic)

    def put(self, name: str, value: Tensor) -> None:
        """A tensor as it lies in memory, strides and all."""
        value = value.detach()
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        flat = value.as_strided((extent,), (1,)).contiguous()
        words = flat.view(_WORDS[flat.element_size()])
        self.known[name] = self.memory.put(name, words.numpy().tobytes())

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Room for a result; call what comes back to read it."""
        count = torch.Size(shape).numel()
        self.known[name] = self.memory.allocate(name, count * dtype.itemsize)
        return lambda: torch.frombuffer(bytearray(self.memory.bytes_of(name)), dtype=dtype).view(tuple(shape))

    def zeros(self, name: str, shape: Sequence[int]) -> Callable[[], Tensor]:
        """The same, float32 and zero at the start."""
        count = torch.Size(shape).numel()
        self.known[name] = self.memory.put(name, bytes(4 * count))
        return lambda: torch.frombuffer(bytearray(self.memory.bytes_of(name)), dtype=torch.float32).view(tuple(shape))

    def run(self, launches: PassLaunches) -> None:
        """Every kernel of a pass, in order."""
        needed = launches.workspace_bytes(self.known)
        if needed:
            content = bytearray(b"\xff" * needed)
            places = launches.offsets(self.known)
            for buffer in launches.buffers:
                at, length = places[buffer.name]
                if buffer.clear:
                    content[at : at + length] = bytes(length)
            self.known["workspace"] = self.memory.put("workspace", bytes(content))
        layout = ArgumentLayout(argument_fields(self.kernels.variant.spec))
        arguments = layout.pack(*layout.values(self.known))
        arguments += bytes(-len(arguments) % 8)
        for each in launches.launches:
            blocks = each.grid.value(self.known)
            if blocks:
                report = self.kernels.program.launch(
                    each.kernel,
                    (blocks, 1, 1),
                    (each.threads, 1, 1),
                    each.shared_bytes,
                    arguments,
                    self.memory.allocations,
                    seed=self.kernels.seed,
                    host_threads=self.kernels.host_threads,
                )
                self.kernels.reports.append((each.kernel, report))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, names: list[str], plain: dict[str, Any], *tensors: Tensor) -> Any:
        q, k, v, *values = tensors
        named = {**plain, **dict(zip(names, values, strict=True))}
        o, lse = kernels.forward(q, k, v, named)
        ctx.save_for_backward(*tensors, o, lse)
        ctx.kernels, ctx.names, ctx.plain = kernels, names, plain
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_lse: Tensor) -> Any:
        q, k, v, *values, o, lse = ctx.saved_tensors
        named = {**ctx.plain, **dict(zip(ctx.names, values, strict=True))}
        needs = ctx.needs_input_grad[6:]
        wanted = [name for name, need in zip(ctx.names, needs, strict=True) if need]
        rows = {"o": o, "lse": lse, "d_o": d_o.contiguous(), "d_lse": d_lse.contiguous()}
        dq, dk, dv, captured = ctx.kernels.backward(q, k, v, named, rows, wanted)
        others = [captured[name].to(named[name].dtype) if name in captured else None for name in ctx.names]
        return None, None, None, dq, dk, dv, *others
