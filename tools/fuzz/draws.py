"""What is judged: a spec with some calls, drawn from one number.

In: a seed, a backend. Out: a ``Draw``: frozen data all through, the same for the same seed on every machine. ``Case``
is what is left of one when it is written down: text, and data for its calls.

Chance is Python's own ``random.Random`` and cutting down is our own (``shrink.py``). Hypothesis, which tests use, could
do both; but this is a command for users, who have no test libraries, and a failure has to be written down as a text
and its inputs, not as the choices of a generator, to outlive the generator.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.targets.gpu.family import GPU_COLUMNS, GPU_ROWS, GPU_WARPS
from tools.fuzz.nodes import SpecDraw
from tools.fuzz.specs import draw_spec

VIEWS = (
    *("strided", "transposed", "offset", "padded", "expanded", "expanded heads"),
    *("negated", "conjugated", "negated", "conjugated"),
)
ELEMENTS = ("f32", "bf16", "f16")
# Rows of calls, and pairs at most. In a long one blocks of a GPU go through several tiles of either kind.
_SHORT = (0, 1, 1, 2, 3, 5, 15, 16, 17, 31, 33, 40, 63, 64, 65, 70, 97, 128, 130, 200, 257)
_LONG = (70, 129, 200, 257, 300, 385, 513, 640)
_MOST, _MOST_OF_LONG = 60_000, 300_000
# One call in so many is judged to the second order, whose formulas take long in float64, if it is small.
_ORDERS = 4
_MOST_OF_SECOND_ORDER = 5000
# One dense call in so many of the first order is of 8 bits.
_NARROW = 6


@dataclass(frozen=True)
class Machine:
    """What runs a spec: a backend, and the target that the emulator runs (empty: none).

    ``tiled`` is what stands in where there is no compiler.
    """

    backend: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {self.target}".strip()

    @property
    def device(self) -> str:
        """Where the tensors of a call lie."""
        return "cuda" if self.backend == "cuda" else "cpu"


@dataclass(frozen=True)
class Ranks:
    """How a call is spread over ``world`` ranks.

    ``method`` is that of ``context_parallel``, of a ``mesh`` of two dimensions both with a comma between; "": the op
    itself gets DTensors, ``sharded`` by batch, heads or nothing. ``partition`` is its method; "": ranks hold parts of
    any length. ``checked``: ranks tell each other what they were given. ``link``: bytes a second that they are told; 0:
    none.
    """

    world: int
    method: str = ""
    mesh: tuple[int, ...] = ()
    partition: str = ""
    checked: bool = True
    link: float = 0.0
    sharded: str = ""

    def __str__(self) -> str:
        how = f"by {self.method}" if self.method else f"DTensors, {self.sharded} sharded"
        return f"{self.world} ranks, {how}"


@dataclass(frozen=True)
class CallDraw:
    """One call: everything that its inputs are made of.

    ``starts`` and ``more`` are offsets (b, h, q, kv), and what the whole has behind the shard; without ``totals`` they
    are not passed. ``spread`` multiplies q and k. ``views`` say how tensors lie in memory, ``extremes`` which biases
    hold the value that masks are made of. ``converted``: captured tensors come in other types than are declared (bf16
    for f32, i64 for i32). ``wants`` are the tensors that take gradients. ``lengths`` are those of the sequences of a
    ragged batch, of queries and of keys; without them the call is dense. Then the shape holds the longest. ``cached``
    are the rows of each sequence in a cache, and those of them in front that are not its own; the shape holds the rows
    that there is room for, in entries or in pages of ``page`` rows. The call itself writes ``new`` rows, and asks for
    ``splits`` parts of the keys. Of entries or pages ``spare`` belong to nobody. With ``eight_bits`` it holds numbers
    of 8 bits and their factors; of a dense call q, k and v all three are such numbers. With ``order`` 2 derivatives of
    the second order are judged, too; ``still`` are those of q, k, v and ``captured`` that have no tangent then. They
    are those of either mode over the other if ``mixed``, else tangents and gradients of gradients.
    ``parts``: a dense call is made of as many parts of its keys, as ranks of a ring make it; 0: of one. ``wide``: these
    are written in float32, whatever q, k and v hold. ``ranks``: it is spread over processes.
    ``door``: what it goes through, "flex", "flash" or "nn"; "": the op itself is called.
    """

    head_dim: int
    dtype: str
    shape: tuple[int, int, int, int, int]
    starts: tuple[int, int, int, int] = (0, 0, 0, 0)
    more: tuple[int, int, int, int] = (0, 0, 0, 0)
    totals: bool = False
    seed: int = 0
    spread: float = 1.0
    views: tuple[tuple[str, str], ...] = ()
    extremes: tuple[tuple[str, str], ...] = ()
    dropout_p: float | None = None
    dropout_seed: int = 0
    deterministic: bool = False
    threads: int = 2
    wants: str = "all"
    converted: bool = False
    lengths: tuple[tuple[int, int], ...] = ()
    cached: tuple[tuple[int, int], ...] = ()
    page: int = 0
    new: int = 0
    splits: int = 0
    parts: int = 0
    wide: bool = False
    spare: int = 0
    eight_bits: bool = False
    order: int = 1
    still: tuple[str, ...] = ()
    mixed: bool = False
    ranks: Ranks | None = None
    door: str = ""

    def of_sequences(self, lengths: Sequence[tuple[int, int]]) -> CallDraw:
        """The same call of these sequences."""
        longest = [max(each) for each in zip(*lengths, strict=True)]
        return dataclasses.replace(
            self,
            lengths=tuple(lengths),
            shape=(len(lengths), *self.shape[1:3], *longest),
            starts=(*self.starts[:2], 0, 0),
            more=(*self.more[:2], 0, 0),
        )

    def of_cache(self, cached: Sequence[tuple[int, int]], room: int, queries: int) -> CallDraw:
        """The same call of these sequences in a cache with room for so many rows of each, and whole pages."""
        return dataclasses.replace(
            self,
            cached=tuple(cached),
            shape=(len(cached), *self.shape[1:3], queries, -(-room // max(1, self.page)) * max(1, self.page)),
            starts=(*self.starts[:2], 0, 0),
            more=(*self.more[:2], 0, 0),
            dropout_p=None,
        )


@dataclass(frozen=True)
class Build:
    """How kernels are made.

    A CPU's library: by more flags, and with ``matrices`` registers for these are imitated, with ``pairs`` products of
    pairs. Those of the emulator: with the tiles of a call of the shape ``sized`` (B, H, Hkv, Nq, Nk); of none: with the
    planner's own, which are those of long sequences.
    """

    flags: tuple[str, ...] = ()
    matrices: bool = False
    pairs: bool = False
    sized: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A spec's text, its calls, and what is to run them. A spec of a user's stands in ``file``, under a name."""

    text: str
    calls: tuple[CallDraw, ...]
    machine: Machine
    build: Build = Build()
    file: str = ""
    name: str = ""


