"""AttentionSpec: what one ``attention`` block means, typed and checked, free of any decision about how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashgen.diagnostics.diagnostic import Source, Span
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, literal, size
from flashgen.ir.types import ElementType, ScalarType
from flashgen.ir.weights import Weights

# Every op has these arguments beside what its spec declares: no tensor or param may be called like one of them.
OPTIONS = (
    "return_lse", "dropout_p", "seed", "q_start", "kv_start", "b_start", "h_start",
    "q_total", "kv_total", "b_total", "h_total", "deterministic", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
# What a spec may capture, tensors and params together: operators of PyTorch have 64 arguments at most, and operators
# of 8-bit calls and of caches have up to 23 of their own.
MAX_CAPTURED = 40
OP_ARGUMENTS = frozenset((*OPTIONS, "q", "k", "v", "o", "lse", "dtype", "backend", "self"))
DEFAULT_SCALE = apply("div", literal(1.0), apply("sqrt", size("D")))


@dataclass(frozen=True)
class HeadDim:
    """Head dimensions of queries and keys (``qk``) and of values (``v``)."""

    qk: int
    v: int

    def __str__(self) -> str:
        return str(self.qk) if self.qk == self.v else f"{self.qk}/{self.v}"


@dataclass(frozen=True)
class Param:
    """A run-time scalar argument. ``default`` ranges over sizes, constants and earlier params; None: required."""

    name: str
    type: ScalarType
    default: Expr | None
    grad: bool
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CapturedTensor:
    """A run-time tensor argument; ``shape`` holds int expressions over sizes and constants.

    ``made_of``: a call makes it of the captured tensor of this name, which is what users know. ``of_tiles``: what a
    mask reads of it follows from what else the mask asks of a pair, and says more of a tile.
    """

    name: str
    element: ElementType
    shape: tuple[Expr, ...]
    grad: bool
    span: Span | None = field(default=None, compare=False)
    made_of: str | None = None
    of_tiles: bool = False


@dataclass(frozen=True)
class Layout:
    """Block sparsity: ``keep`` is boolean over I, J (and b, h, tensors); block (I, J) covers i // block, j // block."""

    block: int
    keep: Expr


@dataclass(frozen=True)
class Select:
    """Lists of key blocks: a pair is kept where j // block is among the elements ``tensor[*indices, :]``.

    ``indices`` are int expressions over b, h, hkv, i, sizes, params and loads, one for each dimension but the last. A
    number that no block has (-1) is none; one that is named twice counts once.
    """

    block: int
    tensor: str
    indices: tuple[Expr, ...]
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Schedule:
    """Planner decisions that the spec pins; None leaves the planner free. Never changes a result."""

    Br: int | None = None
    Bc: int | None = None
    warps: int | None = None
    stages: int | None = None
    backward_Br: int | None = None
    backward_Bc: int | None = None
    backward_warps: int | None = None
    backward_stages: int | None = None
    span: Span | None = field(default=None, compare=False)

    @property
    def pins(self) -> Mapping[str, int]:
        """What is pinned, by name."""
        return {name: value for name, value in vars(self).items() if name != "span" and value is not None}


@dataclass(frozen=True)
class Statement:
    """A statement as the user wrote it, for comments in generated code."""

    keyword: str
    text: str
    span: Span


@dataclass(frozen=True)
class AttentionSpec:
    """One attention variant.

    ``scale`` is τ (over sizes, constants and params). ``score`` ranges over ``s`` (= τ · dot), ``dot``, ``sqdist``,
    indices, sizes, params and loads; ``mask`` over indices, sizes, params and loads; both have every ``let``,
    ``const`` and ``def`` expanded. ``dtypes`` are those of q and o; None means every one that the target supports.
    ``takes_f8``: caches of keys and values may be of 8 bits, and so may q, k and v all three.
    ``constants`` are the values in force, overrides applied, in the order of declaration.
    ``sources`` are the spec file and its imports, for diagnostics and packaging; the first is the file itself.
    """

    name: str
    head_dims: tuple[HeadDim, ...]
    dtypes: tuple[ElementType, ...] | None
    takes_f8: bool
    constants: tuple[tuple[str, bool | int | float], ...]
    params: tuple[Param, ...]
    tensors: tuple[CapturedTensor, ...]
    scale: Expr
    score: Expr
    mask: Expr
    layout: Layout | None
    weights: Weights
    dropout: Expr | None
    schedule: Schedule
    statements: tuple[Statement, ...] = field(compare=False)
    sources: tuple[Source, ...] = field(compare=False)
    span: Span | None = field(default=None, compare=False)
    select: Select | None = None

    def place(self, keyword: str) -> Span | None:
        """Where the first statement with this keyword stands, the whole block where it has none."""
        return next((each.span for each in self.statements if each.keyword == keyword), self.span)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """All that is evaluated for pairs and rows, but for dropout and a selection's indices."""
        layout = () if self.layout is None else (self.layout.keep,)
        weights = () if self.weights.expression is None else (self.weights.expression,)
        return (self.scale, self.score, self.mask, *layout, *weights)
