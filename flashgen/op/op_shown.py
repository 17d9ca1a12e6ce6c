"""What an op shows of itself: plans, sources, what a call would run, where it can run, its name.

In: the providers of its kernels, as far as they say something (``Shows``). Out: a ``ShownOp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashgen.hosts.kernel import ExplainedCall
from flashgen.ir.fingerprint import KernelText
from flashgen.ir.spec import HeadDim
from flashgen.ir.text import declared
from flashgen.op.call import Call, Rest, Tensors
from flashgen.op.conversion import offset_arguments
from flashgen.op.eight_bits import wide_type
from flashgen.op.engine import Engine
from flashgen.op.op_calls import HOST_BACKENDS, OpCalls
from flashgen.op.registered import NAMESPACE, Registered
from flashgen.op.signature import ELEMENTS, F8, TORCH_DTYPES
from flashgen.plan.arguments import gradient_field, param_field
from flashgen.plan.explanation import Explanation
from flashgen.plan.notebook import Plans, drawn
from flashgen.reference.philox import drop_threshold


@runtime_checkable
class Shows(Protocol):
    """A provider of kernels that says what they are."""

    def plans(self) -> Mapping[HeadDim, Any]:
        """The plans by head dimension, as calls take them whose shape chooses no other."""

    def sources(self) -> tuple[KernelText, ...]:
        """The texts of these plans' kernels."""

    def explain(self, name: str, call: ExplainedCall) -> Explanation | None:
        """What a call runs, of an op of this name; None: nothing is said of calls of its kind."""


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

    def _explained(
        self,
        device: torch.device,
        op: Registered,
        tensors: Tensors,
        offsets: tuple[object, ...],
        deterministic: bool,
        _return_lse: bool,
    ) -> Explanation:
        """What a call runs whose arguments are bound, in the place of ``registration.call``."""
        signature, widens = self.signature, ""
        rest: Rest = (offset_arguments(offsets), deterministic)
        dropout_p = tensors[signature.inputs + 1] if signature.has_dropout else None
        call, told = explained_call(op.engine, tensors, rest, dropout_p, device)
        if call.kernel is None and tensors[0].dtype is F8:
            dtype = wide_type(self._registered.engine.checker.dtypes, call.device)
            wide = (with_device(torch.empty_like(x, dtype=dtype, device="meta"), call.device) for x in tensors[:3])
            call, told = explained_call(self._registered.engine, (*wide, *tensors[3:]), rest, dropout_p, device)
            widens = f"no kernel of this target multiplies 8 bits: q, k and v are widened to {dtype} first"
        shows = self._shows(call.device.type)
        runs = call.kernel is not None and not call.is_empty
        found = shows.explain(self.spec.name, told) if runs and shows is not None else None
        if found is not None:
            others = op.engine.instead
            instead = widens or ("" if others is None else others.describe(call, tensors))
            reasons = (instead, *found.reasons) if instead else found.reasons
            return replace(found, reasons=reasons, derivatives=self._registered.derivatives)
        backend = "none" if call.is_empty else "reference"
        reasons = (*([widens] if widens else []), _why_no_kernel(call, self._parts.backend))
        found = told.explanation(self.spec.name, backend, str(call.device), "none", (), reasons)
        return replace(found, derivatives=self._registered.derivatives)

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


def _why_no_kernel(call: Call, backend: str | None) -> str:
    if call.is_empty:
        return "there is no pair of a query and a key: the result is zeros"
    if backend == "reference":
        return "backend='reference' evaluates the dense formula by PyTorch's operators"
    if call.kernel is not None:
        return "the kernels of this op say nothing of themselves"
    return "no compiler was found: the tiled reference stands in, made of PyTorch's operators"


_TYPES = {dtype: element for element, dtype in TORCH_DTYPES.items()}


def explained_call(
    engine: Engine, tensors: Sequence[Any], rest: Rest, dropout_p: Any, device: torch.device
) -> tuple[Call, ExplainedCall]:
    """The call of q, k, v, captured tensors and params, and its record for hosts. ``device`` stands for ``meta``."""
    tensors = tuple(with_device(x, device) for x in tensors)
    spec, end = engine.spec, 3 + len(engine.spec.tensors)
    inputs = tensors[:end]
    call = engine.checker.find(inputs, rest)
    given = tensors[end : engine.signature.inputs]
    known = _params(engine, call, given)
    values: dict[str, float] = {"deterministic": float(rest[1]), "element": ELEMENTS.get(inputs[0].dtype, 0)}
    if call.kernel is not None:
        layout = call.kernel.layout
        values |= layout.named([*([0] * layout.varying), *call.fixed])
    values |= {param_field(name): value for name, value in known.items()}
    values["dropout_threshold"] = _threshold(engine, call, dropout_p, known)
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
    declared = [*((each.name, each.grad) for each in spec.tensors), *((each.name, each.grad) for each in spec.params)]
    for (name, is_learned), asks in zip(declared, wanted[3:], strict=False):
        if is_learned:
            values[gradient_field(name)] = float(asks or not any(wanted))
    return call, ExplainedCall(
        kind=engine.kind,
        head_dim=call.head_dim,
        element=_TYPES[inputs[0].dtype],
        shard=call.shard,
        sizes=call.sizes,
        index=call.device.index or 0,
        threads=call.threads,
        values=values,
        params=known,
    )


def with_device(x: Any, device: torch.device) -> Any:
    """A tensor without memory on the device, in the place of one on ``meta``."""
    if not isinstance(x, Tensor) or not x.is_meta or isinstance(x, FakeTensor):
        return x
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _params(engine: Engine, call: Call, given: Sequence[Any]) -> Mapping[str, float]:
    """The params whose numbers lie on the host; kernels alone know the others."""
    names = [param.name for param in engine.spec.params]
    holds = [x is None or (x.device.type == "cpu" and not isinstance(x, FakeTensor)) for x in given]
    if all(holds):
        return dict(zip(names, engine.checker.params(call, given), strict=True)) if names else {}
    found = zip(names, given, holds, strict=True)
    return {name: x.item() for name, x, is_known in found if is_known and x is not None}


def _threshold(engine: Engine, call: Call, dropout_p: Any, params: Mapping[str, float]) -> int:
    """The threshold of dropout as kernels get it; 0 where nothing is dropped."""
    if not engine.signature.has_dropout:
        return 0
    if dropout_p is None:
        if len(params) < len(engine.spec.params):
            return 1  # it may depend on what only kernels know: as if it dropped
        return drop_threshold(engine.checker.drop_probability(call, None, tuple(params.values())))
    return drop_threshold(float(dropout_p))
