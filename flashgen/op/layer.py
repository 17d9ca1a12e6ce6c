"""What one attention layer asks for, as other libraries' arguments say it, and the op that gives it.

In: a ``Layer``: which terms its scores have, which pairs it keeps. Out: the text of a spec, and its op, compiled once
for each structure: numbers (cap, window, slopes …, and a scale that is not 1/√D) are params and captured tensors, never
part of the text.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashgen.op.loading import loads

# Where keys and queries end together: query i is the key of this position. The first is the second where there are as
# many queries as keys, in every sequence; its kernels need fewer registers.
SQUARE, LOWER_RIGHT = "i", "i + Nk - Nq"


class Layer(NamedTuple):
    """One attention layer.

    ``head_dim`` is (D, Dv). ``mask`` is the condition that keeps a pair, in the language, and ``declarations`` the
    ``tensor`` and ``param`` statements of what it reads. ``bias`` is the shape of a tensor that is added to the scores,
    of which each dimension is its size or 1: ``("1", "H", "Nq", "Nk")``. Captured by name, where they are asked for:
    ``scaling``, ``cap``, ``slopes`` ([B, H]), ``bias``, ``sinks`` ([H]). Without ``scaling`` the scale is 1/√D.
    ``place`` is the key that query i is: ``slopes`` count from there.
    """

    head_dim: tuple[int, int]
    scaling: bool = False
    softcap: bool = False
    slopes: bool = False
    bias: tuple[str, ...] | None = None
    sinks: bool = False
    dropout: bool = False
    mask: str = "true"
    declarations: tuple[str, ...] = ()
    place: str = LOWER_RIGHT

    def text(self) -> str:
        """The spec."""
        lines = [f"head_dim {self.head_dim[0]}/{self.head_dim[1]}", *self.declarations]
        score = "s"
        if self.scaling:
            lines += ["param scaling: f32", "scale scaling"]
        if self.softcap:
            lines.append("param cap: f32")
            score = "cap * tanh(s / cap)"
        if self.slopes:
            lines.append("tensor slopes: f32[B, H] grad")
            score += f" - slopes[b, h] * abs({self.place} - j)"
        if self.bias is not None:
            lines.append(f"tensor bias: f32[{', '.join(self.bias)}] grad")
            score += f" + {element('bias', self.bias)}"
        lines += [f"score {score}", f"mask {self.mask}"]
        if self.sinks:
            lines += ["tensor sinks: f32[H] grad", "weights softmax(sink = sinks[h])"]
        if self.dropout:
            lines.append("dropout 0.0")
        return "attention layer {\n" + "".join(f"    {line}\n" for line in lines) + "}\n"

    def op(self) -> Any:
        """The op, compiled on the first use of its structure. Raises ``SpecError`` where no target takes the spec."""
        if torch.compiler.is_compiling():
            return getattr(_OPS, _compiled(self.text()))
        op = _BY_LAYER.get(self)
        if op is None:
            op = _BY_LAYER[self] = getattr(_OPS, _compiled(self.text()))
        return op


# The ops, by layers and by names that texts have here. Attributes, as torch.compile looks at each when it is asked for.
_BY_LAYER: dict[Layer, Any] = {}
_OPS = SimpleNamespace()
_NAMES: dict[str, str] = {}
_LOCK = threading.Lock()


# A constant for torch.compile: nothing of the compiler is traced.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled(text: str) -> str:
    """The name among ``_OPS`` of the op of a text."""
    with _LOCK:
        name = _NAMES.get(text)
        if name is None:
            name = f"op{len(_NAMES)}"
            setattr(_OPS, name, loads(text))
            _NAMES[text] = name
        return name


def scale_of(scaling: Any, width: int) -> dict[str, Any]:
    """The captured scale of a layer whose head dimension D is ``width``: none for 1/√D, which kernels have by name.

    Two scales that are one float32 are one scale, as kernels read float32.
    """
    usual = 1 / math.sqrt(width)
    is_usual = scaling is None or (type(scaling) is float and abs(scaling - usual) <= usual * 2**-25)
    return {} if is_usual else {"scaling": scaling}


def broadcast(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    """How a tensor of this shape is declared that broadcasts to [B, H, Nq, Nk] = ``sizes``."""
    rows = [
        # One query or key is no dimension of 1: the next call may have more of them.
        "1" if length == 1 and (name in "BH" or known > 1) else name
        for length, known, name in zip(shape, sizes, ("B", "H", "Nq", "Nk"), strict=True)
    ]
    return tuple(rows)


def element(name: str, shape: tuple[str, ...]) -> str:
    """What a pair reads of a tensor that is declared with a ``broadcast`` shape."""
    places = zip(shape, ("b", "h", "i", "j"), strict=True)
    return f"{name}[{', '.join('0' if size == '1' else index for size, index in places)}]"


def conjunction(conditions: Iterable[str]) -> str:
    """The condition that all of them hold."""
    said = [each for each in dict.fromkeys(conditions) if each != "true"]
    return " and ".join([f"({each})" if " or " in each else each for each in said]) or "true"
