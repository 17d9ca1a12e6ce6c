"""One sweep: what is measured at each place, as rows that tables, JSON and plots are made of.

In: an ``AttentionOp`` and its peers with the arguments of a call. Out: ``Point``s and ``Absent``s, one after the
other as they are measured, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.tuning.tune import Spread, paired_times, waiting
from flashgen.verification.inputs import Inputs
from tools.benchmarks.bench import passes_of, run_of
from tools.benchmarks.peak_memory import available_bytes, peak_bytes
from tools.benchmarks.peer import Inexpressible, Peer
from tools.benchmarks.peers import PEERS
from tools.benchmarks.traffic import PassBytes, pass_flops, rabe_staats_bytes, shape_of, standard_bytes

OWN = "flashgen"
_REFERENCE = "reference"
_USABLE_MEMORY = 0.6
# Bytes of matrices of size Nq × Nk that a peer forms at its peak, in elements of q: S, P and what softmax and dropout
# keep; backward dP and dS too. SDPA and FlexAttention form masks, of integers on the way.
_MATRICES: Mapping[str, tuple[float, float]] = {"standard": (4, 7), "dense": (6, 12), "sdpa": (0, 0), "flex": (0, 0)}
_MASK_BYTES = 10
_FORMS_NONE = "rabe_staats"


@dataclass(frozen=True)
class Point:
    """One measurement. ``x``: where in the sweep; ``series`` tells apart what one plot shows as several lines.

    ``seconds`` a call; ``ratio``: how many times longer than flashgen at the same place, round by round; in a sweep by
    blocks than the planner's choice, by sparsity than the densest place. ``memory_bytes`` beyond the arguments at the
    peak, ``hbm_bytes`` moved as predicted; each None where it is not known. ``first_call_seconds``: what compiling
    took, where a peer compiles at its first call. ``flops`` of the matrix products, of those that the paper counts.
    """

    series: str
    x: float
    label: str
    shape: Shape
    who: str
    backward: bool
    seconds: Spread
    ratio: Spread
    rounds: int
    kept_share: float
    memory_bytes: int | None
    hbm_bytes: int | None
    first_call_seconds: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Absent:
    """What was not measured, and why."""

    series: str
    x: float
    label: str
    who: str
    backward: bool
    reason: str


@dataclass(frozen=True)
class Place:
    """Where in a sweep a measurement stands."""

    series: str
    x: float
    label: str


@dataclass(frozen=True)
class Setting:
    """What is the same at every place of a sweep."""

    head_dim: HeadDim
    element: ElementType
    device: torch.device
    peers: tuple[str, ...]
    drop: float | None = None


@dataclass
class Clock:
    """The seconds that are left of a budget."""

    seconds: float
    _start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds; negative when they are spent."""
        return self.seconds - (time.perf_counter() - self._start)


Found = Point | Absent


