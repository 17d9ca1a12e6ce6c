"""Tensor copies under the emulator: boxes lie as a SharedTile lays them, zeros beyond the tensor, bytes counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.tensor_maps import TensorMap, tensor_map
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.plan.launches import Box
from flashgen.targets.gpu.primitives import WarpgroupProducts, primitives
from tests.emulator.helpers import Outcome, kernel, launch

SHARED_BYTES = 64 * 1024 + 8
TILES = ((16, 16), (64, 32), (48, 48), (128, 64), (80, 128), (64, 192), (256, 16))  # rows, columns
PANELS = {16: 16, 32: 32}  # columns of a panel, where it is not 64
PRIMITIVES = primitives(warpgroups=WarpgroupProducts((8,), ElementType.F16))
SOURCE = (
    PRIMITIVES
    + kernel("tensor_copies")
    + "".join(
        f'extern "C" __global__ void __launch_bounds__(64) bring_{rows}_{columns}'
        "(const __grid_constant__ Arguments p, const __grid_constant__ Maps maps) "
        f"{{ bring<{rows}, {columns}>(p, maps); }}\n"
        for rows, columns in TILES
    )
)

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Copy:
    """A tile of ``rows`` by ``columns`` from (``column``, ``row``) of a slab of a tensor [slabs, length, width]."""

    rows: int
    columns: int
    width: int
    length: int
    slabs: int = 3
    column: int = 0
    row: int = 0
    slab: int = 1

    @property
    def name(self) -> str:
        """The kernel's."""
        return f"bring_{self.rows}_{self.columns}"

    @property
    def tensor_map(self) -> TensorMap:
        """Of a packed tensor."""
        row_bytes = 2 * self.width
        box = (PANELS.get(self.columns, 64), self.rows)
        return TensorMap(
            "x", (self.width, self.length, self.slabs), (row_bytes, row_bytes * self.length), box, self.length, 1
        )

    def tensor(self) -> Words:
        """Every element another number."""
        shape = (self.slabs, self.length, self.width)
        return np.arange(1, 1 + np.prod(shape), dtype=np.uint16).reshape(shape)

    def expected(self, x: Words) -> Words:
        """What lies outside of the tensor is zero."""
        padded = np.pad(x[self.slab], ((0, self.rows), (0, self.columns)))
        return padded[self.row : self.row + self.rows, self.column : self.column + self.columns]


