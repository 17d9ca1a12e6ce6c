"""The arguments of kernels beside q, k and v: captured tensors, params and dropout, and where their gradients go.

Params and drop probabilities may follow from the lengths of each sequence of a ragged batch (``PerSequence``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashgen.hosts.kernel import ADDED, Stored
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.op.call import Call, CallChecker, KindCall, probability_in_force
from flashgen.op.conversion import check_scalar
from flashgen.op.lengths import drops_by_length, params_by_length
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import NoMemoryError, address
from flashgen.plan.arguments import stored_tensors, summed_tensors
from flashgen.reference.dense import Dropout, param_values
from flashgen.reference.philox import drop_threshold, survivor_scale


class Captured(NamedTuple):
    """The checked arguments of a call beside q, k and v: ``given`` are the params that were passed, ``params`` all."""

    tensors: Sequence[Tensor]
    given: Sequence[Tensor | None]
    params: Sequence[float]
    dropout: Dropout | None
    seed: Tensor | None  # where kernels fetch it, if they do

    @property
    def drawn(self) -> Dropout | None:
        """The dropout with the seed as a tensor where kernels would fetch it, for the reference."""
        if self.dropout is None or self.seed is None:
            return self.dropout
        return Dropout(self.dropout.probability, self.seed)


class CapturedValues:
    """Reads the captured values of a spec's calls, and lists them as kernels take them."""

    def __init__(self, spec: AttentionSpec, signature: Signature, checker: CallChecker) -> None:
        self._signature, self._checker = signature, checker
        self._selects, self._tensors_end = checker.of_kernels is not spec, 3 + len(spec.tensors)
        self._learned = [*(each.grad for each in spec.tensors), *(each.grad for each in spec.params)]
        self._names = [each.name for each in spec.tensors if each.grad]
        self._names += [each.name for each in spec.params if each.grad]
        stored, summed = stored_tensors(checker.of_kernels), summed_tensors(checker.of_kernels)
        self.stored, self.summed = (frozenset(each.name for each in some) for some in (stored, summed))
        self._fields = [each.name for each in (*stored, *summed)]
        self.no_gradients = [0] * (sum(self._learned) + len(self._fields))

    def read(self, call: Call, tensors: Sequence[Any]) -> Captured:
        """The checked arguments of a call beside q, k and v.

        Raises ``TypeError`` and ``ValueError`` for a seed or a param that is not what the spec declares.
        """
        end = self._signature.inputs
        given = tensors[self._tensors_end : end]
        params = self._checker.params(call, given) if given else ()
        dropout, fetched = None, None
        if self._signature.has_dropout:
            seed, dropout_p = tensors[end:]
            probability = self._checker.drop_probability(call, dropout_p, params)
            if probability > 0.0:
                if seed is None:
                    raise ValueError("dropout needs a seed")
                if seed.dtype is not torch.int64:
                    raise TypeError(f"'seed' is {seed.dtype}; the operator takes torch.int64")
                check_scalar(seed, "'seed'", call.device)
                fetched = seed if self._checker.is_fetched(call, seed) else None
                number = 0 if fetched is not None else int(seed.item()) & 0xFFFF_FFFF_FFFF_FFFF
                dropout = Dropout(probability, number)
        return Captured(tensors[3 : self._tensors_end], given, params, dropout, fetched)

    def add(
        self, values: list[float], call: Call, captured: Captured, gradients: Sequence[int]
    ) -> tuple[bool, Sequence[Tensor]]:
        """Add the varying values of captured tensors, params and dropout.

        Returns whether pairs are dropped, and the tensors that kernels read, to hold while these run: a zero stands for
        a tensor without elements.
        """
        threshold = 0
        if captured.dropout is not None:
            probability, seed = captured.dropout.probability, captured.dropout.seed
            threshold = drop_threshold(probability)
            values += (threshold, survivor_scale(threshold), int(seed), address(captured.seed))
        elif self._signature.has_dropout:
            values += (0, 1.0, 0, 0)
        read = self._checker.read(captured.tensors, call.sizes) if self._selects else captured.tensors
        if call.reads_nothing:
            read = [x if x.numel() else x.new_zeros(1) for x in read]
        addresses = [x.data_ptr() for x in read]
        if 0 in addresses:
            raise NoMemoryError("a captured tensor is zero in name alone")
        values += addresses
        values += captured.params
        values += [x.data_ptr() if x is not None and self._checker.is_fetched(call, x) else 0 for x in captured.given]
        values += gradients
        return threshold > 0, read

    def sums(
        self, call: Call, captured: Captured, needs: Sequence[bool], stored: Stored = ADDED
    ) -> list[tuple[Tensor | None, Any]]:
        """A gradient for each captured value that may have one, None where none is needed, with the value itself.

        Kernels add to gradients in float32, or store them in the tensor's own type.
        """
        all_of_them = zip((*captured.tensors, *captured.given), self._learned, needs, strict=True)
        learned = [(x, need) for x, is_learned, need in all_of_them if is_learned]
        types = [
            x.dtype if x is not None and name in stored.names else torch.float32
            for (x, _), name in zip(learned, self._names, strict=True)
        ]
        makes = (torch.empty if name in stored.whole else torch.zeros for name in self._names)
        return [
            (make(x.shape, dtype=dtype, device=call.device) if x is not None and need else None, x)
            for (x, need), dtype, make in zip(learned, types, makes, strict=True)
        ]

    def addresses(self, sums: Sequence[tuple[Tensor | None, Any]], stored: Stored = ADDED) -> list[int]:
        """The addresses of gradients that kernels add to, then of gradients that they store."""
        found = {name: address(x) for (x, _), name in zip(sums, self._names, strict=True)}
        own = [0 if name in stored.names else at for name, at in found.items()]
        return own + [found[name] if name in stored.names else 0 for name in self._fields]


class PerSequence:
    """Params and dropout of each sequence, for kernels, which read its tables, and the reference."""

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
