"""Which method spreads a call: the bytes that each method sends, and the time that it is predicted to take.

In: a call as all ranks know it. Out: a ``Choice``, the same on every rank. Compute time is the cost model's for one
device, shared out by the partition; transfer time is bytes over the bandwidth of a link.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from flashgen.analysis.variant import analyse
from flashgen.compiler.pipeline import device_named
from flashgen.compiler.tile_choices import planned_at
from flashgen.diagnostics import SpecError
from flashgen.distributed.blocks import Held, Mask, NeededKeys, length
from flashgen.distributed.exchange import KEYS, Topology
from flashgen.distributed.partition import work_of
from flashgen.distributed.rounds import Pace
from flashgen.distributed.ulysses import Share, no_heads, shares_of
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.plan.report import PassReport
from flashgen.targets.families import family_of

# Bytes a second that a rank sends to another: what NCCL was measured to move between two H100 of one host (of the 450
# GB/s that NVLink has in one direction), and a local network.
LINKS: Mapping[str, float] = {"nccl": 300e9, "gloo": 1e9}
_TURN = 20e-6  # seconds that a round costs beside its work: launches, and the merge of its results
_ELEMENT_BYTES = 4  # an element of a gradient that travels
_COPIED = 4  # reads and writes to copy a row of keys; strided ones have half of the memory's speed
_MERGED = 5  # reads and writes of a float32 row of o to add it to another
_MEMORY = {"cuda": 2.5e12, "cpu": 1e10}  # bytes a second
_LONGEST = 1 << 17  # sequences that are longer are predicted as this one
_MOST_HELD = 4.0  # keys that a rank may hold at once, over its own ones


@dataclass(frozen=True)
class Choice:
    """How a call is spread: ``method``, the bytes that each rank sends forward and backward, and why.

    Bytes are those of q, k, v, o and their gradients; lse and captured values are not counted.
    """

    method: str
    sent: tuple[int, ...]
    sent_backward: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.method}: the busiest rank sends {max(self.sent) / 1e6:.3f} MB forward and "
            f"{max(self.sent_backward) / 1e6:.3f} MB backward; {self.reason}"
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: B, H and Hkv over all ranks, D and Dv, and the bytes of an element."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: HeadDim
    element: int

    def named(self, N: int) -> dict[str, int]:
        """The sizes of a call over N positions, by their names in the language."""
        D, Dv = self.head_dim.qk, self.head_dim.v
        return {"B": self.batch, "H": self.heads, "Hkv": self.kv_heads, "Nq": N, "Nk": N, "D": D, "Dv": Dv}

    @property
    def key_row(self) -> int:
        """Bytes of k and v at one position."""
        return self.batch * self.kv_heads * (self.head_dim.qk + self.head_dim.v) * self.element


@dataclass(frozen=True)
class Travel:
    """Bytes that each rank sends forward and backward, and gets forward."""

    sent: tuple[int, ...]
    sent_backward: tuple[int, ...]
    received: tuple[int, ...]


def by_keys(needs: NeededKeys, sizes: Sizes, *, again: bool) -> Travel:
    """The travel of keys and values to the ranks that need them; ``again``: they are sent in both passes."""
    world = len(needs.keys)
    row, back = sizes.key_row, sizes.key_row // sizes.element * max(sizes.element, _ELEMENT_BYTES)
    sent = tuple(needs.rows_sent(rank) * row for rank in range(world))
    received = tuple(needs.rows_received(rank) * row for rank in range(world))
    home = [needs.rows_received(rank) * back for rank in range(world)]
    return Travel(sent, tuple(x + (y if again else 0) for x, y in zip(home, sent, strict=True)), received)


def by_heads(held: Held, shares: tuple[Share, ...], sizes: Sizes) -> Travel:
    """The travel of a method that exchanges heads for positions."""
    lengths = [length(own) for own in held]
    unit = sizes.batch * sizes.element
    there = [
        (q * sizes.head_dim.qk + k * sizes.head_dim.qk + v * sizes.head_dim.v) * unit
        for q, k, v in (share.counts for share in shares)
    ]
    home = [share.counts[0] * sizes.head_dim.v * unit for share in shares]

    def both(outward: list[int], inward: list[int]) -> tuple[int, ...]:
        return tuple(
            n * (sum(outward) - outward[rank]) + (sum(lengths) - n) * inward[rank] for rank, n in enumerate(lengths)
        )

    sent = both(there, home)
    received = tuple((sum(lengths) - n) * there[rank] + n * (sum(home) - home[rank]) for rank, n in enumerate(lengths))
    return Travel(sent, both(home, there), received)


def chosen(known: Mapping[str, Travel], seconds: float, own: float, link: float, held_rows: float) -> tuple[str, str]:
    """The method of least predicted time, and why.

    ``seconds`` are the compute time of the busiest rank, ``own`` the share of it that needs no other rank's keys.
    ``held_rows`` is the most keys that a rank gets by ``all_gather``, over its own ones.
    """
    turns = {"ring": _TURN * max(len(next(iter(known.values())).sent) - 1, 0), "all_gather": _TURN, "ulysses": _TURN}
    hidden = {"ring": seconds, "all_gather": seconds * own, "ulysses": 0.0}
    times = {
        name: seconds + turns[name] + max(0.0, max(travel.received) / link - hidden[name])
        for name, travel in known.items()
    }
    best = min(times, key=lambda name: (times[name], name))
    if best == "all_gather" and held_rows > _MOST_HELD and "ring" in times:
        best = "ring"
        why = f"to get all keys at once would hold {held_rows:.1f} times the own ones"
    else:
        why = "least predicted time"
    said = ", ".join(f"{name} {1e6 * each:.0f} µs" for name, each in sorted(times.items(), key=lambda x: x[1]))
    return best, f"{why} ({said}; {1e6 * seconds:.0f} µs of work, {link / 1e9:g} GB/s a link)"


def method_text(method: str | tuple[str, ...]) -> str:
    """The name of a method, or the names of two, for messages."""
    return method if isinstance(method, str) else " × ".join(method)


def choice_of(
    method: str | tuple[str, ...], topology: Topology, held: Held, needs: NeededKeys, mask: Mask, sizes: Sizes,
    seconds: float, link: float,
) -> Choice:  # fmt: skip
    """How a call is spread; one device would take ``seconds``. Raises ``ValueError`` for an unusable method."""
    if isinstance(method, tuple):
        return _choice_of_two(method, topology, held, needs, mask, sizes)
    name = method
    why = no_heads(mask.variant.spec, sizes.heads, sizes.kv_heads, topology.world)
    if why and name == "ulysses":
        raise ValueError(f"method 'ulysses': {why}; 'ring' and 'all_gather' can")
    known = {each: by_keys(needs, sizes, again=each == "ring" and not needs.are_few(held)) for each in KEYS}
    if not why:
        known["ulysses"] = by_heads(held, shares_of(sizes.heads, sizes.kv_heads, topology.world), sizes)
    reason = "as asked"
    if name == "auto":
        work = [max(sum(work_of(mask, mask.sizes["Nk"], own)), 1e-9) for own in held]
        rows = [needs.rows_received(rank) / max(length(own), 1) for rank, own in enumerate(held)]
        own = [1 - min(1.0, row / (row + 1)) for row in rows]
        busiest = seconds * max(work) / sum(work)
        name, reason = chosen(known, busiest, min(own, default=1.0), link, max(rows, default=0.0))
        if why:
            reason += f"; heads stay: {why}"
    return Choice(name, known[name].sent, known[name].sent_backward, reason)


def _choice_of_two(
    methods: tuple[str, ...], topology: Topology, held: Held, needs: NeededKeys, mask: Mask, sizes: Sizes
) -> Choice:
    places = [topology.along(rank) for rank in range(topology.world)]
    count = 1 + max(place for _, place in places)
    why = no_heads(mask.variant.spec, sizes.heads, sizes.kv_heads, count)
    if why:
        raise ValueError(f"method 'ulysses': {why}; 'ring' and 'all_gather' can, on a mesh of one dimension")
    shares = shares_of(sizes.heads, sizes.kv_heads, count)
    again = "ring" in methods and not needs.are_few(topology.of_keys(held))
    forward, backward = [], []
    for rank, (line, place) in enumerate(places):
        swapped = by_heads(topology.of_heads(held, rank), shares, sizes)
        sent, back = swapped.sent[place], swapped.sent_backward[place]
        for _, (first, last) in shares[place].calls:
            walked = by_keys(needs, replace(sizes, kv_heads=last - first), again=again)
            sent, back = sent + walked.sent[line], back + walked.sent_backward[line]
        forward.append(sent)
        backward.append(back)
    return Choice(method_text(methods), tuple(forward), tuple(backward), "as asked")


@functools.lru_cache(maxsize=256)
def predicted(spec: AttentionSpec, head_dim: HeadDim, shape: Shape, device: torch.device) -> float:
    """Predicted seconds of the forward pass of the whole call on one device; 0 where the cost model fails."""
    found = _forward(spec, head_dim, shape, device)
    return 0.0 if found is None else found.time.seconds


@functools.lru_cache(maxsize=256)
def pace_of(spec: AttentionSpec, sizes: Sizes, length: int, device: torch.device, link: float) -> Pace:
    """The pace of a call over a sequence of this length; a pair takes no time where the cost model fails."""
    length = min(length, _LONGEST)
    shape = Shape(sizes.batch, sizes.heads, sizes.kv_heads, length, length)
    found = _forward(spec, sizes.head_dim, shape, device)
    pairs = 0.0 if found is None else found.counts.kept_fraction * length * length
    row = sizes.batch * sizes.heads * sizes.head_dim.v / _MEMORY.get(device.type, _MEMORY["cpu"])
    return Pace(
        pair=found.time.seconds / pairs if found is not None and pairs else 0.0,
        travel=sizes.key_row / link,
        copy=_COPIED * sizes.key_row / _MEMORY.get(device.type, _MEMORY["cpu"]),
        merge=_MERGED * _ELEMENT_BYTES * row,
        call=_TURN,
    )


def _forward(spec: AttentionSpec, head_dim: HeadDim, shape: Shape, device: torch.device) -> PassReport | None:
    """The forward pass as the cost model predicts it; None where the model fails."""
    try:
        variant = analyse(spec, head_dim)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "local"
        at = device_named(_PRODUCTS.get(name, name))
        passes = family_of(at).cost(at, variant, planned_at(variant, at, shape), shape)
        return next((each for each in passes if each.name == "forward"), None)
    except (SpecError, ValueError, KeyError):
        return None


_PRODUCTS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
