"""``select``: what the statement means, and that it survives being written and read again."""

from __future__ import annotations

import json

import pytest

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import index_diagnostics
from flashgen.analysis.selection import lowered, selection_of
from flashgen.analysis.variant import analyse
from flashgen.ir.serialize import spec_from_data, spec_to_data
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import spec_text, text
from flashgen.language import parse_text

PER_QUERY = "tensor idx: i32[B, Hkv, Nq, 16] select 64: idx[b, hkv, i, :] mask causal"
PER_BLOCK = "tensor idx: i64[B, H, ceildiv(Nq, 128), 4] select 32: idx[b, h, i // 128, :]"
OF_ALL = "const n = 8 const side = 4 * n tensor idx: i32[n] select side: idx[:,]"


def spec(body: str) -> AttentionSpec:
    return parse_text(f"attention drawn {{ head_dim 64 {body} }}").specs[0]


def test_what_it_says() -> None:
    select = spec(PER_BLOCK).select
    assert select is not None
    assert (select.block, select.tensor, [text(each) for each in select.indices]) == (32, "idx", ["b", "h", "i // 128"])
    assert spec("mask causal").select is None


def test_an_index_may_be_a_let_and_read_a_tensor() -> None:
    own = spec("tensor of: i32[Nq] tensor idx: i32[7, 3] let row = of[i] % 7 select 1: idx[row, :]").select
    assert own is not None
    assert [text(each) for each in own.indices] == ["of[i] % 7"]


@pytest.mark.parametrize("body", [PER_QUERY, PER_BLOCK, OF_ALL])
def test_it_is_the_same_after_a_round_trip(body: str) -> None:
    own = spec(body)
    assert spec_from_data(json.loads(json.dumps(spec_to_data(own)))) == own
    again = parse_text(spec_text(own)).specs[0]
    assert (again.select, again.mask) == (own.select, own.mask)


BITS = "bits_idx[b, hkv, i, j // 2048] >> j // 64 % 32 & 1 != 0"


@pytest.mark.parametrize(
    ("body", "tensors", "mask"),
    [
        (
            PER_QUERY,
            ["bits_idx[B, Hkv, Nq, ceildiv(Nk, 2048)]", "tiles_idx[B, Hkv, ceildiv(Nq, 64), ceildiv(Nk, 64)]"],
            f"j <= i and tiles_idx[b, hkv, i // 64, j // 64] and {BITS}",
        ),
        (
            PER_BLOCK,
            [
                "bits_idx[B, H, ceildiv(Nq, 128), ceildiv(Nk, 1024)]",
                "tiles_idx[B, H, ceildiv(Nq, 64), ceildiv(Nk, 64)]",
            ],
            "tiles_idx[b, h, i // 64, j // 64] and bits_idx[b, h, i // 128, j // 1024] >> j // 32 % 32 & 1 != 0",
        ),
        (
            OF_ALL,
            ["bits_idx[ceildiv(Nk, 1024)]", "tiles_idx[ceildiv(Nk, 64)]"],
            "tiles_idx[j // 64] and bits_idx[j // 1024] >> j // 32 % 32 & 1 != 0",
        ),
    ],
)
def test_kernels_read_bits_in_the_place_of_lists(body: str, tensors: list[str], mask: str) -> None:
    kernels = lowered(spec(body))
    assert [f"{each.name}[{', '.join(map(text, each.shape))}]" for each in kernels.tensors] == tensors
    assert text(analyse(spec(body), kernels.head_dims[0]).keep) == mask
    assert kernels.select is None
    assert lowered(kernels) is kernels


def test_a_pair_is_not_asked_what_its_tile_was() -> None:
    own = spec(PER_QUERY)
    assert "tiles_idx" not in text(analyse(own, own.head_dims[0]).keep_of_pairs)


def test_every_index_of_what_kernels_read_is_proven() -> None:
    for body in (PER_QUERY, PER_BLOCK, OF_ALL):
        own = spec(body)
        assert {each.status.value for each in analyse(own, own.head_dims[0]).proofs} == {"bare"}


def test_an_index_outside_is_named_where_it_stands() -> None:
    own = spec("tensor idx: i32[B, Nq, 3] select 8: idx[b, i + 1, :]")
    (found,) = index_diagnostics(own, prove_indices(own, own.head_dims[0]))
    assert (found.code, found.message) == ("W501", "index may fall outside 'idx'; the load is clamped")


def test_lists_that_follow_from_lengths_or_params_leave_no_tile_out() -> None:
    """Sequences of a ragged batch have their own; whole calls do not know them."""
    for body in (
        "tensor idx: i32[Nq, 3] select 8: idx[Nq - 1 - i, :]",
        "param n: i32 tensor idx: i32[Nq, 3] select 8: idx[i // n, :]",
    ):
        found = selection_of(spec(body))
        assert found is not None
        assert found.tiles is None


def test_what_is_made_takes_no_name_of_the_spec() -> None:
    own = lowered(spec("tensor bits_idx: f32[H] tensor idx: i32[3] select 8: idx[:] score s + bits_idx[h]"))
    assert [each.name for each in own.tensors] == ["bits_idx", "bits_idx_", "tiles_idx"]


def test_lists_stay_where_something_else_reads_them() -> None:
    own = lowered(spec("tensor idx: i32[Nq] select 8: idx[:] score s + idx[i]"))
    assert [each.name for each in own.tensors] == ["idx", "bits_idx", "tiles_idx"]
