"""The same call through what users of other libraries call: flex, flash and modules, bit for bit as the op's.

In: an op, the arguments of a drawn call. Out: a function like the op. A door that cannot say a spec raises
``NotExpressibleError`` with what it cannot. What is drawn is what doors can say more often than chance would.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashgen.flash import flash_attn_func
from flashgen.flex import create_block_mask, flex_attention
from flashgen.ir.expr import Symbol, SymbolKind
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ScalarType
from flashgen.language import parse_text
from flashgen.nn import Attention
from flashgen.op.op import AttentionOp
from flashgen.reference.dense import param_values
from tools.fuzz.draws import Build, CallDraw, Draw, Machine, draw
from tools.fuzz.inputs import Arguments
from tools.fuzz.mods import NotExpressibleError, in_mods, mods_text
from tools.fuzz.nodes import SpecDraw, Statement

Door = Callable[..., Any]
Given = Mapping[str, Any]

# -- what is drawn -----------------------------------------------------------------------------------------------------

_NOT_OF_MODS = frozenset(("weights", "dropout", "select", "dtype", "schedule", "scale"))
_SCALE = "scale_of_the_call"
_UNKNOWN_TO_MODS = re.compile(r"\b(dot|sqdist|hash|popcount|random_blocks|butterfly)\b")
# As FlashAttention says it: the op's text has the same numbers as params.
_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "scaling": "param scaling: f32 = {}",
        "cap": "param cap: f32 = {}",
        "left": "param left: i32 = {}",
        "right": "param right: i32 = {}",
        "slopes": "tensor slopes: f32[B, H] grad",
        "sinks": "tensor sinks: f32[H] grad",
    }
)
_CORNER = "i + Nk - Nq"


def draw_through_doors(seed: int, machine: Machine) -> Draw:
    """The spec and the calls of a seed, each through a door that can say it, but for what chance draws all the same."""
    chance = random.Random(f"doors {machine} {seed}")
    door = chance.choice(("flex", "flex", "nn", *(["flash"] if machine.backend != "tiled" else [])))
    drawn = draw(seed, machine)
    while door == "flex" and _UNKNOWN_TO_MODS.search(drawn.case.text):
        drawn = draw(chance.randrange(2**31), machine)
    spec = drawn.spec
    assert spec is not None
    if door == "flex":
        kept = [each for each in spec.statements if each.word not in _NOT_OF_MODS]
        scaled = any(each.word == "scale" for each in spec.statements)
        kept += [Statement("param", f"param {_SCALE}: f32 = 0.3", (), _SCALE), Statement("scale", f"scale {_SCALE}")]
        spec = dataclasses.replace(spec, statements=tuple(kept if scaled else kept[:-2])).tidied()
    elif door == "flash":
        spec = _flash_spec(chance)
    calls = tuple(_through(each, door) for each in drawn.calls[:2])
    return Draw(spec, calls, machine, Build())


def _through(call: CallDraw, door: str) -> CallDraw:
    """A dense call of the first order that repeats; a part of a whole through modules alone."""
    is_part = door == "nn"
    return CallDraw(
        head_dim=call.head_dim,
        dtype=call.dtype,
        shape=call.shape,
        starts=call.starts if is_part else (0, 0, 0, 0),
        more=call.more if is_part else (0, 0, 0, 0),
        totals=call.totals and is_part,
        seed=call.seed,
        spread=call.spread,
        views=call.views,
        extremes=call.extremes,
        dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed,
        deterministic=True,
        threads=call.threads,
        wants=call.wants,
        door=door,
    )


def _flash_spec(chance: random.Random) -> SpecDraw:
    """Any of FlashAttention's options, with any others."""
    given = [name for name in _NUMBERS if name == "scaling" or chance.random() < 0.4]
    causal = chance.random() < 0.5
    values = {
        "scaling": chance.choice(("0.3", "0.125", "1 / sqrt(float(D))")), "cap": chance.choice(("2.5", "30.0")),
        "left": chance.choice(("0", "3", "17", "70")), "right": chance.choice(("1", "5", "40")),
    }  # fmt: skip
    given = [name for name in given if not (causal and name == "right")]
    head_dim = chance.choice(("16", "32", "64", "24", "32/16", "128"))
    declared = [Statement("param", _NUMBERS[name].format(values.get(name, "")), (), name) for name in given]
    statements = [Statement(text.split()[0], text, (), "") for text in _flash_body(given, causal)]
    return SpecDraw("drawn", head_dim, (*declared, *statements))


def _flash_body(given: Any, causal: bool) -> Iterator[str]:
    """The statements that FlashAttention's options mean."""
    score = "cap * tanh(s / cap)" if "cap" in given else "s"
    score += f" - slopes[b, h] * abs({_CORNER} - j)" if "slopes" in given else ""
    right = [f"j <= {_CORNER}"] if causal else [f"j <= {_CORNER} + right"] if "right" in given else []
    conditions = [*right, *([f"j >= {_CORNER} - left"] if "left" in given else [])]
    yield from ("scale scaling", f"score {score}", f"mask {' and '.join(conditions) or 'true'}")
    if "sinks" in given:
        yield "weights softmax(sink = sinks[h])"


# -- doors -------------------------------------------------------------------------------------------------------------


