"""Lists of visits that calls on GPUs share: what they hold, who has some, what is kept of them and for how long."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.analysis.levels import observed_loads
from flashgen.analysis.pieces import is_cut, is_irregular
from flashgen.analysis.selection import reads_tiles
from flashgen.analysis.tiles import Tile, TileClass, classify
from flashgen.analysis.variant import Variant, analyse
from flashgen.hosts.backends import EMULATED
from flashgen.hosts.emulated import Counted, EmulatedKernel, emulator_provider, recording
from flashgen.hosts.emulator.program import DeviceMemory, compile_program
from flashgen.hosts.gpu_calls import launches_of
from flashgen.hosts.kernel import ArgumentLayout, Step
from flashgen.hosts.schedule import LEAST_TILES, MOST_LISTS, ListCache, SharedLists
from flashgen.ir.expr import Expr, Symbol, index, size, walk
from flashgen.ir.interval import IntRange
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_file
from flashgen.op.call import CallChecker
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp, OpParts
from flashgen.plan.arguments import param_field
from flashgen.plan.launches import VisitLists
from flashgen.plan.measured import Pins
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.lists import OF_KEYS, OF_QUERIES, cuda_fields
from flashgen.targets.gpu.model import VISIT_LIST
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import emitted, of_type, variant_of
from tests.ir.values import evaluate
from tests.masks.measure import exact
from tests.numeric.helpers import assert_close, failures, normal

WINDOW = 32  # tiles of a window of the lists under test, in place of 1024
BYTES_OF_LIST = VISIT_LIST - (2 * 1024 // 8 + 2 * 1024) + (2 * WINDOW // 8 + 2 * WINDOW)
BY_HEAD = "param salt: i32 = 5  mask hash(h, i // 24, j // 8, salt) % 6 == 0 or (b == 1 and i == j)"
MASKS = {
    "dilated": "mask causal and dilated(60, 4)",
    "butterfly": "layout block 16: I == J or popcount(I ^ J) == 1",
    "random blocks": "layout block 24: hash(I, J, 3) % 4 == 0",
    "image": "mask abs(i // 18 - j // 18) <= 2 and abs(i % 18 - j % 18) <= 2",
    "bits": "mask popcount(i & j) % 2 == 0 and i // 64 != j // 64",
    "by head": BY_HEAD,
}
SHARDS: tuple[dict[str, int], ...] = (
    {"q_len": 700, "kv_len": 650},
    {"q_len": 333, "kv_len": 1, "q_start": 90, "kv_start": 41},
    {"q_len": 201, "kv_len": 1100, "q_start": 130, "kv_start": 17, "b_start": 1, "h_start": 4},
)


def spec(statements: str) -> str:
    """The text of a spec with this mask."""
    return f"attention listed {{ head_dim 16  dtype bf16\n {statements} }}"


def whole(**fields: int) -> dict[str, int]:
    """Values of ``struct Arguments`` for a call of which these are known."""
    known = {"batch": 2, "heads": 2, "kv_heads": 1, "element": 1, "q_stride_n": 16, "k_stride_n": 16, **fields}
    totals = {"q_total": ("q_start", "q_len"), "kv_total": ("kv_start", "kv_len")}
    known |= {total: known.get(start, 0) + known[length] + 3 for total, (start, length) in totals.items()}
    return {"b_total": 3, "h_total": 8, **known}


# What they hold -------------------------------------------------------------------------------------------------------


def classes(variant: Variant, known: dict[str, int], b: int, h: int, rows: int, columns: int) -> Any:
    """0, 1 or 2 for every tile of a head: by brute force where tiles are cut, which decides them, else by ranges."""
    sizes = {"B": known["b_total"], "H": known["h_total"], "Hkv": known["h_total"] // 2}
    sizes |= {"Nq": known["q_total"], "Nk": known["kv_total"]}
    params = {each.name: known[param_field(each.name)] for each in variant.spec.params}
    b, h = known.get("b_start", 0) + b, known.get("h_start", 0) + h
    i, j = (known.get(f"{side}_start", 0) + np.arange(known[f"{side}_len"]) for side in ("q", "kv"))
    if is_cut(variant.keep):
        values: dict[Expr, Any] = {size(name): np.array(value) for name, value in sizes.items()}
        read = (node for node in walk(variant.keep) if isinstance(node, Symbol) and node.name in params)
        values |= {node: np.array(params[node.name]) for node in read}
        values |= {index("b"): np.array(b), index("h"): np.array(h), index("i"): i[:, None], index("j"): j[None, :]}
        return exact(np.broadcast_to(evaluate(variant.keep, values), (len(i), len(j))), rows, columns)
    found = np.zeros((-(-len(i) // rows), -(-len(j) // columns)), np.int8)
    for row, column in np.ndindex(found.shape):
        some, others = i[row * rows : (row + 1) * rows], j[column * columns : (column + 1) * columns]
        spans = IntRange(int(some[0]), int(some[-1])), IntRange(int(others[0]), int(others[-1]))
        kind = classify(variant.keep, Tile(IntRange(b, b), IntRange(h, h), *spans, sizes, params))
        found[row, column] = (TileClass.EMPTY, TileClass.PARTIAL, TileClass.FULL).index(kind)
    return found


def expected(
    found: Any, order: str, known: dict[str, int], rows: int, columns: int
) -> list[tuple[list[int], list[int]]]:
    """The visits of every tile: PARTIAL ones and FULL ones. A tile that reaches past the end is never FULL."""
    found = found.copy()
    if known["kv_len"] % columns:
        found[:, -1] = np.minimum(found[:, -1], 1)
    if order == OF_KEYS and known["q_len"] % rows:
        found[-1] = np.minimum(found[-1], 1)
    lists = found if order == OF_QUERIES else found.T
    return [
        ([int(n) for n in np.flatnonzero(each == 1)], [int(n) for n in np.flatnonzero(each == 2)]) for each in lists
    ]


class Lists:
    """What a kernel wrote: of every mask and tile its visits, whichever window they are in."""

    def __init__(self, content: bytes, lists: VisitLists, count: int, visited: int) -> None:
        words = np.frombuffer(content, np.uint16)
        windows = -(-visited // WINDOW)
        chunks = words[: count * 8 * (windows + -(-visited // 8))].reshape(count, -1, 8)
        self.numbers = [int(each[0].view(np.uint32)[1]) if lists.order else n for n, each in enumerate(chunks)]
        self.visits = {number: self._visits(own, windows) for number, own in zip(self.numbers, chunks, strict=True)}

    def _visits(self, own: Any, windows: int) -> tuple[list[int], list[int]]:
        """PARTIAL and FULL ones."""
        partial: list[int] = []
        full: list[int] = []
        for window in range(windows):
            chunks = own[window * (1 + WINDOW // 8) :]
            partials, count = (int(x) for x in chunks[0, :2])
            listed = [WINDOW * window + int(x) for x in chunks[1:].reshape(-1)[:count]]
            partial += listed[:partials]
            full += listed[partials:]
        return partial, full

    @property
    def lengths(self) -> list[int]:
        """In the order in which they lie."""
        return [sum(len(each) for each in self.visits[number]) for number in self.numbers]


@pytest.mark.parametrize("name", MASKS)
def test_they_hold_what_the_analysis_finds(name: str) -> None:
    """Of queries and of keys, in windows, for shards, for each mask of a batch entry and head."""
    variant = variant_of(spec(MASKS[name]))
    source = emitted(spec(MASKS[name])).whole
    text = source[: source.index("// ---- Forward -")].replace("WINDOW = 1024", f"WINDOW = {WINDOW}")
    text = text.replace(f"sizeof(VisitList) == {VISIT_LIST}", f"sizeof(VisitList) == {BYTES_OF_LIST}")
    program = compile_program(text, name="lists")
    plan = GPUS["sm_80"].plan(variant, Pins(element=ElementType.BF16))
    layout = ArgumentLayout(cuda_fields(plan.recipe))
    is_by_head, listed = "hash(h" in MASKS[name], 0
    for shard in SHARDS:
        known = whole(**shard) | ({param_field("salt"): 11} if variant.spec.params else {})
        for which in ("forward", "backward"):
            values = layout.values(known | {"deterministic": 1})
            launches = launches_of(plan, which, layout.named(values))
            for lists in launches.lists:
                visited = -(-known["kv_len" if lists.field == OF_QUERIES else "q_len"] // lists.tiles[1])
                tiles = -(-known["q_len" if lists.field == OF_QUERIES else "kv_len"] // lists.tiles[0])
                masks = known["batch"] * known["heads"] if is_by_head else 1
                assert lists.count.value(known) == masks * tiles
                assert (lists.order is None) is is_by_head
                memory = DeviceMemory()
                size = (2 - is_by_head) * 16 * masks * tiles * (-(-visited // WINDOW) + -(-visited // 8))
                size += 0 if is_by_head else 4 * tiles
                filled = layout.values(known | {lists.field: memory.allocate(lists.field, size)})
                for launch in lists.launches:
                    program.launch(
                        launch.kernel,
                        (launch.grid.value(known), 1, 1),
                        (launch.threads, 1, 1),
                        launch.shared_bytes,
                        layout.pack(*filled),
                        memory.allocations,
                    )
                written = Lists(memory.bytes_of(lists.field), lists, masks * tiles, visited)
                assert sorted(written.numbers) == list(range(masks * tiles))
                if lists.order:
                    assert written.lengths == sorted(written.lengths, reverse=True)
                for mask in range(masks):
                    b, h = divmod(mask, known["heads"])
                    rows, columns = lists.tiles if lists.field == OF_QUERIES else reversed(lists.tiles)
                    found = classes(variant, known, b, h, rows, columns)
                    truth = expected(found, lists.field, known, rows, columns)
                    assert [written.visits[mask * tiles + tile] for tile in range(tiles)] == truth
                    listed += sum(len(partial) + len(full) for partial, full in truth)
    assert listed > 10


# Calls ----------------------------------------------------------------------------------------------------------------


def results(op: AttentionOp, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """o and the gradients of q, k and v, repeatable bit by bit."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = op(*leaves, deterministic=True, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.cos(torch.arange(o.numel()).view(o.shape)).to(o))]


