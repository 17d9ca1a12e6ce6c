"""New rows of a cache: the kernel of GPUs, under the emulator, against PyTorch's operators, which CPUs run."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.hosts.emulator.program import DeviceMemory, Program, compile_program
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.hosts.standalone import grid
from flashgen.op.appending import KERNEL, AppendedRows, Arguments, append, arguments
from flashgen.op.cached import Cache, cache_of
from flashgen.op.signature import F8

B, HKV, NEW = 3, 2, 5


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def program(text: str = KERNEL.source.text) -> Program:
    return compile_program(text, name="append")


def by_kernel(
    cache: Cache, cached: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], compiled: Program | None = None
) -> Cache:
    """``append`` by the kernel; tensors of the cache are whole in memory, views of them what is written to."""
    compiled, memory, filled = compiled or program(), DeviceMemory(), torch.empty_like(cache.lengths)
    factors = (cache.k_factors, cache.v_factors)
    packed = arguments(filled, cache.lengths, cache.entries, cache.blocks, factors, cached, fresh)
    written = []

    def put(name: str, x: Tensor) -> int:
        storage = x.untyped_storage()
        place = memory.put(name, ctypes.string_at(storage.data_ptr(), storage.nbytes())) if storage.nbytes() else 0
        written.append((storage, place))
        return place + x.data_ptr() - storage.data_ptr() if place else 0

    for n, (x, to, factor) in enumerate(zip(fresh, cached, factors, strict=True)):
        packed.of[n].source, packed.of[n].to = put(f"x{n}", x), put(f"cache{n}", to)
        packed.of[n].factors = put(f"factors{n}", factor)
    packed.lengths, packed.filled = put("lengths", cache.lengths), put("filled", filled)
    packed.entries, packed.pages = put("entries", cache.entries), put("pages", cache.blocks)
    rows = 2 * fresh[0].shape[0] * fresh[0].shape[1] * fresh[0].shape[2]
    compiled.launch("fg_append", (grid(rows), 1, 1), (256, 1, 1), 0, bytes(packed), memory.allocations)
    for storage, place in written:
        if place:
            ctypes.memmove(storage.data_ptr(), place, storage.nbytes())
    return Cache(filled, cache.padding, cache.entries, cache.blocks, cache.k_factors, cache.v_factors)


def caches(form: str, dtype: torch.dtype, widths: tuple[int, int]) -> tuple[dict[str, Any], list[Tensor]]:
    """What ``cache_of`` is told beside lengths, and caches that are slices of others."""
    shapes: dict[str, tuple[int, int]] = {"entries": (B, 40), "chosen": (5, 40), "pages": (9, 16), "odd pages": (16, 7)}
    count, rows = shapes[form]
    made = [
        random(count, rows, HKV + 1, width, seed=n).to(dtype).transpose(1, 2)[:, 1:] for n, width in enumerate(widths)
    ]
    given: dict[str, Any] = {}
    if form == "chosen":
        given["cache_batch_idx"] = torch.tensor([4, 0, 2])
    if "pages" in form:
        columns = count // B
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        given["block_table"] = order[: B * columns].view(B, columns).int()
    return given, made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F8])
@pytest.mark.parametrize("form", ["entries", "chosen", "pages", "odd pages"])
@pytest.mark.parametrize("widths", [(128, 64), (40, 33), (7, 6)])
def test_the_kernel_writes_what_operators_write(form: str, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    if dtype is F8:  # the emulator tells stores of two bytes apart, and no finer ones
        widths = (widths[0] // 2 * 2, widths[1] // 2 * 2)
    given, cached = caches(form, dtype, widths)
    own = torch.bfloat16 if dtype is F8 and widths[0] == 128 else torch.float32 if dtype is F8 else dtype
    k, v = (random(B, NEW, HKV, width, seed=4 + n, dtype=own).transpose(1, 2) for n, width in enumerate(widths))
    if dtype is F8:
        given |= {"k_descale": random(B, HKV, seed=6).abs() / 50, "v_descale": random(B, HKV, seed=7).abs() / 50}
    if widths[0] < 8:  # numbers that do not lie together
        k = random(B, HKV, widths[0], NEW, seed=8, dtype=own).transpose(2, 3)
    q = torch.empty(B, HKV, 1, widths[0])
    cache = cache_of(q, cached[0], cached[1], torch.tensor([11, 0, 30][:B]).clamp(max=16), **{
        "block_table": None, "cache_batch_idx": None, "leftpad": None, **given
    })  # fmt: skip
    theirs, mine = ([x._base.clone().transpose(1, 2)[:, 1:] for x in cached] for _ in range(2))  # type: ignore[union-attr]
    wanted = append(cache, theirs[0], theirs[1], k, v)
    found = by_kernel(cache, (mine[0], mine[1]), (k, v))
    assert torch.equal(found.lengths, wanted.lengths)
    for x, y, before in zip(mine, theirs, cached, strict=True):
        assert x._base is not None
        assert y._base is not None
        assert torch.equal(x._base.view(torch.uint8), y._base.view(torch.uint8))
        assert not torch.equal(x.float(), before.float())


@pytest.mark.parametrize("widths", [(128, 64), (40, 6)])
def test_rows_of_eight_bits_are_copied(widths: tuple[int, int]) -> None:
    """Whatever the factors are; values of more bits beside them are rounded."""
    given, cached = caches("odd pages", F8, widths)
    k = random(B, NEW, HKV, widths[0], seed=4, dtype=F8).transpose(1, 2)
    v = random(B, NEW, HKV, widths[1], seed=5, dtype=torch.bfloat16).transpose(1, 2)
    given |= {"k_descale": 0.25, "v_descale": 0.5, "cache_batch_idx": None, "leftpad": None}
    cache = cache_of(torch.empty(B, HKV, 1, widths[0]), cached[0], cached[1], torch.tensor([11, 0, 16]), **given)
    theirs, mine = ([x._base.clone().transpose(1, 2)[:, 1:] for x in cached] for _ in range(2))  # type: ignore[union-attr]
    append(cache, theirs[0], theirs[1], k, v)
    by_kernel(cache, (mine[0], mine[1]), (k, v))
    page = theirs[0][int(cache.blocks[1, 0])]
    assert torch.equal(page[:, :NEW].view(torch.uint8), k[1].contiguous().view(torch.uint8))
    for x, y in zip(mine, theirs, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_eight_bits_are_rounded_as_pytorch_rounds() -> None:
    """Every number of bfloat16 and many of float32, halfway between two of 8 bits among them."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    between = torch.arange(256).to(torch.uint8).view(F8).float()
    halves = ((between[1:] + between[:-1]) / 2).repeat(3) * torch.tensor(
        [1.0, 1 + 2**-23, 1 - 2**-23]
    ).repeat_interleave(255)
    for x in (every.view(1, 1, 8, -1), halves.view(1, 1, 1, -1), random(1, 1, 8, 500, seed=1) * 100):
        rows, width = x.shape[2:]
        cached = [torch.zeros(1, 1, rows, width).to(F8) for _ in range(4)]
        cache = cache_of(
            torch.empty(1, 1, 1, width), cached[0], cached[1], 0, block_table=None, cache_batch_idx=None, leftpad=None
        )
        append(cache, cached[0], cached[1], x, x)
        by_kernel(cache, (cached[2], cached[3]), (x, x))
        assert torch.equal(cached[0].view(torch.uint8), cached[2].view(torch.uint8))


