"""Random arguments for any spec: queries, keys, values, captured tensors, params and the gradients that arrive.

In: an ``AttentionSpec`` and the sizes of a call. Out: ``Inputs``, in the declared element types; captured tensors as
noise or such as users have, everything else normally distributed, q and k in a size that gives scores of size 1.
``random_captured`` draws a tensor by its type and shape alone, as noise that is legal: a mask of noise has neither full
nor empty tiles. ``realistic_captured`` decides by its use as well:

    booleans    of keys or queries  padding: a run of what is kept, then what is not; a square of the queries: a tree
                of pairs            causal; of blocks: a band, the first row and column, a tenth of all others
    ids         along the sequence  documents: sorted, in runs, the same runs in every tensor of as many rows
    lists       of key blocks       the first, those near the query, and some that neighbours share
    bounds      of a position       what it is compared with: a length, a prefix, the start or the end of its document
    indices     into a tensor       a permutation, as of pages, where there are no more of them than places; else any
    floats                          biases of size 1; slopes of heads small and positive
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import check_index
from flashgen.analysis.selection import list_read
from flashgen.analysis.simplify import simplify
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Load, index_set, literal, score_input, size, substitute, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim, Select
from flashgen.ir.types import ElementType, ScalarType
from flashgen.op.signature import TORCH_DTYPES
from flashgen.reference.dense import constant_number, known_values, param_values
from flashgen.reference.shard import Shard

_LARGEST_BATCH = 4096


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: Mapping[str, Tensor]
    params: Mapping[str, Tensor | float | int]
    d_o: Tensor
    d_lse: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def named(self) -> dict[str, Any]:
        """Captured tensors and params, as keyword arguments."""
        return {**self.captured, **self.params}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The arguments with every tensor changed, also params that are tensors, as those of a module are."""
        return Inputs(
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            captured={name: change(x) for name, x in self.captured.items()},
            params={name: change(x) if isinstance(x, Tensor) else x for name, x in self.params.items()},
            d_o=change(self.d_o),
            d_lse=change(self.d_lse),
        )

    def to(self, device: str) -> Inputs:
        return self.mapped(lambda x: x.to(device))

    def differentiable(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """Every tensor that receives a gradient, under the name of its gradient's row in a report."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        for captured in spec.tensors:
            if captured.grad:
                found[captured.name] = self.captured[captured.name]
        for param in spec.params:
            value = self.params.get(param.name)
            if param.grad and isinstance(value, Tensor):
                found[param.name] = value
        return found


def random_inputs(
    spec: AttentionSpec,
    shape: Shape,
    head_dim: HeadDim,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    realistic: bool = False,
) -> Inputs:
    """Arguments for one call at these sizes; the same for the same seed.

    ``realistic``: captured tensors such as users have, for timings; noise reaches more kinds of tiles.
    """
    generator = torch.Generator().manual_seed(seed)
    params = _params(spec, sizes_of(shape, head_dim))
    unit = _size_of_elements(spec, shape, head_dim, params)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    B, H, Hkv, Nq, Nk = shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len
    return Inputs(
        q=(unit * normal(B, H, Nq, head_dim.qk)).to(dtype),
        k=(unit * normal(B, Hkv, Nk, head_dim.qk)).to(dtype),
        v=normal(B, Hkv, Nk, head_dim.v).to(dtype),
        captured=realistic_captured(spec, shape, head_dim, seed=seed)
        if realistic
        else {tensor.name: random_captured(spec, tensor, shape, head_dim, generator) for tensor in spec.tensors},
        params=params,
        d_o=normal(B, H, Nq, head_dim.v).to(dtype),
        d_lse=normal(B, H, Nq),
    )


def _size_of_elements(
    spec: AttentionSpec, shape: Shape, head_dim: HeadDim, params: Mapping[str, Tensor | float | int]
) -> float:
    """The standard deviation of q and k at which s = τ q·k (or ‖q - k‖² / 2, where it is used) has one of 1.

    Far larger scores make a softmax that picks one key, and gradients that cancel.
    """
    given = {name: float(value) for name, value in params.items()}
    scale = abs(scale_factor(spec, given, sizes_of(shape, head_dim)))
    if any(node == score_input("sqdist") for node in walk(spec.score)):
        scale = 1.0
    return (scale * math.sqrt(head_dim.qk)) ** -0.5 if math.isfinite(scale) and scale > 0 else 1.0


def scale_factor(spec: AttentionSpec, params: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """τ at these sizes and params."""
    known = known_values(sizes, spec.params, param_values(spec, params, sizes))
    return float(constant_number(substitute(spec.scale, known)))


def refusal(spec: AttentionSpec, shape: Shape) -> str | None:
    """Why the operator would refuse a call at these sizes; None if it would not."""
    head_dim = spec.head_dims[0]
    for tensor in spec.tensors:
        extents = tensor_shape(tensor, shape, head_dim)
        if min(extents, default=0) < 0:
            return f"tensor '{tensor.name}' would have the shape {list(extents)}"
    sizes = sizes_of(shape, head_dim)
    return next(filter(None, (check_index(proof, sizes) for proof in prove_indices(spec, head_dim))), None)


def accepts(spec: AttentionSpec, shape: Shape) -> bool:
    """Whether the operator can be called at these sizes, and no captured tensor is empty."""
    extents = (extent for tensor in spec.tensors for extent in tensor_shape(tensor, shape, spec.head_dims[0]))
    return 0 not in extents and refusal(spec, shape) is None


def fitting(spec: AttentionSpec, shape: Shape, *, pairs: int = 2**22) -> Shape:
    """The nearest shape that the spec accepts: the batch doubled, then both lengths halved, as often as needed.

    Lengths are also halved while there are more pairs than the limit. Where no shape fits, the given one is returned.
    """
    tried = shape
    while True:
        grown = tried
        while grown.batch < _LARGEST_BATCH and not accepts(spec, grown):
            grown = dataclasses.replace(grown, batch=2 * max(grown.batch, 1))
        if accepts(spec, grown) and grown.batch * grown.heads * grown.q_len * grown.kv_len <= pairs:
            return grown
        if max(tried.q_len, tried.kv_len) <= 1:
            return shape
        tried = dataclasses.replace(tried, q_len=-(-tried.q_len // 2), kv_len=-(-tried.kv_len // 2))


def _params(spec: AttentionSpec, sizes: Mapping[str, int]) -> dict[str, Tensor | float | int]:
    """Values of required params (1, or half the keys), and tensors for params with gradients; else defaults hold."""
    given: dict[str, float] = {
        param.name: 1.0 if param.type is ScalarType.FLOAT else max(sizes["Nk"] // 2, 1)
        for param in spec.params
        if param.default is None
    }
    values = param_values(spec, given, sizes)
    for param in spec.params:
        if param.grad and not math.isfinite(values[param.name]):  # log(0) where there is no key
            values[param.name] = 0.0
    return {
        param.name: torch.tensor(values[param.name]) if param.grad else values[param.name]
        for param in spec.params
        if param.grad or param.default is None
    }


# Captured tensors -----------------------------------------------------------------------------------------------------


_KEPT_BY_NOISE = 0.75
_FAR_BLOCKS = 0.1
_NEAR_BLOCKS = 2
_SEQUENCES = (size("Nq"), size("Nk"))


def sizes_of(shape: Shape, head_dim: HeadDim) -> dict[str, int]:
    """The sizes ``B``, ``H``, ``Nq``, … of a call that is the whole problem."""
    return Shard(shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len).sizes(head_dim.qk, head_dim.v)


def tensor_shape(tensor: CapturedTensor, shape: Shape, head_dim: HeadDim) -> tuple[int, ...]:
    """The declared shape of a captured tensor at these sizes."""
    sizes = known_values(sizes_of(shape, head_dim))
    return tuple(int(constant_number(substitute(extent, sizes))) for extent in tensor.shape)


def random_captured(
    spec: AttentionSpec, tensor: CapturedTensor, shape: Shape, head_dim: HeadDim, generator: torch.Generator
) -> Tensor:
    """One random tensor: indices lie inside their dimension, ids along a sequence come in runs."""
    extents = tensor_shape(tensor, shape, head_dim)
    dtype = TORCH_DTYPES[tensor.element]
    if tensor.element is ElementType.BOOL:
        return torch.rand(extents, generator=generator) < _KEPT_BY_NOISE
    if tensor.element.is_floating:
        per_head = len(extents) == 1 and tensor.shape == (size("H"),)
        values = torch.rand(extents, generator=generator) / 2 if per_head else torch.randn(extents, generator=generator)
        return values.to(dtype)
    if spec.select is not None and tensor.name == spec.select.tensor:
        return _numbers_of_blocks(spec.select, shape, extents, generator).to(dtype)
    limit = _index_limit(spec, tensor.name, shape, head_dim)
    if limit is not None:
        return torch.randint(0, max(limit, 1), extents, generator=generator).to(dtype)
    along_sequence = bool(extents) and bool({size("Nq"), size("Nk")} & set(walk(tensor.shape[-1])))
    if along_sequence:
        documents = _documents(extents[-1])
        return torch.randint(0, documents + 1, extents, generator=generator).sort(dim=-1).values.to(dtype)
    return torch.randint(0, max(shape.kv_len, 1) + 1, extents, generator=generator).to(dtype)


def _numbers_of_blocks(select: Select, shape: Shape, extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Lists of random key blocks, some short; some numbers are repeated, negative, or beyond the last block."""
    blocks = -(-shape.kv_len // select.block)
    # What is drawn behind them does not follow from how long they are.
    own = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=generator)))
    numbers = torch.randint(-2, blocks + 2, extents, generator=own)
    counts = torch.rand((*extents[:-1], 1), generator=own) * min(extents[-1], blocks + 2)
    return numbers.masked_fill(torch.arange(extents[-1]) > counts, -1)