@dataclass(frozen=True)
class Draw:
    """A spec that can be cut down, and its calls. Instead of a drawn spec it may have one of a user's file."""

    spec: SpecDraw | None
    calls: tuple[CallDraw, ...]
    machine: Machine
    build: Build = Build()
    file: str = ""
    name: str = ""

    @property
    def case(self) -> Case:
        """As text and data."""
        text = "" if self.spec is None else self.spec.text
        return Case(text, self.calls, self.machine, self.build, self.file, self.name)


# Flags of a CPU's library beside those of every library. What is judged is our text: with -O1 it is compiled in 0.6 of
# the time, with -Og in 0.4, by which more texts are.
_OTHER_CPUS = (("-mno-avx", "-Og"), ("-mno-avx2", "-mno-fma", "-Og"), ("-ffp-contract=off", "-Og"))
_BUILDS = (*(("-Og",),) * 7, *(("-O1",),) * 2, *((),) * 3, *_OTHER_CPUS)
# The heads and lengths of calls whose tiles the emulator's kernels have: what a GPU takes where queries are few.
_HEADS, _LENGTHS = (1, 4, 8, 16, 32, 64), (64, 200, 256, 512, 512, 1024, 1024, 2048)
# Pins of the schedule. Those of GPUs force each kind of kernel: of warps alone, with one stage or two, with K and V
# divided among warps, of warpgroups that copy for themselves, or that others copy for, alone or several a block.
CPU_PINS = (
    *("", "", "Br = 16 Bc = 16 backward_Br = 32 backward_Bc = 8", "Br = 32 Bc = 24 backward_Br = 16 backward_Bc = 16"),
    *(
        "Br = 48 Bc = 7 backward_Br = 16 backward_Bc = 33",
        "Br = 16 Bc = 64",
        "backward_Br = 48 backward_Bc = 16",
        "Bc = 1",
    ),
    *("Br = 64 Bc = 32 backward_Br = 64 backward_Bc = 32", "Br = 16 Bc = 40 backward_Br = 16 backward_Bc = 5"),
)
GPU_PINS = (
    *(
        "",
        "",
        "",
        "Br = 64 Bc = 64 warps = 4 stages = 1",
        "Br = 32 Bc = 32 warps = 2 stages = 2",
        "Br = 16 Bc = 16 warps = 1",
    ),
    *(
        "Br = 128 Bc = 32 warps = 4 stages = 2",
        "backward_Br = 32 backward_Bc = 32 backward_warps = 2 backward_stages = 1",
    ),
    *(
        "backward_Br = 64 backward_Bc = 64 backward_warps = 4 backward_stages = 2",
        "Br = 128 Bc = 64 warps = 8 stages = 1",
    ),
    *("Br = 32 Bc = 48 warps = 2 backward_Br = 32 backward_Bc = 32 backward_warps = 2",),
)
HOPPER_PINS = (
    *(
        "",
        "",
        "",
        "Br = 64 Bc = 64 warps = 4 stages = 2",
        "Br = 64 Bc = 112 warps = 4",
        "Br = 128 Bc = 64 warps = 8 stages = 2",
    ),
    *("Br = 192 Bc = 96 warps = 12", "Br = 128 Bc = 128 warps = 8", "Br = 64 Bc = 32 warps = 4 stages = 1"),
    *("backward_Br = 64 backward_Bc = 64 backward_warps = 4 backward_stages = 2",),
    *("backward_Br = 64 backward_Bc = 128 backward_warps = 8 backward_stages = 2",),
    *("backward_Br = 128 backward_Bc = 128 backward_warps = 8 backward_stages = 2",),
    *("Br = 64 Bc = 48 warps = 4 backward_Br = 64 backward_Bc = 64 backward_warps = 4",),
    *("backward_Br = 32 backward_Bc = 64 backward_warps = 4 backward_stages = 1",),
)


