"""Learns to recall across thousands of positions, in memory where standard attention does not fit.

    python -m examples.long_range                                        # 4096 positions, a minute or two
    python -m examples.long_range --length 16384 --batch 1
    python -m examples.long_range sliding_window --set size=1024 --steps 300     # sees too little to learn it

A sequence begins with pairs of a key and a value, strewn among noise; noise follows, and at its end stand keys alone:
which value came with each? The answer lies three quarters of the sequence back or farther, and nowhere else. Training
begins with short sequences, which are doubled whenever the answers are right. All of it runs under a limit on memory
(`--memory`); one training step of standard attention, which forms matrices of N × N, is then tried under the same one.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.small_gpt import (
    Block,
    InPyTorch,
    Refused,
    attentions_of,
    check_plot,
    constant,
    device_named,
    positive,
    spec_of,
)
from flashgen import SpecError
from flashgen.compiler.reading import Constant
from flashgen.nn import Attention
from flashgen.op.loading import load_spec
from flashgen.op.op import BaseOp
from flashgen.picture.plotting import COLORS, PlottingMissing, figure
from tools.benchmarks.peak_memory import available_bytes, peak_bytes

ROOT = Path(__file__).resolve().parent.parent

SHORTEST, MOST_ASKED, MOST_AT_ONCE = 128, 64, 32
LEARNED, WINDOW = 0.98, 10  # a length is learned when so many answers of so many steps are right
HELD_OUT = 32  # sequences
_MIB = 2**20
_MATRICES = 5  # of [B, H, N, N], that standard attention holds at once on its way back

Kinds = Mapping[str, Callable[..., Attention]]
KINDS: Kinds = {"flashgen": Attention, "SDPA": InPyTorch, "standard": partial(InPyTorch, standard=True)}


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on; ``memory`` in MiB, beyond what the process has before it trains."""

    spec: str = "causal"
    name: str | None = None
    const: Mapping[str, Constant] = field(default_factory=dict)
    length: int = 4096
    batch: int = 4
    layers: int = 1
    heads: int = 2
    head_dim: int = 32
    pairs: int = 16
    vocabulary: int = 32
    steps: int = 1200
    rate: float = 3e-3
    seed: int = 0
    device: str = "cpu"
    memory: int = 1024

    @property
    def shortest(self) -> int:
        """Sequences whose first quarter holds all pairs."""
        return max(SHORTEST, 8 * self.pairs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences that are trained on, one after the other."""
        found = [self.length]
        while found[-1] >= 2 * self.shortest:
            found.append(found[-1] // 2)
        return tuple(reversed(found))

    def batch_at(self, length: int) -> int:
        """As many positions as at the full length, within reason."""
        return max(self.batch, min(MOST_AT_ONCE, self.batch * self.length // length))

    def asked(self, length: int) -> int:
        """Questions at the end of a sequence."""
        return min(MOST_ASKED, length // 4)


@dataclass(frozen=True)
class Learned:
    """What came of it: the share of right answers about sequences that were not trained on."""

    accuracy: float
    seconds: float
    steps: int
    reached: int
    curve: tuple[tuple[int, float], ...]  # the length and the share of each step


@dataclass(frozen=True)
class Step:
    """One training step at the full length: seconds, and bytes at its peak (None: not known); or why there is none.

    ``way``: what computes the attention.
    """

    way: str
    seconds: float = float("nan")
    peak: int | None = None
    failure: str | None = None


# -- the task ----------------------------------------------------------------------------------------------------------


def sequences(settings: Settings, length: int, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [count, length], ``vocabulary`` many each of keys, values and noise; and the answers [count, asked]."""
    pairs, vocabulary = settings.pairs, settings.vocabulary

    def some(share: int, among: int) -> Tensor:
        return torch.rand(count, among, generator=draw).argsort(1)[:, :share]

    tokens = 2 * vocabulary + torch.randint(vocabulary, (count, length), generator=draw)
    keys, values = some(pairs, vocabulary), torch.randint(vocabulary, (count, pairs), generator=draw)
    places = 2 * some(pairs, length // 8)  # in the first quarter
    tokens.scatter_(1, places, keys).scatter_(1, places + 1, vocabulary + values)
    asked = torch.randint(pairs, (count, settings.asked(length)), generator=draw)
    tokens[:, -asked.shape[1] :] = keys.gather(1, asked)
    return tokens, values.gather(1, asked)


class Recall(nn.Module):
    """Tokens [B, N] → logits [B, asked, vocabulary]. A position knows its own token and the one before it."""

    def __init__(self, settings: Settings, attentions: Sequence[Attention]) -> None:
        super().__init__()
        width = settings.heads * settings.head_dim
        self.tokens = nn.Embedding(3 * settings.vocabulary, width)
        self.mix = nn.Linear(2 * width, width)
        self.blocks = nn.Sequential(*(Block(width, each) for each in attentions))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, settings.vocabulary))

    def forward(self, tokens: Tensor, asked: int) -> Tensor:
        x = self.tokens(tokens)
        x = self.blocks(self.mix(torch.cat((x, x.roll(1, 1)), -1)))
        logits: Tensor = self.head(x[:, -asked:])
        return logits


