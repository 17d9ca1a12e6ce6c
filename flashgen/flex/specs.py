"""From traced mods to an ``AttentionSpec``: names, shapes, gradients.

In: a ``Traced``, names, shapes. Out: the spec and its text. The expressions are the traced ones; no text is parsed.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashgen.flex.places import function_of
from flashgen.flex.shapes import Shapes
from flashgen.flex.tracing import Mod, Traced
from flashgen.flex.values import folded
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, literal, rewrite, score_input, walk
from flashgen.ir.spec import DEFAULT_SCALE, OP_ARGUMENTS, AttentionSpec, CapturedTensor, HeadDim, Param, Schedule
from flashgen.ir.text import with_text
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import Weights
from flashgen.language.names import BUILTINS, WEIGHT_FORMS
from flashgen.language.words import RESERVED

_PRELUDE = frozenset(("causal", "causal_lower_right"))
_TAKEN = frozenset((*OP_ARGUMENTS, *BUILTINS, *WEIGHT_FORMS, *RESERVED, *_PRELUDE, *keyword.kwlist))
SCALE = "scaling"
# So large that exp leaves nothing of what is below a row's maximum, and lse nothing of how often that is there.
FACTOR = 2.0**60


@dataclass(frozen=True)
class Shell:
    """The rest of a spec, beside what its mods compute.

    ``scaled``: the scale is a param. ``names`` are those of tensors, then params; ``defaults`` the defaults of params.
    ``maxima``: scores are multiplied by ``FACTOR``, so that lse is ``FACTOR`` times the row's maximum.
    """

    name: str
    head_dim: HeadDim
    names: tuple[str, ...]
    scaled: bool = False
    defaults: tuple[int | float | None, ...] = ()
    maxima: bool = False


def make_spec(traced: Traced, shell: Shell, shapes: Shapes, learned: Sequence[bool]) -> AttentionSpec:
    """The spec. ``learned`` says which tensors, then which params, receive gradients."""
    count = len(traced.tensors)
    tensor_names, param_names = shell.names[:count], shell.names[count:]
    extents = {f"t{slot}.{axis}": extent for slot, shape in enumerate(shapes) for axis, extent in enumerate(shape)}
    named = _renaming(tensor_names, param_names, extents)
    score = score_input("s") if traced.score is None else named(traced.score)
    defaults = shell.defaults or (None,) * len(param_names)
    params = [
        Param(name, kind, None if default is None else literal(default), grad)
        for name, kind, default, grad in zip(param_names, traced.params, defaults, learned[count:], strict=True)
    ]
    scale: Expr = DEFAULT_SCALE
    if shell.scaled:
        params.append(Param(SCALE, ScalarType.FLOAT, None, grad=False))
        scale = Symbol(ScalarType.FLOAT, name=SCALE, kind=SymbolKind.PARAM)
    spec = AttentionSpec(
        name=shell.name,
        head_dims=(shell.head_dim,),
        dtypes=None,
        takes_f8=True,
        constants=(),
        params=tuple(params),
        tensors=tuple(
            CapturedTensor(name, element, shape, grad)
            for name, element, shape, grad in zip(tensor_names, traced.tensors, shapes, learned, strict=False)
        ),
        scale=scale,
        score=apply("mul", score, literal(FACTOR)) if shell.maxima else score,
        mask=literal(True) if traced.mask is None else named(traced.mask),
        layout=None,
        weights=Weights(),
        dropout=None,
        schedule=Schedule(),
        statements=(),
        sources=(),
    )
    return with_text(spec, "<flex>")


def _renaming(tensors: Sequence[str], params: Sequence[str], extents: dict[str, Expr]) -> Callable[[Expr], Expr]:
    def rule(node: Expr) -> Expr:
        if isinstance(node, Load):
            return replace(node, tensor=tensors[int(node.tensor[1:])])
        if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM:
            return replace(node, name=params[int(node.name[1:])])
        if isinstance(node, Symbol) and node.name in extents:
            return extents[node.name]
        if isinstance(node, Apply) and all(isinstance(arg, Literal) for arg in node.args):
            return folded(node)  # a length that turned out to be a constant
        return node

    return lambda expr: rewrite(expr, rule)


@functools.lru_cache(maxsize=256)
def differentiable(traced: Traced) -> tuple[bool, ...]:
    """For each tensor, then each param: whether a score reads it as a float, outside of conditions."""
    read: set[str] = set()
    if traced.score is not None:
        for node in walk(traced.score):
            if isinstance(node, Load) and node.type is ScalarType.FLOAT:
                read.add(node.tensor)
            elif isinstance(node, Symbol) and node.kind is SymbolKind.PARAM and node.type is ScalarType.FLOAT:
                read.add(node.name)
    return tuple(name in read for name in plain_names(traced))


# -- names -------------------------------------------------------------------------------------------------------------


def plain_names(traced: Traced) -> tuple[str, ...]:
    """Names that do not depend on the user's, so that equal mods share an op."""
    tensors = (f"t{number}" for number in range(len(traced.tensors)))
    return (*tensors, *(f"p{number}" for number in range(len(traced.params))))


def user_names(traced: Traced, given: Sequence[str]) -> tuple[str, ...]:
    """The user's names, where the language admits them."""
    found: list[str] = []
    for name, plain in zip(given, plain_names(traced), strict=True):
        base = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII).strip("_")
        base = base or ("tensor" if plain.startswith("t") else "param") + plain[1:]
        while base in _TAKEN or base in found or base == SCALE:
            base += "_"
        found.append(base)
    return tuple(found)


def check_name(name: object) -> None:
    """Raise ``ValueError`` for what cannot be the name of a spec and of its op."""
    is_one = isinstance(name, str) and name.isidentifier() and name.isascii()
    if not is_one or name in RESERVED or keyword.iskeyword(str(name)):
        raise ValueError(
            f"'name' is {name!r}; letters, digits and '_' are expected that begin with no digit and are no word of "
            "the language or of Python"
        )


def name_of(score_mod: Mod | None, mask_mod: Mod | None) -> str:
    """A name for the attention of these mods."""
    functions = [function_of(mod) for mod in (score_mod, mask_mod) if mod is not None]
    parts = [str(getattr(each, "__name__", type(each).__name__)).replace("<lambda>", "lambda_") for each in functions]
    name = re.sub(r"\W+", "_", "_".join(dict.fromkeys(parts)), flags=re.ASCII).strip("_")[:60] or "attention_"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in RESERVED or keyword.iskeyword(name) else name
