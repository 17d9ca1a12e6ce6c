"""How the op of a spec is called: its operator schema, and keyword arguments to positions.

In: an ``AttentionSpec``. Out: a ``Signature``. Positions are q, k, v, the captured tensors, the params,
then seed and dropout_p where the spec has dropout, the offsets, and deterministic.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param, Pointwise
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType

OPTIONS = (
    "return_lse", "dropout_p", "seed", "q_start", "kv_start", "b_start", "h_start",
    "q_total", "kv_total", "b_total", "h_total", "deterministic",
)  # fmt: skip
TORCH_DTYPES = {
    ElementType.F32: torch.float32,
    ElementType.F16: torch.float16,
    ElementType.BF16: torch.bfloat16,
    ElementType.I32: torch.int32,
    ElementType.I64: torch.int64,
    ElementType.BOOL: torch.bool,
}
_OFFSETS = (
    "SymInt q_start, SymInt kv_start, SymInt b_start, SymInt h_start, "
    "SymInt? q_total, SymInt? kv_total, SymInt? b_total, SymInt? h_total"
)


@dataclass(frozen=True)
class Signature:
    """What a call may pass, and where it goes.

    ``names``: the captured names, tensors, then params. ``takes_more``: than q, k and v. ``inputs``: the number of
    arguments that may receive a gradient (q, k, v, tensors, params). ``fixed``: positions and declarations of the
    captured values that receive none. ``tensor_arguments``: the number of leading arguments that are tensors or None
    (the inputs, then seed and dropout_p). ``without_gradient``: the gradients of these two, where there are any.

    All is computed here and at once: torch.compile traces what a call reads, and cannot trace a property that fills
    itself under a lock.
    """

    tensors: tuple[CapturedTensor, ...]
    params: tuple[Param, ...]
    has_dropout: bool
    has_lse: bool
    names: tuple[str, ...]
    takes_more: bool
    inputs: int
    fixed: tuple[tuple[int, str], ...]
    tensor_arguments: int
    without_gradient: tuple[None, ...]

    @classmethod
    def of(cls, spec: AttentionSpec) -> Signature:
        """The signature of a spec. Raises ``ValueError`` where a captured name is one of the op's own arguments."""
        captured: tuple[CapturedTensor | Param, ...] = (*spec.tensors, *spec.params)
        for each in captured:
            if each.name in (*OPTIONS, "q", "k", "v", "self"):
                raise ValueError(f"'{each.name}' is an argument of every op; the spec has to call it otherwise")
        drawn = 0 if spec.dropout is None else 2
        return cls(
            tensors=spec.tensors,
            params=spec.params,
            has_dropout=spec.dropout is not None,
            has_lse=not isinstance(spec.weights, Pointwise),
            names=tuple(each.name for each in captured),
            takes_more=bool(captured) or drawn > 0,
            inputs=3 + len(captured),
            fixed=tuple((n, _declaration(each)) for n, each in enumerate(captured, start=3) if not each.grad),
            tensor_arguments=3 + len(captured) + drawn,
            without_gradient=(None,) * drawn,
        )

    @property
    def forward_schema(self) -> str:
        """The schema of the forward operator, without its name."""
        return f"({self._arguments}) -> {'(Tensor, Tensor)' if self.has_lse else 'Tensor'}"

    @property
    def backward_schema(self) -> str:
        """The schema of the backward operator: it returns the gradients that ``needs`` asks for, in order."""
        lse = ", Tensor? d_lse, Tensor o, Tensor lse" if self.has_lse else ""
        return f"(Tensor d_o{lse}, {self._arguments}, bool[] needs) -> Tensor[]"

    @property
    def _arguments(self) -> str:
        parts = ["Tensor q, Tensor k, Tensor v"]
        parts += [f"Tensor tensor_{tensor.name}" for tensor in self.tensors]
        parts += [f"Tensor? param_{param.name}" for param in self.params]
        if self.has_dropout:
            parts.append("Tensor? seed, Tensor? dropout_p")
        return ", ".join([*parts, _OFFSETS, "bool deterministic"])

    def bind(self, given: dict[str, object]) -> list[object]:
        """Captured values by name, in order; None where a param takes its default. Empties ``given``.

        Raises ``TypeError`` for names that the spec does not have.
        """
        values = [given.pop(name, None) for name in self.names]
        if given:
            raise self._unknown(next(iter(given)))
        return values

    def tensor_argument(self, tensor: CapturedTensor, value: object) -> Tensor:
        """A captured tensor, or the ``TypeError`` that says what is missing."""
        if isinstance(value, Tensor):
            return value
        declared = describe_tensor(tensor)
        if value is None:
            raise TypeError(f"missing argument '{tensor.name}': the spec declares tensor {tensor.name}: {declared}")
        raise TypeError(
            f"argument '{tensor.name}' must be a tensor ({declared} in the spec), not {type(value).__name__}"
        )

    def param_argument(self, param: Param, value: object) -> Tensor | None:
        """A param as a 0-dim tensor, so that another value compiles nothing anew; None for its default."""
        if value is None:
            if param.default is None:
                raise TypeError(f"missing argument '{param.name}': the spec declares param {param.name}: {kind(param)}")
            return None
        if isinstance(value, Tensor):
            return value
        is_float = param.type is ScalarType.FLOAT and isinstance(value, (float, torch.SymFloat))
        if isinstance(value, bool) or not (is_float or isinstance(value, (int, torch.SymInt))):
            raise TypeError(
                f"argument '{param.name}' must be a number or a 0-dim tensor ({kind(param)} in the spec), "
                f"not {type(value).__name__}"
            )
        return as_scalar(value, torch.int32 if param.type is ScalarType.INT else torch.float32)

    def _unknown(self, name: str) -> TypeError:
        near = difflib.get_close_matches(name, [*self.names, *OPTIONS], n=2)
        hint = f"; did you mean {' or '.join(repr(each) for each in near)}?" if near else ""
        takes = f". The spec declares {', '.join(repr(each) for each in self.names)}" if self.names and not near else ""
        return TypeError(f"unknown argument '{name}'{hint}{takes}")


def as_scalar(value: object, dtype: torch.dtype) -> Tensor:
    """A Python number as a 0-dim tensor."""
    if torch.compiler.is_compiling():
        # The compiler keeps a number symbolic that meets a tensor in arithmetic, and specialises on any
        # other.
        return torch.zeros((), dtype=dtype) + value  # type: ignore[operator]
    return torch.scalar_tensor(value, dtype=dtype)  # type: ignore[arg-type]


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