def through_door(op: AttentionOp, spec: AttentionSpec, values: Arguments, door: str) -> Door:
    """A function of q, k, v and what is named, as the op is one. Raises ``NotExpressibleError``."""
    return {"flex": _flex, "flash": _flash, "nn": _module}[door](op, spec, values)


def _backend(op: AttentionOp) -> str:
    """By which name doors are asked for the op's own."""
    return next(iter(op.backends), "reference")


def _numbers(spec: AttentionSpec, values: Arguments, q: Tensor, v: Tensor, named: Given) -> dict[str, Any]:
    """Every param, the learned ones as they come, the others as numbers."""
    sizes = values.shard.sizes(q.shape[-1], v.shape[-1])
    plain = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in values.inputs.params.items()}
    return param_values(spec, plain, sizes) | {
        param.name: named[param.name] for param in spec.params if param.name in named
    }


def _flex(op: AttentionOp, spec: AttentionSpec, values: Arguments) -> Door:
    code = compile(mods_text(spec), "<mods of a spec>", "exec")

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, deterministic: bool = False, **named: Any
    ) -> Any:
        sizes = values.shard.sizes(q.shape[-1], v.shape[-1])
        numbers = _numbers(spec, values, q, v, named)
        space: dict[str, Any] = {"torch": torch, **{name: torch.tensor(size) for name, size in sizes.items()}}
        for param in spec.params:
            dtype = torch.float32 if param.type is ScalarType.FLOAT else torch.int32
            space[in_mods(param.name)] = torch.as_tensor(numbers[param.name], dtype=dtype)
        space |= {in_mods(tensor.name): named[tensor.name] for tensor in spec.tensors}
        if not all(named[tensor.name].numel() for tensor in spec.tensors):
            raise NotExpressibleError("flex: a tensor without entries is read as 0 by specs alone")
        exec(code, space)  # noqa: S102 - printed from a spec by this module
        mask = None
        if "mask_mod" in space:
            mask = create_block_mask(space["mask_mod"], None, None, q.shape[2], k.shape[2])
        return flex_attention(
            q, k, v, space.get("score_mod"), mask, _scale_of(spec, numbers), enable_gqa=True,
            return_lse=return_lse, deterministic=deterministic, backend=_backend(op),
        )  # fmt: skip

    return attention


def _scale_of(spec: AttentionSpec, numbers: Given) -> float | None:
    """The scale where a spec says one. Raises ``NotExpressibleError`` unless that is a number of the call."""
    if not any(each.keyword == "scale" for each in spec.statements):
        return None
    match spec.scale:
        case Symbol(name=name, kind=SymbolKind.PARAM) if not isinstance(numbers[name], Tensor):
            return float(numbers[name])
    raise NotExpressibleError("flex: a scale that is no number of the call")


def _flash(op: AttentionOp, spec: AttentionSpec, values: Arguments) -> Door:
    if _backend(op) == "reference":
        raise NotExpressibleError("flash: no kernels, and it takes no backend")
    causal = flash_options(spec)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, deterministic: bool = False, **named: Any
    ) -> Any:
        numbers = _numbers(spec, values, q, v, named)
        options: dict[str, Any] = {
            "softmax_scale": numbers["scaling"],
            "causal": causal,
            "window_size": (numbers.get("left", -1), numbers.get("right", -1)),
            "softcap": numbers.get("cap", 0.0),
            "alibi_slopes": named.get("slopes"),
            "s_aux": named.get("sinks"),
            "deterministic": deterministic,
            "return_attn_probs": return_lse,
        }
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        result = flash_attn_func(q, k, v, **options)
        return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)

    return attention


def flash_options(spec: AttentionSpec) -> bool:
    """Whether FlashAttention's call of a spec is causal. Raises ``NotExpressibleError`` where there is none."""
    given = {*(param.name for param in spec.params), *(tensor.name for tensor in spec.tensors)}
    plain = spec.dropout is None and spec.select is None and spec.layout is None
    if plain and given <= set(_NUMBERS) and not any(param.grad for param in spec.params):
        declared = [text.format("1") for name, text in _NUMBERS.items() if name in {*given, "scaling"}]
        for causal in (True, False):
            text = "\n".join([*declared, *_flash_body(given, causal)])
            (said,) = parse_text(f"attention said {{ head_dim {spec.head_dims[0]} {text} }}").specs
            if _meaning(said) == _meaning(spec):
                return causal
    raise NotExpressibleError("flash: not what FlashAttention's options say")


def _meaning(spec: AttentionSpec) -> tuple[object, ...]:
    return spec.scale, spec.score, spec.mask, spec.weights


def _module(op: AttentionOp, spec: AttentionSpec, values: Arguments) -> Door:
    def attention(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        head_dim = (q.shape[-1], v.shape[-1])
        given = {param.name: 0.0 for param in spec.params if param.grad}  # for those without a default
        whole = values.shard.totals()[1]
        heads = (whole, max(whole // values.shard.group, 1))
        module = Attention(op, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, initial=given)
        owned = {name: named.pop(name) for name, _ in list(module.named_parameters()) if name in named}
        for name, own in module.named_parameters():
            if name in owned:
                owned[name] = owned[name].view(own.shape)
        return torch.func.functional_call(module, owned, (q, k, v), named)

    return attention
