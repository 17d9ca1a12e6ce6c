"""Schedules of GPU passes: numbers of launches, tensors too large for one, rows that cannot be read in place."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.analysis.variant import analyse
from flashgen.hosts import cuda
from flashgen.hosts.cuda import Counters, CudaKernel, CupyDriver
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.schedule import (
    LIST_BYTES,
    MOST_ELEMENTS,
    CallPart,
    Compiled,
    DeviceSize,
    ListCache,
    is_readable,
    schedule,
)
from flashgen.hosts.tensor_maps import TensorMap, emulated
from flashgen.ir.spec import HeadDim
from flashgen.language import parse_text
from flashgen.plan.arguments import argument_fields
from flashgen.plan.launches import Buffer, Count, Factor, Launch, PassLaunches, TileCounter, VisitLists, aligned
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.recipe import decide

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


SIZE = DeviceSize(multiprocessors=132, cache_bytes=50 << 20)


def values(batch: int = 3, heads: int = 4, kv_heads: int = 2, q_len: int = 100, kv_len: int = 30) -> list[float]:
    """Contiguous bfloat16 tensors."""
    known: dict[str, float] = {
        **POINTERS,
        "element": 1, "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
        "b_start": 5, "h_start": 8,
    }  # fmt: skip
    for name, count, length, width in (
        ("q", heads, q_len, 16), ("k", kv_heads, kv_len, 16), ("v", kv_heads, kv_len, 8), ("d_o", heads, q_len, 8),
        ("dq", heads, q_len, 16), ("dk", kv_heads, kv_len, 16), ("dv", kv_heads, kv_len, 8), ("o", heads, q_len, 8),
    ):  # fmt: skip
        strides = (count * length * width, length * width, width)
        known |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bhn", strides, strict=True)}
    return LAYOUT.values(known)


def test_one_part() -> None:
    found = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(), SIZE)
    (part,) = found.parts
    assert found.workspace_bytes == 4864 + 1280  # 4 · 3 · 4 · 100 and 100 · 3 · 4 bytes, both in whole 256 bytes
    assert [(step.kernel, step.grid, step.threads, step.shared_bytes) for step in part.steps] == [
        ("first", 24, 128, 50_000),
        ("second", 6, 64, 0),
    ]
    assert part.clear == ((4864, 1200),)
    assert part.values(values()) == values()


@pytest.mark.parametrize(("multiprocessors", "grid", "cleared"), [(11, 22, True), (12, 24, False), (13, 24, False)])
def test_blocks_that_stay(multiprocessors: int, grid: int, cleared: bool) -> None:
    """No more are started than run at a time; where all are, none of them takes a further turn, and none counts."""
    first, *_ = LAUNCHES.launches
    launch = replace(first, tile_counter=TileCounter("tile_counter", 2))
    launches = PassLaunches((Buffer("tile_counter", Count((), 4), clear=True),), (launch,))
    (part,) = schedule(launches, LAYOUT, HEAD_DIM, values(), DeviceSize(multiprocessors, 1 << 20)).parts
    assert [step.grid for step in part.steps] == [grid]
    assert part.clear == (((0, 4),) if cleared else ())


def test_an_empty_grid_is_not_started() -> None:
    (part,) = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(q_len=0), SIZE).parts
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
    parts = schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(), SIZE, most).parts
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
        schedule(LAUNCHES, LAYOUT, HEAD_DIM, values(), SIZE, 3199)


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
    assert readable(x[:1, :1].expand(2, 3, -1, -1))
    assert not readable(x[:, :, :1].expand(-1, -1, 50, -1)), "rows that overlap"
    long = torch.empty(1, 2**20, 2**4, 2**8, device="meta").transpose(1, 2)
    assert not readable(long), "rows of one head 2^32 elements apart"
    assert readable(long.contiguous())


class RecordingDriver(CupyDriver):
    """Stands for a device: writes down what it is asked for. Arguments are those of ``layout``."""

    layout = LAYOUT
    size = SIZE

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = True
        self.capturing = False
        self.written: list[Written] = []
        self.memory = 1 << 30  # for lists

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        self.calls.append(("function", path.name, name, shared_bytes))
        return {"first": 1, "second": 2, "lists": 3, "order": 4}[name]

    def stream(self) -> int:
        return 77

    def clear(self, address: int, size: int, stream: int) -> None:
        self.calls.append(("clear", address, size, stream))

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        struct = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)).contents.value
        packed = ctypes.string_at(struct or 0, len(self.layout.pack(*self.layout.values({}))))
        self.calls.append(("launch", function, grid, threads, shared_bytes, stream, packed))

    def encode(self, tensor: TensorMap, address: int) -> bytes:
        return emulated(tensor, address)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        self.calls.append(("enter",))
        self.current = True
        yield
        self.current = False
        self.calls.append(("leave",))

    def is_current(self) -> bool:
        return self.current

    def is_capturing(self) -> bool:
        return self.capturing

    def counters(self, size: int, stream: int) -> Counters:
        raise AssertionError(f"nothing counts: {size} bytes, {stream}")

    def entry_points(self) -> None:
        return None

    def write_once(self, size: int, write: Callable[[int, int], None]) -> Written | None:
        if size > self.memory:
            return None
        address = (1 << 44) + 1000 * len(self.written)
        self.calls.append(("write", size, address))
        write(address, 88)
        self.written.append(Written(address, self))
        return self.written[-1]


class Written(cuda.Written):
    """Memory that was written once."""

    def __init__(self, address: int, driver: RecordingDriver) -> None:
        self.address = address
        self._driver = driver

    def join(self, stream: int) -> None:
        self._driver.calls.append(("join", self.address, stream))


def held(launches: PassLaunches) -> Any:
    """Kernels that a binary holds, whatever the call."""
    plan: Any = None
    return lambda *_: Compiled(Path("a.cubin"), launches, plan)


def test_a_pass_on_a_device() -> None:
    driver = RecordingDriver()
    kernel = CudaKernel(LAYOUT, HEAD_DIM, held(LAUNCHES), driver.size, driver=driver)
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
    prepared.run(filled[: LAYOUT.varying])
    assert driver.calls == expected
    driver.calls.clear()
    driver.current = False  # another device is PyTorch's current one
    prepared.run(filled[: LAYOUT.varying])
    assert driver.calls == [("enter",), *expected, ("leave",)]


LISTS = VisitLists(
    field="visits_of_queries",
    tiles=(64, 32),
    kept=True,
    order=None,
    pairs=Count((Factor("q_len", 64), Factor("kv_len", 32))),
    count=Count((Factor("q_len", 64),)),
    readers=LAUNCHES.launches[0].grid,
    parts=(
        Count((Factor("q_len", 64), Factor("kv_len", 32 * 1024)), 16),
        Count((Factor("q_len", 64), Factor("kv_len", 8 * 32)), 16),
    ),
    launches=(
        Launch("lists", Count((Factor("q_len", 64),)), 128, 2332),
        Launch("order", Count((Factor("q_len", 64),), divide=4), 128, 0),
    ),
    sizes=("q_len", "kv_len"),
    params=(("param_salt", "place_salt"),),
)
SALTED = parse_text("attention a { head_dim 16/8  param salt: i32 = 1  mask hash(i, j, salt) % 3 == 0 }").specs[0]


def test_a_package_has_the_kernels_of_lists() -> None:
    """Those that a host starts for lists that it keeps are among those of a pass."""
    found = PassLaunches((), LAUNCHES.launches, (LISTS,)).kernels
    own = (*LAUNCHES.launches, *LISTS.launches)
    assert found == {launch.kernel: launch for launch in own}
    assert len(found) == len(own)


def test_lists_of_visits_on_a_device() -> None:
    """Made once for all that they depend on, on a stream of their own; joined before a launch reads them."""
    layout = ArgumentLayout(cuda_fields(decide(analyse(SALTED, HEAD_DIM))))
    driver = RecordingDriver()
    driver.layout = layout
    launches = PassLaunches((), LAUNCHES.launches[:1], (LISTS,))
    kernel = CudaKernel(layout, HEAD_DIM, held(launches), driver.size, ListCache(eager=True), driver=driver)
    base = {name: value for name, value in LAYOUT.named(values()).items() if name in layout.slots}

    def run(**known: float) -> list[tuple[Any, ...]]:
        """What one call asks for; of the arguments where the lists are, the others are the call's."""
        filled = layout.values(base | {"param_salt": 1} | known)
        prepared = kernel.prepare("forward", filled)
        driver.calls.clear()
        prepared.run(filled[: layout.varying])
        for n, call in enumerate(driver.calls):
            if call[0] == "launch":
                own = layout.named(unpacked(layout, call[-1]))
                driver.calls[n] = (*call[:-1], own["visits_of_queries"])
                assert own == layout.named(filled) | {"visits_of_queries": own["visits_of_queries"]}
        return list(driver.calls)

    first, second = 1 << 44, (1 << 44) + 1000
    makes = [("write", 64, first), ("launch", 3, 2, 128, 2332, 88, first), ("launch", 4, 1, 128, 0, 88, first)]
    reads = [("join", first, 77), ("launch", 1, 24, 128, 50_000, 77, first)]
    assert run() == makes + reads
    assert run() == reads
    assert run(heads=4, batch=3, k=1 << 45) == reads, "nothing that they depend on"
    assert run(param_salt=2)[:1] == [("write", 64, second)]
    assert run() == reads
    bare = [("launch", 1, 24, 128, 50_000, 77, 0)]
    assert run(place_salt=1 << 46) == bare, "only the GPU knows the param"
    driver.capturing = True
    assert run() == bare, "a graph may outlive the lists"
    driver.capturing = False
    driver.memory = 63
    assert run(param_salt=3) == bare, "no memory is left"
    assert run() == reads, "what there is stays"
    driver.memory = 64
    assert run(param_salt=3)[:1] == [("write", 64, second + 1000)]
    kernel.list_cache.most_bytes = 63
    assert run() == bare, "too large"


