"""Tensor maps: any strides as slabs, what the driver is told, what a launch takes."""

from __future__ import annotations

import ctypes
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.hosts.cuda import CudaKernel
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.schedule import Compiled
from flashgen.hosts.tensor_maps import (
    BYTES,
    END,
    MOST_REMEMBERED,
    LaunchMaps,
    TensorMap,
    TensorMapRefused,
    emulated,
    encode,
    map_bytes,
    tensor_map,
)
from flashgen.ir.spec import HeadDim
from flashgen.kinds.ragged import RAGGED
from flashgen.language import parse_text
from flashgen.plan.arguments import argument_fields
from flashgen.plan.launches import Box, Count, Factor, Launch, PassLaunches
from flashgen.store.headers import Text
from flashgen.toolchains.cpp import compile_sources
from tests.op.test_schedule import RecordingDriver

HEAD_DIM = HeadDim(64, 32)
LAYOUT = ArgumentLayout(argument_fields(parse_text("attention a { head_dim 64/32 }").specs[0]))


def map_of(k: torch.Tensor, name: str = "k") -> TensorMap:
    """The map of a tensor of 16 bits [B, H, N, D]."""
    of_queries = name in ("q", "d_o")
    known: dict[str, float] = {"batch": k.shape[0], "heads" if of_queries else "kv_heads": k.shape[1]}
    known["q_len" if of_queries else "kv_len"] = k.shape[2]
    known |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bhn", k.stride(), strict=False)}
    return tensor_map(Box(name, 48, 64), HEAD_DIM, known)


def tensors() -> list[torch.Tensor]:
    """Every order of the axes, strides of 0, gaps, axes of one element with strides of any size."""
    x = torch.empty(3, 4, 50, 64, dtype=torch.float16)
    wide = torch.empty(3, 4, 100, 192, dtype=torch.float16)
    return [
        x,
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        x[:, :1].expand(-1, 4, -1, -1),
        x[:1].expand(3, -1, -1, -1),
        x[:1, :1].expand(3, 4, -1, -1),
        wide[:, :, ::2, 64:128],
        wide[::2, 1::2, 3:53, :64],
        x[:, :, :1],
        x.as_strided((1, 4, 50, 64), (7, 3200, 64, 1)),
        x.as_strided((3, 1, 50, 64), (12800, 5, 64, 1)),
        x.as_strided((1, 1, 1, 64), (1, 3, 5, 1)),
    ]


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("x", tensors(), ids=lambda x: f"{tuple(x.shape)} by {x.stride()}")
def test_every_row_is_found(x: torch.Tensor, name: str) -> None:
    found = map_of(x, name)
    by_batch, by_head, by_row, _ = x.stride()
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            slab = b * found.batch_slabs + h * found.head_slabs
            assert slab < found.extents[2]
            for n in (0, x.shape[2] - 1):
                at = slab * found.strides[1] + n * found.strides[0]
                assert at == 2 * (b * by_batch * (x.shape[0] > 1) + h * by_head * (x.shape[1] > 1) + n * by_row)
    assert found.extents[:2] == (64, x.shape[2])
    assert found.extents[2] - 1 == (x.shape[0] - 1) * found.batch_slabs + (x.shape[1] - 1) * found.head_slabs
    assert all(stride > 0 and stride % 16 == 0 for stride in found.strides)


@pytest.mark.parametrize(("name", "width"), [("q", 64), ("k", 64), ("v", 32), ("d_o", 32)])
def test_widths(name: str, width: int) -> None:
    assert map_of(torch.empty(1, 1, 5, width, dtype=torch.float16), name).extents[0] == width


MAP = TensorMap("k", (64, 50, 12), (128, 6400), (64, 48), 4, 1)


def test_the_bytes_of_a_map() -> None:
    data = map_bytes(MAP, 1 << 40, emulated)
    assert len(data) == BYTES
    assert struct.unpack_from("<Q5Q4Q2I", data) == (1 << 40, 64, 50, 12, 1, 1, 128, 6400, 0, 0, 64, 48)
    assert struct.unpack_from("<ii", data, 128) == (4, 1)


