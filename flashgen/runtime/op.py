"""AttentionOp: what a user calls.

In: an ``AttentionSpec`` and its kernels. Out: a callable over tensors, registered with ``torch.library``. A
call binds names to positions and goes to the operator; everything that is checked is checked there
(``call.py``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.spec_text import declared
from flashgen.plan.explanation import Explanation
from flashgen.plan.plans import Plans
from flashgen.runtime import cuda
from flashgen.runtime.asked import Asked, ask, ask_of_cache, placed
from flashgen.runtime.cached import CachedEngine, append, cache_of
from flashgen.runtime.conversion import (
    as_number,
    check_switch,
    offset_arguments,
    param_argument,
    probability_argument,
    seed_argument,
    tensor_argument,
)
from flashgen.runtime.eight_bits import F8
from flashgen.runtime.engine import Engine, Tensors
from flashgen.runtime.f8 import F8Engine, factors_of_call, wide_type
from flashgen.runtime.fingerprint import KernelText, fingerprint, operator_name
from flashgen.runtime.kernel import KernelProvider
from flashgen.runtime.lengths import check_starts
from flashgen.runtime.nested import is_nested, sequences
from flashgen.runtime.parts import PartsEngine
from flashgen.runtime.ragged import RaggedEngine
from flashgen.runtime.reference import Reference, refuse_dropout, refuse_lse
from flashgen.runtime.registration import NAMESPACE, call, register
from flashgen.runtime.selecting import engine_of
from flashgen.runtime.signature import CACHED, F8_CALLS, RAGGED, Form, Signature

BACKENDS = ("cpu", "cuda", "emulator", "reference")
# Their kernels do not go by the type of device.
_HOST_BACKENDS = ("emulator", "reference")


@dataclass(frozen=True)
class OpParts:
    """What an op is made of.

    ``kernels`` holds what gives the kernels for each type of device; None where the tiled reference stands in, as no
    compiler was found. Where it is a ``Shows``, it says what the op shows of itself. ``sources`` and ``identity`` tell
    ops of one operator apart, as far as others run. ``backend`` is what was asked for. ``reopen`` makes the op again in
    another process, for pickling. ``label`` and ``edited``, sources that a user changed, are what the operator's name
    covers beside spec and backend. ``remember`` is told this name when a program with the op is exported.
    """

    spec: AttentionSpec
    kernels: Mapping[str, KernelProvider | None]
    sources: tuple[KernelText, ...] = ()
    identity: str = ""
    backend: str | None = None
    reopen: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    label: str = ""
    edited: tuple[KernelText, ...] = ()
    remember: Callable[[str], None] | None = None

    @property
    def operator(self) -> str:
        """The name of the torch operator, without the namespace: the same on every machine."""
        return operator_name(self.spec, self.backend, self.label, self.edited)

    @property
    def identity_of_engine(self) -> str:
        """What runs, among ops of one operator."""
        kinds = (f"{name}" if provider else f"{name}-tiled" for name, provider in self.kernels.items())
        return fingerprint(self.spec, " ".join((self.backend or "", self.identity, *kinds)), self.sources)


@runtime_checkable
class Shows(Protocol):
    """A provider of kernels that says what they are."""

    def plans(self) -> Mapping[HeadDim, Any]:
        """The plans by head dimension, as calls take them whose shape chooses no other."""

    def sources(self) -> tuple[KernelText, ...]:
        """The texts of these plans' kernels."""

    def explain(self, name: str, asked: Asked) -> Explanation:
        """What a call runs, of an op of this name."""


@runtime_checkable
class ShowsCaches(Shows, Protocol):
    """One that says what runs over caches, too."""

    def explain_cached(self, name: str, asked: Asked) -> Explanation:
        """What a call over a cache runs, of an op of this name."""


