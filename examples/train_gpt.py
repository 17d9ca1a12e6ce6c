"""Trains a small GPT on bytes with the attention of any spec, and beside it the same model with PyTorch's attention.

    python -m examples.train_gpt alibi --plot alibi.png
    python -m examples.train_gpt sliding_window --set size=128 --length 2048 --batch 1

Both models begin with the same weights, see the same batches and take their steps in turn, so that their losses are the
same up to rounding, and both meet the same machine. PyTorch's is ``scaled_dot_product_attention``, with a bias or mask
of N × N where the spec says more than causal; where it cannot compute the spec, the dense formula.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.small_gpt import (
    Gpt,
    InPyTorch,
    Refused,
    attentions_of,
    check_plot,
    constant,
    device_named,
    first_leak,
    positive,
    spec_of,
)
from flashgen import SpecError
from flashgen.compiler.reading import Constant
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.nn import Attention
from flashgen.op.loading import load_spec
from flashgen.picture.plotting import COLORS, PlottingMissing, figure

VOCABULARY, HELD_OUT = 256, 0.1
MOST_BYTES = 2**22
_FIRST_STEPS = 3  # compile, and fill caches: no part of a speed

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on."""

    spec: str = "alibi"
    name: str | None = None
    const: Mapping[str, Constant] = field(default_factory=dict)
    causal: bool = False
    text: Path | None = None
    steps: int = 300
    batch: int = 8
    length: int = 256
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    positions: bool = True
    rate: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    beside: bool = True


@dataclass
class Trained:
    """One model: the loss (nats a byte) and the seconds of each step, and the loss of text that it has not seen."""

    name: str
    model: Gpt
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float = float("nan")

    def tokens_a_second(self, tokens: int) -> float:
        """By the median step, the first ones left out."""
        return tokens / statistics.median(self.seconds[_FIRST_STEPS:] or self.seconds)


# -- training ----------------------------------------------------------------------------------------------------------