def sequences_of(k: torch.Tensor, name: str = "k") -> TensorMap:
    """The map of a tensor of 16 bits [T, H, D]."""
    rows, heads, _ = k.shape
    by_row, by_head, _ = k.stride()
    known: dict[str, float] = {"batch": 3, "kv_heads": heads, "kv_len": rows}
    known |= {f"{name}_stride_b": 7, f"{name}_stride_h": by_head, f"{name}_stride_n": by_row}
    return tensor_map(Box(name, 48, 64), HEAD_DIM, known, RAGGED.operands)


RAGGED_TENSORS = [
    torch.empty(50, 4, 64, dtype=torch.float16),
    torch.empty(4, 50, 64, dtype=torch.float16).transpose(0, 1),
    torch.empty(50, 1, 64, dtype=torch.float16).expand(-1, 4, -1),
    torch.empty(50, 12, 128, dtype=torch.float16)[:, ::3, 64:],
    torch.empty(50, 1, 64, dtype=torch.float16),
    torch.empty(1, 4, 64, dtype=torch.float16),
]


@pytest.mark.parametrize("x", RAGGED_TENSORS, ids=lambda x: f"{tuple(x.shape)} by {x.stride()}")
def test_a_sequence_ends_where_its_rows_do(x: torch.Tensor) -> None:
    """The last row of a sequence is the last of its dimension, wherever it lies; addresses are modulo 2^64."""
    found = sequences_of(x)
    assert (found.extents[0], found.extents[1], found.batch_slabs) == (64, END, 0)
    assert all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in found.strides)
    assert all(extent < 1 << 32 for extent in found.extents)
    assert found.extents[4] > END
    rows, heads, _ = x.shape
    by_row, by_head, _ = x.stride()
    for begin, count in ((0, rows), (rows // 2, rows - rows // 2), (rows // 3, 1)):
        assert begin + count < found.extents[3]
        for row, h in ((0, 0), (count - 1, heads - 1)):
            place = (END - count + row, h * found.head_slabs, begin + count, END)
            assert all(at < extent for at, extent in zip(place, found.extents[1:], strict=True))
            at = sum(n * stride for n, stride in zip(place, found.strides, strict=True))
            assert at % (1 << 64) == 2 * ((begin + row) * by_row * (rows > 1) + h * by_head * (heads > 1))
        assert END - count + count >= found.extents[1]  # and behind it there is none


# Writes down what it is told; an odd address is refused.
DRIVER = """
#include <stdint.h>
#include <string.h>
extern "C" int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                      const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                                      int interleave, int swizzle, int promotion, int fill) {
  if (reinterpret_cast<uint64_t>(map) % 64) return 99;
  if (reinterpret_cast<uint64_t>(address) % 2) return 1;
  uint64_t more[2] = {0, 0};  // steps of all dimensions, and sizes and strides of those behind the third
  for (uint32_t n = 0; n < rank; ++n) more[0] += steps[n];
  for (uint32_t n = 3; n < rank; ++n) more[1] += sizes[n] * box[n] + strides[n - 1];
  uint64_t words[16] = {uint64_t(type), rank, reinterpret_cast<uint64_t>(address), sizes[0], sizes[1], sizes[2],
                        strides[0], strides[1], box[0], box[1], box[2] + more[1], more[0],
                        uint64_t(interleave), uint64_t(swizzle), uint64_t(promotion), uint64_t(fill)};
  memcpy(map, words, sizeof words);
  return 0;
}
"""


@pytest.fixture(scope="module")
def driver() -> str:
    """The path of a library that stands for the driver's."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return str(compile_sources([Text("driver_maps", DRIVER)])[0].path)


@pytest.mark.parametrize(("columns", "swizzle"), [(64, 3), (32, 2), (16, 1)])
def test_what_the_driver_is_told(driver: str, columns: int, swizzle: int) -> None:
    tensor = TensorMap("k", (64, 50, 12), (128, 6400), (columns, 48), 4, 1)
    words = struct.unpack("<16Q", encode(tensor, 1 << 40, driver))
    assert words == (1, 3, 1 << 40, 64, 50, 12, 128, 6400, columns, 48, 1, 3, 0, swizzle, 2, 0)


def test_what_the_driver_is_told_of_sequences(driver: str) -> None:
    tensor = sequences_of(RAGGED_TENSORS[0])
    words = struct.unpack("<16Q", encode(tensor, 1 << 40, driver))
    more = sum(tensor.extents[3:]) + sum(tensor.strides[2:])
    assert words == (1, 5, 1 << 40, 64, END, 4, 512, 128, 64, 48, 1 + more, 5, 0, 3, 2, 0)


def test_a_tensor_that_the_driver_refuses(driver: str) -> None:
    with pytest.raises(TensorMapRefused, match=r"'k' to tensor copies \(CUDA error 1\): 12 x 50 rows of 64 elements"):
        encode(MAP, 4097, driver)


@pytest.mark.parametrize("library", ["libm.so.6", "libflashgen_no_such_thing.so"])
def test_a_driver_that_knows_no_maps(library: str) -> None:
    with pytest.raises(TensorMapRefused, match="install a driver for CUDA 12 or later"):
        encode(MAP, 4096, library)


def test_a_launch_asks_once_for_each_address() -> None:
    asked: list[int] = []

    def note(tensor: TensorMap, address: int) -> bytes:
        asked.append(address)
        return emulated(tensor, address)

    maps = LaunchMaps([(0, MAP), (2, MAP)], note)
    first = maps([16, 1, 32])
    assert first == map_bytes(MAP, 16, emulated) + map_bytes(MAP, 32, emulated)
    assert maps([16, 2, 32]) is first
    assert LaunchMaps([(1, MAP)], note)([16, 64, 32]) == map_bytes(MAP, 64, emulated)
    asked.pop()
    assert asked == [16, 32]
    for n in range(3 * MOST_REMEMBERED):
        maps([64 * n, 0, 64])
        assert len(maps._known) <= MOST_REMEMBERED
    assert maps([16, 1, 32]) == first


class MappingDriver(RecordingDriver):
    """Writes down the second parameter of the second kernel, too."""

    layout = LAYOUT

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        super().launch(function, grid, threads, shared_bytes, stream, arguments)
        if function == 2:
            places = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p * 2)).contents
            self.calls[-1] += (ctypes.string_at(places[1] or 0, BYTES),)


def test_a_pass_with_maps() -> None:
    """A kernel without boxes gets the struct alone, one with boxes their maps, too, for the addresses of a call."""
    queries = Count((Factor("batch"), Factor("heads"), Factor("q_len", 64)))
    launches = PassLaunches(
        (), (Launch("first", queries, 128, 0), Launch("second", queries, 128, 0, (Box("v", 48, 32),)))
    )
    known: dict[str, float] = {
        "element": 1, "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 90, "v": 1 << 40,
        "v_stride_b": 5760, "v_stride_h": 2880, "v_stride_n": 32,
    }  # fmt: skip
    driver = MappingDriver()
    plan: Any = None
    held = Compiled(Path("a.cubin"), launches, plan)
    kernel = CudaKernel(LAYOUT, HEAD_DIM, lambda *_: held, driver.size, driver=driver)
    prepared = kernel.prepare("forward", LAYOUT.values(known))
    for address in (1 << 40, 1 << 41):
        driver.calls.clear()
        values = LAYOUT.values(known | {"v": address})
        prepared.run(values[: LAYOUT.varying])
        expected = TensorMap("v", (32, 90, 4), (64, 5760), (32, 48), 2, 1)
        packed, maps = LAYOUT.pack(*values), map_bytes(expected, address, emulated)
        assert driver.calls == [
            ("launch", 1, 16, 128, 0, 77, packed),
            ("launch", 2, 16, 128, 0, 77, packed, maps),
        ]
