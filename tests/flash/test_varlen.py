"""``flash_attn_varlen_func`` is ``flash_attn_func`` of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen import flash
from flashgen.op.signature import F8

from .test_arguments import Kept, exact
from .test_dense import TOLERANCE

# Their arguments are what is tested.
flash_attn_func: Any = flash.flash_attn_func
flash_attn_varlen_func: Any = flash.flash_attn_varlen_func
flash_attn_varlen_kvpacked_func: Any = flash.flash_attn_varlen_kvpacked_func
flash_attn_varlen_qkvpacked_func: Any = flash.flash_attn_varlen_qkvpacked_func
LENGTHS = ((7, 9), (0, 3), (1, 1), (40, 25))
Q_STARTS, K_STARTS = (torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in zip(*LENGTHS, strict=True))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(48, 4, 16), torch.randn(38, 2, 16), torch.randn(38, 2, 16)  # test_dense.py's kernels


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"causal": True, "window_size": (5, 0), "softcap": 20.0, "alibi_slopes": torch.rand(4, 4)},
    ],
)
def test_each_sequence_is_a_call(options: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    o, lse, _ = flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, 40, 25, return_attn_probs=True, **options)
    parts, sums = [], []
    for b in range(len(LENGTHS)):
        rows, keys = slice(*Q_STARTS[b : b + 2].tolist()), slice(*K_STARTS[b : b + 2].tolist())
        own = {name: x[b] if name == "alibi_slopes" else x for name, x in options.items()}
        part = flash_attn_func(q[rows][None], k[keys][None], v[keys][None], return_attn_probs=True, **own)
        parts.append(part[0][0])
        sums.append(part[1][0])
    torch.testing.assert_close(o, torch.cat(parts))
    torch.testing.assert_close(lse, torch.cat(sums, 1))
    arriving = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), arriving)
    for x, y in zip(found, torch.autograd.grad(torch.cat(parts), (q, k, v), arriving), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "options", [{"causal": True, "alibi_slopes": torch.rand(4)}, {"window_size": (5, 2)}, {"attention_chunk": 8}]
)
def test_one_tensor_of_starts_is_as_two_that_are_equal(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(48, 4, 16), torch.randn(48, 2, 16), torch.randn(48, 2, 16)
    o = flash_attn_varlen_func(q, k, v, Q_STARTS, Q_STARTS, **options)
    assert torch.equal(o, flash_attn_varlen_func(q, k, v, Q_STARTS, Q_STARTS.clone(), **options))


def test_what_does_not_fit_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="'q' has shape"):
        flash_attn_varlen_func(q[None], k, v, Q_STARTS, K_STARTS)
    with pytest.raises(ValueError, match="'alibi_slopes' has shape"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, alibi_slopes=torch.rand(3))
    with pytest.raises(ValueError, match="'cu_seqlens_k' ends at 38, but k and v have 25 rows"):
        flash_attn_varlen_func(q, k[:25], v[:25], Q_STARTS, K_STARTS)
    for longest, said in ((5.0, "float"), (torch.tensor(5.0), r"a tensor torch.float32 \[\]"), ("5", "str")):
        with pytest.raises(TypeError, match=f"'max_seqlen_k' must be an int or a 0-dim tensor of one, not {said}"):
            flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, None, longest)
    with pytest.raises(ValueError, match="'max_seqlen_q' is 39, but sequence 3"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, torch.tensor(39))
    used = torch.tensor([7, 0, 1, 41], dtype=torch.int32)
    with pytest.raises(ValueError, match="'seqused_q' is below 0 or beyond the rows that 'cu_seqlens_q' gives"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, seqused_q=used)
    with pytest.raises(ValueError, match=r"'seqused_k' has shape \[3\], on cpu; \[B\] = \[4\]"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, seqused_k=used[:3])
    with pytest.raises(TypeError, match=r"'seqused_k' is torch\.float32"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, seqused_k=used.float())
    pages, table = torch.zeros(8, 16, 2, 16), torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"'k' has shape \[38, 2, 16\]; \[pages, page, Hkv, D\] is expected"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, block_table=table)
    wrong = torch.tensor([[0, 1], [2, -1], [3, -1], [4, 8]], dtype=torch.int32)
    with pytest.raises(ValueError, match="'block_table' of sequence 3 names page 8 at 1; the cache has 8 pages"):
        flash_attn_varlen_func(q, pages, pages, Q_STARTS, K_STARTS, block_table=wrong)
    with pytest.raises(TypeError, match="'cu_seqlens_k' must be a tensor of cumulative lengths, not NoneType"):
        flash_attn_varlen_func(q, pages, pages, Q_STARTS, block_table=table)
    with pytest.raises(ValueError, match=r"'cu_seqlens_q' has shape \[0\]; \[B \+ 1\] is expected"):
        flash_attn_varlen_func(q, k, v, Q_STARTS[:0], K_STARTS, alibi_slopes=torch.rand(4))


# What a call means, sequence by sequence, in float64; specs run on the reference. ------------------------------------


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def of_each(rows: tuple[Tensor, ...], used: list[tuple[slice, slice]], kept: Kept = causal) -> tuple[Tensor, Tensor]:
    """o and lse of sequences that use these rows of q, and of k and v; 0 elsewhere. Of four tensors the last is qv."""
    q, k, v, *qv = rows
    o, lse = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64), q.new_zeros(q.shape[1::-1]).double()
    for own, keys in used:
        second = qv[0][own][None] if qv else None
        part, sums = exact((q[own][None], k[keys][None], v[keys][None]), kept, second)
        o[own], lse[:, own] = part[0], sums[0]
    return o, lse


def slices(q_starts: Tensor, k_starts: Tensor, q_used: Tensor, k_used: Tensor) -> list[tuple[slice, slice]]:
    every = zip(*(x.tolist() for x in (q_starts, k_starts, q_used, k_used)), strict=False)
    return [(slice(a, a + n), slice(b, b + m)) for a, b, n, m in every]


def assert_exact(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], rows: tuple[Tensor, ...]) -> None:
    """o, lse and every gradient."""
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, **TOLERANCE)
    seen, d_o = wanted[1].detach() > -torch.inf, torch.linspace(-1, 1, found[0].numel()).view_as(found[0])
    own, truth = (torch.autograd.grad((o * d_o).sum() + lse[seen].sum(), rows) for o, lse in (found, wanted))
    for x, y in zip(own, truth, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


FULL = (Q_STARTS.diff(), K_STARTS.diff())
USED = (torch.tensor([4, 0, 1, 33], dtype=torch.int32), torch.tensor([9, 2, 0, 12], dtype=torch.int32))


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("which", ["q", "k", "q and k"])
def test_rows_that_are_not_used(which: str) -> None:
    """They may hold anything, as may rows behind the last sequence."""
    q_used, k_used = (used if name in which else full for name, used, full in zip("qk", USED, FULL, strict=True))
    used = slices(Q_STARTS, K_STARTS, q_used, k_used)
    wide = [torch.cat((x, torch.zeros(5, *x.shape[1:]))) for x in inputs()]
    for axis, x in zip((0, 1, 1), wide, strict=True):
        is_used = torch.zeros(len(x), dtype=torch.bool)
        for each in used:
            is_used[each[axis]] = True
        x[~is_used] = torch.nan
    rows = tuple(x.requires_grad_() for x in wide)
    given = {f"seqused_{name}": x.long() for name, x in zip("qk", USED, strict=True) if name in which}
    found = flash_attn_varlen_func(*rows, Q_STARTS, K_STARTS, 40, 25, causal=True, return_lse=True, **given)
    assert_exact(found, of_each(rows, used), rows)


@pytest.mark.usefixtures("on_reference")
def test_slopes_and_a_second_query_of_rows_that_are_used() -> None:
    used = slices(Q_STARTS, K_STARTS, *USED)
    given: dict[str, Any] = {"seqused_q": USED[0], "seqused_k": USED[1], "causal": True, "return_lse": True}
    rows = tuple(x.requires_grad_() for x in (*inputs(), torch.randn(48, 4, 16)))
    found = flash_attn_varlen_func(*rows[:3], Q_STARTS, K_STARTS, qv=rows[3], **given)
    assert_exact(found, of_each(rows, used), rows)
    slopes = torch.rand(4, 4).requires_grad_()
    found = flash_attn_varlen_func(*rows[:3], Q_STARTS, K_STARTS, alibi_slopes=slopes, **given)
    parts = [
        flash_attn_func(*(x[each][None] for x, each in zip(rows, (q, k, k), strict=False)), alibi_slopes=slope[None],
                        causal=True)
        for (q, k), slope in zip(used, slopes, strict=True)
    ]  # fmt: skip
    own = torch.cat([found[0][each] for each, _ in used])
    torch.testing.assert_close(own, torch.cat([each[0] for each in parts]))
    (x,), (y,) = (torch.autograd.grad(o.square().sum(), slopes) for o in (own, torch.cat([p[0] for p in parts])))
    torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("page", [3, 16])
@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_pages(page: int, name: str) -> None:
    """Of a cache that others share; pages that no sequence has are not read."""
    q, k, v = inputs()
    columns = -(-25 // page)
    table = torch.randperm(6 * columns, generator=torch.Generator().manual_seed(0))[: 4 * columns].view(4, -1).int()
    pages = torch.full((6 * columns, page, 2, 32), torch.nan)
    for b, (_, keys) in enumerate(slices(Q_STARTS, K_STARTS, *FULL)):
        own = torch.cat((k[keys], v[keys]), 2)
        for n in range(-(-len(own) // page)):
            rows_of_page = own[n * page : (n + 1) * page]
            pages[table[b, n], : len(rows_of_page)] = rows_of_page
    q.requires_grad_(), pages.requires_grad_()
    k_pages, v_pages = pages[..., :16], pages[..., 16:]
    where: dict[str, Any] = {name: table, "causal": True, "return_lse": True}
    found = flash_attn_varlen_func(q, k_pages, v_pages, Q_STARTS, K_STARTS, 40, 25, **where)
    rows = (q, k, v)
    wanted = of_each(rows, slices(Q_STARTS, K_STARTS, *FULL))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, **TOLERANCE)
    by_used = flash_attn_varlen_func(
        q, k_pages, v_pages, Q_STARTS, None, torch.tensor(40), np.int64(25), seqused_k=FULL[1], **where
    )
    assert torch.equal(by_used[0], found[0])
    k.requires_grad_(), v.requires_grad_()
    truth = of_each(rows, slices(Q_STARTS, K_STARTS, *FULL))
    d_q, d_pages = torch.autograd.grad(found[0].sum(), (q, pages))
    exact_q, *exact_rows = torch.autograd.grad(truth[0].sum(), rows)
    torch.testing.assert_close(d_q, exact_q, **TOLERANCE)
    b, n = 3, 24  # the last key of the last sequence
    place = d_pages[table[b, n // page], n % page]
    torch.testing.assert_close(place, torch.cat([x[-1] for x in exact_rows], 1), **TOLERANCE)
    torch.testing.assert_close(d_pages.sum(), sum(x.sum() for x in exact_rows), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_reference")
def test_packed_forms() -> None:
    qkv = torch.randn(48, 3, 4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = qkv.unbind(1)
    wanted = flash_attn_varlen_func(*rows, Q_STARTS, Q_STARTS, 40, 40, causal=True)
    for longest in (40, torch.tensor(40), np.int32(40), None):
        found = flash_attn_varlen_qkvpacked_func(qkv, Q_STARTS, longest, causal=True)
        assert torch.equal(found, wanted)
    found = flash_attn_varlen_kvpacked_func(rows[0], qkv[:, 1:], Q_STARTS, Q_STARTS, 40, 40, 0.0, None, True)
    assert torch.equal(found, wanted)
    (x,), (y,) = (torch.autograd.grad(o.square().sum(), qkv) for o in (found, wanted))
    torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match=r"'qkv' has shape \[48, 2, 4, 16\]; \[T, 3, H, D\] is expected"):
        flash_attn_varlen_qkvpacked_func(qkv[:, :2], Q_STARTS, 40)
    with pytest.raises(TypeError, match=r"'kv' must be a tensor \[Tk, 2, Hkv, D\], not list"):
        flash_attn_varlen_kvpacked_func(rows[0], [rows[1]] * 2, Q_STARTS, Q_STARTS, 40, 40)


@pytest.mark.usefixtures("on_reference")
def test_eight_bits() -> None:
    """Each sequence has factors of its own."""
    rows, factors = [x.to(F8) for x in inputs()], {f"{name}_descale": torch.rand(4, 2) + 0.5 for name in "qkv"}
    o, lse = flash_attn_varlen_func(*rows, Q_STARTS, K_STARTS, 40, 25, causal=True, return_lse=True, **factors)
    assert o.dtype is torch.bfloat16
    wide = [
        torch.cat([
            x[each[axis]].double() * factor[b].repeat_interleave(x.shape[1] // 2)[:, None]
            for b, each in enumerate(slices(Q_STARTS, K_STARTS, *FULL))
        ])
        for axis, x, factor in zip((0, 1, 1), rows, factors.values(), strict=True)
    ]  # fmt: skip
    wanted, sums = of_each(tuple(wide), slices(Q_STARTS, K_STARTS, *FULL))
    torch.testing.assert_close(o.double(), wanted, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, **TOLERANCE)
    with pytest.raises(ValueError, match="'k_descale' goes with q, k and v of 8 bits"):
        flash_attn_varlen_func(*inputs(), Q_STARTS, K_STARTS, k_descale=2.0)
