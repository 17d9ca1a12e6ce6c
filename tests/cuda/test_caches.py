"""How kernels over caches find their rows: planted mistakes show, and other kernels have none of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.backends import RowsOf, kernel_variant, launches_of
from flashgen.compiled import CompiledKernel, compiled
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.runtime.cached import CachedEngine
from flashgen.runtime.eight_bits import F8
from flashgen.runtime.emulated import EmulatedKernel, recording
from flashgen.runtime.emulator import EmulatorError, compile_program
from flashgen.runtime.kernel import ArgumentLayout, PassName
from flashgen.runtime.op import AttentionOp, OpParts
from flashgen.runtime.schedule import Compiled
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import relative_error

from .test_sequences import planted, random, squeezed

TARGET = GPUS["sm_80"]
TEXT = """
attention planted_cache {
    head_dim 16
    dtype f32, f8e4m3
    tensor slope: f32[H]
    tensor short: i32[B, Nk]
    score s - slope[h] * (Nq - i) * (Nk + j) / 4000
    mask short[b, j] > 0 and i - j < 20 + 40 * h
}
"""
B, H, HKV, QUERIES, PAGE = 3, 6, 2, 3, 8
LENGTHS = torch.tensor([130, 9, 77], dtype=torch.int32)
PADDING = torch.tensor([3, 0, 70], dtype=torch.int32)
# What is planted: a text of the source and what stands in its place.
MISTAKES = {
    "the page of the one before": ("shift < 0 ? place / rows : place >> shift", "(place - 1) / rows"),
    "another row of the page": (
        "place -= unsigned(n) * table.rows, page",
        "place = (place + 1) - unsigned(n) * table.rows, page",
    ),
    "a page for all that begins in it": ("if (inside + count > table.rows) found.known = pages; else", ""),
    "pages of the first sequence": ("a.block_table + int64_t(a.sequence) * a.table_columns", "a.block_table"),
    "pages of the tile before": ("look_ahead(n + 1);", "look_ahead(n);"),
    "none of the first tile": ("look_ahead(0);", ""),
    "pages are read too early": ("table.page(first + n)); warp_barrier();", "table.page(first + n));"),
    "pages are replaced too early": (
        "warp_barrier(); for (int n = lane_index(); n < most;",
        "for (int n = lane_index(); n < most;",
    ),
    "the first page is that of all": ("page = shared_load(known + (n - first_known))", "page = shared_load(known)"),
    "padding is seen": ("a.kv_start = padding, a.kv_len = length - padding;", "a.kv_start = 0, a.kv_len = length;"),
    "the last row is not seen": ("a.kv_len = length - padding;", "a.kv_len = length - padding - 1;"),
    "queries begin at 0": ("a.q_start = length > call.q_len ? length - call.q_len : 0", "a.q_start = 0"),
    "the first sequence's b": ("a.b_start = call.b_start + n", "a.b_start = call.b_start"),
    "Nk of the whole cache": ("a.kv_total = length > 1 ? length : 1", "a.kv_total = call.kv_total"),
    "Q of the first sequence": ("fg::moved<T>(call.q, int64_t(n) * call.q_stride_b)", "call.q"),
    "heads one behind the other": (
        "heads[r] = head_of(place.head * group_of(a) + int(number - n * group_of(a)));",
        "heads[r] = head_of(place.head * group_of(a));",
    ),
    "tiles of the first head's mask": ("h < first_head + heads; ++h)", "h < first_head + 1; ++h)"),
    "lse by position": ("(kv_head * group + (row - n * group)) * a.q_len + n", "kv_head * group * a.q_len + row"),
    "a part is left out": (
        "if (n < int(a.splits)) taken.rows[k][r] =",
        "if (n > 0 && n < int(a.splits)) taken.rows[k][r] =",
    ),
    "parts overlap": ("fg::min(first_tile() + tiles_of_part(), tiles())", "tiles()"),
    "maxima of parts do not count": ("return from == top ? 1.0f : shrink;", "return 1.0f;"),
    "what a team has is left out": ("add_team(place, left);", ";"),
    "teams do not wait for each other": (
        "if (team / half == 1) leave<Shared>(place, left); fg::block_barrier();",
        "if (team / half == 1) leave<Shared>(place, left);",
    ),
    "O of a part is left out": ("add(o.at[m], taken.o[k][m],", "if (k > 0) add(o.at[m], taken.o[k][m],"),
    "O is counted from another maximum": ("rescale(kept); add_team(place, left);", "add_team(place, left);"),
    "a lane's sum counts four times": (
        "has_sum() ? row.y * shrink_of(row.x, top) : 0.0f",
        "row.y * shrink_of(row.x, top)",
    ),
}


@functools.cache
def emitted() -> tuple[AttentionSpec, CompiledKernel[Any, Any]]:
    spec = flashgen.loads(TEXT, backend="reference").spec
    return spec, compiled(kernel_variant(spec, spec.head_dims[0], RowsOf.CACHED), TARGET)


def changed(name: str, *changes: tuple[str, str]) -> AttentionOp:
    """The op with changes in the text of its kernels, each in one place."""
    spec, kernel = emitted()
    text = kernel.source.text
    for old, new in changes:
        assert squeezed(text).count(squeezed(old)) == 1, old
        text = planted(text, old, new)
    find = launches_of(kernel.variant, kernel.plan, kernel.source.symbol, ElementType.F32)

    @functools.cache
    def program(kernels: frozenset[str]) -> Any:
        return compile_program(text, name=kernel.source.name, kernels=kernels)

    def of_call(pass_name: PassName, values: Mapping[str, float]) -> Compiled[Any]:
        return Compiled(program(frozenset(find(pass_name, values).kernels)), find)

    own = EmulatedKernel(ArgumentLayout(cuda_fields(kernel.variant)), spec.head_dims[0], of_call)
    dense = replace(own, cached=lambda: own)
    return AttentionOp(OpParts(replace(spec, name=name), {"cpu": lambda *_: dense}, backend="emulator"))


def arguments() -> dict[str, Any]:
    pages = -(-160 // PAGE)
    places = torch.randperm(B * pages, generator=torch.Generator().manual_seed(1)).view(B, pages).int()
    k, v = (random(B * pages, HKV, PAGE, 16, seed=n) for n in (1, 2))
    short = (torch.arange(160) % 45 < torch.arange(30, 45, 5)[:, None]).int()
    return {
        "q": random(B, H, QUERIES, 16, seed=0), "k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS,
        "leftpad": PADDING, "block_table": places, "slope": random(H, seed=3).abs(), "short": short,
    }  # fmt: skip


def arguments_of_8_bits() -> dict[str, Any]:
    given = arguments()
    for b, length in enumerate(LENGTHS.tolist()):  # nobody reads behind the last row
        for row in range(length, given["block_table"].shape[1] * PAGE):
            for name in ("k_cache", "v_cache"):
                given[name][given["block_table"][b, row // PAGE], :, row % PAGE] = torch.nan
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


def shows(op: AttentionOp, given: dict[str, Any] | None = None) -> bool:
    """Whether the emulator says so, or results do."""
    try:
        return max(errors(op, given)) > 1e-3
    except EmulatorError:
        return True


def test_without_a_mistake_all_is_right() -> None:
    assert max(errors(changed("planted_in_no_cache"))) < 1e-5


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, each in enumerate(MISTAKES)]
)
def test_mistakes_show(mistake: str) -> None:
    assert shows(changed(f"planted_cache_{list(MISTAKES).index(mistake)}", MISTAKES[mistake]))


# The same of numbers of 8 bits.
NARROW_MISTAKES = {
    "K is not widened": ("fg::widen_rows<threads>(k_tile(n))", "0"),
    "V is widened after the barrier": (
        "if constexpr (f8) fg::widen_rows<threads>(v_tile(n)); fg::block_barrier();",
        "fg::block_barrier(); if constexpr (f8) fg::widen_rows<threads>(v_tile(n));",
    ),
    "factors of another sequence": ("int64_t(a.sequence) * a.kv_heads + kv_head", "kv_head"),
    "factors of another head": ("a.kv_heads + kv_head) : 1.0f", "a.kv_heads) : 1.0f"),
    "V has the factors of K": ("factor_of(a, a.v_factors, here.head)", "k_factor"),
    "exponents begin elsewhere": ("__uint_as_float(0x7b800000u)", "__uint_as_float(0x7b000000u)"),
    "signs are lost": (">> 4) & 0x87f00000u", ">> 4) & 0x07f00000u"),
    "rows behind the last are read": ("const bool is_row = own.row0 + row < count;", "const bool is_row = true;"),
}


def test_without_a_mistake_numbers_of_8_bits_are_right() -> None:
    assert max(errors(changed("planted_in_no_cache"), arguments_of_8_bits())) < 1e-5


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, each in enumerate(NARROW_MISTAKES)]
)
def test_mistakes_with_numbers_of_8_bits_show(mistake: str) -> None:
    name = f"planted_narrow_cache_{list(NARROW_MISTAKES).index(mistake)}"
    assert shows(changed(name, NARROW_MISTAKES[mistake]), arguments_of_8_bits())


LENGTH, BEFORE = "fg::global_load(call.cache_lengths + n)", "number_of(call.cache_padding, n, 0)"
PLACE = "number_of(a.cache_places, a.sequence, a.sequence)"
# What keeps kernels inside, the same without it, and which numbers show it.
BOUNDS = {
    "pages": ("clamp(global_load(pages + min(number, columns - 1)), 0, entries - 1)", "global_load(pages + number)"),
    "lengths": (f"within({LENGTH}, call.kv_len)", LENGTH),
    "padding": (f"within({BEFORE}, length)", BEFORE),
    "entries": (f"int(within({PLACE}, a.cache_entries - 1))", PLACE),
}


@pytest.mark.parametrize("bad", BOUNDS)
def test_what_keeps_kernels_inside_is_needed(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has looked at the numbers."""
    monkeypatch.setattr(CachedEngine, "_sees", lambda *_: False)
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
    spec, _ = emitted()
    for rows in (RowsOf.DENSE, RowsOf.RAGGED):
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
