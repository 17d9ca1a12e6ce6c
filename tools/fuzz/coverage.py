"""Which kinds of kernels a call ran, in words, so that a campaign can say what it has reached.

In: an op, a call, what the emulator counted. Out: labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.hosts.emulated import Counted
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.plan.plan import Tiles
from flashgen.targets.gpu.schedules import Backward, Forward, Queries, Schedule
from tools.fuzz.draws import CallDraw
from tools.fuzz.inputs import head_dim_of
from tools.fuzz.parts import has_parts


def kinds(op: AttentionOp, spec: AttentionSpec, call: CallDraw, counted: Sequence[Counted]) -> tuple[str, ...]:
    """Labels of all that ran; of a CPU's kernels, the element type and the order of sums."""
    if call.door:
        return (f"through {call.door}, {call.dtype}",)
    head_dim = head_dim_of(spec, call)
    if call.eight_bits and not call.cached:
        of_8_bits = any(each.variant.kind.f8 for each in counted)
        return (f"forward: {'8 bits' if of_8_bits else '8 bits, widened'}",)
    of_parts = f", parts{' in float32' if call.wide else ''}" if call.parts and has_parts(spec) else ""
    plan = op.plan.get(head_dim) if op.plan else None
    tiles = plan.of_element(ElementType(call.dtype)) if plan else {}
    if plan and not tiles:  # an empty call of a type that no tile fits
        return ("no kernels",)
    if not any(map(_kind, tiles.values())):  # a target of one kind of kernel
        ragged = ", ragged" if call.lengths else ", cache" if call.cached else ""
        ragged += " in pages" if call.page and call.cached else ""
        ragged += " of 8 bits" if call.eight_bits else ""
        ragged += of_parts
        return (f"{call.dtype}{ragged}{', repeatable' if call.deterministic else ''}",)
    if plan and any(each.variant.listed is not None for each in counted):
        return (f"forward: by blocks of keys, {_kind(tiles['forward'])[0]}",)
    over_cache = [each for each in counted if each.variant.kind.cached]
    if plan and over_cache:
        ran = over_cache[0].ran.plan
        tile, parts = ran.own.forward, over_cache[0].values["merges"]
        pages = f"{' of 8 bits' if call.eight_bits else ''}{', in pages' if call.page else ''}"
        return (f"forward: cache{pages}{', in parts' if parts else ''}, {tile.warps} warps",)
    if plan and any(each.sequences for each in counted):
        tiles = counted[0].ran.plan.of_element(ElementType(call.dtype))
    found = [f"forward: {', '.join((*(['ragged'] if call.lengths else []), *_kind(tiles['forward'])))}{of_parts}"]
    for each in counted:
        launches = each.ran.launches
        names = [launch.kernel.removeprefix(each.ran.plan.symbol) for launch in launches.launches]
        found += [f"{each.name}: {'lists kept' if kept.kept else 'lists of the call'}" for kept in launches.lists]
        if each.name == "backward":
            one_pass = any(name.startswith("_backward") for name in names)
            keys = tiles["backward"]
            assert isinstance(keys, Backward), "kernels are of a GPU"
            added = ("dQ added up", *(("persistent",) if keys.persistent else ())) if one_pass else ()
            found.append(f"keys: {', '.join((*_kind(keys), *added))}")
            if not one_pass:
                found.append(f"queries: {', '.join(_kind(tiles['queries']))}")
            found += [
                f"captured gradients: {how}" for how in ("exact",) if any(name.endswith("_exact") for name in names)
            ]
    return tuple(dict.fromkeys(found))


def _kind(tiles: Tiles) -> tuple[str, ...]:
    """What a kernel with these tiles is made of, in words, where kernels of one target differ in it."""
    if not isinstance(tiles, Schedule):
        return ()
    split = ("split head dimension",) if tiles.split > 1 else ()
    if isinstance(tiles, Queries):
        return ("warpgroups" if tiles.warpgroups else "warps", *split)
    if tiles.warpgroups:
        copies = "producer warps" if tiles.producers else "warpgroup copies for itself"
        found = (tiles.multipliers, copies, *(("tensor copies",) if tiles.tensor_copies else ()), *split)
        turns = ("turns",) if tiles.ping_pong else ()
        return (*found, *turns, *((f"{tiles.cluster} blocks a cluster",) if tiles.cluster > 1 else ()))
    stages = min(tiles.stages, 2) if isinstance(tiles, Forward) else tiles.stages
    q = ("Q in registers",) if isinstance(tiles, Forward) and tiles.q_in_registers else ()
    return ("warps", f"{stages} stage{'s' * (stages > 1)}", *q, *split)
