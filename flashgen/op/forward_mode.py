"""Runs kernels of forward mode and of its backward pass: o, lse and their tangents, of one dense problem.

In: a ``Kernel`` of forward mode, a ``Problem`` and the tangents of its inputs. Out: fresh tensors. A ``Program`` of an
op's derivatives runs here where such a kernel takes it, and else by the tiled path. Gradients of gradients are
gradients of tangents (``programs.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.selection import lowered
from flashgen.analysis.tangent import tangent_names, with_tangents
from flashgen.hosts.kernel import ArgumentLayout, Kernel, Prepared
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.types import ScalarType
from flashgen.kinds.kind import PassName
from flashgen.op.call import fixed_values, readable, row_strides, strides_of
from flashgen.op.selected import lowered_tensors
from flashgen.op.tensor_kinds import layout_like, lies_in_memory, with_memory
from flashgen.plan.arguments import gradient_field, param_field, param_place_field, tensor_field
from flashgen.reference.philox import drop_threshold, survivor_scale
from flashgen.reference.programs import Of, Program, TangentGradient
from flashgen.reference.tiled import Problem

_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
_ROWS = ("q", "k", "v")
_T_ROWS = tuple(f"t_{name}" for name in _ROWS)
_MOST_REMEMBERED = 64  # passes of an op


@dataclass(frozen=True)
class Tangents:
    """``o``, ``lse`` and its parts, and the tangents; None: not asked for, or there are none."""

    o: Tensor | None
    lse: Tensor | None
    lse_parts: Tensor | None
    t_o: Tensor
    t_lse: Tensor | None


# The gradients that arrive at the tangents of o and lse, in the type of q and in float32; None: zero.
Arriving = tuple[Tensor | None, Tensor | None]
# Gradients of inputs, and gradients of tangents of inputs, each by the number of the input.
Gradients = tuple[dict[int, Tensor], dict[int, Tensor]]


def as_kernels_read(problem: Problem) -> Problem:
    """The problem with the captured tensors of kernels, too."""
    if problem.spec.select is None:
        return problem
    sizes = problem.shard.sizes(problem.q.shape[-1], problem.v.shape[-1])
    return replace(problem, tensors={**problem.tensors, **lowered_tensors(problem.spec, problem.tensors, sizes)})


class ForwardMode:
    """The kernels of forward mode of one spec, which read a tangent beside each float of it."""

    def __init__(self, spec: AttentionSpec) -> None:
        own = lowered(spec)
        self.spec, self._names = with_tangents(own), tangent_names(own)
        captured: tuple[CapturedTensor | Param, ...] = (*spec.tensors, *spec.params)
        self._read_by_kernels = tuple(each.name for each in own.tensors)
        # The captured values that have gradients, by their numbers among the inputs.
        self._learned = {n: each.name for n, each in enumerate(captured, start=len(_ROWS)) if each.grad}
        self.differentiable = frozenset((*range(len(_ROWS)), *self._learned))
        self._remembered: dict[Any, Prepared] = {}

    def run(
        self,
        kernel: Kernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        *,
        deterministic: bool = False,
        keeps_o: bool = False,
    ) -> Tangents:
        """The tangents of o and lse, by those of ``problem.inputs``, in their order; None: 0.

        o and its tangent are in the type of q, the others in float32; ``keeps_o``: o and lse are wanted, too.
        """
        q, like_o = problem.q, layout_like(problem.q, (*problem.q.shape[:-1], problem.v.shape[-1]))
        has_lse = problem.spec.weights.form.normalised

        def rows(wanted: bool, *more: int) -> Tensor | None:
            return q.new_empty((*q.shape[:-1], *more), dtype=torch.float32) if wanted else None

        found = Tangents(
            o=q.new_empty_strided(*like_o) if keeps_o else None,
            lse=rows(has_lse and keeps_o),
            lse_parts=rows(has_lse and keeps_o, 2),
            t_o=q.new_empty_strided(*like_o),
            t_lse=rows(has_lse),
        )
        self._run(
            kernel, problem, self._read(kernel, problem, tangents), vars(found), tangents, "forward", deterministic
        )
        return found

    def backward(
        self,
        kernel: Kernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        moved: Tangents,
        arriving: Arriving,
        wanted: tuple[Collection[int], Collection[int]],
        *,
        deterministic: bool = False,
    ) -> Gradients:
        """The gradients of inputs and of tangents, those that are ``wanted`` by their numbers among the inputs.

        All wanted inputs are ``differentiable``. ``moved`` is the result of ``run``. Gradients of q, k and v are
        in their type, others in float32. Given a dense ``kernel``, ``arriving`` is what arrives at o and lse.
        """
        of_inputs, of_tangents = _fresh(problem), _fresh(problem) if wanted[1] else {}
        written: dict[str, Tensor | None] = {f"d{name}": of_inputs[n] for n, name in enumerate(_ROWS)}
        written |= {f"d_t_{name}": of_tangents.get(n) for n, name in enumerate(_ROWS)}
        of_moves = {n: self._names[name] for n, name in self._learned.items()}
        written |= _captured(problem, of_inputs, wanted[0], self._learned)
        written |= _captured(problem, of_tangents, wanted[1], of_moves)
        d_o, d_lse = arriving
        d_o = moved.t_o.new_zeros(()).expand(moved.t_o.shape) if d_o is None else d_o
        read = self._read(kernel, problem, tangents) | {"d_o": readable(kernel, d_o)}
        results = {**vars(moved), "d_lse": None if d_lse is None else d_lse.contiguous(), **written}
        self._run(kernel, problem, read, results, tangents, "backward", deterministic)
        return of_inputs, of_tangents

    def _read(self, kernel: Kernel, problem: Problem, tangents: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """The tensors that a kernel reads, by fields: q, k, v, their tangents, captured tensors and their tangents."""
        found: dict[str, Tensor | None] = {}
        for name, x in zip(_ROWS, (problem.q, problem.k, problem.v), strict=True):
            found[name] = readable(kernel, x)
        for name in self._read_by_kernels:
            found[tensor_field(name)] = problem.tensors[name]
        if _T_ROWS[0] not in kernel.layout.slots:  # the op's own
            return found
        for name, tangent in zip(_T_ROWS, tangents, strict=False):
            found[name] = None if tangent is None else readable(kernel, tangent)
        for each, tangent in zip(problem.spec.tensors, tangents[len(_ROWS) :], strict=False):
            if each.name in self._names:
                x = problem.tensors[each.name]
                zero = x.new_zeros(())  # one number, whatever the index
                found[tensor_field(self._names[each.name])] = zero.expand(x.shape) if tangent is None else tangent
        return found

    def _run(
        self,
        kernel: Kernel,
        problem: Problem,
        read: Mapping[str, Tensor | None],
        results: Mapping[str, Tensor | None],
        tangents: Sequence[Tensor | None],
        name: PassName,
        deterministic: bool,
    ) -> None:
        """Run one pass, with a workspace on the device of q. Prepared passes are remembered.

        A prepared pass holds for other addresses and numbers, as long as the same ones are zero (``Kernel.prepare``).
        """
        layout = kernel.layout
        results = {field: x for field, x in results.items() if field in layout.slots}
        numbers = self._numbers(problem, tangents[len(_ROWS) + len(problem.spec.tensors) :], layout)
        threads = torch.get_num_threads()
        key = (
            *(layout, name, problem.shard, problem.q.dtype, deterministic, threads),
            *(None if x is None else x.stride() for x in read.values()),
            *((field, x is None or x.stride()) for field, x in results.items()),
            *((field, x != 0) for field, x in numbers.items()),
        )
        held: list[Tensor] = []
        ready = self._remembered.get(key)
        if ready is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            known = self._fixed(problem, read, results) | {"threads": threads, "deterministic": deterministic}
            known |= {field: 0 if x is None else x.data_ptr() for field, x in {**read, **results}.items()}
            ready = self._remembered[key] = kernel.prepare(name, layout.values(known | numbers))
        values: list[float] = [0] * layout.varying
        for n, (field, x) in enumerate((*read.items(), *results.items())):
            if x is not None:
                slot = layout.slots[field]
                values[slot] = x.data_ptr()
                if not values[slot] and n < len(read):  # no elements: kernels read one zero, whatever the index
                    held.append(x.new_zeros(1))
                    values[slot] = held[-1].data_ptr()
        for field, number in numbers.items():
            values[layout.slots[field]] = number
        workspace = torch.empty(ready.workspace_bytes, dtype=torch.uint8, device=problem.q.device)
        values[0] = workspace.data_ptr()
        ready.run(values)

    def _fixed(
        self, problem: Problem, read: Mapping[str, Tensor | None], results: Mapping[str, Tensor | None]
    ) -> dict[str, Any]:
        """The values of fields that do not vary, by name."""
        q, k, v = (_there(read[name]) for name in _ROWS)
        tensors = {each: read[tensor_field(each.name)] for each in self.spec.tensors if tensor_field(each.name) in read}
        spec = replace(self.spec, tensors=tuple(tensors))
        known = fixed_values(spec, problem.shard, q, k, v, [_there(x) for x in tensors.values()])
        for name, x in (*((name, read.get(name)) for name in (*_T_ROWS, "d_o")), *results.items()):
            known |= {} if x is None or x.dim() < 4 else row_strides(name, strides_of(x))
        return known

    def _numbers(self, problem: Problem, tangents: Sequence[Tensor | None], layout: ArgumentLayout) -> dict[str, float]:
        """The numbers among kernels' arguments, by fields: params, their tangents, and dropout."""
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


