"""Runs kernels of forward mode: o, lse and what both change by, of one dense problem.

In: a ``JvpKernel``, a ``Problem`` and the tangents of its inputs. Out: fresh tensors. What an op's derivatives are made
of comes here where such a kernel takes it (``engine.py``), and else goes by the tiled path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, contiguous_format

from flashgen.analysis.selection import lowered
from flashgen.analysis.tangent import tangent_names, with_tangents
from flashgen.ir.spec import AttentionSpec, Param
from flashgen.ir.types import ScalarType
from flashgen.plan.arguments import param_field, param_place_field, tensor_field
from flashgen.reference.philox import drop_threshold
from flashgen.reference.tiled import Problem
from flashgen.runtime.call import is_readable, row_strides, settled_values
from flashgen.runtime.kernel import JvpKernel

_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
_ROWS = ("q", "k", "v")


@dataclass(frozen=True)
class Moved:
    """``o``, ``lse`` and its parts, and the tangents; None: not asked for, or there are none."""

    o: Tensor | None
    lse: Tensor | None
    lse_parts: Tensor | None
    t_o: Tensor
    t_lse: Tensor | None


class ForwardMode:
    """The kernels of forward mode of one spec, which read a tangent beside each float of it."""

    def __init__(self, spec: AttentionSpec) -> None:
        own = lowered(spec)
        self.spec, self._names = with_tangents(own), tangent_names(own)

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
        values = kernel.layout.values(known)
        prepared = kernel.prepare(values)
        workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=q.device)
        values[0] = workspace.data_ptr()
        prepared.run(values[: kernel.layout.varying])
        del read  # until here
        return found

    def _known(
        self, kernel: JvpKernel, problem: Problem, tangents: Sequence[Tensor | None]
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


def _number(param: Param, value: Tensor | float) -> float:
    return int(value) if param.type is ScalarType.INT else float(value)


def _rows(kernel: JvpKernel, x: Tensor) -> Tensor:
    """Rows that the kernel can read."""
    return x if is_readable(kernel, x) else x.clone(memory_format=contiguous_format)


def _like_nothing(x: Tensor) -> Tensor:
    """The tangent of what does not move: one zero, whatever the index."""
    return x.new_zeros(()).expand(x.shape)
