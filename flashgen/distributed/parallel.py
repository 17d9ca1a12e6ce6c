"""An op over the ranks of a group, each of which holds a part of the sequence.

In: an op, a group or a mesh, a partition. Out: a callable that takes this rank's rows and returns this rank's rows.
Rows cross ranks by ``torch.distributed``. Kernels are those of one device, with the offsets of their rows. Of ragged
batches the rows of all sequences, one behind the other, are spread over ranks; a sequence that one rank holds alone
needs no messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashgen.distributed.blocks import Held, length, mask_of, needs_of
from flashgen.distributed.choice import LINKS, Choice, Sizes, method_text
from flashgen.distributed.exchange import KEYS, METHODS, Group, backend_of, is_under_ddp, summed, topology_of
from flashgen.distributed.partial import Offsets, Partial, attend_whole
from flashgen.distributed.partition import Partition
from flashgen.distributed.prepared import CallArguments, KnownCall, Preparation, Setting, autocast, dense
from flashgen.distributed.ring import Walk
from flashgen.distributed.rounds import rounds_of
from flashgen.distributed.ulysses import Swap, attend_swapped, no_heads, shares_of
from flashgen.ir.expr import Symbol, SymbolKind, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.ragged import RAGGED
from flashgen.op.captured import check_defaults
from flashgen.op.checks import check_captured
from flashgen.op.lengths import check_starts
from flashgen.op.op import AttentionOp, is_repeatable
from flashgen.op.tensor_kinds import type_of_sums

__all__ = ["METHODS", "Choice", "ContextParallel", "context_parallel"]


def context_parallel(
    op: AttentionOp,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    method: str | Sequence[str] = "auto",
    partition: Partition | None = None,
    *,
    check: bool = True,
    wide: bool = True,
    sums: bool = True,
    link: float | None = None,
) -> ContextParallel:
    """``op`` over the ranks of ``mesh``: a process group, a mesh of one dimension or two, or None for all ranks.

    ``method``: ``"ring"``: the keys that the mask keeps for a rank come from one rank after another while those before
    are worked on; ``"all_gather"``: they come from all at once, while the rank works on its own; ``"ulysses"``: heads
    change places with positions, and each rank computes some heads of the whole sequence; ``"auto"``: what is expected
    to take least time (``explain`` says why). Of a mesh of two dimensions one method each, ``("ring", "ulysses")``.

    ``partition`` says which positions each rank holds, ranks counted in the order of the mesh; None: ranks hold parts
    one behind the other, equal or not, as long as their tensors are. ``check`` False: ranks do not ask each other
    whether they were given the same, which takes a partition and, of dropout, a seed.

    Parts of rows are added up in float32. ``wide``: of tensors of 16 bits they are written in float32, too, so that
    each result is rounded once, as on one device. False: each part is rounded.

    ``sums``: gradients of captured values are those of all ranks, on each. False: those of the rank's own rows, where
    something else adds up the gradients of all parameters (DDP, FSDP).

    ``link``: bytes a second that a rank sends another, by which ``"auto"`` chooses, and ranks decide what to compute
    while keys travel; None: 300e9 for NCCL, 1e9 for gloo. It changes no result but by rounding.

    Raises ``TypeError`` and ``ValueError`` for what is none of these.
    """
    if not isinstance(op, AttentionOp):
        raise TypeError(f"'op' must be an op of flashgen.load or loads, not {type(op).__name__}")
    if partition is not None and not isinstance(partition, Partition):
        raise TypeError(f"'partition' must be a Partition, not {type(partition).__name__}")
    switches: dict[str, object] = {"check": check, "wide": wide, "sums": sums}
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"'{name}' must be a bool, not {type(switch).__name__}")
    if not check and (partition is None or method == "auto"):
        raise ValueError("check=False takes a partition and a method other than 'auto': ranks tell each other nothing")
    given: object = link
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
        raise ValueError(f"'link' is {given!r}; bytes a second are expected, as in link=450e9")
    topology = topology_of(mesh, method)
    if partition is not None and partition.world != topology.world:
        raise ValueError(f"the partition is for {partition.world} ranks; the group has {topology.world}")
    by = method if isinstance(method, str) else tuple(method) if len(method) > 1 else method[0]
    if link is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        link = LINKS.get(backend_of(topology.whole, kind), LINKS["gloo"])
    return ContextParallel(Setting(op, topology, by, partition, check, wide, sums, float(link)))


class ContextParallel:
    """An op whose sequence is spread over the ranks of a group. Every rank calls it, with its own rows."""

    def __init__(self, setting: Setting) -> None:
        self.op, self.method = setting.op, setting.method
        self.rank, self.world = setting.topology.rank, setting.topology.world
        self._topology, self._sums = setting.topology, setting.sums
        self._partial = Partial(setting.op, wide=setting.wide)
        self._preparation = Preparation(setting)

    def __repr__(self) -> str:
        return f"<{self.op.name} over {self.world} ranks by {method_text(self.method)}; this is rank {self.rank}>"

    # Graphs cannot hold messages between ranks: torch.compile breaks here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Any:
        """The rows of this rank: ``q`` [B, H, n, D], ``k`` [B, Hkv, n, D], ``v`` [B, Hkv, n, Dv] → ``o`` [B, H, n, Dv].

        Captured tensors and params are whole, and the same on every rank; their gradients are those of all ranks, on
        each (``sums``). ``return_lse`` adds ``lse`` [B, H, n], float32. With dropout the decisions are those of one
        device with the same ``seed``; None: rank 0 draws it. Where gradients are wanted, every rank has to go backward.

        Raises on every rank what a call of the op raises on any, ``ValueError`` where ranks were given what does not
        go together, naming the rank and the argument, and ``RuntimeError`` naming a rank that does not answer within
        the time of the process group.
        """
        options = {"return_lse": return_lse, "dropout_p": dropout_p, "deterministic": deterministic}
        q, k, v = autocast(self.op, q, k, v)
        call, tensors = self._preparation.prepare(q, k, v, options, seed, captured)
        o, lse = self._attend(call, tensors, is_repeatable(deterministic), return_lse)
        return (o, lse) if return_lse else o

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Any:
        """The rows of this rank of a ragged batch: ``q`` [n, H, D], ``k`` [n, Hkv, D], ``v`` [n, Hkv, Dv] → ``o``
        [n, H, Dv]; with ``return_lse`` ``lse`` [H, n], too.

        The rows of all sequences, one behind the other, are what is spread over ranks; ``cu_seqlens``, int32 [B + 1],
        says where each begins. Sequences mean what they mean to ``op.varlen``, of queries and keys alike.

        Raises what a dense call raises, and ``ValueError`` for sequences that are not the rows of all ranks.
        """
        method = self.method
        if method not in METHODS:
            raise ValueError("ragged batches are spread over one dimension of a mesh: name one method")

        def given() -> CallArguments:
            options = {"return_lse": return_lse, "dropout_p": dropout_p, "deterministic": deterministic}
            return dense(self.op, (q, k, v)), {**options, "cu_seqlens": starts_of(cu_seqlens)}

        told = self._preparation.tell(given, seed, captured)
        held, tensors = told.held, self._summed(told.tensors)
        starts = starts_of(cu_seqlens)
        total = sum(map(length, held))
        if starts[-1] != total:
            raise ValueError(f"'cu_seqlens' ends at {starts[-1]}; the ranks have {total} rows")
        if method == "ulysses":
            heads, kv_heads = tensors[0].shape[1], tensors[1].shape[1]
            why = no_heads(self.op.spec, heads, kv_heads, self.world)
            if why:
                raise ValueError(f"method 'ulysses': {why}; 'ring' and 'all_gather' can")
            swap = Swap(self._topology.by_heads, held, shares_of(heads, kv_heads, self.world))

            def attend(part: tuple[Any, ...], first: int) -> tuple[Tensor, Tensor | None]:
                """Some heads of all rows, by one ragged call."""
                rows, begin = (x[0].transpose(0, 1) for x in part[:3]), cu_seqlens.to(part[0].device, torch.int32)
                rest: Any = ((0, first, None, heads, None, None), is_repeatable(deterministic))
                o, lse = attend_whole(self.op.engine_of(RAGGED), (*rows, *part[3:], begin, begin), rest)
                return o.transpose(0, 1)[None], None if lse is None else lse[None]

            o, lse = attend_swapped(swap, tensors, return_lse, attend)
        else:
            why = refusal(self.op.spec)
            if why:
                raise ValueError(f"method '{method}': {why}; 'ulysses' can")
            o, lse = attend_pieces(
                self._partial, tensors, pieces_of(starts, held, self.rank), len(starts) - 1, self._topology.by_keys,
                rank=self.rank, at_once=method == "all_gather", repeatable=is_repeatable(deterministic),
            )  # fmt: skip
        o = o[0].transpose(0, 1)
        return (o, lse[0]) if return_lse and lse is not None else o

    def explain(self, q: Tensor, k: Tensor, v: Tensor, **captured: Any) -> Choice:
        """How such a call is spread, and why. Every rank has to ask."""
        return self._preparation.prepare(q, k, v, {"return_lse": False, "dropout_p": None}, None, captured)[0].choice

    # What it computes -------------------------------------------------------------------------------------------------

    def _attend(
        self, call: KnownCall, tensors: Sequence[Any], repeatable: bool, has_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        tensors = self._summed(tensors)
        method = call.choice.method
        if method in KEYS:
            return self._by_keys(call, tensors, (0, call.sizes.heads), repeatable, at_once=method == "all_gather")
        topology = self._topology
        held = call.held if method == "ulysses" else topology.of_heads(call.held, self.rank)
        shares = shares_of(call.sizes.heads, call.sizes.kv_heads, len(held))

        def attend(part: tuple[Any, ...], first: int) -> tuple[Tensor, Tensor | None]:
            if method != "ulysses":
                at = (first, call.sizes.heads)
                return self._by_keys(call, part, at, repeatable, at_once="all_gather" in self.method)
            offsets = (0, 0, 0, first, call.total, call.total, None, call.sizes.heads)
            return attend_whole(self.op.engine, part, (offsets, repeatable))

        return attend_swapped(Swap(topology.by_heads, held, shares), tensors, has_lse, attend)

    def _summed(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The operator's tensors; gradients of captured ones are summed in float32 over the calls of all ranks."""
        learned = [n for n, x in enumerate(tensors) if n > 2 and isinstance(x, Tensor) and x.requires_grad]
        if not (learned and torch.is_grad_enabled()):
            return tuple(tensors)
        if not self._sums:
            return tuple(x.to(type_of_sums(x.dtype)) if n in learned else x for n, x in enumerate(tensors))
        if is_under_ddp(self._topology.whole):
            named = ", ".join(f"'{self.op.signature.names[n - 3]}'" for n in learned)
            raise ValueError(
                f"DistributedDataParallel would add up the gradients of {named} over ranks again: pass "
                "context_parallel(…, sums=False), which leaves that to it"
            )
        found = list(tensors)
        for group in self._topology.sums:
            for n, x in zip(learned, summed([found[n] for n in learned], group), strict=True):
                found[n] = x
        return tuple(found)

    def _by_keys(
        self, call: KnownCall, tensors: Sequence[Any], heads: tuple[int, int], repeatable: bool, *, at_once: bool
    ) -> tuple[Tensor, Tensor | None]:
        """o and lse of some heads, for the rows of this rank and of the ranks that exchange heads with it."""
        key = (heads, repeatable, at_once)
        walk = call.walks.get(key)
        if walk is None:
            topology = self._topology
            held, line = topology.of_keys(call.held), topology.along(self.rank)[0]
            plan = rounds_of(call.needs, held, line, at_once=at_once, device=tensors[0].device, pace=call.pace)
            batch, N = call.sizes.batch, call.total
            where = Offsets(0, 0, 0, heads[0], N, N, batch, heads[1])
            keeps = at_once or call.needs.are_few(held)
            walk = call.walks[key] = Walk(self._partial, plan, topology.by_keys, where, repeatable, keeps)
        return walk.attend(tuple(tensors))


