"""What ranks know of a call before they compute: who holds what, what the mask keeps, by which method.

In: what this rank was given. Out: what all ranks know alike, and the operator's tensors. Calls that were right are
remembered, so that one like them costs little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.distributed.agreement import Given, Told, agree
from flashgen.distributed.arguments import checked, described, refuse_distributed, worded
from flashgen.distributed.blocks import mask_of, read_by
from flashgen.distributed.choice import Choice, Sizes, choice_of, method_text, pace_of, predicted
from flashgen.distributed.exchange import backend_of
from flashgen.distributed.marks import Mark, mark_of
from flashgen.distributed.needs import Held, Needs, length, needs_of
from flashgen.distributed.partition import Partition, in_order
from flashgen.distributed.ring import Walk
from flashgen.distributed.segments import Pace
from flashgen.distributed.topology import Topology
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.op.checks import check_captured
from flashgen.op.conversion import check_device
from flashgen.op.op import AttentionOp
from flashgen.op.per_sequence import check_numbers
from flashgen.op.plain import check_tensors

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


class Preparation:
    """Prepares the calls of one op over the ranks of a group. Every rank does, with its own rows."""

    def __init__(
        self,
        op: AttentionOp,
        topology: Topology,
        method: str | tuple[str, ...],
        partition: Partition | None,
        *,
        check: bool,
        link: float,
        switches: Mapping[str, bool],
    ) -> None:
        self._op, self._method, self._partition, self._topology = op, method, partition, topology
        self._check, self._link, self._switches = check, link, switches
        self._remembered: deque[Remembered] = deque(maxlen=_MOST_MARKED)
        self._reads: dict[tuple[int, int], frozenset[str]] = {}  # what the mask reads, by head dimension

    @property
    def remembered(self) -> int:
        """How many calls that were right are known."""
        return len(self._remembered)

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Known, tuple[Any, ...]]:
        """What ranks know, and the operator's tensors, of which q, k and v are this rank's rows."""
        call = None if not self._remembered else self._remembered_call(q, k, v, options, seed, captured)
        if call is not None:
            return call
        held, tensors, said, given = self.tell(lambda: ((q, k, v), options), seed, captured)
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
        if self._op.spec.dropout is not None and seed is None and not self._check:
            return None
        try:
            tensors = self._tensors(q, k, v, options, seed, captured)
            mark = self._mark(tensors, options)
        except Exception:
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
            reads = self._reads[dims] = frozenset().union(*read_by(self._op.spec, HeadDim(*dims)))
        found = mark_of(tensors, self._op.signature.names, reads)
        if found is None or not self._check:
            return found
        flag = torch.is_grad_enabled()
        grads = tuple(flag and isinstance(x, Tensor) and x.requires_grad for x in tensors)
        return (*found, grads, tuple(worded(value, flag) for value in options.values()))

    def tell(
        self, call: Callable[[], Call], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Held, tuple[Any, ...], list[Told], Given | None]:
        """Who holds what, the operator's tensors, what ranks told, and what this one was given where they ask each
        other. What ``call`` raises, every rank does.
        """
        spec, held = self._op.spec, None if self._partition is None else self._partition.spans
        drawn: list[tuple[Any, ...]] = []
        told: list[Given] = []

        def take() -> tuple[Call, HeadDim, tuple[Any, ...]]:
            (q, k, v), options = call()
            first: object = q  # which is checked next
            kind = first.device.type if isinstance(first, Tensor) else "cpu"
            head_dim = checked(spec, q, k, v, backend_of(self._topology.whole, kind))
            rows = q.shape[2] if held is None else length(held[self._topology.rank])
            if q.shape[2] != rows:
                raise ValueError(f"'q' has {q.shape[2]} rows; the partition says {rows} ({self._partition})")
            tensors = self._tensors(q, k, v, options, seed, captured)
            self._op.engine.checker.check_types(q, k, v, tensors[3 : 3 + len(spec.tensors)])
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
        return int(tensors[-2].item()) if self._op.spec.dropout is not None and tensors[-2] is not None else 0

    def _with_seed(self, tensors: tuple[Any, ...], said: Sequence[Told]) -> tuple[Any, ...]:
        """The tensors with the first rank's seed, where there is one."""
        if self._op.spec.dropout is None or tensors[-2] is None:
            return tensors
        return (*tensors[:-2], torch.tensor(said[0].seed), tensors[-1])

    def _tensors(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The operator's tensors. Raises what the op raises."""
        op = self._op
        refuse_distributed({"q": q, "k": k, "v": v, **captured})
        check_tensors(list(captured), list(captured.values()))
        for name, x in captured.items():
            if isinstance(x, Tensor) and x.dim():
                check_device(f"tensor '{name}'", x, q.device)
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
        spec, flag = self._op.spec, torch.is_grad_enabled()
        signature = self._op.signature
        starts = options.get("cu_seqlens")
        batch = q.shape[0] if starts is None else len(starts) - 1
        rows = {"B": batch, "H": q.shape[1], "Hkv": k.shape[1], "Nq": 0, "Nk": 0}
        values = zip(signature.names, tensors[3 : signature.inputs], strict=True)
        options, nanoseconds = {**options, "link": self._link, **self._switches}, 0
        if self._method == "auto":
            rows_of_all = self._topology.world * q.shape[2]
            shape = Shape(q.shape[0], q.shape[1], k.shape[1], rows_of_all, rows_of_all)
            nanoseconds = int(1e9 * predicted(spec, head_dim, shape, q.device))
        return Given(
            op=self._op.name,
            method=method_text(self._method),
            partition=str(self._partition and self._partition.spans),
            q=described(q, flag),
            k=described(k, flag),
            v=described(v, flag),
            captured=", ".join(f"{name} {worded(value, flag)}" for name, value in values),
            options=", ".join(f"{name} {worded(value, flag)}" for name, value in options.items()),
            mask=mask_of(spec, head_dim, rows, captured).key,
            told=Told(q.shape[2], self._seed_of(tensors), nanoseconds),
        )

    def _known(self, held: Held, said: Sequence[Told], tensors: tuple[Any, ...]) -> Known:
        """Raises what every rank finds wrong alike."""
        spec, (q, k, v) = self._op.spec, tensors[:3]
        signature = self._op.signature
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
        self._op.engine.checker.indices.check(head_dim, sizes)
        if N:
            check_numbers(spec, tensors[3 + len(spec.tensors) :], sizes)
        captured = dict(zip(signature.names, tensors[3:], strict=False))
        mask = mask_of(spec, head_dim, sizes, {name: x for name, x in captured.items() if x is not None})
        of_call = Sizes(q.shape[0], q.shape[1], k.shape[1], head_dim, q.element_size())
        needs = needs_of(mask, self._topology.of_keys(held))
        seconds = 1e-9 * max((each.nanoseconds for each in said), default=0)
        choice = choice_of(self._method, self._topology, held, needs, mask, of_call, seconds, self._link)
        pace = pace_of(spec, of_call, N, q.device, self._link)
        return Known(held, needs, of_call, choice, pace)