@dataclass(frozen=True)
class KernelsOfTangents:
    """The kernels of a problem, for programs that are tangents, gradients of tangents, or gradients of gradients.

    ``backward`` gives the kernel of the backward pass, compiled when it is called; None where there is none.
    """

    mode: ForwardMode
    first: Kernel
    forward: Kernel
    backward: Callable[[], Kernel | None]
    deterministic: bool

    def compute(self, problem: Problem, program: Program, values: Sequence[Any]) -> list[Tensor] | None:
        """The outputs of a program; None where kernels do not compute it."""
        own, gradient = with_memory(values), program.gradient_of_tangent
        if not lies_in_memory(own):
            return None
        if gradient is not None:
            return self._gradients(as_kernels_read(problem), gradient, own)
        if program.moved is None:
            return None
        moves = dict(zip(program.moved, own[len(program.inputs) :], strict=True))
        found = self._moved(as_kernels_read(problem), moves, keeps_o=False)
        return [x for x in (found.t_o, found.t_lse) if x is not None]

    def _moved(self, problem: Problem, moves: dict[int, Any], *, keeps_o: bool) -> Tangents:
        tangents = [moves.get(n) for n in range(len(problem.inputs))]
        return self.mode.run(self.forward, problem, tangents, deterministic=self.deterministic, keeps_o=keeps_o)

    def _gradients(self, problem: Problem, gradient: TangentGradient, values: Sequence[Any]) -> list[Tensor] | None:
        wanted: dict[Of, list[int]] = {of: [n for kind, n in gradient.outputs if kind is of] for of in Of}
        by_kernel = (wanted[Of.INPUT], wanted[Of.TANGENT])
        is_backward = any(by_kernel)
        if not self.mode.differentiable.issuperset(by_kernel[0] + by_kernel[1]):
            return None
        backward = self.backward() if is_backward else None
        if is_backward and backward is None:
            return None
        moves = {n: values[place] for n, place in gradient.moving.items()}
        moved = self._moved(problem, moves, keeps_o=is_backward)
        of_outputs = (moved.t_o, moved.t_lse)
        found: dict[tuple[Of, int], Tensor | None] = {(Of.ARRIVING, n): of_outputs[n] for n in wanted[Of.ARRIVING]}
        if backward is not None:
            tangents = [moves.get(n) for n in range(len(problem.inputs))]
            arriving = _arriving(values, gradient.arriving)
            run = functools.partial(self.mode.backward, deterministic=self.deterministic)
            own = run(backward, problem, tangents, moved, arriving, (by_kernel[0], by_kernel[1] * backward.moves))
            for of, each in zip((Of.INPUT, Of.TANGENT), own, strict=True):
                found |= {(of, n): x for n, x in each.items()}
            # As t(o) is linear in the tangents, gradients by these are those of o, of what arrives.
            linear = functools.partial(run, self.first, problem, [None] * len(tangents), moved)
            if by_kernel[1] and not backward.moves:
                found |= {(Of.TANGENT, n): x for n, x in linear(arriving, (by_kernel[1], ()))[0].items()}
            if gradient.more:
                more, _ = linear(_arriving(values, gradient.more), (by_kernel[0], ()))
                for n in by_kernel[0]:
                    found[Of.INPUT, n] = own[0][n] + more[n]
        outputs = [found[each] for each in gradient.outputs]
        assert all(x is not None for x in outputs)
        return [x for x in outputs if x is not None]


def _fresh(problem: Problem) -> dict[int, Tensor]:
    """Fresh gradients of q, k and v, which kernels write whether asked for or not."""
    rows = (problem.q, problem.k, problem.v)
    return {n: problem.q.new_empty_strided(*layout_like(x, x.shape)) for n, x in enumerate(rows)}


def _captured(
    problem: Problem, found: dict[int, Tensor], wanted: Collection[int], names: Mapping[int, str]
) -> dict[str, Tensor | None]:
    """Zeros that kernels add gradients of captured values to, by field; they are put into ``found``, too."""
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


def _arriving(values: Sequence[Any], places: Mapping[int, int]) -> Arriving:
    d_o, d_lse = (values[places[n]] if n in places else None for n in range(2))
    return d_o, d_lse
