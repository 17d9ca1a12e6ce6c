"""Runs an op with selected keys: turns the lists into bits, on their device, and runs the lowered spec's engine.

In: the positional arguments of the operators of a spec with a selection. Out: the results of the engine of its lowered
spec (``analysis/selection.py``). Errors name the tensors of the spec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashgen.analysis.selection import lowered, selection_of
from flashgen.hosts.kernel import KernelProvider
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.op.block_order import CallsByBlocks
from flashgen.op.call import Attended, Rest, Saved, Tensors
from flashgen.op.checks import check_captured_type
from flashgen.op.engine import Engine
from flashgen.op.forward_mode import Tangents
from flashgen.op.grouped import GroupedCalls
from flashgen.op.selected import captured_in_order
from flashgen.reference.programs import Forward, Program, Reverse


def engine_of(spec: AttentionSpec, kernels: Mapping[str, KernelProvider | None], kind: Kind = DENSE) -> Engine:
    """The engine of a kind of call; for a spec with a selection a ``SelectingEngine``."""
    inner = Engine(lowered(spec), kernels, kind=kind)
    return inner if spec.select is None else SelectingEngine(spec, inner)


class SelectingEngine(Engine):
    """Forward and backward of a spec with a selection, by the engine of the lowered one.

    Derivatives that no kernel computes read the lists themselves: this engine is then one without kernels.
    """

    def __init__(self, spec: AttentionSpec, inner: Engine) -> None:
        super().__init__(spec, dict.fromkeys(inner.kernels), kind=inner.kind)
        self.kernels, self.inner = inner.kernels, inner
        self._end = 3 + len(spec.tensors)
        self._end_of_inputs = self.signature.tensor_arguments - len(inner.kind.tensors)
        names = [each.name for each in inner.spec.tensors]
        # The places of inputs among those of the lowered spec; None for lists, which have no gradients nor tangents.
        own = (3 + names.index(each.name) if each.name in names else None for each in spec.tensors)
        self._places = (0, 1, 2, *own, *range(3 + len(names), inner.signature.inputs))
        shared = selection_of(spec)
        is_shared = inner.kind is DENSE and shared is not None and "h" not in shared.axes
        self._grouped = GroupedCalls(spec, inner, engine_of) if is_shared else None
        self._blocks = CallsByBlocks(spec, inner.kernels) if is_shared else None

    def has_kernel(self, q: Tensor, v: Tensor) -> bool:
        """As ``Engine`` has it."""
        return self.inner.has_kernel(q, v)

    def resolved(self, tensors: Tensors, rest: Rest) -> tuple[Engine, Tensors]:
        """The engine that runs, and its tensors."""
        captured = tensors[3 : self._end]
        for declared, tensor in zip(self.spec.tensors, captured, strict=True):
            check_captured_type(declared, tensor)
        sizes = self._sizes(tensors, rest)
        fake = next((x.fake_mode for x in captured if isinstance(x, FakeTensor)), contextlib.nullcontext())
        with fake:
            made = captured_in_order(self.spec, captured, sizes)
        return self.inner, (*tensors[:3], *made, *tensors[self._end :])

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True, into: Attended | None = None) -> Attended:
        """``o``, ``lse`` and its parts."""
        if self._blocks is not None and into is None:
            found = self._blocks.attend(tensors, rest, keeps_lse)
            if found is not None:
                return found
        inner, own = self.resolved(tensors, rest)
        if self._grouped is not None and into is None and self._grouped.grouped_call(tensors, rest) is not None:
            return self._grouped.attend(own, rest, keeps_lse)
        return inner.attend(own, rest, keeps_lse, into)

    def runs_instead(self, tensors: Tensors, rest: Rest) -> str:
        """As ``Engine`` has it."""
        by_blocks = self._blocks is not None and self._blocks.order(tensors, rest) is not None
        grouped = self._grouped is not None and self._grouped.grouped_call(tensors, rest) is not None
        if not (by_blocks or grouped):
            return ""
        forward = "forward kernels for caches run, a query a tile"
        if by_blocks:
            forward = "forward kernels by blocks of keys run, each for the queries that list it"
        backward = "dense ones of a spec of such rows" if grouped else "dense ones"
        return f"the heads that share a list are the rows of a tile: {forward}, backward {backward}"

    def gradients(
        self, d_o: Tensor, rows: Saved, tensors: Tensors, rest: Rest, needs: Sequence[bool], **parts: Any
    ) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs. Lists and their bits have none."""
        if self._grouped is not None and not parts.get("is_part"):
            found = self._grouped.gradients(d_o, rows, tensors, rest, needs)
            if found is not None:
                return found
        inner, own = self.resolved(tensors, rest)
        wanted = {place for place, need in zip(self._places, needs, strict=True) if need}
        return inner.gradients(d_o, rows, own, rest, [n in wanted for n in range(inner.signature.inputs)], **parts)

    def derive(self, program: Program, values: Sequence[Any], rest: Rest) -> list[Tensor]:
        """The outputs of a program: by the lowered spec where kernels may compute it, else by the reference."""
        if program.moved is None and program.gradient_of_tangent is None:
            return super().derive(program, values, rest)
        count = len(program.inputs)
        inner, own = self.resolved(tuple(values[:count]), rest)
        more = len(inner.program.inputs) - count

        def places(numbers: Sequence[int]) -> tuple[Any, ...]:
            return tuple(self._places[n] if n < len(self._places) else n + more for n in numbers)

        # The first step numbers gradients in their order, whatever inputs they belong to.
        steps = tuple(
            replace(step, wanted=places(step.wanted)) if isinstance(step, Reverse) else Forward(places(step.moving))
            for step in program.steps
        )
        return inner.derive(replace(inner.program, steps=steps), (*own, *values[count:]), rest)

    def attend_tangents(self, tensors: Tensors, tangents: Sequence[Tensor | None], rest: Rest) -> Tangents | None:
        """As the lowered spec's engine gives it."""
        inner, own = self.resolved(tensors, rest)
        by_place = {place: x for place, x in zip(self._places, tangents, strict=False) if x is not None}
        return inner.attend_tangents(own, [by_place.get(n) for n in range(len(own))], rest)

    def _sizes(self, tensors: Tensors, rest: Rest) -> Mapping[str, int]:
        """The sizes of the whole problem. Raises ``ValueError`` where shapes do not fit."""
        q, k, v = tensors[:3]
        numbers: Any = rest[0]
        if self._rules is not None:
            numbers = self._rules.whole_numbers((q, k, v), tensors[self._end_of_inputs :], numbers)
        return self.checker.checks.shapes(self.spec, q, k, v, tensors[3 : self._end], numbers)[1]
