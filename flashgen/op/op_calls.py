"""What every op is made of, and how it calls the operators that PyTorch knows.

In: an ``OpParts``; arguments in the order of the spec. Out: an ``OpCalls``, the engines and operators of one spec:
dense calls, ragged batches, caches, 8 bits. Everything that is checked is checked there (``call.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from flashgen.hosts.kernel import KernelProvider
from flashgen.ir.fingerprint import KernelText, fingerprint, operator_name
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.kind import Kind
from flashgen.kinds.ragged import RAGGED
from flashgen.kinds.table import KINDS
from flashgen.op.call import Tensors
from flashgen.op.conversion import check_switch, param_argument, probability_argument, seed_argument, tensor_argument
from flashgen.op.eight_bits import factors_of_call
from flashgen.op.engine import Engine
from flashgen.op.lengths import check_starts
from flashgen.op.narrowing import Narrowing
from flashgen.op.registered import Registered
from flashgen.op.registration import call, register
from flashgen.op.shared_lists import shared_lists
from flashgen.op.signature import F8, Signature

_Op = TypeVar("_Op")

BACKENDS = ("cpu", "cuda", "emulator", "reference")
# Backends whose kernels do not depend on the type of device.
HOST_BACKENDS = ("emulator", "reference")


@dataclass(frozen=True)
class OpParts:
    """What an op is made of.

    ``kernels`` holds the provider of kernels for each type of device; None where the tiled reference stands in, as no
    compiler was found. A provider that is a ``Shows`` says what the op shows of itself. ``sources`` and ``identity``
    tell ops of one operator apart that run other kernels. ``backend`` is the one that was asked for. ``reopen`` makes
    the op again in another process, for pickling. The operator's name covers ``label`` and ``edited``, sources that a
    user changed, beside spec and backend. ``remember`` is called when a program with the op is exported.
    """

    spec: AttentionSpec
    kernels: Mapping[str, KernelProvider | None]
    sources: tuple[KernelText, ...] = ()
    identity: str = ""
    backend: str | None = None
    reopen: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    label: str = ""
    edited: tuple[KernelText, ...] = ()
    remember: Callable[[], None] | None = None

    @property
    def operator(self) -> str:
        """The name of the torch operator, without the namespace: the same on every machine."""
        return operator_name(self.spec, self.backend, self.label, self.edited)

    @property
    def identity_of_engine(self) -> str:
        """The kernels that run, which tell ops of one operator apart."""
        kinds = (f"{name}" if provider else f"{name}-tiled" for name, provider in self.kernels.items())
        return fingerprint(self.spec, " ".join((self.backend or "", self.identity, *kinds)), self.sources)


def check_backend(backend: str | None) -> None:
    """Raise ``ValueError`` for a backend that does not exist."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown backend '{backend}'; known are {', '.join(repr(each) for each in BACKENDS)}")