@dataclass(frozen=True)
class SequencePiece:
    """One sequence: its number, its length, its positions on each rank, and its rows among those of this rank."""

    number: int
    length: int
    held: Held
    rows: tuple[slice, ...]


def pieces_of(starts: Sequence[int], held: Held, rank: int) -> Iterator[SequencePiece]:
    """The sequences in order, without empty ones."""
    own = list(zip(held[rank], accumulate((y - x for x, y in held[rank]), initial=0), strict=False))
    for number, (first, end) in enumerate(pairwise(starts)):
        if end > first:
            rows = (
                slice(before + max(x, first) - x, before + min(y, end) - x)
                for (x, y), before in own
                if x < end and y > first
            )
            inside = tuple(
                tuple((max(x, first) - first, min(y, end) - first) for x, y in spans if x < end and y > first)
                for spans in held
            )
            yield SequencePiece(number, end - first, inside, tuple(rows))


def captured_of(spec: AttentionSpec, tensors: Sequence[Any], length: int) -> list[Any]:
    """The captured tensors as a sequence of this length sees them: dimensions Nq and Nk are cut to the length."""
    found = list(tensors)
    for n, declared in enumerate(spec.tensors):
        x: Tensor = found[n]
        for axis, extent in enumerate(declared.shape):
            if isinstance(extent, Symbol) and extent.kind is SymbolKind.SIZE and extent.name in ("Nq", "Nk"):
                x = x.narrow(axis, 0, length)
        found[n] = x
    return found


