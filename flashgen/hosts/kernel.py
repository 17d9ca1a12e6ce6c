"""What every host makes of a spec at one head dimension: a ``Kernel``, whose passes are functions of one struct.

In: the fields of ``struct Arguments``. Out: the layout of their bytes, what a pass is, and a call that is to be
explained, not run. Kernels of CPUs are in ``cpu_backend.py``, those of GPUs in ``cuda.py``, those of the emulator in
``emulated.py``. Nothing here imports torch.
"""

from __future__ import annotations

import abc
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import Variant
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Literal, Symbol, SymbolKind, index, literal, size, substitute
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import Field
from flashgen.plan.arguments import param_field, param_place_field
from flashgen.plan.explanation import ExplainedPass, Explanation
from flashgen.plan.launches import Box
from flashgen.plan.prediction import PassTime
from flashgen.plan.report import describe_bound
from flashgen.plan.tile_counts import tile_counts
from flashgen.reference.shard import Shard

Values = Sequence[float]

# The fields that ``struct Arguments`` begins with: all that vary where a spec captures nothing.
POINTERS = ("workspace", "q", "k", "v", "o", "lse", "lse_parts", "d_o", "d_lse", "dq", "dk", "dv")
_FORMATS = {"const pointer": "P", "pointer": "P", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "f32": "f"}


# By the codes of ``struct Arguments``.
ELEMENTS = (ElementType.F32, ElementType.BF16, ElementType.F16, ElementType.F8E4M3)


def call_of(values: Mapping[str, float]) -> tuple[ElementType, Shape]:
    """The element type and the sizes of a call, from values of ``struct Arguments`` by name."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len")
    return ELEMENTS[int(values["element"])], Shape(*(int(values[name]) for name in names))


class ArgumentLayout:
    """The memory layout of ``struct Arguments``: values in the order of the fields to bytes, as C aligns them.

    ``varying`` is the number of leading fields that vary; ``pack_varying`` gives their bytes. ``params`` are the
    fields of params, where nothing else varies beside what every call has; else None.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.names = tuple(field.name for field in fields)
        self.slots: Mapping[str, int] = {name: slot for slot, name in enumerate(self.names)}
        self.varying = sum(1 for _ in itertools.takewhile(lambda field: field.varies, fields))
        formats = [*(_FORMATS[field.kind] for field in fields), "P"]
        # "0P" pads the end as C pads the struct; what varies is padded up to the field behind it.
        self.pack: Callable[..., bytes] = struct.Struct("@" + "".join(formats[:-1]) + "0P").pack
        behind = "0" + formats[self.varying]
        self.pack_varying: Callable[..., bytes] = struct.Struct("@" + "".join(formats[: self.varying]) + behind).pack
        varies = self.fields[: self.varying]
        params = tuple(each for each in varies if each.name.startswith(param_field("")))
        places = tuple(each for each in varies if each.name.startswith(param_place_field("")))
        is_plain = self.names[: len(POINTERS)] == POINTERS and len(varies) == len((*POINTERS, *params, *places))
        self.params: tuple[Field, ...] | None = params if is_plain else None

    def values(self, known: Mapping[str, float]) -> list[float]:
        """One value a field; zero, a null pointer, where nothing is known."""
        return [known.get(name, 0) for name in self.names]

    def named(self, values: Values) -> dict[str, float]:
        """Values by the names of their fields."""
        return dict(zip(self.names, values, strict=True))

    def ints(self, values: Values) -> dict[str, int]:
        """The values that are ints, as lengths and strides are; params, which may be infinite, are left out."""
        return {name: value for name, value in self.named(values).items() if isinstance(value, int)}


@dataclass(frozen=True)
class Step:
    """One launch, with numbers."""

    kernel: str
    grid: int
    threads: int
    shared_bytes: int
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Native:
    """A pass as the node of autograd in C++ starts it (``struct Pass`` of templates/host/node.cpp).

    ``arguments`` are the bytes of ``struct Arguments``, in which what varies is 0; its leading fields are ``POINTERS``,
    and behind them come the values of params, which are on the host.
    ``function`` is that of a CPU's library, 0 on a GPU; ``clears`` are offsets in the workspace and bytes; ``launches``
    the words of each. ``driver`` are the addresses of what a GPU's driver is asked for.
    """

    workspace_bytes: int
    arguments: bytes
    function: int
    clears: tuple[tuple[int, int], ...] = ()
    launches: tuple[tuple[int, ...], ...] = ()
    driver: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def words(self) -> tuple[int, ...]:
        """All but the bytes and the driver."""
        pointers = range(0, 8 * len(POINTERS), 8)
        clears = itertools.chain.from_iterable(self.clears)
        launches = itertools.chain.from_iterable(self.launches)
        counts = len(self.clears), len(self.launches)
        return (self.workspace_bytes, *pointers, self.function, counts[0], *clears, counts[1], *launches)


@dataclass(frozen=True)
class Prepared:
    """One pass at known sizes: the bytes of its workspace, and ``run``, which takes the values that vary.

    ``native`` gives the pass for C++; None: it has steps that need Python. ``by_values``, if given, replaces the other
    fields: it gives the pass of a call with these values, as its workspace depends on numbers behind pointers.
    """

    workspace_bytes: int
    run: Callable[[Values], object]
    native: Callable[[], Native | None] | None = None
    by_values: Callable[[Values], Prepared] | None = None


# Runs a call of q, k and v under autograd in C++ (``node.py``); gives None for tensors that it does not take.
Node = Callable[..., object]


@dataclass(frozen=True)
class Stored:
    """Captured tensors whose gradients the kernels of a call store, and which of them they store ``whole``."""

    names: frozenset[str]
    whole: frozenset[str]


