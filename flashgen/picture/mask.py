"""What a mask looks like: tiles by class, and the share of pairs kept in every pixel.

In: an ``AttentionSpec``, a shape, the tile of a plan. Out: a ``MaskPicture`` of one batch entry and head. Boxes of
tiles are classified by intervals and halved only where that does not settle them; of each pixel ``SAMPLES`` rows by
``SAMPLES`` keys are evaluated at most. So time and memory follow the picture, and not the number of pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashgen.analysis.ranging import LoadRange
from flashgen.analysis.selection import read_of_calls
from flashgen.analysis.tiles import Boxes, TileClass, classify_boxes, loads_of
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import Load, index_set, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ScalarType
from flashgen.op.selected import lowered_tensors
from flashgen.op.tensor_kinds import as_arrays
from flashgen.reference.dense import param_values
from flashgen.reference.evaluate import Evaluator, Guard
from flashgen.verification.inputs import fitting, realistic_captured, sizes_of, tensor_shape

DEFAULT_SHAPE = Shape(1, 8, 8, 1024, 1024)
MOST_CELLS = 128  # a side: more cannot be told apart in a picture
MOST_PIXELS = 512  # a side
SAMPLES = 4  # query rows, and keys, of a pixel that are evaluated
_AT_ONCE = 2**22  # pairs
_ANY = 2**62  # pairs
_MOST_ELEMENTS = 2**26  # of a tensor that is drawn at random


@dataclass(frozen=True, eq=False)
class MaskPicture:
    """One batch entry and head of a mask.

    ``Br`` and ``Bc`` are the tile's, ``grouped`` the tiles that a cell of ``classes`` holds, by rows and by columns:
    (1, 1) unless there are more than ``MOST_CELLS`` a side. ``classes`` [rows, columns] are ``TileClass``es. ``kept``
    [y, x] is the share of pairs kept in each pixel, ``kept_share`` that of all pairs: exact if ``exact``, else from
    samples in every pixel. ``drawn`` are the captured tensors that were drawn at random with ``seed``; ``varies``
    names what other pictures there are: of other batch entries, of other heads.
    """

    spec_name: str
    shape: Shape
    batch: int
    head: int
    Br: int
    Bc: int
    grouped: tuple[int, int]
    classes: NDArray[np.uint8] = field(repr=False)
    kept: NDArray[np.float32] = field(repr=False)
    kept_share: float
    exact: bool
    drawn: tuple[str, ...]
    seed: int
    varies: tuple[str, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many cells there are of each class, by the names of the classes."""
        return {each.name: int((self.classes == each).sum()) for each in reversed(TileClass)}

    @property
    def visited_share(self) -> float:
        """The share of cells that are not EMPTY."""
        return float((self.classes != TileClass.EMPTY).mean())

    @property
    def cell(self) -> tuple[int, int]:
        """Query rows and keys of a cell."""
        return self.Br * self.grouped[0], self.Bc * self.grouped[1]

    def order(self) -> Iterator[tuple[int, int]]:
        """The visited cells in the order of the forward pass: tiles of queries outside, tiles of keys inside."""
        for row, column in np.argwhere(self.classes != TileClass.EMPTY):
            yield int(row), int(column)


