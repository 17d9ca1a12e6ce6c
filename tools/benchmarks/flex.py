"""FlexAttention, compiled, as a peer: ``score_mod`` and ``mask_mod`` made from a spec's IR by the operators' meaning.

In: an ``AttentionSpec`` and the arguments of a call. Out: a ``Peer`` whose first call, which compiles, has been made,
or ``Inexpressible``. What FlexAttention would have to be told anyway (sizes, params, block mask, squared norms) is made
once, outside the time, in the peer's favour. Forward only on a CPU, as FlexAttention itself.
"""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashgen.analysis.simplify import simplify
from flashgen.ir.build import apply
from flashgen.ir.expr import (
    Expr,
    Literal,
    Load,
    Symbol,
    SymbolKind,
    index,
    index_set,
    literal,
    score_input,
    size,
    substitute,
    walk,
)
from flashgen.ir.operators import OPERATORS
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.reference.dense import param_values
from flashgen.reference.evaluate import TorchNamespace, Value
from flashgen.reference.shard import Shard
from flashgen.verification.inputs import Inputs, scale_factor
from tools.benchmarks.peer import Arguments, Inexpressible, Peer

NO_BACKWARD = "it has no backward on a CPU"

_Meaning = Callable[..., Any]
# What a person would write, as positions stay far from 2**31: no wrapping at 32 bits, no check for a divisor of 0.
_AS_WRITTEN: Mapping[str, _Meaning] = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "abs": torch.abs,
        "floordiv": torch.floor_divide,
        "mod": torch.remainder,
    }
)
# Except where bits are mixed, as pseudo-random patterns do: 64 bits and the whole meaning.
_MIXES_BITS = frozenset({"popcount", "bitxor", "shl", "shr", "ipow", "ceildiv"})
_LARGE = 2**15
_SQUARES = ("|q|²", "|k|²")


@dataclass(frozen=True)
class _FlexNamespace(TorchNamespace):
    """Torch as ``score_mod`` has to be written: numbers stay numbers, as a tensor could not be made there."""

    def where(self, c: Tensor | bool, x: Value, y: Value) -> Any:
        return torch.where(c, x, y) if isinstance(c, Tensor) else x if c else y

    def minimum(self, x: Value, y: Value) -> Tensor:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.minimum(x, y)
        tensor, number = (x, y) if isinstance(x, Tensor) else (y, x)
        assert isinstance(tensor, Tensor), "the simplifier leaves no operator of numbers alone"
        return torch.clamp(tensor, max=number)

    def maximum(self, x: Value, y: Value) -> Tensor:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.maximum(x, y)
        tensor, number = (x, y) if isinstance(x, Tensor) else (y, x)
        assert isinstance(tensor, Tensor), "the simplifier leaves no operator of numbers alone"
        return torch.clamp(tensor, min=number)

    def clamp(self, x: Tensor, lo: Value, hi: Value) -> Tensor:
        return self.minimum(self.maximum(x, lo), hi)

    def floor_divide(self, x: Value, y: Value) -> Tensor:
        return torch.floor_divide(x, y)

    def remainder(self, x: Value, y: Value) -> Tensor:
        return torch.remainder(x, y)  # type: ignore[arg-type]

    def pow(self, x: Value, y: Value) -> Tensor:
        return torch.pow(x, y)  # type: ignore[arg-type]


