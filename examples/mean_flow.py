"""Trains a toy MeanFlow on sets of points in the plane: a loss with a tangent in it, through attention.

    python -m examples.mean_flow
    python -m examples.mean_flow --points 2048 --batch 1 --steps 5 --through

MeanFlow (Geng et al., 2025) learns u(z, r, t), the mean velocity between the times r and t, from its own derivative:

    z = (1 - t) x + t e      v = e - x      u should be v - (t - r) du/dt,  du/dt = the tangent of u for (v, 0, 1)

A sample is a set of points on two arcs; the points of a set look at one another. Two models begin with the same
weights and see the same batches: one with flashgen's attention, one with PyTorch's ``scaled_dot_product_attention`` by
its MATH path, the only one of its paths that has tangents. Losses have to agree; time and memory of a step are told.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from tools.benchmarks.peak_memory import peak_bytes

SPEC = "attention points { head_dim 16 }"
HEADS, HEAD_DIM, LAYERS = 2, 16, 2
_WIDTH = HEADS * HEAD_DIM
_MIB = 2**20

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention, by the path that forms all matrices."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    """Attention of the points of a set, then a small network for each point."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.into, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.network = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.SiLU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, N, width]."""
        heads = self.into(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        moved: Tensor = x + self.network(self.norms[1](x))
        return moved


class MeanVelocity(nn.Module):
    """u(z, r, t): ``z`` [B, N, 2], times ``r`` and ``t`` [B], to [B, N, 2]."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.points = nn.Linear(2, _WIDTH)
        self.times = nn.Sequential(nn.Linear(2, _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, _WIDTH))
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.last = nn.Linear(_WIDTH, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """The mean velocity of every point."""
        x = self.points(z) + self.times(torch.stack([t, t - r], -1))[:, None]
        for block in self.blocks:
            x = block(x)
        u: Tensor = self.last(x)
        return u

    def using(self, attention: Attention) -> MeanVelocity:
        """The same weights around another attention."""
        other = copy.deepcopy(self)
        for block in other.blocks:
            assert isinstance(block, Block)
            block.attention = attention
        return other


def arcs(sets: int, points: int, generator: torch.Generator) -> Tensor:
    """[sets, points, 2]: points on two arcs that reach into one another, each set moved and turned as a whole."""
    angle = torch.pi * torch.rand(sets, points, generator=generator)
    upper = torch.rand(sets, points, generator=generator) < 0.5
    x = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], -1)
    x = torch.where(upper[..., None], x, -x)
    turn = 2 * torch.pi * torch.rand(sets, generator=generator)
    turned = torch.stack([torch.stack([turn.cos(), -turn.sin()], -1), torch.stack([turn.sin(), turn.cos()], -1)], -2)
    return x @ turned + 0.05 * torch.randn(sets, points, 2, generator=generator)


@dataclass(frozen=True)
class Batch:
    """Where points are at the times ``t``, how they move there, and since when the mean is taken."""

    z: Tensor
    v: Tensor
    r: Tensor
    t: Tensor

    @classmethod
    def drawn(cls, sets: int, points: int, generator: torch.Generator, device: torch.device) -> Batch:
        """Points between data and noise; a quarter of the sets has r = t, where u is the velocity itself."""
        x, e = arcs(sets, points, generator), torch.randn(sets, points, 2, generator=generator)
        r, t = torch.rand(2, sets, generator=generator).sort(0).values
        r = torch.where(torch.rand(sets, generator=generator) < 0.25, t, r)
        z = torch.lerp(x, e, t[:, None, None])
        return cls(*(each.to(device) for each in (z, e - x, r, t)))


def loss_of(model: MeanVelocity, batch: Batch, *, through: bool) -> Tensor:
    """The loss of a batch. ``through``: gradients go through the tangent, too, which the paper leaves out."""
    still, moving = torch.zeros_like(batch.r), torch.ones_like(batch.t)
    found: Sequence[Tensor] = torch.func.jvp(model, (batch.z, batch.r, batch.t), (batch.v, still, moving))
    u, tangent = found
    target = batch.v - (batch.t - batch.r)[:, None, None] * tangent
    loss: Tensor = (u - (target if through else target.detach())).square().mean()
    return loss


def gradients_of(model: MeanVelocity, batch: Batch, *, through: bool) -> None:
    """Forward and backward of a step."""
    loss_of(model, batch, through=through).backward()  # type: ignore[no-untyped-call]


@dataclass
class Run:
    """A model with its optimiser: losses and seconds of its steps, bytes at the peak of one (None: not known)."""

    name: str
    model: MeanVelocity
    optimiser: torch.optim.Optimizer
    losses: list[float]
    seconds: list[float]
    peak: int | None = None

    @classmethod
    def of(cls, name: str, model: MeanVelocity) -> Run:
        """Before its first step."""
        return cls(name, model, torch.optim.AdamW(model.parameters(), lr=2e-3), [], [])

    def step(self, batch: Batch, *, through: bool) -> None:
        """One step of training."""
        start = time.perf_counter()
        loss = loss_of(self.model, batch, through=through)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def train(
    steps: int,
    points: int,
    batch: int,
    *,
    through: bool = False,
    device: str = "cpu",
    tell: Callable[[str], None] = print,
) -> tuple[Run, Run]:
    """Both models, step by step in turn; the memory of a step is measured of one more."""
    torch.manual_seed(0)
    op = flashgen.loads(SPEC)
    own = MeanVelocity(op).to(device)
    runs = (Run.of("flashgen", own), Run.of("SDPA, MATH", own.using(by_math)))
    generator = torch.Generator().manual_seed(1)
    drawn = [Batch.drawn(batch, points, generator, torch.device(device)) for _ in range(steps + 1)]
    for number, each in enumerate(drawn[:steps]):
        for run in runs:
            run.step(each, through=through)
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            tell(f"step {number + 1:>5}  " + "  ".join(f"{run.name} {run.losses[-1]:.6f}" for run in runs))
    for run in runs:
        run.peak = peak_bytes(
            functools.partial(gradients_of, run.model, drawn[-1], through=through), torch.device(device)
        )
    return runs


def largest_difference(runs: tuple[Run, Run]) -> float:
    """Of the losses of the same step."""
    return max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))


@torch.no_grad()
def in_one_step(model: MeanVelocity, sets: int, points: int) -> Tensor:
    """Points from noise by one step of the mean velocity, from time 1 to time 0."""
    e = torch.randn(sets, points, 2, generator=torch.Generator().manual_seed(2)).to(next(model.parameters()).device)
    zero = e.new_zeros(sets)
    moved: Tensor = e - model(e, zero, zero + 1)
    return moved


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both, compare; 1 where losses differ by more than rounding explains."""
    parser = argparse.ArgumentParser(prog="python -m examples.mean_flow", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of training (100)")
    parser.add_argument("--points", type=int, default=256, help="of a set (256)")
    parser.add_argument("--batch", type=int, default=8, help="sets of a batch (8)")
    parser.add_argument("--through", action="store_true", help="gradients go through the tangent, too")
    parser.add_argument("--device", default="cpu", help="where both models lie (cpu)")
    given = parser.parse_args(arguments)
    if min(given.steps, given.points, given.batch) < 1:
        parser.error("--steps, --points and --batch are at least 1")
    runs = train(given.steps, given.points, given.batch, through=given.through, device=given.device)
    print(f"\n{'':>12} {'seconds a step':>15} {'peak MiB':>9}")
    for run in runs:
        peak = "?" if run.peak is None else f"{run.peak / _MIB:,.0f}"
        print(f"{run.name:>12} {sorted(run.seconds)[len(run.seconds) // 2]:>15.3f} {peak:>9}")
    far = largest_difference(runs)
    radius = in_one_step(runs[0].model, 1, given.points).norm(dim=-1).mean()
    print(
        f"\nlargest difference of the losses: {far:.1e}; points of one step lie {radius:.2f} from the centre on average"
    )
    return int(not far <= 1e-3 * max(1.0, *runs[1].losses))


if __name__ == "__main__":
    sys.exit(main())
