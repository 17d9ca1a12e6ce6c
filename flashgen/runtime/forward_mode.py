"""Runs kernels of forward mode and of its backward pass: o, lse and what both change by, of one dense problem.

In: a ``JvpKernel``, a ``Problem`` and the tangents of its inputs. Out: fresh tensors. What an op's derivatives are made
of comes here where such a kernel takes it (``by_kernels.py``), and else goes by the tiled path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, contiguous_format

from flashgen.analysis.selection import lowered
from flashgen.analysis.tangent import tangent_names, with_tangents
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.types import ScalarType
from flashgen.plan.arguments import gradient_field, param_field, param_place_field, tensor_field
from flashgen.reference.philox import drop_threshold
from flashgen.reference.tiled import Problem
from flashgen.runtime.call import is_readable, row_strides, settled_values
from flashgen.runtime.kernel import ArgumentLayout, JvpKernel, Kernel, Prepared, Values

_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
_ROWS = ("q", "k", "v")
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
        self._remembered: dict[Any, Prepared] = {}

    def run(
        self,
        kernel: JvpKernel,
        problem: Problem,
        tangents: Sequence[Tensor | None],
        *,
        deterministic: bool = False,
        keeps_o: bool = False,
    ) -> Moved:
        """The tangents of o and lse, by those of ``problem.inputs``, in their order; None: 0.

        o and its tangent are in the type of q, the others in float32; ``keeps_o``: o and lse are wanted, too.
        """
        q, v, shard = problem.q, problem.v, problem.shard
        o_shape = (shard.batch, shard.heads, shard.q_len, v.shape[-1])
        has_lse = problem.spec.weights.form.normalised

        def rows(wanted: bool, *more: int) -> Tensor | None:
            return q.new_empty((*o_shape[:-1], *more), dtype=torch.float32) if wanted else None

        found = Moved(
            o=q.new_empty(o_shape) if keeps_o else None,
            lse=rows(has_lse and keeps_o),
            lse_parts=rows(has_lse and keeps_o, 2),
            t_o=q.new_empty(o_shape),
            t_lse=rows(has_lse),
        )
        known, read = self._known(kernel, problem, tangents)
        results = {"o": found.o, "lse": found.lse, "lse_parts": found.lse_parts, "t_o": found.t_o, "t_lse": found.t_lse}
        known |= {name: 0 if x is None else x.data_ptr() for name, x in results.items()}
        known |= {"threads": torch.get_num_threads(), "deterministic": deterministic}
        _run(_Pass("forward", kernel.layout, kernel.prepare), known, q, self._remembered)
        del read  # until here
        return found

    def backward(
        self,
        kernel: JvpKernel,
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
        own = _Pass("backward", kernel.layout, kernel.prepare)
        known, read = self._known(kernel, problem, tangents)
        self._differentiate(own, kernel, problem, known, moved, arriving, written, deterministic)
        del read  # until here
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
        known, read = self._known(kernel, problem, [None] * len(problem.inputs))
        own = _Pass("linear", kernel.layout, functools.partial(kernel.prepare, "backward"))
        self._differentiate(own, kernel, problem, known, moved, arriving, written, deterministic)
        del read  # until here
        return found

    def _differentiate(
        self,
        own: _Pass,
        kernel: JvpKernel | Kernel,
        problem: Problem,
        known: dict[str, Any],
        moved: Moved,
        arriving: Arriving,
        written: Mapping[str, Tensor | None],
        deterministic: bool,
    ) -> None:
        """A backward pass, of what arrives at o and lse or at their tangents."""
        d_o = moved.t_o.new_zeros(()).expand(moved.t_o.shape) if arriving.d_o is None else arriving.d_o
        d_o = _rows(kernel, d_o)
        d_lse = None if arriving.d_lse is None else arriving.d_lse.contiguous()
        tensors = {"o": moved.o, "lse": moved.lse, "lse_parts": moved.lse_parts, "d_o": d_o, "d_lse": d_lse}
        known |= row_strides("d_o", d_o)
        known |= {name: 0 if x is None else x.data_ptr() for name, x in (tensors | dict(written)).items()}
        known |= {"threads": torch.get_num_threads(), "deterministic": deterministic}
        _run(own, known, problem.q, self._remembered)

    def _known(
        self, kernel: JvpKernel | Kernel, problem: Problem, tangents: Sequence[Tensor | None]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Values of fields by name, and the tensors that they point to."""
        end = 3 + len(problem.tensors)
        rows = {name: _rows(kernel, x) for name, x in zip(_ROWS, (problem.q, problem.k, problem.v), strict=True)}
        moved = {f"t_{name}": _rows(kernel, x) for name, x in zip(_ROWS, tangents, strict=False) if x is not None}
        captured = list(problem.tensors.values())
        captured += [
            _like_nothing(x) if tangent is None else tangent
            for (name, x), tangent in zip(problem.tensors.items(), tangents[3:end], strict=True)
            if name in self._names
        ]
        known = settled_values(self.spec, problem.shard, rows["q"], rows["k"], rows["v"], captured)
        known |= self._params(problem, tangents[end:])
        for name, x in moved.items():
            known |= row_strides(name, x)
        read = [x if x.numel() else x.new_zeros(1) for x in captured]
        known |= {name: x.data_ptr() for name, x in (rows | moved).items()}
        known |= {tensor_field(each.name): x.data_ptr() for each, x in zip(self.spec.tensors, read, strict=True)}
        dropout = problem.dropout
        if dropout is not None and dropout.probability > 0.0:
            known |= {
                "dropout_threshold": drop_threshold(dropout.probability),
                "dropout_scale": 1.0 / (1.0 - dropout.probability),
            }
            if isinstance(dropout.seed, Tensor) and dropout.seed.is_cuda:  # kernels fetch it, so that nobody waits
                known["seed_at"] = dropout.seed.data_ptr()
            else:
                known["seed"] = int(dropout.seed) & _SEED_BITS
        return known, [*rows.values(), *moved.values(), *read]

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


def _run(own: _Pass, known: Mapping[str, Any], like: Tensor, remembered: dict[Any, Prepared]) -> None:
    """One pass, with a workspace on the device of ``like``. What was prepared for calls like it is ``remembered``."""
    values = own.layout.values(known)
    # As ``Kernel.prepare`` says: it goes by what is settled, and of the rest by what is there at all.
    varying = own.layout.varying
    key = (own.layout, own.name, tuple(values[varying:]), tuple(x != 0 for x in values[:varying]))
    prepared = remembered.get(key)
    if prepared is None:
        if len(remembered) >= _MOST_REMEMBERED:
            remembered.clear()
        prepared = remembered[key] = own.prepare(values)
    workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=like.device)
    values[0] = workspace.data_ptr()
    prepared.run(values[: own.layout.varying])


def _fresh(problem: Problem) -> dict[int, Tensor]:
    """What kernels write of q, k and v, asked for or not."""
    return {n: problem.q.new_empty(x.shape) for n, x in enumerate((problem.q, problem.k, problem.v))}


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


def _rows(kernel: JvpKernel | Kernel, x: Tensor) -> Tensor:
    """Rows that the kernel can read."""
    return x if is_readable(kernel, x) else x.clone(memory_format=contiguous_format)


def _like_nothing(x: Tensor) -> Tensor:
    """The tangent of what does not move: one zero, whatever the index."""
    return x.new_zeros(()).expand(x.shape)