def flex_peer(spec: AttentionSpec, inputs: Inputs, drop: float | None = None) -> Peer:  # noqa: ARG001 - it has none
    """Compiled for these arguments."""
    _check_expressible(spec)
    tensors = dict(inputs.captured)
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    known = _known(spec, inputs, shard)
    scale = scale_factor(
        spec, {name: float(x) for name, x in inputs.params.items()}, shard.sizes(inputs.q.shape[-1], inputs.v.shape[-1])
    )
    score = simplify(substitute(apply("to_float", spec.score), known))
    if score_input("sqdist") in set(walk(score)):
        score = substitute(score, {score_input("sqdist"): substitute(_squared_distance(), known)})
        tensors |= {name: x.float().square().sum(-1) for name, x in zip(_SQUARES, (inputs.q, inputs.k), strict=True)}
    if score_input("dot") in set(walk(score)):
        # score_mod sees one product: it is q·k then, and s is made of it.
        score = substitute(score, {score_input("s"): apply("mul", literal(scale), score_input("dot"))})
        score, scale = substitute(score, {score_input("dot"): score_input("s")}), 1.0
    keep = spec.mask if spec.layout is None else apply("and", spec.mask, spec.layout.keep)
    keep = simplify(substitute(keep, known))

    score_mod = None if score == score_input("s") else _Program(score, tensors, ("s", "b", "h", "i", "j"))
    block_mask = None
    if keep != literal(True):
        axes = index_set(keep)
        block_mask = create_block_mask(
            _function(_Program(keep, tensors, ("b", "h", "i", "j"))),
            shard.batch if "b" in axes else None,
            shard.heads if "h" in axes else None,
            shard.q_len,
            shard.kv_len,
            device=str(inputs.q.device),
        )
    torch.compiler.reset()  # it stops compiling after eight masks
    compiled = torch.compile(
        partial(
            flex_attention,
            score_mod=None if score_mod is None else _function(score_mod),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=shard.group > 1,
        ),
        dynamic=False,
        fullgraph=True,
    )

    def run(q: Tensor, k: Tensor, v: Tensor, named: Arguments) -> Tensor:  # noqa: ARG001 - score_mod holds them
        o = compiled(q, k, v)
        assert isinstance(o, Tensor)
        return o

    start = time.perf_counter()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its compiler's notices about itself
            run(inputs.q, inputs.k, inputs.v, {})
    except Exception as error:  # whatever its compiler raises: most are internal to it
        said = " ".join(str(error).split())[:200]
        raise Inexpressible(f"it does not compile: {type(error).__name__}: {said}") from error
    no_backward = NO_BACKWARD if inputs.q.device.type == "cpu" else None
    return Peer(run, no_backward=no_backward, first_call_seconds=time.perf_counter() - start)


def _check_expressible(spec: AttentionSpec) -> None:
    if not spec.weights.form.exponential:
        raise Inexpressible("it computes softmax weights only")
    if spec.weights.sink is not None:
        raise Inexpressible("it has no sinks")
    if spec.dropout is not None:
        raise Inexpressible("it has no dropout")
    if any(getattr(node, "op", "") == "hash" for node in walk(spec.score, spec.mask, *_layout(spec))):
        raise Inexpressible(
            "its compiler writes shared terms out again each time, and does not come to an end with a hash"
        )


def _layout(spec: AttentionSpec) -> tuple[Expr, ...]:
    return () if spec.layout is None else (spec.layout.keep,)


def _known(spec: AttentionSpec, inputs: Inputs, shard: Shard) -> dict[Expr, Expr]:
    """Sizes and params as the numbers that they are in this call, and derived indices as what they derive from."""
    sizes = shard.sizes(inputs.q.shape[-1], inputs.v.shape[-1])
    known: dict[Expr, Expr] = {size(name): literal(value) for name, value in sizes.items()}
    values = param_values(spec, {name: float(x) for name, x in inputs.params.items()}, sizes)
    for param in spec.params:
        value = values[param.name]
        number: bool | int | float = value if param.type is ScalarType.FLOAT else int(value)
        if param.type is ScalarType.BOOL:
            number = bool(value)
        known[Symbol(param.type, name=param.name, kind=SymbolKind.PARAM)] = literal(number)
    known[index("hkv")] = apply("floordiv", index("h"), literal(shard.group)) if shard.group > 1 else index("h")
    if spec.layout is not None:
        for block, position in (("I", "i"), ("J", "j")):
            symbol = Symbol(ScalarType.INT, name=block, kind=SymbolKind.BLOCK)
            known[symbol] = apply("floordiv", index(position), literal(spec.layout.block))
    return known