def pins_of(machine: Machine) -> Sequence[str]:
    """The schedules that are worth drawing for a machine; none: what the planner chooses."""
    if machine.backend == "cpu":
        return CPU_PINS
    if machine.target == "sm_90a":
        return HOPPER_PINS
    if machine.backend == "cuda":
        return (*GPU_PINS, *HOPPER_PINS)
    return GPU_PINS if machine.backend == "emulator" else ("",)


def _tuned(seed: int, machine: Machine) -> Sequence[str]:
    """Of one spec in five for a GPU a tile that ``flashgen tune`` may choose, by chance of its own; of others none."""
    chance = random.Random(f"pins of {machine} {seed}")
    if machine.backend not in ("emulator", "cuda") or chance.random() < 0.8:
        return ()
    prefix = chance.choice(("", "backward_"))
    while True:
        Br, Bc, warps = (chance.choice(each) for each in (GPU_ROWS, GPU_COLUMNS, GPU_WARPS))
        if (Bc if prefix else Br) // warps in (16, 32):  # rows of a warp; most others are refused
            return (f"{prefix}Br = {Br} {prefix}Bc = {Bc} {prefix}warps = {warps}",)


def draw(seed: int, machine: Machine) -> Draw:
    """The spec and the calls of a seed."""
    chance = random.Random(f"{machine} {seed}")
    elements = _elements(chance, machine)
    spec, known = draw_spec(chance, _tuned(seed, machine) or pins_of(machine), elements)
    build = Build()
    if machine.backend == "cpu":
        flags = chance.choice(_BUILDS)
        imitated = chance.random()
        if imitated < 0.2:  # to optimise what is imitated takes a compiler a minute
            flags = (*flags, "-Og")
        build = Build(flags, imitated < 0.1, 0.1 <= imitated < 0.2)
    elif machine.backend == "emulator":
        build = Build(sized=_sized(seed, machine))
    return Draw(spec, draw_calls(chance, machine, spec.text, elements, known), machine, build)


