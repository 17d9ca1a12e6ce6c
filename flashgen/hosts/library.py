"""Stage 6, load: the kernels of CPUs, which are functions of a shared library.

In: the path of a library, the prefix of its functions, the fields of ``struct Arguments``. Out: a ``LibraryKernel``.
Ragged batches and caches run other functions, which take a second struct: it is made here of the fields of these kinds.
Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashgen.hosts.kernel import ArgumentLayout, Kernel, Native, NoSuchPassError, Prepared, Values
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import Field
from flashgen.plan.arguments import fields_of_kind, table_field
from flashgen.toolchains.cpp import load_library

# The function that runs a pass, and the one that gives the bytes of its workspace.
Functions = tuple[Callable[..., object], Callable[..., int]]
# The functions of a name (``forward``, ``ragged_backward``) that a call runs, by values of fields by name.
Find = Callable[[str, Mapping[str, float]], Functions]


@dataclass(frozen=True)
class LibraryKernel(Kernel):
    """Functions of shared libraries, which ``find`` gives. Each takes the packed arguments.

    Those of ragged batches and caches take ``struct Ragged``, too: of such a kind of call ``dense`` is the layout of a
    dense one, and ``layout`` that of the kind.
    """

    find: Find
    dense: ArgumentLayout | None = None

    row_alignment = 1
    stores = needs_lse = shares_lists = False
    moves = True

    def of(self, kind: Kind) -> Kernel | None:
        """Ragged batches and caches are other functions of the same library."""
        return self._over_sequences(kind) if kind.by_sequence else super().of(kind)

    @functools.cached_property
    def _over_sequences(self) -> Callable[[Kind], LibraryKernel]:
        """Made once a kind, as ragged batches of other lengths ask for it again."""
        own, fields = self.layout, functools.partial(fields_of_kind, self.layout.fields)
        return functools.cache(
            lambda kind: replace(self, layout=ArgumentLayout(fields(kind)), dense=own, writes_parts=not kind.cached)
        )

    @classmethod
    def load(cls, path: Path, symbol: str, fields: Sequence[Field], only: str = "") -> LibraryKernel:
        """The functions of a library that has all of them, or ``only`` one, whatever the pass."""
        found = functions_of(path, symbol, (only,) if only else ())
        return cls(ArgumentLayout(fields), (lambda _, values: found(only, values)) if only else found)

    def reads(self, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:  # noqa: ARG002 - a Kernel's
        return shape[-1] < 2 or strides[-1] == 1

    def prepare(self, name: PassName, values: Values) -> Prepared:
        if self.dense is not None:
            return self._prepare_sequences(self.dense, name, values)
        layout, (call, workspace) = self.layout, self.find(name, self.layout.named(values))
        pack, whole = layout.pack_varying, layout.pack(*values)
        size, fixed, nothing = workspace(whole), _fixed(layout, whole), (0,) * layout.varying

        def native() -> Native:
            return Native(size, pack(*nothing) + fixed, ctypes.cast(call, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]

        return Prepared(size, lambda varying: call(pack(*varying) + fixed), None if layout.params is None else native)

    def _prepare_sequences(self, own: ArgumentLayout, name: PassName, values: Values) -> Prepared:
        """A pass of a kind with this layout. Each call has its own: bytes of workspace follow from its lengths."""
        varying = self.layout.varying
        of_dense = (*values[: own.varying], *values[varying : varying + len(own.fields) - own.varying])
        run, workspace = self.find(f"ragged_{name}", own.named(of_dense))
        pack, fixed = own.pack_varying, _fixed(own, own.pack(*of_dense))
        ragged_of, table = _Ragged.of_call(self.layout, values), self.layout.slots.get(table_field(_THRESHOLD))

        def by_values(given: Values) -> Prepared:
            ragged, leading = ragged_of(given), list(given[: own.varying])
            if table is not None and given[table]:  # of each sequence
                leading[own.slots[_THRESHOLD]] = 0

            def start(filled: Values) -> object:
                leading[0] = filled[0]
                return run(pack(*leading) + fixed, ragged)

            return Prepared(workspace(pack(*leading) + fixed, ragged), start)

        return Prepared(0, lambda given: by_values(given).run(given), by_values=by_values)


_THRESHOLD = "dropout_threshold"
# The members of ``struct Ragged`` (ragged.h of the CPU headers) by the fields that they are; then come the tables.
_MEMBERS = (
    "batch", "q_starts", "k_starts", "cache_lengths", "cache_padding", "cache_places", "block_table",
    "table_columns", "cache_rows", "splits", "key_element", "k_factors", "v_factors",
)  # fmt: skip
_FORMAT = "@q6P4q2P"


@dataclass(frozen=True)
class _Ragged:
    """Makes ``struct Ragged`` of values that vary. ``members`` has each one's slot, and the value in place of 0."""

    pack: Callable[..., bytes]
    members: Sequence[tuple[int, int]]
    fixed: Values
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
        known = (*varying, *self.fixed)
        return self.pack(*[known[slot] or other for slot, other in self.members])


def functions_of(path: Path, symbol: str, names: Iterable[str] = ()) -> Find:
    """The functions ``symbol_forward``, ``symbol_backward``, or of other names, and their ``_workspace`` companions.

    Without names those of ragged batches and caches, too, where the library is of a version that had some; what is not
    there raises ``NoSuchPassError``. Raises ``CompileFailed`` where the library cannot be loaded, ``OSError`` where it
    lacks one of them.
    """
    library = load_library(path)
    ragged = ("ragged_forward", "ragged_backward") if hasattr(library, f"{symbol}_ragged_forward") else ()
    found = {
        name: (_function(library, path, f"{symbol}_{name}"), _function(library, path, f"{symbol}_{name}_workspace"))
        for name in names or ("forward", "backward", *ragged)
    }
    for _, workspace in found.values():
        workspace.restype = ctypes.c_int64

    def find(name: str, _values: Mapping[str, float]) -> Functions:
        if name not in found:
            raise NoSuchPassError
        return found[name]

    return find


def _function(library: ctypes.CDLL, path: Path, name: str) -> Any:
    try:
        found = library[name]
    except AttributeError:
        raise OSError(f"'{path}' has no function '{name}'") from None
    found.restype = None
    return found


def _fixed(layout: ArgumentLayout, whole: bytes) -> bytes:
    """The bytes of the fixed values, behind those that vary."""
    return whole[len(layout.pack_varying(*(0,) * layout.varying)) :]
