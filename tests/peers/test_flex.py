"""What FlexAttention's tests ask, asked of flashgen.flex: the kinds of checks they make, as cases of our own.

Judge is FlexAttention's eager formula in float64 (``tests/flex/helpers.py``). Products of tables run on the formula,
which takes no compiler; a diagonal of them on kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex import and_masks, create_block_mask, flex_attention, ops, or_masks
from tests.flex.helpers import assert_close, gradients, inputs, judged
from tests.slices import one_of

# Called with lists of tensors.
attend: Any = flex_attention
judge: Any = judged
B, H, N = 2, 4, 24
Made = tuple[Any, tuple[Tensor, ...]]


def learned(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def ints(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def of_heads() -> Made:
    bias = learned(H)
    return lambda s, b, h, i, j: s + bias[h], (bias,)


def of_pairs() -> Made:
    bias = learned(N, N, seed=1)
    return lambda s, b, h, i, j: s + bias[i, j], (bias,)


def of_batch_and_heads() -> Made:
    gain = learned(B, H, seed=2)
    return lambda s, b, h, i, j: s * (1 + 0.1 * gain[b, h]), (gain,)


def of_rows_and_columns() -> Made:
    left, right = learned(B, N, seed=3), learned(H, N, seed=4)
    return lambda s, b, h, i, j: s + left[b][i] * right[h, j], (left, right)


def through_a_table() -> Made:
    table, rows = learned(7, seed=5), ints(N, below=7)
    return lambda s, b, h, i, j: s + table[rows[j]], (table,)


def twice_from_one() -> Made:
    bias = learned(N, seed=6)
    return lambda s, b, h, i, j: s + bias[i] - 0.5 * bias[j], (bias,)


def of_a_number() -> Made:
    factor = torch.tensor(0.7, requires_grad=True)
    return lambda s, b, h, i, j: s * factor, (factor,)


def plain(mod: Callable[..., Any]) -> Callable[[], Made]:
    return lambda: (mod, ())


SCORES: dict[str, Callable[[], Made]] = {
    "identity": plain(lambda s, b, h, i, j: s),
    "twice": plain(lambda s, b, h, i, j: 2 * s),
    "square": plain(lambda s, b, h, i, j: s * s),
    "sine": plain(lambda s, b, h, i, j: torch.sin(s) + torch.cos(s)),
    "capped": plain(lambda s, b, h, i, j: 3 * torch.tanh(s / 3)),
    "causal, as a score": plain(lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))),
    "distance": plain(lambda s, b, h, i, j: s + (i - j)),
    "distance, causal": plain(lambda s, b, h, i, j: torch.where(i >= j, s + (j - i), -float("inf"))),
    "ALiBi": plain(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H))),
    "checkerboard": plain(
        lambda s, b, h, i, j: torch.where((i - j) % 2 == 0, s * 0.5, s) * torch.where(h % 2 == 0, 1.0, 0.8)
    ),
    "of heads": of_heads,
    "of pairs": of_pairs,
    "of batch and heads": of_batch_and_heads,
    "of rows and columns": of_rows_and_columns,
    "through a table": through_a_table,
    "twice from one": twice_from_one,
    "of a number": of_a_number,
}


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() <= 5


def documents() -> Any:
    number = ints(B, N, below=4).sort(-1).values
    return lambda b, h, i, j: number[b, i] == number[b, j]


def blocks() -> Any:
    kept = ints(H, N // 4, N // 4, below=2, seed=3).bool()
    return lambda b, h, i, j: kept[h, i // 4, j // 4]


def prefix() -> Any:
    length = torch.tensor([3, 11])
    return or_masks(causal, lambda b, h, i, j: j < length[b])


def padding() -> Any:
    there = torch.arange(N) < torch.tensor([N, 9])[:, None]
    return lambda b, h, i, j: there[b, j]


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": lambda: causal,
    "upper": lambda: lambda b, h, i, j: i <= j,
    "window": lambda: and_masks(causal, window),
    "window or start": lambda: or_masks(window, lambda b, h, i, j: j < 2),
    "documents": documents,
    "blocks": blocks,
    "prefix": prefix,
    "padding": padding,
    "some heads": lambda: lambda b, h, i, j: (h < 2) | (i >= j),
    "nothing for some rows": lambda: lambda b, h, i, j: (i % 3 != 0) & (j > i // 2),
}
PAIRS = [*itertools.product(SCORES, MASKS)]
DIAGONAL = [(score, mask) for score, mask in zip(SCORES, itertools.cycle(MASKS), strict=False)]


def check(score: str, mask: str, backend: str | None, dtype: torch.dtype = torch.float32) -> None:
    """o, lse and every gradient; of 16 bits by the error of the eager formula in the same type."""
    (score_mod, wanted), mask_mod = SCORES[score](), MASKS[mask]()
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(batch=B, heads=H, q_len=N, kv_len=N)]
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, N, N, device="cpu")
    mine = attend(*leaves, score_mod, block_mask, return_lse=True, backend=backend)
    theirs = judge(*leaves, score_mod, mask_mod)
    found = [*mine, *gradients(mine, [*leaves, *wanted])]
    exact = [*theirs, *gradients(theirs, [*leaves, *wanted])]
    if dtype is torch.float32:
        for x, y in zip(found, exact, strict=True):
            assert_close(x, y, 1e-4)
        return
    eager = judge(*leaves, score_mod, mask_mod, dtype=dtype)
    for x, y, z in zip(found, exact, [*eager, *gradients(eager, [*leaves, *wanted])], strict=True):
        assert apart(x, y) <= 2 * apart(z, y) + torch.finfo(dtype).eps * float(
            y.detach()[torch.isfinite(y)].abs().max()
        )


def apart(x: Tensor, y: Tensor) -> float:
    """The largest difference where y is a number."""
    return float((x.detach().double() - y.detach().double())[torch.isfinite(y)].abs().max())


@pytest.mark.parametrize(("score", "mask"), one_of(14, PAIRS))
def test_scores_and_masks(score: str, mask: str) -> None:
    check(score, mask, "reference")


@pytest.mark.parametrize(("score", "mask"), one_of(9, DIAGONAL))
def test_scores_and_masks_on_kernels(score: str, mask: str) -> None:
    check(score, mask, None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("score", "mask"), DIAGONAL[::4])
def test_16_bits_on_kernels(score: str, mask: str, dtype: torch.dtype) -> None:
    check(score, mask, None, dtype)


SHAPES = {
    "one query": {"q_len": 1, "kv_len": 40},
    "one key": {"q_len": 7, "kv_len": 1},
    "more queries": {"q_len": 40, "kv_len": 13},
    "more keys": {"q_len": 13, "kv_len": 150},
    "beyond a block": {"q_len": 129, "kv_len": 129},
    "grouped": {"heads": 6, "kv_heads": 2},
    "one head of keys": {"heads": 4, "kv_heads": 1},
    "one of each": {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 1},
    "a width of no power": {"d": 20},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    leaves = inputs(**SHAPES[name])
    (q, k, _), mask_mod = leaves, and_masks(causal, window) if name != "more keys" else window

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + 0.1 * h * (i - j)

    mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2])
    mine = attend(*leaves, score_mod, mask, enable_gqa=True, return_lse=True, backend="reference")
    theirs = judge(*leaves, score_mod, mask_mod)
    for x, y in zip((*mine, *gradients(mine, leaves)), (*theirs, *gradients(theirs, leaves)), strict=True):
        assert_close(x, y, 1e-4)


def test_other_shapes_of_a_mod_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 0.37 + h

    made: list[Any] = []
    load: Any = vars(ops)["load_spec"]

    def load_spec(*given: Any) -> Any:
        made.append(given)
        return load(*given)

    monkeypatch.setattr(ops, "load_spec", load_spec)
    for q_len, kv_len, batch, heads in ((24, 24, 2, 4), (31, 7, 1, 4), (1, 200, 3, 2), (64, 64, 2, 8)):
        leaves = [x.detach() for x in inputs(batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len)]
        mask = create_block_mask(causal, None, None, q_len, kv_len)
        o = attend(*leaves, score_mod, mask, backend="reference")
        assert_close(o, judge(*leaves, score_mod, causal)[0])
    assert len(made) == 1


@pytest.mark.parametrize("sizes", [(None, None), (1, 1), (B, None), (None, H), (B, H)], ids=str)
@pytest.mark.parametrize("block", [16, 128, (8, 32)], ids=str)
def test_block_masks_of_every_shape(sizes: tuple[int | None, int | None], block: Any) -> None:
    """Whatever a mask is made for, flashgen's and PyTorch's own, it keeps the same pairs."""
    kept = ints(B, H, below=3, seed=5)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        own = kept[b if sizes[0] not in (None, 1) else 0, h if sizes[1] not in (None, 1) else 0]
        return (i >= j) | (j < own)

    q, k, v = (x.detach() for x in inputs())
    wanted, _ = judge(q, k, v, None, mask_mod)
    mine = create_block_mask(mask_mod, *sizes, N, N, BLOCK_SIZE=block)
    theirs = torch_flex.create_block_mask(mask_mod, *sizes, N, N, device="cpu", BLOCK_SIZE=block)
    for mask in (mine, theirs):
        assert_close(attend(q, k, v, None, mask, backend="reference"), wanted)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_any_order_of_strides(order: tuple[int, ...]) -> None:
    """B, H and N in any order in memory, of q, k, v and of what arrives."""
    back = sorted(range(4), key=(*order, 3).__getitem__)

    def laid(x: Tensor) -> Tensor:
        return x.detach().permute(*order, 3).contiguous().permute(*back)

    leaves = inputs()
    views = [laid(x).requires_grad_() for x in leaves]
    score_mod: Any = SCORES["ALiBi"]()[0]
    mask = create_block_mask(causal, None, None, N, N)
    mine = attend(*views, score_mod, mask, backend="cpu")
    theirs, _ = judge(*leaves, score_mod, causal)
    assert_close(mine, theirs)
    arriving = laid(torch.linspace(-1, 1, mine.numel()).view(mine.shape))
    found = torch.autograd.grad(mine, views, arriving)
    wanted = torch.autograd.grad(theirs, leaves, arriving.double())
    for x, y in zip(found, wanted, strict=True):
        assert_close(x, y, 1e-4)


def test_keys_of_one_batch_entry_are_every_ones() -> None:
    q, _, _ = inputs(batch=3)
    _, k, v = inputs(batch=1)
    mine = attend(q, k, v, None, create_block_mask(causal, None, None, N, N), backend="reference")
    theirs, _ = judge(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), None, causal)
    assert_close(mine, theirs)
    for x, y in zip(torch.autograd.grad(mine.sum(), (k, v)), torch.autograd.grad(theirs.sum(), (k, v)), strict=True):
        assert_close(x, y, 1e-4)


@pytest.mark.parametrize("asked", [{"return_lse": True}, {"return_aux": torch_flex.AuxRequest(lse=True)}], ids=str)
def test_lse_and_its_gradient(asked: dict[str, Any]) -> None:
    leaves = inputs(kv_heads=2)
    mine = attend(*leaves, SCORES["capped"]()[0], enable_gqa=True, backend="reference", **asked)
    lse = mine[1] if isinstance(mine[1], Tensor) else mine[1].lse
    _, wanted = judge(*leaves, SCORES["capped"]()[0])
    assert_close(lse, wanted)
    for x, y in zip(
        torch.autograd.grad(lse.square().sum(), leaves[:2]),
        torch.autograd.grad(wanted.square().sum(), leaves[:2]),
        strict=True,
    ):
        assert_close(x, y, 1e-4)


@pytest.mark.parametrize("form", ["strided", "transposed", "expanded", "offset"])
def test_captured_views(form: str) -> None:
    """A buffer is read by its own strides, and so is its gradient written."""
    whole = learned(2 * H, 2 * N, seed=8)
    view: Any = {
        "strided": lambda x: x[::2, ::2],
        "transposed": lambda x: x[:N, :H].T if x.shape[0] >= N else x.T[:H, : 2 * H],
        "expanded": lambda x: x[:1, :N].expand(H, N),
        "offset": lambda x: x[1 : 1 + H, 3 : 3 + N],
    }[form]
    leaves = inputs()
    columns = view(whole).shape[1]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + view(whole)[h, j % columns]

    mine = attend(*leaves, score_mod, return_lse=True, backend="reference")
    theirs = judge(*leaves, score_mod)
    wanted = [*leaves, whole]
    for x, y in zip((*mine, *gradients(mine, wanted)), (*theirs, *gradients(theirs, wanted)), strict=True):
        assert_close(x, y, 1e-4)