def draw_of_file(seed: int, machine: Machine, file: str, name: str, elements: Sequence[str], dropout: bool) -> Draw:
    """The calls of a seed for the attention ``name`` of a file, generated for these element types."""
    chance = random.Random(f"{machine} {seed}")
    kinds = [chance.choice(elements)] if machine.backend == "emulator" else list(elements)
    text = "dropout" if dropout else ""
    build = Build(sized=_sized(seed, machine)) if machine.backend == "emulator" else Build()
    return Draw(None, draw_calls(chance, machine, text, kinds, {}), machine, build, file, name)


def _sized(seed: int, machine: Machine) -> tuple[int, ...]:
    """The shape whose tiles calls take, or none; by chance of its own, so that specs and calls stay those of a seed."""
    chance = random.Random(f"tiles of {machine} {seed}")
    if chance.random() < 0.4:
        return ()
    heads, length = chance.choice(_HEADS), chance.choice(_LENGTHS)
    return (1, heads, heads, length, length)


def _elements(chance: random.Random, machine: Machine) -> tuple[str, ...]:
    """The element types of a spec's calls: on the emulator each is a compilation of its own."""
    if machine.backend == "emulator":
        return (chance.choice(("f32", "bf16", "bf16", "f16", "f16")),)
    return ("f32", chance.choice(("bf16", "f16")))


def draw_calls(
    chance: random.Random, machine: Machine, text: str, elements: Sequence[str], known: Mapping[str, Sequence[str]]
) -> tuple[CallDraw, ...]:
    """Calls of a spec, one or several for each element type."""
    count = {"emulator": 2, "tiled": 2}.get(machine.backend, 3)
    kinds = [elements[n % len(elements)] for n in range(count)]
    deterministic = chance.random() < 0.4
    dropped = None if chance.random() < 0.85 or "dropout" not in text else chance.choice((0.0, 0.5))
    calls = [_call(chance, machine, kind, text, known) for kind in kinds]
    if machine.backend == "emulator":  # where the kernels of each are compiled apart
        calls = [dataclasses.replace(each, deterministic=deterministic, dropout_p=dropped) for each in calls]
    return tuple(calls)


def _call(
    chance: random.Random, machine: Machine, dtype: str, text: str, known: Mapping[str, Sequence[str]]
) -> CallDraw:
    is_long = machine.backend != "tiled" and chance.random() < 0.25
    shape = _shape(chance, _MOST_OF_LONG if is_long else _MOST, _LONG if is_long else _SHORT)
    names = ("q", "k", "v", "d_o", "d_lse", "captured")
    views = {chance.choice(names): chance.choice(VIEWS) for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3)))}
    starts, more, totals = (0, 0, 0, 0), (0, 0, 0, 0), False
    if chance.random() < 0.3:
        group = shape[1] // shape[2]
        lengths = (1, group, *(chance.choice((5, 16, 33, 64)) for _ in range(2)))
        starts = _quadruple(chance.choice((0, 0, 1, 2)) * length for length in lengths)
        more = _quadruple(chance.choice((0, 0, 1)) * length for length in lengths)
        totals = any(more) or chance.random() < 0.5
    # Beside products +inf leaves nothing to compare; where these move no score dQ and dK are 0 all the same. Weights
    # that are no numbers have tangents that are none, which formulas leave out.
    words = chance.choice(("lowest", "-1e30", "-inf", "-1e9", *(("inf",) * 4 if known.get("alone") else ())))
    drawn = CallDraw(
        head_dim=chance.randrange(4),
        dtype=dtype,
        shape=shape,
        starts=starts,
        more=more,
        totals=totals,
        seed=chance.randrange(2**31),
        spread=chance.choice((1.0,) * 9 + (0.0, 30.0)) if "sqdist" not in text else 1.0,
        views=tuple(sorted(views.items())),
        extremes=tuple((name, words) for name in known.get("biases", ()) if chance.random() < 0.8),
        dropout_p=None if chance.random() < 0.8 or "dropout" not in text else chance.choice((0.0, 0.3)),
        dropout_seed=chance.choice((0, 1, -1, 2**40 + 3, chance.randrange(2**62))),
        deterministic=chance.random() < 0.4,
        threads=chance.choice((1, 2, 3)),
        wants=chance.choice(("all",) * 6 + ("qkv", "captured", "q")),
        converted=chance.random() < 0.08,
    )
    if drawn.seed % _ORDERS == 0 and words != "inf" and shape[3] * shape[4] <= _MOST_OF_SECOND_ORDER:
        # By a number that is drawn anyhow: all other draws stay.
        own = random.Random(drawn.seed)
        still = tuple(name for name in ("q", "k", "v", "captured") if own.random() < 0.25)
        drawn = dataclasses.replace(drawn, order=2, still=still, mixed=own.random() < 0.5)
    if chance.random() < 0.3:
        return drawn.of_sequences(_lengths(chance, shape))
    if shape[4] and chance.random() < 0.35:
        return _of_cache(chance, drawn)
    # Without kernels nothing but lse goes from part to part, which holds nothing of rows whose scores are all extreme.
    lossy = machine.backend == "tiled" and drawn.extremes
    if drawn.order == 1 and drawn.seed // _ORDERS % _NARROW == 0:
        return dataclasses.replace(drawn, eight_bits=True)
    if "select" in text and drawn.order == 1 and drawn.seed % 2:
        return _of_blocks(drawn)
    if drawn.order == 1 and not lossy and chance.random() < 0.15:
        return dataclasses.replace(drawn, parts=chance.choice((2, 3)), wide=drawn.seed % 3 > 0)
    return drawn


