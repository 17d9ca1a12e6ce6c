"""The arguments of kernels beside q, k and v: captured tensors, params and dropout, and where their gradients go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.hosts.kernel import ADDED, Stored
from flashgen.ir.spec import AttentionSpec
from flashgen.op.call import Call, CallChecker
from flashgen.op.conversion import check_scalar
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import NoMemoryError
from flashgen.op.values import address
from flashgen.plan.arguments import stored_tensors, summed_tensors
from flashgen.reference.dense import Dropout
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