@dataclass(frozen=True)
class Sweep:
    """A sweep as far as it was measured: what tables, JSON and plots show.

    ``kind`` is length, blocks, sparsity or totals; ``device`` names the processor and how many threads it ran;
    ``target`` is the GPU architecture whose HBM bytes are predicted; ``options`` are remarks such as the drop
    probability. ``of_code``: the date, and the commit of flashgen where it is known, which a version's number does not
    tell while it is worked on.
    """

    kind: str
    spec_name: str
    head_dim: HeadDim
    element: ElementType
    device: str
    target: str
    options: tuple[str, ...]
    points: tuple[Point, ...]
    absent: tuple[Absent, ...]
    of_code: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which ``from_json`` makes the same sweep."""
        return {
            "sweep": self.kind,
            "spec": self.spec_name,
            "head_dim": [self.head_dim.qk, self.head_dim.v],
            "dtype": self.element.value,
            "device": self.device,
            "hbm_target": self.target,
            "options": list(self.options),
            "of_code": self.of_code,
            "points": [
                dataclasses.asdict(point)
                | {"shape": dataclasses.astuple(point.shape), "pass": _PASS_NAMES[point.backward]}
                for point in self.points
            ],
            "absent": [dataclasses.asdict(each) for each in self.absent],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sweep:
        """From plain data. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for any other."""
        return cls(
            kind=str(data["sweep"]),
            spec_name=str(data["spec"]),
            head_dim=HeadDim(*data["head_dim"]),
            element=ElementType(data["dtype"]),
            device=str(data["device"]),
            target=str(data["hbm_target"]),
            options=tuple(data["options"]),
            points=tuple(_point(each) for each in data["points"]),
            absent=tuple(Absent(**each) for each in data["absent"]),
            of_code=str(data.get("of_code", "")),
        )


_PASS_NAMES = {False: "forward", True: "forward+backward"}


def _point(data: Mapping[str, Any]) -> Point:
    fields = {name: value for name, value in data.items() if name != "pass"}
    spreads = {name: Spread(**data[name]) for name in ("seconds", "ratio")}
    return Point(**{**fields, **spreads, "shape": Shape(*data["shape"])})


def measure(
    op: AttentionOp,
    inputs: Inputs,
    setting: Setting,
    place: Place,
    *,
    kept_share: float,
    hbm: PassBytes | None,
    seconds: float,
    leave_out: Mapping[str, str] | None = None,
    beside: Mapping[bool, Callable[[], object]] | None = None,
) -> Iterator[Found]:
    """flashgen and the peers with these arguments, forward, then forward and backward.

    ``seconds`` is what the timing may take; ``leave_out`` names peers that are not to be tried, with the reason.
    ``beside`` are runs, by whether they are backward, that take turns with all others and that ratios are taken to.
    """
    made: dict[str, Peer] = {}
    for name in setting.peers:
        found = _peer(name, op, inputs, setting, (leave_out or {}).get(name))
        if isinstance(found, Peer):
            made[name] = found
        else:
            for backward in (False, True):
                yield Absent(place.series, place.x, place.label, name, backward, found)
    for backward in (False, True):
        runs = {OWN: own_run(op, inputs, setting, backward=backward)}
        for name, call in passes_of(made, backward=backward).items():
            runs[name] = run_of(call, op, inputs, backward=backward)
        for name, peer in made.items():
            if backward and peer.no_backward:
                yield Absent(place.series, place.x, place.label, name, backward, peer.no_backward)
        memory: dict[str, int | None] = {}
        for name, run in list(runs.items()):
            try:
                memory[name] = _second_peak(run, setting.device)
            except RuntimeError as error:
                if name == OWN or not _is_about_memory(error):
                    raise
                del runs[name]
                yield Absent(place.series, place.x, place.label, name, backward, _NO_MEMORY)
        reference = {} if beside is None else {_REFERENCE: beside[backward]}
        timed = paired_times(reference | runs, rounds=11, budget=seconds / 2, wait=waiting(setting.device))
        for times in timed[len(reference) :]:
            yield Point(
                series=place.series,
                x=place.x,
                label=place.label,
                shape=shape_of(inputs),
                who=times.name,
                backward=backward,
                seconds=times.seconds,
                ratio=times.ratio,
                rounds=times.rounds,
                kept_share=kept_share,
                memory_bytes=memory[times.name],
                hbm_bytes=_hbm(times.name, shape_of(inputs), setting, hbm, backward=backward),
                flops=_flops(times.name, shape_of(inputs), setting, kept_share, backward=backward),
                first_call_seconds=made[times.name].first_call_seconds if times.name in made else None,
            )


def _peer(name: str, op: AttentionOp, inputs: Inputs, setting: Setting, leave_out: str | None) -> Peer | str:
    """A peer that is ready to run, or the reason why there is none."""
    reason = leave_out or _too_large(name, shape_of(inputs), setting)
    if reason is not None:
        return reason
    try:
        return PEERS[name](op.spec, inputs, setting.drop)
    except Inexpressible as error:
        return str(error)
    except RuntimeError as error:
        if not _is_about_memory(error):
            raise
        return _NO_MEMORY


def own_run(op: AttentionOp, inputs: Inputs, setting: Setting, *, backward: bool) -> Callable[[], object]:
    """flashgen's own pass as a function without arguments."""
    named: dict[str, Any] = {} if setting.drop is None else {"dropout_p": setting.drop}
    return run_of(lambda q, k, v, given: op(q, k, v, **given, **named), op, inputs, backward=backward)


def _second_peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Of the second call: the first loads libraries, and starts threads with stacks of their own."""
    run()
    return peak_bytes(run, device)


_NO_MEMORY = "there was not enough memory"


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _too_large(name: str, shape: Shape, setting: Setting) -> str | None:
    """A process that asks for more memory than there is may be ended without a word."""
    if name == _FORMS_NONE:
        return None
    available = available_bytes(setting.device)
    matrices = _MATRICES[name][1] * shape.heads * shape.batch * setting.element.bytes + _MASK_BYTES
    needed = shape.q_len * shape.kv_len * matrices
    if available is None or needed <= _USABLE_MEMORY * available:
        return None
    return f"its matrices of Nq × Nk would take about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


def _hbm(name: str, shape: Shape, setting: Setting, own: PassBytes | None, *, backward: bool) -> int | None:
    if name == OWN:
        return None if own is None else own.of(backward=backward)
    if name == "standard":
        return standard_bytes(shape, setting.head_dim, setting.element).of(backward=backward)
    if name == "rabe_staats":
        return rabe_staats_bytes(shape, setting.head_dim, setting.element).of(backward=backward)
    return None


def _flops(name: str, shape: Shape, setting: Setting, kept_share: float, *, backward: bool) -> float | None:
    found = pass_flops(name, shape, setting.head_dim, kept_share)
    return None if found is None else found.of(backward=backward)