class OpCalls:
    """The operators of one spec, and calls of them by position.

    ``_run`` runs a call whose arguments are bound; ``_is_exact``: captured real numbers keep their precision.
    """

    _run: Callable[..., Any] = staticmethod(call)
    _is_exact = False

    def __init__(self, parts: OpParts) -> None:
        check_backend(parts.backend)
        self._parts = parts
        name = parts.operator

        def registered(kind: Kind) -> Registered:
            find = functools.partial(self._made, kind)
            return register(f"{name}{kind.suffix}", parts.identity_of_engine, find, parts.remember)

        # By names: torch.compile traces calls, and hashes no kind.
        self._kinds = {kind.name: registered(kind) for kind in KINDS.values() if kind.suffix is not None}
        self._registered = self._kinds[DENSE.name]
        self.signature = self._registered.signature
        self.narrowing = Narrowing(parts.spec)
        self._engines: dict[Kind, Engine] = {}
        self._clashes = {each.name: _clash(self.signature, each) for each in (RAGGED, CACHED)}

    def _made(self, kind: Kind) -> Engine:
        if self._parts.backend == "reference":
            return Engine(self._parts.spec, {}, pairs=None, kind=kind)
        instead = shared_lists(self._parts.spec, self._parts.kernels) if kind is DENSE else None
        return Engine(self._parts.spec, self._parts.kernels, kind=kind, instead=instead)

    # For callers of the operator's engine, as ranks are over parts of the keys ----------------------------------------

    @property
    def engine(self) -> Engine:
        """What runs dense calls."""
        return self._registered.engine

    def engine_of(self, kind: Kind) -> Engine:
        """What runs calls of a kind."""
        if kind.name in self._kinds:
            return self._kinds[kind.name].engine
        if kind not in self._engines:
            self._engines[kind] = self._made(kind)
        return self._engines[kind]

    def of_spec(self, spec: AttentionSpec, load: Callable[..., _Op]) -> _Op:
        """What ``load`` makes of another spec for the same backend, and on the emulator the same target.

        An op without kernels makes one without: the dense formula does not keep what kernels keep for a backward pass.
        """
        parts = self._parts
        if parts.backend is None and not any(parts.kernels.values()):
            made: Any = type(self)(replace(parts, spec=spec, sources=(), reopen=None))
            return made  # type: ignore[no-any-return]
        return load(spec, parts.backend, parts.label or None)

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
        return self._tensors(q, k, v, self.signature.bind(dict(captured)), return_lse, dropout_p, seed)

    @property
    def spec(self) -> AttentionSpec:
        """What the op computes."""
        return self._parts.spec

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

        ``descales`` are those of q, k and v, None where not given. Jagged q, k and v are a ragged batch.
        """
        if is_nested(q, k, v):
            if any(each is not None for each in descales):
                raise ValueError(
                    "'q_descale', 'k_descale' and 'v_descale' go with dense q, k and v, not with jagged ones"
                )
            q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total = offsets
            rows, starts = sequences(q, k, v, (q_start, kv_start, q_total, kv_total))
            numbers = (b_start, h_start, b_total, h_total, None, None)
            found = self._call_ragged(*rows, starts, numbers, captured, deterministic, return_lse, dropout_p, seed)
            return nested(found, starts[0])
        tensors = self._tensors(q, k, v, captured, return_lse, dropout_p, seed)
        if getattr(q, "dtype", None) is F8 or not (descales[0] is descales[1] is descales[2] is None):
            factors = factors_of_call(self._positional((q, k, v), ()), descales)
            return self._run(self._kinds[EIGHT_BITS.name], (*tensors, *factors), offsets, False, return_lse)
        return self._run(self._registered, tensors, offsets, is_repeatable(deterministic), return_lse)

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
        signature = self.signature
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
        name = self._parts.spec.name
        if not signature.has_dropout:
            if dropout_p is not None and (isinstance(dropout_p, Tensor) or dropout_p != 0):
                raise ValueError(f"dropout_p: '{name}' has no dropout; add the statement `dropout 0.0` to the spec")
            if seed is not None:
                seed_argument(seed, q.device)  # a wrong seed is refused, though nothing is drawn
        if return_lse:
            check_switch("return_lse", return_lse)
            if not signature.has_lse:
                raise ValueError(f"return_lse: '{name}' has pointwise weights, which have no denominator and so no lse")
        return tensors

    def _check_names(self, method: str, kind: Kind) -> None:
        clash = self._clashes[kind.name]
        if clash is not None:
            raise ValueError(
                f"'{self.spec.name}' captures '{clash}', an argument of {method}: the spec has to call it otherwise"
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
        (q_name, k_name), device = RAGGED.tensors, q.device
        q_starts = check_starts(q_name, starts[0], device)
        k_starts = q_starts if starts[1] is starts[0] else check_starts(k_name, starts[1], device)
        return self._run(
            self._kinds[RAGGED.name], (*tensors, q_starts, k_starts), numbers, is_repeatable(deterministic), return_lse
        )

    def _positional(self, tensors: Tensors, captured: Sequence[object]) -> Tensors:
        """q, k and v, checked to be tensors, and what is captured, in the order and the types of the operator."""
        q, k, v = tensors
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
            name, x = next((name, x) for name, x in zip("qkv", tensors, strict=True) if not isinstance(x, Tensor))
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        signature, is_exact = self.signature, self._is_exact
        dtypes, count = signature.dtypes, len(signature.tensors)
        given: list[object] = list(self.narrowing.narrowed(captured, is_exact=is_exact) if captured else ())
        for n, value in enumerate(given):
            # A tensor of the declared type stays, and a param that is a number on the CPU.
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


def _clash(signature: Signature, kind: Kind) -> str | None:
    """The captured name that is an argument of calls of a kind, if there is one."""
    names = (*kind.tensors, *kind.numbers, "k_cache", "v_cache", "num_splits", "k_descale", "v_descale")
    return next((name for name in names if name in signature.names), None)


def is_repeatable(deterministic: bool | None) -> bool:
    """Whether gradients are to be the same to the bit: as asked, else as PyTorch is told."""
    if deterministic is None:
        return are_deterministic_algorithms_enabled()
    check_switch("deterministic", deterministic)
    return deterministic


# Jagged tensors -------------------------------------------------------------------------------------------------------


def is_nested(q: object, k: object, v: object) -> bool:
    """Whether any of the three is a NestedTensor; plain calls ask, so that it has to be quick."""
    return (
        getattr(q, "is_nested", False) is True
        or getattr(k, "is_nested", False) is True
        or getattr(v, "is_nested", False) is True
    )


def nested(found: Any, offsets: Tensor) -> Any:
    """What varlen returns, o [Tq, H, Dv] or that and lse [H, Tq], as NestedTensors [B, H, j, Dv] and [B, H, j]."""
    o = found[0] if isinstance(found, tuple) else found
    make: Any = functools.partial(torch.nested.nested_tensor_from_jagged, offsets=offsets, jagged_dim=2)
    rows = make(o.transpose(0, 1))
    return (rows, make(found[1])) if isinstance(found, tuple) else rows


def sequences(
    q: Tensor, k: Tensor, v: Tensor, places: tuple[object, ...]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The rows of NestedTensors, and where sequences of queries and of keys begin: what varlen takes.

    ``places`` are q_start, kv_start, q_total and kv_total, none of which may be given. Raises ``TypeError`` and
    ``ValueError``.
    """
    if places != (0, 0, None, None):
        raise ValueError(
            "q_start, kv_start, q_total and kv_total place a part of a sequence; NestedTensors hold whole ones"
        )
    (q_rows, q_offsets), (k_rows, k_offsets), (v_rows, v_offsets) = (
        _rows(name, x) for name, x in (("q", q), ("k", k), ("v", v))
    )
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"'q' has {q_offsets.shape[0] - 1} sequences and 'k' has {k_offsets.shape[0] - 1}")
    _check_same(k_offsets, v_offsets)
    return (q_rows, k_rows, v_rows), (q_offsets, k_offsets)