ADDED = Stored(frozenset(), frozenset())  # none: all are added to


@dataclass(frozen=True)
class Kernel(abc.ABC):
    """Forward and backward of one spec at one head dimension, on one device.

    ``layout`` says how values of fields become ``struct Arguments``, ``elements`` are the codes of the element types
    that it takes. ``other`` gives the kernel of another kind of calls of the same spec. ``writes_parts``: forward
    passes write lse_parts; else these are zero, as rows go another, faster way. q, k, v and d_o may start at multiples
    of ``row_alignment`` bytes. ``moves``: a backward pass of forward mode gives the gradients of tangents, too.
    ``needs_lse``: forward passes of kinds with a backward pass write lse, though nobody asks for it. ``shares_lists``:
    passes over caches read what a query selects once for all heads that share its list. ``stores``: pairs may store
    gradients (``stored_field``) where results need not repeat.
    """

    layout: ArgumentLayout
    _: KW_ONLY
    other: Callable[[Kind], Kernel | None] = lambda _: None
    elements: tuple[int, ...] = (0, 1, 2)
    writes_parts: bool = True

    row_alignment: ClassVar[int]
    moves: ClassVar[bool]
    needs_lse: ClassVar[bool]
    shares_lists: ClassVar[bool]
    stores: ClassVar[bool]

    def of(self, kind: Kind) -> Kernel | None:
        """The kernel of another kind of calls of the same spec; None: there is none such."""
        return self.other(kind)

    def stored_whole(self, fixed: Values) -> frozenset[str]:  # noqa: ARG002 - subclasses read it
        """The captured tensors whose gradients are stored in every element, with these values of fixed fields.

        Among them are tensors that batch entries add to in turn. Gradients of all other tensors are added up.
        """
        return frozenset()

    @abc.abstractmethod
    def reads(self, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:
        """Whether q, k, v or d_o can be read where they are, or have to be copied."""

    @abc.abstractmethod
    def prepare(self, name: PassName, values: Values) -> Prepared:
        """A pass for every call whose values differ from ``values``, those of all fields, in varying fields alone.

        It may depend on whether the threshold of dropout and gradients' pointers are zero. Raises ``NoSuchPassError``
        where a library of an earlier version has no such pass.
        """


class NoSuchPassError(Exception):
    """A library has no such pass, as the version that it was made by knew of none."""


# Gives the kernel of a head dimension on the device with an index, None where the reference stands in. Each type of
# device has a provider.
KernelProvider = Callable[[HeadDim, int], Kernel | None]


def takes_tangents(provider: KernelProvider | None) -> tuple[str, str]:
    """What a provider says its kernels of forward mode take, and those of its backward pass; empty: there are none."""
    found: tuple[str, str] = getattr(provider, "takes_tangents", ("", ""))
    return found


def of_spec(provider: KernelProvider | None, spec: AttentionSpec) -> KernelProvider | None:
    """The provider of another spec's kernels on the devices of a provider for GPUs; None for other providers."""
    make = getattr(provider, "of_spec", None)
    return None if make is None else make(spec)


@dataclass(frozen=True)
class ExplainedCall:
    """A call to explain.

    ``sizes`` are the numbers of the spec's sizes, ``shard`` says where the call lies in the whole problem, ``index`` is
    the number of its device, ``threads`` how many a CPU would run. ``values`` are the fields of ``struct Arguments`` by
    name, without addresses: pointers that kernels compare with null are 0 or 1. ``params`` are the params that the host
    knows.
    """

    kind: Kind
    head_dim: HeadDim
    element: ElementType
    shard: Shard
    sizes: Mapping[str, int]
    index: int
    threads: int
    values: Mapping[str, float]
    params: Mapping[str, float]

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        shard = self.shard
        return Shape(shard.batch, shard.heads, shard.kv_heads, shard.q_len, shard.kv_len)

    def explanation(
        self, name: str, backend: str, device: str, target: str, passes: Sequence[ExplainedPass], reasons: Sequence[str]
    ) -> Explanation:
        """What runs it, of an op of this name, and why."""
        head_dim, element = str(self.head_dim), str(self.element)
        return Explanation(name, backend, device, target, head_dim, element, self.shape, tuple(passes), tuple(reasons))


def with_mask_of_call(variant: Variant, call: ExplainedCall) -> Variant:
    """The variant whose mask is over positions within the call: offsets, sizes and params are numbers in it."""
    shard = call.shard
    group = max(shard.group, 1)
    starts = {"b": shard.b_start, "h": shard.h_start, "hkv": shard.h_start // group}
    starts |= {"i": shard.q_start, "j": shard.kv_start}
    known: dict[Expr, Expr] = {
        index(name): apply("add", index(name), literal(start)) for name, start in starts.items() if start
    }
    known |= {size(name): literal(number) for name, number in call.sizes.items()}
    for param in variant.spec.params:
        if param.name in call.params:
            symbol = Symbol(param.type, name=param.name, kind=SymbolKind.PARAM)
            known[symbol] = Literal(param.type, value=call.params[param.name])
    return replace(variant, keep=simplify(substitute(variant.keep, known)))


def with_prediction(made: ExplainedPass, variant: Variant, call: ExplainedCall, predicted: PassTime) -> ExplainedPass:
    """The pass with what the model says of it, for the mask where the call puts it."""
    return replace(
        made,
        hbm_bytes=predicted.hbm_bytes,
        seconds=predicted.seconds,
        limited_by=describe_bound(predicted),
        at_most=bool(tile_counts(variant, call.shape, made.Br, made.Bc).unknown),
    )
