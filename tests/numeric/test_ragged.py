"""``op.varlen``: each sequence of a ragged batch is what the dense formula of it alone is, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.ir.shape import Shape
from flashgen.op.op import AttentionOp
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification.inputs import random_inputs
from flashgen.verification.verify import FLOAT32_TOLERANCE, relative_error

from ..op.helpers import op as loaded
from .helpers import dtypes, operator

# Empty ones, single rows, a giant beside small ones, more queries than keys and fewer.
MIXED = ((5, 5), (0, 3), (1, 1), (64, 64), (33, 40), (0, 0), (200, 200), (17, 130), (9, 0), (2, 7))
KINDS = ("causal", "alibi", "gpt_oss", "relative_bias", "gaussian_regression", "sigmoid_attention", "bigbird", "bert")


@dataclass(frozen=True)
class Batch:
    """A ragged batch and what arrives at its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: tuple[Tensor, Tensor]
    captured: Mapping[str, Any]
    d_o: Tensor
    d_lse: Tensor


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def batch(
    op: AttentionOp,
    lengths: Sequence[tuple[int, int]] = MIXED,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Sequences of random numbers; captured tensors have the sizes of the longest."""
    head_dim = op.spec.head_dims[0]
    longest = [max(each) for each in zip(*lengths, strict=True)]
    values = random_inputs(op.spec, Shape(len(lengths), heads, kv_heads, *longest), head_dim, dtype, seed=seed)

    def rows(x: Tensor, axis: int) -> Tensor:
        return torch.cat([x[b, :, : each[axis]].transpose(0, 1) for b, each in enumerate(lengths)])

    return Batch(
        rows(values.q, 0),
        rows(values.k, 1),
        rows(values.v, 1),
        (starts([q for q, _ in lengths]), starts([k for _, k in lengths])),
        values.named,
        rows(values.d_o, 0),
        torch.cat([values.d_lse[b, :, :q] for b, (q, _) in enumerate(lengths)], 1),
    )


def results(function: Any, given: Batch, op: AttentionOp, *, wide: bool = False, **options: Any) -> dict[str, Tensor]:
    """o, lse and every gradient."""
    names = {"q", "k", "v", *(x.name for x in op.spec.tensors if x.grad), *(x.name for x in op.spec.params if x.grad)}

    def leaf(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            x = torch.tensor(x, dtype=torch.float32) if name in names else x
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = x.detach().to(torch.float64) if wide and name in names else x.detach()
        return x.requires_grad_() if name in names else x

    q, k, v = leaf("q", given.q), leaf("k", given.k), leaf("v", given.v)
    captured = {name: leaf(name, x) for name, x in given.captured.items()}
    leaves = {"q": q, "k": k, "v": v} | {name: x for name, x in captured.items() if name in names}
    has_lse = op.spec.weights.form.normalised
    found = function(q, k, v, *given.starts, return_lse=has_lse, **captured, **options)
    outputs: tuple[Tensor, ...] = found if has_lse else (found,)
    arriving = [given.d_o.to(outputs[0].dtype)]
    if has_lse:
        arriving.append(torch.where(outputs[1].isfinite(), given.d_lse.to(outputs[1].dtype), 0.0))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, materialize_grads=True)
    named = dict(zip(("o", "lse"), (x.detach() for x in outputs), strict=False))
    return named | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def check(op: AttentionOp, *batches: Batch, **options: Any) -> None:
    """The rule of ``flashgen verify``: twice the error of the formula in the tensors' type, and a rounding.

    Of several batches together: the gradient of a param is one number, whose error alone is luck.
    """

    def of_all(function: Any, **own: Any) -> dict[str, Tensor]:
        found = [results(function, given, op, **own) for given in batches]
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    own = of_all(op.varlen, **options)
    options.pop("deterministic", None)
    truth = of_all(op.reference.varlen, wide=True, dtype=torch.float64, **options)
    plain = of_all(op.reference.varlen, dtype=None, **options)
    is_float32 = batches[0].q.dtype is torch.float32
    for name, exact in truth.items():
        error, reached = relative_error(own[name], exact), relative_error(plain[name], exact)
        tolerance = 2.0 * reached + torch.finfo(own[name].dtype).eps
        if is_float32:
            tolerance = max(tolerance, FLOAT32_TOLERANCE)
        assert error <= tolerance, f"{name} is off by {error:.2e}, {tolerance:.2e} is allowed"
        if name == "lse":
            assert torch.equal(own[name].isfinite(), exact.isfinite())


@pytest.mark.parametrize("backend", ["cpu", "reference", "tiled"])
@pytest.mark.parametrize("name", KINDS)
def test_of_the_gallery(name: str, backend: str) -> None:
    if backend == "tiled":
        text = operator(name, "reference").spec
        from flashgen.op.op import OpParts

        op = AttentionOp(OpParts(text, {"cpu": None}, label="tiled"))
    else:
        op = operator(name, backend)
    check(op, batch(op))


@pytest.mark.parametrize("name", KINDS)
def test_in_fewer_bits(name: str) -> None:
    op = operator(name, "cpu")
    for element in dtypes(op.spec)[1:]:
        check(op, batch(op, dtype=TORCH_DTYPES[element]))


# What changes with the lengths of each: sizes, defaults of params, the probability of dropout; reads of tensors by all
# of their indices, of the largest and of the smallest shape.
OF_LENGTHS = """
attention of_lengths {
    head_dim 16
    param ell: f32 = 1 / Nk
    param back: i32 = Nq // 2
    param w: f32 = 0.5 grad
    param p: f32 = 0.5 / Nk + 0.1
    tensor bias: f32[B, H, Nq, Nk] grad
    tensor last: f32[Nk] grad
    tensor by_b: f32[B] grad
    score s + w * bias[b, h, i, j] + ell * last[Nk - 1 - j] + by_b[b] * (i - Nq) / 64
    mask i - j <= back
    dropout p
}
"""


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sizes_are_those_of_the_sequence(backend: str, deterministic: bool) -> None:
    op = loaded(OF_LENGTHS, backend)
    given = batch(op)
    check(op, given, seed=7, deterministic=deterministic)
    unlike = {name: x for name, x in given.captured.items() if name not in ("ell", "back", "p")}
    default = Batch(given.q, given.k, given.v, given.starts, unlike, given.d_o, given.d_lse)
    check(op, default, seed=7, deterministic=deterministic)
    check(op, default, dropout_p=0.25, seed=7, max_seqlen_q=200, max_seqlen_k=200)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sequence_is_its_dense_call(threads: int) -> None:
    """The same bits: where they are computed in the same tiles, and dropout by the number of the sequence."""
    op = loaded("attention drops { head_dim 16  mask causal  dropout 0.2 }", "cpu")
    given = batch(op)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        o, lse = op.varlen(given.q, given.k, given.v, *given.starts, return_lse=True, seed=3)
        for b, (q, k) in enumerate(MIXED):
            at, keys = slice(int(given.starts[0][b]), None), slice(int(given.starts[1][b]), None)
            own = [
                x[rows][:n].transpose(0, 1)[None]
                for x, rows, n in ((given.q, at, q), (given.k, keys, k), (given.v, keys, k))
            ]
            one, one_lse = op(*own, return_lse=True, seed=3, b_start=b, b_total=len(MIXED))
            assert torch.equal(o[at][:q], one[0].transpose(0, 1)), b
            assert torch.equal(lse[:, at][:, :q], one_lse[0]), b
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["alibi", "relative_bias", "bigbird"])
def test_repeatable_on_any_number_of_threads(name: str) -> None:
    op = operator(name, "cpu")
    # A giant that has to be cut beside a hundred small ones.
    given = batch(op, ((700, 700), *((n % 11, n % 13) for n in range(100))))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(results(op.varlen, given, op, deterministic=True))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for key, x in found[0].items():
            assert torch.equal(x, other[key]), key


def test_a_giant_is_shared_by_the_threads() -> None:
    op = operator("alibi", "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(op, batch(op, ((900, 900), (3, 3), (1, 2)), heads=1, kv_heads=1))
    finally:
        torch.set_num_threads(before)


def test_views_are_read_where_they_lie() -> None:
    op = operator("causal", "cpu")
    given = batch(op)
    wide = torch.zeros(len(given.q), 4, 200)
    wide[:, :, 3:67] = given.q
    headwise = given.k.transpose(0, 1).contiguous().transpose(0, 1)
    own = op.varlen(wide[:, :, 3:67], headwise, given.v.expand(2, *given.v.shape)[1], *given.starts)
    assert torch.equal(own, op.varlen(given.q, given.k, given.v, *given.starts))
    flipped = given.q.flip(2).flip(2).transpose(1, 2).contiguous().transpose(1, 2)  # the last dimension is strided
    assert torch.equal(op.varlen(flipped, given.k, given.v, *given.starts), own)


def test_shards_of_sequences_and_heads() -> None:
    op = operator("alibi", "cpu")
    given = batch(op)
    whole = op.varlen(given.q, given.k, given.v, *given.starts, **given.captured)
    heads = op.varlen(
        given.q[:, 2:], given.k[:, 1:], given.v[:, 1:], *given.starts, h_start=2, h_total=4, **given.captured
    )
    assert torch.equal(heads, whole[:, 2:])
    q0, k0 = int(given.starts[0][4]), int(given.starts[1][4])
    q_starts, k_starts = (x[4:] - x[4] for x in given.starts)
    later = op.varlen(given.q[q0:], given.k[k0:], given.v[k0:], q_starts, k_starts, b_start=4, **given.captured)
    assert torch.equal(later, whole[q0:])


def test_nothing_at_all() -> None:
    op = operator("causal", "cpu")
    none, zero = torch.zeros(0, 2, 64, requires_grad=True), torch.zeros(1, dtype=torch.int32)
    assert op.varlen(none, none, none, zero, zero).shape == (0, 2, 64)
    two = torch.zeros(3, dtype=torch.int32)
    op.varlen(none, none, none, two, two).sum().backward()
    k, starts = torch.randn(4, 2, 64, requires_grad=True), torch.tensor([0, 1, 4], dtype=torch.int32)
    for longest in (None, 7):  # a bound that is always passed says nothing about the rows that are there
        o, lse = op.varlen(k, none, none, starts, two, max_seqlen_k=longest, return_lse=True)
        assert not o.any()
        assert (lse == -torch.inf).all()
        (o.sum() + lse.sum()).backward()
        op.varlen(none, k, k, two, starts, max_seqlen_q=longest).sum().backward()
        assert k.grad is not None
        assert not k.grad.any()


def followed(given: Batch, rows: int) -> Batch:
    """The same with rows behind the last sequence, of which nothing may be read."""
    q, k, v, d_o = (
        torch.cat((x, x.new_full((rows, *x.shape[1:]), torch.nan))) for x in (given.q, given.k, given.v, given.d_o)
    )
    d_lse = torch.cat((given.d_lse, given.d_lse.new_full((len(given.d_lse), rows), torch.nan)), 1)
    return Batch(q, k, v, given.starts, given.captured, d_o, d_lse)


def check_rows_behind(op: AttentionOp, given: Batch, function: Any = None) -> None:
    """o, lse and gradients of them are 0, not what memory held, and all others what they are without them."""
    function = function or op.varlen
    wanted = results(function, given, op)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote to holds NaN
    try:
        found = results(function, followed(given, 9), op)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in wanted.items():
        axis = 1 if name == "lse" else 0
        own = found[name] if x.shape == found[name].shape else found[name].narrow(axis, 0, x.shape[axis])
        torch.testing.assert_close(own, x, rtol=1e-5, atol=1e-6, msg=name)
        assert x.shape == found[name].shape or not found[name].narrow(axis, x.shape[axis], 9).any(), name


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_behind_the_last_sequence(backend: str) -> None:
    op = operator("alibi", backend)
    for lengths in (MIXED, ((0, 3), (0, 0)), ((0, 0),)):
        check_rows_behind(op, batch(op, lengths))
        check_rows_behind(op, batch(op, lengths), op.reference.varlen)


@pytest.mark.parametrize("lengths", [(), (0,), (2, 1)])
def test_gradients_of_the_reference_where_there_is_no_pair(lengths: tuple[int, ...]) -> None:
    """As of the op: they are 0, and there."""
    text = "attention n { head_dim 8 tensor t: f32[H] grad param p: f32 grad score p * s + t[h] }"
    op = flashgen.loads(text, backend="reference")
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = [torch.full((count, 2, 8), torch.nan).requires_grad_() for count in (sum(lengths), 0, 0)]
    t, p = torch.full((2,), torch.nan).requires_grad_(), torch.tensor(torch.nan, requires_grad=True)
    for call in (op.varlen, op.reference.varlen):
        o, lse = call(rows[0], rows[1], rows[2], starts, starts * 0, t=t, p=p, return_lse=True)
        found = torch.autograd.grad(o.sum() + lse.sum(), [*rows, t, p])
        assert all(x.shape == like.shape and not x.any() for x, like in zip(found, [*rows, t, p], strict=True))


# Bad input -----------------------------------------------------------------------------------------------------------


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


WRONG: dict[str, dict[str, Any]] = {
    "falls from 3 to 2 at sequence 1": {"cu_seqlens_q": i32(0, 3, 2, 6)},
    "begins with 1": {"cu_seqlens_q": i32(1, 2, 3, 6)},
    "'cu_seqlens_k' ends at 7, but k and v have 6 rows": {"cu_seqlens_k": i32(0, 1, 2, 7)},
    "'cu_seqlens_q' ends at 8, but q has 6 rows": {"cu_seqlens_q": i32(0, 1, 2, 8)},
    "'cu_seqlens_k' begins with -1": {"cu_seqlens_k": i32(-1, 1, 2, 6)},
    "'cu_seqlens_q' falls from 1 to -2147483648": {"cu_seqlens_q": torch.tensor([0, 1, 2 - 2**32, 6])},
    "'cu_seqlens_k' ends at 2147483647": {"cu_seqlens_k": torch.tensor([0, 1, 2, 6 + 2**32])},
    "both are \\[B \\+ 1\\]": {"cu_seqlens_k": i32(0, 6)},
    "'cu_seqlens_q' is torch.float32": {"cu_seqlens_q": torch.tensor([0.0, 1, 2, 6])},
    "'cu_seqlens_q' is on meta, but 'q' is on cpu": {"cu_seqlens_q": i32(0, 1, 2, 6).to("meta")},
    "'cu_seqlens_k' is on meta, but 'q' is on cpu": {"cu_seqlens_k": torch.empty(4, dtype=torch.int64, device="meta")},
    "'cu_seqlens_q' must be a tensor": {"cu_seqlens_q": [0, 1, 2, 6]},
    "'cu_seqlens_q' has shape \\[4, 1\\]": {"cu_seqlens_q": i32(0, 1, 2, 6)[:, None]},
    "'max_seqlen_q' is 3, but sequence 2": {"max_seqlen_q": 3},
    "'max_seqlen_k' must be an int": {"max_seqlen_k": 6.0},
    "unknown argument 'q_start': dense calls take it": {"q_start": 2},
    "'q' has shape \\[1, 6, 2, 16\\]; \\[Tq, H, D\\]": {"q": torch.zeros(1, 6, 2, 16)},
    "'k' has shape \\[6, 2, 8\\]": {"k": torch.zeros(6, 2, 8)},
    "'v' has shape \\[5, 2, 16\\]; dimension 0": {"v": torch.zeros(5, 2, 16)},
    "tensor 'doc' has shape \\[3, 6\\]; the spec declares \\[B, Nk\\] = \\[3, 4\\]": {"doc": i32(*[0] * 18).view(3, 6)},
}  # fmt: skip
DOCUMENTS = "attention documents { head_dim 16  tensor doc: i32[B, Nk]  mask doc[b, i] == doc[b, j] }"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_named(said: str, backend: str) -> None:
    op = loaded(DOCUMENTS, backend)
    rows = {name: torch.zeros(6, 2, 16) for name in "qkv"}
    right: dict[str, Any] = {
        **rows,
        "cu_seqlens_q": i32(0, 1, 2, 6),
        "cu_seqlens_k": i32(0, 1, 2, 6),
        "doc": i32(*[0] * 12).view(3, 4),
    }
    op.varlen(**right)
    for function in (op.varlen, op.reference.varlen):
        with pytest.raises((ValueError, TypeError), match=said):
            function(**{**right, **WRONG[said]})


def test_an_index_that_leaves_its_tensor_in_one_sequence() -> None:
    op = loaded(DOCUMENTS, "cpu")
    q, k = torch.zeros(9, 2, 16), torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match=r"sequence 1, of 5 queries and 3 keys: .*index 'i' of tensor 'doc'"):
        op.varlen(q, k, k, i32(0, 4, 9), i32(0, 5, 8), doc=torch.zeros(2, 5, dtype=torch.int32))


def test_a_tensor_that_longer_sequences_have_less_of() -> None:
    op = loaded("attention less { head_dim 16  tensor t: f32[100 - Nk]  score s + t[99 - Nk] }", "cpu")
    q = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match="sequence 0, of 3 queries and 3 keys: it reads 97 entries"):
        op.varlen(q, q, q, i32(0, 3, 8), i32(0, 3, 8), t=torch.zeros(95))


def test_names_that_varlen_has_are_refused() -> None:
    q = torch.zeros(4, 2, 16)
    clash = flashgen.loads("attention clash { head_dim 16  tensor cu_seqlens_q: f32[H]  score s + cu_seqlens_q[h] }")
    with pytest.raises(ValueError, match="captures 'cu_seqlens_q', an argument of varlen"):
        clash.varlen(q, q, q, i32(0, 4), i32(0, 4))


# What PyTorch does with it -------------------------------------------------------------------------------------------


def test_operators_are_what_they_say() -> None:
    op = loaded(OF_LENGTHS, "cpu")
    given = batch(op, ((3, 3), (0, 2), (20, 20)))
    tensors = [given.q, given.k, given.v, *(given.captured[each.name] for each in op.spec.tensors)]
    args = (*(x.detach().requires_grad_() for x in tensors), None, None, torch.tensor(0.5, requires_grad=True), None)
    args += (torch.tensor(3), None, *given.starts, 0, 0, None, None, None, None, True)
    operator_ = getattr(torch.ops.flashgen, f"{op.name.split('::')[1]}_varlen").default
    torch.library.opcheck(operator_, args)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole_and_with_other_lengths(compiler: str) -> None:
    op = operator("causal", "cpu")

    @torch.compile(backend=compiler, fullgraph=True, dynamic=True)
    def program(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return torch.relu(op.varlen(q, k, v, cu_q, cu_k))

    for lengths in (MIXED, MIXED[:4]):
        given = batch(op, lengths)
        q = given.q.clone().requires_grad_()
        program(q, given.k, given.v, *given.starts).sum().backward()  # type: ignore[no-untyped-call]
        plain = given.q.clone().requires_grad_()
        torch.relu(op.varlen(plain, given.k, given.v, *given.starts)).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(q.grad, plain.grad)  # type: ignore[arg-type]


def test_flops_are_those_of_the_sequences() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    op = operator("causal", "cpu")
    given = batch(op)
    pairs = sum(q * k for q, k in MIXED)
    with FlopCounterMode(display=False) as counter:
        op.varlen(given.q.requires_grad_(), given.k, given.v, *given.starts).sum().backward()
    assert counter.get_total_flops() == 2 * 4 * pairs * 64 * (2 + 5)


# NestedTensors -------------------------------------------------------------------------------------------------------


def nested(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_jagged_tensors_through_the_plain_call(dtype: torch.dtype) -> None:
    op = operator("alibi", "cpu")
    given = batch(op)
    q_offsets, k_offsets = (x.to(dtype) for x in given.starts)
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    q, k, v = leaves
    o, lse = op(nested(q, q_offsets), nested(k, k_offsets), nested(v, k_offsets), return_lse=True, **given.captured)
    rows, sums = op.varlen(given.q, given.k, given.v, *given.starts, return_lse=True, **given.captured)
    assert o.is_nested
    assert o.shape[:2] == (len(MIXED), 4)
    assert o.shape[3] == 64
    assert torch.equal(o.transpose(1, 2).values(), rows)
    assert torch.equal(lse.values(), sums)
    plain_q, plain_k, plain_v = plain = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    o.transpose(1, 2).values().backward(given.d_o)  # type: ignore[no-untyped-call]
    op.varlen(plain_q, plain_k, plain_v, *given.starts, **given.captured).backward(given.d_o)
    for x, y in zip(leaves, plain, strict=True):
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    exact = op.reference(
        nested(given.q, q_offsets), nested(given.k, k_offsets), nested(given.v, k_offsets), **given.captured
    )
    assert relative_error(o.transpose(1, 2).values(), exact.transpose(1, 2).values()) < 1e-6


def test_nested_tensors_that_are_none_of_ours() -> None:
    op = operator("causal", "cpu")
    given = batch(op)
    q, k = nested(given.q, given.starts[0]), nested(given.k, given.starts[1])
    with pytest.raises(ValueError, match=r"of \[B, j, H, width\] pass q\.transpose"):
        op(q.transpose(1, 2), k, k)
    with pytest.raises(TypeError, match="'k' is no NestedTensor, but others"):
        op(q, given.k, k)
    with pytest.raises(ValueError, match="'v' is a NestedTensor of other lengths than 'k'"):
        op(k, k, nested(given.q[:, :2], given.starts[0]))
    with pytest.raises(ValueError, match="'q' has 10 sequences and 'k' has 1"):
        op(q, *[nested(given.k, i32(0, len(given.k)))] * 2)
    with pytest.raises(ValueError, match="NestedTensors hold whole ones"):
        op(q, k, k, q_start=1)