def train(settings: Settings, tell: Callable[[str], None] = print) -> list[Trained]:
    """Train flashgen's model, and PyTorch's beside it. Raises ``Refused`` and ``SpecError``."""
    device = device_named(settings.device)
    spec = spec_of(
        settings.spec,
        settings.heads,
        settings.head_dim,
        settings.length,
        name=settings.name,
        const=settings.const,
        causal=settings.causal,
    )
    dtype = _dtype(settings, spec)
    _check_causal(settings, spec)
    text = read_text(settings.text)
    parts = split(text, settings.length)
    op = load_spec(spec)  # compiles

    torch.manual_seed(settings.seed)
    sizes = (settings.layers, settings.heads, settings.length)
    positions = settings.length if settings.positions else 0
    own = Trained("flashgen", Gpt(VOCABULARY, attentions_of(Attention, op, *sizes), positions))
    runs = [own]
    if settings.beside:
        attentions = attentions_of(InPyTorch, op, *sizes)
        runs.append(Trained(attentions[0].way, Gpt(VOCABULARY, attentions, positions)))
        runs[1].model.load_state_dict(own.model.state_dict())
    before = {name: x.detach().clone() for name, x in _learned(own.model, spec).items()}
    parameters = sum(x.numel() for x in own.model.parameters())
    tell(
        f"'{spec.name}': {parameters:,} parameters, {settings.layers} layers of {settings.heads} heads of "
        f"{settings.head_dim}, on {len(text):,} bytes; {settings.batch} × {settings.length} bytes a step, {dtype}, "
        f"{device}, {torch.get_num_threads()} threads"
    )
    tell(f"{'step':>6}" + "".join(f"  {run.name:>12}" for run in runs) + "    nats a byte")

    optimizers = [torch.optim.AdamW(run.model.to(device).parameters(), lr=settings.rate) for run in runs]
    precision = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not torch.float32)
    draw = torch.Generator().manual_seed(settings.seed)
    shown = max(1, settings.steps // 10)
    for step in range(1, settings.steps + 1):
        batch = batch_of(parts[0], settings, draw, device)
        for run, optimizer in zip(runs, optimizers, strict=True):
            _step(run, optimizer, batch, settings.seed + step, precision)
        if step % shown == 0 or step in (1, settings.steps):
            tell(f"{step:>6}" + "".join(f"  {run.losses[-1]:>{max(12, len(run.name))}.4f}" for run in runs))
        for run in runs:
            if run.losses[-1] != run.losses[-1]:
                raise Refused(f"the loss of {run.name} is not a number at step {step}; take a smaller --rate")
    for run in runs:
        run.held_out = _held_out(run.model, parts[1], settings, device, precision)
    for name, x in _learned(own.model, spec).items():
        tell(f"learned: {name} {list(x.shape)} moved by {float((x.cpu() - before[name]).abs().mean()):.2g} on average")
    return runs


def _step(
    run: Trained,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    seed: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> None:
    torch.manual_seed(seed)  # of dropout, where the spec has it: both models drop the same pairs
    start = time.perf_counter()
    with precision():
        loss = _loss(run.model, batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    optimizer.step()
    run.losses.append(loss.item())  # waits for a GPU
    run.seconds.append(time.perf_counter() - start)


def _loss(model: Gpt, batch: Batch) -> Tensor:
    tokens, following = batch
    return cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())


def _held_out(
    model: Gpt,
    text: Tensor,
    settings: Settings,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[object]],
) -> float:
    """The mean loss of up to eight batches of text that was not trained on."""
    draw = torch.Generator().manual_seed(settings.seed)
    model.eval()
    with torch.no_grad(), precision():
        batches = (batch_of(text, settings, draw, device) for _ in range(8))
        return statistics.fmean(_loss(model, each).item() for each in batches)


def _learned(model: Gpt, spec: AttentionSpec) -> dict[str, Tensor]:
    """What the spec learns, by layer."""
    names = [tensor.name for tensor in spec.tensors] + [param.name for param in spec.params if param.grad]
    return {
        f"{name} of layer {layer}": getattr(block.attention, name).detach()
        for layer, block in enumerate(model.blocks)
        for name in names
    }


def _dtype(settings: Settings, spec: AttentionSpec) -> torch.dtype:
    """That of the products: float32 where the spec has it, else bfloat16."""
    offered = {ElementType.F32: "float32", ElementType.BF16: "bfloat16"}
    known = [name for element, name in offered.items() if not spec.dtypes or element in spec.dtypes]
    if not known:
        raise Refused(f"'{spec.name}' is for float16 alone (`dtype`), which needs a scaled loss; add bf16 or f32")
    chosen = settings.dtype or known[0]
    if chosen not in known:
        raise Refused(f"--dtype {chosen}: '{spec.name}' is for {' and '.join(known)} (`dtype`)")
    return torch.float32 if chosen == "float32" else torch.bfloat16


def _check_causal(settings: Settings, spec: AttentionSpec) -> None:
    leak = first_leak(spec, settings.batch, settings.heads, settings.length)
    if leak is not None:
        raise Refused(
            f"'{spec.name}' is not causal: the byte at {leak[0]} sees the one at {leak[1]}, and so what it is to "
            "predict; --causal drops what comes after a query"
        )


# -- text --------------------------------------------------------------------------------------------------------------


def read_text(path: Path | None) -> bytes:
    """A file, or the .py files of a folder in their order, up to 4 MiB; by default those of the standard library."""
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
    try:
        if not path.is_dir():
            return path.read_bytes()[:MOST_BYTES]
        files = sorted(path.glob("*.py")) or sorted(path.rglob("*.py"))
        return b"".join(file.read_bytes() for file in files)[:MOST_BYTES]
    except OSError as error:
        raise Refused(f"--text {path}: {error.strerror or error}") from None


def split(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """What is trained on, and the last tenth. Raises ``Refused`` where a tenth holds no sequence."""
    border = len(text) - int(HELD_OUT * len(text))
    if len(text) - border <= length:
        least = int((length + 1) / HELD_OUT) + 1
        raise Refused(
            f"the text has {len(text):,} bytes; with sequences of {length} it takes {least:,}, of which the last tenth "
            "is held out: a smaller --length, or another --text"
        )
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return whole[:border], whole[border:]


def batch_of(text: Tensor, settings: Settings, draw: torch.Generator, device: torch.device) -> Batch:
    """Sequences from anywhere in the text, [B, N], and the byte that follows each of their bytes."""
    starts = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=draw)
    found = text[starts + torch.arange(settings.length + 1)].long().to(device)
    return found[:, :-1], found[:, 1:]


# -- results -----------------------------------------------------------------------------------------------------------


def tell_results(runs: Sequence[Trained], settings: Settings) -> None:
    """Held-out loss, speed, and how far the two curves are apart."""
    tokens = settings.batch * settings.length
    width = max(len(run.name) for run in runs)
    for run in runs:
        speed = run.tokens_a_second(tokens)
        print(f"{run.name:>{width}}: held-out loss {run.held_out:.4f} nats a byte, {speed:,.0f} tokens a second")
    if len(runs) == 2:
        own, their = runs
        apart = max(abs(a - b) for a, b in zip(own.losses, their.losses, strict=True))
        ratio = own.tokens_a_second(tokens) / their.tokens_a_second(tokens)
        print(f"the losses differ by at most {apart:.1e}; flashgen trains {ratio:.2f} times as fast")


def draw_losses(runs: Sequence[Trained], settings: Settings, path: Path) -> None:
    """Both curves, and below them how far they are apart."""
    with figure(path, 5.4, 3.6) as drawn:
        top, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1), squeeze=False)[:, 0]
        steps = range(1, settings.steps + 1)
        for run, color, width, dashes in zip(runs, COLORS, (2.4, 1.0), ("-", "--"), strict=False):
            top.plot(steps, run.losses, dashes, color=color, linewidth=width, label=run.name)
        top.set_ylabel("loss (nats a byte)")
        top.legend()
        name = settings.name or Path(settings.spec).stem
        top.set_title(
            f"{name}: {settings.layers} layers, {settings.heads} heads of {settings.head_dim}, N {settings.length}"
        )
        if len(runs) == 2:
            pairs = zip(steps, runs[0].losses, runs[1].losses, strict=True)
            apart = [(step, abs(own - their)) for step, own, their in pairs if own != their]
            below.semilogy(*zip(*apart, strict=True) if apart else ([], []), ".", color=COLORS[2], markersize=3)
        below.set_title("difference of the two, where there is one", loc="left", fontsize=7)
        below.set_xlabel("step")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, draw; 2 where what was asked for cannot be."""
    usual = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_gpt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("spec", nargs="?", default=usual.spec, help=f"a name of the gallery, or an .attn file ({usual.spec})")
    add("--name", help="one attention of a file that holds several")
    add("--set", dest="const", type=constant, metavar="NAME=VALUE", action="append", default=[], help="a constant")
    add("--causal", action="store_true", help="drop keys after the query, where the spec's mask does not")
    add("--text", type=Path, help="a file, or a folder of .py files (the standard library)")
    for name, what in (("steps", ""), ("batch", "sequences a step "), ("length", "of a sequence "), ("layers", "")):
        add(f"--{name}", type=positive, default=getattr(usual, name), help=f"{what}(%(default)s)")
    add("--heads", type=positive, default=usual.heads, help="of each layer (%(default)s)")
    add("--head-dim", type=positive, default=usual.head_dim, help="columns of a head (%(default)s)")
    add("--no-positions", dest="positions", action="store_false", help="no position embeddings, the spec has to know")
    add("--rate", type=float, default=usual.rate, help="of AdamW (%(default)s)")
    add("--seed", type=int, default=usual.seed, help="of weights and batches (%(default)s)")
    add("--device", default=usual.device, help="cpu, cuda, cuda:1 (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the products (float32 where the spec has it)")
    add("--no-beside", dest="beside", action="store_false", help="train flashgen's model alone")
    add("--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg or .pdf")
    given = vars(parser.parse_args(arguments))
    plot = given.pop("plot")
    settings = Settings(**{**given, "const": dict(given["const"])})
    try:
        if plot is not None:
            check_plot(plot)
        runs = train(settings)
        tell_results(runs, settings)
        if plot is not None:
            draw_losses(runs, settings, plot)
    except (Refused, SpecError, PlottingMissing, ValueError, OSError) as error:
        print(error if isinstance(error, SpecError) else f"train_gpt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