def _squared_distance() -> Expr:
    """‖q − k‖² = |q|² + |k|² − 2 q·k, from norms that are captured."""
    of_q, of_k = (
        Load(ScalarType.FLOAT, tensor=name, indices=tuple(index(axis) for axis in axes))
        for name, axes in zip(_SQUARES, (("b", "h", "i"), ("b", "hkv", "j")), strict=True)
    )
    return apply("sub", apply("add", of_q, of_k), apply("mul", literal(2.0), score_input("dot")))


class _Program:
    """An expression as a line of steps, each an operator's meaning over earlier results: what a tracer unrolls."""

    def __init__(self, root: Expr, tensors: Mapping[str, Tensor], inputs: tuple[str, ...]) -> None:
        nodes = list(walk(root))
        wraps = any(_mixes_bits(node) for node in nodes)
        space = _FlexNamespace(torch.float32)
        slots: dict[Expr, int] = {}
        self.inputs = len(inputs)
        self.casts = wraps
        self.steps: list[tuple[_Meaning, tuple[int, ...]]] = []
        for node in nodes:
            match node:
                case Symbol(name=name) if name in inputs:
                    slots[node] = inputs.index(name)
                    continue
                case Literal(value=value):
                    step: _Meaning = partial(_constant, value)
                case Load(tensor=name, indices=indices):
                    step = partial(_load, tensors[name], tuple(not isinstance(x, Symbol) for x in indices))
                case _:
                    step = _step(node, space, wraps=wraps)
            self.steps.append((step, tuple(slots[child] for child in node.children)))
            slots[node] = self.inputs + len(self.steps) - 1
        self.result = slots[root]


def _function(program: _Program) -> Callable[..., Tensor]:
    """The program as a function of tensors; FlexAttention counts its parameters."""
    steps, result, casts = tuple(program.steps), program.result, program.casts

    def evaluate(*given: Tensor) -> Tensor:
        values: list[Any] = [x if x.is_floating_point() or not casts else x.to(torch.int64) for x in given]
        for meaning, places in steps:
            values.append(meaning(*[values[place] for place in places]))
        value = values[result]
        return value if isinstance(value, Tensor) else torch.full_like(given[-1], value, dtype=torch.float32)

    if program.inputs == 4:
        return lambda b, h, i, j: evaluate(b, h, i, j)  # noqa: PLW0108 - its parameters are counted
    return lambda s, b, h, i, j: evaluate(s, b, h, i, j)  # noqa: PLW0108 - its parameters are counted


def _step(node: Expr, space: TorchNamespace, *, wraps: bool) -> _Meaning:
    op: str = getattr(node, "op", "")
    if op not in OPERATORS:
        raise Inexpressible(f"its score_mod cannot read {node!r}")
    by_number = op not in {"floordiv", "mod"} or (isinstance(node.children[1], Literal) and node.children[1].value != 0)
    if op in _AS_WRITTEN and by_number and not (wraps and node.type is ScalarType.INT):
        return _AS_WRITTEN[op]
    return partial(OPERATORS[op].meaning, space)


def _constant(value: float) -> float:
    return value


def _load(tensor: Tensor, clamps: tuple[bool, ...], *indices: Any) -> Tensor:
    """One element; computed indices are clamped, as they may lie outside at masked pairs."""
    places = [
        torch.clamp(place, 0, length - 1) if clamp and isinstance(place, Tensor) else place
        for place, length, clamp in zip(indices, tensor.shape, clamps, strict=True)
    ]
    return tensor[tuple(places)] if places else tensor


def _mixes_bits(node: Expr) -> bool:
    if isinstance(node, Literal):
        return node.type is ScalarType.INT and abs(node.value) > _LARGE
    op = getattr(node, "op", "")
    by_variable = op in {"floordiv", "mod"} and not isinstance(node.children[1], Literal)
    return op in _MIXES_BITS or by_variable
