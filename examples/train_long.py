"""Trains a small GPT on sequences that are spread over ranks: each holds some positions, attention crosses ranks.

    torchrun --nproc-per-node 2 -m examples.train_long alibi --length 8192
    torchrun --nproc-per-node 8 -m examples.train_long sliding_window --set size=1024 --length 1048576 --device cuda

Ranks speak gloo on CPUs and NCCL on GPUs; without torchrun there is one. Every rank has the whole model. Embeddings,
perceptrons and the loss are of its own positions, their gradients are added over ranks; attention goes through
``flashgen.distributed.context_parallel``, whose gradients of what a spec learns are those of all ranks already. Losses
are those of one process up to rounding, which ``--beside`` shows: rank 0 trains the same model alone afterwards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.small_gpt import (
    Gpt,
    Refused,
    attentions_of,
    constant,
    device_named,
    first_leak,
    learned_by,
    positive,
    spec_of,
)
from examples.train_gpt import VOCABULARY, read_text, split
from flashgen import SpecError
from flashgen.compiler.reading import Constant
from flashgen.distributed import ContextParallel, Partition, context_parallel, partition
from flashgen.distributed.parallel import METHODS
from flashgen.distributed.partition import METHODS as PARTITIONS
from flashgen.nn import Attention
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp

_MOST_SEARCHED = 1024  # positions in which a mask is searched for what it shows a query of what follows
_FIRST_STEPS = 2  # compile, and fill caches: no part of a speed


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on, but for the ranks."""

    spec: str = "alibi"
    name: str | None = None
    const: Mapping[str, Constant] = field(default_factory=dict)
    text: Path | None = None
    method: str = "auto"
    partition: str = "balanced"
    steps: int = 20
    batch: int = 1
    length: int = 4096
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    rate: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    beside: bool = False


@dataclass(frozen=True)
class Trained:
    """The loss (nats a byte) and the seconds of each step, and the model as it is afterwards."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    model: Gpt

    def tokens_a_second(self, tokens: int) -> float:
        """By the median step, the first ones left out."""
        return tokens / statistics.median(self.seconds[_FIRST_STEPS:] or self.seconds)


class OverRanks(Attention):
    """The attention of a layer, of whose sequence this rank has a part."""

    sharded: ContextParallel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """``q``, ``k``, ``v`` [B, H, n, D] at this rank's positions → ``o`` of the same."""
        return self.sharded(q, k, v, **learned_by(self), **arguments)


