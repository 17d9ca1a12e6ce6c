"""The preparation of a call over ranks: which rank holds what, which keys each needs, and by which method.

In: the arguments of this rank, which are checked, brought into the form of a dense call, and described in words that
ranks compare. Out: the call as all ranks know it, and the operator's tensors. Valid calls are remembered, so that
another one like them is cheap.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from flashgen.distributed.blocks import Held, NeededKeys, length, mask_of, needs_of, read_by
from flashgen.distributed.choice import Choice, Sizes, choice_of, method_text, pace_of, predicted
from flashgen.distributed.exchange import Group, Topology, answering, backend_of
from flashgen.distributed.partition import Partition, in_order
from flashgen.distributed.ring import Walk
from flashgen.distributed.rounds import Pace
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.op.captured import check_defaults
from flashgen.op.checks import check_captured
from flashgen.op.conversion import check_device
from flashgen.op.op import AttentionOp
from flashgen.op.registration import rows_of_region
from flashgen.op.tensor_kinds import UnchangedTensor, check_tensors, has_distributed


def autocast(op: AttentionOp, *tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the type of the autocast region, if there is one and the op takes that type."""
    first: object = tensors[0]
    if not isinstance(first, Tensor):
        return tensors
    kind = first.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return rows_of_region(op.engine, kind, tensors)


def check_call(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, backend: str) -> None:
    """Raise ``TypeError`` and ``ValueError`` for tensors that a dense call on a group of this backend does not take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x)
        if is_functorch_wrapped_tensor(x):
            raise TypeError(
                f"'{name}' is a tensor of torch.func (vmap, grad, jvp): context_parallel has no rule for these, as "
                "ranks talk in it; the op itself has"
            )
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; [B, H, n, D] is expected, n rows of this rank")
        if backend == "nccl" and not x.is_cuda:
            raise ValueError(f"'{name}' is on {x.device}; NCCL, which this group has, takes tensors on GPUs")
        if backend == "gloo" and not x.is_cpu and x.device == q.device:
            raise ValueError(f"'{name}' is on {x.device}; gloo, which this group has, takes tensors on CPUs")
        check_device(f"'{name}'", x, q.device)
        if x.dtype is not q.dtype:
            raise TypeError(f"'{name}' is {x.dtype}, but 'q' is {q.dtype}; q, k and v share one type")
    shapes = f"q, k and v have the shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(
            f"q, k and v have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} rows; a rank holds the same positions of each"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(f"{shapes}; B is one for all, Hkv for k and v")
    if q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"{shapes}; H must be a multiple of Hkv")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}; q and k share their head dimension")
    if HeadDim(q.shape[3], v.shape[3]) not in spec.head_dims:
        known = " or ".join(map(str, spec.head_dims))
        raise ValueError(
            f"head dimension {q.shape[3]} of q and {v.shape[3]} of v; '{spec.name}' is compiled for {known}"
        )


def _check_rows(name: str, x: object) -> None:
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError(
            f"'{name}' is a NestedTensor; context_parallel takes this rank's rows of all sequences, one behind the "
            "other: .varlen(q, k, v, cu_seqlens)"
        )
    check_tensors([name], [x])


def described(x: Tensor, flag: bool) -> str:
    """A tensor's shape without its number of rows, dtype and device; ``flag``: gradients are recorded."""
    sizes = ", ".join("n" if axis == 2 else str(extent) for axis, extent in enumerate(x.shape))
    return f"[{sizes}] {x.dtype} on {x.device.type}{' with gradient' if flag and x.requires_grad else ''}"


def worded(value: object, flag: bool) -> str:
    """A number as text; a tensor as its shape and dtype."""
    if isinstance(value, Tensor) and value.dim():
        gradient = " with gradient" if flag and value.requires_grad else ""
        return f"{list(value.shape)} {value.dtype}{gradient}"
    return str(value.item()) if isinstance(value, Tensor) else repr(value)