def mask_picture(
    spec: AttentionSpec,
    head_dim: HeadDim,
    shape: Shape,
    Br: int,
    Bc: int,
    *,
    batch: int = 0,
    head: int = 0,
    seed: int = 0,
    pixels: int = MOST_PIXELS,
    captured: Mapping[str, Tensor] | None = None,
    params: Mapping[str, float] | None = None,
) -> MaskPicture:
    """The picture at a shape with at least one query and key; ``pixels`` bounds those of a side.

    ``captured`` are tensors on the CPU, drawn at random where there are none; ``params`` values, defaults likewise.
    """
    variant = analyse(spec, head_dim)
    read = _read(variant, spec)
    drawn = () if captured is not None else tuple(each.name for each in spec.tensors if each.name in read)
    if captured is None:
        captured = realistic_captured(spec, shape, head_dim, seed=seed, names=read)
    captured = lowered_tensors(spec, captured, sizes_of(shape, head_dim))
    scene = _Scene(variant, shape, batch, head, captured, params or {})
    rows, columns = -(-shape.q_len // Br), -(-shape.kv_len // Bc)
    grouped = _grouping(rows), _grouping(columns)
    cell = Br * grouped[0], Bc * grouped[1]
    classes = np.full((-(-rows // grouped[0]), -(-columns // grouped[1])), TileClass.PARTIAL, np.uint8)
    _classify(scene, classes, cell)
    kept, share, exact = _sample(scene, pixels, seed)
    return MaskPicture(
        spec_name=spec.name,
        shape=shape,
        batch=batch,
        head=head,
        Br=Br,
        Bc=Bc,
        grouped=grouped,
        classes=classes,
        kept=kept,
        kept_share=share,
        exact=exact,
        drawn=drawn,
        seed=seed,
        varies=scene.varies(),
    )


def _read(variant: Variant, spec: AttentionSpec) -> frozenset[str]:
    """The tensors of a spec that its mask reads."""
    return read_of_calls(spec, (node.tensor for node in walk(variant.keep) if isinstance(node, Load)))


def usual_shape(spec: AttentionSpec) -> Shape:
    """The one that a picture has where nobody says another."""
    return fitting(spec, DEFAULT_SHAPE, pairs=_ANY)


def check_drawable(spec: AttentionSpec, shape: Shape) -> None:
    """Raise ``ValueError`` where a tensor that the mask reads would take too long to draw at random."""
    read = _read(analyse(spec, spec.head_dims[0]), spec)
    for tensor in (each for each in spec.tensors if each.name in read):
        elements = math.prod(tensor_shape(tensor, shape, spec.head_dims[0]))
        if elements > _MOST_ELEMENTS:
            raise ValueError(
                f"the tensor '{tensor.name}' would have {elements:,} elements, which takes too long to draw; "
                f"{_MOST_ELEMENTS:,} are allowed"
            )


def caption(picture: MaskPicture) -> tuple[str, ...]:
    """What the picture shows, in a few lines."""
    shape, counts = picture.shape, picture.counts
    place = "".join(
        f", {singular} {number} of {count}"
        for what, singular, number, count in (
            ("batch entries", "batch entry", picture.batch, shape.batch),
            ("heads", "head", picture.head, shape.heads),
        )
        if what in picture.varies
    )
    tile = f"tiles of {picture.Br} × {picture.Bc}"
    if picture.grouped != (1, 1):
        tile += f", drawn {picture.grouped[0]} × {picture.grouped[1]} together"
    about = "" if picture.exact else "about "
    lines = [
        f"{picture.spec_name}: Nq {shape.q_len}, Nk {shape.kv_len}{place}",
        f"{about}{picture.kept_share:.2%} of the pairs kept, {picture.visited_share:.1%} of the tiles visited",
        f"{tile}: {counts['FULL']} FULL, {counts['PARTIAL']} PARTIAL, {counts['EMPTY']} EMPTY",
    ]
    if picture.drawn:
        names = ", ".join(f"'{name}'" for name in picture.drawn)
        lines.append(f"{names} drawn at random, seed {picture.seed}")
    return tuple(lines)


def coarser(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Half as many cells a side: four that agree keep their class, others are PARTIAL together."""
    even = np.pad(classes, [(0, length % 2) for length in classes.shape], mode="edge")
    fours = even.reshape(even.shape[0] // 2, 2, even.shape[1] // 2, 2)
    lowest, highest = fours.min(axis=(1, 3)), fours.max(axis=(1, 3))
    return np.where(lowest == highest, lowest, TileClass.PARTIAL).astype(np.uint8)


def _grouping(tiles: int) -> int:
    """How many tiles in a row are one cell: a power of two."""
    return 1 << max(0, (-(-tiles // MOST_CELLS) - 1).bit_length())


@dataclass(frozen=True, eq=False)
class _Scene:
    """One batch entry and head of a variant, and what its mask reads."""

    variant: Variant
    shape: Shape
    batch: int
    head: int
    captured: Mapping[str, Tensor]
    given: Mapping[str, float]

    def keep(self, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each pair of these query rows and keys is kept, by the reference's meaning of the condition."""
        here = {
            "b": torch.tensor(self.batch),
            "h": torch.tensor(self.head),
            "hkv": torch.tensor(self.head // (self.shape.heads // self.shape.kv_heads)),
            "i": torch.from_numpy(i)[:, None],
            "j": torch.from_numpy(j)[None, :],
        }
        here |= {name: torch.tensor(value) for name, value in self.sizes.items()}
        params = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in self.params.items()}
        value = Evaluator(here, params, self.captured, torch.float32, Guard()).boolean(self.variant.keep)
        found: NDArray[np.bool_] = value.expand(len(i), len(j)).numpy()
        return found

    @functools.cached_property
    def loads(self) -> LoadRange:
        return loads_of(as_arrays(self.captured))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return sizes_of(self.shape, self.variant.head_dim)

    @functools.cached_property
    def params(self) -> dict[str, bool | int | float]:
        """Defaults; those that are required: 1, or a quarter of the keys."""
        declared = self.variant.spec.params
        given = {
            param.name: 1.0 if param.type is ScalarType.FLOAT else max(self.shape.kv_len // 4, 1)
            for param in declared
            if param.default is None
        } | dict(self.given)
        values = param_values(self.variant.spec, given, self.sizes)
        return {
            param.name: bool(values[param.name]) if param.type is ScalarType.BOOL else values[param.name]
            for param in declared
        }

    def varies(self) -> tuple[str, ...]:
        others = {"b": ("batch entries", self.shape.batch), "h": ("heads", self.shape.heads)}
        axes = index_set(self.variant.keep)
        return tuple(name for axis, (name, count) in others.items() if axis in axes and count > 1)


def _classify(scene: _Scene, classes: NDArray[np.uint8], cell: tuple[int, int]) -> None:
    """Settle boxes of cells at once, or halve them; a single cell that is not settled stays PARTIAL."""
    shape = scene.shape
    boxes = np.array([[0, classes.shape[0], 0, classes.shape[1]]])
    while len(boxes):
        r0, r1, c0, c1 = boxes.T
        here = np.full(len(boxes), scene.batch), np.full(len(boxes), scene.head)
        found = classify_boxes(
            scene.variant.keep,
            Boxes(
                *here,
                first_i=r0 * cell[0],
                last_i=np.minimum(r1 * cell[0], shape.q_len) - 1,
                first_j=c0 * cell[1],
                last_j=np.minimum(c1 * cell[1], shape.kv_len) - 1,
                sizes=scene.sizes,
                params=scene.params,
            ),
            scene.loads,
        )
        settled = found != TileClass.PARTIAL
        for (r0, r1, c0, c1), code in zip(boxes[settled].tolist(), found[settled].tolist(), strict=True):
            classes[r0:r1, c0:c1] = code
        boxes = _halves(boxes[~settled])


def _halves(boxes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each box of cells [first row, row after, first column, column after] cut across its longer side, if it can be."""
    height, width = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    boxes = boxes[(height > 1) | (width > 1)]
    r0, r1, c0, c1 = boxes.T
    across = (r1 - r0) >= (c1 - c0)
    row, column = (r0 + r1) // 2, (c0 + c1) // 2
    upper = np.stack([r0, np.where(across, row, r1), c0, np.where(across, c1, column)], axis=1)
    lower = np.stack([np.where(across, row, r0), r1, np.where(across, c0, column), c1], axis=1)
    return np.concatenate([upper, lower])


def _sample(scene: _Scene, pixels: int, seed: int) -> tuple[NDArray[np.float32], float, bool]:
    """The share kept in every pixel and altogether, and whether every pair was evaluated."""
    generator = np.random.default_rng(seed)
    shape = scene.shape
    i, per_pixel_i, heights = _positions(shape.q_len, pixels, generator)
    j, per_pixel_j, widths = _positions(shape.kv_len, pixels, generator)
    step = max(1, _AT_ONCE // (len(j) * per_pixel_i)) * per_pixel_i
    parts = []
    for start in range(0, len(i), step):
        keep = scene.keep(i[start : start + step], j)
        boxes = keep.reshape(keep.shape[0] // per_pixel_i, per_pixel_i, len(widths), per_pixel_j)
        parts.append(boxes.mean(axis=(1, 3), dtype=np.float32))
    kept = np.concatenate(parts)
    share = float(heights @ kept.astype(np.float64) @ widths) / (shape.q_len * shape.kv_len)
    return kept, share, len(i) == shape.q_len and len(j) == shape.kv_len


def _positions(
    length: int, pixels: int, generator: np.random.Generator
) -> tuple[NDArray[np.int64], int, NDArray[np.int64]]:
    """Positions to evaluate, how many of them a pixel has, and how many positions each pixel stands for.

    Every position where a pixel holds ``SAMPLES`` or fewer, each at random in a stretch of its own where it holds more.
    """
    if length <= pixels:
        return np.arange(length), 1, np.ones(length, np.int64)
    per_pixel = next((n for n in range(1, SAMPLES + 1) if length % n == 0 and length // n <= pixels), None)
    if per_pixel is not None:
        return np.arange(length), per_pixel, np.full(length // per_pixel, per_pixel, np.int64)
    edges = np.arange(pixels * SAMPLES + 1) * length // (pixels * SAMPLES)
    first, last = edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)
    return generator.integers(first, last), SAMPLES, np.diff(edges[::SAMPLES])