@dataclass(frozen=True)
class Spread:
    """How a model is spread over the ranks of a group; ``sharded`` is None where this process is alone."""

    op: AttentionOp
    dealt: Partition
    sharded: ContextParallel | None
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, op: AttentionOp, settings: Settings, group: dist.ProcessGroup | None) -> Spread:
        """Over the ranks of a group, by default all."""
        sizes: dict[str, Any] = {"batch": settings.batch, "heads": settings.heads, "kv_heads": settings.heads}
        world = dist.get_world_size(group)
        dealt = partition(op, settings.length, world, method=settings.partition, **sizes)
        sharded = context_parallel(op, group, settings.method, dealt) if world > 1 else None
        return cls(op, dealt, sharded, device_of(settings.device), group)

    def model(self, settings: Settings) -> Gpt:
        """A model with the weights of this seed, the same on every rank."""
        torch.manual_seed(settings.seed)
        sizes = (self.op, settings.layers, settings.heads, settings.length)
        if self.sharded is None:
            return Gpt(VOCABULARY, attentions_of(Attention, *sizes), settings.length).to(self.device)
        attentions = attentions_of(OverRanks, *sizes)
        for each in attentions:
            each.sharded = self.sharded
        return Gpt(VOCABULARY, attentions, settings.length).to(self.device)

    def told(self, model: Gpt, settings: Settings) -> Iterator[str]:
        """What there is to say of it, which every rank has to ask."""
        count = sum(x.numel() for x in model.parameters())
        yield (
            f"'{self.op.spec.name}': {count:,} parameters, {settings.layers} layers of {settings.heads} heads of "
            f"{settings.head_dim}; {settings.batch} × {settings.length} bytes a step, {self.device.type}"
        )
        yield f"partition: {self.dealt}"
        if self.sharded is not None:
            n = self.dealt.lengths[dist.get_rank(self.group)]
            rows = torch.zeros(settings.batch, settings.heads, n, settings.head_dim, device=self.device)
            learned = learned_by(model.get_submodule("blocks.0.attention"))  # type: ignore[arg-type]
            choice = self.sharded.explain(rows, rows, rows, **learned)
            sent = max(choice.sent) / 1e6
            yield f"method: {choice.method}, {choice.reason}; a rank sends up to {sent:.3f} MB a layer forward"

    def loss(self, model: Gpt, tokens: Tensor, following: Tensor) -> Tensor:
        """A rank's part of the mean over all positions: the parts of all ranks add up to it."""
        own = self.dealt.positions(dist.get_rank(self.group))
        x = model.embedded(tokens[:, own].to(self.device), own)
        logits = model.head(model.blocks(x))
        wanted = following[:, own].to(self.device)
        total = cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
        return total / following.numel()

    def add_gradients(self, model: Gpt) -> None:
        """Add over ranks the gradients that are of this rank's positions: all but those of what attentions learn."""
        learned = [module for module in model.modules() if isinstance(module, OverRanks)]
        theirs = {parameter for module in learned for parameter in module.parameters()}
        ours = [parameter for parameter in model.parameters() if parameter not in theirs]
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in ours]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat, group=self.group)
        for parameter, gradient in zip(ours, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.vector_to_parameters(flat, gradients)


def train(settings: Settings, tell: Callable[[str], None] = print, group: dist.ProcessGroup | None = None) -> Trained:
    """Train over the ranks of a group, each of which calls this. Raises ``Refused`` and ``SpecError``."""
    device_of(settings.device)
    op = _op(settings)
    text, _ = split(read_text(settings.text), settings.length)
    spread = Spread.of(op, settings, group)
    model = spread.model(settings)
    for line in spread.told(model, settings):
        tell(line)
    return _steps(spread, model, settings, text, tell)


def _steps(spread: Spread, model: Gpt, settings: Settings, text: Tensor, tell: Callable[[str], None]) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    draw = torch.Generator().manual_seed(settings.seed)
    losses, seconds = [], []
    shown = max(1, settings.steps // 10)
    for step in range(1, settings.steps + 1):
        starts = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=draw)
        found = text[starts + torch.arange(settings.length + 1)].long()
        torch.manual_seed(settings.seed + step)  # of dropout, where the spec has it
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = spread.loss(model, found[:, :-1], found[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        spread.add_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=spread.group)
        losses.append(whole.item())  # waits for a GPU
        seconds.append(time.perf_counter() - start)
        if losses[-1] != losses[-1]:
            raise Refused(f"the loss is not a number at step {step}; take a smaller --rate")
        if step % shown == 0 or step in (1, settings.steps):
            tell(f"step {step:>5}   loss {losses[-1]:.4f} nats a byte   {seconds[-1]:.2f} s")
    return Trained(tuple(losses), tuple(seconds), model)


def _op(settings: Settings) -> AttentionOp:
    """The op of a causal spec that brings all that it captures."""
    spec = spec_of(
        settings.spec, settings.heads, settings.head_dim, settings.length, name=settings.name, const=settings.const
    )
    leak = first_leak(spec, settings.batch, settings.heads, min(settings.length, _MOST_SEARCHED))
    if leak is not None:
        raise Refused(
            f"'{spec.name}' is not causal: the byte at {leak[0]} sees the one at {leak[1]}, and so what it is to "
            "predict; add `and causal` to its mask"
        )
    op = load_spec(spec)  # compiles
    assert isinstance(op, AttentionOp)
    return op


# -- ranks -------------------------------------------------------------------------------------------------------------


def device_of(name: str) -> torch.device:
    """The device of this rank: of GPUs the one with its local number. Raises ``Refused``."""
    return device_named(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name)


@contextmanager
def ranks(device: torch.device) -> Iterator[None]:
    """The group of all ranks that torchrun started; of this process alone where it did not."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _run(settings: Settings) -> None:
    def tell(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    trained = train(settings, tell)
    speed = trained.tokens_a_second(settings.batch * settings.length)
    tell(f"{speed:,.0f} tokens a second on {dist.get_world_size()} ranks")
    if settings.beside:
        single = dist.new_group([0])
        if dist.get_rank() == 0:
            lone = train(settings, lambda _: None, single)
            apart = max(abs(a - b) for a, b in zip(trained.losses, lone.losses, strict=True))
            tell(
                f"{lone.tokens_a_second(settings.batch * settings.length):,.0f} tokens a second in one process; the "
                f"losses differ by at most {apart:.1e}"
            )
        dist.barrier()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and print; 2 where what was asked for cannot be."""
    usual = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_long", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("spec", nargs="?", default=usual.spec, help=f"a name of the gallery, or an .attn file ({usual.spec})")
    add("--name", help="one attention of a file that holds several")
    add("--set", dest="const", type=constant, metavar="NAME=VALUE", action="append", default=[], help="a constant")
    add("--text", type=Path, help="a file, or a folder of .py files (the standard library)")
    add("--method", choices=METHODS, default=usual.method, help="what crosses ranks (%(default)s)")
    add("--partition", choices=PARTITIONS, default=usual.partition, help="who holds which positions (%(default)s)")
    for name, what in (("steps", ""), ("batch", "sequences a step "), ("length", "of a sequence "), ("layers", "")):
        add(f"--{name}", type=positive, default=getattr(usual, name), help=f"{what}(%(default)s)")
    add("--heads", type=positive, default=usual.heads, help="of each layer (%(default)s)")
    add("--head-dim", type=positive, default=usual.head_dim, help="columns of a head (%(default)s)")
    add("--rate", type=float, default=usual.rate, help="of AdamW (%(default)s)")
    add("--seed", type=int, default=usual.seed, help="of weights and batches (%(default)s)")
    add("--device", default=usual.device, help="cpu, cuda (%(default)s)")
    add("--beside", action="store_true", help="train in one process afterwards, and compare the losses")
    given = vars(parser.parse_args(arguments))
    settings = Settings(**{**given, "const": dict(given["const"])})
    try:
        with ranks(device_of(settings.device)):
            _run(settings)
    except (Refused, SpecError, ValueError, OSError) as error:
        print(error if isinstance(error, SpecError) else f"train_long: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
