"""How kernels over caches find their rows: planted mistakes show, and other kernels have none of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.hosts.emulated import recording
from flashgen.hosts.emulator.program import Program, compile_program
from flashgen.hosts.emulator.report import EmulatorError
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.op.cached import Cache
from flashgen.op.op import AttentionOp, OpParts
from flashgen.op.signature import F8, TORCH_DTYPES
from flashgen.plan.launches import PassLaunches
from flashgen.targets.gpu.family import pins_of_rows
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import relative_error
from tests.cuda.helpers import planted_kernel

from .test_sequences import planted, random, squeezed

TEXT = """
attention planted_cache {
    head_dim WIDTH
    dtype ELEMENT, f8e4m3
    tensor slope: f32[H]
    tensor short: i32[B, Nk]
    score s - slope[h] * (Nq - i) * (Nk + j) / 4000
    mask short[b, j] > 0 and i - j < 20 + 40 * h
}
"""
B, H, HKV, QUERIES = 3, 6, 2, 3
LENGTHS = torch.tensor([130, 9, 77], dtype=torch.int32)
PADDING = torch.tensor([3, 0, 70], dtype=torch.int32)
# What is planted: a text of the source and what stands in its place.
MISTAKES = {
    "the page of the one before": ("shift < 0 ? place / rows : place >> shift", "(place - 1) / rows"),
    "another row of the page": (
        "place -= unsigned(n) * table.rows, page",
        "place = (place + 1) - unsigned(n) * table.rows, page",
    ),
    "a page for all that begins in it": (
        "if (inside + count > table.rows)",
        "if (false)",
    ),
    "pages of the first sequence": ("a.block_table + int64_t(a.sequence) * a.table_columns", "a.block_table"),
    "pages of the tile before": ("look_ahead(n + 1);", "look_ahead(n);"),
    "none of the first tile": ("this->look_ahead(0);", ""),
    "pages are read too early": ("table.page(first + n)); warp_barrier();", "table.page(first + n));"),
    "pages are replaced too early": (
        "warp_barrier(); for (int n = lane_index(); n < most;",
        "for (int n = lane_index(); n < most;",
    ),
    "the first page is that of all": ("page = known_page(n - first_known)", "page = known_page(0)"),
    "padding is seen": ("a.kv_start = padding, a.kv_len = length - padding;", "a.kv_start = 0, a.kv_len = length;"),
    "the last row is not seen": ("a.kv_len = length - padding;", "a.kv_len = length - padding - 1;"),
    "queries begin at 0": ("a.q_start = length > q_len ? length - q_len : 0", "a.q_start = 0"),
    "the first sequence's b": ("a.b_start = call.b_start + n", "a.b_start = call.b_start"),
    "Nk of the whole cache": (", a.kv_total = fg::max(length, 1);", ";"),
    "Q of the first sequence": ("(a.sequence * a.q_stride_b + first)", "first"),
    "O of the first sequence": (
        "static_cast<T*>(a.o) + a.sequence * a.o_stride_b",
        "static_cast<T*>(a.o)",
    ),
    "heads one behind the other": (
        "heads[r] = this->head_of(place.head * group_of(a) + (number - n * group_of(a)));",
        "heads[r] = this->head_of(place.head * group_of(a));",
    ),
    "tiles of the first head's mask": ("h < first_head + heads; ++h)", "h < first_head + 1; ++h)"),
    "lse by position": (
        "(a.sequence * a.heads + kv_head * group + (row - n * group)) * a.q_len + n",
        "(a.sequence * a.heads + kv_head * group) * a.q_len + row",
    ),
    "parts overlap": ("min(first_tile + own_tiles, tiles())", "tiles()"),
    "no Q comes": ("this->load_q(place);  // while the length is on its way", ""),
    "a quotient by three heads": ("return by & (by - 1) ? x / by : x >>", "return x >>"),
    "maxima of parts do not count": ("return from == top ? 1.0f : shrink;", "return 1.0f;"),
    "the last part does not count": (
        "32 * k + lane < span ? global_load_left",
        "32 * k + lane < span - 1 ? global_load_left",
    ),
    "O of the last part is left out": (
        "n + k < end && row + j * high < count ?",
        "n + k < end - 1 && row + j * high < count ?",
    ),
    "the first part is left out": ("int n = team * own,", "int n = team * own + 1,"),
    "weights of the next part": ("weights_of_row(own_row) + n + k)", "weights_of_row(own_row) + n + k + 1)"),
    "who is last is not known yet": ("block_barrier();  // everyone is done with those before", ""),
    "weights are not there yet": (
        "weigh_parts<merging>(count, first, parts); block_barrier();",
        "weigh_parts<merging>(count, first, parts);",
    ),
    "sums are not there yet": ("4, 4>(count, parts); block_barrier();", "4, 4>(count, parts);"),
    "O takes the place of sums": ("block_barrier();  // O may take that place", ""),
    "O of another row": ("(o_of_part(first + n) + row * DVP", "(o_of_part(first + n) + DVP"),
    "a row's parts are another's": ("(a.work_tile * BR + row) * a.splits", "a.work_tile * BR * a.splits"),
    "a part is merged before it is there": (
        "global_arrive(a.arrivals + a.work_tile, uint32_t(a.splits))",
        "global_next(a.arrivals + a.work_tile) + 1 == uint32_t(a.splits)",
    ),
    "counters are left as they are": (
        "global_arrive(a.arrivals + a.work_tile, uint32_t(a.splits))",
        "global_arrive(a.arrivals + a.work_tile, uint32_t(a.splits) + 1)",
    ),
    "all count in one place": ("a.arrivals + a.work_tile", "a.arrivals"),
    "everyone is the last": ("return shared_load(found) != 0;", "return true;"),
    "a lane's sum counts four times": ("split > 1 || fragment_column(0) == 0 ? row.y : 0.0f", "row.y"),
}
# The same of more parts than are weighed at a time, and are asked for at a time.
MISTAKES_OF_MANY = {
    "what parts before count for": ("shared_load(kept_of_rows() + own_row) : 1.0f", "1.0f : 1.0f"),
    "maxima of parts before": ("first > 0 && lane == 0 ? shared_load(merged_rows() + row) : none", "none"),
    "parts are taken twice": ("begins = false, n += ahead,", "begins = false, n += ahead / 2,"),
    "weights are replaced too early": ("block_barrier();  // everyone is done with those before", ""),
    "one is counted too early": (
        "Merged::LAST); block_barrier(); if (threadIdx.x == 0)",
        "Merged::LAST); if (threadIdx.x == 0)",
    ),
    "rows are weighed once": (
        "if (begins && (rows + begin == 0 || parts > Merged::at_once))",
        "if (begins && rows + begin == 0 && first == 0)",
    ),
    "a part more where all are there": ("deep == 1 && n + ahead <= end", "deep == 1"),
    "what a team has is left out": ("for (int team = 0; team < teams; ++team)", "for (int team = 0; team < 1; ++team)"),
    "teams have the same parts": ("int n = team * own,", "int n = 0,"),
}
# Of first tiles that are asked for before any is listed.
MISTAKES_OF_FIRST = {
    "the first tile alone": (
        "load_k_of_entry(n, (first + n) * BC);",
        "load_k_of_entry(n, first * BC);",
    ),
    "where something is masked": ("k_rows && !whole.may_be_false", "k_rows"),
    "they are asked for again": ("if (!asked) {", "if (true) {"),
    "they are one group": (
        "(first + n) * BC); copy_async_commit(); if (n == stages",
        "(first + n) * BC); if (n == stages",
    ),
    "padding is seen": ("entry * by_entry + unsigned(first) * by_row", "entry * by_entry"),
    "keys of the first head": ("(a, first_of_k(a, 0, place.head)).in_entry()", "(a, 0).in_entry()"),
    "the first entry": ("base + entry * by_entry + unsigned(first)", "base + unsigned(first)"),
}


@dataclass(frozen=True)
class Planted:
    """What is planted in: kernels of an element type over a kind of cache, at a head dimension; rows of its pages.

    ``tolerance``: what is more is an error. ``few_rows``: tiles are those of calls that have few, not the planner's.
    """

    element: ElementType
    kind: Kind
    width: int
    page: int
    tolerance: float
    text: str = TEXT
    target: str = "sm_80"
    few_rows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.element]


IN_ENTRIES = Planted(
    ElementType.F32,
    CACHED,
    16,
    0,
    1e-5,
    "attention planted_entries { head_dim WIDTH  dtype ELEMENT  mask causal }",
)
# Rows of pages of 8 are looked up one by one, of those of 32 as many together as are copied at a time.
ONE_BY_ONE = Planted(ElementType.F32, CACHED, 16, 8, 1e-5)
TOGETHER = Planted(ElementType.BF16, CACHED, 64, 32, 6e-3)
IN_ONE = Planted(ElementType.BF16, CACHED, 64, 64, 6e-3)  # a page has a whole tile
NARROW = Planted(ElementType.BF16, F8_CACHED, 64, 32, 6e-3)
NARROW_SINGLE = Planted(ElementType.F32, F8_CACHED, 16, 8, 1e-5)


@functools.cache
def emitted(kind: Planted) -> tuple[AttentionSpec, CompiledKernel[Any, Any]]:
    text = kind.text.replace("WIDTH", str(kind.width)).replace("ELEMENT", str(kind.element))
    spec = flashgen.loads(text, backend="reference").spec
    variant, target = kernel_variant(spec, spec.head_dims[0], kind.kind), GPUS[kind.target]
    own = compiled(variant, target)
    return spec, compiled(variant, target, pins_of_rows(own.plan, kind.element, 1)) if kind.few_rows else own


def changed(name: str, *changes: tuple[str, str], kind: Planted = ONE_BY_ONE, apart: bool = False) -> AttentionOp:
    """The op with changes in the text of its kernels, each in one place.

    ``apart``: a kernel of its own merges parts.
    """
    spec, kernel = emitted(kind)
    text = kernel.source.whole
    for old, new in changes:
        assert squeezed(text).count(squeezed(old)) == 1, old
        text = planted(text, old, new)

    @functools.cache
    def program(_: PassName, kernels: frozenset[str]) -> Program:
        return compile_program(text, name=kernel.source.name, kernels=kernels)

    def changed(found: PassLaunches) -> PassLaunches:
        assert found.splits is not None
        return replace(found, splits=replace(found.splits, most_alone=0)) if apart else found

    own = planted_kernel(kernel.plan, program, changed)
    dense = replace(own, other=lambda _: own)
    return AttentionOp(OpParts(replace(spec, name=name), {"cpu": lambda *_: dense}, backend="emulator"))


def arguments(kind: Planted = ONE_BY_ONE) -> dict[str, Any]:
    pages = -(-160 // kind.page)
    places = torch.randperm(B * pages, generator=torch.Generator().manual_seed(1)).view(B, pages).int()
    k, v = (random(B * pages, HKV, kind.page, kind.width, seed=n).to(kind.dtype) for n in (1, 2))
    short = (torch.arange(pages * kind.page) % 45 < torch.arange(30, 45, 5)[:, None]).int()
    return {
        "q": random(B, H, QUERIES, kind.width, seed=0).to(kind.dtype), "k_cache": k, "v_cache": v,
        "cache_seqlens": LENGTHS, "leftpad": PADDING, "block_table": places, "slope": random(H, seed=3).abs(),
        "short": short,
    }  # fmt: skip


def without_padding(kind: Planted) -> dict[str, Any]:
    """Sequences begin where pages do, and nobody reads behind the last row; factors where numbers are of 8 bits."""
    given = arguments(kind)
    del given["leftpad"]
    for b, length in enumerate(LENGTHS.tolist()):
        for row in range(length, given["block_table"].shape[1] * kind.page):
            for name in ("k_cache", "v_cache"):
                given[name][given["block_table"][b, row // kind.page], :, row % kind.page] = torch.nan
    if kind.kind is CACHED:
        return given
    factors = {f"{x}_descale": random(B, HKV, seed=n).abs() + 0.1 for n, x in enumerate("kv", 8)}
    return given | factors | {f"{x}_cache": given[f"{x}_cache"].to(F8) for x in "kv"}


def errors(op: AttentionOp, given: dict[str, Any] | None = None) -> list[float]:
    given = given or arguments()
    exact = op.reference.decode(**given, return_lse=True)
    found: list[float] = []
    for splits in (1, 3):
        own = op.decode(**given, return_lse=True, num_splits=splits)
        found += [relative_error(x.nan_to_num(1e3), y.nan_to_num(1e3)) for x, y in zip(own, exact, strict=True)]
    return found


def shows(op: AttentionOp, given: dict[str, Any] | None = None, tolerance: float = 1e-3) -> bool:
    """Whether the emulator says so, or results do."""
    try:
        return not max(errors(op, given)) < tolerance
    except EmulatorError:
        return True


def test_without_a_mistake_all_is_right() -> None:
    assert max(errors(changed("planted_in_no_cache"))) < 1e-5
    assert max(errors(changed("planted_in_no_merge", apart=True))) < 1e-5


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_show(mistake: str) -> None:
    name = f"planted_cache_{list(MISTAKES).index(mistake)}"
    assert shows(changed(name, MISTAKES[mistake]))


def of_many_parts(heads: int) -> dict[str, Any]:
    """38 tiles. Of 128 heads a thread has four columns of two rows, of 2 a team has one part."""
    rows = 38 * 32 - 5
    k, v = (random(1, HKV, rows, 16, seed=n) for n in (1, 2))
    return {
        "q": random(1, heads, 1, 16, seed=0), "k_cache": k, "v_cache": v, "cache_seqlens": rows,
        "slope": random(heads, seed=3).abs(), "short": (torch.arange(rows) % 45 < 30).int()[None],
    }  # fmt: skip


def shows_of_many(op: AttentionOp) -> bool:
    found: list[float] = []
    for heads in (128, 2):
        given = of_many_parts(heads)
        exact = op.reference.decode(**given, return_lse=True)
        try:
            own = op.decode(**given, return_lse=True, num_splits=38)
        except EmulatorError:
            return True
        found += [relative_error(x, y) for x, y in zip(own, exact, strict=True)]
    return not max(found) < 1e-5


def test_without_a_mistake_many_parts_are_merged() -> None:
    assert not shows_of_many(changed("planted_in_no_cache"))
    assert not shows_of_many(changed("planted_in_no_merge", apart=True))


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, each in enumerate(MISTAKES_OF_MANY)]
)
def test_mistakes_with_many_parts_show(mistake: str) -> None:
    assert shows_of_many(changed(f"planted_many_{list(MISTAKES_OF_MANY).index(mistake)}", MISTAKES_OF_MANY[mistake]))


def in_entries() -> dict[str, Any]:
    q, k, v = random(B, H, 1, 16, seed=0), *(random(B, HKV, 160, 16, seed=n) for n in (1, 2))
    lengths = torch.tensor([160, 131, 77], dtype=torch.int32)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "leftpad": torch.tensor([0, 3, 0]).int()}


def test_without_a_mistake_first_tiles_are_right() -> None:
    assert not shows(changed("planted_in_no_entry", kind=IN_ENTRIES), in_entries(), 1e-5)


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, each in enumerate(MISTAKES_OF_FIRST)]
)
def test_mistakes_with_first_tiles_show(mistake: str) -> None:
    op = changed(f"planted_first_{list(MISTAKES_OF_FIRST).index(mistake)}", MISTAKES_OF_FIRST[mistake], kind=IN_ENTRIES)
    assert shows(op, in_entries(), 1e-5)


# The same of rows that are copied together, and of numbers of 8 bits.
COPIED_MISTAKES = {
    "all tiles in pages are": ("if (count >= Tile::rows && from.table.shift >= 0", "if (from.table.shift >= 0"),
    "one page has all": ("if (in_pages & (from.table.rows - 1))", "if (true)"),
    "the page of the first row": ("known_page(int(in_pages >> from.table.shift))", "known_page(0)"),
}
COPIED_IN_ONE_MISTAKES = {"all tiles are whole": ("if (count >= Tile::rows && from.known < 0)", "if (from.known < 0)")}
NARROW_MISTAKES = {
    "factors of another sequence": ("int64_t(a.sequence) * a.kv_heads + kv_head", "kv_head"),
    "factors of another head": ("a.kv_heads + kv_head) : 1.0f", "a.kv_heads) : 1.0f"),
    "V has the factors of K": ("factor_of(a, a.v_factors, here.head)", "this->k_factor"),
    "Q is no operand yet": ("this->order_q();", ";"),
    "Q is one at once": ("copy_async_wait<2 * stages - 1>();", ""),
    "columns of Q by another order": ("n % 8 / 2 * 4 + n / 8 * 2 + n % 2", "n"),
    "rows keep their scale": ("* unit * Base::k_factor", "* Base::k_factor"),
    "sums as they come out": ("order_sums(o);", ""),
    "columns next to each other": ("const uint32_t word = even_bytes_first(r[i]);", "const uint32_t word = r[i];"),
    "weights as far above as they are counted": ("v_factor * Base::LESS_HEADROOM", "v_factor"),
}


@pytest.mark.parametrize(
    "kind", [TOGETHER, IN_ONE, NARROW, NARROW_SINGLE], ids=["together", "in one", "narrow", "single"]
)
def test_without_a_mistake_rows_that_are_copied_together_are_right(kind: Planted) -> None:
    op = changed(f"planted_in_no_{kind.kind.mark.strip('_')}_{kind.page}", kind=kind)
    assert max(errors(op, without_padding(kind))) < kind.tolerance
    padded = without_padding(kind) | {"leftpad": PADDING}
    assert max(errors(op, padded)) < kind.tolerance


@pytest.mark.parametrize(
    ("kind", "mistakes", "mistake"),
    [
        pytest.param(kind, mistakes, each, marks=[pytest.mark.slow] * (n % 4 > 0), id=each)
        for kind, mistakes in (
            (TOGETHER, COPIED_MISTAKES),
            (IN_ONE, COPIED_IN_ONE_MISTAKES),
            (NARROW, NARROW_MISTAKES),
        )
        for n, each in enumerate(mistakes)
    ],
)
def test_mistakes_with_rows_that_are_copied_together_show(
    kind: Planted, mistakes: Mapping[str, tuple[str, str]], mistake: str
) -> None:
    name = f"planted_{kind.kind.mark.strip('_')}_{kind.page}_{list(mistakes).index(mistake)}"
    assert shows(changed(name, mistakes[mistake], kind=kind), without_padding(kind), kind.tolerance)


# What keeps kernels inside, the same without it, and which numbers show it.
BOUNDS = {
    "pages": ("clamp(global_load(pages + min(number, columns - 1)), 0, entries - 1)", "global_load(pages + number)"),
    "lengths": ("within(fg::again(a.length_read), int(a.kv_len))", "fg::again(a.length_read)"),
    "padding": ("within(a.padding_read, length)", "a.padding_read"),
    "entries": ("within(a.entry_read, int(a.cache_entries) - 1)", "a.entry_read"),
}


@pytest.mark.parametrize("bad", BOUNDS)
def test_what_keeps_kernels_inside_is_needed(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has looked at the numbers."""
    monkeypatch.setattr(Cache, "check", lambda *_: [])
    given = arguments()
    if bad == "pages":
        given["block_table"] = given["block_table"] + 400
    elif bad == "lengths":
        given["cache_seqlens"] = torch.tensor([130, 400, 77], dtype=torch.int32)
    elif bad == "padding":
        given["leftpad"] = torch.tensor([3, -300, 0], dtype=torch.int32)
    else:
        entries = (torch.zeros(B, HKV, 160, 16) for _ in range(2))
        given |= dict(zip(("k_cache", "v_cache"), entries, strict=True))
        given |= {"block_table": None, "cache_batch_idx": torch.tensor([0, 40, 1], dtype=torch.int32)}
    changed("planted_in_no_cache").decode(**given)
    with pytest.raises(EmulatorError):
        changed(f"planted_cache_bound_{bad}", BOUNDS[bad]).decode(**given)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_other_kernels_know_of_no_caches(target: str) -> None:
    spec, _ = emitted(ONE_BY_ONE)
    for rows in (DENSE, RAGGED):
        text = compiled(kernel_variant(spec, spec.head_dims[0], rows), GPUS[target]).source.text
        assert not any(word in text for word in ("CachedRows", "block_table", "merge", "splits"))


def tiles(rows: int) -> tuple[int, float]:
    op = flashgen.loads("attention sizes { head_dim 64 }", backend="emulator")
    q, k = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (rows, 1))
    with recording() as counted:
        op.decode(q, k, k, 1)
    (launch,) = counted[0].launches.launches[:1]
    return launch.threads // 32, counted[0].values["group_rows"]


def test_a_tile_has_as_many_rows_as_heads_share_a_key_value_head() -> None:
    """64 query heads and 8 key/value heads: 8 of 16 rows, which four warps share."""
    assert tiles(8) == (4, 8)
    assert tiles(17) == (4, 17)
    assert tiles(64) == (4, 64)


def test_tensors_are_left_as_they_were() -> None:
    op, given = changed("planted_in_no_cache"), arguments()
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    op.decode(**given, num_splits=2)
    assert all(torch.equal(given[name], x) for name, x in before.items())
