"""Times an operator and its peers, forward and forward with backward, in the same run.

In: an ``AttentionOp`` and a shape. Out: a ``Comparison`` a pass; its first entry is flashgen, the others are peers. A
matrix product takes turns with them: its speed is what the machine can do, with the same threads, then. It is of
float32 on a CPU, whose kernels compute in float32, and of the element type on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.tuning.tune import Times, paired_times, waiting
from flashgen.verification.inputs import Inputs, fitting, random_inputs
from tools.benchmarks.peer import Inexpressible, Peer
from tools.benchmarks.peers import PEERS, kept_share

DEFAULT_SHAPE = Shape(1, 8, 8, 1024, 1024)
_MOST_PAIRS = 2**24  # of which the dense peer forms several matrices

_GEMM, _GPU_GEMM = 2048, 8192  # square matrix products of these sizes

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """One pass at one head dimension, element type and shape; ``absent`` says why a peer is not among ``times``.

    ``flops`` is what the kept pairs need, ``gemm`` the times of a matrix product of ``gemm_flops``, and
    ``first_call_seconds`` what the first call of a peer that compiles took, which is in none of the times.
    """

    head_dim: HeadDim
    dtype: ElementType
    shape: Shape
    backward: bool
    times: tuple[Times, ...]
    absent: tuple[tuple[str, str], ...]
    flops: float
    gemm: Times
    gemm_flops: float
    first_call_seconds: tuple[tuple[str, float], ...]
    threads: int

    def speed(self, times: Times) -> float:
        """FLOP/s of the median."""
        return self.flops / times.seconds.median

    @property
    def gemm_name(self) -> str:
        """What BLAS calls the product: sgemm, or that of the element type."""
        return self.gemm.name

    @property
    def gemm_speed(self) -> float:
        """FLOP/s of the matrix product's median."""
        return self.gemm_flops / self.gemm.seconds.median

    def of_gemm(self, times: Times) -> float:
        """The speed as a fraction of the matrix product's, both in the same rounds."""
        return self.flops / self.gemm_flops * self.gemm.ratio.median / times.ratio.median


def bench(
    op: AttentionOp,
    *,
    shape: Shape | None = None,
    dtype: ElementType | None = None,
    peers: Sequence[str] = tuple(PEERS),
    device: str = "cpu",
) -> Iterator[Comparison]:
    """Every head dimension of the spec, forward, then forward and backward, on tensors of a device."""
    shape = shape or fitting(op.spec, DEFAULT_SHAPE, pairs=_MOST_PAIRS)
    chosen = dtype or (op.spec.dtypes or (ElementType.F32,))[0]
    for head_dim in op.spec.head_dims:
        inputs = random_inputs(op.spec, shape, head_dim, TORCH_DTYPES[chosen], realistic=True)
        yield from compare(op, inputs.to(device), peers=peers)


def compare(
    op: AttentionOp,
    inputs: Inputs,
    *,
    peers: Sequence[str] = tuple(PEERS),
    passes: Sequence[bool] = (False, True),
    rounds: int = 15,
    budget: float = 30.0,
) -> Iterator[Comparison]:
    """With these arguments, forward, then forward and backward (``passes``: whether backward)."""
    absent, made = {}, {}
    for name in peers:
        try:
            made[name] = PEERS[name](op.spec, inputs, None)
        except Inexpressible as reason:
            absent[name] = str(reason)
    head_dim = HeadDim(inputs.q.shape[-1], inputs.v.shape[-1])
    element = next(element for element, dtype in TORCH_DTYPES.items() if dtype is inputs.q.dtype)
    (batch, heads, q_len), (kv_heads, kv_len) = inputs.q.shape[:3], inputs.k.shape[1:3]
    shape = Shape(batch, heads, kv_heads, q_len, kv_len)
    pairs = kept_share(op.spec, inputs) * shape.batch * shape.heads * shape.q_len * shape.kv_len
    for backward in passes:
        calls: dict[str, Call] = {"flashgen": lambda q, k, v, named: op(q, k, v, **named)}
        calls |= passes_of(made, backward=backward)
        candidates = {name: run_of(call, op, inputs, backward=backward) for name, call in calls.items()}
        gemm_name, product, gemm_flops = _matrix_product(inputs.q)
        candidates |= {gemm_name: product}
        *times, gemm = paired_times(candidates, rounds=rounds, budget=budget, wait=waiting(inputs.q.device))
        cannot = {name: peer.no_backward for name, peer in made.items() if backward and peer.no_backward}
        yield Comparison(
            head_dim=head_dim,
            dtype=element,
            shape=shape,
            backward=backward,
            times=tuple(times),
            absent=tuple((absent | cannot).items()),
            flops=2.0 * pairs * _products(head_dim, backward=backward),
            gemm=gemm,
            gemm_flops=gemm_flops,
            first_call_seconds=tuple(
                (name, peer.first_call_seconds) for name, peer in made.items() if peer.first_call_seconds is not None
            ),
            threads=torch.get_num_threads(),
        )


def _products(head_dim: HeadDim, *, backward: bool) -> int:
    """Multiplications a pair: QKᵀ and PV; backward QKᵀ, dO Vᵀ, dV, dQ and dK."""
    forward = head_dim.qk + head_dim.v
    return forward + 3 * head_dim.qk + 2 * head_dim.v if backward else forward


def _matrix_product(like: Tensor) -> tuple[str, Callable[[], object], float]:
    """Its name, the product, and its FLOPs."""
    on_gpu = like.device.type == "cuda"
    dtype, size = (like.dtype, _GPU_GEMM) if on_gpu else (torch.float32, _GEMM)
    a, b = (torch.randn(size, size, device=like.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    name = "sgemm" if dtype is torch.float32 else f"gemm in {str(dtype).removeprefix('torch.')}"
    return name, lambda: torch.mm(a, b, out=out), 2.0 * size**3


def passes_of(peers: Mapping[str, Peer], *, backward: bool) -> dict[str, Call]:
    """The peers that can run a pass."""
    return {name: peer.run for name, peer in peers.items() if not (backward and peer.no_backward)}


def run_of(call: Call, op: AttentionOp, inputs: Inputs, *, backward: bool) -> Callable[[], object]:
    """One pass as a function without arguments."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call(inputs.q, inputs.k, inputs.v, inputs.named)

        return forward
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.differentiable(op.spec).items()}
    named = {name: leaves.get(name, value) for name, value in inputs.named.items()}

    def both() -> object:
        o = call(leaves["q"], leaves["k"], leaves["v"], named)
        return torch.autograd.grad(o, list(leaves.values()), inputs.d_o, allow_unused=True)

    return both