def _rows(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, H, width] of a NestedTensor, and its offsets [B + 1]. Raises ``TypeError`` and ``ValueError``."""
    form = f"a jagged NestedTensor [B, {'H' if name == 'q' else 'Hkv'}, j, {'Dv' if name == 'v' else 'D'}]"
    if not x.is_nested:
        raise TypeError(f"'{name}' is no NestedTensor, but others of q, k and v are; {form} is expected")
    if x.layout is not torch.jagged:
        raise TypeError(
            f"'{name}' is a NestedTensor of layout {x.layout}; {form} is expected: make it with layout=torch.jagged"
        )
    nested: Any = x
    if nested.dim() != 4 or nested._ragged_idx != 2:
        sizes = ", ".join(
            "j" if axis == nested._ragged_idx else str(nested.shape[axis]) for axis in range(nested.dim())
        )
        raise ValueError(
            f"'{name}' is a NestedTensor [{sizes}]; {form} is expected: of [B, j, H, width] pass {name}.transpose(1, 2)"
        )
    if nested.lengths() is not None:
        raise ValueError(
            f"'{name}' is a NestedTensor with gaps between its sequences, a view of another; pass "
            f"{name}.contiguous(), or the rows and their cumulative lengths to varlen"
        )
    return nested.values().transpose(0, 1), nested.offsets()


def _check_same(k: Tensor, v: Tensor) -> None:
    """Raise ``ValueError`` where k and v are cut into other sequences."""
    if k is v or torch.compiler.is_compiling():
        return
    if k.shape != v.shape or not torch.equal(k, v):
        raise ValueError("'v' is a NestedTensor of other lengths than 'k'; each key has one value")
