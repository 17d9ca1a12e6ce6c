"""Cuts a failure down: statements, parts of expressions, sizes and options are taken away while it still fails.

In: a ``Draw`` that fails, and whether another one fails alike. Out: the smallest that was found. Large pieces are tried
first, and what is left is gone through until nothing can be taken away any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.fuzz.draws import Build, CallDraw, Draw, Ranks
from tools.fuzz.hoisting import replaced
from tools.fuzz.nodes import PLAINEST, Node, SpecDraw, Statement, leaf

_PLAIN_CALL = CallDraw(0, "f32", (1, 1, 1, 1, 1))
_SIZES = ((1, 1, 1, 4, 4), (1, 2, 1, 17, 17), (1, 2, 2, 40, 40))


def shrink(draw: Draw, fails: Callable[[Draw], bool], attempts: int) -> Draw:
    """The smallest draw that fails as this one does, by at most so many trials."""
    left, tried = attempts, {draw}
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _candidates(draw):
            if candidate in tried:
                continue
            tried.add(candidate)
            left -= 1
            if fails(candidate):
                draw, smaller = candidate, True
                break
            if left <= 0:
                break
    return draw


def _candidates(draw: Draw) -> Iterator[Draw]:
    """Everything that is a little less, the largest steps first."""
    if len(draw.calls) > 1:
        for call in draw.calls:
            yield replace(draw, calls=(call,))
    if draw.build != Build():
        yield replace(draw, build=Build())
    spec = draw.spec
    if spec is not None:
        for smaller in _without_statements(spec):
            yield replace(draw, spec=smaller)
    for number, call in enumerate(draw.calls):
        for simpler in _simpler_calls(call) if call.ranks is None else _simpler_calls_of_ranks(call, call.ranks):
            yield replace(draw, calls=(*draw.calls[:number], simpler, *draw.calls[number + 1 :]))
    if spec is not None:
        for smaller in (*_simpler_nodes(spec), *_plain_names(spec)):
            yield replace(draw, spec=smaller)


def _without_statements(spec: SpecDraw) -> Iterator[SpecDraw]:
    for number, statement in enumerate(spec.statements):
        others = (*spec.statements[:number], *spec.statements[number + 1 :])
        if statement.word == "let":
            yield _inlined(spec, number)
        elif not statement.name:
            yield replace(spec, statements=others).tidied()
    for head_dim in (*spec.head_dim.split(", "), "16", "1"):
        if spec.head_dim not in (head_dim, "1"):
            yield replace(spec, head_dim=head_dim)


def _inlined(spec: SpecDraw, number: int) -> SpecDraw:
    """With what a ``let`` means in the place of its name."""
    let = spec.statements[number]
    (part,) = let.nodes
    name = leaf(part.type, let.name, part.known)
    statements = (
        replace(each, nodes=tuple(replaced(node, name, part) for node in each.nodes)) for each in spec.statements
    )
    return replace(spec, statements=tuple(statements)).tidied()


def _simpler_calls_of_ranks(call: CallDraw, ranks: Ranks) -> Iterator[CallDraw]:
    """Of one process, else of fewer ranks, spread in a plainer way; queries and keys stay of one length."""
    yield replace(call, ranks=None)
    plain = Ranks(ranks.world, ranks.method, ranks.mesh, sharded=ranks.sharded)
    yield replace(call, ranks=plain)
    for simpler in (
        replace(ranks, world=2, mesh=(2, 1) if ranks.mesh else ()),
        replace(ranks, mesh=(), method="ring" if ranks.method else ""),
        replace(ranks, partition="contiguous" if ranks.partition else ""),
        replace(ranks, checked=True),
        replace(ranks, link=0.0),
        replace(ranks, sharded="batch" if ranks.sharded else ""),
    ):
        yield replace(call, ranks=simpler)
    for each in _simpler_calls(call):
        if each.shape[3] == each.shape[4] and all(q_len == kv_len for q_len, kv_len in each.lengths):
            yield each
    length = call.shape[3]
    for number, (own, _) in enumerate(call.lengths):
        for shorter in {own // 2, max(own - 1, 0)} - {own}:
            both = (shorter, shorter)
            yield call.of_sequences([*call.lengths[:number], both, *call.lengths[number + 1 :]])
    for shorter in (1, length // 2, length - 1) if not call.lengths else ():
        if 0 < shorter < length:
            yield replace(call, shape=(*call.shape[:3], shorter, shorter))


def _simpler_calls(call: CallDraw) -> Iterator[CallDraw]:
    for name in (
        "views",
        "extremes",
        "starts",
        "more",
        "totals",
        "spread",
        "dropout_p",
        "deterministic",
        "parts",
        "wide",
        "threads",
        "converted",
        "order",
        "still",
        "mixed",
        "door",
    ):
        yield replace(call, **{name: getattr(_PLAIN_CALL, name)})
    if not any(call.starts) and not any(call.more):
        yield replace(call, totals=False)
    if call.lengths:
        yield replace(call, lengths=())
        yield from _fewer_sequences(call)
    elif call.cached:
        yield from _smaller_caches(call)
    else:
        yield from _smaller_shapes(call)


def _smaller_shapes(call: CallDraw) -> Iterator[CallDraw]:
    if call.eight_bits:
        yield replace(call, eight_bits=False)
    for view in call.views:
        yield replace(call, views=tuple(each for each in call.views if each != view))
    for name in ("dtype", "wants", "head_dim", "seed", "dropout_seed"):
        yield replace(call, **{name: getattr(_PLAIN_CALL, name)})
    for shape in _SIZES:
        if shape < call.shape:
            yield replace(call, shape=shape)
    batch, heads, kv_heads, q_len, kv_len = call.shape
    yield replace(call, shape=(min(batch, 1), heads, kv_heads, q_len, kv_len))
    yield replace(call, shape=(batch, kv_heads, kv_heads, q_len, kv_len))
    yield replace(call, shape=(batch, 1, 1, q_len, kv_len))
    for length in (1, q_len // 2, q_len - 1):
        if 0 < length < q_len:
            yield replace(call, shape=(batch, heads, kv_heads, length, kv_len))
    for length in (1, kv_len // 2, kv_len - 1):
        if 0 < length < kv_len:
            yield replace(call, shape=(batch, heads, kv_heads, q_len, length))


def _fewer_sequences(call: CallDraw) -> Iterator[CallDraw]:
    """With one of them alone, without one, with a shorter one."""
    for number, lengths in enumerate(call.lengths):
        others = (*call.lengths[:number], *call.lengths[number + 1 :])
        if others:
            yield call.of_sequences([lengths])
            yield call.of_sequences(others)
        q_len, kv_len = lengths
        for shorter in ((q_len // 2, kv_len), (q_len, kv_len // 2), (q_len - 1, kv_len), (q_len, kv_len - 1)):
            if min(shorter) >= 0 and shorter != lengths:
                yield call.of_sequences([*call.lengths[:number], shorter, *call.lengths[number + 1 :]])
    for heads in (call.shape[2], 1):
        yield replace(call, shape=(call.shape[0], heads, min(heads, call.shape[2]), *call.shape[3:]))
    for name in ("dtype", "wants", "head_dim", "seed", "dropout_seed"):
        yield replace(call, **{name: getattr(_PLAIN_CALL, name)})


def _smaller_caches(call: CallDraw) -> Iterator[CallDraw]:
    """Without a cache, or with one that holds less, in a plainer way."""
    plain = replace(call, cached=(), page=0, new=0, splits=0, spare=0, eight_bits=False)
    yield plain
    for name in ("eight_bits", "new", "splits", "spare", "dtype", "head_dim", "seed"):
        yield replace(call, **{name: getattr(_PLAIN_CALL, name)})
    queries, room = call.shape[3:]
    if call.page:
        yield replace(call, page=0).of_cache(call.cached, room, queries)
    yield from _fewer_rows(call)
    longest = max(*(length for length, _ in call.cached), queries, 1)
    if longest < room:
        yield call.of_cache(call.cached, longest, queries)
    for fewer in (1, queries - 1):
        if 0 < fewer < queries:
            yield replace(call, new=min(call.new, fewer)).of_cache(call.cached, room, fewer)
    for heads in (call.shape[2], 1):
        yield replace(call, shape=(call.shape[0], heads, min(heads, call.shape[2]), *call.shape[3:]))


def _fewer_rows(call: CallDraw) -> Iterator[CallDraw]:
    """With one sequence of a cache alone, without one, with a shorter one, with less in front of it."""
    queries, room = call.shape[3:]
    for number, (length, padding) in enumerate(call.cached):
        others = [*call.cached[:number], *call.cached[number + 1 :]]
        if others:
            yield call.of_cache([(length, padding)], room, queries)
            yield call.of_cache(others, room, queries)
        least = max(queries, call.new, 1)
        for shorter in (least, (length + least) // 2, length - 1):
            if least <= shorter < length:
                own = (shorter, min(padding, shorter))
                yield call.of_cache([*call.cached[:number], own, *call.cached[number + 1 :]], room, queries)
        for less in (0, padding // 2):
            if less < padding:
                yield call.of_cache([*call.cached[:number], (length, less), *call.cached[number + 1 :]], room, queries)


def _simpler_nodes(spec: SpecDraw) -> Iterator[SpecDraw]:
    """With one part of an expression replaced by one of its own parts, or by a number."""
    for number, statement in enumerate(spec.statements):
        for place, root in enumerate(statement.nodes):
            # A part of what is normalised, which is never negative, may be so.
            for smaller in _smaller(root, parts=not statement.template.startswith("weights normalize(")):
                nodes = (*statement.nodes[:place], smaller, *statement.nodes[place + 1 :])
                changed = replace(statement, nodes=nodes)
                statements = (*spec.statements[:number], changed, *spec.statements[number + 1 :])
                yield replace(spec, statements=statements).tidied()


def _smaller(node: Node, *, parts: bool = True) -> Iterator[Node]:
    """A part in its place, unless ``parts`` are not asked for; what is plainest; the same with a smaller part."""
    for below in node.below() if parts else ():
        if below.type is node.type:
            yield below
    if node not in PLAINEST[node.type]:
        yield from PLAINEST[node.type]
    for place, child in enumerate(node.children):
        for smaller in _smaller(child):
            yield replace(node, children=(*node.children[:place], smaller, *node.children[place + 1 :]))


def _plain_names(spec: SpecDraw) -> Iterator[SpecDraw]:
    """Under a name that nobody else has a meaning for: the block, for its names stand in the text of many nodes."""
    if spec.name != "drawn":
        yield replace(spec, name="drawn")


def size_of(draw: Draw) -> int:
    """A measure of how much is left, for people."""
    if draw.spec is None:
        return 0
    statements: tuple[Statement, ...] = draw.spec.statements
    return sum(1 + sum(node.size for node in each.nodes) for each in statements)
