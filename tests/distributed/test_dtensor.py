"""DTensors go through an op: what each rank computes is its part of one device's results, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flashgen
from tests.distributed.dtensor_cases import Case, Found, all_compared, told
from tests.distributed.ranks import Ranks

WHOLE, SUM = (Replicate(),), (Partial(),)
BATCH, HEADS, QUERIES = (Shard(0),), (Shard(1),), (Shard(2),)
FIRST, LAST = (Shard(0),), (Shard(1),)

CAUSAL = "attention causal { head_dim 16 mask causal }"
ALIBI = "attention slopes { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * abs(i - j) mask causal }"
FORMULA = """attention formula { head_dim 16 tensor slope: f32[H] grad
    score s - slope[h] * 2.0 ** (-8.0 * (h + 1) / H) * abs(i - j) mask causal or b == 1 }"""
BIAS = """attention biased { head_dim 16/24 tensor t: f32[B, H, Nq, Nk] grad tensor z: f32[Hkv] grad
    score s + t[b, h, i, j] + z[hkv] * b mask causal weights softmax(sink = z[hkv]) }"""
DOCUMENTS = "attention packed { head_dim 16 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal }"
GAIN = "attention gain { head_dim 16 param w: f32 grad score s * w weights sigmoid(s) }"
DROPPED = (
    "attention dropped { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * (i - j) mask causal dropout 0.4 }"
)
OTHER = "attention other { head_dim 16 tensor t: f32[H] grad score s + t[H - 1 - h] * (i - j) mask causal }"

CASES = {
    "batch": Case(ALIBI, BATCH, backend=None),
    "batch of which one has more": Case(ALIBI, BATCH, sizes=(3, 4, 2, 21), backend=None),
    "batch of which one has none": Case(BIAS, BATCH, captured={"t": FIRST}, sizes=(1, 2, 1, 9)),
    "heads": Case(ALIBI, HEADS, captured={"slope": FIRST}, backend=None),
    "heads, captured whole": Case(ALIBI, HEADS, backend=None),
    "heads, captured as it is": Case(DOCUMENTS, HEADS, captured={"doc": None}),
    "heads of which one has more": Case(ALIBI, HEADS, captured={"slope": FIRST}, sizes=(1, 3, 3, 21), backend=None),
    "heads of which one has none": Case(ALIBI, HEADS, captured={"slope": FIRST}, sizes=(1, 1, 1, 9)),
    "heads that share keys": Case(ALIBI, HEADS, WHOLE, sizes=(1, 4, 1, 21), backend=None),
    "heads whose keys one rank has": Case(CAUSAL, HEADS, HEADS, sizes=(1, 4, 1, 21)),
    "heads alone": Case(CAUSAL, HEADS, WHOLE),
    "keys' heads alone": Case(CAUSAL, WHOLE, HEADS),
    "position of a head": Case(FORMULA, HEADS, captured={"slope": FIRST}),
    "position in the batch": Case(FORMULA, BATCH),
    "documents by batch": Case(DOCUMENTS, BATCH, captured={"doc": FIRST}),
    "documents whole": Case(DOCUMENTS, BATCH),
    "bias by batch": Case(BIAS, BATCH, captured={"t": FIRST}),
    "bias by heads": Case(BIAS, HEADS, captured={"t": LAST, "z": FIRST}),
    "bias by queries": Case(BIAS, QUERIES, WHOLE, captured={"t": QUERIES}),
    "bias by keys": Case(BIAS, HEADS, captured={"t": (Shard(3),)}),
    "index that is no head": Case(OTHER, HEADS, captured={"t": FIRST}),
    "param": Case(GAIN, BATCH),
    "param, heads": Case(GAIN, HEADS),
    "dropout by batch": Case(DROPPED, BATCH, seed=11),
    "dropout by heads": Case(DROPPED, HEADS, captured={"slope": FIRST}, seed=11, backend=None),
    "queries": Case(ALIBI, QUERIES, WHOLE, backend=None),
    "whole": Case(ALIBI, WHOLE, captured={"slope": FIRST}, backend=None),
    "a part of a call": Case(ALIBI, HEADS, captured={"slope": FIRST}, starts={"h": 4, "b": 1}),
    "two dimensions": Case(BIAS, (Shard(0), Shard(1)), captured={"t": (Shard(0), Shard(1))}, mesh=(2, 1)),
    "the other two": Case(BIAS, (Shard(0), Shard(1)), captured={"z": (Replicate(), Shard(0))}, mesh=(1, 2)),
    "heads twice": Case(ALIBI, (Shard(1), Shard(1)), captured={"slope": (Replicate(), Shard(0))}, mesh=(2, 1)),
    "gradient from elsewhere": Case(CAUSAL, HEADS, d_o=QUERIES),
}  # fmt: skip


Ran = tuple[list[Found], list[str], dict[str, Any]]


def _everything() -> Ran:
    return all_compared(list(CASES.values())), told(_refusals), _more()


@pytest.fixture(scope="module")
def ran() -> list[Ran]:
    """All of it by two ranks of their own, which start once."""
    ranks = Ranks(2, seconds=200)
    try:
        return ranks.run(_everything)
    finally:
        ranks.end()


@pytest.fixture(scope="module")
def found(ran: list[Ran]) -> dict[str, Found]:
    first, second = (each[0] for each in ran)
    assert [each.placements for each in first] == [each.placements for each in second]
    return dict(zip(CASES, first, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process(name: str, found: dict[str, Found]) -> None:
    assert max(found[name].errors.values()) <= 2e-6, found[name].errors


def test_results_lie_where_the_inputs_do(found: dict[str, Found]) -> None:
    def where(name: str, *results: str) -> list[Any]:
        return [found[name].placements[result] for result in results]

    assert where("batch", "o", "lse", "dq", "dk", "dslope") == [BATCH, BATCH, BATCH, BATCH, SUM]
    assert where("heads", "o", "lse", "dk", "dslope") == [HEADS, HEADS, HEADS, FIRST]
    assert where("heads, captured whole", "dv", "dslope") == [HEADS, SUM]
    assert where("heads that share keys", "o", "dk", "dv") == [HEADS, SUM, SUM]
    assert where("bias by heads", "dt", "dz") == [LAST, FIRST]
    assert where("bias by queries", "o", "dk", "dt", "dz") == [QUERIES, SUM, QUERIES, SUM]
    assert where("whole", "o", "dslope") == [WHOLE, WHOLE]
    assert where("two dimensions", "o", "dt", "dz") == [(Shard(0), Shard(1))] * 2 + [(Partial(), Partial())]


def _refusals() -> list[Callable[[], Any]]:
    mesh, other = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), init_device_mesh("cpu", (1, 2))
    op, hkv = (flashgen.loads(text, backend="reference") for text in (ALIBI, BIAS))
    x = torch.zeros(2, 4, 6, 16)
    q, rows, columns = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (1, 2, 3))
    slope = torch.zeros(4)
    one, six, three = (distribute_tensor(torch.zeros(2, n, 6, 16), mesh, [Shard(1)]) for n in (1, 6, 3))
    v = distribute_tensor(torch.zeros(2, 1, 6, 24), mesh, [Replicate()])
    dropped = flashgen.loads(DROPPED, backend="reference")
    lone, of_ints = torch.zeros(1), one.to(torch.int32)
    packed = distribute_tensor(torch.zeros(9, 1, 16), mesh, [Shard(1)])
    ends = torch.tensor([0, 10], dtype=torch.int32)
    t, z = torch.zeros(2, 4, 6, 6), torch.zeros(1)
    return [
        lambda: op(rows, rows, rows, slope=slope),
        lambda: op(columns, columns, columns, slope=slope),
        lambda: op(rows, q, q, slope=slope),
        lambda: op(q, x, q, slope=slope),
        lambda: op(q, q, q, slope=slope.clone().requires_grad_()),
        lambda: op(q, q, q, slope=distribute_tensor(slope, other, [Replicate(), Replicate()])),
        lambda: op(six, three, three, slope=torch.zeros(6)),
        lambda: hkv(q, one, v, t=t, z=z),
        lambda: op.decode(q, q, q, 6, slope=slope),
        lambda: op.reference(q, q, q, slope=slope),
        lambda: _penalty(op, q.detach().requires_grad_(), slope),
        lambda: op(q, q, q, slope=torch.zeros(3)),
        # One head, which one rank holds.
        lambda: op(one, one, one, slope=slope),
        lambda: op(of_ints, of_ints, of_ints, slope=lone),
        lambda: dropped(one, one, one, slope=lone, dropout_p=1.0),
        lambda: op.varlen(packed, packed, packed, ends, ends, slope=lone),
        lambda: op(one, one, one, slope=lone),
        lambda: op(q, q, q, slope=slope),
    ]


def _penalty(op: Any, q: Any, slope: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(op(q, q, q, slope=slope).sum(), q, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), q)


def test_what_cannot_be_computed_from_shards_is_named(ran: list[Ran]) -> None:
    first, second = (each[1] for each in ran)
    assert first == second
    expected = [
        "ValueError: 'k' is sharded along mesh dimension 'cp' by Shard(dim=2), which is its sequence: flashgen.distri",
        "ValueError: 'q' is sharded along mesh dimension 'cp' by Shard(dim=3); q, k and v may be sharded by",
        "ValueError: q is sharded by queries along mesh dimension 'cp', and 'k' by heads",
        "TypeError: 'k' is no DTensor, but others of q, k and v are",
        "TypeError: 'slope' requires a gradient and is no DTensor",
        "ValueError: 'slope' is on",
        "ValueError: 6 query heads of 3 key/value heads, over 2 ranks: a rank would get a part of a group",
        "ValueError: 4 query heads of 1 key/value heads, over 2 ranks: ranks share key/value heads, and 'biased' reads",
        "TypeError: calls of 'decode' take no DTensors: pass what each rank has (to_local())",
        "TypeError: references take no DTensors",
        "TypeError: derivatives of gradients, and tangents, take no DTensors",
        "ValueError: tensor 'slope' has shape [3]; the spec declares [H] = [4]",
        "ValueError: tensor 'slope' has shape [4]; the spec declares [H] = [1]",
        "TypeError: q, k and v are torch.int32; 'slopes' is built for",
        "ValueError: 'dropout_p' is 1.0; a drop probability lies in [0, 1)",
        "ValueError: 'cu_seqlens_q' ends at 10, but q has 9 rows",
        "nothing",
        "nothing",
    ]
    for said, wanted in zip(first, expected, strict=True):
        assert said.startswith(wanted), said


def _more() -> dict[str, Any]:
    """Ragged batches, a seed that ranks draw apart, autocast, a compiled graph; and what is sent meanwhile."""
    mesh = init_device_mesh("cpu", (2,))
    op: Any = flashgen.loads(ALIBI)
    generator = torch.Generator().manual_seed(5)
    slope = torch.rand(4, generator=generator)
    found: dict[str, Any] = {}

    q, d_o = torch.randn(2, 30, 4, 16, generator=generator)
    k, v = torch.randn(2, 30, 2, 16, generator=generator)
    starts = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, slope)]
    o, lse = op.varlen(*leaves[:3], starts, starts, slope=leaves[3], return_lse=True)
    truth = [o, lse, *torch.autograd.grad((o * d_o).sum() + lse.sum(), leaves)]
    dims = (1, 1, 1, 0)
    placed = (distribute_tensor(x, mesh, [Shard(dim)]) for x, dim in zip((q, k, v, slope), dims, strict=True))
    spread = [x.requires_grad_() for x in placed]
    o, lse = op.varlen(*spread[:3], starts, starts, slope=spread[3], return_lse=True)
    own = [o, lse, *torch.autograd.grad((o * distribute_tensor(d_o, mesh, [Shard(1)])).sum() + lse.sum(), spread)]
    found["varlen"] = max(float((x - y.full_tensor()).abs().max()) for x, y in zip(truth, own, strict=True))

    dropped = flashgen.loads(DROPPED)
    torch.manual_seed(100 + mesh.get_rank())
    x = distribute_tensor(torch.ones(2, 4, 9, 16), mesh, [Replicate()])
    o = dropped(x, x, x, slope=torch.zeros(4))
    found["seed"] = o.to_local()  # type: ignore[attr-defined]

    heads = [distribute_tensor(torch.randn(2, 4, 9, 16, generator=generator), mesh, [Shard(1)]) for _ in range(3)]
    learned = distribute_tensor(slope, mesh, [Shard(0)])
    for each in (*heads, learned):
        each.requires_grad_()
    with CommDebugMode() as sent:  # type: ignore[no-untyped-call]
        o = op(*heads, slope=learned)
        o.backward(o.detach())
    found["sent"] = sent.get_total_counts()
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = str(op(*heads, slope=learned).dtype)

    def doubled(q: Any, k: Any, v: Any, slope: Any) -> Any:
        return op(q * 2.0, k, v, slope=slope)

    compiled: Any = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    eager = op(heads[0] * 2.0, heads[1], heads[2], slope=learned)
    o = compiled(*heads, learned)
    pairs = [(o, eager)]
    pairs += zip(*(torch.autograd.grad(each.sum(), (*heads, learned)) for each in (o, eager)), strict=True)
    found["compiled"] = max(float((x - y).full_tensor().abs().max()) for x, y in pairs)
    return found


def test_what_else_goes_with_dtensors(ran: list[Ran]) -> None:
    first, second = (each[2] for each in ran)
    for each in (first, second):
        assert each["varlen"] < 1e-5
        assert each["compiled"] < 1e-5
        assert each["sent"] == 0
        assert each["autocast"] == "torch.bfloat16"
    assert torch.equal(first["seed"], second["seed"])
