"""Registers an op with ``torch.library``: forward and backward operators, autograd, fake tensors, autocast.

In: a name, a ``Signature`` and an ``Engine``. Out: the forward operator. The name carries a hash of what the op
computes and nothing of how this machine does, so that exported programs find it in other processes. Ops of one name
may have engines of their own (tiles that were tuned since, a package's sources): eager calls run the op's own engine,
calls through the dispatcher that of the first op.

    AutocastCPU, AutocastCUDA   casts q, k, v to the type of the region, captured tensors to their declared ones
    Autograd                    saves for backward; backward calls the backward operator
    CompositeExplicitAutograd   checks and runs the engine, on any device
    Meta                        shapes only
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.library import Library
from torch.utils.flop_counter import register_flop_formula

from flashgen.hosts.kernel import Node
from flashgen.kinds.cached import CACHED
from flashgen.kinds.ragged import RAGGED
from flashgen.op.call import Attended, Call, Rest, Tensors
from flashgen.op.conversion import offset_arguments
from flashgen.op.derivatives import attend_duals, by_operator, tangents_of
from flashgen.op.engine import Engine
from flashgen.op.node import extension, node_of
from flashgen.op.registered import (
    NAMESPACE,
    Batch,
    Registered,
    fake_backward,
    fake_forward,
    folded_inputs,
    has_samples,
    mapped,
    registry,
)
from flashgen.op.signature import TORCH_DTYPES, Signature
from flashgen.op.tensor_kinds import check_tensors, has_distributed, have_memory, is_plain, transforming, with_memory


def _any_of_them_requires_grad(*args: object) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in args)


# Before 2.7 PyTorch has no such loop in C++.
_any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_of_them_requires_grad)

_LOCK = threading.Lock()


def register(
    name: str, identity: str, make_engine: Callable[[], Engine], remember: Callable[[], None] | None = None
) -> Registered:
    """The op of this name, registered on its first use in the process, with the engine of this identity.

    ``remember`` is called when a program with the op is exported.
    """
    with _LOCK:
        engines = registry().setdefault(name, {})
        if identity not in engines:
            first = next(iter(engines.values()), None)
            engine = make_engine()
            engines[identity] = (
                replace(first, engine=engine, first=first) if first is not None else _register(name, engine, remember)
            )
        return engines[identity]


@functools.cache
def library() -> Library:
    """The library of all operators of flashgen."""
    return Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(name: str, engine: Engine, remember: Callable[[], None] | None) -> Registered:
    made: Any = library()
    signature = engine.signature
    tags = (torch.Tag.pt2_compliant_tag,)
    made.define(name + signature.forward_schema, tags=tags)
    made.define(f"{name}_backward{signature.backward_schema}", tags=tags)
    namespace = getattr(torch.ops, NAMESPACE)
    op = Registered(
        name,
        signature,
        engine,
        getattr(namespace, name).default,
        getattr(namespace, f"{name}_backward").default,
        Batch.of(engine.spec, signature),
    )
    made.impl(name, engine.forward, "CompositeExplicitAutograd")
    made.impl(f"{name}_backward", engine.backward, "CompositeExplicitAutograd")
    made.impl(name, functools.partial(_autograd, op), "Autograd")
    made.impl(f"{name}_backward", functools.partial(_backward_autograd, op), "Autograd")
    for device in ("CPU", "CUDA"):
        made.impl(name, functools.partial(_autocast, op, device), f"Autocast{device}")
    qualified = f"{NAMESPACE}::{name}"
    exported = None if remember is None else functools.cache(remember)
    torch.library.register_fake(qualified, functools.partial(fake_forward, signature, exported), lib=made)
    torch.library.register_fake(f"{qualified}_backward", functools.partial(fake_backward, signature), lib=made)
    count_flops(signature, getattr(namespace, name), getattr(namespace, f"{name}_backward"))
    return op


# Autograd -------------------------------------------------------------------------------------------------------------


# The op, what runs its forward pass (operator or engine), the operator's arguments that are no tensors, and whether lse
# and its parts are results: autograd looks after each of them.
How = tuple[Registered, Callable[[Tensors, Rest], Attended], Rest, bool]


class Attention(torch.autograd.Function):
    """Saves the inputs, o, lse and its parts; backward is one call of the backward operator.

    Arguments: what is no tensor, as one (PyTorch looks at each several times), and the operator's tensors.
    """

    @staticmethod
    def forward(ctx: Any, how: How, *tensors: Any) -> Any:
        found = how[1](tensors, how[2])
        _save(ctx, how, tensors, *found)
        return found if how[3] else found[0]

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None, _: Tensor | None = None) -> Any:
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
            d_o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        found = _gradients(op, (d_o, d_lse), kept, tensors, rest, needs)
        if len(found) < len(needs):
            each = iter(found)
            return (None, *(next(each) if need else None for need in needs), *signature.without_gradient)
        return (None, *found, *signature.without_gradient)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Tangents of o and lse, of which the parts have none."""
        found = tangents_of(ctx.op, ctx.op.engine.program, ctx.saved_tensors, tangents, ctx.rest)
        return (*found, None) if ctx.gives_lse else found[0]