# -- training ----------------------------------------------------------------------------------------------------------


class Trainer:
    """One model, its optimizer and its sequences."""

    def __init__(self, settings: Settings, kind: Callable[..., Attention], op: BaseOp) -> None:
        self.settings, self.device = settings, device_named(settings.device)
        torch.manual_seed(settings.seed)
        attentions = attentions_of(kind, op, settings.layers, settings.heads, settings.length)
        self.model = Recall(settings, attentions).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.rate)
        self.draw = torch.Generator().manual_seed(settings.seed)

    def step(self, length: int) -> tuple[float, float]:
        """One training step: the loss, and the share of right answers."""
        settings = self.settings
        tokens, answers = (x.to(self.device) for x in sequences(settings, length, settings.batch_at(length), self.draw))
        logits = self.model(tokens, answers.shape[1])
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), _share(logits, answers)

    def held_out(self) -> float:
        """The share of right answers at the full length, about sequences of another seed."""
        draw, shares = torch.Generator().manual_seed(self.settings.seed + 1), []
        self.model.eval()
        with torch.no_grad():
            for _ in range(HELD_OUT):
                tokens, answers = sequences(self.settings, self.settings.length, 1, draw)
                logits = self.model(tokens.to(self.device), answers.shape[1])
                shares.append(_share(logits, answers.to(self.device)))
        self.model.train()
        return sum(shares) / len(shares)


def _share(logits: Tensor, answers: Tensor) -> float:
    return (logits.argmax(-1) == answers).double().mean().item()


def learn(settings: Settings, op: BaseOp, tell: Callable[[str], None] = print) -> Learned:
    """Train under the limit on memory. Raises ``Refused`` where that is too little."""
    trainer = Trainer(settings, Attention, op)
    Trainer(settings, Attention, op).step(settings.length)  # kernels are compiled before memory is short
    with_limit(settings)
    begin, step = time.perf_counter(), 0
    tell(f"{'length':>7} {'batch':>6} {'steps':>6} {'loss':>8} {'right':>8} {'seconds':>8}")
    reached = 0
    curve: list[tuple[int, float]] = []
    for length in settings.lengths:
        first, shares = step, [0.0]
        while step < settings.steps and (len(shares) < WINDOW or sum(shares[-WINDOW:]) < LEARNED * WINDOW):
            loss, share = trainer.step(length)
            shares.append(share)
            curve.append((length, share))
            step += 1
        if step > first:
            mean = sum(shares[-WINDOW:]) / WINDOW
            seconds = time.perf_counter() - begin
            counts = f"{length:>7} {settings.batch_at(length):>6} {step - first:>6}"
            tell(f"{counts} {loss:>8.4f} {mean:>8.1%} {seconds:>8.0f}")
            reached = length if mean >= LEARNED else reached
    accuracy = trainer.held_out()
    return Learned(accuracy, time.perf_counter() - begin, step, reached, tuple(curve))