def make_op(
    spec: AttentionSpec,
    kernels: Mapping[str, KernelProvider | None] | None,
    *,
    backend: str | None = None,
    reopen: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> AttentionOp:
    """The op of a spec, without kernels on the tiled reference. Raises ``ValueError`` for an unknown backend."""
    return AttentionOp(OpParts(spec, {"cpu": None} if kernels is None else kernels, backend=backend, reopen=reopen))


def check_backend(backend: str | None) -> None:
    """Raise ``ValueError`` for a backend that does not exist."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}'; known are {', '.join(repr(each) for each in BACKENDS)}")


class BaseOp:
    """One attention operator; subclasses say how it is called. Immutable: copies are the op itself."""

    def __init__(self, parts: OpParts) -> None:
        check_backend(parts.backend)
        self._parts = parts

        def engine() -> Engine:
            if parts.backend == "reference":
                return Engine(parts.spec, {}, pairs=None)
            return engine_of(Engine, parts.spec, parts.kernels)

        name = parts.operator
        remember = None if parts.remember is None else functools.partial(parts.remember, name)
        self._registered = register(name, parts.identity_of_engine, engine, remember)
        self._signature = self._registered.signature

        def ragged_engine() -> Engine:
            if parts.backend == "reference":
                return RaggedEngine(parts.spec, {}, pairs=None)
            return engine_of(RaggedEngine, parts.spec, parts.kernels)

        self._ragged = register(f"{name}{RAGGED.suffix}", parts.identity_of_engine, ragged_engine, remember)

        def cached_engine() -> Engine:
            if parts.backend == "reference":
                return CachedEngine(parts.spec, {}, pairs=None)
            return engine_of(CachedEngine, parts.spec, parts.kernels)

        self._cached = register(f"{name}{CACHED.suffix}", parts.identity_of_engine, cached_engine, remember)

        def f8_engine() -> Engine:
            if parts.backend == "reference":
                return F8Engine(parts.spec, {}, pairs=None)
            return engine_of(F8Engine, parts.spec, parts.kernels)

        self._f8 = register(f"{name}{F8_CALLS.suffix}", parts.identity_of_engine, f8_engine, remember)

    # For those who call the operator's engine themselves, as ranks do over parts of the keys --------------------------

    @property
    def signature(self) -> Signature:
        """The arguments of the operator."""
        return self._signature

    @property
    def engine(self) -> Engine:
        """What runs dense calls."""
        return self._registered.engine

    @functools.cached_property
    def engine_of_parts(self) -> Engine:
        """What runs some of the keys of rows, for those who add them up: it writes float32 at least."""
        if self._parts.backend == "reference":
            return PartsEngine(self.spec, {}, pairs=None)
        return engine_of(PartsEngine, self.spec, self._parts.kernels)

    def of_spec(self, spec: AttentionSpec, load: Callable[..., AttentionOp]) -> AttentionOp:
        """What ``load`` makes of another spec for the same backend, and on the emulator the same target."""
        return load(spec, self._parts.backend, self._parts.label or None)

    def operator_tensors(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Mapping[str, object],
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
    ) -> Tensors:
        """The tensors of the operator, of arguments as a dense call takes them. Raises what the call does."""
        return self._tensors(q, k, v, self._signature.bind(dict(captured)), return_lse, dropout_p, seed)

    @property
    def spec(self) -> AttentionSpec:
        """What the op computes."""
        return self._parts.spec

    @property
    def plan(self) -> Plans:
        """The tiles that run, by head dimension: on the current GPU where the op can use one, else on the CPU.

        It is what calls take whose shape chooses no other (``explain`` says what one takes), tuned tiles and all; on a
        GPU the kernels are compiled to know. Empty where no generated kernel runs.
        """
        shows = self._shows(self._device().type)
        return Plans(self.spec, {} if shows is None else shows.plans(), self._registered.derivatives)

    @property
    def sources(self) -> tuple[KernelText, ...]:
        """The generated sources that run, for the same device as ``plan``; none where none does."""
        shows = self._shows(self._device().type)
        return () if shows is None else shows.sources()

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,  # noqa: ARG002 - the arguments are those of the op
        q_start: int = 0,
        kv_start: int = 0,
        b_start: int = 0,
        h_start: int = 0,
        q_total: int | None = None,
        kv_total: int | None = None,
        b_total: int | None = None,
        h_total: int | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Explanation:
        """What a call with these arguments runs, and why, without running it: tiles, kernels, bytes, predicted time.

        Takes what the op takes but for descales, which change nothing of it, also fake tensors; those on ``meta`` are
        taken to be on the GPU where the op can use one, else on the CPU. Kernels of a GPU are compiled if they were
        not before. Raises what the op raises.
        """
        device = self._device()
        tensors = self._positional(
            (placed(q, device), placed(k, device), placed(v, device)), self._signature.bind(captured)
        )
        if return_lse and not self._signature.has_lse:
            refuse_lse(self.spec)
        if dropout_p is not None and not self._signature.has_dropout:
            refuse_dropout(self.spec, dropout_p)
        offsets = offset_arguments((q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total))
        repeatable = are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        rest, widens = (offsets, repeatable), ""
        asked = ask((self._f8 if tensors[0].dtype is F8 else self._registered).engine, tensors, rest, dropout_p, device)
        if asked.call.kernel is None and tensors[0].dtype is F8:
            dtype = wide_type(self._registered.engine.checker.dtypes, asked.call.device)
            wide = (placed(torch.empty_like(x, dtype=dtype, device="meta"), asked.call.device) for x in tensors[:3])
            asked = ask(self._registered.engine, (*wide, *tensors[3:]), rest, dropout_p, device)
            widens = f"no kernel of this target multiplies 8 bits: q, k and v are widened to {dtype} first"
        shows = self._shows(asked.call.device.type)
        if asked.call.kernel is not None and shows is not None and not asked.call.is_empty:
            found = shows.explain(self.spec.name, asked)
            reasons = (widens, *found.reasons) if widens else found.reasons
            return replace(found, reasons=reasons, derivatives=self._registered.derivatives)
        return Explanation(
            name=self.spec.name,
            backend="none" if asked.call.is_empty else "reference",
            device=str(asked.call.device),
            target="none",
            head_dim=str(asked.call.head_dim),
            element=str(asked.element),
            shape=asked.shape,
            passes=(),
            reasons=(*([widens] if widens else []), _why_no_kernel(asked, self._parts.backend)),
            derivatives=self._registered.derivatives,
        )

    def _device(self) -> torch.device:
        """Where a call runs unless its tensors say otherwise."""
        kernels = self._registered.engine.kernels
        if "cuda" not in kernels or ("cpu" in kernels and not cuda.is_usable()):
            return torch.device("cpu")
        return torch.device("cuda", cuda.current_device())

    def _shows(self, device: str) -> Shows | None:
        """What says of itself what it runs; None where nothing does."""
        found: object = self._registered.engine.kernels.get(device)
        return found if isinstance(found, Shows) else None

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that this op can run on here."""
        if self._parts.backend in _HOST_BACKENDS:
            return tuple(dict.fromkeys((self._parts.backend, "reference")))
        there = {"cuda": torch.cuda.is_available()}
        names = (name for name, provider in self._parts.kernels.items() if provider and there.get(name, True))
        return (*names, "reference")

    @property
    def name(self) -> str:
        """The qualified name of the torch operator, which exported programs call.

        It follows from the spec, its constants and the backend alone, however the op was made. Compiled and exported
        programs run what the first op of a name in the process runs, in case tiles were tuned since.
        """
        return f"{NAMESPACE}::{self._registered.name}"

    def __repr__(self) -> str:
        spec = self.spec
        takes = ", ".join([*map(declared, spec.tensors), *map(declared, spec.params)])
        head_dims = " or ".join(str(each) for each in spec.head_dims)
        return f"<{self.name}: head_dim {head_dims}{f'; {takes}' if takes else ''}; on {' or '.join(self.backends)}>"

    def _repr_html_(self) -> str:
        # By name: pictures are made with what ops are made of, and stand above them.
        found: str = importlib.import_module("flashgen.picture.html").of_op(self)
        return found

    def __copy__(self) -> BaseOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseOp:
        return self

    def __reduce__(self) -> Any:
        if self._parts.reopen is None:
            raise TypeError(f"{self!r} cannot be pickled: load the spec in the other process")
        return self._parts.reopen

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Sequence[object],
        offsets: tuple[object, ...],
        deterministic: bool | None,
        return_lse: bool,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        descales: tuple[object, object, object] = (None, None, None),
    ) -> Any:
        """Call the operator; ``captured`` are tensors, then params, in the order of the spec.

        ``descales`` are those of q, k and v, None where not given.
        """
        tensors = self._tensors(q, k, v, captured, return_lse, dropout_p, seed)
        if getattr(q, "dtype", None) is F8 or not (descales[0] is descales[1] is descales[2] is None):
            factors = factors_of_call(self._positional((q, k, v), ()), descales)
            return call(self._f8, (*tensors, *factors), offsets, False, return_lse)
        return call(self._registered, tensors, offsets, is_repeatable(deterministic), return_lse)

    def _tensors(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Sequence[object],
        return_lse: bool,
        dropout_p: float | Tensor | None,
        seed: int | Tensor | None,
    ) -> Tensors:
        """The tensors of the operator."""
        signature = self._signature
        tensors: Tensors = (q, k, v)
        if signature.takes_more:
            tensors = self._positional(tensors, captured)
            if signature.has_dropout:
                # Nothing is drawn from the generator for a call that is told not to drop.
                silent = seed is None and isinstance(dropout_p, (int, float)) and dropout_p == 0
                tensors += (
                    None if silent else seed_argument(seed, q.device),
                    probability_argument(dropout_p, q.device),
                )
        if dropout_p is not None and not signature.has_dropout:
            refuse_dropout(self.spec, dropout_p)
        if return_lse and not signature.has_lse:
            refuse_lse(self.spec)
        return tensors

    def _check_names(self, method: str, form: Form) -> None:
        if not self._signature.names:
            return
        for name in (*form.tensors, *form.numbers, "k_cache", "v_cache", "num_splits", "k_descale", "v_descale"):
            if name in self._signature.names:
                raise ValueError(
                    f"'{self.spec.name}' captures '{name}', an argument of {method}: the spec has to call it otherwise"
                )

    def _call_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: tuple[Tensor, Tensor],
        numbers: tuple[object, ...],
        captured: Sequence[object],
        deterministic: bool | None,
        return_lse: bool,
        dropout_p: float | Tensor | None,
        seed: int | Tensor | None,
    ) -> Any:
        """Call the operator of ragged batches."""
        self._check_names("varlen", RAGGED)
        tensors = self._tensors(q, k, v, captured, return_lse, dropout_p, seed)
        cu_seqlens = tuple(map(check_starts, RAGGED.tensors, starts))
        return call(self._ragged, (*tensors, *cu_seqlens), numbers, is_repeatable(deterministic), return_lse)

    @property
    def reference(self) -> Reference:
        """The dense formula: called like the op, ``op.reference(q, k, v, dtype=torch.float64)``; see ``Reference``."""
        return Reference(self.spec, self._signature, self._positional, self._registered.engine.checker)

    def _positional(self, tensors: Tensors, captured: Sequence[object], *, is_exact: bool = False) -> Tensors:
        """q, k and v, checked to be tensors, and what is captured, in the order and the types of the operator.

        ``is_exact``: real numbers keep their precision.
        """
        q, k, v = tensors
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
            name, x = next((name, x) for name, x in zip("qkv", tensors, strict=True) if not isinstance(x, Tensor))
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        signature = self._signature
        dtypes, count = signature.dtypes, len(signature.tensors)
        given: list[object] = list(captured)
        for n, value in enumerate(captured):
            # As declared: a tensor of the type; of a param, a number on the CPU.
            if (
                isinstance(value, Tensor)
                and value.dtype is dtypes[n]
                and (n < count or (value.is_cpu and not value.dim()))
            ):
                continue
            if n < count:
                given[n] = tensor_argument(signature.tensors[n], value, is_exact=is_exact)
            else:
                given[n] = param_argument(signature.params[n - count], value, q.device, is_exact=is_exact)
        return (*tensors, *given)