def refusal(spec: AttentionSpec) -> str:
    """Why sequences cannot be computed one by one; empty where they can."""
    for declared in spec.tensors:
        computed = [extent for extent in declared.shape if not isinstance(extent, Symbol)]
        if any(isinstance(node, Symbol) and node.name in ("Nq", "Nk") for node in walk(*computed)):
            return f"a dimension of tensor '{declared.name}' is computed from the lengths of a sequence"
    return ""


def starts_of(cu_seqlens: object) -> list[int]:
    """``cu_seqlens`` as a list. Raises ``TypeError`` and ``ValueError``."""
    held = check_starts("cu_seqlens", cu_seqlens)
    if held.is_meta:
        raise ValueError("'cu_seqlens' is on meta and has no numbers; ranks have to know where sequences begin")
    starts: list[int] = held.tolist()
    if starts[0] != 0 or any(end < first for first, end in pairwise(starts)):
        raise ValueError(f"'cu_seqlens' is {starts}; it begins with 0 and never falls")
    return starts


def attend_pieces(
    partial: Partial, tensors: Sequence[Any], pieces: Iterable[SequencePiece], batch: int, group: Group, *,
    rank: int, at_once: bool, repeatable: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o [1, H, n, Dv] and lse [1, H, n] of a rank's rows, sequence by sequence; ``tensors`` are the operator's.

    q, k and v are [1, heads, n, width]. Raises ``ValueError`` where a captured tensor is not of the longest sequence,
    or an index or a number of dropout is wrong in any: on every rank, whoever holds it, as the others would wait for
    one that has raised.
    """
    q, k, v = tensors[:3]
    spec, signature = partial.op.spec, partial.op.signature
    head_dim, heads, pieces = HeadDim(q.shape[3], v.shape[3]), q.shape[1], tuple(pieces)
    sizes_of = Sizes(batch, heads, k.shape[1], head_dim, q.element_size()).named
    found: list[tuple[Tensor, Tensor | None]] = []
    longest = sizes_of(max((each.length for each in pieces), default=0))
    for declared, x in zip(spec.tensors, tensors[3:], strict=False):
        check_captured(declared, x, longest, q.device)
    for each in {each.length: each for each in reversed(pieces) if each.length}.values():
        try:
            partial.op.engine.checker.indices.check(head_dim, sizes_of(each.length))
            check_defaults(spec, tensors[3 + len(spec.tensors) :], sizes_of(each.length))
        except ValueError as error:
            raise ValueError(f"sequence {each.number}, of {each.length} positions: {error}") from None
    for each in pieces:
        if not each.held[rank]:
            continue
        N, sizes = each.length, sizes_of(each.length)
        rest = captured_of(spec, tensors[3:], N)
        captured = {name: x for name, x in zip(signature.names, rest, strict=False) if x is not None}
        needs = needs_of(mask_of(spec, head_dim, sizes, captured, each.number), each.held)
        rounds = rounds_of(needs, each.held, rank, at_once=at_once, device=q.device)
        where = Offsets(0, 0, each.number, 0, N, N, batch, heads)
        own = (torch.cat([x[:, :, rows] for rows in each.rows], 2) for x in (q, k, v))
        keeps = at_once or needs.are_few(each.held)
        walk = Walk(partial, rounds, group, where, repeatable, keeps)
        found.append(walk.attend((*own, *rest)))
    if not found:
        # A graph that gives zero gradients: other ranks wait for those of captured values.
        learned = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
        o = q.new_zeros((*q.shape[:3], v.shape[3])) + sum(0 * x.sum().to(q.dtype) for x in learned)
        return o, q.new_zeros(q.shape[:3], dtype=type_of_sums(q.dtype)) if signature.has_lse else None
    sums = [lse for _, lse in found if lse is not None]
    return torch.cat([o for o, _ in found], 2), torch.cat(sums, 2) if sums else None
