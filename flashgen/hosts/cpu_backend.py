"""What runs an op on the CPU at hand: shared libraries, compiled from sources, or as a package brings them.

In: an ``AttentionSpec``, the texts of a package. Out: a ``KernelProvider`` that also answers ``op.plan``,
``op.sources`` and ``op.explain``. Its kernels are functions of a library. Ragged batches and caches run other
functions, which take a second struct: it is made here of the fields of these kinds. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.compiler.tile_choices import TileChoices, tile_choices
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.kernel import (
    ArgumentLayout,
    ExplainedCall,
    Kernel,
    Native,
    NoSuchPassError,
    Prepared,
    Values,
    call_of,
    with_mask_of_call,
    with_prediction,
)
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import Field
from flashgen.plan.arguments import argument_fields, fields_of_kind, table_field
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.measured import PASSES, PLANNERS_OWN, Pins
from flashgen.plan.plan import Tiles
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import Cpu, local_cpu
from flashgen.targets.cpu.plan import CpuPlan
from flashgen.targets.cpu.products import FEWEST_ROWS, Products
from flashgen.targets.cpu.target import CpuTarget
from flashgen.toolchains.cpp import Binary, CompileFailed, CompilerMissing, compile_sources, find_compiler, load_library

if TYPE_CHECKING:
    from flashgen.compiler.package.manifest import Library, Manifest

    Brought = Mapping[HeadDim, Library]


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


CPU_TANGENTS = ("all that the others take", "all that the others take")
# Libraries of tangents: the function of each, and what it computes.
_TANGENTS: Mapping[Kind, tuple[str, Callable[[Variant], Variant]]] = {
    FORWARD_MODE: ("jvp", with_tangent),
    FORWARD_MODE_BACKWARD: ("jvp_backward", with_slopes),
}

# The sources of a package for CPUs, by head dimension, without macros.
Texts = Mapping[HeadDim, KernelSource]
Build = Callable[[KernelSource], Path]
# A generated package: its folder, and what it says of itself.
Package = tuple[Path, "Manifest"]


def cpu_provider(
    spec: AttentionSpec, texts: Texts | None = None, package: Package | None = None, *, warns: bool = True
) -> CpuProvider | None:
    """Shared libraries; without a compiler those of a package, else None, and unless not ``warns`` a warning."""
    try:
        find_compiler()
    except CompilerMissing as error:
        why = str(error)
        if package is not None and texts is not None:
            from flashgen.compiler.package.manifest import NoLibrary, libraries

            try:
                provider = CpuProvider(spec, texts, libraries(*package, spec))
                for each in spec.head_dims:
                    provider.library(each, DENSE, PLANNERS_OWN, "forward", 0)
            except (NoLibrary, CompileFailed, OSError) as other:
                why = f"{error} Nor does a library of the package run here: {other}"
            else:
                return provider
        if warns:
            warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {why}", stacklevel=6)
        return None
    return CpuProvider(spec, texts)


def _compiled(source: KernelSource) -> Path:
    return compile_sources([source])[0].path


class CpuProvider:
    """Shared libraries for the CPU at hand: one for each pass of a head dimension and way to multiply that calls take.

    ``texts`` are the sources of a package, which are compiled as they stand. ``brought`` are its libraries, which run
    as they are where nothing can be compiled: these tiles, whatever was tuned, and no forward mode. ``build`` compiles.
    """

    def __init__(
        self, spec: AttentionSpec, texts: Texts | None = None, brought: Brought | None = None, build: Build = _compiled
    ) -> None:
        self.spec, self._texts, self._brought, self._build = spec, texts, brought, build
        self.takes_tangents = CPU_TANGENTS if brought is None else ("", "")
        self.device = local_cpu()
        self.target = CpuTarget(self.device)
        choices = {each: tile_choices(analyse(spec, each), self.device) for each in spec.head_dims}
        self.choices: Mapping[HeadDim, TileChoices[CpuPlan, Binary]] = (
            choices if brought is None else {each: replace(of, tunings=()) for each, of in choices.items()}
        )
        self.kernels = functools.cache(self._kernels)
        self.library = functools.cache(self._library)
        self._other = functools.cache(self._of_kind)

    def __call__(self, head_dim: HeadDim, index: int) -> LibraryKernel:  # noqa: ARG002 - there is one CPU
        return self.kernels()[head_dim]

    def plan(self, head_dim: HeadDim, pins: Pins) -> CpuPlan:
        """The tiles that are compiled in."""
        if self._brought is not None:
            return self._brought[head_dim].plan
        return compiled(self.choices[head_dim].variant, self.target, pins).plan

    def source(self, head_dim: HeadDim, pins: Pins) -> KernelSource:
        """What is compiled: the text of the package, else what the spec says, and the tiles as macros."""
        if self._texts is None:
            return compiled(self.choices[head_dim].variant, self.target, pins).source
        return replace(self._texts[head_dim], defines=self.plan(head_dim, pins).defines)

    def plans(self) -> Mapping[HeadDim, CpuPlan]:
        """By head dimension, with the tiles that were tuned last."""
        usual = {head_dim: choices.usual() for head_dim, choices in self.choices.items()}
        return {head_dim: with_reasons(self.plan(head_dim, pins), pins) for head_dim, pins in usual.items()}

    def sources(self) -> tuple[KernelSource, ...]:
        """One a head dimension; others differ from it in macros alone."""
        return tuple(self.source(each, choices.usual()) for each, choices in self.choices.items())

    def explain(self, name: str, call: ExplainedCall) -> Explanation | None:
        """One dense call."""
        if call.kind is not DENSE:
            return None
        choices = self.choices[call.head_dim]
        pins = choices.of_call(call.element, call.shape)
        plan, symbol = self.plan(call.head_dim, pins), self.source(call.head_dim, pins).symbol
        of_call = (self.device, call.element, call.shape)
        told = functools.partial(_told, self.device, symbol, call.threads)
        own, passes = with_mask_of_call(choices.variant, call), plan.of_call(*of_call)
        timed = replace(self.device, cores=min(self.device.cores, call.threads))
        found = []
        for each_name, (products, tile) in passes.items():
            predicted = cpu_cost.pass_time(own, products, each_name, tile, timed, call.shape)
            found.append(with_prediction(told(each_name, products, tile), own, call, predicted))
        titles = {products.of_pass(each) for each, (products, _) in passes.items()}
        others = {products.of_pass(each) for products in Products for each in PASSES} - titles
        why = [each for each in (*plan.reasons, *pins.reasons) if each.partition(": ")[0] not in others]
        explained = replace(
            call.explanation(name, "cpu", self.device.name, "cpu", found, why),
            rejected=tuple(each for each in plan.rejected if each.pass_name in titles),
        )
        if not any(self.takes_tangents):
            return explained
        # The kernel of forward mode, were the call's tangents asked for, and that of its backward pass.
        of_tangents = (
            compiled(each(choices.variant), self.target).plan.of_call(*of_call) for _, each in _TANGENTS.values()
        )
        forward, backward = (told(title, *of_pass) for each in of_tangents for title, of_pass in each.items())
        return replace(explained, jvp=forward, jvp_backward=backward)

    def _kernels(self) -> Mapping[HeadDim, LibraryKernel]:
        """By head dimension. What is compiled is compiled when a call first needs it."""
        return {
            each: LibraryKernel(
                ArgumentLayout(argument_fields(self.spec)),
                functools.partial(self._find, each, DENSE),
                other=functools.partial(self._other, each),
            )
            for each in self.choices
        }

    def _find(self, head_dim: HeadDim, kind: Kind, name: str, values: Mapping[str, float]) -> Functions:
        """What a call runs, with the tiles that were tuned for calls like it."""
        element, shape = call_of(values)
        choices = self.choices[head_dim]
        pins = choices.of_call(element, shape) if choices.tunings and kind is DENSE else choices.usual()
        ragged, _, of_pass = name.rpartition("_")
        like = replace(shape, q_len=FEWEST_ROWS) if ragged else shape  # some of the sequences may be so long
        products, _ = self.plan(head_dim, pins).of_call(self.device, element, like)[of_pass]
        return self.library(head_dim, kind, pins, name, products.library)(name, values)

    def _library(self, head_dim: HeadDim, kind: Kind, pins: Pins, part: str, products: int) -> Find:
        """One pass, of calls that multiply in one way; of a package that brings its library, this one."""
        variant = replace(self.choices[head_dim].variant, kind=kind)
        source = self.source(head_dim, pins) if kind is DENSE else compiled(variant, self.target, pins).source
        if self._brought is not None:
            return functions_of(self._brought[head_dim].path, source.symbol)
        return functions_of(self._build(source.of_part(part, products)), source.symbol, (part,))

    def _of_kind(self, head_dim: HeadDim, kind: Kind) -> LibraryKernel | None:
        """With the usual tiles; tangents with the planner's own. A package, whose text may be edited, has no other."""
        variant = self.choices[head_dim].variant
        if kind in _TANGENTS:
            only, with_tangents = _TANGENTS[kind]
            variant = with_tangents(variant)
            source, fields = compiled(variant, self.target).source, argument_fields(variant.spec, variant.kind)
            return LibraryKernel.load(self._build(source), source.symbol, fields, only)
        if not kind.on_cpus or self._texts is not None:
            return None
        layout = ArgumentLayout(argument_fields(variant.spec, kind))
        return LibraryKernel(layout, functools.partial(self._find, head_dim, kind))


def _told(device: Cpu, symbol: str, threads: int, name: str, products: Products, tile: Tiles) -> ExplainedPass:
    return ExplainedPass(
        name=name,
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=_cpu_products(products, device),
        warps=None,
        stages=None,
        kernels=(ExplainedKernel(f"{symbol}_{name}", threads),),
    )


def _cpu_products(products: Products, device: Cpu) -> str:
    if products is Products.VECTORS:
        return f"vectors of {device.lanes} lanes"
    if products is Products.PAIRS:
        return f"vectors of {device.lanes} lanes, bfloat16 in pairs"
    parts = "" if products is Products.BFLOAT16 else ", numbers in three parts"
    return f"matrix registers{parts}"
