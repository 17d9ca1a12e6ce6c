"""Lists of visits that heads, batch entries and calls share: the same visits, one set a mask, bounded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.simplify import simplify
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.language import parse_file, parse_text
from flashgen.plan.arguments import argument_fields
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.plan import plan_cpu
from tests.emit.instantiated import works_without
from tests.ir.expressions import expr
from tests.masks.catalogue import Mask
from tests.masks.measure import ENDS, compiled, variant_of
from tests.numeric.helpers import assert_close, normal

BYTES = 20_000  # of the library under test, in place of LIST_BYTES
TILE = 16
BY_HEAD = Mask("random by head", "mask hash(h, i // 8, j // 8) % 6 == 0 or (b == 1 and i == j)")
BY_POSITION = Mask("dilated", "mask causal and dilated(60, 4)")

ENTRY = """
// What the lists hold of one query tile, against its visits: -1 where there are none, 0 where they differ, else 1.
extern "C" int listed(const void* arguments, int64_t b, int64_t h, int64_t query_tile) {
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const Launch u = make_launch(a);
  const std::shared_ptr<const Lists> lists = lists_of<Spec>(a, u, TILE, TILE);
  if (!lists->are_made()) return -1;
  std::vector<Visit> visits(size_t(ceil_div(a.kv_len, TILE)));
  const int64_t row0 = query_tile * TILE, n = Spec::mask_of(a, b, h) * ceil_div(a.q_len, TILE) + query_tile;
  const int rows = int(std::min<int64_t>(TILE, a.q_len - row0));
  const int count = find_visits(a, u, make_head(a, u, b, h), row0, rows, TILE, nullptr, visits.data());
  if (lists->count(n) != count) return 0;
  for (int k = 0; k < count; ++k) {
    const Visit &x = lists->of(n)[k], &y = visits[size_t(k)];
    if (x.tile != y.tile || x.masked != y.masked || x.first != y.first || x.last != y.last) return 0;
  }
  return 1;
}
extern "C" const void* address(const void* arguments, int64_t* bytes) {
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const std::shared_ptr<const Lists> lists = lists_of<Spec>(a, make_launch(a), TILE, TILE);
  *bytes = lists->bytes();
  return lists.get();
}
"""


class Library:
    """The lists of one mask."""

    def __init__(self, mask: Mask, folder: Path) -> None:
        variant = variant_of(mask)
        text = emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole
        text = text[: text.index(ENDS)].replace("int64_t(8) << 20", str(BYTES))
        assert f"LIST_BYTES = {BYTES};" in text
        self._layout = ArgumentLayout(argument_fields(variant.spec))
        library = ctypes.CDLL(str(compiled(text + ENTRY.replace("TILE", str(TILE)), folder, "-O1")))
        self._listed: Callable[..., int] = library.listed
        self._address = library.address
        self._address.restype = ctypes.c_void_p

    def listed(self, b: int, h: int, query_tile: int, **fields: int) -> int:
        """Whether a query tile's list is right."""
        return self._listed(self._packed(**fields), *(ctypes.c_int64(n) for n in (b, h, query_tile)))

    def address(self, **fields: int) -> tuple[Any, int]:
        """Where the lists of a call lie, and their bytes."""
        count = ctypes.c_int64()
        return self._address(self._packed(**fields), ctypes.byref(count)), count.value

    def _packed(self, **fields: int) -> bytes:
        known = {"batch": 2, "heads": 3, "kv_heads": 3, "threads": 2, "q_len": 100, "kv_len": 90, **fields}
        totals = {"b_total": "batch", "h_total": "heads", "q_total": "q_len", "kv_total": "kv_len"}
        known = {**{total: known[own] for total, own in totals.items()}, **known}
        return self._layout.pack(*self._layout.values(known))


@pytest.fixture(scope="module")
def by_head(repository: Path) -> Library:
    return Library(BY_HEAD, repository / ".pytest_cache" / "masks")


@pytest.fixture(scope="module")
def by_position(repository: Path) -> Library:
    return Library(BY_POSITION, repository / ".pytest_cache" / "masks")


def test_lists_hold_the_visits_of_every_mask(by_head: Library) -> None:
    for fields in ({}, {"q_start": 37, "kv_start": 11, "b_start": 1, "h_start": 5, "h_total": 9}, {"threads": 1}):
        for b, h, tile in np.ndindex(2, 3, 7):
            assert by_head.listed(b, h, tile, **fields) == 1