class TransformedAttention(Attention):
    """``Attention`` in the form that torch.func asks for, at the price of a slower call."""

    @staticmethod
    def forward(how: How, *tensors: Any) -> Any:  # type: ignore[override]
        found = how[1](tensors, how[2])
        return found if how[3] else found[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        how, *tensors = inputs
        _save(ctx, how, tensors, *(output if how[3] else (output, None, None)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, how: How, *tensors: Any) -> Any:
        op, _, rest, gives_lse = how
        inputs = folded_inputs(op.batch, op.signature, tensors, rest)
        axes = None if inputs is None else (inputs, op.batch.outputs)

        def call(*own: Any) -> tuple[Tensor, ...]:
            found = TransformedAttention.apply(how, *own)  # type: ignore[no-untyped-call]
            return found if gives_lse else (found,)

        found, dims = mapped(call, info, in_dims[1:], tensors, axes)
        return (found, dims) if gives_lse else (found[0], dims[0])


def _gradients(
    op: Registered,
    arriving: tuple[Tensor, Tensor | None],
    kept: Tensors,
    tensors: Tensors,
    rest: Rest,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed. ``arriving`` are d_o and d_lse, ``kept`` o, lse and its parts, if there are."""
    d_o, d_lse = arriving
    if not is_grad_enabled() and is_plain(arriving) and d_o.dtype is tensors[0].dtype:
        try:
            return op.engine.gradients(d_o, (d_lse, *kept) if kept else (None,) * 4, tensors, rest, needs)
        except RuntimeError:  # as in `call`
            if have_memory((*arriving, *tensors)):
                raise
    args = (d_o, *((d_lse, *kept) if kept else ()), *tensors)
    if transforming() or has_samples(args):
        return list(by_operator(op, args, rest, needs))
    found: list[Tensor] = op.backward(*args, *rest[0], rest[1], needs)
    return found


def _save(ctx: Any, how: How, tensors: Sequence[Any], *found: Tensor | None) -> None:
    """Keep what backward needs. Raises ``ValueError`` where a gradient is wanted that the spec does not declare."""
    op, _, rest, gives_lse = how
    for position, declaration in op.signature.fixed:
        if ctx.needs_input_grad[1 + position]:
            raise ValueError(
                f"argument '{op.signature.names[position - 3]}' requires a gradient, which the spec does not give it; "
                f"declare it `{declaration} grad`, or pass it detached"
            )
    ctx.save_for_backward(*tensors, *(found if op.signature.has_lse else ()))
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.op, ctx.rest, ctx.gives_lse = op, rest, gives_lse
    if gives_lse:
        ctx.mark_non_differentiable(found[2])


def call(op: Registered, tensors: Tensors, offsets: tuple[object, ...], deterministic: bool, return_lse: bool) -> Any:
    """Call the op: ``o``, or ``(o, lse)``. Raises ``TypeError`` where an offset is no int.

    Plain eager tensors skip the dispatcher, whose hops through Python cost more than a small kernel.
    """
    plain = is_plain(tensors)
    # Most calls are the whole, and tuples of the same objects are compared in no time. What equals 0 is taken for it,
    # but for a compiler's symbols, which a comparison would settle.
    kind = op.signature.kind
    numbers: Any = kind.whole if plain and offsets == kind.whole else offset_arguments(offsets, kind)
    rest: Rest = (numbers, deterministic)
    if plain:
        try:
            if not return_lse and op.engine.has_nodes and (result := _by_node(op, tensors, rest)) is not None:
                return result
            if is_grad_enabled() and _any_requires_grad(*tensors):
                result = _attention((op, op.engine.attend, rest, return_lse), *tensors)
                return result[:2] if return_lse else result
            o, lse, _ = op.engine.attend(tensors, rest, return_lse)
        except (RuntimeError, AttributeError):  # the memory of what has none was asked for, or None for the type of q
            if have_memory(tensors) and None not in tensors[:3]:
                raise
        else:
            return (o, lse) if return_lse else o
    op = op.first or op  # so that both passes are its engine's
    if forward_ad._current_level >= 0 and not is_compiling():
        found = attend_duals(op, tensors, rest, Attention.apply)
        if found is not None:
            return found if return_lse else found[0]
    check_tensors(op.signature.inputs_by_name, tensors)
    if has_distributed(tensors):
        from flashgen.op import dtensor  # noqa: PLC0415 - takes a second, and most never need it

        dtensor.learn(op.name)
        tensors = dtensor.prepared(op.signature, tensors)
    if not is_compiling():
        tensors = with_memory(tensors)
    if transforming():
        tensors = _cast_for_region(op, tensors)  # autograd saves these: the dispatcher would cast below it
        how = (op, op.attend_below_autograd, rest, op.signature.has_lse)
        result = TransformedAttention.apply(how, *tensors)  # type: ignore[no-untyped-call]
    else:
        result = op.forward(*tensors, *rest[0], rest[1])
    return result[:2] if return_lse else result[0] if op.signature.has_lse else result


def _by_node(op: Registered, tensors: Tensors, rest: Rest) -> Any:
    """``o``, by C++; None where it does not take the call."""
    if extension.module is None and (not extension.is_wanted or extension.ask() is None):
        return None
    last = op.engine.last_node
    if last is not None and last[0] == rest and (o := last[1](*tensors)) is not None:  # which looks at shapes itself
        return o
    known = op.engine.checker.find(tensors, rest)
    node = known.nodes[0] if known.nodes else _node_of(op, known, tensors, rest)
    if node is None:
        return None
    op.engine.last_node = (rest, node)
    return node(*tensors)


def _node_of(op: Registered, known: Call, tensors: Tensors, rest: Rest) -> Node | None:
    """The node in C++, with the Python function that gives gradients where C++ cannot."""

    def gradients(d_o: Tensor, kept: Tensors, tensors: Tensors, needs: Sequence[bool]) -> Sequence[Tensor]:
        return _gradients(op, (d_o, None), kept, tensors, rest, needs)

    return node_of(known, tensors, gradients, has_lse=op.signature.has_lse)


# ``apply`` without its search for wrappers of torch.func, where there are none.
_attention: Callable[..., Any] = super(torch.autograd.Function, Attention).apply


def _autograd(op: Registered, *args: Any) -> Any:
    # Autograd's own function looks after tangents, too.
    if (torch.is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
        count = op.signature.tensor_arguments
        # What backward finds saved is read at once.
        tensors = args[:count] if is_compiling() else with_memory(args[:count])
        how = (op, op.attend_below_autograd, (args[count:-1], args[-1]), op.signature.has_lse)
        return Attention.apply(how, *tensors)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return op.forward(*args)


def _backward_autograd(op: Registered, *args: Any) -> list[Tensor]:
    if (torch.is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
        end = (4 if op.signature.has_lse else 0) + 1 + op.signature.tensor_arguments
        return list(by_operator(op, args[:end], (args[end:-2], args[-2]), args[-1]))
    return op.backward_below_autograd(*args)


# Autocast -------------------------------------------------------------------------------------------------------------


def _autocast(op: Registered, device: str, *args: Any) -> Any:
    count = op.signature.tensor_arguments
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op.forward(*_cast(op, device.lower(), args[:count]), *args[count:])


def _cast_for_region(op: Registered, tensors: Tensors) -> Tensors:
    """The tensors of a call in the types of a region of autocast; unchanged outside of one."""
    device = tensors[0].device.type
    return _cast(op, device, tensors) if torch.is_autocast_enabled(device) else tensors


def _cast(op: Registered, device: str, tensors: Tensors) -> Tensors:
    cast = [*rows_of_region(op.engine, device, tensors[:3]), *tensors[3:]]
    for n, tensor in enumerate(op.signature.tensors, start=3):
        if tensor.element.is_floating and _is_castable(tensors[n]):
            cast[n] = tensors[n].to(TORCH_DTYPES[tensor.element])
    return tuple(cast)


def rows_of_region(engine: Engine, device: str, rows: Sequence[Tensor]) -> Tensors:
    """q, k and v in the type of the autocast region, if the op takes that, else in float32, if it takes that."""
    allowed = engine.checker.dtypes
    wanted = next((dtype for dtype in (torch.get_autocast_dtype(device), torch.float32) if dtype in allowed), None)
    return tuple(x.to(wanted) if wanted is not None and _is_castable(x) else x for x in rows)


def _is_castable(x: Tensor) -> bool:
    """Autocast leaves float64, what has 8 bits, and everything that is not floating alone."""
    return x.is_floating_point() and x.dtype is not torch.float64 and x.element_size() > 1


def count_flops(signature: Signature, forward: Any, backward: Any) -> None:
    """Register what ``torch.utils.flop_counter`` counts for an op's two operators (``OpOverloadPacket``).

    Masks are left out on purpose: figures compare with those of ``scaled_dot_product_attention``, causal or not.
    """
    # The backward operator's q, k and v stand behind d_o, d_lse, o, lse and its parts.
    first = 5 if signature.has_lse else 1

    def of_forward(*arguments: Any, **_: Any) -> int:
        q, _, v = arguments[:3]
        return _products(signature, arguments, q.shape[-1] + v.shape[-1])

    def of_backward(*arguments: Any, **_: Any) -> int:
        q, _, v = arguments[first : first + 3]
        # S again, dP and dV, dQ and dK
        return _products(signature, arguments[first:], 3 * q.shape[-1] + 2 * v.shape[-1])

    register: Any = register_flop_formula
    register(forward, get_raw=True)(of_forward)
    register(backward, get_raw=True)(of_backward)


def _products(signature: Signature, arguments: Sequence[Any], depth: int) -> int:
    """Those of all pairs. Lengths of sequences are read; on meta all are as long as the longest."""
    (q, k, _), kind = arguments[:3], signature.kind
    own = arguments[signature.tensor_arguments - len(kind.tensors) :]
    if kind is RAGGED:
        lens = (
            [longest or 0] * (len(x) - 1) if x.is_meta else x.diff().tolist()
            for x, longest in zip(own[:2], own[6:8], strict=True)
        )
        pairs = sum(i * j for i, j in zip(*lens, strict=True))
    elif kind is CACHED:
        pairs = q.shape[2] * (len(own[0]) * k.shape[2] if own[0].is_meta else int(own[0].sum()))
    else:
        pairs = q.shape[0] * q.shape[2] * k.shape[2]
    return int(2 * q.shape[1] * pairs * depth)