def draw_curve(settings: Settings, found: Learned, path: Path) -> None:
    """The share of right answers at each step, and where sequences became longer."""
    with figure(path, 5.4, 2.6) as drawn:
        axes = drawn.subplots()
        steps = range(1, len(found.curve) + 1)
        axes.plot(steps, [share for _, share in found.curve], color=COLORS[0])
        axes.axhline(1 / settings.vocabulary, color=COLORS[1], linestyle="--", linewidth=0.8)
        axes.text(1, 1 / settings.vocabulary + 0.02, "chance", color=COLORS[1], fontsize=7)
        lengths = [length for length, _ in found.curve]
        for length in dict.fromkeys(lengths):
            axes.axvline(lengths.index(length) + 1, color="#999999", linewidth=0.6)
            axes.text(lengths.index(length) + 1.5, 0.5, f"N {length}", rotation=90, fontsize=7, va="center")
        axes.set_xlabel("step")
        axes.set_ylabel("share of right answers")
        axes.set_title(f"recall over {_distances(settings)} positions, {settings.spec}")


# -- memory ------------------------------------------------------------------------------------------------------------


def with_limit(settings: Settings) -> None:
    """From here on this process may take ``settings.memory`` MiB more; 0: no limit, whatever it inherited."""
    device = device_named(settings.device)
    if device.type == "cuda" and settings.memory:
        total = torch.cuda.get_device_properties(device).total_memory
        now = torch.cuda.memory_allocated(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (now + settings.memory * _MIB) / total), device)
    elif sys.platform == "linux":
        found = re.search(r"^VmData:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found, "proc(5)"
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        least = 1024 * int(found[1]) + settings.memory * _MIB
        resource.setrlimit(resource.RLIMIT_DATA, (least if settings.memory else most, most))
    elif settings.memory:
        raise Refused("--memory: a limit needs Linux or a GPU; --memory 0 trains without one")


def measure(settings: Settings, kind: str) -> Step:
    """One training step of a kind of attention at the full length, in this process."""
    op = _op(settings)
    trainer = Trainer(settings, KINDS[kind], op)
    trainer.step(SHORTEST)
    if kind == "flashgen":
        trainer.step(settings.length)  # compiles
    with_limit(settings)
    seconds: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        trainer.step(settings.length)
        seconds.append(time.perf_counter() - start)

    first = trainer.model.blocks[0].attention
    way = getattr(first, "way", kind)
    try:
        peak = peak_bytes(step, trainer.device)
    except (RuntimeError, MemoryError) as error:
        return Step(way, failure=_said(error))
    return Step(way, seconds[-1], peak)


def measured(settings: Settings, kind: str) -> Step:
    """The same in a process of its own, whose memory is its own."""
    command = [sys.executable, "-m", "examples.long_range", "--measure", kind, json.dumps(asdict(settings))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        return Step(kind, failure=(done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return Step(**json.loads(done.stdout))


def compare(settings: Settings, tell: Callable[[str], None] = print) -> None:
    """A training step of each kind under the limit; and without it, where it needs more and there is more."""
    tell(f"\none training step, {settings.batch} × {settings.length} positions")
    limit = f"within {settings.memory} MiB" if settings.memory else "no limit"
    tell(f"{'':>26} {'peak MiB':>9} {'seconds':>8}  {limit}")
    for kind in KINDS:
        step = measured(settings, kind)
        said = "fits"
        if step.failure is not None:
            said = f"does not fit: {step.failure}"
            needs = _MATRICES * matrix_bytes(settings)
            free = available_bytes(torch.device(settings.device))
            if settings.memory and (free is None or 1.3 * needs < free):
                step = measured(_without_limit(settings), kind)
        peak = "?" if step.peak is None else f"{step.peak / _MIB:,.0f}"
        tell(f"{step.way:>26} {peak:>9} {step.seconds:>8.2f}  {said}")
    tell(f"one matrix of B × H × N × N in float32 takes {matrix_bytes(settings) / _MIB:,.0f} MiB")


def _said(error: BaseException) -> str:
    """The first line of an error; of PyTorch's CPU allocator what it could not get."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return f"no {int(found[1]) / _MIB:,.0f} MiB more" if found else str(error).splitlines()[0]


def matrix_bytes(settings: Settings) -> int:
    """Of the scores of all heads in float32."""
    return 4 * settings.batch * settings.heads * settings.length**2


def _without_limit(settings: Settings) -> Settings:
    return Settings(**{**asdict(settings), "memory": 0})


def _op(settings: Settings) -> BaseOp:
    sizes = (settings.heads, settings.head_dim, settings.length)
    return load_spec(spec_of(settings.spec, *sizes, name=settings.name, const=settings.const))


# -- the command line --------------------------------------------------------------------------------------------------


def check(settings: Settings) -> None:
    """Raises ``Refused`` for sizes at which there is no task, and a device that is not there."""
    device_named(settings.device)
    if settings.length < settings.shortest:
        raise Refused(
            f"--length {settings.length}: {settings.pairs} pairs take sequences of {settings.shortest} or more"
        )
    if settings.pairs > settings.vocabulary:
        raise Refused(f"--pairs {settings.pairs}: a key stands in one pair, and there are {settings.vocabulary} keys")


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn, compare, print; 2 where what was asked for cannot be."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--measure"]:  # what `measured` starts
        print(json.dumps(asdict(measure(Settings(**json.loads(given[2])), given[1]))))
        return 0
    usual = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m examples.long_range", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("spec", nargs="?", default=usual.spec, help=f"a name of the gallery, or an .attn file ({usual.spec})")
    add("--name", help="one attention of a file that holds several")
    add("--set", dest="const", type=constant, metavar="NAME=VALUE", action="append", default=[], help="a constant")
    helps = {
        "length": "of the sequences in the end",
        "batch": "sequences a step at that length",
        "layers": "of the model",
        "heads": "of each layer",
        "head_dim": "columns of a head",
        "pairs": "to be remembered",
        "vocabulary": "keys, and as many values and kinds of noise",
        "steps": "at most, of all lengths together",
    }
    for name, what in helps.items():
        option = f"--{name.replace('_', '-')}"
        add(option, type=positive, default=getattr(usual, name), help=f"{what} (%(default)s)")
    add("--rate", type=float, default=usual.rate, help="of AdamW (%(default)s)")
    add("--seed", type=int, default=usual.seed, help="of weights and sequences (%(default)s)")
    add("--device", default=usual.device, help="cpu, cuda, cuda:1 (%(default)s)")
    add("--memory", type=int, default=usual.memory, metavar="MIB", help="for training; 0: no limit (%(default)s)")
    add("--no-compare", dest="compare", action="store_false", help="leave out the other kinds of attention")
    add("--plot", type=Path, metavar="FILE", help="draw how it learns: .png, .svg or .pdf")
    options: dict[str, Any] = vars(parser.parse_args(given))
    wants_comparison, plot = options.pop("compare"), options.pop("plot")
    settings = Settings(**{**options, "const": dict(options["const"])})
    try:
        check(settings)
        if plot is not None:
            check_plot(plot)
        op = _op(settings)
        limit = f"within {settings.memory} MiB" if settings.memory else "without a limit on memory"
        print(
            f"associative recall with '{op.spec.name}': {settings.pairs} pairs, answers {_distances(settings)} "
            f"positions back\n{settings.layers} × {settings.heads} heads of {settings.head_dim}, {limit}, "
            f"{settings.device}, {torch.get_num_threads()} threads"
        )
        found = learn(settings, op)
        print(
            f"held out, length {settings.length}: {found.accuracy:.1%} of the answers are right (chance: "
            f"{1 / settings.vocabulary:.1%}), after {found.steps} steps in {found.seconds:.0f} s"
        )
        if found.reached < settings.length:
            learned = f"up to {found.reached}" if found.reached else "at no length"
            print(f"it was learned {learned}: give it more --steps, or a mask that reaches farther")
        if plot is not None:
            draw_curve(settings, found, plot)
        if wants_comparison:
            compare(settings)
    except (Refused, SpecError, PlottingMissing, ValueError, OSError) as error:
        print(error if isinstance(error, SpecError) else f"long_range: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        print(f"long_range: {_said(error)} (--memory {settings.memory})", file=sys.stderr)
        return 2
    return 0


def _distances(settings: Settings) -> str:
    nearest = settings.length - settings.asked(settings.length) - 2 * (settings.length // 8) + 1
    return f"{nearest} to {settings.length - 2}"


if __name__ == "__main__":
    sys.exit(main())
