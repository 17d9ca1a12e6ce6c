"""Tensor parallelism for ``Attention``: heads are spread over the ranks of a mesh dimension.

In: an ``Attention`` between projections that ``parallelize_module`` spreads. Out: the same module, whose learned
tensors of heads are sharded like q, k and v. The work is done by the sharding rule of the op (``op/dtensor.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from flashgen.nn.attention import Attention
from flashgen.op.dtensor_spread import indexed


class HeadParallel(ParallelStyle):
    """Of an ``Attention`` each rank computes some heads: it stands between ``ColwiseParallel`` and ``RowwiseParallel``.

        parallelize_module(block, mesh, {
            "wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(),
            "attention": HeadParallel(), "wo": RowwiseParallel(),
        })

    A call takes what these projections return, as plain tensors or as DTensors: ``q`` [B, H / ranks, Nq, D], ``k`` and
    ``v`` with their share of heads, or with all of them where there are fewer key/value heads than ranks and their
    projections are not spread. What the module learns by heads is sharded by heads, all else is whole; captured tensors
    that are passed are whole. ``use_local_output``: o is a plain tensor with the rank's heads, else a DTensor.

    Raises ``TypeError`` for another module and ``ValueError`` for head counts that the ranks do not divide.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Attention):
            raise TypeError(
                f"HeadParallel is for flashgen.nn.Attention, not {type(module).__name__}: put it on the Attention that "
                "stands between projections of its own (ColwiseParallel before it, RowwiseParallel behind it)"
            )
        ranks = device_mesh.size()
        if module.heads % ranks or (module.kv_heads % ranks and ranks % module.kv_heads):
            raise ValueError(
                f"{module.heads} query heads of {module.kv_heads} key/value heads cannot be dealt out to {ranks} ranks"
            )

        def given(attention: Attention, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            totals = (attention.heads, attention.kv_heads, attention.kv_heads)
            q, k, v = (_spread(*each, mesh) for each in zip("qkv", inputs, totals, strict=True))
            return q.redistribute(placements=[Shard(1)]), k, v

        def found(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001
            if not self.use_local_output:
                return outputs
            return tuple(x.to_local() for x in outputs) if isinstance(outputs, tuple) else outputs.to_local()

        return distribute_module(module, device_mesh, _shard_learned, given, found)  # type: ignore[arg-type]


def _shard_learned(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(module, Attention)
    spec, ranks = module.op.spec, mesh.size()
    exact = {tensor.name: indexed(spec, tensor) for tensor in spec.tensors}
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Replicate()
        for dim, axis in exact.get(name, {}).items():
            if axis in ("h", "hkv") and parameter.shape[dim] % ranks == 0:
                placement = Shard(dim)
        spread = nn.Parameter(distribute_tensor(parameter, mesh, [placement]), requires_grad=parameter.requires_grad)
        module.register_parameter(name, spread)


def _spread(name: str, x: Tensor, heads: int, mesh: DeviceMesh) -> DTensor:
    """A projection's result as a DTensor: all heads, or a rank's share of them."""
    if isinstance(x, DTensor):
        return x
    if x.shape[1] == heads:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    if x.shape[1] * mesh.size() == heads:
        return DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    raise ValueError(
        f"'{name}' has {x.shape[1]} heads; all {heads} or a rank's {heads / mesh.size():g} of them are expected"
    )
