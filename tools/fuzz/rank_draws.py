"""Calls that ranks make together: how a drawn call is spread over them.

In: chance, a drawn call of one process. Out: a ``CallDraw`` with a ``Ranks``. Lengths are such that nothing divides
them, heads may be fewer than ranks, and a rank may hold nothing.
"""

from __future__ import annotations

import dataclasses
import random

from tools.fuzz.draws import CallDraw, Draw, Machine, Ranks, draw

KEYS = ("ring", "all_gather")
PARTITIONS = ("", "balanced", "contiguous", "head_tail", "runs", "documents")
_LENGTHS = (1, 2, 5, 13, 23, 40, 67, 101, 130, 200)
_MOST_PAIRS = 60_000
# Bytes a second: links so slow that own keys are worked on first, the default, and so fast that nothing waits.
LINKS = (1e5, 0.0, 1e12)
_DTENSORS = 0.25


def draw_over_ranks(seed: int, machine: Machine, world: int) -> Draw:
    """The spec and the calls of a seed, over so many ranks."""
    drawn = draw(seed, machine)
    chance = random.Random(f"{world} ranks {seed}")
    return dataclasses.replace(drawn, calls=tuple(over_ranks(chance, machine, call, world) for call in drawn.calls[:2]))


def over_ranks(chance: random.Random, machine: Machine, call: CallDraw, world: int) -> CallDraw:
    """A call like this one, spread over ranks."""
    ranks = _ranks(chance, world)
    group, kv_heads = chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 3))
    heads = group * kv_heads
    if "ulysses" in ranks.method and heads < world:
        heads, kv_heads = heads * world, kv_heads * chance.choice((1, world))
    batch, length = chance.choice((1, 1, 2, 3, 0)), chance.choice(_LENGTHS)
    while batch * heads * length * length > _MOST_PAIRS and length > 13:
        length = length * 2 // 3
    found = CallDraw(
        head_dim=call.head_dim,
        dtype=call.dtype,
        shape=(batch, heads, kv_heads, length, length),
        seed=call.seed,
        spread=call.spread,
        views=call.views,
        # What ranks merge without kernels is lse alone, which holds nothing of rows whose scores are all extreme.
        extremes=() if machine.backend == "tiled" else call.extremes,
        dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed,
        deterministic=call.deterministic,
        threads=1,
        wants=call.wants,
        converted=call.converted,
        wide=chance.random() < 0.7,
        ranks=ranks,
    )
    if ranks.method and not ranks.mesh and chance.random() < 0.3:
        lengths = [length, *(chance.choice((0, 1, 2, 7, 17, 33)) for _ in range(chance.choice((0, 1, 2, 4))))]
        chance.shuffle(lengths)
        return found.of_sequences([(each, each) for each in lengths])
    return found


def _ranks(chance: random.Random, world: int) -> Ranks:
    if chance.random() < _DTENSORS:
        return Ranks(world, sharded=chance.choice(("batch", "heads", "nothing")))
    if chance.random() < 0.2:
        keys, outer = chance.choice(KEYS), chance.choice([n for n in range(1, world + 1) if world % n == 0])
        method = chance.choice((f"{keys},ulysses", f"ulysses,{keys}"))
        mesh: tuple[int, ...] = (outer, world // outer)
    else:
        method, mesh = chance.choice((*KEYS, *KEYS, "ulysses", "auto")), ()
    partition = chance.choice(PARTITIONS)
    checked = partition == "" or method == "auto" or chance.random() < 0.7
    return Ranks(world, method, mesh, partition, checked, chance.choice(LINKS))
