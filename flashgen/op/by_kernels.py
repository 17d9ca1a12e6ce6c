"""Programs of one dense problem that kernels of forward mode compute: tangents, and the gradients of tangents.

In: a ``Program`` with its values, and the kernels of the problem. Out: its outputs; None where kernels do not compute
what it is, which then goes by the tiled path. Gradients of gradients are gradients of tangents (``programs.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashgen.hosts.kernel import Kernel
from flashgen.op.forward_mode import Arriving, ForwardMode, Moved
from flashgen.op.plain import lies_in_memory, with_memory
from flashgen.reference.programs import Of, Program, TangentGradient
from flashgen.reference.tiled import Problem


@dataclass(frozen=True)
class KernelsOfTangents:
    """Those of a problem. ``backward`` compiles its own when it is called, and gives None where there is none."""

    mode: ForwardMode
    first: Kernel
    forward: Kernel
    backward: Callable[[], Kernel | None]
    deterministic: bool

    def compute(self, problem: Problem, program: Program, values: Sequence[Any]) -> list[Tensor] | None:
        """The outputs of a program."""
        own = with_memory(values)
        if not lies_in_memory(own):
            return None
        count = len(program.inputs)
        if program.moved is not None:
            moves = dict(zip(program.moved, own[count:], strict=True))
            found = self._moved(problem, moves, keeps_o=False)
            return [x for x in (found.t_o, found.t_lse) if x is not None]
        gradient = program.gradient_of_tangent
        return None if gradient is None else self._gradients(problem, gradient, own)

    def _moved(self, problem: Problem, moves: dict[int, Any], *, keeps_o: bool) -> Moved:
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
            linear = functools.partial(self.mode.linear, self.first, problem, moved, deterministic=self.deterministic)
            if by_kernel[1] and not backward.moves:
                found |= {(Of.TANGENT, n): x for n, x in linear(arriving, by_kernel[1]).items()}
            if gradient.more:
                more = linear(_arriving(values, gradient.more), by_kernel[0])
                for n in by_kernel[0]:
                    found[Of.INPUT, n] = own[0][n] + more[n]
        outputs = [found[each] for each in gradient.outputs]
        assert all(x is not None for x in outputs)
        return [x for x in outputs if x is not None]


def _arriving(values: Sequence[Any], places: Mapping[int, int]) -> Arriving:
    return Arriving(*(values[places[n]] if n in places else None for n in range(2)))
