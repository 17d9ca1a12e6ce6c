"""What an op shows of itself: plans, sources, what a call would run, where it can run, its name.

In: the providers of its kernels, as far as they say something (``Shows``). Out: a ``ShownOp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from flashgen.hosts.asked import AskedCall
from flashgen.ir.fingerprint import KernelText
from flashgen.ir.spec import HeadDim
from flashgen.ir.spec_text import declared
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.op.asked import Asked, ask, placed
from flashgen.op.conversion import offset_arguments
from flashgen.op.eight_bits import F8
from flashgen.op.f8 import wide_type
from flashgen.op.op_calls import HOST_BACKENDS, OpCalls
from flashgen.op.reference import check_return_lse, refuse_dropout
from flashgen.op.registered import NAMESPACE
from flashgen.plan.explanation import Explanation
from flashgen.plan.notebook import drawn
from flashgen.plan.plans import Plans


@runtime_checkable
class Shows(Protocol):
    """A provider of kernels that says what they are."""

    def plans(self) -> Mapping[HeadDim, Any]:
        """The plans by head dimension, as calls take them whose shape chooses no other."""

    def sources(self) -> tuple[KernelText, ...]:
        """The texts of these plans' kernels."""

    def explain(self, name: str, asked: AskedCall) -> Explanation:
        """What a call runs, of an op of this name."""


@runtime_checkable
class ShowsCaches(Shows, Protocol):
    """One that says what runs over caches, too."""

    def explain_cached(self, name: str, asked: AskedCall) -> Explanation:
        """What a call over a cache runs, of an op of this name."""


class ShownOp(OpCalls):
    """An attention operator as far as it tells of itself. Immutable: copies are the op itself."""

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
        check_return_lse(self.spec, self._signature, return_lse)
        if dropout_p is not None and not self._signature.has_dropout:
            refuse_dropout(self.spec, dropout_p)
        offsets = offset_arguments((q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total))
        repeatable = are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        rest, widens = (offsets, repeatable), ""
        asked = ask(
            (self._kinds[EIGHT_BITS.name] if tensors[0].dtype is F8 else self._registered).engine,
            tensors,
            rest,
            dropout_p,
            device,
        )
        if asked.call.kernel is None and tensors[0].dtype is F8:
            dtype = wide_type(self._registered.engine.checker.dtypes, asked.call.device)
            wide = (placed(torch.empty_like(x, dtype=dtype, device="meta"), asked.call.device) for x in tensors[:3])
            asked = ask(self._registered.engine, (*wide, *tensors[3:]), rest, dropout_p, device)
            widens = f"no kernel of this target multiplies 8 bits: q, k and v are widened to {dtype} first"
        shows = self._shows(asked.call.device.type)
        if asked.call.kernel is not None and shows is not None and not asked.call.is_empty:
            found = shows.explain(self.spec.name, asked.told)
            instead = widens or self._registered.engine.runs_instead(tensors, rest)
            reasons = (instead, *found.reasons) if instead else found.reasons
            return replace(found, reasons=reasons, derivatives=self._registered.derivatives)
        return Explanation(
            name=self.spec.name,
            backend="none" if asked.call.is_empty else "reference",
            device=str(asked.call.device),
            target="none",
            head_dim=str(asked.call.head_dim),
            element=str(asked.told.element),
            shape=asked.told.shape,
            passes=(),
            reasons=(*([widens] if widens else []), _why_no_kernel(asked, self._parts.backend)),
            derivatives=self._registered.derivatives,
        )

    def _device(self) -> torch.device:
        """Where a call runs unless its tensors say otherwise."""
        kernels = self._registered.engine.kernels
        if "cuda" not in kernels:
            return torch.device("cpu")
        from flashgen.hosts import cuda  # noqa: PLC0415 - an op of the CPU needs no driver of GPUs

        if "cpu" in kernels and not cuda.is_usable():
            return torch.device("cpu")
        return torch.device("cuda", cuda.current_device())

    def _shows(self, device: str) -> Shows | None:
        """What says of itself what it runs; None where nothing does."""
        found: object = self._registered.engine.kernels.get(device)
        return found if isinstance(found, Shows) else None

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that this op can run on here."""
        if self._parts.backend in HOST_BACKENDS:
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
        return drawn("op", self)

    def __copy__(self) -> ShownOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownOp:
        return self

    def __reduce__(self) -> Any:
        if self._parts.reopen is None:
            raise TypeError(f"{self!r} cannot be pickled: load the spec in the other process")
        return self._parts.reopen


def _why_no_kernel(asked: Asked, backend: str | None) -> str:
    if asked.call.is_empty:
        return "there is no pair of a query and a key: the result is zeros"
    if backend == "reference":
        return "backend='reference' evaluates the dense formula by PyTorch's operators"
    if asked.call.kernel is not None:
        return "the kernels of this op say nothing of themselves"
    return "no compiler was found: the tiled reference stands in, made of PyTorch's operators"