def traffic_of(counted: Sequence[Counted], field: str) -> list[int]:
    """Bytes of lists that each pass read."""
    return [each.report.traffic[field].loaded if field in each.report.traffic else 0 for each in counted]


def made(counted: Sequence[Counted]) -> list[str]:
    """The lists that had to be made, over all passes."""
    return [name for each in counted for name in each.lists.traffic]


@functools.cache
def asking() -> AttentionOp:
    """Its mask reads two of three params, and nothing of heads."""
    text = """
    param salt: i32 = 1  param share: f32 = 0.25  param ell: f32 = 1.0
    score ell * s  mask float(hash(i // 8, j // 8, salt) % 4096) < share * 4096.0
    """
    return flashgen.loads(spec(text).replace("listed", "asking"), backend="emulator")


def inputs(batch: int = 1, heads: int = 1, q_len: int = 60, kv_len: int = 60) -> list[Tensor]:
    """q, k and v; two query heads share keys where there are two."""
    shapes = ((batch, heads, q_len), *((batch, (heads + 1) // 2, kv_len),) * 2)
    return [normal(*shape, 16, seed=n).bfloat16() for n, shape in enumerate(shapes)]


def test_with_lists_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tiles in the same order: every bit is the same, and only the bytes of the lists are more."""
    qkv = inputs(1, 2, 100, 130)
    for options in ({}, {"q_start": 35, "kv_start": 22, "h_start": 3, "h_total": 9}):
        with recording() as first:
            own = results(asking(), qkv, **options)
        with recording() as second:
            again = results(asking(), qkv, **options)
        with monkeypatch.context() as patched, recording() as bare:
            patched.setattr(ListCache, "find", lambda *_: None)
            without = results(asking(), qkv, **options)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(own, again, without, strict=True))
        assert made(first)[:2] == [OF_QUERIES, OF_KEYS]
        assert made(second) == made(bare) == []
        for fields, listed, found in zip(({OF_QUERIES}, {OF_QUERIES, OF_KEYS}), second, bare, strict=True):
            assert set(listed.report.traffic) - set(found.report.traffic) == fields
            assert {k: v for k, v in listed.report.traffic.items() if k not in fields} == dict(found.report.traffic)


@pytest.mark.parametrize(("target", "mask"), [("sm_80", "by head"), ("sm_90a", "butterfly")])
def test_bytes_and_numbers(target: str, mask: str) -> None:
    """Both passes of grouped queries against the float64 reference; counted bytes are those that are predicted."""
    text = spec(MASKS[mask]).replace("listed", f"listed_{target}").replace("head_dim 16", "head_dim 64")
    own = flashgen.loads(text, backend="reference").spec
    op = load_spec(own, "emulator", target)
    case = verify_case(op, own.head_dims[0], ElementType.BF16, Shape(2, 2, 1, 103, 150))
    assert case.ok, failures(case)
    assert case.hbm_bytes
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def test_a_score_that_reads_a_tensor_by_head() -> None:
    """Kernels that make lists prepare what hooks know of a head, as all do, and so read the tensor."""
    text = f"tensor tau: f32[H]  score s * tau[h]  {MASKS['butterfly']}"
    op = flashgen.loads(spec(text).replace("listed", "by_head"), backend="emulator")
    tau, qkv = torch.tensor([0.5, -2.0]), inputs(1, 2)
    with recording() as counted:
        o = op(*qkv, tau=tau)
    assert OF_QUERIES in made(counted)
    assert_close(o, op.reference(*qkv, tau=tau, dtype=torch.float64), 0.02)


def test_a_call_that_is_divided() -> None:
    """Each launch over some heads has the lists of its own, where the mask tells heads apart."""
    text = spec(BY_HEAD).replace("listed", "divided").replace("head_dim 16", "head_dim 64")
    own = flashgen.loads(text, backend="reference").spec
    kernel = emulator_provider(own, GPUS[EMULATED])(own.head_dims[0], 0)
    assert isinstance(kernel, EmulatedKernel)
    q, k, v = (normal(2, 2, 70, 64, seed=n).bfloat16() for n in range(3))
    found = []
    for most, parts in ((2**20, 1), (2 * 70 * 64, 2), (70 * 64, 4)):
        limited = replace(kernel, most=most, list_cache=ListCache(eager=True))
        renamed = replace(own, name=f"divided_{most}")
        op = AttentionOp(OpParts(renamed, {"cpu": lambda *_, limited=limited: limited}, backend="emulator"))
        with recording() as counted:
            found.append(op(q, k, v))
        assert len(limited.list_cache) == parts
        assert counted[0].values["batch"] == 2
        assert counted[0].values[OF_QUERIES] > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_lists_of_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 1024 tiles of keys, few of which are visited."""
    q, k, v = inputs(1, 1, 20, 66_100)
    with recording() as counted:
        o = asking()(q, k, v, share=0.002)
    assert made(counted) == [OF_QUERIES]
    assert_close(o.float(), asking().reference(q, k, v, share=0.002, dtype=torch.float64), 4e-2)
    monkeypatch.setattr(ListCache, "find", lambda *_: None)
    assert torch.equal(o, asking()(q, k, v, share=0.002))


def test_what_asks_for_other_lists() -> None:
    """Lengths, shards and the params that the mask reads; not batch entries, heads, values or other params."""

    def lists(batch: int = 1, heads: int = 1, length: int = 61, **options: Any) -> int:
        q, k, v = inputs(batch, heads, length, 60)
        with recording() as counted:
            o = asking()(q, k, v, **options)
        assert_close(o.float(), asking().reference(q, k, v, dtype=torch.float64, **options), 4e-2)
        assert traffic_of(counted, OF_QUERIES)[0] > 0
        return len(made(counted))

    assert lists() == 1
    assert [lists(), lists(batch=2), lists(heads=2), lists(ell=0.5), lists(h_start=1, h_total=3)] == [0] * 5
    assert [lists(salt=2), lists(share=0.5), lists(length=62), lists(q_start=1), lists(kv_start=1)] == [1] * 5
    assert [lists(), lists(salt=2), lists(share=0.5), lists(length=62), lists(q_start=1)] == [0] * 5


def test_params_that_only_the_gpu_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list is asked for: the host would have to wait for their values."""
    q, k, v = inputs(2, 4)
    expected = asking()(q, k, v, salt=7)
    monkeypatch.setattr(CallChecker, "is_fetched", lambda self, call, value: value is not None)
    with recording() as counted:
        o = asking()(q, k, v, salt=torch.tensor(7, dtype=torch.int32))
    assert torch.equal(o, expected)
    assert traffic_of(counted, OF_QUERIES) == [0]
    assert made(counted) == []


def test_who_has_lists(specs: Path) -> None:
    """Masks for which CPUs keep lists, those that read tensors or selections: other sources know nothing of them."""
    kept, of_calls = set(), set()
    for path in sorted(specs.glob("*.attn")):
        (own,) = parse_file(path).specs
        variant = analyse(own, own.head_dims[0])
        source = emit_cuda(of_type(GPUS["sm_90a"].plan(variant))).text
        if is_irregular(variant.keep):
            kept.add(path.stem)
        elif any(observed_loads(variant.keep)) or reads_tiles(variant.keep, variant.spec.tensors):
            of_calls.add(path.stem)
        if path.stem in kept | of_calls:
            assert " lists = true" in source
        else:
            assert " lists = true" not in source
            assert OF_QUERIES not in source
    assert kept == {
        "bigbird", "dilated", "neighborhood_2d", "random_blocks", "sparse_butterfly", "sparse_fixed", "sparse_strided",
    }  # fmt: skip
    assert of_calls == {"bert", "evoformer", "lightning_indexer", "nsa_selected", "packed_documents"}


# What is kept ---------------------------------------------------------------------------------------------------------


def asked(name: object, size: int = 10, tiles: int = 9) -> SharedLists:
    """Lists that depend on one thing."""
    return SharedLists(0, size, tiles, (Step("k", 1, 128, 0),), (name,), (), ())


def test_a_list_cache_is_bounded() -> None:
    """What was not asked for longest goes first; what alone would be too large is not made."""
    list_cache, calls = ListCache[str](100, eager=True), []

    def find(name: str, size: int = 10) -> str | None:
        def make() -> str:
            calls.append(name)
            return name

        return list_cache.find(asked(name, size), [], make)

    assert [find(str(n)) for n in range(10)] == [str(n) for n in range(10)]
    assert find("0") == "0"
    assert len(calls) == 10
    assert find("large", 25) == "large"
    assert list_cache.bytes == 95
    calls.clear()
    assert [find(name) for name in ("0", "4", "large")] == ["0", "4", "large"]
    assert not calls
    assert [find(name) for name in ("1", "2", "3")] == ["1", "2", "3"]
    assert calls == ["1", "2", "3"]
    assert find("huge", 101) is None
    assert "huge" not in calls
    assert find("whole", 100) == "whole"
    assert (len(list_cache), list_cache.bytes) == (1, 100)
    for n in range(2 * MOST_LISTS):
        find(str(n), 0)
        assert len(list_cache) <= MOST_LISTS
    list_cache.most_bytes = 0
    assert find("0") is None


def test_lists_are_made_when_they_are_asked_for_again() -> None:
    """A length that comes once has none, nor has a call of few tiles; many such do not fill memory."""
    list_cache = ListCache[str]()
    few, enough = LEAST_TILES - 1, LEAST_TILES
    assert [list_cache.find(asked("x", tiles=enough), [], lambda: "x") for _ in range(3)] == [None, "x", "x"]
    assert [list_cache.find(asked("y", tiles=few), [], lambda: "y") for _ in range(3)] == [None] * 3
    for n in range(3 * MOST_LISTS):
        assert list_cache.find(asked(n, tiles=enough), [], lambda: "never") is None
    assert (len(list_cache), list_cache.bytes) == (1, 10)
    assert list_cache.find(asked(0, tiles=enough), [], lambda: "never") is None, "forgotten"
    assert list_cache.find(asked(0, tiles=enough), [], lambda: "now") == "now"
    assert len(list_cache._asked) <= MOST_LISTS


def test_what_fails_is_not_kept() -> None:
    def fail() -> str:
        raise RuntimeError("no memory")

    list_cache = ListCache[str](eager=True)
    with pytest.raises(RuntimeError, match="no memory"):
        list_cache.find(asked("x"), [], fail)
    assert list_cache.find(asked("x"), [], lambda: "made") == "made"


def test_params_are_part_of_the_question() -> None:
    lists = SharedLists(0, 10, 9, (Step("k", 1, 128, 0),), ("shape",), params=(1, 3), places=(2, 4))
    assert lists.question([0, 7, 0, 0.5, 0]) == ("shape", 7, 0.5)
    assert lists.question([0, 7, 1 << 40, 0.5, 0]) is None
    assert ListCache[str](eager=True).find(lists, [0, 7, 1 << 40, 0.5, 0], lambda: "made") is None


def test_many_threads_make_one_list() -> None:
    list_cache, calls = ListCache[int](eager=True), []
    gate = threading.Barrier(8)

    def ask(n: int) -> int | None:
        def make() -> int:
            calls.append(n)
            return n % 2

        gate.wait()
        return list_cache.find(asked(n % 2), [], make)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [n % 2 for n in range(8)]
    assert len(calls) == 2
