"""How the op of a spec is called: its operator schema, and keyword arguments to positions.

In: an ``AttentionSpec`` and a kind of call. Out: a ``Signature``. Positions are q, k, v, the captured tensors, the
params, then seed and dropout_p where the spec has dropout, the tensors and the numbers of the kind (offsets), and
deterministic.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashgen.ir.spec import MAX_CAPTURED, OP_ARGUMENTS, OPTIONS, AttentionSpec, CapturedTensor, Param
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.kinds.cached import CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind
from flashgen.kinds.operand import F8_CODE
from flashgen.kinds.ragged import RAGGED

# What other libraries' calls are told, and the statement of a spec that says it here.
STATEMENTS = {
    "is_causal": "mask causal", "causal": "mask causal", "attn_mask": "mask", "mask": "mask", "mask_mod": "mask",
    "block_mask": "mask", "window_size": "mask window_left(w)", "score_mod": "score", "attn_bias": "score",
    "alibi_slopes": "score", "softcap": "score softcap(s, c)", "scale": "scale", "softmax_scale": "scale",
}  # fmt: skip
TORCH_DTYPES = {
    ElementType.F32: torch.float32,
    ElementType.F16: torch.float16,
    ElementType.BF16: torch.bfloat16,
    ElementType.F8E4M3: torch.float8_e4m3fn,
    ElementType.I32: torch.int32,
    ElementType.I64: torch.int64,
    ElementType.BOOL: torch.bool,
}
F8 = torch.float8_e4m3fn
# The codes of element types in ``struct Arguments``.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: F8_CODE}


@dataclass(frozen=True)
class Signature:
    """What a call may pass, and where it goes.

    ``names``: the captured names, tensors, then params; ``dtypes``: the types that they are declared in.
    ``takes_more``: than q, k and v. ``inputs``: the number of arguments that may receive a gradient (q, k, v, tensors,
    params), ``inputs_by_name`` what these are called. ``fixed``: positions and declarations of the
    captured values that receive none. ``tensor_arguments``: the number of leading arguments that are tensors or None
    (the inputs, then seed and dropout_p, then those of the kind). ``without_gradient``: the gradients of all behind the
    inputs.

    All is computed here and at once: torch.compile traces what a call reads, and cannot trace a property that fills
    itself under a lock.
    """

    tensors: tuple[CapturedTensor, ...]
    params: tuple[Param, ...]
    has_dropout: bool
    has_lse: bool
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    takes_more: bool
    inputs: int
    inputs_by_name: tuple[str, ...]
    fixed: tuple[tuple[int, str], ...]
    tensor_arguments: int
    without_gradient: tuple[None, ...]
    kind: Kind
    o: torch.dtype | None

    @classmethod
    def of(cls, spec: AttentionSpec, kind: Kind = DENSE) -> Signature:
        """The signature of a spec. Raises ``ValueError`` where a captured name is one of the op's own arguments."""
        captured: tuple[CapturedTensor | Param, ...] = (*spec.tensors, *spec.params)
        for each in captured:
            if each.name in OP_ARGUMENTS:
                raise ValueError(f"'{each.name}' is an argument of every op; the spec has to call it otherwise")
        if len(captured) > MAX_CAPTURED:
            raise ValueError(f"'{spec.name}' captures {len(captured)} values; an op can take {MAX_CAPTURED} at most")
        drawn = 0 if spec.dropout is None else 2
        names = tuple(each.name for each in captured)
        return cls(
            tensors=spec.tensors,
            params=spec.params,
            has_dropout=spec.dropout is not None,
            has_lse=spec.weights.form.normalised,
            names=names,
            dtypes=(*(TORCH_DTYPES[each.element] for each in spec.tensors), *(dtype_of(each) for each in spec.params)),
            takes_more=bool(captured) or drawn > 0,
            inputs=3 + len(captured),
            inputs_by_name=("q", "k", "v", *names),
            fixed=tuple((n, _declaration(each)) for n, each in enumerate(captured, start=3) if not each.grad),
            tensor_arguments=3 + len(captured) + drawn + len(kind.tensors),
            without_gradient=(None,) * (drawn + len(kind.tensors)),
            kind=kind,
            o=None if kind.o is None else TORCH_DTYPES[kind.o],
        )

    @property
    def forward_schema(self) -> str:
        """The schema of the forward operator, without its name."""
        return f"({self._arguments}) -> {'(Tensor, Tensor, Tensor)' if self.has_lse else 'Tensor'}"

    @property
    def backward_schema(self) -> str:
        """The schema of the backward operator: it returns the gradients that ``needs`` asks for, in order."""
        lse = ", Tensor? d_lse, Tensor o, Tensor lse, Tensor lse_parts" if self.has_lse else ""
        return f"(Tensor d_o{lse}, {self._arguments}, bool[] needs) -> Tensor[]"

    @property
    def _arguments(self) -> str:
        parts = ["Tensor q, Tensor k, Tensor v"]
        parts += [f"Tensor tensor_{tensor.name}" for tensor in self.tensors]
        parts += [f"Tensor? param_{param.name}" for param in self.params]
        if self.has_dropout:
            parts.append("Tensor? seed, Tensor? dropout_p")
        parts += [f"Tensor {name}" for name in self.kind.tensors]
        return ", ".join([*parts, self.kind.schema, "bool deterministic"])

    def bind(self, given: dict[str, object]) -> list[object]:
        """Captured values by name, in order; None where a param takes its default. Empties ``given``.

        Raises ``TypeError`` for names that the spec does not have.
        """
        values = [given.pop(name, None) for name in self.names]
        if given:
            raise self._unknown(next(iter(given)))
        return values

    def by_position(self, taken: str, spare: Sequence[object]) -> TypeError:
        """The error of a call with more by position than the arguments that are ``taken`` so."""
        count = len(spare)
        more = f"{taken} are given by position, and {count} more {'was' if count == 1 else 'were'}"
        if self.names:
            named = ", ".join(f"{name}=…" for name in self.names)
            return TypeError(f"{more}: pass what the spec captures by name, {named}")
        return TypeError(
            f"{more}: the spec captures nothing, and options have names. What other libraries pass here, a mask or a "
            "scale, is a statement of the spec, as in `mask causal`"
        )

    def _unknown(self, name: str) -> TypeError:
        unknown = f"unknown argument '{name}'"
        if name in OPTIONS:
            return TypeError(f"{unknown}: dense calls take it, this one does not")
        for method, kind in (("varlen", RAGGED), ("decode", CACHED)):
            if name in (*kind.tensors, *kind.numbers):
                return TypeError(f"{unknown}: op.{method} takes it, this call does not")
        near = difflib.get_close_matches(name, [*self.names, *OPTIONS], n=2)
        if name in STATEMENTS:
            return TypeError(f"{unknown}: the spec says this, by its statement `{STATEMENTS[name]}`")
        if near:
            return TypeError(f"{unknown}; did you mean {' or '.join(repr(each) for each in near)}?")
        declared = ", ".join(repr(each) for each in self.names)
        captures = f"declares {declared}" if declared else "captures nothing: it declares no tensor and no param"
        return TypeError(f"{unknown}. The spec {captures}")


def dtype_of(param: Param) -> torch.dtype:
    """The type of the 0-dim tensor that a param is."""
    return torch.int32 if param.type is ScalarType.INT else torch.float32


def kind(param: Param) -> str:
    """A param's type as the language spells it."""
    return "i32" if param.type is ScalarType.INT else "f32"


def describe_tensor(tensor: CapturedTensor) -> str:
    """A tensor's declaration as the language spells it: ``f32[H, Nk]``."""
    return f"{tensor.element}[{', '.join(text(size) for size in tensor.shape)}]"


def _declaration(captured: CapturedTensor | Param) -> str:
    if isinstance(captured, Param):
        return f"param {captured.name}: {kind(captured)}"
    return f"tensor {captured.name}: {describe_tensor(captured)}"