def realistic_captured(
    spec: AttentionSpec, shape: Shape, head_dim: HeadDim, *, seed: int = 0, names: frozenset[str] | None = None
) -> Mapping[str, Tensor]:
    """Captured tensors by name, of ``names`` or all, on the CPU; each is the same for the same seed."""
    drawing = _Drawing(spec, shape, head_dim, seed)
    return {tensor.name: drawing.values(tensor) for tensor in spec.tensors if names is None or tensor.name in names}


@dataclass(frozen=True)
class _Drawing:
    """The tensors of one call: documents are the same in all of them."""

    spec: AttentionSpec
    shape: Shape
    head_dim: HeadDim
    seed: int
    _cuts: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def values(self, tensor: CapturedTensor) -> Tensor:
        extents = tensor_shape(tensor, self.shape, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed + self.spec.tensors.index(tensor))
        found = None
        if 0 not in extents and extents:
            if tensor.element is ElementType.BOOL:
                found = self._booleans(tensor, extents, generator)
            elif self.spec.select is not None and tensor.name == self.spec.select.tensor:
                found = self._selected(self.spec.select, extents, generator)
            elif not tensor.element.is_floating:
                found = self._integers(tensor, extents, generator)
        if found is None:
            return random_captured(self.spec, tensor, self.shape, self.head_dim, generator)
        return found.expand(extents).to(TORCH_DTYPES[tensor.element]).contiguous()

    def _booleans(self, tensor: CapturedTensor, extents: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        loads = _loads(self.spec, tensor.name)
        if tensor.shape[-2:] == (size("Nq"), size("Nq")):
            kept = _tree(extents[-1], generator)
        elif tensor.shape[-2:] == _SEQUENCES:
            kept = torch.ones(extents[-2:], dtype=torch.bool).tril(extents[-1] - extents[-2])
        elif len(extents) > 1 and _are_blocks(loads):
            kept = _blocks(extents, generator)
        elif tensor.shape[-1] in _SEQUENCES:
            kept = _runs(extents, generator)
        else:
            return None
        where_true = simplify(substitute(_keep(self.spec), {each: literal(value=True) for each in loads}))
        return kept ^ (where_true == literal(value=False))  # as with padding, which the mask drops where it is true

    def _selected(self, select: Select, extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Lists such as a model learns: the first block, blocks near the query, and some that neighbours share."""
        blocks = -(-self.shape.kv_len // select.block)
        numbers = torch.randint(0, blocks, (*extents[:-2], 1, extents[-1]), generator=generator).expand(extents).clone()
        rows = extents[-2] if len(extents) > 1 else 1
        own = torch.arange(rows).mul(blocks).div(rows, rounding_mode="floor").unsqueeze(-1)
        near = min(_NEAR_BLOCKS, extents[-1])
        numbers[..., :near] = (own - torch.arange(near)) if len(extents) > 1 else blocks - 1 - torch.arange(near)
        if extents[-1] > near:
            numbers[..., near] = 0
        return numbers.clamp(min=-1)

    def _integers(self, tensor: CapturedTensor, extents: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        along = tensor.shape[-1] in _SEQUENCES
        limit = _index_limit(self.spec, tensor.name, self.shape, self.head_dim)
        if limit is not None and extents[-1] <= max(limit, 1):
            count = math.prod(extents)
            if count <= limit:
                return torch.randperm(limit, generator=generator)[:count].view(extents)
            rows = [torch.randperm(limit, generator=generator)[: extents[-1]] for _ in range(count // extents[-1])]
            return torch.stack(rows).view(extents)
        if along:
            return self._along(tensor, extents, limit)
        if limit is not None:
            return None
        if tensor.shape[-1] == apply("add", size("B"), literal(1)):
            return torch.linspace(0, self.shape.kv_len, extents[-1]).round()
        bounds = _bounds(self.spec, tensor.name)
        longest = self.shape.kv_len
        if bounds and not self._ends(bounds):  # a prefix, beside which others are kept
            return torch.randint(longest // 8, longest // 2 + 1, extents, generator=generator)
        return torch.randint((longest + 1) // 2, longest + 1, extents, generator=generator)

    def _along(self, tensor: CapturedTensor, extents: tuple[int, ...], limit: int | None) -> Tensor:
        """For each position of a sequence its document, or where the document starts or ends."""
        rows, length = math.prod(extents[:-1]), extents[-1]
        cuts = self._document_ends(rows, length)
        if limit is not None:
            cuts = cuts[:, cuts.shape[1] - min(cuts.shape[1], max(limit, 1)) :].contiguous()
        positions = torch.arange(length).expand(rows, length).contiguous()
        documents = torch.searchsorted(cuts, positions, right=True).clamp(max=cuts.shape[1] - 1)
        bound = next(iter(_bounds(self.spec, tensor.name)), None)
        if bound is None:
            return documents.view(extents)
        ends = cuts.gather(1, documents)
        if _reads(bound.args[1], tensor.name) == (bound.op in ("lt", "le")):  # the tensor's value is the larger side
            return (ends if bound.op in ("lt", "gt") else ends - 1).view(extents)
        starts = torch.cat([torch.zeros_like(cuts[:, :1]), cuts[:, :-1]], 1).gather(1, documents)
        return (starts if bound.op in ("le", "ge") else starts - 1).view(extents)

    def _document_ends(self, rows: int, length: int) -> Tensor:
        """[rows, documents]: the position after the end of each document; at the same fractions of any length."""
        if rows not in self._cuts:
            generator = torch.Generator().manual_seed(self.seed)
            count = _documents(max(self.shape.q_len, self.shape.kv_len))
            inner = torch.rand(rows, count - 1, generator=generator).sort(-1).values
            self._cuts[rows] = torch.cat([inner, torch.ones(rows, 1)], 1)
        return (self._cuts[rows] * length).round().long().contiguous()

    def _ends(self, bounds: tuple[Apply, ...]) -> bool:
        """Whether the mask keeps nothing where the comparisons do not hold."""
        off: dict[Expr, Expr] = {each: literal(value=False) for each in bounds}
        return simplify(substitute(_keep(self.spec), off)) == literal(value=False)


def _documents(length: int) -> int:
    return max(1, math.isqrt(length) // 2)


def _runs(extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """True up to a random length between half of the last dimension and all of it."""
    length = extents[-1]
    lengths = torch.randint((length + 1) // 2, length + 1, (*extents[:-1], 1), generator=generator)
    return torch.arange(length).expand(extents) < lengths


def _tree(count: int, generator: torch.Generator) -> Tensor:
    """[count, count]: whether the second node is the first or an ancestor of it; parents come before their children."""
    ancestors = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        parent = int(torch.randint(max(0, node - 4), node, (), generator=generator))
        ancestors[node] |= ancestors[parent]
    return ancestors


def _blocks(extents: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Blocks next to the diagonal, the first row and column, and some random blocks, as BigBird has them."""
    rows, columns = (torch.arange(extent) for extent in extents[-2:])
    near = (rows[:, None] * extents[-1] // extents[-2] - columns).abs() <= 1
    kept = near | (rows == 0)[:, None] | (columns == 0)
    return kept | (torch.rand(extents, generator=generator) < _FAR_BLOCKS)


def _keep(spec: AttentionSpec) -> Expr:
    return spec.mask if spec.layout is None else apply("and", spec.mask, spec.layout.keep)


def _loads(spec: AttentionSpec, name: str) -> tuple[Load, ...]:
    """The loads of a tensor in the mask and the layout."""
    return tuple(node for node in walk(_keep(spec)) if isinstance(node, Load) and node.tensor == name)


def _are_blocks(loads: tuple[Load, ...]) -> bool:
    """Whether the last two indices are those of a block of queries and a block of keys."""
    return bool(loads) and all(
        "i" in index_set(load.indices[-2]) and "j" in index_set(load.indices[-1]) for load in loads
    )


def _bounds(spec: AttentionSpec, name: str) -> tuple[Apply, ...]:
    """The comparisons between values of a tensor and other values."""
    return tuple(
        node
        for node in walk(_keep(spec))
        if isinstance(node, Apply)
        and OPERATORS[node.op].is_comparison
        and node.op not in ("eq", "ne")
        and sum(_reads(side, name) for side in node.args) == 1
    )


def _reads(expr: Expr, name: str) -> bool:
    return any(isinstance(node, Load) and node.tensor == name for node in walk(expr))


def _index_limit(spec: AttentionSpec, name: str, shape: Shape, head_dim: HeadDim) -> int | None:
    """The smallest dimension that elements of this tensor index, None where they index nothing."""
    limits: list[int] = []
    extents = {tensor.name: tensor_shape(tensor, shape, head_dim) for tensor in spec.tensors}
    for node in walk(*spec.expressions, *(() if spec.select is None else (list_read(spec.select),))):
        if isinstance(node, Load):
            limits += [extents[node.tensor][n] for n, index in enumerate(node.indices) if _reads(index, name)]
    return min(limits, default=None)