class AttentionOp(BaseOp):
    """An op whose captured tensors and params are passed by name."""

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **arguments: Any
    ) -> Tensor: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Any
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        q_start: int = 0,
        kv_start: int = 0,
        b_start: int = 0,
        h_start: int = 0,
        q_total: int | None = None,
        kv_total: int | None = None,
        b_total: int | None = None,
        h_total: int | None = None,
        deterministic: bool | None = None,
        q_descale: Tensor | float | None = None,
        k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        **captured: Any,
    ) -> Any:
        """Attention: ``q`` [B, H, Nq, D], ``k`` [B, Hkv, Nk, D], ``v`` [B, Hkv, Nk, Dv] → ``o`` [B, H, Nq, Dv].

        ``captured`` holds the spec's tensors and params by name; params are numbers or 0-dim tensors
        (float32 or int32). q, k and v may be jagged NestedTensors [B, H, j, D], as is the result then: sequences are
        computed as ``varlen`` says. ``return_lse`` adds ``lse`` [B, H, Nq], float32. ``dropout_p`` overrides the
        spec's; ``seed`` None draws one from torch's generator. ``*_start`` and ``*_total`` place a shard in
        the whole. ``deterministic``: gradients are the same bit by bit again and again, on CPUs on any number of
        threads; None follows ``torch.use_deterministic_algorithms``.

        q, k and v may be of 8 bits, ``torch.float8_e4m3fn``, all three; ``o`` then is bfloat16, and there are no
        gradients. They are multiplied by ``q_descale``, ``k_descale`` and ``v_descale``, float32 [B, Hkv] or one
        number each, by default 1; the queries of a head by the factor of its key/value head.

        Raises ``TypeError`` (a missing or unknown argument, a wrong dtype) and ``ValueError`` (a wrong
        shape, device, offset or probability), naming the argument, what was expected and what came.
        """
        if is_nested(q, k, v):
            if not (q_descale is None and k_descale is None and v_descale is None):
                raise ValueError(
                    "'q_descale', 'k_descale' and 'v_descale' go with dense q, k and v, not with jagged ones"
                )
            given = sequences(q, k, v, (q_start, kv_start, q_total, kv_total))
            found = self.varlen(
                given.q, given.k, given.v, given.q_offsets, given.k_offsets, return_lse=return_lse, dropout_p=dropout_p,
                seed=seed, b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
                deterministic=deterministic, **captured,
            )  # fmt: skip
            return given.nested(found)
        return self._call(
            q, k, v, self._signature.bind(captured) if captured or self._signature.names else (),
            (q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total),
            deterministic, return_lse, dropout_p, seed, (q_descale, k_descale, v_descale),
        )  # fmt: skip

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Any:
        """Attention within each sequence of a ragged batch: ``q`` [Tq, H, D], ``k`` [Tk, Hkv, D], ``v`` [Tk, Hkv, Dv]
        → ``o`` [Tq, H, Dv].

        Sequence b is the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and those of ``cu_seqlens_k`` of k
        and v; both are int32 [B + 1], begin with 0 and end with Tq and Tk. Any length may be 0. A spec means what it
        means for a dense call of that sequence alone: b is its number, i and j count inside of it, Nq and Nk are its
        own lengths. In shapes of captured tensors they are ``max_seqlen_q`` and ``max_seqlen_k``, by default the
        longest; clamped indices are clamped to these. ``return_lse`` adds ``lse`` [H, Tq]. All else is as for the op.

        Raises what the op raises, and ``ValueError`` for lengths that fall, do not end at T, or pass the maximum.
        """
        return self._call_ragged(
            q, k, v, (cu_seqlens_q, cu_seqlens_k), (b_start, h_start, b_total, h_total, max_seqlen_q, max_seqlen_k),
            self._signature.bind(captured) if captured or self._signature.names else (),
            deterministic, return_lse, dropout_p, seed,
        )  # fmt: skip

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | int,
        *,
        k: Tensor | None = None,
        v: Tensor | None = None,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        leftpad: Tensor | None = None,
        num_splits: Any = 0,
        k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        return_lse: bool = False,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        **captured: Any,
    ) -> Any:
        """Attention of the last queries of each sequence over a cache: ``q`` [B, H, Nq, D] → ``o`` [B, H, Nq, Dv].

        ``k_cache`` is [B, Hkv, Nmax, D], ``v_cache`` [B, Hkv, Nmax, Dv]; with ``block_table`` int32 [B, P] they are
        pages [pages, Hkv, page, D], of which the table names those of each sequence. ``cache_seqlens`` int32 [B], or
        one number, are the rows that are filled. ``k`` and ``v`` [B, Hkv, new, D] are written behind them first.
        ``cache_batch_idx`` int32 [B] says which entries of the cache are meant; rows before ``leftpad`` int32 [B] are
        not seen. Nq and Nk both mean ``cache_seqlens[b] + new``, j counts the rows of the cache, and i those of the
        queries, of which the last is the last row. In shapes of captured tensors Nq and Nk are the rows that the cache
        has room for. The keys of a head are computed in ``num_splits`` parts, which threads or a GPU's blocks share and
        which are merged; 0: as many as the lengths, on a GPU the room, ask for. Nothing is dropped. There are no
        gradients.

        The cache may be of 8 bits, ``torch.float8_e4m3fn``, beside q of more: then ``k_descale`` and ``v_descale``,
        float32 [B, Hkv] or one number, are what its keys and values are multiplied by, by default 1, and k and v are
        written divided by them, no further out than ±448.

        Raises what the op raises, and ``ValueError`` where a length or a page lies outside of the cache. Nobody waits
        for those on a GPU: the nearest that lie within are taken, unless ``FLASHGEN_CHECK_LENGTHS`` is set.
        """
        self._check_names("decode", CACHED)
        splits = as_number(num_splits, whole=True)
        if splits is None or splits < 0:
            raise ValueError(
                f"'num_splits' is {num_splits!r}; 0 or the number of parts that keys are split into is expected"
            )
        if (k is None) != (v is None):
            raise ValueError("k and v are written to the cache together: pass both, or neither")
        cache = cache_of(
            q, k_cache, v_cache, cache_seqlens, new=0 if k is None else k.shape[2], block_table=block_table,
            cache_batch_idx=cache_batch_idx, leftpad=leftpad, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        bound = self._signature.bind(captured) if captured or self._signature.names else ()
        nothing = 0.0 if self._signature.has_dropout else None
        tensors = self._tensors(q, k_cache, v_cache, bound, return_lse, nothing, None)
        if k is not None and v is not None:
            append(cache, k_cache, v_cache, k, v)
        places = (cache.lengths, cache.padding, cache.entries, cache.blocks, cache.k_factors, cache.v_factors)
        return call(self._cached, (*tensors, *places), (b_start, h_start, b_total, h_total, splits), False, return_lse)

    def explain_decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor | None = None,
        num_splits: int = 0,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        **captured: Any,
    ) -> Explanation:
        """What ``decode`` runs for these arguments on a GPU, or on the emulator, and why, without running it.

        Takes those arguments that it depends on; tensors as ``explain`` does. Bytes and time are those of a full cache.
        Raises what ``decode`` raises, and ``ValueError`` where other kernels run, or none.
        """
        device = self._device()
        tensors = self._positional(
            (placed(q, device), placed(k_cache, device), placed(v_cache, device)), self._signature.bind(captured)
        )
        numbers = (b_start, h_start, b_total, h_total)
        asked = ask_of_cache(self._cached.engine, tensors, block_table, numbers, num_splits, device)
        shows = self._shows(asked.call.device.type)
        if not isinstance(shows, ShowsCaches) or asked.call.is_empty:
            raise ValueError(
                f"'{self.spec.name}': explain_decode says what calls with pairs run on GPUs and on the emulator; "
                f"q is on {asked.call.device}, with backend={self._parts.backend!r}"
            )
        return shows.explain_cached(self.spec.name, asked)


def is_repeatable(deterministic: bool | None) -> bool:
    """Whether gradients are to be the same to the bit: as asked, else as PyTorch is told."""
    if deterministic is None:
        return are_deterministic_algorithms_enabled()
    check_switch("deterministic", deterministic)
    return deterministic


def _why_no_kernel(asked: Asked, backend: str | None) -> str:
    if asked.call.is_empty:
        return "there is no pair of a query and a key: the result is zeros"
    if backend == "reference":
        return "backend='reference' evaluates the dense formula by PyTorch's operators"
    if asked.call.kernel is not None:
        return "the kernels of this op say nothing of themselves"
    return "no compiler was found: the tiled reference stands in, made of PyTorch's operators"
