"""Params and drop probabilities of each sequence of a ragged batch, where they follow from its lengths.

In: a spec and the lengths. Out: a ``PerSequence``, whose tables kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.op.call import probability_in_force
from flashgen.op.captured import Captured
from flashgen.op.kind_call import KindCall
from flashgen.op.lengths import drops_by_length, params_by_length
from flashgen.reference.dense import Dropout, param_values
from flashgen.reference.philox import drop_threshold, survivor_scale


class PerSequence:
    """Params and dropout of each sequence, for kernels and the reference."""

    def __init__(self, spec: AttentionSpec, kind_call: KindCall, captured: Captured) -> None:
        self._spec, self._call, self._captured = spec, kind_call.call, captured
        pairs = kind_call.pairs
        self._by_length = by_length = params_by_length(spec, captured.given) if pairs else set()
        self._own_dropout = bool(pairs) and drops_by_length(spec, kind_call.tensors, by_length)
        self._known: dict[tuple[int, int], tuple[tuple[float, ...], float]] = {}
        self._pairs = pairs if by_length or self._own_dropout else ()

    def params_of(self, number: int) -> tuple[float, ...]:
        """The value of every param in a sequence."""
        return self._at(number)[0] if self._pairs else tuple(self._captured.params)

    def dropout_of(self, number: int) -> Dropout | None:
        """The dropout of a sequence; None where nothing is dropped."""
        whole = self._captured.drawn
        if not self._own_dropout:
            return whole
        probability = self._at(number)[1]
        if probability == 0:
            return None
        assert whole is not None
        return Dropout(probability, whole.seed)

    def tables(self) -> tuple[list[Tensor | None], int | None]:
        """Tables with a number a sequence, on the device of the call, and its largest threshold if dropout varies.

        Threshold and scale of dropout come before params. None stands for a number that all sequences share.
        """
        count, threshold = len(self._pairs), None
        found: list[np.ndarray[Any, Any] | None] = [] if self._spec.dropout is None else [None, None]
        if self._own_dropout:
            own = [drop_threshold(self._at(number)[1]) for number in range(count)]
            found = [np.asarray(own, np.uint32), np.asarray([survivor_scale(each) for each in own], np.float32)]
            threshold = max(own, default=0)
        for n, param in enumerate(self._spec.params):
            values: np.ndarray[Any, Any] | None = None
            if param.name in self._by_length:
                dtype = np.float32 if param.type is ScalarType.FLOAT else np.int32
                values = np.asarray([self._at(number)[0][n] for number in range(count)], dtype)
            found.append(values)
        return [None if x is None else torch.from_numpy(x).to(self._call.device) for x in found], threshold

    def _at(self, number: int) -> tuple[tuple[float, ...], float]:
        lens = self._pairs[number]
        if lens not in self._known:
            sizes = {**self._call.sizes, "Nq": lens[0], "Nk": lens[1]}
            params = self._spec.params
            given = {
                param.name: value
                for param, value in zip(params, self._captured.params, strict=True)
                if param.name not in self._by_length
            }
            # A default may be no number at length 0, and a sequence without pairs needs none but for rows of a sink.
            sinks = lens[0] > 0 and self._spec.weights.sink is not None
            is_needed = sinks or 0 not in lens
            values = param_values(self._spec, given, sizes) if is_needed else dict.fromkeys(self._by_length, 0.0)
            values = {param.name: values.get(param.name, given.get(param.name, 0.0)) for param in params}
            probability = 0.0
            if self._own_dropout and 0 not in lens:
                probability = probability_in_force(self._spec, values, sizes)
            self._known[lens] = (tuple(values.values()), probability)
        return self._known[lens]


def check_defaults(spec: AttentionSpec, given: Sequence[Tensor | None], sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` where a param's default or the drop probability has no valid value at these sizes.

    ``given`` are the operator's params, then its seed and drop probability where pairs are dropped.
    """
    present = {param.name: x.item() for param, x in zip(spec.params, given, strict=False) if x is not None}
    values = param_values(spec, present, sizes)
    if spec.dropout is not None:
        probability_in_force(spec, values, sizes, given[-1])