def test_what_the_mask_does_not_tell_apart_is_not_multiplied_out(by_position: Library, by_head: Library) -> None:
    place, count = by_position.address()
    assert by_position.address(batch=7, heads=12, kv_heads=4) == (place, count)
    assert by_head.address(heads=6, kv_heads=6)[1] > 1.5 * by_head.address()[1]


def test_other_shapes_have_lists_of_their_own(by_position: Library) -> None:
    fields: list[dict[str, int]] = [{}, {"q_len": 99}, {"kv_len": 80}, {"q_start": 5}, {"kv_start": 5}]
    places = [by_position.address(**each)[0] for each in fields]
    assert len(set(places)) == len(fields)
    assert [by_position.address(**each)[0] for each in fields] == places


def test_memory_is_bounded(by_position: Library) -> None:
    """What was not asked for longest makes room; what alone would be too large is never made."""
    first, each = by_position.address(q_len=400, kv_len=400)
    assert 0 < each < BYTES
    held = {first}
    for length in range(401, 440):
        held.add(by_position.address(q_len=length, kv_len=length)[0])
        assert by_position.address(q_len=400, kv_len=400)[0] == first, "what is asked for again stays"
    assert by_position.listed(0, 0, 3, q_len=20_000, kv_len=20_000) == -1
    assert by_position.address(q_len=20_000, kv_len=20_000)[1] == 0
    assert by_position.listed(0, 0, 3, q_len=400, kv_len=400) == 1


def test_many_threads_at_once(by_head: Library) -> None:
    def ask(n: int) -> int:
        return by_head.listed(n % 2, n % 3, n % 7, q_len=97 + n % 5, threads=1)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(600))) == {1}


def test_params_and_shards_of_a_mask_have_their_own_visits() -> None:
    """Calls that differ in what the mask reads, one after the other and again."""
    op = flashgen.loads(
        "attention lists_of_a_param { head_dim 16\n param salt: i32 = 1\n param share: f32 = 0.25\n"
        " mask float(hash(h, i // 8, j // 8, salt) % 1024) < share * 1024.0 }"
    )
    q, k, v = (normal(2, 2, 120, 16, seed=seed).requires_grad_() for seed in range(3))
    for arguments in ({}, {"salt": 2}, {"share": 0.5}, {"salt": 2}, {}, {"h_start": 1, "h_total": 3}):
        o = op(q, k, v, **arguments)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        truth = op.reference(*exact, **arguments, dtype=torch.float64)
        assert_close(o, truth)
        found, right = torch.autograd.grad(o.sum(), (q, k, v)), torch.autograd.grad(truth.sum(), exact)
        for one, other in zip(found, right, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("i >= j and i - j < 70", False),
        ("abs(i // 32 - j // 32) <= 1", False),
        ("j < 13 or abs(i - j) < 37", False),
        ("abs(clamp(i, 40, 200) - j) <= 40", False),
        ("i >= j and (i - j) % 4 == 0", True),
        ("hash(i // 32, j // 32) % 4 == 0", True),
        ("(i & j) == 0", True),
    ],
)
def test_which_masks_have_lists(mask: str, expected: bool) -> None:
    assert is_irregular(simplify(expr(mask))) is expected


def test_masks_over_captured_tensors_have_none() -> None:
    assert not is_irregular(simplify(expr("id[b, i] == id[b, j] and (i - j) % 3 == 0", {"id": ("i32", ("B", "Nk"))})))


@pytest.mark.parametrize("name", ["causal", "alibi", "gpt_oss", "longformer", "packed_documents", "block_sparse"])
def test_other_specs_do_not_pay(repository: Path, name: str, tmp_path: Path) -> None:
    """Nothing is instantiated that makes lists or holds them: all of it asks what they depend on."""
    variant = variant_of(parse_file(repository / "specs" / f"{name}.attn").specs[0])
    assert works_without(emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole, "question_of", tmp_path)


def test_specs_with_lists_ask_what_they_depend_on(tmp_path: Path) -> None:
    variant = variant_of(parse_text("attention dilated { head_dim 16 mask (i - j) % 3 == 0 }").specs[0])
    text = emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole
    assert works_without(text, "unknown", tmp_path)
    assert not works_without(text, "question_of", tmp_path)
