"""``flashgen.nn.Attention``: what it owns, what it begins with, and what PyTorch does with modules."""

# Parameters are attributes of a module, which mypy takes for modules.
# mypy: disable-error-code="operator,union-attr,call-overload,assignment"

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flashgen
from flashgen.nn import Attention

LEARNED = """
attention learned {
    head_dim 16
    tensor slope: f32[H] grad
    tensor table: f32[2 * Nk - 1, Hkv] grad
    tensor extra: f32[B, Nk] grad
    tensor sink: f32[H] grad
    param gain: f32 = 1.5 grad
    score gain * s - slope[h] * abs(i - j) + table[i - j + Nk - 1, hkv] + extra[b, j]
    weights softmax(sink = sink[h])
    dropout 0.5
}
"""


@pytest.fixture(scope="module")
def op() -> flashgen.op.op.AttentionOp:
    return flashgen.loads(LEARNED)


@pytest.fixture
def module(op: flashgen.op.op.AttentionOp) -> Attention:
    torch.manual_seed(0)
    return Attention(op, heads=4, kv_heads=2, sizes={"Nk": 10})


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 10, 16), (2, 2, 10, 16), (2, 2, 10, 16), (2, 10))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_learned_values_whose_shapes_are_known_are_parameters(module: Attention) -> None:
    shapes = {name: tuple(x.shape) for name, x in module.named_parameters()}
    assert shapes == {"slope": (4,), "table": (19, 2), "sink": (4,), "gain": (1,)}
    torch.testing.assert_close(module.slope.detach(), torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]))
    assert module.gain.item() == 1.5
    assert not module.sink.any()
    assert 0.005 < float(module.table.detach().std()) < 0.05


def test_outputs_and_gradients_are_those_of_the_op(module: Attention, op: flashgen.op.op.AttentionOp) -> None:
    q, k, v, extra = inputs()
    module(q, k, v, extra=extra, seed=3).square().sum().backward()
    learned = {name: x.detach().clone().requires_grad_() for name, x in module.named_parameters()}
    values = {**learned, "gain": learned["gain"].reshape(())}
    op(q, k, v, extra=extra, seed=3, **values).square().sum().backward()
    for name, x in module.named_parameters():
        torch.testing.assert_close(x.grad, learned[name].grad, msg=name)


def test_nothing_is_dropped_in_eval(module: Attention) -> None:
    *qkv, extra = inputs()
    assert not torch.equal(module(*qkv, extra=extra, seed=1), module(*qkv, extra=extra, seed=2))
    module.eval()
    assert torch.equal(module(*qkv, extra=extra, seed=1), module(*qkv, extra=extra, seed=2))


def test_a_module_is_copied_stored_and_pickled(module: Attention) -> None:
    *qkv, extra = inputs()
    module.eval()
    truth = module(*qkv, extra=extra)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.slope is not module.slope
        assert torch.equal(other(*qkv, extra=extra), truth)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    fresh = Attention(module.op, heads=4, kv_heads=2, sizes={"Nk": 10}).eval()
    assert not torch.equal(fresh(*qkv, extra=extra), truth)
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(fresh(*qkv, extra=extra), truth)


def test_parameters_of_another_type_are_read_in_the_declared_one(module: Attention) -> None:
    *qkv, extra = inputs()
    module.eval().to(torch.bfloat16)
    assert module.slope.dtype is torch.bfloat16
    module(*qkv, extra=extra).sum().backward()
    assert module.table.grad is not None
    assert module.table.grad.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*:UserWarning:torch")
def test_a_module_compiles_as_one_graph(module: Attention) -> None:
    torch._dynamo.reset()
    *qkv, extra = inputs()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(*qkv, extra=extra, seed=7).sum().backward()
    found = {name: x.grad.clone() for name, x in module.named_parameters() if x.grad is not None}
    assert len(found) == 4
    module.zero_grad()
    module(*qkv, extra=extra, seed=7).sum().backward()
    for name, x in module.named_parameters():
        torch.testing.assert_close(found[name], x.grad)


