"""Registers an op with ``torch.library``: forward and backward operators, autograd, fake tensors, autocast.

In: a name, a ``Signature`` and an ``Engine``. Out: the forward operator. The name carries a hash of
everything that the op computes, so that registering the same op again finds the operator that is there.

    AutocastCPU, AutocastCUDA   casts q, k, v to the type of the region, captured tensors to their declared ones
    Autograd                    saves for backward; backward calls the backward operator
    CompositeExplicitAutograd   checks and runs the engine, on any device
    Meta                        shapes only
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _any_requires_grad,
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.library import Library

from flashgen.runtime.call import Rest
from flashgen.runtime.engine import Engine, Tensors
from flashgen.runtime.signature import TORCH_DTYPES, Signature

NAMESPACE = "flashgen"

_LOCK = threading.Lock()
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


@dataclass(frozen=True, eq=False)
class Registered:
    """A registered op: its two operators and what they were made of."""

    name: str
    signature: Signature
    engine: Engine
    forward: OpOverload[..., Any]
    backward: OpOverload[..., Any]

    def attend_below_autograd(self, tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor | None]:
        """The forward operator without its autograd; arguments and results are those of ``Engine.attend``."""
        with torch._C._AutoDispatchBelowAutograd():
            found = self.forward(*tensors, *rest[0], rest[1])
        return found if self.signature.has_lse else (found, None)

    def backward_below_autograd(self, *args: Any) -> list[Tensor]:
        """The backward operator without its autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            found: list[Tensor] = self.backward(*args)
        return found


def register(name: str, make_engine: Callable[[], Engine]) -> Registered:
    """The op of this name, registered on its first use in the process."""
    with _LOCK:
        known = _registry()
        if name not in known:
            known[name] = _register(name, make_engine())
        return known[name]


@functools.cache
def _library() -> Library:
    return Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@functools.cache
def _registry() -> dict[str, Registered]:
    """What is registered, as torch.library needs it: for the life of the process."""
    return {}


def _register(name: str, engine: Engine) -> Registered:
    library: Any = _library()
    signature = engine.signature
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(name + signature.forward_schema, tags=tags)
    library.define(f"{name}_backward{signature.backward_schema}", tags=tags)
    namespace = getattr(torch.ops, NAMESPACE)
    op = Registered(
        name,
        signature,
        engine,
        getattr(namespace, name).default,
        getattr(namespace, f"{name}_backward").default,
    )
    library.impl(name, engine.forward, "CompositeExplicitAutograd")
    library.impl(f"{name}_backward", engine.backward, "CompositeExplicitAutograd")
    library.impl(name, functools.partial(_autograd, op), "Autograd")
    library.impl(f"{name}_backward", functools.partial(_backward_autograd, op), "Autograd")
    for device in ("CPU", "CUDA"):
        library.impl(name, functools.partial(_autocast, op, device), f"Autocast{device}")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, functools.partial(_fake_forward, signature), lib=library)
    torch.library.register_fake(f"{qualified}_backward", functools.partial(_fake_backward, signature), lib=library)
    return op


# Autograd -------------------------------------------------------------------------------------------------------------


# The op, what runs its forward pass (operator or engine), and the operator's arguments that are no tensors.
How = tuple[Registered, Callable[[Tensors, Rest], tuple[Tensor, Tensor | None]], Rest]