def _of_blocks(drawn: CallDraw) -> CallDraw:
    """Many heads that share keys, and keys of which a list names few: by a number that is drawn anyhow."""
    own = random.Random(drawn.seed)
    kv_heads = own.choice((1, 1, 2))
    shape = (
        own.choice((1, 1, 2)),
        kv_heads * own.choice((8, 8, 16, 24)),
        kv_heads,
        own.choice((70, 97, 130)),
        own.choice((130, 257, 400)),
    )
    return dataclasses.replace(
        drawn, shape=shape, starts=(0, 0, own.choice((0, 0, 33)), 0), more=(0,) * 4, totals=False, views=()
    )


def _of_cache(chance: random.Random, drawn: CallDraw) -> CallDraw:
    """A few queries over a cache: sequences that fill it or not, that are padded, or empty but for that."""
    queries = chance.choice((1, 1, 1, 2, 3, 7, 16, 17))
    room = max(queries, drawn.shape[4])
    lengths = [chance.choice((room, room, queries, chance.randint(queries, room))) for _ in range(chance.randint(1, 4))]
    cached = [(length, chance.choice((0, 0, 0, length, chance.randint(0, length)))) for length in lengths]
    held = dataclasses.replace(
        drawn,
        page=chance.choice((0, 0, 0, 1, 3, 16, 64, 256)),
        new=chance.choice((0, 0, 1, queries)) if min(lengths) else 0,
        splits=chance.choice((0, 0, 0, 1, 2, 3, 7)),
        spare=chance.choice((0, 1, 3)),
        eight_bits=chance.random() < 0.3,
    )
    return held.of_cache(cached, room, queries)


def _lengths(chance: random.Random, shape: tuple[int, int, int, int, int]) -> list[tuple[int, int]]:
    """Sequences beside one as long as the shape says: empty ones, single rows, of other lengths of queries and keys."""
    lengths = (0, 0, 1, 1, 2, 3, 7, 15, 16, 17, 33)
    found = [shape[3:]]
    for _ in range(chance.choice((0, 1, 2, 3, 5, 9))):
        q_len = chance.choice(lengths)
        found.append((q_len, q_len if chance.random() < 0.6 else chance.choice(lengths)))
    chance.shuffle(found)
    return found


def _quadruple(numbers: Any) -> tuple[int, int, int, int]:
    b, h, q, kv = numbers
    return b, h, q, kv


def _shape(chance: random.Random, most: int, lengths: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Sizes with so many pairs at most: empty, one, odd, many tiles."""
    while True:
        kv_heads = chance.choice((1, 1, 2, 3))
        heads = kv_heads * chance.choice((1, 1, 1, 2, 3, 4))
        q_len = chance.choice(lengths)
        kv_len = q_len if chance.random() < 0.4 else chance.choice(lengths)
        batch = chance.choice((1, 1, 1, 2, 2, 3, 0)) if chance.random() < 0.2 else chance.choice((1, 2))
        empty = 0 in (q_len, kv_len, batch)
        if batch * heads * q_len * kv_len <= most and (not empty or chance.random() < 0.25):
            return batch, heads, kv_heads, q_len, kv_len
