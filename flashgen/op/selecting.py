"""Runs an op with selected keys: makes bits of the lists, on their device, and has the lowered spec's engine run.

In: the positional arguments of the operators of a spec with a selection. Out: what the engine of its lowered spec
makes of them (``analysis/selection.py``). Errors name the tensors of the spec.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashgen.analysis.selection import lowered, selection_of
from flashgen.hosts.kernel import KernelProvider
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.op.block_order import CallsByBlocks
from flashgen.op.call import Attended, CallChecker, Rest, Rows, Tensors
from flashgen.op.checks import check_captured_type
from flashgen.op.engine import TAKES, Engine
from flashgen.op.forward_mode import Moved
from flashgen.op.grouped import GroupedCalls
from flashgen.op.selected import captured_in_order
from flashgen.op.signature import Signature
from flashgen.reference.programs import Forward, Program, Reverse


def engine_of(spec: AttentionSpec, kernels: Mapping[str, KernelProvider | None], kind: Kind = DENSE) -> Engine:
    """The engine of a kind of call; of a spec with a selection the one that makes bits of it first."""
    inner = Engine(lowered(spec), kernels, kind=kind)
    return inner if spec.select is None else SelectingEngine(spec, inner)


class SelectingEngine(Engine):
    """Forward and backward of a spec with a selection, by the engine of the lowered one."""

    def __init__(self, spec: AttentionSpec, inner: Engine) -> None:
        self.spec, self.kernels, self.inner = spec, inner.kernels, inner
        # Reads the lists themselves, as the reference does: what derivatives of derivatives run.
        self._by_lists = Engine(spec, dict.fromkeys(inner.kernels), kind=inner.kind)
        self.kind, self.signature = inner.kind, Signature.of(spec, inner.kind)
        self.checker = CallChecker(spec, {}, inner.kind, is_reference=True)
        self._end = 3 + len(spec.tensors)
        self._end_of_inputs = self.signature.tensor_arguments - len(inner.kind.tensors)
        self._names = tuple(each.name for each in inner.spec.tensors)
        assert spec.select is not None, "keys are selected"
        self._listed = 3 + next(n for n, each in enumerate(spec.tensors) if each.name == spec.select.tensor)
        shared = selection_of(spec)
        is_shared = inner.kind is DENSE and shared is not None and "h" not in shared.axes
        self._grouped = GroupedCalls(spec, inner, engine_of) if is_shared else None
        self._blocks = CallsByBlocks(spec, inner.kernels) if is_shared else None

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
        found = None
        if self._blocks is not None and into is None:
            found = self._blocks.attend(tensors, rest, keeps_lse)
        if found is not None:
            return found
        inner, own = self.resolved(tensors, rest)
        if into is None and self._grouped is not None and self._is_grouped(tensors, rest):
            return self._grouped.attend(own, rest, keeps_lse)
        return inner.attend(own, rest, keeps_lse, into)

    def _is_grouped(self, tensors: Tensors, rest: Rest) -> bool:
        return self._grouped is not None and self._grouped.takes(tensors, rest, tensors[self._listed].shape[-1])

    def runs_instead(self, tensors: Tensors, rest: Rest) -> str:
        """As ``Engine`` has it."""
        by_blocks = self._blocks is not None and self._blocks.order(tensors, rest) is not None
        grouped = self._is_grouped(tensors, rest)
        if not (by_blocks or grouped):
            return ""
        forward = "forward kernels for caches run, a query a tile"
        if by_blocks:
            forward = "forward kernels by blocks of keys run, each for the queries that list it"
        backward = "dense ones of a spec of such rows" if grouped else "dense ones"
        return f"the heads that share a list are the rows of a tile: {forward}, backward {backward}"

    def gradients(
        self,
        d_o: Any,
        rows: Rows,
        tensors: Tensors,
        rest: Rest,
        needs: Sequence[bool],
        *,
        is_part: bool = False,
        into: Sequence[Tensor] | None = None,
    ) -> list[Any]:
        """The gradients that are needed, in the order of the inputs: none is of a list, nor of what is made of it."""
        if self._grouped is not None and not is_part:
            numbers = tensors[self._listed].shape[-1]
            found = self._grouped.gradients(d_o, rows, tensors, rest, needs, numbers)
            if found is not None:
                return found
        inner, own = self.resolved(tensors, rest)
        return inner.gradients(d_o, rows, own, rest, self._needs(needs), is_part=is_part, into=into)

    def _needs(self, needs: Sequence[bool]) -> tuple[bool, ...]:
        """What the lowered spec is asked for."""
        wanted = dict(zip((each.name for each in self.spec.tensors), needs[3 : self._end], strict=True))
        return (*needs[:3], *(wanted.get(name, False) for name in self._names), *needs[self._end :])

    @functools.cached_property
    def program(self) -> Program:
        """The op as what derivatives are made of: that of the spec, whose tensors are the lists."""
        return self._by_lists.program

    @property
    def derives(self) -> str:
        """What runs programs, in words."""
        return self._by_lists.derives

    @property
    def moves(self) -> str:
        """What computes tangents, in words."""
        return self.inner.moves

    @property
    def moves_backward(self) -> str:
        """What computes gradients of gradients, in words."""
        return self.inner.moves_backward

    def likes(self, program: Program, values: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """The shapes and types of a program's outputs."""
        return self._by_lists.likes(program, values)

    def derive(self, program: Program, values: Sequence[Any], rest: Rest) -> list[Tensor]:
        """The outputs of a program: what kernels may compute by the lowered spec, all else by the reference."""
        if program.moved is None and program.gradient_of_tangent is None:
            return self._by_lists.derive(program, values, rest)
        count = len(program.inputs)
        inner, own = self.resolved(tuple(values[:count]), rest)
        more = len(inner.program.inputs) - count

        def place(n: int) -> int:
            return self._place(n) if n < count else n + more

        steps: list[Reverse | Forward] = []
        for step in program.steps:
            if isinstance(step, Reverse):
                # The first step's gradients are numbered as they come, whatever they are of.
                steps.append(replace(step, wanted=tuple(map(place, step.wanted))))
            else:
                steps.append(Forward(tuple(map(place, step.moving))))
        return inner.derive(replace(inner.program, steps=tuple(steps)), (*own, *values[count:]), rest)

    def attend_and_move(self, tensors: Tensors, tangents: Sequence[Tensor | None], rest: Rest) -> Moved | None:
        """The same of the lowered spec's engine."""
        inner, own = self.resolved(tensors, rest)
        by_place = {self._place(n): x for n, x in enumerate(tangents) if x is not None}
        return inner.attend_and_move(own, [by_place.get(n) for n in range(len(own))], rest)

    def _place(self, n: int) -> int:
        """Where an input stands among those of the lowered spec; one with a tangent is no list."""
        if n < 3:
            return n
        if n < self._end:
            return 3 + self._names.index(self.spec.tensors[n - 3].name)
        return n + len(self._names) - len(self.spec.tensors)

    def _sizes(self, tensors: Tensors, rest: Rest) -> Mapping[str, int]:
        """The sizes of the whole problem. Raises ``ValueError`` where shapes do not fit."""
        q, k, v = tensors[:3]
        takes, numbers = TAKES.get(self.kind.name), rest[0]
        if takes is not None:
            numbers = takes.whole_numbers((q, k, v), tensors[self._end_of_inputs :], numbers)  # type: ignore[assignment]
        return self.checker.checks.shapes(self.spec, q, k, v, tensors[3 : self._end], numbers)[1]