def dense(op: AttentionOp, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """q, k and v [n, H, D] of a ragged batch in the layout of a dense call, [1, H, n, D]."""
    for name, x in zip("qkv", rows, strict=True):
        _check_rows(name, x)
        if x.dim() != 3:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; [n, H, D] is expected, n rows of this rank")
    return autocast(op, *(x.transpose(0, 1)[None] for x in rows))


# Ranks compare their calls before any rows travel, so that a mistake on one rank is an error on all. A correct call
# costs one collective of a few numbers; only errors are exchanged as text.


@dataclass(frozen=True)
class RankFacts:
    """What may differ between ranks: the number of rows, the seed that a rank would draw, the time that it predicts."""

    length: int
    seed: int = 0
    nanoseconds: int = 0


@dataclass(frozen=True)
class RankCall:
    """The call of one rank. ``said`` describes each argument in words, by its name: equal on all ranks."""

    said: Mapping[str, str]
    told: RankFacts


def agree(of_this_rank: Callable[[], RankCall], group: Group) -> list[RankFacts]:
    """The facts of every rank. Raises ``ValueError`` where calls differ, and on all ranks what one of them raised."""
    mine: RankCall | Exception
    try:
        mine = of_this_rank()
    except Exception as error:  # other ranks wait for an answer, whatever the error is
        known = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), None)
        mine = known(str(error)) if known else RuntimeError(f"{type(error).__name__}: {error}")
    numbers = [0] * 6
    if isinstance(mine, RankCall):
        digest = struct.unpack("<2q", hashlib.sha256(repr(mine.said).encode()).digest()[:16])
        numbers = [1, *digest, mine.told.length, mine.told.seed, mine.told.nanoseconds]
    with answering(group, "what a call was given"):
        device = "cuda" if backend_of(group, "cpu") == "nccl" else "cpu"
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        table = own.new_empty(dist.get_world_size(group), len(numbers))
        dist.all_gather(list(table), own, group=group)
        rows = table.tolist()
    if any(row[0] == 0 or row[1:3] != rows[0][1:3] for row in rows):
        _tell(mine, group)
    return [RankFacts(*row[3:]) for row in rows]


def _tell(mine: RankCall | Exception, group: Group) -> None:
    """Raise the error of the first rank that has one, else the first difference between calls."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with answering(group, "what a call was given"):
        dist.all_gather_object(said, mine, group=group)
    for rank, each in enumerate(said):
        if isinstance(each, Exception):
            raise type(each)(f"rank {rank}: {each}")
    for what, wanted in said[0].said.items():
        for rank, each in enumerate(said):
            if each.said[what] != wanted:
                raise ValueError(
                    f"ranks differ in {what}: rank 0 has {wanted}, rank {rank} has {each.said[what]}; "
                    "every rank has to pass the same"
                )


_MOST_REMEMBERED = 8  # calls

# Equal for calls of equal shapes whose masks read equal values: their preparation is the same.
CallKey = tuple[object, ...]
# q, k and v of a dense call, and its options.
CallArguments = tuple[tuple[Tensor, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class KnownCall:
    """A call as all ranks know it; ``walks`` are the schedules of it that this rank has made."""

    held: Held
    needs: NeededKeys
    sizes: Sizes
    choice: Choice
    pace: Pace
    walks: dict[object, Walk] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """N."""
        return sum(map(length, self.held))


@dataclass(frozen=True)
class AgreedCall:
    """What each rank holds, the operator's tensors, the facts of each rank, and the key of the call, if it has one."""

    held: Held
    tensors: tuple[Any, ...]
    said: list[RankFacts]
    key: CallKey | None


@dataclass(frozen=True)
class Setting:
    """The checked arguments of ``context_parallel``."""

    op: AttentionOp
    topology: Topology
    method: str | tuple[str, ...]
    partition: Partition | None
    check: bool
    wide: bool
    sums: bool
    link: float