OUTSIDE: dict[str, dict[str, Any]] = {
    "behind the last row": {"lengths": [38, 2**31 - 1, 3]},
    "before the first": {"lengths": [-2, -(2**31), 3]},
    "entries": {"lengths": [3, 4, 5], "cache_batch_idx": torch.tensor([-1, 7, 1])},
    "pages": {"lengths": [14, 30, 3], "block_table": torch.tensor([[0, -1, 5], [2, 3, 9], [-7, 100, 1]])},
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_rows_without_a_place_are_left_out(what: str) -> None:
    """All others are written."""
    given = {"block_table": None, "cache_batch_idx": None, "leftpad": None, **OUTSIDE[what]}
    lengths = given.pop("lengths")
    is_paged = given["block_table"] is not None
    cached = torch.zeros(9, HKV, 16, 8) if is_paged else torch.zeros(B, HKV, 40, 8)
    fresh = random(B, HKV, NEW, 8, seed=1)
    cache = cache_of(torch.empty(B, HKV, 1, 8), cached, cached, torch.tensor(lengths), **given)
    wanted = cached.clone()
    for b in range(B):
        for n in range(NEW):
            place, entry, rows = lengths[b] + n, b, cached.shape[2]
            if is_paged:
                column, place = divmod(place, rows)
                entry = int(given["block_table"][b, column]) if column < 3 else -1
            elif given["cache_batch_idx"] is not None:
                entry = int(given["cache_batch_idx"][b])
            if 0 <= place < rows and 0 <= entry < len(cached):
                wanted[entry, :, place] = fresh[b, :, n]
    values = cached.clone()
    found = by_kernel(cache, (cached, values), (fresh, fresh))
    assert torch.equal(cached, wanted)
    assert torch.equal(values, wanted)
    assert found.lengths.tolist() == [min(length + NEW, 2**31 - 1) for length in lengths]


@pytest.mark.parametrize(
    ("check", "lengths", "entries"),
    [
        ("place >= a.rows", [3, 3, 39], [0, 1, 2]),
        ("if (place < 0) return;", [-9, 3, 3], [0, 1, 2]),
        ("entry < 0", [3, 3, 3], [-90, 1, 2]),
        ("entry >= a.count", [3, 3, 3], [0, 99, 2]),
    ],
)
def test_a_check_that_is_missing_is_seen(check: str, lengths: list[int], entries: list[int]) -> None:
    text = KERNEL.source.text
    assert text.count(check) == 1
    broken = program(text.replace(check, "" if check.startswith("if") else "false"))
    cached, fresh = torch.zeros(B, HKV, 40, 8), random(B, HKV, NEW, 8, seed=1)
    cache = cache_of(
        torch.empty(B, HKV, 1, 8), cached, cached, torch.tensor(lengths), block_table=None, leftpad=None,
        cache_batch_idx=torch.tensor(entries),
    )  # fmt: skip
    with pytest.raises(EmulatorError) as caught:
        by_kernel(cache, (cached, cached.clone()), (fresh, fresh), broken)
    assert caught.value.kind is FaultKind.OUTSIDE


def test_what_crosses_to_the_kernel() -> None:
    assert ctypes.sizeof(AppendedRows) == 3 * 8 + 8 * 8 + 4 * 4
    assert ctypes.sizeof(Arguments) == 2 * ctypes.sizeof(AppendedRows) + 4 * 8 + 3 * 8 + 4 * 4


def test_lengths_are_checked_of_a_cache_that_leaves_out_numbers() -> None:
    """As ``FLASHGEN_CHECK_LENGTHS`` does on a GPU."""
    cached = torch.zeros(B, HKV, 40, 8)
    cache = cache_of(
        torch.empty(B, HKV, 1, 8), cached, cached, torch.tensor([3, 40, 1]), block_table=None, leftpad=None,
        cache_batch_idx=None,
    )  # fmt: skip
    assert cache.check(cached, 1) == [(3, 0), (40, 0), (1, 0)]
    with pytest.raises(ValueError, match="sequence 2 has 1 rows in the cache, but 2 queries"):
        cache.check(cached, 2)


def test_programs_see_one_operator() -> None:
    """What traces a call on a GPU finds no more than that."""
    with FakeTensorMode():
        cached = [torch.empty(B, HKV, 40, 8, device="cuda") for _ in range(2)]
        fresh = torch.empty(B, HKV, NEW, 8, device="cuda")
        lengths = torch.empty(B, dtype=torch.int32, device="cuda")
        cache = cache_of(fresh, cached[0], cached[1], lengths, block_table=None, cache_batch_idx=None, leftpad=None)
        seen: list[str] = []

        class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Seen():  # type: ignore[no-untyped-call]
            found = append(cache, cached[0], cached[1], fresh, fresh)
    assert [name for name in seen if not name.startswith("prim.")] == ["flashgen.append_rows.default"]
    assert found.lengths.shape == (B,)
