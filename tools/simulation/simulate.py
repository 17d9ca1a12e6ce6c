"""How long attention over ranks takes on paper: each rank's work by the cost model, what travels by the rate of a link.

In: a variant, a device, a shape, ranks, a rate. Out: a ``Simulation``. Who holds which positions, and which rows go to
whom, are those of ``partition`` and ``context_parallel`` (``needs``). Work is the pairs that the mask keeps, each as
long as the cost model says for a sequence of one rank's length; what travels is hidden behind the work that it does not
hold up:

    ring        one source after another; a piece travels while the one before it is worked on
    all_gather  all pieces at once, while a rank works on its own
    ulysses     heads change places before the work, and back after it

Nothing is measured. Links are taken to be full duplex, one a rank, and not to get into each other's way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.selection import conjuncts
from flashgen.analysis.variant import Variant
from flashgen.compiler.tile_choices import planned_at
from flashgen.distributed.blocks import MOST_BLOCKS, MOST_ROWS, Mask, are_few, cuts, kept
from flashgen.distributed.partition import Partition, dealt, pairs_of
from flashgen.ir.build import conjunction
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, literal, size, substitute, walk
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.report import PassReport
from flashgen.plan.tile_counts import known_params, tile_counts
from flashgen.reference.dense import constant_number
from flashgen.targets.families import family_of
from flashgen.targets.protocol import Device

METHODS = ("ring", "all_gather", "ulysses")
MOST_RANKS = 1024
HIDDEN = 0.05  # of the time; less that is waited for is no reason to do otherwise
_ROUND_SECONDS = 20e-6  # that a round costs beside its bytes and its work: a launch or two, a message, the merge
_GRADIENT_BYTES = 4  # of an element of a gradient of k or v that travels, at least
_MOST_QUERIES = 8192  # parts of spans of queries that are looked at
_LONGEST = 1 << 17  # whose time stands for all longer sequences
_TILE = 128  # of the count of kept pairs

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Pass:
    """One pass by one method. Seconds and bytes of the busiest rank; ``sent`` by each.

    ``seconds`` is all of it, ``work`` what its kernels take, ``travel`` what its link takes, ``waited`` what of that
    nothing hides. ``efficiency`` is a fair share of one device's time beside ``seconds``: what shorter calls, imbalance
    and waiting leave.
    """

    name: str
    seconds: float
    work: float
    travel: float
    waited: float
    efficiency: float
    sent: tuple[int, ...]

    @property
    def is_hidden(self) -> bool:
        """Whether ranks wait for next to nothing."""
        return self.waited <= HIDDEN * self.seconds


@dataclass(frozen=True)
class Method:
    """One method: its passes, or why it cannot be."""

    name: str
    passes: tuple[Pass, ...]
    refused: str = ""


@dataclass(frozen=True)
class Simulation:
    """A call over ranks. ``alone``: predicted seconds of each pass on one device, were its memory large enough.

    ``unknown`` are captured values that the mask reads and nobody knows: pairs that depend on them count as kept.
    """

    ranks: int
    shape: Shape
    element: ElementType
    link: float
    partition: Partition
    alone: Mapping[str, float]
    methods: tuple[Method, ...]
    unknown: tuple[str, ...]

    @property
    def best(self) -> Method:
        """The method of least time, both passes together."""
        return min(
            (each for each in self.methods if each.passes), key=lambda each: sum(one.seconds for one in each.passes)
        )

    def to_json(self) -> dict[str, object]:
        """As plain data; of bytes that ranks send the most and the sum."""
        return {
            "ranks": self.ranks,
            "shape": asdict(self.shape),
            "element": str(self.element),
            "link_bytes_per_second": self.link,
            "positions": {"least": min(self.partition.lengths), "most": max(self.partition.lengths)},
            "spans": max(map(len, self.partition.spans)),
            "imbalance": self.partition.imbalance,
            "one_device_seconds": dict(self.alone),
            "at_most": bool(self.unknown),
            "unknown": list(self.unknown),
            "best": self.best.name,
            "methods": [
                {
                    "method": each.name,
                    "refused": each.refused,
                    "passes": [
                        {
                            "pass": one.name,
                            "predicted_seconds": one.seconds,
                            "work_seconds": one.work,
                            "travel_seconds": one.travel,
                            "waited_seconds": one.waited,
                            "hidden": one.is_hidden,
                            "efficiency": one.efficiency,
                            "sent_bytes": {"most": max(one.sent), "total": sum(one.sent)},
                        }
                        for one in each.passes
                    ],
                }
                for each in self.methods
            ],
        }


def simulate(
    variant: Variant,
    device: Device,
    shape: Shape,
    ranks: int,
    link: float,
    captured: Mapping[str, NDArray[np.generic]] = MappingProxyType({}),
) -> Simulation:
    """A call of this shape over ``ranks`` devices, each of which sends and receives ``link`` bytes a second.

    ``captured`` are tensors that the mask reads, as far as they are known: work and bytes then are those of what it
    keeps. Raises ``ValueError`` for a shape whose queries and keys are not of one sequence, a tensor of another shape,
    and what no simulation is of; ``SpecError`` where the device has no plan.
    """
    if shape.q_len != shape.kv_len:
        raise ValueError(f"Nq is {shape.q_len} and Nk {shape.kv_len}; ranks hold the same positions of q, k and v")
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{ranks} ranks; 1 to {MOST_RANKS} are simulated")
    if not link > 0:
        raise ValueError(f"the rate of a link is {link}; bytes a second are expected")
    if shape.batch == 0 or shape.q_len < ranks:
        raise ValueError(f"{shape.batch} × {shape.q_len} positions on {ranks} ranks: some would have nothing to do")
    mask = _mask(variant, shape, captured)
    held = dealt(mask, shape.q_len, ranks)
    traffic = _traffic(mask, held)
    pairs, shares = _pairs(variant, shape), traffic.pairs
    if mask.tensors:  # what is known of them is in the blocks that are looked at
        of_spans = [sum(pairs_of(mask, shape.q_len, own)) for own in held.spans]
        pairs = sum(of_spans) * shape.batch * shape.heads
        sums = np.maximum(shares.sum(1), 1e-9)
        shares = shares * (np.array(of_spans) / sums)[:, None]
    costs = _Costs(_of_positions(variant, mask), device, shape)
    total = float(shares.sum())
    share = shares / total if total else np.zeros((ranks, ranks))
    heads = shape.heads, shape.kv_heads
    alone = {name: costs.seconds(name, *heads, shape.q_len, pairs) for name in _PASSES}
    row = shape.batch * shape.kv_heads * (variant.head_dim.qk + variant.head_dim.v)
    is_few = are_few(traffic.received, held.lengths)
    methods = []
    for name in METHODS:
        why = _no_heads(shape, ranks) if name == "ulysses" else ""
        if why:
            methods.append(Method(name, (), why))
            continue
        passes = []
        for each in _PASSES:
            if name == "ulysses":
                one = _by_heads(each, shape, held, costs, link, pairs)
            else:
                work = costs.seconds(each, *heads, shape.q_len // ranks, pairs) * share
                kept = each == "backward" and (name == "all_gather" or is_few)
                one = _by_keys(name, each, work, traffic.rows * row, costs.element.bytes, link, is_kept=kept)
            fair = alone[each] / ranks
            passes.append(replace(one, efficiency=fair / one.seconds if one.seconds else 1.0))
        methods.append(Method(name, tuple(passes)))
    return Simulation(ranks, shape, costs.element, link, held, alone, tuple(methods), _unknown(variant, mask))


_PASSES = ("forward", "backward")


# -- work --------------------------------------------------------------------------------------------------------------


class _Costs:
    """Seconds of kept pairs by the cost model, which is asked once for each shape."""

    def __init__(self, variant: Variant, device: Device, shape: Shape) -> None:
        self._variant, self._device, self._batch = variant, device, shape.batch
        elements = [each.element for each in self._passes(shape.heads, shape.kv_heads, 1)]
        self.element = ElementType.BF16 if ElementType.BF16 in elements else elements[0]

    @functools.lru_cache  # noqa: B019 - of one simulation
    def _passes(self, heads: int, kv_heads: int, length: int) -> tuple[PassReport, ...]:
        shape = Shape(self._batch, heads, kv_heads, length, length)
        found: tuple[PassReport, ...] = family_of(self._device).cost(
            self._device, self._variant, planned_at(self._variant, self._device, shape), shape
        )
        return found

    def seconds(self, name: str, heads: int, kv_heads: int, length: int, pairs: float) -> float:
        """Of so many pairs, at the rate of a call of this length."""
        length = min(length, _LONGEST)
        passes = self._passes(heads, kv_heads, length)
        found = next(each for each in passes if each.name == name and each.element is self.element)
        there = found.counts.kept_fraction * self._batch * heads * length * length
        return found.time.seconds * pairs / there if there else 0.0


def _pairs(variant: Variant, shape: Shape) -> float:
    """Kept pairs of the whole."""
    fraction = tile_counts(variant, shape, _TILE, _TILE).kept_fraction
    return fraction * shape.batch * shape.heads * shape.q_len * shape.kv_len


def _mask(variant: Variant, shape: Shape, captured: Mapping[str, NDArray[np.generic]]) -> Mask:
    read = {node.tensor for node in walk(variant.keep) if isinstance(node, Load)}
    known = {name: x for name, x in captured.items() if name in read}
    sizes = {"B": shape.batch, "H": shape.heads, "Hkv": shape.kv_heads, "Nq": shape.q_len, "Nk": shape.kv_len}
    for declared in variant.spec.tensors:
        if declared.name in known:
            values: dict[Expr, Expr] = {size(name): literal(value) for name, value in sizes.items()}
            wanted = [int(constant_number(substitute(each, values))) for each in declared.shape]
            if list(known[declared.name].shape) != wanted:
                raise ValueError(
                    f"tensor '{declared.name}' has shape {list(known[declared.name].shape)}; at {shape} it is {wanted}"
                )
    return Mask(variant, sizes, known_params(variant.spec.params, shape), known)


def _of_positions(variant: Variant, mask: Mask) -> Variant:
    """The same without the conditions that read what is known: most tiles of documents are as full as any."""
    kept_by = [
        each
        for each in conjuncts(variant.keep)
        if not any(isinstance(node, Load) and node.tensor in mask.tensors for node in walk(each))
    ]
    return replace(variant, keep=conjunction(*kept_by)) if mask.tensors else variant


def _unknown(variant: Variant, mask: Mask) -> tuple[str, ...]:
    nodes = tuple(walk(variant.keep))
    names = [node.tensor for node in nodes if isinstance(node, Load) and node.tensor not in mask.tensors]
    names += [
        node.name
        for node in nodes
        if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM and node.name not in mask.params
    ]
    return tuple(dict.fromkeys(names))


# -- what travels ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Traffic:
    """Of each rank and each source of keys the kept pairs (in no unit) and the rows that it needs, [ranks, ranks]."""

    pairs: Matrix
    rows: Matrix

    @property
    def received(self) -> list[float]:
        """Rows that each rank gets from others."""
        found: list[float] = (self.rows.sum(1) - self.rows.diagonal()).tolist()
        return found


def _traffic(mask: Mask, held: Partition) -> _Traffic:
    spans = [(rank, span) for rank, own in enumerate(held.spans) for span in own]
    size = max(held.length // MOST_BLOCKS, 1)
    parts = max(1, min(MOST_ROWS, _MOST_QUERIES // max(len(spans), 1)))
    queries = [(rank, row) for rank, (start, stop) in spans for row in cuts(start, stop, parts)]
    keys = [
        (rank, block) for rank, (start, stop) in spans for block in cuts(start, stop, max((stop - start) // size, 1))
    ]
    shares = kept(mask, [row for _, row in queries], [block for _, block in keys])
    widths = np.array([stop - start for _, (start, stop) in keys], np.float64)
    heights = np.array([stop - start for _, (start, stop) in queries], np.float64)
    of_queries, of_keys = (np.array([rank for rank, _ in each]) for each in (queries, keys))
    needed = _by_rank(shares, of_queries, held.world, np.maximum) > 0
    pairs = _by_rank(shares * heights[:, None], of_queries, held.world, np.add)
    both = (_by_rank((each * widths).T, of_keys, held.world, np.add).T for each in (pairs, needed))
    return _Traffic(*both)


def _by_rank(values: Matrix, ranks: NDArray[np.int64], world: int, combine: np.ufunc) -> Matrix:
    """The rows of each rank as one; nothing where it has none. Rows of a rank stand together."""
    found = np.zeros((world, values.shape[1]))
    there, first = np.unique(ranks, return_index=True)
    if len(there):
        found[there] = combine.reduceat(values, first, axis=0)
    return found


def _by_keys(
    method: str, name: str, work: Matrix, numbers: Matrix, element: int, link: float, *, is_kept: bool
) -> Pass:
    """A pass in which keys go to who needs them. ``work``: seconds by rank and source; ``numbers``: those that it gets.

    ``is_kept``: keys are there from the pass before. Backward, gradients of keys go home when they are computed.
    """
    ranks = len(work)
    gets = numbers * (1 - np.eye(ranks))
    keys = np.zeros_like(gets) if is_kept else gets * element
    home = gets * max(element, _GRADIENT_BYTES) if name == "backward" else np.zeros_like(gets)
    each, step = np.arange(ranks)[:, None], np.arange(ranks)[None]
    sources, receivers = (each - step) % ranks, (each + step) % ranks  # by round; of the first a rank is its own
    works = _rounds(method, work[each, sources])
    gets_keys, gives_keys = (_rounds(method, x) for x in (keys[each, sources], keys[receivers, each]))
    gives_home, gets_home = (_rounds(method, x) for x in (home[each, sources], home[receivers, each]))
    if is_kept:  # what goes home is computed first
        works, gives_home, gets_home = works[:, ::-1], gives_home[:, ::-1], gets_home[:, ::-1]
    # While a round is worked on, the keys of the next one come, and the gradients of the last one go.
    before, after = np.zeros((ranks, 1)), np.zeros((ranks, 2))
    gets_keys, gives_keys = (np.concatenate([x[:, 1:], after], 1) for x in (gets_keys, gives_keys))
    gets_home, gives_home = (np.concatenate([before, x], 1) for x in (gets_home, gives_home))
    moves = np.maximum(gets_keys + gets_home, gives_keys + gives_home) / link
    count = (numbers[each, sources][:, 1:] > 0).sum(1) if method == "ring" else np.full(ranks, int(ranks > 1))
    own = works.sum(1)
    seconds = np.maximum(np.concatenate([works, before], 1), moves).sum(1) + count * _ROUND_SECONDS
    busiest = int(seconds.argmax())
    sent, received = keys.sum(0) + home.sum(1), keys.sum(1) + home.sum(0)
    return Pass(
        name,
        float(seconds[busiest]),
        float(own[busiest]),
        float(np.maximum(sent, received).max() / link),
        float((seconds - own)[busiest]),
        1.0,
        tuple(int(x) for x in sent),
    )


def _rounds(method: str, values: Matrix) -> Matrix:
    """Of rounds by source, those of a method: all others at once, or one after another."""
    return values if method == "ring" else np.stack([values[:, 0], values[:, 1:].sum(1)], 1)


def _by_heads(name: str, shape: Shape, held: Partition, costs: _Costs, link: float, pairs: float) -> Pass:
    """A pass between two exchanges of heads."""
    ranks, dims, element = held.world, costs._variant.head_dim, costs.element.bytes
    heads, kv_heads = shape.heads // ranks, max(shape.kv_heads // ranks, 1)
    there = shape.batch * (heads * dims.qk + kv_heads * (dims.qk + dims.v)) * element
    back = shape.batch * heads * dims.v * element
    out, home = (there, back) if name == "forward" else (back, there)
    lengths = held.lengths
    sent = tuple(n * (ranks - 1) * out + (held.length - n) * home for n in lengths)
    received = tuple((held.length - n) * out + n * (ranks - 1) * home for n in lengths)
    work = costs.seconds(name, heads, kv_heads, shape.q_len, pairs / ranks)
    travel = max(*sent, *received) / link
    waited = travel + (2 * _ROUND_SECONDS if ranks > 1 else 0.0)
    seconds = work + waited
    return Pass(name, seconds, work, travel, waited, 1.0, sent)


def _no_heads(shape: Shape, ranks: int) -> str:
    if shape.heads % ranks:
        return f"{shape.heads} query heads cannot be dealt out to {ranks} ranks"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{shape.kv_heads} key/value heads cannot be dealt out to {ranks} ranks"
    return ""


# -- in words ----------------------------------------------------------------------------------------------------------


def in_words(simulations: Sequence[Simulation]) -> tuple[str, ...]:
    """Of each method and pass the first of these, ranks ascending, in which what travels is hidden no longer."""
    found = []
    for method in METHODS:
        calls = [(each, by) for each in simulations for by in each.methods if by.name == method and each.ranks > 1]
        for name in _PASSES:
            steps = [(each, one) for each, by in calls for one in by.passes if one.name == name]
            if steps:
                found.append(f"{method}, {name}: {_stops(steps)}")
        found += [f"{method}, {each.ranks} ranks: {by.refused}" for each, by in calls if by.refused]
    return tuple(found)


def _stops(steps: Sequence[tuple[Simulation, Pass]]) -> str:
    counts = [each.ranks for each, _ in steps]
    late = next(((each, one) for each, one in steps if not one.is_hidden), None)
    if late is None:
        return f"communication hides behind the work at {_in_range(counts)}"
    each, one = late
    before = [count for count in counts if count < each.ranks]
    until = f"hides at {_in_range(before)}, and stops" if before else "stops"
    return f"communication {until} hiding at {each.ranks}: {one.waited / one.seconds:.0%} of the time is waited"


def _in_range(counts: Sequence[int]) -> str:
    return f"{counts[0]} ranks" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} ranks"
