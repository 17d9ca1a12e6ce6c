"""Schedules of GPU passes: numbers of launches, tensors too large for one, rows that cannot be read in place."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.ir.spec import HeadDim
from flashgen.language import parse_text
from flashgen.plan.arguments import argument_fields
from flashgen.plan.launches import Buffer, Count, Factor, Launch, PassLaunches
from flashgen.runtime.cuda import CudaKernel
from flashgen.runtime.kernel import ArgumentLayout
from flashgen.runtime.schedule import MOST_ELEMENTS, Compiled, is_readable, schedule

HEAD_DIM = HeadDim(16, 8)
LAYOUT = ArgumentLayout(argument_fields(parse_text("attention a { head_dim 16/8 }").specs[0]))
HEADS = (Factor("batch"), Factor("heads"))
LAUNCHES = PassLaunches(
    (Buffer("delta", Count((*HEADS, Factor("q_len")), 4)), Buffer("dq", Count(HEADS, 100), clear=True)),
    (
        Launch("first", Count((*HEADS, Factor("q_len", 64))), 128, 50_000),
        Launch("second", Count((Factor("batch"), Factor("kv_heads"))), 64, 0),
    ),
)
POINTERS = {name: 1 << (40 + n) for n, name in enumerate(("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv"))}


def values(batch: int = 3, heads: int = 4, kv_heads: int = 2, q_len: int = 100, kv_len: int = 30) -> list[float]:
    """Contiguous bfloat16 tensors."""
    known: dict[str, float] = {
        **POINTERS,
        "element": 1, "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
        "b_start": 5, "h_start": 8,
    }  # fmt: skip
    for name, count, length, width in (
        ("q", heads, q_len, 16), ("k", kv_heads, kv_len, 16), ("v", kv_heads, kv_len, 8), ("d_o", heads, q_len, 8),
    ):  # fmt: skip
        strides = (count * length * width, length * width, width)
        known |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bhn", strides, strict=True)}
    return LAYOUT.values(known)


def test_one_part() -> None:
    found = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values())
    (part,) = found.parts
    assert found.workspace_bytes == 4864 + 1280  # 4 · 3 · 4 · 100 and 100 · 3 · 4 bytes, both in whole 256 bytes
    assert [(step.kernel, step.grid, step.threads, step.shared_bytes) for step in part.steps] == [
        ("first", 24, 128, 50_000),
        ("second", 6, 64, 0),
    ]
    assert part.clear == ((4864, 1200),)
    assert part.values(values()) == values()


def test_an_empty_grid_is_not_started() -> None:
    (part,) = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(q_len=0)).parts
    assert [step.kernel for step in part.steps] == ["second"]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (MOST_ELEMENTS, [(5, 3, 8, 4)]),
        (3 * 6400 - 1, [(5, 2, 8, 4), (7, 1, 8, 4)]),
        (6400, [(5, 1, 8, 4), (6, 1, 8, 4), (7, 1, 8, 4)]),
        (6399, [(b, 1, h, 2) for b in (5, 6, 7) for h in (8, 10)]),
    ],
)
def test_large_tensors_are_divided(most: int, expected: list[tuple[int, ...]]) -> None:
    parts = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(), most).parts
    named = [LAYOUT.named(part.values(values())) for part in parts]
    assert [tuple(each[name] for name in ("b_start", "batch", "h_start", "heads")) for each in named] == expected
    for each in named:
        b, head = each["b_start"] - 5, each["h_start"] - 8
        rows, keys = (b * 4 + head) * 100, (b * 2 + head / 2) * 30
        distances = {"q": 32 * rows, "o": 16 * rows, "dq": 32 * rows, "d_o": 16 * rows, "lse": 4 * rows}
        distances |= {"k": 32 * keys, "v": 16 * keys, "dk": 32 * keys, "dv": 16 * keys}
        assert {name: each[name] - start for name, start in POINTERS.items()} == distances
        assert each["d_lse"] == 0, "a null pointer stays one"
        assert each["kv_heads"] * 2 == each["heads"]


def test_a_head_that_is_too_large() -> None:
    with pytest.raises(ValueError, match="one key/value head reaches over more than 3199 elements"):
        schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(), 3199)


def test_what_is_read_in_place() -> None:
    def readable(x: torch.Tensor) -> bool:
        return is_readable(x.shape, x.stride(), x.element_size())

    x = torch.empty(2, 3, 50, 16, dtype=torch.bfloat16, device="meta")
    assert readable(x)
    assert readable(x.transpose(1, 2))
    assert readable(x[:, :, ::2])
    assert readable(x[..., :8])
    assert not readable(x.transpose(2, 3))
    assert not readable(torch.empty(2, 3, 50, 17, dtype=torch.bfloat16, device="meta")[..., :16])
    assert readable(torch.empty(2, 3, 50, 20, dtype=torch.bfloat16, device="meta")[..., :17]), "element by element"
    assert readable(torch.empty(1, 1, 1, 17, dtype=torch.bfloat16, device="meta")[..., 1:]), "one row"
    long = torch.empty(1, 2**20, 2**4, 2**8, device="meta").transpose(1, 2)
    assert not readable(long), "rows of one head 2^32 elements apart"
    assert readable(long.contiguous())


class RecordingDriver:
    """Stands for a device: writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = True

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        self.calls.append(("function", path.name, name, shared_bytes))
        return {"first": 1, "second": 2}[name]

    def stream(self) -> int:
        return 77

    def clear(self, address: int, size: int, stream: int) -> None:
        self.calls.append(("clear", address, size, stream))

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        struct = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)).contents.value
        packed = ctypes.string_at(struct or 0, len(LAYOUT.pack(*LAYOUT.values({}))))
        self.calls.append(("launch", function, grid, threads, shared_bytes, stream, packed))

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        self.calls.append(("enter",))
        self.current = True
        yield
        self.current = False
        self.calls.append(("leave",))

    def is_current(self) -> bool:
        return self.current


def test_a_pass_on_a_device() -> None:
    driver = RecordingDriver()
    kernel = CudaKernel(LAYOUT, HEAD_DIM, driver, lambda _: Compiled(Path("a.cubin"), lambda *_: LAUNCHES))
    prepared = kernel.prepare("backward", values())
    assert driver.calls == [("function", "a.cubin", "first", 50_000), ("function", "a.cubin", "second", 0)]
    driver.calls.clear()
    filled = values()
    filled[LAYOUT.slots["workspace"]] = 1 << 50
    packed = LAYOUT.pack(*filled)
    expected = [
        ("clear", (1 << 50) + 4864, 1200, 77),
        ("launch", 1, 24, 128, 50_000, 77, packed),
        ("launch", 2, 6, 64, 0, 77, packed),
    ]
    prepared.run(filled)
    assert driver.calls == expected
    driver.calls.clear()
    driver.current = False  # another device is PyTorch's current one
    prepared.run(filled)
    assert driver.calls == [("enter",), *expected, ("leave",)]
