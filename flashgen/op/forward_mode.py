"""Runs kernels of forward mode and of its backward pass: o, lse and what both change by, of one dense problem.

In: a ``Kernel`` of forward mode, a ``Problem`` and the tangents of its inputs. Out: fresh tensors. What an op's
derivatives are made of comes here where such a kernel takes it (``by_kernels.py``), and else goes by the tiled path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.analysis.selection import lowered
from flashgen.analysis.tangent import tangent_names, with_tangents
from flashgen.hosts.kernel import ArgumentLayout, Kernel, Prepared, Values
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.types import ScalarType
from flashgen.op.call import readable, row_strides, settled_values, strides_of
from flashgen.op.layouts import layout_like
from flashgen.plan.arguments import gradient_field, param_field, param_place_field, tensor_field
from flashgen.reference.philox import drop_threshold, survivor_scale
from flashgen.reference.tiled import Problem

_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
_ROWS = ("q", "k", "v")
_T_ROWS = tuple(f"t_{name}" for name in _ROWS)
_MOST_REMEMBERED = 64  # passes of an op


@dataclass(frozen=True)
class Moved:
    """``o``, ``lse`` and its parts, and the tangents; None: not asked for, or there are none."""

    o: Tensor | None
    lse: Tensor | None
    lse_parts: Tensor | None
    t_o: Tensor
    t_lse: Tensor | None


@dataclass(frozen=True)
class Arriving:
    """What arrives at the tangents of o and lse; None: nothing. ``d_o`` is in the type of q, the other in float32."""

    d_o: Tensor | None
    d_lse: Tensor | None


# Gradients by the number of the input that they are of, or whose tangent they are of.
Gradients = tuple[dict[int, Tensor], dict[int, Tensor]]


class ForwardMode:
    """The kernels of forward mode of one spec, which read a tangent beside each float of it."""

    def __init__(self, spec: AttentionSpec) -> None:
        own = lowered(spec)
        self.spec, self._names = with_tangents(own), tangent_names(own)
        captured: tuple[CapturedTensor | Param, ...] = (*own.tensors, *own.params)
        # The captured values that have gradients, by their numbers among the inputs.
        self._learned = {n: each.name for n, each in enumerate(captured, start=len(_ROWS)) if each.grad}
        self.differentiable = frozenset((*range(len(_ROWS)), *self._learned))
        self._remembered: dict[Any, _Ready] = {}

    def run(
        self,
        kernel: Kernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        *,
        deterministic: bool = False,
        keeps_o: bool = False,
    ) -> Moved:
        """The tangents of o and lse, by those of ``problem.inputs``, in their order; None: 0.

        o and its tangent are in the type of q, the others in float32; ``keeps_o``: o and lse are wanted, too.
        """
        q, like_o = problem.q, layout_like(problem.q, (*problem.q.shape[:-1], problem.v.shape[-1]))
        has_lse = problem.spec.weights.form.normalised

        def rows(wanted: bool, *more: int) -> Tensor | None:
            return q.new_empty((*q.shape[:-1], *more), dtype=torch.float32) if wanted else None

        found = Moved(
            o=q.new_empty_strided(*like_o) if keeps_o else None,
            lse=rows(has_lse and keeps_o),
            lse_parts=rows(has_lse and keeps_o, 2),
            t_o=q.new_empty_strided(*like_o),
            t_lse=rows(has_lse),
        )
        results = {"o": found.o, "lse": found.lse, "lse_parts": found.lse_parts, "t_o": found.t_o, "t_lse": found.t_lse}
        own = _Pass("forward", kernel.layout, functools.partial(kernel.prepare, "forward"))
        self._run(own, problem, self._read(kernel, problem, tangents), results, tangents, deterministic)
        return found

    def backward(
        self,
        kernel: Kernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        moved: Moved,
        arriving: Arriving,
        wanted: tuple[Collection[int], Collection[int]],
        *,
        deterministic: bool = False,
    ) -> Gradients:
        """The gradients of inputs and of tangents, those that are ``wanted`` by their numbers among the inputs.

        All of these are ``differentiable``. ``moved`` is what ``run`` gives of all there is. Those of q, k and v are in
        their type, others in float32.
        """
        of_inputs, of_tangents = _fresh(problem), _fresh(problem) if wanted[1] else {}
        written: dict[str, Tensor | None] = {f"d{name}": of_inputs[n] for n, name in enumerate(_ROWS)}
        written |= {f"d_t_{name}": of_tangents.get(n) for n, name in enumerate(_ROWS)}
        of_moves = {n: self._names[name] for n, name in self._learned.items()}
        written |= _captured(problem, of_inputs, wanted[0], self._learned)
        written |= _captured(problem, of_tangents, wanted[1], of_moves)
        written |= {"t_o": moved.t_o, "t_lse": moved.t_lse}
        own = _Pass("backward", kernel.layout, functools.partial(kernel.prepare, "backward"))
        self._differentiate(own, kernel, problem, tangents, moved, arriving, written, deterministic)
        return of_inputs, of_tangents

    def linear(
        self,
        kernel: Kernel,
        problem: Problem,
        moved: Moved,
        arriving: Arriving,
        wanted: Collection[int],
        *,
        deterministic: bool = False,
    ) -> dict[int, Tensor]:
        """The gradients of o and lse, by the backward pass of the op, of what arrives there; else as above.

        They are those of tangents, too: forward mode is linear in these.
        """
        found = _fresh(problem)
        written: dict[str, Tensor | None] = {f"d{name}": found[n] for n, name in enumerate(_ROWS)}
        written |= _captured(problem, found, wanted, self._learned)
        own = _Pass("linear", kernel.layout, functools.partial(kernel.prepare, "backward"))
        still = [None] * len(problem.inputs)
        self._differentiate(own, kernel, problem, still, moved, arriving, written, deterministic)
        return found

    def _differentiate(
        self,
        own: _Pass,
        kernel: Kernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        moved: Moved,
        arriving: Arriving,
        written: Mapping[str, Tensor | None],
        deterministic: bool,
    ) -> None:
        """A backward pass, of what arrives at o and lse or at their tangents."""
        d_o = moved.t_o.new_zeros(()).expand(moved.t_o.shape) if arriving.d_o is None else arriving.d_o
        d_lse = None if arriving.d_lse is None else arriving.d_lse.contiguous()
        read = self._read(kernel, problem, tangents) | {"d_o": readable(kernel, d_o)}
        results = {"o": moved.o, "lse": moved.lse, "lse_parts": moved.lse_parts, "d_lse": d_lse, **written}
        self._run(own, problem, read, results, tangents, deterministic)

    def _read(self, kernel: Kernel, problem: Problem, tangents: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """What a kernel reads, whose strides it is told, by fields: q, k, v, their tangents, and what is captured."""
        found: dict[str, Tensor | None] = {}
        for name, x in zip(_ROWS, (problem.q, problem.k, problem.v), strict=True):
            found[name] = readable(kernel, x)
        for name, x in problem.tensors.items():
            found[tensor_field(name)] = x
        if _T_ROWS[0] not in kernel.layout.slots:  # the op's own
            return found
        for name, tangent in zip(_T_ROWS, tangents, strict=False):
            found[name] = None if tangent is None else readable(kernel, tangent)
        for (name, x), tangent in zip(problem.tensors.items(), tangents[len(_ROWS) :], strict=False):
            if name in self._names:
                found[tensor_field(self._names[name])] = _like_nothing(x) if tangent is None else tangent
        return found

    def _run(
        self,
        own: _Pass,
        problem: Problem,
        read: Mapping[str, Tensor | None],
        results: Mapping[str, Tensor | None],
        tangents: Sequence[Tensor | None],
        deterministic: bool,
    ) -> None:
        """One pass, with a workspace on the device of q. What follows from all but addresses and numbers is remembered.

        As ``Kernel.prepare`` says, it may depend on which pointers and numbers are there.
        """
        numbers = self._numbers(problem, tangents[len(_ROWS) + len(problem.tensors) :], own.layout)
        threads = torch.get_num_threads()
        key = (
            *(own.layout, own.name, problem.shard, problem.q.dtype, deterministic, threads),
            *(None if x is None else x.stride() for x in read.values()),
            *((name, x is None or x.stride()) for name, x in results.items()),
            *((name, x != 0) for name, x in numbers.items()),
        )
        held: list[Tensor] = []
        ready = self._remembered.get(key)
        if ready is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            known = self._settled(problem, read, results) | {"threads": threads, "deterministic": deterministic}
            ready = self._remembered[key] = _ready(own, known, read, results, numbers)
        values: list[float] = [0] * own.layout.varying
        for n, (slot, x) in enumerate(zip(ready.tensors, (*read.values(), *results.values()), strict=True)):
            if x is not None:
                values[slot] = x.data_ptr()
                if not values[slot] and n < len(read):  # no elements: kernels read one zero, whatever the index
                    held.append(x.new_zeros(1))
                    values[slot] = held[-1].data_ptr()
        for slot, number in zip(ready.numbers, numbers.values(), strict=True):
            values[slot] = number
        workspace = torch.empty(ready.prepared.workspace_bytes, dtype=torch.uint8, device=problem.q.device)
        values[0] = workspace.data_ptr()
        ready.prepared.run(values)

    def _settled(
        self, problem: Problem, read: Mapping[str, Tensor | None], results: Mapping[str, Tensor | None]
    ) -> dict[str, Any]:
        """The values of fields that do not vary, by name."""
        q, k, v = (_there(read[name]) for name in _ROWS)
        tensors = {each: read[tensor_field(each.name)] for each in self.spec.tensors if tensor_field(each.name) in read}
        spec = dataclasses.replace(self.spec, tensors=tuple(tensors))
        known = settled_values(spec, problem.shard, q, k, v, [_there(x) for x in tensors.values()])
        for name, x in (*((name, read.get(name)) for name in (*_T_ROWS, "d_o")), *results.items()):
            known |= {} if x is None or x.dim() < 4 else row_strides(name, strides_of(x))
        return known

    def _numbers(self, problem: Problem, tangents: Sequence[Tensor | None], layout: ArgumentLayout) -> dict[str, float]:
        """The numbers that kernels are told, by fields: of params, of their tangents and of dropout."""
        known: dict[str, float] = {}
        dropout = problem.dropout
        if dropout is not None and dropout.probability > 0.0:
            threshold = drop_threshold(dropout.probability)
            known = {"dropout_threshold": threshold, "dropout_scale": survivor_scale(threshold)}
            if isinstance(dropout.seed, Tensor) and dropout.seed.is_cuda:  # kernels fetch it, so that nobody waits
                known["seed_at"] = dropout.seed.data_ptr()
            else:
                known["seed"] = int(dropout.seed) & _SEED_BITS
        if self.spec.params:
            known |= {name: x for name, x in self._params(problem, tangents).items() if name in layout.slots}
        return known

    def _params(self, problem: Problem, tangents: Sequence[Tensor | None]) -> Mapping[str, float]:
        """The values of params and of their tangents."""
        given = dict(problem.params)
        for (name, _), tangent in zip(problem.params.items(), tangents, strict=True):
            if name in self._names:
                given[self._names[name]] = 0.0 if tangent is None else tangent
        known: dict[str, float] = {}
        for each in self.spec.params:
            value = given[each.name]
            if isinstance(value, Tensor) and value.is_cuda:
                known[param_place_field(each.name)] = value.data_ptr()
            else:
                known[param_field(each.name)] = _number(each, value)
        return known


class _Pass(NamedTuple):
    """What a pass is prepared by."""

    name: str
    layout: ArgumentLayout
    prepare: Callable[[Values], Prepared]


class _Ready(NamedTuple):
    """A pass that was prepared, and the slots of what varies, in the order in which it comes."""

    prepared: Prepared
    tensors: Sequence[int]
    numbers: Sequence[int]


def _ready(
    own: _Pass,
    known: Mapping[str, Any],
    read: Mapping[str, Tensor | None],
    results: Mapping[str, Tensor | None],
    numbers: Mapping[str, float],
) -> _Ready:
    slots, tensors = own.layout.slots, {**read, **results}
    addresses = {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}
    prepared = own.prepare(own.layout.values({**known, **addresses, **numbers}))
    return _Ready(prepared, [slots[name] for name in tensors], [slots[name] for name in numbers])


def _fresh(problem: Problem) -> dict[int, Tensor]:
    """What kernels write of q, k and v, asked for or not."""
    rows = (problem.q, problem.k, problem.v)
    return {n: problem.q.new_empty_strided(*layout_like(x, x.shape)) for n, x in enumerate(rows)}


def _captured(
    problem: Problem, found: dict[int, Tensor], wanted: Collection[int], names: Mapping[int, str]
) -> dict[str, Tensor | None]:
    """What kernels add gradients of captured values to, by field; they join those that were ``found``."""
    for n in wanted:
        if n in names:
            x = problem.inputs[n]
            shape = x.shape if isinstance(x, Tensor) else ()
            found[n] = torch.zeros(shape, dtype=torch.float32, device=problem.q.device)
    return {gradient_field(names[n]): found[n] for n in wanted if n in names}


def _number(param: Param, value: Tensor | float) -> float:
    number = value.detach() if isinstance(value, Tensor) else value
    return int(number) if param.type is ScalarType.INT else float(number)


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _like_nothing(x: Tensor) -> Tensor:
    """The tangent of what does not move: one zero, whatever the index."""
    return x.new_zeros(()).expand(x.shape)
