"""Checks the indices of calls that are proved for the sizes of each, and for the values of its params."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashgen.analysis.bounds import IndexProof, IndexStatus, prove_indices
from flashgen.analysis.index_checks import check_index
from flashgen.ir.spec import AttentionSpec, HeadDim

_MOST_REMEMBERED = 512


class Indices:
    """The indices of a spec that are proved for each call."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._proofs: dict[HeadDim, tuple[IndexProof, ...]] = {}
        self._asking: dict[HeadDim, bool] = {}
        self._checked: set[object] = set()

    def of(self, head_dim: HeadDim) -> tuple[IndexProof, ...]:
        """Their proofs."""
        if not self._spec.tensors:
            return ()
        if head_dim not in self._proofs:
            proofs = prove_indices(self._spec, head_dim)
            self._proofs[head_dim] = tuple(each for each in proofs if each.status is IndexStatus.CALL_TIME)
        return self._proofs[head_dim]

    def check(
        self, head_dim: HeadDim, sizes: Mapping[str, int], params: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Raise ``ValueError`` where an index leaves its tensor at these sizes, and these values of params.

        Nothing is said of one that depends on a param without a value here: kernels clamp it.
        """
        key = (head_dim, *sizes.values(), *params.items())
        if key in self._checked:
            return
        for proof in self.of(head_dim):
            refusal = check_index(proof, sizes, params)
            if refusal is not None:
                raise ValueError(f"'{self._spec.name}': {refusal}")
        if len(self._checked) >= _MOST_REMEMBERED:
            self._checked.clear()
        self._checked.add(key)

    def ask_params(self, head_dim: HeadDim) -> bool:
        """Whether there is an index that depends on a param."""
        if head_dim not in self._asking:
            self._asking[head_dim] = any(proof.params for proof in self.of(head_dim))
        return self._asking[head_dim]