def test_initial_values_are_numbers_tensors_or_functions(op: flashgen.op.op.AttentionOp) -> None:
    module = Attention(
        op,
        heads=4,
        sizes={"Nk": 3},
        initial={"slope": torch.arange(4.0), "gain": 2, "sink": nn.init.ones_, "table": torch.ones(5, 4)},
    )
    assert module.slope.tolist() == [0, 1, 2, 3]
    assert module.gain.tolist() == [2]
    assert module.sink.tolist() == [1] * 4
    assert bool((module.table == 1).all())
    with torch.no_grad():
        module.slope.zero_()
    module.reset_parameters()
    assert module.slope.tolist() == [0, 1, 2, 3]


def test_a_table_over_lengths_is_an_argument_unless_they_are_given(op: flashgen.op.op.AttentionOp) -> None:
    assert "table" not in dict(Attention(op, heads=4).named_parameters())


@pytest.mark.parametrize("learned", ["", "tensor slope: f32[H] grad  score s + slope[h]"])
def test_calls_have_the_heads_of_the_module(learned: str) -> None:
    own = flashgen.loads(f"attention of_heads {{ head_dim 16  {learned} }}")
    q, k, v = (torch.randn(1, heads, 5, 16) for heads in (4, 2, 2))
    module = Attention(own, heads=4, kv_heads=2)
    module(q, k, v)
    module(q[:, 2:], k[:, 1:], v[:, 1:], h_start=2, h_total=4)
    for heads, kv_heads, words in (
        (8, 2, "'q' has 4 heads, the module heads=8"),
        (4, None, "'k' has 2 heads, the module kv_heads=4"),
    ):
        with pytest.raises(ValueError, match=words):
            Attention(own, heads=heads, kv_heads=kv_heads)(q, k, v)


def test_what_is_wrong_is_named(op: flashgen.op.op.AttentionOp, specs: Path) -> None:
    with pytest.raises(ValueError, match=r"owns no 'slop'; it owns 'slope', 'sink' and 'gain'"):
        Attention(op, heads=4, initial={"slop": 0.0})
    with pytest.raises(ValueError, match=r"'slope' has shape \[4\]; a tensor of shape \[5\] came"):
        Attention(op, heads=4, initial={"slope": torch.zeros(5)})
    with pytest.raises(ValueError, match="heads is 4 and kv_heads 3"):
        Attention(op, heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="the head dimension is 32; 'learned' is built for 16"):
        Attention(op, heads=4, head_dim=32)
    with pytest.raises(ValueError, match="'N' is not among"):
        Attention(op, heads=4, sizes={"N": 3})
    for arguments, words in (
        ({"heads": 4.0}, "'heads' must be an int, not float"),
        ({"heads": 4, "kv_heads": "2"}, "'kv_heads' must be an int, not str"),
        (
            {"heads": 4, "head_dim": (16, 16, 16)},
            r"'head_dim' is \(16, 16, 16\); an int, or two",
        ),
        ({"heads": 4, "sizes": {"Nk": 3.5}}, "'Nk' must be an int, not float"),
        (
            {"heads": 4, "initial": {"slope": "x"}},
            "initial: 'slope' is given as str; a number, a tensor, or",
        ),
        ({"heads": 4, "initial": 0.1}, "initial values are given by their names, as in {'slope': 0.1}, not as 0.1"),
        ({"heads": 4, "sizes": ["Nk", 8]}, "sizes are given by their names, as in {'Nk': 1024}"),
        ({"heads": 4, "dtype": torch.int32}, "'dtype' is torch.int32; what is learned has a floating one"),
        ({"heads": 4, "dtype": "bf16"}, "'dtype' is 'bf16'; what is learned"),
    ):
        with pytest.raises(TypeError, match=words):
            Attention(op, **arguments)
    with pytest.raises(ValueError, match="sizes: 'Nk' is -3; it must not be negative"):
        Attention(op, heads=4, sizes={"Nk": -3})
    with pytest.raises(TypeError, match="'slope' is a Parameter of this module"):
        Attention(op, heads=4)(*inputs()[:3], slope=torch.zeros(4))
    with pytest.raises(TypeError, match="must be a str or a Path, not NoneType"):
        Attention(None, heads=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="param 'ell' has no default"):
        Attention(specs / "gaussian_regression.attn", heads=1)
    with pytest.raises(ValueError, match="const: 'learned' is loaded already"):
        Attention(op, heads=4, const={"x": 1})