MOST_OWN = 184_576  # rows of 64, keys of 32: the most whose lists take no more than LIST_BYTES


def own_lists(readers: int) -> PassLaunches:
    """A pass that makes its lists itself, read by so many blocks a batch entry and head."""
    making = tuple(replace(each, makes=LISTS.field) for each in LISTS.launches)
    lists = replace(LISTS, kept=False, readers=Count(HEADS, readers), launches=making)
    first, second = LAUNCHES.launches
    return PassLaunches(LAUNCHES.buffers, (first, *making, second), (lists,))


def test_lists_of_a_call_lie_in_its_workspace() -> None:
    """Behind all else, where many blocks read them and they are not too large; each part has its own."""
    layout = ArgumentLayout(cuda_fields(decide(analyse(SALTED, HEAD_DIM))))
    base = {name: value for name, value in LAYOUT.named(values()).items() if name in layout.slots}

    def parts(readers: int, most: int = MOST_ELEMENTS, *, eager: bool = False, **known: float) -> Sequence[CallPart]:
        filled = layout.values(base | known)
        found = schedule(own_lists(readers), layout, HEAD_DIM, filled, SIZE, most, eager=eager)
        assert found.workspace_bytes == max(part.workspace_bytes for part in found.parts)
        return found.parts

    for few in (parts(42), parts(43, q_len=MOST_OWN + 64, kv_len=MOST_OWN)):
        assert [(part.places, [step.kernel for step in part.steps]) for part in few] == [((), ["first", "second"])]
        assert set(few[0].buffers) == {"delta", "dq"}
    for large in (parts(43), parts(1, eager=True), parts(43, q_len=MOST_OWN, kv_len=MOST_OWN)):
        (part,) = large
        assert [step.kernel for step in part.steps] == ["first", "lists", "order", "second"]
        (at, size) = part.buffers[LISTS.field]
        assert at == sum(aligned(length) for name, (_, length) in part.buffers.items() if name != LISTS.field)
        assert part.places == ((layout.slots[LISTS.field], at),)
        assert 64 <= size <= LIST_BYTES
        assert part.workspace_bytes == at + aligned(size)
        assert part.lists == ()
    assert [bool(part.places) for part in parts(128, 6400)] == [True] * 3
    assert [bool(part.places) for part in parts(127, 6400)] == [False] * 3


