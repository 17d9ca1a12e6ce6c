"""An op over the ranks of a group, each of which holds a part of the sequence.

In: an op, a group or a mesh, a partition. Out: a callable that takes this rank's rows and returns this rank's rows.
What crosses ranks goes by ``torch.distributed``; kernels are those of one device, told where their rows are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashgen.distributed.agreement import Given, Told, agree
from flashgen.distributed.arguments import autocast, checked, dense, described, worded
from flashgen.distributed.blocks import mask_of, read_by
from flashgen.distributed.choice import LINKS, Choice, Sizes, choice_of, method_text, pace_of, predicted
from flashgen.distributed.exchange import is_under_ddp, summed
from flashgen.distributed.marks import Mark, mark_of
from flashgen.distributed.needs import Held, Needs, length, needs_of
from flashgen.distributed.partial import Partial, Where
from flashgen.distributed.partition import Partition, in_order
from flashgen.distributed.ragged import attend_heads, attend_pieces, check_starts, pieces_of, refusal
from flashgen.distributed.ring import Walk
from flashgen.distributed.rounds import rounds_of
from flashgen.distributed.segments import Pace
from flashgen.distributed.topology import KEYS, METHODS, Topology, topology_of
from flashgen.distributed.ulysses import Swap, no_heads, shares_of
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.runtime.call import check_captured
from flashgen.runtime.op import AttentionOp, is_repeatable

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
    if not check and (partition is None or method == "auto"):
        raise ValueError("check=False takes a partition and a method other than 'auto': ranks tell each other nothing")
    given: object = link
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
        raise ValueError(f"'link' is {given!r}; bytes a second are expected, as in link=450e9")
    topology = topology_of(mesh, method)
    if partition is not None and partition.world != topology.world:
        raise ValueError(f"the partition is for {partition.world} ranks; the group has {topology.world}")
    by = method if isinstance(method, str) else tuple(method)
    if link is None:
        link = LINKS.get(dist.get_backend(topology.whole), LINKS["gloo"])
    return ContextParallel(op, topology, by, partition, check=check, wide=wide, sums=sums, link=link)


_MOST_MARKED = 8  # calls that are remembered

# q, k and v of a dense call, and its options.
Call = tuple[tuple[Tensor, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Known:
    """A call as all ranks know it; ``walks`` are those of it that this rank has made."""

    held: Held
    needs: Needs
    sizes: Sizes
    choice: Choice
    pace: Pace
    walks: dict[object, Walk] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """N."""
        return sum(map(length, self.held))


@dataclass(frozen=True)
class Remembered:
    """A call that was right: what this rank was ``given``, what all ``said``, where they ask each other."""

    mark: Mark
    given: Given | None
    said: Sequence[Told]
    known: Known


class ContextParallel:
    """An op whose sequence is spread over the ranks of a group. Every rank calls it, with its own rows."""

    def __init__(
        self,
        op: AttentionOp,
        topology: Topology,
        method: str | tuple[str, ...],
        partition: Partition | None,
        *,
        check: bool,
        wide: bool,
        sums: bool,
        link: float,
    ) -> None:
        self.op, self.method = op, method
        self.rank, self.world = topology.rank, topology.world
        self._topology, self._partition, self._check, self._sums = topology, partition, check, sums
        self._link = float(link)
        self._partial = Partial(op, wide=wide)
        self._backend = dist.get_backend(topology.whole)
        self._remembered: deque[Remembered] = deque(maxlen=_MOST_MARKED)
        self._reads: dict[tuple[int, int], frozenset[str]] = {}  # what the mask reads, by head dimension

    def __repr__(self) -> str:
        return f"<{self.op.name} over {self.world} ranks by {method_text(self.method)}; this is rank {self.rank}>"

    # Ranks talk with each other, which no graph can hold: torch.compile goes around it.
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
        call, tensors = self._prepared(q, k, v, options, seed, captured)
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
        if isinstance(self.method, tuple) and len(self.method) > 1:
            raise ValueError("ragged batches are spread over one dimension of a mesh: name one method")

        def given() -> Call:
            options = {"return_lse": return_lse, "dropout_p": dropout_p, "deterministic": deterministic}
            return dense(self.op, (q, k, v)), {**options, "cu_seqlens": check_starts(cu_seqlens)}

        held, tensors, _, _ = self._told(given, seed, captured)
        starts = check_starts(cu_seqlens)
        total = sum(map(length, held))
        if starts[-1] != total:
            raise ValueError(f"'cu_seqlens' ends at {starts[-1]}; the ranks have {total} rows")
        method = self.method if isinstance(self.method, str) else self.method[0]
        tensors = self._summed(tensors)
        if method == "ulysses":
            heads, kv_heads = tensors[0].shape[1], tensors[1].shape[1]
            why = no_heads(self.op.spec, heads, kv_heads, self.world)
            if why:
                raise ValueError(f"method 'ulysses': {why}; 'ring' and 'all_gather' can")
            swap = Swap(self._topology.by_heads, held, shares_of(heads, kv_heads, self.world))
            o, lse = attend_heads(
                self.op, swap, tensors, cu_seqlens, has_lse=return_lse, repeatable=is_repeatable(deterministic)
            )
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
        return self._prepared(q, k, v, {"return_lse": False, "dropout_p": None}, None, captured)[0].choice

    # What ranks agree on ----------------------------------------------------------------------------------------------

    def _prepared(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Known, tuple[Any, ...]]:
        """What ranks know, and the operator's tensors, of which q, k and v are this rank's rows."""
        call = None if not self._remembered else self._remembered_call(q, k, v, options, seed, captured)
        if call is not None:
            return call
        held, tensors, said, given = self._told(lambda: ((q, k, v), options), seed, captured)
        known = self._known(held, said, tensors)
        mark = self._mark(tensors, options)
        if mark is not None:
            self._remembered.appendleft(Remembered(mark, given, [replace(each, seed=0) for each in said], known))
        return known, tensors

    def _remembered_call(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Known, tuple[Any, ...]] | None:
        """The same, where a call is like one that was right; None: what is wrong is said elsewhere.

        Where ranks ask each other they do so here as well: on another rank it may be another call.
        """
        if self.op.spec.dropout is not None and seed is None and not self._check:
            return None
        try:
            tensors = self._tensors(q, k, v, options, seed, captured)
            mark = self._mark(tensors, options)
        except (TypeError, ValueError):
            return None
        found = next((each for each in self._remembered if mark is not None and each.mark == mark), None)
        if found is None or found.given is None:
            return None if found is None else (found.known, tensors)
        given = replace(found.given, told=replace(found.given.told, seed=self._seed_of(tensors)))
        said = agree(lambda: given, self._topology.whole)
        tensors = self._with_seed(tensors, said)
        said = [replace(each, seed=0) for each in said]
        if said == found.said:
            return found.known, tensors
        known = self._known(self._held(said), said, tensors)
        self._remembered.appendleft(Remembered(found.mark, given, said, known))
        return known, tensors

    def _mark(self, tensors: Sequence[Any], options: Mapping[str, Any]) -> Mark | None:
        dims = (tensors[0].shape[-1], tensors[2].shape[-1])
        reads = self._reads.get(dims)
        if reads is None:
            reads = self._reads[dims] = frozenset().union(*read_by(self.op.spec, HeadDim(*dims)))
        found = mark_of(tensors, self.op.signature.names, reads)
        if found is None or not self._check:
            return found
        flag = torch.is_grad_enabled()
        grads = tuple(flag and isinstance(x, Tensor) and x.requires_grad for x in tensors)
        return (*found, grads, tuple(worded(value, flag) for value in options.values()))

    def _told(
        self, call: Callable[[], Call], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Held, tuple[Any, ...], list[Told], Given | None]:
        """Who holds what, the operator's tensors, what ranks told, and what this one was given where they ask each
        other. What ``call`` raises, every rank does.
        """
        spec, held = self.op.spec, None if self._partition is None else self._partition.spans
        drawn: list[tuple[Any, ...]] = []
        told: list[Given] = []

        def take() -> tuple[Call, HeadDim, tuple[Any, ...]]:
            (q, k, v), options = call()
            head_dim = checked(spec, q, k, v, self._backend)
            if held is not None and q.shape[2] != length(held[self.rank]):
                raise ValueError(
                    f"'q' has {q.shape[2]} rows; the partition says {length(held[self.rank])} ({self._partition})"
                )
            tensors = self._tensors(q, k, v, options, seed, captured)
            drawn.append(tensors)
            return ((q, k, v), options), head_dim, tensors

        def given() -> Given:
            ((q, k, v), options), head_dim, tensors = take()
            told.append(self._given(q, k, v, options, captured, tensors, head_dim))
            return told[0]

        if self._check:
            said = agree(given, self._topology.whole)
        else:
            if spec.dropout is not None and seed is None:
                raise ValueError("check=False takes a seed: ranks do not tell each other the one that they draw")
            take()
            said = [Told(length(own)) for own in held or ()]
        tensors = self._with_seed(drawn[0], said) if self._check else drawn[0]
        return self._held(said), tensors, said, told[0] if told else None

    def _held(self, said: Sequence[Told]) -> Held:
        """Who holds what: as the partition says, or parts one behind the other."""
        return in_order([each.length for each in said]) if self._partition is None else self._partition.spans

    def _seed_of(self, tensors: Sequence[Any]) -> int:
        return int(tensors[-2].item()) if self.op.spec.dropout is not None and tensors[-2] is not None else 0

    def _with_seed(self, tensors: tuple[Any, ...], said: Sequence[Told]) -> tuple[Any, ...]:
        """The tensors with the first rank's seed, where there is one."""
        if self.op.spec.dropout is None or tensors[-2] is None:
            return tensors
        return (*tensors[:-2], torch.tensor(said[0].seed), tensors[-1])

    def _tensors(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The operator's tensors. Raises what the op raises."""
        op = self.op
        found = op.operator_tensors(
            q, k, v, captured, return_lse=options["return_lse"], dropout_p=options["dropout_p"], seed=seed
        )
        for position, declaration in op.signature.fixed:
            if torch.is_grad_enabled() and isinstance(found[position], Tensor) and found[position].requires_grad:
                raise ValueError(
                    f"argument '{op.signature.names[position - 3]}' requires a gradient, which the spec does not give "
                    f"it; declare it `{declaration} grad`, or pass it detached"
                )
        return tuple(found)

    def _given(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Mapping[str, Any],
        captured: Mapping[str, Any],
        tensors: Sequence[Any],
        head_dim: HeadDim,
    ) -> Given:
        spec, flag = self.op.spec, torch.is_grad_enabled()
        signature = self.op.signature
        starts = options.get("cu_seqlens")
        batch = q.shape[0] if starts is None else len(starts) - 1
        rows = {"B": batch, "H": q.shape[1], "Hkv": k.shape[1], "Nq": 0, "Nk": 0}
        values = zip(signature.names, tensors[3 : signature.inputs], strict=True)
        nanoseconds = 0
        if self.method == "auto":
            shape = Shape(q.shape[0], q.shape[1], k.shape[1], self.world * q.shape[2], self.world * q.shape[2])
            nanoseconds = int(1e9 * predicted(spec, head_dim, shape, q.device))
        return Given(
            op=self.op.name,
            method=method_text(self.method),
            partition=str(self._partition and self._partition.spans),
            q=described(q, flag),
            k=described(k, flag),
            v=described(v, flag),
            captured=", ".join(f"{name} {worded(value, flag)}" for name, value in values),
            options=", ".join(
                f"{name} {worded(value, flag)}" for name, value in {**options, "link": self._link}.items()
            ),
            mask=mask_of(spec, head_dim, rows, captured).key,
            told=Told(q.shape[2], self._seed_of(tensors), nanoseconds),
        )

    def _known(self, held: Held, said: Sequence[Told], tensors: tuple[Any, ...]) -> Known:
        """Raises what every rank finds wrong alike."""
        spec, (q, k, v) = self.op.spec, tensors[:3]
        signature = self.op.signature
        head_dim, N = HeadDim(q.shape[3], v.shape[3]), sum(map(length, held))
        sizes = {
            "B": q.shape[0],
            "H": q.shape[1],
            "Hkv": k.shape[1],
            "Nq": N,
            "Nk": N,
            "D": q.shape[3],
            "Dv": v.shape[3],
        }
        for declared, x in zip(spec.tensors, tensors[3:], strict=False):
            check_captured(declared, x, sizes, q.device)
        self._partial.engine.checker.check_indices(head_dim, sizes)
        captured = dict(zip(signature.names, tensors[3:], strict=False))
        mask = mask_of(spec, head_dim, sizes, {name: x for name, x in captured.items() if x is not None})
        of_call = Sizes(q.shape[0], q.shape[1], k.shape[1], head_dim, q.element_size())
        needs = needs_of(mask, self._topology.of_keys(held))
        seconds = 1e-9 * max((each.nanoseconds for each in said), default=0)
        choice = choice_of(self.method, self._topology, held, needs, mask, of_call, seconds, self._link)
        pace = pace_of(spec, of_call, N, q.device, self._link)
        return Known(held, needs, of_call, choice, pace)

    # What it computes -------------------------------------------------------------------------------------------------

    def _attend(
        self, call: Known, tensors: Sequence[Any], repeatable: bool, has_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        tensors = self._summed(tensors)
        method = call.choice.method
        if method in KEYS:
            return self._by_keys(call, tensors, (0, call.sizes.heads), repeatable, at_once=method == "all_gather")
        topology = self._topology
        held = call.held if method == "ulysses" else topology.of_heads(call.held, self.rank)
        shares = shares_of(call.sizes.heads, call.sizes.kv_heads, len(held))
        swap = Swap(topology.by_heads, held, shares)
        q, k, v = swap.there(*tensors[:3])
        rest = tensors[3:]
        own = shares[swap.rank]
        found = []
        for heads, kv_heads in own.calls:
            part = (q[:, slice(*heads)], k[:, slice(*kv_heads)], v[:, slice(*kv_heads)], *rest)
            at = (own.heads[0] + heads[0], call.sizes.heads)
            if method == "ulysses":
                found.append(self._alone(call, part, at, repeatable))
            else:
                found.append(self._by_keys(call, part, at, repeatable, at_once="all_gather" in self.method))
        o = swap.home(torch.cat([o for o, _ in found], 1))
        sums = [lse for _, lse in found if lse is not None and has_lse]
        return o, swap.home(torch.cat(sums, 1)[..., None])[..., 0] if sums else None

    def _summed(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The same; gradients of what is captured are those of all ranks, if anything is to be learned."""
        learned = [n for n, x in enumerate(tensors) if n > 2 and isinstance(x, Tensor) and x.requires_grad]
        if not (learned and torch.is_grad_enabled() and self._sums):
            return tuple(tensors)
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
        self, call: Known, tensors: Sequence[Any], heads: tuple[int, int], repeatable: bool, *, at_once: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Some heads of the rows of this rank, and of those that change heads with it."""
        key = (heads, repeatable, at_once)
        walk = call.walks.get(key)
        if walk is None:
            topology = self._topology
            held, line = topology.of_keys(call.held), topology.along(self.rank)[0]
            plan = rounds_of(call.needs, held, line, at_once=at_once, device=tensors[0].device, pace=call.pace)
            batch, N = call.sizes.batch, call.total
            where = Where(0, 0, 0, heads[0], N, N, batch, heads[1])
            walk = call.walks[key] = Walk(
                self._partial, held[line], plan, topology.by_keys, where, repeatable, keeps=at_once
            )
        return walk.attend(tuple(tensors))

    def _alone(
        self, call: Known, tensors: Sequence[Any], heads: tuple[int, int], repeatable: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Some heads of all rows."""
        op, N = self.op, call.total
        signature = op.signature
        named = dict(zip(signature.names, tensors[3 : signature.inputs], strict=True))
        if signature.has_dropout:
            named |= {"seed": tensors[-2], "dropout_p": tensors[-1]}
        attend: Any = op
        found = attend(
            *tensors[:3], **named, h_start=heads[0], h_total=heads[1], q_total=N, kv_total=N, deterministic=repeatable,
            return_lse=signature.has_lse,
        )  # fmt: skip
        return found if signature.has_lse else (found, None)
