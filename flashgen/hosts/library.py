"""Stage 6, load: the kernels of CPUs, which are functions of a shared library.

In: the path of a library, the prefix of its functions and the fields of its ``struct Arguments``. Out: a
``LibraryKernel``. Ragged batches and caches run other functions of it, which take a second struct: it is made here of
the fields of these kinds. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from typing import Literal as OneOf

from flashgen.hosts.kernel import ArgumentLayout, Kernel, Native, NoSuchPassError, Prepared, Values, no_other
from flashgen.kinds.field import Field
from flashgen.kinds.kind import Kind, PassName
from flashgen.plan.arguments import fields_of_kind, table_field
from flashgen.toolchains.cpp import load_library

# What a library has, if not everything.
LibraryPart = OneOf["forward", "backward", "ragged"]
# What runs a pass, and what says how many bytes of workspace it takes.
Functions = tuple[Callable[..., object], Callable[..., int]]


@dataclass(frozen=True)
class LibraryKernel:
    """The functions of a shared library. Each takes the packed arguments.

    ``sequences`` are those of ragged batches and caches, forward and backward, which take ``struct Ragged``, too; None:
    the library was made by a version that had none. Of such a kind of call ``dense`` is the kernel of the library, and
    ``layout`` that of the kind.

    ``choose`` gives the kernel whose tiles go with a call, by values of fields by name; None: it is this one's.
    ``others`` gives that of another library, with a part that this one has not; None: it has all.
    """

    layout: ArgumentLayout
    forward: Callable[[bytes], object]
    backward: Callable[[bytes], object]
    forward_workspace: Callable[[bytes], int]
    backward_workspace: Callable[[bytes], int]
    choose: Callable[[Mapping[str, float]], LibraryKernel] | None = None
    others: Callable[[LibraryPart], LibraryKernel] | None = None
    row_alignment: int = 1
    sequences: tuple[Functions, Functions] | None = None
    dense: LibraryKernel | None = None
    other: Callable[[Kind], Kernel | None] = no_other
    stores: bool = False
    elements: tuple[int, ...] = (0, 1, 2)
    moves: bool = True
    needs_lse: bool = False
    writes_parts: bool = True
    shares_lists: bool = False

    def of(self, kind: Kind) -> Kernel | None:
        """Ragged batches and caches are other functions of the same library."""
        return self._over_sequences(kind) if kind.by_sequence else self.other(kind)

    @functools.cached_property
    def _over_sequences(self) -> Callable[[Kind], LibraryKernel]:
        """Made once a kind, as ragged batches of other lengths ask for it again."""
        fields = functools.partial(fields_of_kind, self.layout.fields)
        return functools.cache(
            lambda kind: replace(self, layout=ArgumentLayout(fields(kind)), dense=self, writes_parts=not kind.cached)
        )

    def stored_whole(self, settled: Values) -> frozenset[str]:  # noqa: ARG002 - a Kernel's
        """None: blocks add what they have."""
        return frozenset()

    @classmethod
    def load(
        cls,
        path: Path,
        symbol: str,
        fields: Sequence[Field],
        part: LibraryPart | None = None,
    ) -> LibraryKernel:
        """Load the functions ``symbol_forward``, ``symbol_backward`` and their ``_workspace`` companions, or those of a
        part.

        Raises ``CompileFailed`` where the library cannot be loaded, ``OSError`` where it lacks one of them.
        """
        library = load_library(path)

        def own(name: str) -> Functions:
            return _NEITHER if part and not name.startswith(part) else _functions(library, path, symbol, name)

        forward, backward = own("forward"), own("backward")
        has_sequences = hasattr(library, f"{symbol}_ragged_forward")
        sequences = (own("ragged_forward"), own("ragged_backward")) if has_sequences else None
        return cls(ArgumentLayout(fields), forward[0], backward[0], forward[1], backward[1], sequences=sequences)

    def reads(self, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:  # noqa: ARG002 - see above
        return shape[-1] < 2 or strides[-1] == 1

    def prepare(self, name: PassName, values: Values) -> Prepared:
        if self.dense is not None:
            return _over_sequences(self.dense, self.layout, name, values)
        if self.choose is not None:
            return self.choose(self.layout.named(values)).prepare(name, values)
        if self.others is not None and name == "backward":
            return self.others(name).prepare(name, values)
        is_forward = name == "forward"
        workspace = self.forward_workspace if is_forward else self.backward_workspace
        return _prepared(self.layout, self.forward if is_forward else self.backward, workspace, values)

    def over_sequences(self, name: PassName, values: Values) -> Functions:
        """The functions of a pass over sequences. Raises ``NoSuchPassError``."""
        if self.choose is not None:
            return self.choose(self.layout.named(values)).over_sequences(name, values)
        if self.others is not None:
            return self.others("ragged").over_sequences(name, values)
        if self.sequences is None:
            raise NoSuchPassError
        return self.sequences[0 if name == "forward" else 1]


_THRESHOLD = "dropout_threshold"
# The members of ``struct Ragged`` (ragged.h of the CPU headers) by the fields that they are; then come the tables.
_MEMBERS = (
    "batch", "q_starts", "k_starts", "cache_lengths", "cache_padding", "cache_places", "block_table",
    "table_columns", "cache_rows", "splits", "key_element", "k_factors", "v_factors",
)  # fmt: skip
_FORMAT = "@q6P4q2P"


@dataclass(frozen=True)
class _Ragged:
    """Makes ``struct Ragged`` of values that vary. Of each member ``members`` has the slot, and what stands for 0."""

    pack: Callable[..., bytes]
    members: Sequence[tuple[int, int]]
    settled: Values
    kept: Any  # the memory of what stands for null pointers

    @classmethod
    def of_call(cls, layout: ArgumentLayout, values: Values) -> _Ragged:
        """Of calls with these values of all fields, but for those that vary. Fields that a kind has not are 0."""
        tables = [name for name in layout.names if name.startswith(table_field(""))]
        batch = int(values[layout.slots["batch"]])
        # Without padding, and sequence b in entry b.
        usual = {"cache_padding": (ctypes.c_int32 * batch)(), "cache_places": (ctypes.c_int32 * batch)(*range(batch))}
        members = [
            (layout.slots.get(name, -1), ctypes.addressof(usual[name]) if name in usual else 0)
            for name in (*_MEMBERS, *tables)
        ]
        pack = struct.Struct(f"{_FORMAT}{len(tables)}P").pack
        return cls(pack, members, (*values[layout.varying :], 0), usual)

    def __call__(self, varying: Values) -> bytes:
        known = (*varying, *self.settled)
        return self.pack(*[known[slot] or other for slot, other in self.members])


def _over_sequences(dense: LibraryKernel, layout: ArgumentLayout, name: PassName, values: Values) -> Prepared:
    """A pass of a kind with this layout. Each call has its own: bytes of workspace follow from its lengths."""
    own = dense.layout
    of_dense = (*values[: own.varying], *values[layout.varying : layout.varying + len(own.fields) - own.varying])
    run, workspace = dense.over_sequences(name, of_dense)
    pack, settled = own.pack_varying, _settled(own, own.pack(*of_dense))
    ragged_of, table = _Ragged.of_call(layout, values), layout.slots.get(table_field(_THRESHOLD))

    def by_values(given: Values) -> Prepared:
        ragged, leading = ragged_of(given), list(given[: own.varying])
        if table is not None and given[table]:  # of each sequence
            leading[own.slots[_THRESHOLD]] = 0

        def start(filled: Values) -> object:
            leading[0] = filled[0]
            return run(pack(*leading) + settled, ragged)

        return Prepared(workspace(pack(*leading) + settled, ragged), start)

    return Prepared(0, lambda given: by_values(given).run(given), by_values=by_values)


def load_forward_mode(path: Path, symbol: str, fields: Sequence[Field], name: PassName) -> LibraryKernel:
    """Load ``symbol_jvp`` or ``symbol_jvp_backward``, and its ``_workspace``. Raises as ``LibraryKernel.load`` does."""
    own = _functions(load_library(path), path, symbol, "jvp" if name == "forward" else "jvp_backward")
    forward, backward = (own, _NEITHER) if name == "forward" else (_NEITHER, own)
    return LibraryKernel(ArgumentLayout(fields), forward[0], backward[0], forward[1], backward[1])


def _elsewhere(*_: object) -> int:
    raise OSError("this library has another part of the kernel")


_NEITHER: Functions = (_elsewhere, _elsewhere)


def _functions(library: ctypes.CDLL, path: Path, symbol: str, name: str) -> Functions:
    function = functools.partial(_function, library, path)
    return function(f"{symbol}_{name}", None), function(f"{symbol}_{name}_workspace", ctypes.c_int64)


def _function(library: ctypes.CDLL, path: Path, name: str, result: type[ctypes.c_int64] | None) -> Callable[..., int]:
    try:
        found = library[name]
    except AttributeError:
        raise OSError(f"'{path}' has no function '{name}'") from None
    found.restype = result
    return found


def _settled(layout: ArgumentLayout, whole: bytes) -> bytes:
    """The bytes behind those that vary."""
    return whole[len(layout.pack_varying(*(0,) * layout.varying)) :]


def _prepared(
    layout: ArgumentLayout, call: Callable[[bytes], object], workspace: Callable[[bytes], int], values: Values
) -> Prepared:
    """A function of the packed arguments, all of which but those that vary are settled."""
    pack, whole = layout.pack_varying, layout.pack(*values)
    size, settled, nothing = workspace(whole), _settled(layout, whole), (0,) * layout.varying

    def native() -> Native:
        return Native(size, pack(*nothing) + settled, ctypes.cast(call, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]

    return Prepared(size, lambda varying: call(pack(*varying) + settled), None if layout.params is None else native)