def test_lists_of_a_call_on_a_device() -> None:
    """Made in the order of the stream, in graphs, too; nothing is kept."""
    layout = ArgumentLayout(cuda_fields(decide(analyse(SALTED, HEAD_DIM))))
    driver = RecordingDriver()
    driver.layout = layout
    kernel = CudaKernel(layout, HEAD_DIM, held(own_lists(43)), driver.size, driver=driver)
    base = {name: value for name, value in LAYOUT.named(values()).items() if name in layout.slots}
    filled = layout.values(base | {"workspace": 1 << 50})
    prepared = kernel.prepare("forward", filled)
    for driver.capturing in (False, True):
        driver.calls.clear()
        prepared.run(filled[: layout.varying])
        found = [call for call in driver.calls if call[0] == "launch"]
        assert [(call[1], call[5]) for call in found] == [(1, 77), (3, 77), (4, 77), (2, 77)]
        for call in found:
            own = layout.named(unpacked(layout, call[-1]))
            assert own == layout.named(filled) | {"visits_of_queries": (1 << 50) + 4864 + 1280}
    assert layout.named(filled)["visits_of_queries"] == 0
    assert len(kernel.list_cache) == 0


def test_no_memory_is_no_error_where_lists_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(size: int, stream: object) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"{size} bytes on {stream}")

    monkeypatch.setattr(cuda, "lasting", no_memory)
    driver = object.__new__(CupyDriver)
    driver._beside = "a stream"
    assert driver.write_once(64, lambda *_: pytest.fail("nothing was allocated")) is None


def unpacked(layout: ArgumentLayout, packed: bytes) -> list[float]:
    """The values of a struct."""
    pack: Any = layout.pack
    return list(pack.__self__.unpack(packed))
