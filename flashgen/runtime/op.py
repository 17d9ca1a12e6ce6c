"""AttentionOp: what a user calls.

In: an ``AttentionSpec`` and its kernels. Out: a callable over tensors, registered with ``torch.library``. A
call binds names to positions and goes to the operator; everything that is checked is checked there
(``call.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from flashgen.ir.spec import AttentionSpec
from flashgen.reference import dense
from flashgen.runtime.call import Offsets, check_shapes
from flashgen.runtime.engine import Engine, Tensors
from flashgen.runtime.fingerprint import KernelText, fingerprint
from flashgen.runtime.kernel import KernelProvider
from flashgen.runtime.registration import NAMESPACE, call, check_tensors, register
from flashgen.runtime.signature import as_scalar

BACKENDS = ("cpu", "cuda", "emulator", "reference")
# Their kernels do not go by the type of device.
_HOST_BACKENDS = ("emulator", "reference")


@dataclass(frozen=True)
class OpParts:
    """What an op is made of.

    ``kernels`` holds what gives the kernels for each type of device; None where the tiled reference stands in, as no
    compiler was found. ``plan`` is kept for the user. ``backend`` is what was asked for. ``reopen`` makes the op again
    in another process, for pickling.
    """

    spec: AttentionSpec
    kernels: Mapping[str, KernelProvider | None]
    plan: object = None
    sources: tuple[KernelText, ...] = ()
    backend: str | None = None
    reopen: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


def make_op(
    spec: AttentionSpec,
    kernels: Mapping[str, KernelProvider | None] | None,
    *,
    plan: object = None,
    sources: Sequence[KernelText] = (),
    backend: str | None = None,
    reopen: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> AttentionOp:
    """The op of a spec, without kernels on the tiled reference. Raises ``ValueError`` for an unknown backend."""
    return AttentionOp(
        OpParts(spec, {"cpu": None} if kernels is None else kernels, plan, tuple(sources), backend, reopen)
    )


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
            return Engine(parts.spec, parts.kernels)

        # Ops of one spec are one operator where all that they run is the same.
        kind = parts.backend if parts.backend in _HOST_BACKENDS else "kernels"
        kind += "".join(f" {name}" if provider else f" {name}-tiled" for name, provider in parts.kernels.items())
        registered = register(f"{parts.spec.name}_{fingerprint(parts.spec, kind, parts.sources)}", engine)
        self._registered = registered
        self._signature = registered.signature

    @property
    def spec(self) -> AttentionSpec:
        """What the op computes."""
        return self._parts.spec

    @property
    def plan(self) -> Any:
        """How it is computed: the planner's decisions."""
        return self._parts.plan

    @property
    def sources(self) -> tuple[KernelText, ...]:
        """The generated sources."""
        return self._parts.sources

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
        """The qualified name of the torch operator."""
        return f"{NAMESPACE}::{self._registered.name}"

    def __repr__(self) -> str:
        return f"<{self.name} on {' or '.join(self.backends)}>"

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
        offsets: Offsets,
        deterministic: bool | None,
        return_lse: bool,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
    ) -> Any:
        """Call the operator; ``captured`` are tensors, then params, in the order of the spec."""
        signature = self._signature
        tensors: Tensors = (q, k, v)
        if signature.takes_more:
            tensors = self._positional(tensors, captured)
            if signature.has_dropout:
                # Nothing is drawn from the generator for a call that is told not to drop.
                silent = seed is None and isinstance(dropout_p, (int, float)) and dropout_p == 0
                tensors += (None if silent else _seed(seed, q.device), _probability(dropout_p))
        if dropout_p is not None and not signature.has_dropout:
            self._refuse_dropout(dropout_p)
        if return_lse and not signature.has_lse:
            self._refuse_lse()
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        return call(self._registered, tensors, (offsets, deterministic), return_lse)

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dtype: torch.dtype | None = torch.float64,
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
        deterministic: bool | None = None,  # noqa: ARG002 - the arguments are those of the op
        **captured: Any,
    ) -> Any:
        """The dense formula in ``dtype``, on any device, differentiable any number of times by autograd.

        Takes what the op takes, in any floating type and head dimension. ``dtype=torch.float64`` is the
        judge of the op; ``dtype=None`` composes the formula in the type of ``q``, as a person would in
        PyTorch.

        Returns ``o``, or ``(o, lse)``, in ``dtype``. Raises what the op raises.
        """
        bound = self._positional((q, k, v), self._signature.bind(captured))[3:]
        tensors, params = bound[: len(self.spec.tensors)], bound[len(self.spec.tensors) :]
        if return_lse and not self._signature.has_lse:
            self._refuse_lse()
        offsets = (q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total)
        shard, sizes = check_shapes(self.spec, q, k, v, tensors, offsets)
        given = {param.name: x for param, x in zip(self.spec.params, params, strict=True) if x is not None}
        plain = {name: x.item() for name, x in given.items()}
        probability = 0.0
        if self._signature.has_dropout:
            values = dense.param_values(self.spec, plain, sizes)
            chosen = dense.drop_probability(self.spec, values, sizes) if dropout_p is None else dropout_p
            probability = float(chosen)
            if not 0.0 <= probability < 1.0:
                raise ValueError(f"'dropout_p' is {probability}; a drop probability lies in [0, 1)")
        elif dropout_p is not None:
            self._refuse_dropout(dropout_p)
        o, lse = dense.attention(
            self.spec,
            q,
            k,
            v,
            tensors={tensor.name: x for tensor, x in zip(self.spec.tensors, tensors, strict=True)},
            params=given,
            shard=shard,
            dropout=dense.Dropout(probability, _seed(seed, q.device)) if probability else None,
            dtype=dtype,
        )
        return (o, lse) if return_lse else o

    def _positional(self, tensors: Tensors, captured: Sequence[object]) -> Tensors:
        """q, k and v, checked to be tensors, and what is captured, in the order of the operator."""
        check_tensors(tensors)
        signature = self._signature
        count = len(signature.tensors)
        return (
            *tensors,
            *map(signature.tensor_argument, signature.tensors, captured[:count]),
            *map(signature.param_argument, signature.params, captured[count:]),
        )

    def _refuse_lse(self) -> None:
        raise ValueError(
            f"return_lse: '{self.spec.name}' has pointwise weights, which have no denominator and so no lse"
        )

    def _refuse_dropout(self, probability: float | Tensor) -> None:
        if isinstance(probability, Tensor) or probability != 0:
            raise ValueError(
                f"dropout_p: '{self.spec.name}' has no dropout; add the statement `dropout 0.0` to the spec"
            )


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
        **captured: Any,
    ) -> Any:
        """Attention: ``q`` [B, H, Nq, D], ``k`` [B, Hkv, Nk, D], ``v`` [B, Hkv, Nk, Dv] → ``o`` [B, H, Nq, Dv].

        ``captured`` holds the spec's tensors and params by name; params are numbers or 0-dim tensors
        (float32 or int32). ``return_lse`` adds ``lse`` [B, H, Nq], float32. ``dropout_p`` overrides the
        spec's; ``seed`` None draws one from torch's generator. ``*_start`` and ``*_total`` place a shard in
        the whole. ``deterministic`` None follows ``torch.use_deterministic_algorithms``.

        Raises ``TypeError`` (a missing or unknown argument, a wrong dtype) and ``ValueError`` (a wrong
        shape, device, offset or probability), naming the argument, what was expected and what came.
        """
        return self._call(
            q, k, v, self._signature.bind(captured) if captured or self._signature.names else (),
            (q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total),
            deterministic, return_lse, dropout_p, seed,
        )  # fmt: skip


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as a 0-dim int64 tensor; None draws it, so that the state of torch's generator governs it.

    On a GPU it is drawn there: nothing waits for it, and a captured graph draws another one at each replay.
    """
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"'seed' must be an int or a 0-dim tensor, not {type(seed).__name__}")
    return as_scalar((seed + 2**63) % 2**64 - 2**63, torch.int64)


def _probability(dropout_p: float | Tensor | None) -> Tensor | None:
    if dropout_p is None or isinstance(dropout_p, Tensor):
        return dropout_p
    return as_scalar(dropout_p, torch.float64)