class Attention(torch.autograd.Function):
    """Saves the inputs, o and lse; backward is one call of the backward operator.

    Arguments: what is no tensor, as one (PyTorch looks at each several times), and the operator's tensors.
    """

    @staticmethod
    def forward(ctx: Any, how: How, *tensors: Any) -> Any:
        op, run, rest = how
        o, lse = run(tensors, rest)
        _save(ctx, op, rest, tensors, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> Any:
        op, rest = ctx.op, ctx.rest
        signature = op.signature
        count = signature.tensor_arguments
        if d_o is None and d_lse is None:
            return (None,) * (1 + count)
        saved = ctx.saved_tensors
        tensors, kept = saved[:count], saved[count:]
        needs = ctx.needs_input_grad[1 : 1 + signature.inputs]
        if d_o is None:
            q, v = tensors[0], tensors[2]
            d_o = q.new_zeros((*q.shape[:3], v.shape[3]))
        found = _gradients(op, (d_o, d_lse), kept, tensors, rest, needs)
        if len(found) < len(needs):
            each = iter(found)
            return (None, *(next(each) if need else None for need in needs), *signature.without_gradient)
        return (None, *found, *signature.without_gradient)


class OutputAlone(Attention):
    """``Attention`` without lse among its results, where nobody asked for it: autograd looks after each of them."""

    @staticmethod
    def forward(ctx: Any, how: How, *tensors: Any) -> Any:
        op, run, rest = how
        o, lse = run(tensors, rest)
        _save(ctx, op, rest, tensors, o, lse)
        return o


class TransformedAttention(Attention):
    """``Attention`` in the form that torch.func asks for, at the price of a slower call."""

    @staticmethod
    def forward(how: How, *tensors: Any) -> Any:  # type: ignore[override]
        op, run, rest = how
        o, lse = run(tensors, rest)
        return (o, lse) if op.signature.has_lse else o

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (op, _, rest), *tensors = inputs
        _save(ctx, op, rest, tensors, *(output if op.signature.has_lse else (output, None)))


def _gradients(
    op: Registered,
    arriving: tuple[Tensor, Tensor | None],
    kept: Tensors,
    tensors: Tensors,
    rest: Rest,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed. ``arriving`` are d_o and d_lse, ``kept`` o and lse, where there is an lse."""
    d_o, d_lse = arriving
    if not is_grad_enabled() and is_plain(arriving):
        try:
            return op.engine.gradients(d_o, (d_lse, *kept) if kept else (None, None, None), tensors, rest, needs)
        except RuntimeError:  # as in `call`
            if not has_wrapper((*arriving, *tensors)):
                raise
    backward: Any = functools.partial(_Once.apply, op) if transforming() else op.backward
    found: list[Tensor] = backward(d_o, *((d_lse, *kept) if kept else ()), *tensors, *rest[0], rest[1], needs)
    return found


class _Once(torch.autograd.Function):
    """The backward operator with a derivative that says there is none."""

    @staticmethod
    def forward(op: Registered, *args: Any) -> Any:
        return tuple(op.backward_below_autograd(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"the gradient of '{ctx.name}' cannot be differentiated again: flashgen generates first derivatives. "
            "For second ones use op.reference(...), which autograd differentiates any number of times."
        )


def _save(ctx: Any, op: Registered, rest: Rest, tensors: Sequence[Any], o: Tensor, lse: Tensor | None) -> None:
    """Keep what backward needs. Raises ``ValueError`` where a gradient is wanted that the spec does not declare."""
    for position, declaration in op.signature.fixed:
        if ctx.needs_input_grad[1 + position]:
            raise ValueError(
                f"argument '{op.signature.names[position - 3]}' requires a gradient, which the spec does not give it; "
                f"declare it `{declaration} grad`, or pass it detached"
            )
    ctx.save_for_backward(*tensors, *(() if lse is None else (o, lse)))
    ctx.set_materialize_grads(False)
    ctx.op, ctx.rest = op, rest


def call(op: Registered, tensors: Tensors, rest: Rest, return_lse: bool) -> Any:
    """Call the op: ``o``, or ``(o, lse)``. ``rest`` are the operator's arguments behind those that are tensors.

    Plain eager tensors skip the dispatcher, whose hops through Python cost more than a small kernel.
    """
    if is_plain(tensors):
        try:
            if is_grad_enabled() and _any_requires_grad(*tensors):
                return (_attention if return_lse else _output_alone)((op, op.engine.attend, rest), *tensors)
            o, lse = op.engine.attend(tensors, rest, return_lse)
        except RuntimeError:  # the memory of a wrapper was asked for, which has none
            if not has_wrapper(tensors):
                raise
        else:
            return (o, lse) if return_lse else o
    check_tensors(tensors)
    if transforming():
        result = TransformedAttention.apply((op, op.attend_below_autograd, rest), *tensors)  # type: ignore[no-untyped-call]
    else:
        result = op.forward(*tensors, *rest[0], rest[1])
    return result if return_lse or not op.signature.has_lse else result[0]


def check_tensors(tensors: Tensors) -> None:
    """Raise ``TypeError`` where q, k or v is no tensor."""
    for name, x in zip("qkv", tensors, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")


# ``apply`` without its search for wrappers of torch.func, where there are none.
_attention: Callable[..., Any] = super(torch.autograd.Function, Attention).apply
_output_alone: Callable[..., Any] = super(torch.autograd.Function, OutputAlone).apply


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether nothing watches, traces, casts or transforms what happens to these tensors, all on the CPU or a GPU.

    A tensor that torch.func has left behind looks plain, too; who asks for its memory gets a ``RuntimeError``.
    """
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _is_any_autocast_enabled()
        or _profiler_enabled()
        or _is_tracing()
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator would take half of the time
        if not (type(x) in _PLAIN and (x.is_cpu or x.is_cuda)) and x is not None:
            return False
    return True


def has_wrapper(tensors: Sequence[Any]) -> bool:
    """Whether torch.func has made one of them. To ask before each call would take a twentieth of a small one."""
    return any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in tensors)


def transforming() -> bool:
    """Whether torch.func is at work: it wants autograd functions called from Python, above the dispatcher."""
    return not is_compiling() and _are_functorch_transforms_active()


def _autograd(op: Registered, *args: Any) -> Any:
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        count = op.signature.tensor_arguments
        kind = Attention if op.signature.has_lse else OutputAlone
        return kind.apply((op, op.attend_below_autograd, (args[count:-1], args[-1])), *args[:count])  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return op.forward(*args)


def _backward_autograd(op: Registered, *args: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        return list(_Once.apply(op, *args))  # type: ignore[no-untyped-call]
    return op.backward_below_autograd(*args)


# Fake tensors ---------------------------------------------------------------------------------------------------------


def _fake_forward(signature: Signature, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError("q, k and v have four dimensions")
    # One tensor on meta among real ones comes here, too.
    captured = [(f"tensor '{declared.name}'", x) for declared, x in zip(signature.tensors, others, strict=False)]
    for name, tensor in (("'k'", k), ("'v'", v), *captured):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but 'q' is on {q.device}")
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    if not signature.has_lse:
        return o
    return o, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)


def _fake_backward(signature: Signature, *args: Any) -> list[Tensor]:
    start = 4 if signature.has_lse else 1
    inputs: Sequence[Any] = args[start : start + signature.inputs]
    return [x.new_empty(x.shape) for x, need in zip(inputs, args[-1], strict=True) if need]


# Autocast -------------------------------------------------------------------------------------------------------------


def _autocast(op: Registered, device: str, *args: Any) -> Any:
    signature, region = op.signature, torch.get_autocast_dtype(device.lower())
    allowed = op.engine.checker.dtypes
    wanted = next((dtype for dtype in (region, torch.float32) if dtype in allowed), None)
    cast = list(args)
    for n, x in enumerate(args[:3]):
        if wanted is not None and _is_castable(x):
            cast[n] = x.to(wanted)
    for n, tensor in enumerate(signature.tensors, start=3):
        if tensor.element.is_floating and _is_castable(args[n]):
            cast[n] = args[n].to(TORCH_DTYPES[tensor.element])
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op.forward(*cast)


def _is_castable(x: Tensor) -> bool:
    """Autocast leaves float64 and everything that is not floating alone."""
    return x.is_floating_point() and x.dtype is not torch.float64