class Preparation:
    """Prepares the calls of one op over the ranks of a group; every rank does so, with its own rows.

    A call like a remembered one is found by its key. Ranks with ``check`` still compare each call: another rank may
    have made a different one.
    """

    def __init__(self, setting: Setting) -> None:
        self._op, self._setting, self._topology = setting.op, setting, setting.topology
        self._given: deque[tuple[CallKey, RankCall]] = deque(maxlen=_MOST_REMEMBERED)
        self._known: deque[tuple[tuple[CallKey, list[RankFacts]], KnownCall]] = deque(maxlen=_MOST_REMEMBERED)

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[KnownCall, tuple[Any, ...]]:
        """The call as ranks know it, and the operator's tensors, with this rank's rows of q, k and v."""
        told = self.tell(lambda: ((q, k, v), options), seed, captured)
        said = [replace(each, seed=0) for each in told.said]
        key = None if told.key is None else (told.key, said)
        known = _recalled(self._known, key, lambda: self._known_of(told.held, said, told.tensors))
        return known, told.tensors

    def _mark(self, tensors: Sequence[Any], options: Mapping[str, Any]) -> CallKey | None:
        """The key of a call; None where changes of a tensor that the mask reads cannot be noticed.

        A tensor on a device enters as the object and PyTorch's count of writes to it: to compare contents, the host
        would have to wait for the device.
        """
        reads = frozenset().union(*read_by(self._op.spec, HeadDim(tensors[0].shape[-1], tensors[2].shape[-1])))
        found: list[object] = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in tensors]
        for name, x in zip(self._op.signature.names, tensors[3:], strict=False):
            if isinstance(x, Tensor) and name in reads:
                if x.is_cpu and x.dim() == 0:  # a param: a new tensor at each call
                    found.append(x.item())
                elif x.is_inference():  # PyTorch does not count writes to it
                    return None
                else:
                    found.append(UnchangedTensor(x))
        if self._setting.check:
            flag = torch.is_grad_enabled()
            found += [flag and isinstance(x, Tensor) and x.requires_grad for x in tensors]
            found += [worded(value, flag) for value in options.values()]
        return tuple(found)

    def tell(self, call: Callable[[], CallArguments], seed: Any, captured: Mapping[str, Any]) -> AgreedCall:
        """Check the call on this rank and, with ``check``, compare it on all ranks. All raise what ``call`` raises."""
        spec, partition, check = self._op.spec, self._setting.partition, self._setting.check
        drawn: list[tuple[tuple[Any, ...], CallKey | None]] = []

        def take() -> tuple[Mapping[str, Any], tuple[Any, ...], CallKey | None]:
            (q, k, v), options = call()
            first: object = q  # not checked yet
            kind = first.device.type if isinstance(first, Tensor) else "cpu"
            check_call(spec, q, k, v, backend_of(self._topology.whole, kind))
            rows = q.shape[2] if partition is None else length(partition.spans[self._topology.rank])
            if q.shape[2] != rows:
                raise ValueError(f"'q' has {q.shape[2]} rows; the partition says {rows} ({partition})")
            tensors = self._tensors(q, k, v, options, seed, captured)
            self._op.engine.checker.check_types(q, k, v, tensors[3 : 3 + len(spec.tensors)])
            drawn.append((tensors, self._mark(tensors, options)))
            return options, *drawn[0]

        def given() -> RankCall:
            options, tensors, key = take()
            found = _recalled(self._given, key, lambda: self._given_of(options, captured, tensors))
            return replace(found, told=replace(found.told, seed=self._seed_of(tensors)))

        if check:
            said = agree(given, self._topology.whole)
        else:
            if spec.dropout is not None and seed is None:
                raise ValueError("check=False takes a seed: ranks do not tell each other the one that they draw")
            take()
            said = [RankFacts(length(own)) for own in (() if partition is None else partition.spans)]
        tensors, key = drawn[0]
        if check and spec.dropout is not None and tensors[-2] is not None:
            tensors = (*tensors[:-2], torch.tensor(said[0].seed), tensors[-1])  # the seed of rank 0
        held = in_order([each.length for each in said]) if partition is None else partition.spans
        return AgreedCall(held, tensors, said, key)

    def _seed_of(self, tensors: Sequence[Any]) -> int:
        return int(tensors[-2].item()) if self._op.spec.dropout is not None and tensors[-2] is not None else 0

    def _tensors(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], seed: Any, captured: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        op = self._op
        for name, x in {"q": q, "k": k, "v": v, **captured}.items():
            if has_distributed([x]):
                what = "this rank's rows (to_local())" if name in ("q", "k", "v") else "the whole (full_tensor())"
                raise TypeError(f"'{name}' is a DTensor; context_parallel takes {what}")
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

    def _given_of(self, options: Mapping[str, Any], captured: Mapping[str, Any], tensors: Sequence[Any]) -> RankCall:
        spec, flag, setting = self._op.spec, torch.is_grad_enabled(), self._setting
        signature, (q, k, v) = self._op.signature, tensors[:3]
        head_dim = HeadDim(q.shape[3], v.shape[3])
        starts = options.get("cu_seqlens")
        batch = q.shape[0] if starts is None else len(starts) - 1
        rows = {"B": batch, "H": q.shape[1], "Hkv": k.shape[1], "Nq": 0, "Nk": 0}
        values = zip(signature.names, tensors[3 : signature.inputs], strict=True)
        options = {**options, "link": setting.link, "wide": setting.wide, "sums": setting.sums}
        nanoseconds = 0
        if setting.method == "auto":
            rows_of_all = self._topology.world * q.shape[2]
            shape = Shape(q.shape[0], q.shape[1], k.shape[1], rows_of_all, rows_of_all)
            nanoseconds = int(1e9 * predicted(spec, head_dim, shape, q.device))
        said = {
            "the op": self._op.name,
            "'method'": method_text(setting.method),
            "'partition'": str(setting.partition and setting.partition.spans),
            **{f"'{name}'": described(x, flag) for name, x in zip("qkv", (q, k, v), strict=True)},
            "captured values": ", ".join(f"{name} {worded(value, flag)}" for name, value in values),
            "options": ", ".join(f"{name} {worded(value, flag)}" for name, value in options.items()),
            "what the mask reads": mask_of(spec, head_dim, rows, captured).key,
        }
        return RankCall(said, RankFacts(q.shape[2], self._seed_of(tensors), nanoseconds))

    def _known_of(self, held: Held, said: Sequence[RankFacts], tensors: tuple[Any, ...]) -> KnownCall:
        """Raises errors that every rank finds alike."""
        spec, setting, (q, k, v) = self._op.spec, self._setting, tensors[:3]
        signature = self._op.signature
        head_dim, N = HeadDim(q.shape[3], v.shape[3]), sum(map(length, held))
        of_call = Sizes(q.shape[0], q.shape[1], k.shape[1], head_dim, q.element_size())
        sizes = of_call.named(N)
        for declared, x in zip(spec.tensors, tensors[3:], strict=False):
            check_captured(declared, x, sizes, q.device)
        self._op.engine.checker.indices.check(head_dim, sizes)
        if N:
            check_defaults(spec, tensors[3 + len(spec.tensors) :], sizes)
        captured = dict(zip(signature.names, tensors[3:], strict=False))
        mask = mask_of(spec, head_dim, sizes, {name: x for name, x in captured.items() if x is not None})
        needs = needs_of(mask, self._topology.of_keys(held))
        seconds = 1e-9 * max((each.nanoseconds for each in said), default=0)
        choice = choice_of(setting.method, self._topology, held, needs, mask, of_call, seconds, setting.link)
        pace = pace_of(spec, of_call, N, q.device, setting.link)
        return KnownCall(held, needs, of_call, choice, pace)


_Key = TypeVar("_Key")
_Found = TypeVar("_Found")


def _recalled(known: deque[tuple[_Key, _Found]], key: _Key | None, make: Callable[[], _Found]) -> _Found:
    """The value that is remembered under a key, else a new one, which is then remembered unless the key is None."""
    if key is None:
        return make()
    for at, found in known:
        if at == key:
            return found
    known.appendleft((key, made := make()))
    return made