COPIES = [
    *(Copy(rows, columns, width=-(-columns // 8) * 8, length=rows + 8) for rows, columns in TILES),
    Copy(64, 32, width=24, length=50),
    Copy(48, 48, width=40, length=47, slab=2),
    Copy(80, 128, width=120, length=100, row=64, slab=0),
    Copy(64, 192, width=256, length=200, column=64, row=100),
    Copy(16, 16, width=72, length=16, column=8, row=5),
    Copy(256, 16, width=8, length=1),
]


@pytest.mark.parametrize("copy", COPIES, ids=lambda copy: f"{copy.name}_of_{copy.length}_{copy.width}")
def test_boxes(copy: Copy) -> None:
    x = copy.tensor()
    outcome = launch(
        SOURCE,
        {
            "y": np.zeros((copy.rows, copy.columns), np.uint16),
            "column": copy.column,
            "row": copy.row,
            "slab": copy.slab,
        },
        allocated={"x": x},
        maps=[copy.tensor_map],
        name=copy.name,
        threads=64,
        shared_bytes=SHARED_BYTES,
    )
    assert np.array_equal(outcome.arrays["y"], copy.expected(x))
    panels = -(-copy.columns // copy.tensor_map.box[0]) * copy.tensor_map.box[0]
    inside = min(copy.rows, copy.length - copy.row) * min(panels, copy.width - copy.column)
    assert outcome.report.traffic["x"].loaded == 2 * inside


def test_every_permutation() -> None:
    assert {copy.tensor_map.row_bytes for copy in COPIES} == {32, 64, 128}


RING_SOURCE = kernel("tensor_copy_ring")


def sums(rows: int, seed: int = 0, source: str = RING_SOURCE) -> tuple[Outcome, npt.NDArray[np.float32]]:
    """The sums over ``rows`` rows of the second of two slabs, and what they are."""
    x = np.random.default_rng(rows).integers(0, 9, (2, rows, 64)).astype(np.float16)
    outcome = launch(
        source,
        {"y": np.zeros(64, np.float32), "rows": rows, "slab": 1},
        allocated={"x": x},
        maps=[TensorMap("x", (64, rows, 2), (128, 128 * rows), (64, 16), 1, 1)],
        name="sum_of_rows",
        threads=160,
        shared_bytes=8192 + 64,
        seed=seed,
    )
    return outcome, x[1].sum(0, dtype=np.float32)


@pytest.mark.parametrize("rows", [16, 33, 80, 81, 203])
def test_a_ring_of_two_stages(rows: int) -> None:
    for seed in range(4):
        outcome, expected = sums(rows, seed)
        assert np.array_equal(outcome.arrays["y"], expected)
        assert outcome.report.traffic["x"].loaded == 128 * rows


EARLY = {FaultKind.UNINITIALIZED, FaultKind.NOT_AWAITED}
RACE = {FaultKind.RACE, FaultKind.NOT_AWAITED}
LOST = {FaultKind.MBARRIER, FaultKind.RACE, FaultKind.DEADLOCK}
RING = [
    ("no wait for the copy", "fg::mbarrier_wait(full(n), parity(n));", "", EARLY),
    ("wrong parity", "full(n), parity(n)", "full(n), 1 - parity(n)", EARLY),
    ("no wait for room", "if (n >= stages) fg::mbarrier_wait(empty(n), parity(n - stages));", "", {FaultKind.MBARRIER}),
    ("room too early", "empty(n), parity(n - stages)", "empty(n), parity(n)", LOST),
    ("nobody makes room", "if (n + stages < count) fg::mbarrier_arrive(empty(n));", "", {FaultKind.DEADLOCK}),
    ("made for three warps", "fg::mbarrier_init(empty(n), 128)", "fg::mbarrier_init(empty(n), 96)", RACE | LOST),
    ("released before the product", "fg::warpgroup_wait<0>();\n        if", "if", RACE),
    (
        "the same signals again",
        "if (again) fg::mbarrier_invalidate(full(n)), fg::mbarrier_invalidate(empty(n));",
        "",
        {FaultKind.MBARRIER},
    ),
    ("new signals too early", "fg::block_barrier();  // nobody uses the signals of the window before", "", LOST),
    ("new signals unknown", "fg::block_barrier();  // everyone knows the new ones", "", LOST),
    ("not published", "  fg::publish_shared();\n}\n\nextern", "}\n\nextern", {FaultKind.NOT_PUBLISHED}),
    ("bytes of half a box", "full(n), box_bytes", "full(n), box_bytes / 2", {FaultKind.MBARRIER}),
    ("one stage", "n % stages * box_bytes", "0 * n", RACE),
]


@pytest.mark.parametrize(("old", "new", "kinds"), [each[1:] for each in RING], ids=[each[0] for each in RING])
def test_in_a_ring_that_was_right(old: str, new: str, kinds: set[FaultKind]) -> None:
    assert RING_SOURCE.count(old) == 1
    for seed in range(3):
        with pytest.raises(EmulatorError) as caught:
            sums(203, seed, RING_SOURCE.replace(old, new))
        assert caught.value.kind in kinds, str(caught.value)
        assert any(word in caught.value.line_text for word in ("mbarrier_", "copy_panel", "multiply"))


SEQUENCE_SOURCE = primitives("sequence_copies", warpgroups=WarpgroupProducts((8,), ElementType.F16)) + kernel(
    "sequence_copies"
)
HEAD_DIM = HeadDim(96, 96)


@pytest.mark.parametrize("name", ["packed", "heads outside", "one head for all"])
@pytest.mark.parametrize(
    ("begin", "count", "first"),
    [(0, 90, 0), (0, 90, 64), (10, 70, 0), (10, 37, 32), (10, 32, 0), (89, 1, 0), (40, 0, 0), (5, 20, 32)],
)
def test_rows_of_a_sequence(name: str, begin: int, count: int, first: int) -> None:
    """Behind its last row there are zeros, whatever lies there, and nothing of it is read."""
    x = np.arange(1, 1 + 90 * 3 * 96, dtype=np.uint16).reshape(90, 3, 96)
    strides = {"packed": (288, 96), "heads outside": (96, 90 * 96), "one head for all": (96, 0)}[name]
    seen = np.lib.stride_tricks.as_strided(x, (90, 3, 96), (2 * strides[0], 2 * strides[1], 2))
    known = {"kv_heads": 3, "kv_len": 90, "k_stride_b": 0, "k_stride_h": strides[1], "k_stride_n": strides[0]}
    outcome = launch(
        SEQUENCE_SOURCE,
        {"y": np.zeros((32, 96), np.uint16), "begin": begin, "count": count, "first": first, "head": 2},
        allocated={"x": x},
        maps=[replace(tensor_map(Box("k", 32, 64), HEAD_DIM, known, RAGGED.operands), tensor="x")],
        name="bring_sequence",
        threads=64,
        shared_bytes=SHARED_BYTES,
    )
    own = seen[begin : begin + count, 2][first : first + 32]
    assert np.array_equal(outcome.arrays["y"], np.pad(own, ((0, 32 - len(own)), (0, 0))))
    assert outcome.report.traffic["x"].loaded == 2 * own.size
