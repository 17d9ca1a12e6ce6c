"""Measures candidates beside the planner's choice, one after the other, and stores each as it comes.

In: an ``AttentionSpec``, a shape, a device. Out: a ``Step`` for each candidate, as it is measured or found in the
store, and a ``Tuning`` in the store that later plans use. Every candidate takes turns with the planner's choice in the
same rounds, so that a slow moment of the machine hits both; what a run that was stopped had measured is not measured
again. ``paired_times`` is a turn of named functions without arguments; on a GPU, where these return at once, ``wait``
makes the turn end with its work.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.tile_choices import TunedStore
from flashgen.diagnostics import SpecError
from flashgen.hosts import cuda
from flashgen.hosts.backends import gpu_at_hand
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.plan.measured import PASSES, Measured, MeasuredPass, Pins, ShapeClass, Tile, Tuning
from flashgen.targets.cpu.device import cpu_identity, local_cpu
from flashgen.targets.device_table import board_of
from flashgen.targets.families import family_of
from flashgen.targets.protocol import Device
from flashgen.toolchains.cpp import CompileFailed
from flashgen.verification.inputs import Inputs, random_inputs

_TURN_SECONDS, _MOST_CALLS = 0.02, 1000


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Times:
    """One candidate: seconds a call, and how many times longer it took than the first candidate."""

    name: str
    seconds: Spread
    ratio: Spread
    rounds: int


def cuda_is_there() -> bool:
    """Whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


def waiting(device: torch.device) -> Callable[[], object] | None:
    """What waits for the work of a device, where calls return before it is done."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def paired_times(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    budget: float = 30.0,
    wait: Callable[[], object] | None = None,
    settle: float = 0.0,
) -> tuple[Times, ...]:
    """Time the candidates against the first of them.

    Each is called twice to warm up, then in turn within a round, in an order that rotates and reverses; a turn of a
    short candidate is many calls. Rounds stop early when ``budget`` seconds are spent, but not before the third.
    ``wait`` returns when all work is done, where calls return before: it belongs to the time of a turn. A candidate
    runs ``settle`` seconds before its turn: a GPU at its power limit has the clock that its last work allowed.
    """

    def seconds(candidate: Callable[[], object], calls: int) -> float:
        """Of a call, over some calls in a row."""
        if wait is not None:
            wait()
        begin = time.perf_counter()
        for _ in range(calls):
            candidate()
        if wait is not None:
            wait()
        return (time.perf_counter() - begin) / calls

    names = list(candidates)
    calls = {}
    for name in names:
        candidates[name]()
        calls[name] = min(_MOST_CALLS, math.ceil(_TURN_SECONDS / seconds(candidates[name], 1)))
    samples: dict[str, list[float]] = {name: [] for name in names}
    stop = time.perf_counter() + budget
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > stop:
            break
        start = turn % len(names)
        order = names[start:] + names[:start]
        for name in order if turn // len(names) % 2 == 0 else reversed(order):
            settled = time.perf_counter() + settle
            while time.perf_counter() < settled:
                seconds(candidates[name], calls[name])
            samples[name].append(seconds(candidates[name], calls[name]))
    first = samples[names[0]]
    return tuple(
        Times(
            name=name,
            seconds=spread(samples[name]),
            ratio=spread([own / base for own, base in zip(samples[name], first, strict=True)]),
            rounds=len(first),
        )
        for name in names
    )


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


@dataclass(frozen=True)
class Candidate:
    """A tile of one pass. ``rank`` is its place in the model's order, 0 for the planner's choice.

    ``predicted`` is its time over that choice's.
    """

    tile: Tile
    rank: int
    predicted: float


def candidates(
    variant: Variant, device: Device, shape: Shape, element: ElementType, most: int
) -> Mapping[str, tuple[Candidate, ...]]:
    """At most ``most`` beside the planner's choice, for each pass. Raises ``SpecError`` where no tile fits."""
    found = {}
    for name in PASSES:
        seconds = family_of(device).candidates(device, variant, shape, element, name)
        first, *others = seconds
        ordered = [first, *sorted(others, key=lambda tile: (seconds[tile], tile.Br, tile.Bc))]
        found[name] = tuple(
            Candidate(tile, ordered.index(tile), seconds[tile] / seconds[first]) for tile in _spread(ordered, most + 1)
        )
    return found


def _spread(ordered: Sequence[Tile], most: int) -> list[Tile]:
    """The best half of what may be measured, and others at even distances, so that the model is tested, too."""
    if len(ordered) <= most:
        return list(ordered)
    best = (most + 1) // 2
    rest, others = ordered[best:], most - best
    return [*ordered[:best], *(rest[(n + 1) * len(rest) // others - 1] for n in range(others))]


_ROUNDS = 15

_Run = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What to tune: one spec and head dimension at one shape and element type on one device.

    ``most`` candidates of each pass are measured beside the planner's choice, ``seconds`` each, about.
    """

    spec: AttentionSpec
    head_dim: HeadDim
    shape: Shape
    element: ElementType
    device: str = "cpu"
    most: int = 8
    seconds: float = 3.0

    @property
    def variant(self) -> Variant:
        """The spec at this head dimension: what tunings are stored under."""
        return analyse(self.spec, self.head_dim)

    @property
    def shape_class(self) -> ShapeClass:
        """The class of the shape."""
        return ShapeClass.of(self.shape, self.element)

    @property
    def identity(self) -> str:
        """The device by the name that tunings are stored under."""
        return cuda.describe_device(torch.cuda.current_device())[0] if self.device == "cuda" else cpu_identity()

    def inputs(self) -> Inputs:
        """The arguments that every candidate is measured with, captured tensors such as users have."""
        dtype = TORCH_DTYPES[self.element]
        return random_inputs(self.spec, self.shape, self.head_dim, dtype, realistic=True).to(self.device)

    def ranked(self) -> dict[str, tuple[Candidate, ...]]:
        """The candidates of each pass, the planner's choice first. ``ValueError``: a GPU that nothing is made for."""
        device = board_of(gpu_at_hand(), self.identity) if self.device == "cuda" else local_cpu()
        return dict(candidates(self.variant, device, self.shape, self.element, self.most))


@dataclass(frozen=True)
class Step:
    """One candidate of one pass: measured now, known from before (``recalled``), or refused with a reason."""

    pass_name: str
    candidate: Candidate
    measured: Measured | None
    recalled: bool
    reason: str = ""


def tune(job: Job, store: TunedStore, *, again: bool = False) -> Iterator[Step]:
    """Every candidate of both passes; ``again`` forgets what is stored of this class. Raises ``OSError``."""
    variant, identity = job.variant, job.identity
    ranked = job.ranked()
    planners = {name: found[0].tile for name, found in ranked.items()}
    known = None if again else store.tunings(variant, identity).get(job.shape_class)
    passes = {
        name: each for name, each in (known.passes.items() if known else ()) if each.planner == planners.get(name)
    }
    session = _Session(job, planners)
    for name in PASSES:
        for candidate in ranked[name][1:]:
            done = [each for each in _of(passes.get(name)) if each.tile == candidate.tile]
            if done:
                yield Step(name, candidate, done[0], recalled=True)
                continue
            try:
                measured, seconds = session.measure(name, candidate)
            except (SpecError, CompileFailed) as error:
                said = error.diagnostics[0].message if isinstance(error, SpecError) else str(error).splitlines()[0]
                yield Step(name, candidate, None, recalled=False, reason=said)
                continue
            passes[name] = MeasuredPass(planners[name], seconds, (*_of(passes.get(name)), measured))
            store.store(variant, identity, _tuning(job, passes, complete=False))
            yield Step(name, candidate, measured, recalled=False)
        passes.setdefault(name, MeasuredPass(planners[name], session.seconds(name), ()))
    store.store(variant, identity, _tuning(job, passes, complete=True))


def _of(found: MeasuredPass | None) -> tuple[Measured, ...]:
    return () if found is None else found.candidates


def _tuning(job: Job, passes: dict[str, MeasuredPass], *, complete: bool) -> Tuning:
    return Tuning(job.shape_class, job.shape, dict(passes), time.time(), complete)


class _Session:
    """The operators and arguments of one run; each operator is built when it is first needed."""

    def __init__(self, job: Job, planners: dict[str, Tile]) -> None:
        self.job, self.planners = job, planners

    def measure(self, name: str, candidate: Candidate) -> tuple[Measured, float]:
        """A candidate beside the planner's choice, and seconds of the latter."""
        own = {**self.planners, name: candidate.tile}
        runs = {"planner": self._run(name, self._planner), "candidate": self._run(name, self._operator(own))}
        device = torch.device(self.job.device)
        planner, found = paired_times(runs, rounds=_ROUNDS, budget=self.job.seconds, wait=waiting(device))
        ratio = found.ratio
        measured = Measured(candidate.tile, candidate.rank, candidate.predicted, ratio.median, ratio.low, ratio.high)
        return measured, planner.seconds.median

    def seconds(self, name: str) -> float:
        """The planner's choice alone."""
        run = self._run(name, self._planner)
        (times,) = paired_times({"planner": run}, budget=self.job.seconds, wait=waiting(torch.device(self.job.device)))
        return times.seconds.median

    @functools.cached_property
    def _planner(self) -> AttentionOp:
        return self._operator(self.planners)

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return self.job.inputs()

    def _operator(self, tiles: dict[str, Tile]) -> AttentionOp:
        """One head dimension and element type with its tiles pinned: what is stored plays no part in it."""
        spec = replace(self.job.spec, head_dims=(self.job.head_dim,), dtypes=(self.job.element,))
        backend = "cuda" if self.job.device == "cuda" else "cpu"
        return load_spec(Pins(tiles["forward"], tiles["backward"]).pinned(spec), backend)

    def _run(self, name: str, op: AttentionOp) -> _Run:
        return _forward(op, self._inputs) if name == "forward" else _backward(op, self._inputs)


def _forward(op: AttentionOp, inputs: Inputs) -> _Run:
    def run() -> object:
        with torch.no_grad():
            return op(inputs.q, inputs.k, inputs.v, **inputs.named)

    return run


def _backward(op: AttentionOp, inputs: Inputs) -> _Run:
    """The backward pass by itself, of one forward pass that is kept."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.differentiable(op.spec).items()}
    named = {name: leaves.get(name, value) for name, value in inputs.named.items()}
    o = op(leaves["q"], leaves["k"], leaves["v"], **named)
    wanted: Sequence[torch.Tensor] = list(leaves.values())
    return lambda: torch.autograd.grad(o, wanted, inputs.d_o, retain_graph=True, allow_unused=True)
